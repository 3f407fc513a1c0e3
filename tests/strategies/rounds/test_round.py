"""One round by hand: the weighted mean, and every kind of reply that must be left out of it."""

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord

from strategies import FedAvg, FedProx, RunError
from strategies.clients.client_metrics import MetricsMean
from strategies.flower import messages

LOGGER = "flwr.strategies"


def test_one_round_of_fedavg_by_hand(federation, model, values_of, train_config):
    # Δ_i = −γ (w − c_i) = −.5 (1 − 3), −.5 (1 − 2), −.5 (1 + 1) = 1, .5, −1
    # Σ p_i Δ_i = 1/8 + .5·2/8 − 5/8 = −3/8
    result = FedAvg().start(federation(), model(1.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == [0.625]
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["participants"], metrics["failures"]) == (3, 0)
    # f_i(1) = ½ (1 − c_i)² = 2, .5, 2; Σ p_i f_i = (2 + 1 + 10) / 8
    assert metrics["train-loss"] == 1.625


def test_uniform_client_weights_by_hand(federation, model, values_of, train_config):
    # (1 + .5 − 1) / 3 = 1/6
    strategy = FedAvg(FedAvg.Config(client_weights="uniform"))
    result = strategy.start(federation(), model(1.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == pytest.approx([7 / 6], rel=1e-15)


def test_two_rounds_by_hand(federation, model, values_of, train_config):
    # One step from w moves by −.5 (w − c̄), c̄ = Σ p_i c_i = (3 + 4 − 5) / 8 = .25:
    # 1 → 1 − .375 = .625 → .625 − .1875 = .4375
    result = FedAvg().start(federation(), model(1.0), num_rounds=2, train_config=train_config())
    assert values_of(result.arrays) == [0.4375]


def test_uniform_participation_scales_by_clients_over_draws(federation, model, values_of, train_config):
    grid = federation()
    strategy = FedAvg(FedAvg.Config(participation="uniform", fraction_train=1 / 3))
    result = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    (drawn,) = grid.asked()
    # L = 1 of C = 3: d_i = 3 p_i, so w = 1 + 3 (1/8 · 1, 2/8 · .5, 5/8 · −1)
    assert values_of(result.arrays) == [[1.375], [1.375], [-0.875]][drawn]


def test_the_traffic_is_counted_in_bytes(federation, model, train_config):
    initial = model(1.0, 2.0)
    size = len(initial["w"].data)  # header of the npy format and two doubles
    grid = federation()
    grid.lose(1, "drop")
    result = FedAvg().start(grid, initial, num_rounds=1, timeout=0.05, train_config=train_config())
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["bytes-down"], metrics["bytes-up"]) == (3 * size, 2 * size)


REASONS = {
    "raise": "out of memory",
    "nan": "aren't finite",
    "inf": "aren't finite",
    "shape": r"float64[2], the model's is float64[1]",
    "dtype": r"complex64[1], the model's is float64[1]",
    "name": "['other']",
    "no-arrays": "no record 'arrays'",
    "bytes": "can't be read",
    "npz": "'w'",
    "stype": "can't be read",
    "drop": "no reply before the deadline",
    "unavailable": "Node Unavailable",
}


def break_client(grid: Any, partition: int, fault: str) -> None:
    if fault in ("drop", "unavailable"):
        grid.lose(partition, fault)
    else:
        grid.spoil(partition, fault)


@pytest.mark.parametrize("fault", REASONS)
def test_a_bad_reply_is_left_out_counted_and_named(federation, model, values_of, train_config, caplog, fault):
    grid = federation()
    break_client(grid, 1, fault)
    with caplog.at_level(logging.WARNING, LOGGER):
        result = FedAvg().start(grid, model(1.0), num_rounds=1, timeout=0.1, train_config=train_config())
    # Client 1's weight is shared over the others: (1/8 · 1 + 5/8 · −1) / (6/8) = −2/3
    assert values_of(result.arrays) == pytest.approx([1 / 3], rel=1e-15)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["participants"], metrics["failures"]) == (2, 1)
    # Σ p_i f_i over clients 0 and 2: (1/8 · 2 + 5/8 · 2) / (6/8) = 2
    assert metrics["train-loss"] == pytest.approx(2.0)
    (warning,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert warning.startswith(f"round 1: left out client 1 (node {grid.node(1).node_id}): ")
    assert REASONS[fault] in warning


@pytest.mark.parametrize("fault", ["raise", "nan", "drop"])
def test_a_round_without_a_valid_reply_keeps_the_model_bit_for_bit(
    federation, model, same_bytes, train_config, caplog, fault
):
    grid, initial = federation(), model(0.1, -0.0, 1e-310)
    for partition in range(3):
        break_client(grid, partition, fault)
    with caplog.at_level(logging.WARNING, LOGGER):
        strategy = FedAvg()
        with pytest.raises(RunError, match=r"^no client's work was accepted in 1 aggregations"):
            strategy.start(grid, initial, num_rounds=1, timeout=0.05, train_config=train_config())
    result = strategy.session.run.result
    assert same_bytes(result.arrays, initial)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["participants"], metrics["failures"]) == (0, 3)
    assert "train-loss" not in metrics
    assert "no valid reply, the model stays as it is" in caplog.text
    (warning,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]  # one a reason
    for partition in range(3):
        assert f"{partition} (node {grid.node(partition).node_id})" in warning


def test_a_client_is_back_in_the_round_after_its_fault(federation, model, values_of, train_config):
    grid = federation()
    grid.spoil(1, "raise")
    strategy = FedAvg(observer=lambda p: grid.spoil(1, None) if p.aggregation == 1 else None)
    result = strategy.start(grid, model(1.0), num_rounds=2, train_config=train_config())
    assert [result.train_metrics_clientapp[r]["failures"] for r in (1, 2)] == [1, 0]
    # Round 1 as above: w = 1/3. Round 2: −.5 (1/3 − 1/4) = −1/24
    assert values_of(result.arrays) == pytest.approx([1 / 3 - 1 / 24], rel=1e-14)


def test_a_reply_that_comes_a_round_late_counts_in_neither(federation, model, values_of, train_config):
    grid = federation()
    strategy = FedAvg(observer=lambda p: setattr(grid.node(1), "delay", 0.5 if p.aggregation == 0 else 0.0))
    result = strategy.start(grid, model(1.0), num_rounds=2, timeout=0.1, train_config=train_config())
    assert [result.train_metrics_clientapp[r]["failures"] for r in (1, 2)] == [1, 0]
    assert values_of(result.arrays) == pytest.approx([1 / 3 - 1 / 24], rel=1e-14)


def test_a_doubled_reply_counts_once(federation, model, values_of, train_config):
    grid = federation()
    grid.lose(2, "twice")
    result = FedAvg().start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == [0.625]


def test_md_counts_a_client_drawn_twice_twice(federation, model, values_of, train_config):
    deltas = np.array([1.0, 0.5, -1.0])
    for seed in range(20):
        grid = federation()
        strategy = FedAvg(FedAvg.Config(participation="md", fraction_train=1.0, seed=seed))
        result = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
        asked = grid.asked()
        if len(asked) == 2:  # L = 3 draws: one of the two was drawn twice, 1/3 and 2/3
            break
    assert len(asked) == 2, "no seed of twenty drew a client twice"
    one, other = deltas[asked]
    possible = [1 + (2 * one + other) / 3, 1 + (one + 2 * other) / 3]
    assert min(abs(values_of(result.arrays)[0] - w) for w in possible) < 1e-12


# ---- Clients that don't describe themselves ---------------------------------------------------------------------


def test_without_descriptions_uniform_weights_stay_uniform(federation, model, values_of, train_config):
    strategy = FedAvg(FedAvg.Config(client_weights="uniform"))
    result = strategy.start(
        federation(describes=False), model(1.0), num_rounds=1, train_config=train_config()
    )
    assert values_of(result.arrays) == pytest.approx([7 / 6], rel=1e-15)


def test_without_descriptions_paired_clients_still_count_half_each(
    federation, model, values_of, train_config
):
    # Dhasade et al., section 3.2: the mean of the two, whatever their sizes. Node order is partition order here.
    grid = federation(centres=(3.0, -1.0), sizes=(1, 5), node_ids=[10, 20], describes=False)
    strategy = FedAvg(FedAvg.Config(participation="paired"))
    result = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == [1.0]  # 1 + (1 − 1) / 2


# ---- FedProx ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "steps", "expected"),
    [
        # f(w) = ½ (w − 4)², from w̄ = 0, γ = ½: w ← w − ½ [(w − 4) + α w]
        (0.0, 1, 2.0),
        (0.0, 2, 3.0),  # 2 − ½ (−2)
        (1.0, 1, 2.0),  # the first step feels no pull
        (1.0, 2, 2.0),  # 2 − ½ (−2 + 2): the minimiser of f + ½ w², 4/(1 + α)
        (0.5, 2, 2.5),  # 2 − ½ (−2 + 1)
        (0.5, 3, 2.625),  # 2.5 − ½ (−1.5 + 1.25)
    ],
)
def test_fedprox_on_a_quadratic_by_hand(federation, model, values_of, train_config, alpha, steps, expected):
    strategy = FedProx(proximal_mu=alpha, min_available_nodes=1)
    result = strategy.start(
        federation([4.0], [3]), model(0.0), num_rounds=1, train_config=train_config(steps)
    )
    assert values_of(result.arrays) == [expected]


def test_fedprox_pulls_towards_the_model_of_the_round(federation, model, values_of, train_config):
    # α = 1, two steps: round 1 ends at 2 (above). Round 2, w̄ = 2: 2 → 3 → 3 − ½ [(3 − 4) + (3 − 2)] = 3.
    strategy = FedProx(proximal_mu=1.0, min_available_nodes=1)
    result = strategy.start(federation([4.0], [3]), model(0.0), num_rounds=2, train_config=train_config(2))
    assert values_of(result.arrays) == [3.0]


def test_fedprox_without_pull_is_fedavg_bit_for_bit(federation, model, same_bytes, train_config):
    options: dict[str, Any] = {"participation": "uniform", "fraction_train": 0.5, "seed": 3}
    runs = [
        strategy.start(
            federation(range(6), range(1, 7)), model(0.1, 0.7), num_rounds=5, train_config=train_config(3)
        )
        for strategy in (
            FedAvg(FedAvg.Config(**options)),
            FedProx(FedProx.Config(proximal_mu=0.0, **options)),
        )
    ]
    assert same_bytes(runs[0].arrays, runs[1].arrays)


def test_fedavg_adds_no_rule_to_a_request(federation, model, values_of, train_config):
    grid = federation()
    result = FedAvg().start(grid, model(1.0), num_rounds=1, train_config=train_config(3))
    for request in grid.requests():
        assert messages.ALPHA not in request.content.config_records["config"]
    # Three steps of γ = ½ leave 1/8 of the way to c_i: w = c̄ + (1 − c̄)/8 with c̄ = .25
    assert values_of(result.arrays) == [0.34375]


# ---- What is sent -----------------------------------------------------------------------------------------------


def test_a_request_carries_the_model_the_callers_config_and_the_task(
    federation, model, same_bytes, train_config
):
    grid, initial = federation(), model(1.0)
    FedProx(FedProx.Config(proximal_mu=0.3)).start(
        grid, initial, num_rounds=2, timeout=50.0, train_config=train_config(2, lr=0.25)
    )
    assert grid.asked("train", 1) == [0, 1, 2]  # in the order of the clients
    for index, request in enumerate(grid.requests("train", 1)):
        content = request.content
        assert same_bytes(content.array_records["arrays"], initial)
        assert dict(content.config_records["config"]) == {
            "local-steps": 2,
            "lr": 0.25,
            "server-round": 1,
            messages.CLIENT: index,
            messages.TASK: 1,
            messages.ALPHA: 0.3,
        }
        assert request.metadata.ttl == 50.0
    assert [r.content.config_records["config"][messages.TASK] for r in grid.requests("train", 2)] == [2, 2, 2]


def test_models_of_several_arrays_and_dtypes(federation, train_config):
    # float32 matrix, float64 vector, a BatchNorm-like counter of no dimensions: each starts at 1 and moves by −3/8.
    initial = ArrayRecord(
        {
            "w": Array(np.ones((2, 3), np.float32)),
            "b": Array(np.ones(2)),
            "n": Array(np.array(1, dtype=np.int64)),
        }
    )
    result = FedAvg().start(federation(), initial, num_rounds=1, train_config=train_config())
    assert {k: (a.dtype, a.shape) for k, a in result.arrays.items()} == {
        "w": ("float32", (2, 3)),
        "b": ("float64", (2,)),
        "n": ("int64", ()),
    }
    assert (result.arrays["w"].numpy() == 0.625).all()
    assert (result.arrays["b"].numpy() == 0.625).all()


def test_an_initial_model_that_is_not_finite_is_refused_before_training(federation, model):
    grid = federation()
    with pytest.raises(ValueError, match="finite"):
        FedAvg().start(grid, model(float("nan")), num_rounds=1, train_config=ConfigRecord())
    assert grid.requests() == []


def test_metrics_of_several_are_added_as_those_of_each():
    rng = np.random.default_rng(0)
    weights, losses = rng.random(50).tolist(), rng.normal(size=50).tolist()
    at_once, each = MetricsMean(), MetricsMean()
    for columns in (slice(0, 20), slice(20, 20), slice(20, 50)):
        at_once.add_columns(weights[columns], {"loss": losses[columns]})
    for weight, loss in zip(weights, losses, strict=True):
        each.add_values(weight, {"loss": loss})
    assert at_once.result() == each.result()
    assert MetricsMean().result() == {}


def test_a_metric_is_what_most_clients_report_as_it():
    mean = MetricsMean()
    for weight, value in ((5.0, [9.0]), (1.0, 2.0), (3.0, 4.0), (1.0, [1.0, 2.0])):
        mean.add_values(weight, {"loss": value, "vote": value if isinstance(value, list) else [value, 0.0]})
    assert mean.result() == {"loss": 3.5, "vote": [3.0, 0.4]}  # (2 + 3 · 4) / 4; (2 + 12 + 1) / 5, 2 / 5
