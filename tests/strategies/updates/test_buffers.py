"""Arrays that aren't trained, such as BatchNorm's statistics: averaged, whatever a method does with the others."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from strategies import (
    REGISTRY,
    AsyncFedAvg,
    FedAsync,
    FedAU,
    FedAvg,
    FedBuff,
    FedCompass,
    FedDyn,
    FedNova,
    FedStale,
    Mifa,
    Scaffold,
    Spectral,
)
from strategies.flower.arrays import Layout
from strategies.testing import MemoryGrid
from strategies.updates.buffers import BufferAverage, Buffers, untrained_positions
from tests.selection import methods

# What client i says of the two: its running variance and its number of batches.
VARIANCES, BATCHES = (4.0, 1.0, 0.5), (10, 20, 70)


def record(w: float = 1.0, variance: float = 1.0, batches: int = 0) -> ArrayRecord:
    return ArrayRecord(
        {
            "layer.weight": Array(np.array([w, w], np.float32)),
            "norm.running_var": Array(np.array([variance], np.float32)),
            "norm.num_batches_tracked": Array(np.array(batches, np.int64)),
        }
    )


def normalising() -> ClientApp:
    """Return clients that move w by ½ and have statistics of their own; client i has i + 1 examples."""
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        metrics = MetricRecord({"partition-id": i, "num-examples": i + 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query("direction")
    def direction(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        arrays = ArrayRecord({"m": Array(np.array([np.cos(i), np.sin(i)]))})
        return Message(RecordDict({"direction": arrays}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        sent = message.content.array_records["arrays"]
        w = float(sent["layer.weight"].numpy()[0])
        before = int(sent["norm.num_batches_tracked"].numpy())
        arrays = record(w + 0.5, VARIANCES[i], before + BATCHES[i])
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": i + 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def grid() -> MemoryGrid:
    return MemoryGrid(normalising(), [{"partition-id": i} for i in range(3)])


def run(kind: Any, rounds: int = 1, **options: Any) -> ArrayRecord:
    strategy = kind(fraction_evaluate=0.0, **options)
    return strategy.start(grid(), record(), num_rounds=rounds, timeout=5.0).arrays


def buffers(positions: np.ndarray, counters: Sequence[bool] = (False,)) -> Buffers:
    return Buffers(positions, np.array(counters), np.zeros(len(positions), bool))


def variance_of(arrays: ArrayRecord) -> float:
    return float(arrays["norm.running_var"].numpy()[0])


def test_they_are_those_of_whole_numbers_and_those_that_are_called_so():
    layout = Layout.of(record())
    assert untrained_positions(layout, ("*running_var",)).tolist() == [2, 3]
    assert untrained_positions(layout, ()).tolist() == [3]
    assert untrained_positions(layout, ("layer.*",)).tolist() == [0, 1, 3]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_round_averages_them_by_the_clients_weights(optimizer):
    # p = (1, 2, 3)/6: (4 + 2 + 1.5)/6 and (10 + 40 + 210)/6 = 43.3
    arrays = run(FedAvg, server_optimizer=optimizer, server_lr=0.01)
    assert variance_of(arrays) == pytest.approx(7.5 / 6)
    assert arrays["norm.num_batches_tracked"].numpy() == 43
    assert arrays["norm.num_batches_tracked"].dtype == "int64"
    assert arrays["norm.num_batches_tracked"].shape == ()


def test_weights_that_do_not_sum_to_one_do_not_extrapolate_them():
    # L = 1 of 3: d_i = 3 p_i is 0.5, 1 or 1.5; the one that is drawn is all the average.
    arrays = run(FedAvg, participation="uniform", fraction_train=0.3)
    assert variance_of(arrays) in VARIANCES


def test_a_long_update_is_shortened_and_their_jump_does_not_count_towards_it():
    # ‖Δ‖ = √½ of the two weights alone; counts of 43 would have shortened it to nothing.
    arrays = run(FedAvg, update_norm_bound=0.71)
    assert arrays["layer.weight"].numpy().tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("kind", "rounds", "own", "count"),
    [
        (FedAvg, 1, {}, 20),
        (FedBuff, 1, {"aggregation_weights": "identical", "buffer_size": 3}, 20),
        # The first two of three arrivals leave the model as it is, and an arrival moves it by a third.
        (AsyncFedAvg, 3, {"aggregation_weights": "identical", "time_scenario": "F0"}, 7),
    ],
)
def test_a_robust_rule_takes_their_median(kind, rounds, own, count):
    robust = {"client_weights": "uniform", "aggregation_rule": "median", "faulty_clients": 1}
    arrays = run(kind, rounds, **robust, **own)
    assert (variance_of(arrays), int(arrays["norm.num_batches_tracked"].numpy())) == (1.0, count)


def test_with_central_privacy_they_stay_as_they_are():
    arrays = run(FedAvg, client_weights="uniform", dp="central")
    assert (variance_of(arrays), int(arrays["norm.num_batches_tracked"].numpy())) == (1.0, 0)


@pytest.mark.parametrize("kind", map(REGISTRY.get, methods(has_rounds=False)))
@pytest.mark.parametrize("server_lr", [0.0, 1.0])
def test_without_rounds_they_stay_within_what_clients_say(kind, server_lr):
    own = {"buffer_size": 2} if hasattr(kind.Config(), "buffer_size") else {}
    for rounds in (1, 25):
        arrays = run(kind, rounds, server_lr=server_lr, **own)
        assert 0.5 <= variance_of(arrays) <= 4.0
        assert int(arrays["norm.num_batches_tracked"].numpy()) >= 0


@pytest.mark.parametrize("kind", [FedNova, Scaffold, FedDyn, Mifa, FedStale, FedAU])
def test_methods_that_correct_updates_average_them_as_fedavg_does(kind):
    some: list[dict[str, Any]] = [
        {"participation": "uniform", "fraction_train": 0.7},
        {"participation": "paired"},
    ]
    for options in ({}, *(some if kind is not Mifa else [])):
        ours, plain = (run(each, 3, **options) for each in (kind, FedAvg))
        for name in ("norm.running_var", "norm.num_batches_tracked"):
            assert ours[name].data == plain[name].data


def test_while_a_method_waits_they_stay_with_the_model():
    waiting = run(Mifa, 2, participation="uniform", fraction_train=0.3)  # two of three have answered at most
    assert waiting["layer.weight"].numpy().tolist() == [1.0, 1.0]
    assert (variance_of(waiting), int(waiting["norm.num_batches_tracked"].numpy())) == (1.0, 0)


def test_fedexp_tells_the_mean_of_the_last_two():
    # 1.0 at first, 7.5/6 after a round, and each round the same after that.
    assert variance_of(run(FedAvg, 1, server_optimizer="fedexp")) == pytest.approx((1 + 7.5 / 6) / 2)
    assert variance_of(run(FedAvg, 3, server_optimizer="fedexp")) == pytest.approx(7.5 / 6)


def test_an_arrival_moves_them_by_its_share_of_a_round():
    # F80: client 0 is the first. a = d_0 / Σ d_i = p_0 τ_0 / Σ p_i τ_i, p = (1, 2, 3)/6, τ = (.2, .6, 1).
    a = 0.2 / (0.2 + 2 * 0.6 + 3 * 1.0)
    assert variance_of(run(AsyncFedAvg)) == pytest.approx((1 - a) * 1.0 + a * 4.0)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_a_model_that_is_mixed_mixes_them_alike(optimizer):
    # F80: client 0 is the first, at .2 and .4 with δ = 0: b ← .4 b + .6 · 4, twice, whatever the others' step is.
    arrays = run(FedAsync, 2, mixing_alpha=0.6, server_optimizer=optimizer, server_lr=0.1)
    assert variance_of(arrays) == pytest.approx(0.4 * (0.4 * 1.0 + 0.6 * 4.0) + 0.6 * 4.0)


def test_a_stale_model_does_not_pull_them_back():
    # At .6 the fourth arrival is client 1's, of model 0: b ← .4 b + .6 · 1, and not by its own start.
    b = 1.0
    for said in (4.0, 4.0, 4.0, 1.0):
        b = 0.4 * b + 0.6 * said
    assert variance_of(run(FedAsync, 4)) == pytest.approx(b)


def test_the_spectral_method_averages_them_too():
    assert 0.5 <= variance_of(run(Spectral, 2)) <= 4.0


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(-3.0, 3.0)), min_size=1, max_size=6),
    st.floats(0.0, 1.0),
    st.floats(-3.0, 3.0),
)
def test_an_average_lies_between_what_goes_into_it(said, share, before):
    apart, model = BufferAverage(buffers(np.array([1]))), np.array([7.0, before])
    for index, (weight, value) in enumerate(said):
        apart.add(index, weight, np.array([value]))
    apart.put_into(model, share)
    values = [before, *(value for weight, value in said if weight > 0)]
    assert model[0] == 7.0
    assert min(values) - 1e-9 <= model[1] <= max(values) + 1e-9


def test_counters_of_work_that_waits_go_on_as_changes_in_a_resumed_run():
    # Safeguards compare by how much clients raise a counter, which has been high since long before.
    options = {"safeguards": "on", "group_slack": 1.5, "time_scenario": "exponential"}
    states: list[dict[str, Any]] = []
    strategy = FedCompass(fraction_evaluate=0.0, **options)
    strategy.run_options.observer = lambda progress: states.append(deepcopy(strategy.state()))
    whole = strategy.start(grid(), record(batches=5000), num_rounds=12, timeout=5.0)
    waiting = [state for state in states if "waiting" in state]
    assert waiting
    for state in waiting:
        other = FedCompass(fraction_evaluate=0.0, **options)
        other.restore(state)
        arrays = other.start(grid(), record(batches=5000), num_rounds=12, timeout=5.0).arrays
        assert [array.data for array in arrays.values()] == [array.data for array in whole.arrays.values()]
