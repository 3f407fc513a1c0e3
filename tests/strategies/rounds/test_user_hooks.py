"""A subclass's own hooks and loop: who isn't asked, whose words, and metrics with the names of ours."""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from strategies import AsyncFedAvg, FedAvg, FedNova, RunError
from strategies.clock import WallClock
from strategies.core.capabilities import Capabilities
from strategies.flower import messages
from strategies.testing import MemoryGrid


class Dropping(FedAvg):
    """Doesn't ask client 2, which the scheme has drawn."""

    def configure_train(self, *args: Any) -> Iterable[Message]:
        return [each for each in super().configure_train(*args) if self._index(each) != 2]

    def _index(self, request: Message) -> int:
        by_node = {client.node_id: client.index for client in self.session.clients}
        return by_node[request.metadata.dst_node_id]


@pytest.mark.parametrize("options", [{}, {"round_deadline": 1e6}])
def test_a_client_that_a_hook_does_not_ask_is_no_failure(
    federation, model, values_of, train_config, caplog, options
):
    # Of sizes 1, 2, 5 the first two take part: (1/3) · 1 + (2/3) · .5 = 2/3, as if they were the only ones.
    grid = federation()
    strategy = Dropping(**options)
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        result = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == pytest.approx([5 / 3], rel=1e-15)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["participants"], metrics["failures"]) == (2, 0)
    assert [strategy.session.client_stats[index].tasks for index in range(3)] == [1, 1, 0]
    sent = [each for each in grid.requests() if each.metadata.message_type == messages.TRAIN]
    assert len(sent) == 2
    assert metrics["bytes-down"] == sum(map(messages.total_bytes, sent))
    assert "left out" not in caplog.text


def test_a_round_that_asks_nobody_keeps_the_model(federation, model, values_of):
    class Sometimes(FedAvg):
        def configure_train(self, server_round: int, *args: Any) -> Iterable[Message]:
            made = list(super().configure_train(server_round, *args))
            return [] if server_round == 2 else made

    result = Sometimes().start(federation(), model(1.0), num_rounds=2)
    counts = [result.train_metrics_clientapp[number] for number in (1, 2)]
    assert [(each["participants"], each["failures"]) for each in counts] == [(3, 0), (0, 0)]
    assert values_of(result.arrays) == [0.625]


def to_nodes(
    strategy: FedAvg, nodes: Iterable[int], arrays: ArrayRecord, config: ConfigRecord
) -> list[Message]:
    """Return requests as Flower's users make them."""
    record = RecordDict({strategy.arrayrecord_key: arrays, strategy.configrecord_key: config})
    return list(strategy._construct_messages(record, list(nodes), messages.TRAIN))


class OwnDraw(FedAvg):
    """Asks the last two clients, without the draw of the library."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return to_nodes(self, list(grid.get_node_ids())[1:], arrays, config)


class OneMore(FedAvg):
    """Asks client 2 beside those that the library draws."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        more = to_nodes(self, list(grid.get_node_ids())[2:], arrays, config)
        return [*super().configure_train(server_round, arrays, config, grid), *more]


@pytest.mark.parametrize(
    ("kind", "options", "asked", "updated_model"),
    [
        (OwnDraw, {}, [1, 2], (2 * 0.5 - 5) / 7),
        (OwnDraw, {"client_weights": "uniform"}, [1, 2], (0.5 - 1) / 2),
        (OwnDraw, {"round_deadline": 1e6}, [1, 2], (2 * 0.5 - 5) / 7),
        (OneMore, {"participation": "fixed:0"}, [0, 2], (1 - 5) / 6),
    ],
)
def test_all_clients_that_a_hook_asks_count(
    federation, model, values_of, train_config, kind, options, asked, updated_model
):
    grid, strategy = federation(), kind(**options)
    result = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == pytest.approx([1 + updated_model], rel=1e-7)
    assert result.train_metrics_clientapp[1]["participants"] == 2
    assert sorted(grid.asked(messages.TRAIN)) == asked
    assert [strategy.session.client_stats[index].tasks for index in range(3)] == [
        int(i in asked) for i in range(3)
    ]
    assert sorted(grid.asked(messages.EVALUATE)) == [0, 1, 2]


def test_a_round_with_a_draw_of_a_hooks_own_begins_from_its_own_model(federation, model, train_config):
    # With a momentum of the server the move is from the model of the round, not of the last that the library drew.
    class InRound2(FedAvg):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            if server_round == 2:
                return to_nodes(self, grid.get_node_ids(), arrays, config)
            return super().configure_train(server_round, arrays, config, grid)

    models = [
        kind(server_optimizer="momentum").start(
            federation(), model(1.0), num_rounds=3, train_config=train_config()
        )
        for kind in (InRound2, FedAvg)
    ]
    assert models[0].arrays["w"].numpy() == pytest.approx(models[1].arrays["w"].numpy(), rel=1e-6)


# ---- A loop of its own -------------------------------------------------------------------------------------------


def own_loop(kind: type[FedAvg]) -> type[FedAvg]:
    """Return a subclass with the loop of Flower's strategies in place of the library's."""
    return type("Logging", (kind,), {"start": Strategy.start})


class Averaging(FedAvg):
    """Averages models by NumPy, whose means of float32 by a list of weights are float64."""

    factor = 1.0

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        found = [each.content for each in replies]
        sizes = [float(each["metrics"]["num-examples"]) for each in found]
        means = {
            name: np.average([each["arrays"][name].numpy() for each in found], axis=0, weights=sizes)
            for name in found[0]["arrays"]
        }
        return ArrayRecord({name: Array(self.factor * mean) for name, mean in means.items()}), None


def test_means_of_float64_by_a_hook_keep_the_models_dtype(federation, model, values_of):
    expected = FedAvg().start(federation(), model(1.0, dtype="float32"), num_rounds=3)
    result = Averaging().start(federation(), model(1.0, dtype="float32"), num_rounds=3)
    assert result.arrays["w"].dtype == "float32"
    assert values_of(result.arrays) == pytest.approx(values_of(expected.arrays), rel=1e-6)


def test_a_model_of_a_hook_that_is_none_ends_the_run_in_its_own_round(federation, model):
    strategy = type("Own", (Averaging,), {"factor": np.nan})()
    with pytest.raises(
        ValueError, match=r"^Own\.aggregate_train made no model to train: its arrays hold values"
    ):
        strategy.start(federation(), model(1.0, dtype="float32"), num_rounds=1)


class Halving(FedAvg):
    """Halves the model that a round has made: in the arrays themselves, or in new ones."""

    in_place = False

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        halved = Array(0.5 * arrays["w"].numpy())
        if not self.in_place:
            return ArrayRecord({"w": halved}), metrics
        arrays["w"].data = halved.data
        return arrays, metrics


def test_bytes_that_a_hook_replaces_in_the_models_arrays_are_the_next_rounds_model(
    federation, model, values_of
):
    in_place = type("InPlace", (Halving,), {"in_place": True})
    for kinds in ((Halving, in_place), (own_loop(Halving), own_loop(in_place))):
        copied, replaced = (  # with a step of 1 the model that the updates begin with cancels out
            kind(fraction_evaluate=0.0, server_lr=0.5).start(federation(), model(1.0), num_rounds=3)
            for kind in kinds
        )
        assert values_of(replaced.arrays) == values_of(copied.arrays)


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_functions_of_metrics_may_return_none_as_in_flower(federation, model, kind):
    def nothing(contents: list[RecordDict], key: str) -> Any:
        return None

    strategy = kind(train_metrics_aggr_fn=nothing, evaluate_metrics_aggr_fn=nothing)
    result = strategy.start(federation(), model(1.0), num_rounds=1)
    assert result.train_metrics_clientapp[1]["failures"] == 0
    assert result.evaluate_metrics_clientapp[1] == {}


def test_a_start_of_its_own_is_not_called_a_wrapper(federation, model, caplog):
    kind = own_loop(FedAvg)
    assert kind.capabilities.own_start
    assert not Capabilities.of(FedAvg).own_start
    assert not Capabilities.of(AsyncFedAvg).own_start
    result = kind().start(federation(), model(1.0), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [0.625]
    said = "a loop of its own, such as the start\\(\\) of Logging,"
    for made, text in (
        (own_loop(FedNova)(), f"Logging: .*, which {said} knows nothing of; call super"),
        (kind(compression="int8"), f"compression = 'int8': {said} can't read compressed updates"),
        (
            kind(over_select=0.5, fraction_train=0.5, participation="uniform", clock=WallClock()),
            f"{said} waits for all",
        ),
        (kind(availability="diurnal:0.5"), "virtual time doesn't pass in a loop .* of Logging; call super"),
    ):
        with pytest.raises(RunError, match=text):
            made.start(federation(), model(1.0), num_rounds=1)
    assert "wrapper" not in caplog.text


def test_a_start_of_its_own_that_calls_ours_has_our_loop(federation, model):
    class Calling(FedNova):
        def start(self, *args: Any, **options: Any) -> Any:
            return super().start(*args, **options)

    assert Calling().start(federation(), model(1.0), num_rounds=1).train_metrics_clientapp[1]["failures"] == 0


@pytest.mark.parametrize("kind", [OneMore, OwnDraw])
def test_requests_of_a_hooks_own_count_in_a_start_of_its_own(
    kind, federation, model, train_config, values_of
):
    def start(made: FedAvg) -> Any:
        return made.start(federation(), model(1.0), num_rounds=1, train_config=train_config())

    result = start(own_loop(kind)(participation="fixed:0"))
    assert result.train_metrics_clientapp[1]["participants"] == 2
    expected = values_of(start(kind(participation="fixed:0")).arrays)
    assert values_of(result.arrays) == pytest.approx(expected, rel=1e-12)


def test_a_server_optimizer_steps_from_the_model_that_configure_train_saw(
    federation, model, train_config, values_of
):
    def start(made: FedAvg) -> Any:
        return made.start(federation(), model(1.0), num_rounds=3, train_config=train_config())

    options = {"participation": "fixed:0", "server_optimizer": "momentum", "server_lr": 0.5}
    result = start(own_loop(OneMore)(**options))
    assert values_of(result.arrays) == pytest.approx(values_of(start(OneMore(**options)).arrays), rel=1e-6)
    with pytest.raises(RunError, match="dp = 'central' counts on its own draw"):
        start(own_loop(OneMore)(dp="central", client_weights="uniform", dp_clipping_norm=1.0))


# ---- Metrics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_clients_metrics_with_names_of_ours_are_kept_under_a_prefix(kind):
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        told = MetricRecord(
            {"num-examples": 1, "participants": 50.0, "contributions": 60.0, "failures": 70.0}
        )
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": told}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        told = MetricRecord({"num-examples": 1, "loss": 1.0, "time": 80.0, "importance": 90.0})
        return Message(RecordDict({"metrics": told}), reply_to=message)

    grid = MemoryGrid(app, [{"partition-id": i} for i in range(3)])
    initial = ArrayRecord({"w": Array(np.ones(2, np.float32))})
    strategy = kind(eval_every=1, norm_ratio_bound=0.0, observer=seen.append)
    result = strategy.start(grid, initial, num_rounds=3)
    trained, evaluated = result.train_metrics_clientapp[3], result.evaluate_metrics_clientapp[3]
    assert trained["participants" if kind is FedAvg else "contributions"] != 50.0
    theirs = [trained[f"train-{name}"] for name in ("participants", "contributions", "failures")]
    assert theirs == pytest.approx([50, 60, 70])
    assert trained["failures"] == 0
    assert (evaluated["evaluate-time"], evaluated["importance"]) == pytest.approx((80, 90))
    assert seen[-1].metrics["client-evaluate-time-mean"] == pytest.approx(80)
    assert seen[-1].clients["importance"] == pytest.approx([1 / 3] * 3)
    assert seen[-1].clients["evaluate-importance"] == [90.0] * 3


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_a_function_of_metrics_may_use_names_of_ours(federation, model, kind):
    def function(contents: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({"participants": 7, "train-participants": 8})

    result = kind(train_metrics_aggr_fn=function).start(
        federation(), model(1.0), num_rounds=3, train_config=ConfigRecord()
    )
    metrics = result.train_metrics_clientapp[3]
    assert metrics["participants" if kind is FedAvg else "contributions"] == 3
    assert (metrics["train-train-participants"], metrics["train-participants"]) == (7, 8)
