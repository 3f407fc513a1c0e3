"""Rounds in which clients add the noise of central privacy: what the server gets is noisy already."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from strategies import FedAvg, RunError, messages
from strategies.core.conflicts import ConflictError
from strategies.secure import masks_updates
from strategies.secure.graph import least_of, terms_for
from strategies.secure.masking import SecureSumError
from strategies.secure.mod import ONLY_MASKED, noise_of_sum

Make = Callable[..., Any]

CLIENTS, SIZE, NORM, Z = 9, 20_000, 0.5, 0.8
NOISY = {
    "dp": "central",
    "dp_mechanism": "distributed",
    "dp_clipping_norm": NORM,
    "dp_noise_multiplier": Z,
    "client_weights": "uniform",
    "secure_sums": True,
    "server_lr": 1.0,
}
ERROR = 4 / (2 * SIZE) ** 0.5  # four standard errors of a deviation


def goes_away(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
    """Fail before training where the node's config says so."""
    record = message.content.get(messages.SECURE)
    if record is not None and record["stage"] == "masked" and context.node_config.get("goes"):
        raise RuntimeError("went away")
    return call_next(message, context)


@pytest.fixture
def run(federation: Make, train_config: Make, values_of: Make) -> Make:
    """Run rounds of clients that are where the model is, so that it moves by the noise alone."""

    def make(
        *,
        rounds: int = 1,
        gone: int = 0,
        repeatable: bool = True,
        state: Any = None,
        device: bool = False,
        node: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[np.ndarray, Any, dict[int, Any]]:
        grid = federation([0.0] * CLIENTS, [1] * CLIENTS, mods=(goes_away, masks_updates))
        for partition in range(CLIENTS):
            of_node = grid.node(partition)
            of_node.context.node_config.update(goes=partition < gone, **(node or {}))
            if device:
                of_node.context = Context(1, of_node.node_id, of_node.context.node_config, RecordDict(), {})
        strategy = FedAvg(**{**NOISY, **options})
        strategy.run_options.deterministic_noise = repeatable
        states: dict[int, Any] = {}
        strategy.run_options.observer = lambda progress: states.update(
            {progress.aggregation: strategy.state()}
        )
        if state is not None:
            strategy.restore(state)
        model = ArrayRecord({"w": Array(np.zeros(SIZE))})
        result = strategy.start(grid, model, rounds, train_config=train_config())
        return np.array(values_of(result.arrays)), result.train_metrics_clientapp, states

    return make


@pytest.mark.parametrize(("gone", "there"), [(0, 9), (2, 7), (3, 6)])
def test_the_model_has_the_noise_of_those_in_the_sum(run: Make, gone: int, there: int) -> None:
    noise, metrics, _ = run(gone=gone)
    assert metrics[1]["participants"] == there
    assert "train-loss" not in metrics[1]  # whose sum would have no noise
    # 6 of 9 bring z S to the sum of the updates, which is divided by how many are in it.
    assert noise.std() == pytest.approx(Z * NORM * (there / 6) ** 0.5 / there, rel=ERROR)


def test_without_the_noise_that_was_asked_for_the_model_stays(
    run: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError, match="no client's work was accepted"):
        run(gone=4)
    assert "secure sum: 5 masked updates came, and a sum is of 6 or more" in caplog.text


def test_a_client_knows_the_noise_that_its_sum_has_at_least(federation: Make, train_config: Make) -> None:
    found: list[Any] = []

    def listens(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        asked = message.content.get(messages.SECURE)
        if asked is not None and asked["stage"] == "masked" and not found:
            found.append(noise_of_sum(message, context))
            asked["weight"] = 4.0  # then its update may be four times as long
            found.append(noise_of_sum(message, context))
            asked["weight"] = 1.0
            asked["metrics"] = ["train-loss"]
            with pytest.raises(SecureSumError, match="metrics have no noise in a sum"):
                noise_of_sum(message, context)
            del asked["metrics"]
        return call_next(message, context)

    grid = federation([0.0] * CLIENTS, [1] * CLIENTS, mods=(listens, masks_updates))
    FedAvg(**NOISY).start(grid, ArrayRecord({"w": Array(np.zeros(50))}), 1, train_config=train_config())
    threshold = terms_for(CLIENTS).threshold
    # 6 of 9 bring z S; for sure there are this client and those whose shares open its sum.
    assert found == pytest.approx([Z * ((1 + threshold) / 6) ** 0.5 / part for part in (1, 4)], rel=1e-3)


def test_rounds_draw_new_noise_and_a_run_that_goes_on_the_same(run: Make) -> None:
    whole, _, states = run(rounds=3)
    assert whole.std() > 1.4 * run(rounds=1)[0].std()
    assert (run(rounds=3, state=states[2])[0] == whole).all()


@pytest.mark.parametrize(
    "options",
    [{"repeatable": False}, {"node": {ONLY_MASKED: True}}, {"device": True}],
    ids=["in a real run", "by the device's choice", "on a device, whatever the server asks for"],
)
def test_on_devices_nobody_can_repeat_the_noise(run: Make, options: dict[str, Any]) -> None:
    first, second = run(**options)[0], run(**options)[0]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / SIZE**0.5


def test_a_random_number_of_clients_is_divided_by_the_expected_one(run: Make) -> None:
    noise, metrics, _ = run(participation="poisson", fraction_train=0.7)
    drawn = metrics[1]["participants"]
    least = least_of(drawn, terms_for(drawn).threshold)
    assert noise.std() == pytest.approx(Z * NORM * (drawn / least) ** 0.5 / (0.7 * CLIENTS), rel=ERROR)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"secure_sums": False}, {"dp", "dp_mechanism", "secure_sums"}),
        ({"dp_clipping_norm": 0.0}, {"dp", "dp_mechanism", "dp_clipping_norm"}),
        ({"dp_noise_multiplier": 0.0}, {"dp", "dp_mechanism", "dp_noise_multiplier"}),
        ({"client_weights": "samples"}, {"dp", "client_weights"}),
    ],
)
def test_noise_that_hides_nothing_is_refused(options: dict[str, Any], keys: set[str]) -> None:
    with pytest.raises(ConflictError) as caught:
        FedAvg(**{**NOISY, **options})
    assert set(caught.value.keys) == keys


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp_noise_multiplier": 1e-9}, "has noise of 3 of [0-9]+ levels from each, too few"),
        ({"dp_noise_multiplier": 1e6}, "has [0-9]+ levels, and rounding to these may double an update"),
        ({"participation": "turns", "fraction_train": 0.25}, "secure_sums: 2 clients in a sum"),
    ],
)
def test_noise_that_the_sum_has_no_room_for_is_refused_before_a_client_trains(
    run: Make, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunError, match=said):
        run(**options)


def test_a_sum_that_was_opened_and_does_not_count_was_released_all_the_same(federation: Make) -> None:
    def lies(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        if (
            reply.has_content()
            and messages.MASKED in reply.content
            and not context.node_config["partition-id"]
        ):
            values = reply.content[messages.MASKED]["values"].numpy().copy()
            values[0] += 1  # the sum of the weights is another
            reply.content[messages.MASKED] = ArrayRecord({"values": Array(values)})
        return reply

    grid = federation([0.0] * CLIENTS, [1] * CLIENTS, mods=(lies, masks_updates))
    strategy = FedAvg(**NOISY)
    with pytest.raises(RunError, match="the masks don't cancel out"):
        strategy.start(grid, ArrayRecord({"w": Array(np.zeros(3))}), num_rounds=2)
    assert [(each.accepted, each.opened) for _, each in strategy.session.client_stats.items()] == [
        (0, 2)
    ] * CLIENTS
    again = FedAvg(**NOISY)
    again.restore(strategy.state())
    assert [each.opened for _, each in again.session.client_stats.items()] == [2] * CLIENTS
