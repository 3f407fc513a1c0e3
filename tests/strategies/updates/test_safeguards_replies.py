"""What else a reply carries, and what it can do: running statistics, counters, records nobody asked for, metrics."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from strategies import AsyncFedAvg, FedAMP, FedAvg, FedBuff, FedFix, FedNova, messages
from strategies.flower.arrays import Layout
from strategies.testing import MemoryGrid
from strategies.updates.buffers import UNTRAINED, Buffers, UsualBuffers
from strategies.updates.pipeline import Bound, LocalModel
from tests.strategies.parts import client, safeguards

Spoil = Callable[[dict[str, Any], RecordDict], None]

KINDS = [FedAvg, FedBuff, AsyncFedAvg, FedFix]
# What honest client i says of mean and variance of its activations; all have trained on 10 batches.
MEANS, VARIANCES = (0.1, 0.2, 0.3, 0.4, 0.5), (1.0, 1.1, 0.9, 1.2, 1.0)


def model() -> dict[str, np.ndarray]:
    return {
        "weight": np.zeros(2, np.float32),
        "norm.running_mean": np.zeros(1, np.float32),
        "norm.running_var": np.ones(1, np.float32),
        "norm.num_batches_tracked": np.array(0, np.int64),
    }


def record(arrays: dict[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(values)) for name, values in arrays.items()})


def five(spoil: Spoil = lambda arrays, content: None, liars: Sequence[int] = (4,)) -> MemoryGrid:
    """Return five clients with running statistics; liars spoil their replies."""
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        metrics = {"partition-id": int(context.node_config["partition-id"]), "num-examples": 10}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        arrays = {name: np.array(a.numpy()) for name, a in message.content.array_records["arrays"].items()}
        arrays["weight"] += np.float32(0.5)
        arrays["norm.running_mean"][:] = MEANS[i]
        arrays["norm.running_var"][:] = VARIANCES[i]
        arrays["norm.num_batches_tracked"] += 10
        content = RecordDict({"metrics": MetricRecord({"num-examples": 10, "train-loss": 1.0})})
        if messages.PATH in message.content.config_records["config"]:
            content[messages.APPLIED] = ConfigRecord({messages.PATH: 1.0})
        if i in liars:
            spoil(arrays, content)
        content["arrays"] = record(arrays)
        return Message(content, reply_to=message)

    return MemoryGrid(app, [{"partition-id": i} for i in range(5)])


def run(kind: Any, grid: MemoryGrid, rounds: int = 12, **options: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"buffer_size": 2} if kind is FedBuff else {}
    options = {"safeguards": "on", "fraction_evaluate": 0.0, "server_lr": 0.2} | own | options
    result = kind(**options).start(grid, record(model()), num_rounds=rounds, timeout=5.0)
    return {name: array.numpy() for name, array in result.arrays.items()}


# Running statistics and counters -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-1e6, -1e-9])
def test_a_negative_variance_refuses_the_reply(kind, value, caplog):
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        arrays["norm.running_var"][:] = value

    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        moved = run(kind, five(spoil), safeguards="off")
    assert 0.9 <= moved["norm.running_var"][0] <= 1.2
    assert f"its running variances go down to {value:.3g}; a variance is 0 or more" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("liars", "of_mean", "of_variance"),
    # Five spreads from the median: of all five, those of two liars among them, where the median is the largest honest
    # value and the spread the distance to the smallest.
    [
        ([0], 0.5 + 5 * 0.1, 0.2 + 5 * 0.1),
        ([4], 0.5 + 5 * 0.1, 0.2 + 5 * 0.1),
        ([0, 1], 0.5 + 5 * 0.2, 0.2 + 5 * 0.3),
    ],
    ids=["the fastest", "the slowest", "the two fastest"],
)
def test_false_running_statistics_move_them_by_the_spread_of_the_others(kind, liars, of_mean, of_variance):
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        arrays["norm.running_mean"][:] = 1e6
        arrays["norm.running_var"][:] = 1e6
        arrays["norm.num_batches_tracked"][...] = 10**15

    def models(safeguards: str) -> tuple[np.ndarray, ...]:
        """Return mean, variance and counter after each aggregation."""
        seen: list[ArrayRecord] = []
        run(
            kind,
            five(spoil, liars),
            20,
            safeguards=safeguards,
            observer=lambda progress: seen.append(progress.arrays),
        )
        names = [f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
        return tuple(np.array([float(arrays[name].numpy().ravel()[0]) for arrays in seen]) for name in names)

    mean, variance, batches = models("on")
    assert np.abs(mean).max() <= of_mean + 1e-6
    assert np.abs(variance - 1).max() <= of_variance + 1e-6
    assert 0 < batches.max() <= 20 * 10
    assert models("off")[0].max() > 1e4


def test_a_path_that_is_too_short_makes_an_update_count_for_no_more_than_its_length_may_be():
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        content[messages.APPLIED] = ConfigRecord({messages.PATH: 1e-9})

    # All updates are 0.5. The path counts as 1/5, so that s_eff is 0.84 and the update would count 0.84 · 5 times:
    # it counts 0.84 · 1.5 times, as norm-ratio-bound says.
    moved = run(FedNova, five(spoil), 1, server_lr=1.0)["weight"]
    assert moved == pytest.approx((4 * 0.84 + 0.84 * 1.5) / 5 * 0.5)
    assert run(FedNova, five(spoil), 1, server_lr=1.0, safeguards="off")["weight"][0] > 1e6


def test_honest_statistics_are_left_alone():
    on, off = (run(FedAvg, five(), 10, safeguards=mode) for mode in ("on", "off"))
    assert {name: values.tolist() for name, values in on.items()} == {n: v.tolist() for n, v in off.items()}


def test_a_personal_model_has_bounded_statistics_too():
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        arrays["norm.running_mean"][:] = 1e6

    assert abs(run(FedAMP, five(spoil), 3)["norm.running_mean"][0]) < 1.5


def test_bounds_by_hand():
    # Changes 1, 2, 3, 100: median 2.5, spread median(1.5, .5, .5, 97.5) = 1, five of them: from −2.5 to 7.5.
    buffers = Buffers(np.arange(2), np.array([False, True]), np.zeros(2, bool))
    changes = [(i, np.array([value, value])) for i, value in enumerate((1.0, 2.0, 3.0, 100.0))]
    usual = UsualBuffers(3)
    usual.bound(buffers, changes)
    assert [change[0] for _, change in changes] == [1, 2, 3, 7.5]
    changes = [(3, np.array([-50.0, -50.0]))]
    usual.bound(buffers, changes)  # the others' last ones are known: median 1.5, spread 1
    assert changes[0][1].tolist() == [-3.5, 0.0]  # a counter isn't lowered


def test_all_of_a_round_are_compared_and_between_rounds_the_last_of_32_clients():
    buffers, usual = Buffers(np.arange(1), np.zeros(1, bool), np.zeros(1, bool)), UsualBuffers(3)
    changes = [(i, np.array([0.0 if i < 25 else 100.0])) for i in range(41)]
    usual.bound(buffers, changes)  # 25 of 41 say 0; of the last 32 it would be half
    assert {float(change[0]) for _, change in changes} == {0.0}
    usual.observe(9, np.zeros(1))  # the first of those that are known, which is the latest now
    usual.bound(buffers, [(50, np.zeros(1))])
    assert usual.state()["buffers-of"] == [*range(11, 41), 9, 50]


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=9), st.floats(-1e30, 1e30), st.integers(0, 2**16))
def test_a_minority_of_liars_stays_near_the_honest(honest, lie, seed):
    liars = (len(honest) - 1) // 2
    changes = [(i, np.array([v])) for i, v in enumerate([*honest, *[lie] * liars])]
    UsualBuffers(3).bound(Buffers(np.arange(1), np.zeros(1, bool), np.zeros(1, bool)), changes)
    span = max(honest) - min(honest)
    low, high = min(honest) - 5 * span - 1e-9, max(honest) + 5 * span + 1e-9
    assert all(low <= change[0] <= high for _, change in changes)


def test_a_resumed_run_goes_on_with_the_changes_it_knew():
    buffers = Buffers(np.arange(1), np.zeros(1, bool), np.zeros(1, bool))
    usual, again = UsualBuffers(3), UsualBuffers(3)
    usual.bound(buffers, [(i, np.array([float(i)])) for i in range(40)])
    again.restore(usual.state())
    assert len(again) == 32
    first, second = [(1, np.array([1e9]))], [(1, np.array([1e9]))]
    usual.bound(buffers, first)
    again.bound(buffers, second)
    assert first[0][1] == second[0][1] < 1e3
    again.restore({})
    assert len(again) == 0


def test_the_norm_bound_is_for_running_statistics_as_well():
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        arrays["norm.running_mean"][:] = 3e6
        arrays["norm.running_var"][:] = 4e6

    bounded = run(FedAvg, five(spoil), 1, safeguards="off", update_norm_bound=0.5, server_lr=1.0)
    # Of the liar's change (3, 4)·10⁶ there remain (0.3, 0.4); the others' are shorter than 0.5.
    assert bounded["norm.running_mean"][0] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.3) / 5, rel=1e-5)
    assert bounded["norm.running_var"][0] == pytest.approx(1 + (0.0 + 0.1 - 0.1 + 0.2 + 0.4) / 5, rel=1e-5)
    assert bounded["norm.num_batches_tracked"] == 10
    assert bounded["weight"][0] == pytest.approx((0.5 / np.sqrt(0.5)) * 0.5, rel=1e-5)


def test_a_jump_of_the_statistics_alone_is_shortened_and_marked():
    layout = Layout.of(record(model()))
    base = layout.to_vector(record(model()))
    local = LocalModel(client(0), base.copy(), base, buffer_values=np.array([3.0, 5.0, 7.0]))
    Bound(1.25, Buffers.of(layout, UNTRAINED))(local)
    # Mean and variance jump by (3, 4), of which a quarter remains; the counter stays as it is.
    assert local.buffer_values is not None
    assert (local.bounded, local.buffer_values.tolist()) == (True, [0.75, 2.0, 7.0])
    assert local.model.tolist() == base.tolist()


def test_updates_wait_until_enough_are_known_of_norms_and_of_buffers():
    one, none = (Buffers(np.arange(n), np.zeros(n, bool), np.zeros(n, bool)) for n in (1, 0))
    guards = safeguards("on", norm_ratio=2.0)
    for index in range(2):
        guards.observe(LocalModel(client(index), np.ones(2), np.zeros(2)))
    assert [guards.needs_more_norms(clients, none) for clients in (2, 3)] == [False, True]
    guards.observe(LocalModel(client(2), np.ones(2), np.zeros(2)))
    assert [guards.needs_more_norms(3, buffers) for buffers in (none, one)] == [False, True]
    # Three are known: enough for one liar of five or seven, not for two of ten.
    assert [guards.needs_more_norms(clients, none) for clients in (5, 7, 8, 10, 1000)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    for index in (3, 4):
        guards.observe(LocalModel(client(index), np.ones(2), np.zeros(2)))
    assert not guards.needs_more_norms(1000, none)
    assert not safeguards("off", norm_ratio=2.0).needs_more_norms(3, one)


# Records that nobody asked for ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_record_that_nobody_asked_for_refuses_the_reply(kind, caplog):
    size = 2 << 20

    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        content["more"] = record({"zeros": np.zeros(size, np.uint8)})
        arrays["weight"] += 1e3

    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        moved = run(kind, five(spoil), safeguards="off")
    assert moved["weight"][0] < 20
    most = Layout.of(record(model())).most_bytes + (1 << 20)
    lines = [r.getMessage() for r in caplog.records if "its reply takes" in r.getMessage()]
    said = f"bytes; allowed are {most}, for the model, what was sent beside it, and 1 MiB"
    assert lines
    assert all(said in line for line in lines)
    assert all(size < int(line.split("its reply takes ")[1].split()[0]) < size + 2000 for line in lines)


@pytest.mark.parametrize("beside", ["fields", "metrics"])
def test_fields_and_metrics_count_too(beside, caplog):
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        if beside == "fields":
            content["more"] = ConfigRecord({"text": "x" * (2 << 20)})
        else:
            content["more"] = MetricRecord({f"m{i}": 0.5 for i in range(200_000)})

    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        run(FedAvg, five(spoil), 1)
    assert "left out client 4" in caplog.text


def test_a_small_record_is_let_be_and_its_bytes_are_reported():
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        content["more"] = record({"zeros": np.zeros(1000, np.uint8)})

    def bytes_up(grid: MemoryGrid) -> Any:
        result = FedAvg(fraction_evaluate=0.0).start(grid, record(model()), num_rounds=1, timeout=5.0)
        return result.train_metrics_clientapp[1][messages.BYTES_UP]

    assert bytes_up(five(spoil)) - bytes_up(five()) == messages.num_bytes(
        record({"z": np.zeros(1000, np.uint8)})
    )


@pytest.mark.parametrize("kind", KINDS)
def test_empty_texts_and_lists_in_a_record_are_let_be(kind):
    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        content["notes"] = ConfigRecord({"note": "", "key": b"", "labels": ["", "a"], "none": []})
        content["more"] = MetricRecord({"losses": []})

    np.testing.assert_equal(run(kind, five(spoil), 2), run(kind, five(), 2))


def test_a_records_bytes_are_those_that_flower_counts_where_it_can():
    for record in (
        ConfigRecord({"text": "abc", "on": True, "some": [1, 2], "names": ["a", "bc"], "key": b"12"}),
        MetricRecord({"loss": 0.5, "rows": [1, 2]}),
    ):
        assert messages.record_bytes(record) == record.count_bytes()
    assert messages.record_bytes(ConfigRecord({"note": "", "none": []})) == len("note") + len("none")


def test_a_method_declares_what_its_clients_add():
    class Adds(FedAvg):
        extra_reply_bytes = 3 << 20

    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        content["more"] = record({"zeros": np.zeros(2 << 20, np.uint8)})

    assert run(Adds, five(spoil, range(5)), 1, server_lr=1.0)["weight"][0] == 0.5


# Metrics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_named_like_the_servers_own_have_a_prefix_and_the_servers_stay(kind, caplog):
    names = [
        messages.PARTICIPANTS,
        messages.BYTES_UP,
        messages.CLIPPED,
        messages.LATE_UPDATES,
        messages.JOULES,
    ]
    names += ["client-loss", "weights-distance", "dp-epsilon", "staleness-mean", "time", "aggregation"]

    def spoil(arrays: dict[str, Any], content: RecordDict) -> None:
        for name in names:
            content.metric_records["metrics"][name] = 1e9

    seen: list[dict[str, Any]] = []
    grids = {"liars": five(spoil, range(5)), "honest": five()}
    for grid in grids.values():
        strategy = kind(
            fraction_evaluate=0.0,
            observer=lambda progress: seen.append(dict(progress.metrics)),
            **({"buffer_size": 2} if kind is FedBuff else {}),
        )
        with caplog.at_level(logging.WARNING, "flwr.strategies"):
            strategy.start(grid, record(model()), num_rounds=4, timeout=5.0)
    half = len(seen) // 2
    theirs = [{f"train-{name}": metrics.pop(f"train-{name}", None) for name in names} for metrics in seen]
    assert seen[:half] == seen[half:]
    assert all(1e9 not in metrics.values() for metrics in seen)
    assert any(set(each.values()) == {1e9} for each in theirs[:half])
    assert all(set(each.values()) <= {None} for each in theirs[half:])
    assert any("train-loss" in metrics for metrics in seen)
    assert "a name of the server's own" in caplog.text
