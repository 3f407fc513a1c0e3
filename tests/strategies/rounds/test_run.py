"""The round loop: evaluation, observer, time, reproducibility."""

import logging

import numpy as np
import pytest
from flwr.app import ConfigRecord

from strategies import FedAU, FedAvg, FedStale, Mifa
from strategies.clock import WallClock
from tests.strategies.rounds.recorder import Recorder, config

# ---- Reproducibility --------------------------------------------------------------------------------------------


def test_runs_with_other_node_ids_and_reply_orders_are_equal_bit_for_bit(
    federation, model, same_bytes, train_config
):
    rng = np.random.default_rng(0)
    centres, sizes = rng.normal(size=12).tolist(), rng.integers(1, 100, 12).tolist()
    results = []
    for seed in (1, 2, 3):  # of the node ids and of the order of the replies
        grid = federation(centres, sizes, seed=seed)
        strategy = FedAvg(config(participation="uniform", fraction_train=0.5, seed=4))
        results.append(
            strategy.start(grid, model(0.1, 0.2, 0.3), num_rounds=4, train_config=train_config(2, 0.3))
        )
        assert [len(grid.asked("train", r)) for r in (1, 2, 3, 4)] == [6, 6, 6, 6]
    assert same_bytes(results[0].arrays, results[1].arrays)
    assert same_bytes(results[0].arrays, results[2].arrays)
    assert results[0].train_metrics_clientapp == results[1].train_metrics_clientapp


def test_the_seed_and_the_round_fix_who_takes_part(federation, model, train_config):
    def drawn(seed: int) -> list[tuple[int, ...]]:
        grid = federation(range(8), [1] * 8)
        strategy = FedAvg(config(participation="uniform", fraction_train=0.25, seed=seed))
        strategy.start(grid, model(0.0), num_rounds=6, train_config=train_config())
        return [tuple(grid.asked("train", r)) for r in range(1, 7)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert len(set(drawn(0))) > 1  # and it isn't the same pair in every round


def test_starting_the_same_strategy_twice_gives_the_same_model(federation, model, same_bytes, train_config):
    grid, strategy = federation(), FedAvg(config(participation="uniform", fraction_train=0.5))
    first, second = (
        strategy.start(grid, model(0.1), num_rounds=3, train_config=train_config()) for _ in "ab"
    )
    assert same_bytes(first.arrays, second.arrays)


# ---- Evaluation and observer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eval_every", "num_rounds", "expected"),
    [
        (1, 3, [0, 1, 2, 3]),
        (2, 4, [0, 2, 4]),
        (2, 5, [0, 2, 4, 5]),  # the last model is always evaluated
        (10, 3, [0, 3]),
        (1, 0, [0]),
    ],
)
def test_eval_every(federation, model, train_config, eval_every, num_rounds, expected):
    seen = Recorder()
    strategy = FedAvg(config(eval_every=eval_every), observer=seen.observe)
    result = strategy.start(
        federation(),
        model(1.0),
        num_rounds=num_rounds,
        train_config=train_config(),
        evaluate_fn=seen.evaluate,
    )
    assert seen.rounds == expected
    assert list(result.evaluate_metrics_serverapp) == expected
    assert [p.aggregation for p in seen.progress] == list(range(num_rounds + 1))
    assert [p.aggregation for p in seen.progress if p.evaluated] == expected


def test_every_evaluation_is_of_the_model_of_its_round(federation, model, train_config):
    seen = Recorder()
    FedAvg().start(
        federation(), model(1.0), num_rounds=2, train_config=train_config(), evaluate_fn=seen.evaluate
    )
    assert seen.evaluated == [(0, 1.0), (1, 0.625), (2, 0.4375)]  # by hand in test_round.py


def test_the_observer_is_told_aggregation_time_model_and_metrics(federation, model, values_of, train_config):
    seen = Recorder()
    FedAvg(config(eval_every=2), observer=seen.observe).start(
        federation(), model(1.0), num_rounds=2, train_config=train_config(), evaluate_fn=seen.evaluate
    )
    first, second, third = seen.progress
    assert (first.aggregation, first.time, values_of(first.arrays)) == (0, 0.0, [1.0])
    assert dict(first.metrics) == {"loss": 0.0, "bytes-server": 8}  # a model of one float64
    assert (second.aggregation, second.time, values_of(second.arrays)) == (1, 1.0, [0.625])
    assert second.metrics["train-loss"] == 1.625
    assert second.metrics["participants"] == 3
    assert "loss" not in second.metrics  # not evaluated
    assert (third.aggregation, third.time, values_of(third.arrays)) == (2, 2.0, [0.4375])
    assert third.metrics["loss"] == 20.0


def test_client_evaluation_is_the_federated_objective_by_hand(federation, model, train_config):
    seen, grid = Recorder(), federation()
    result = FedAvg(config(), observer=seen.observe).start(
        grid, model(1.0), num_rounds=1, train_config=train_config()
    )
    # w = .625: f_i = ½ (w − c_i)² = ½ (2.375², 1.375², 1.625²) = 2.8203125, .9453125, 1.3203125
    # Σ p_i f_i = (2.8203125 + 2 · .9453125 + 5 · 1.3203125) / 8 = 11.3125 / 8
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(1.4140625, rel=1e-14)
    assert seen.progress[-1].metrics["client-loss"] == pytest.approx(1.4140625, rel=1e-14)
    assert grid.asked("evaluate") == [0, 1, 2]


def test_clients_are_evaluated_as_often_as_the_server(federation, model, train_config):
    grid = federation()
    FedAvg(config(eval_every=2)).start(grid, model(1.0), num_rounds=3, train_config=train_config())
    assert [len(grid.asked("evaluate", r)) for r in (1, 2, 3)] == [0, 3, 3]


def test_clients_are_not_evaluated_where_none_is_asked_to(federation, model, train_config):
    grid = federation()
    FedAvg(fraction_evaluate=0.0).start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert grid.asked("evaluate") == []


def test_the_evaluate_config_goes_to_evaluation_only(federation, model, train_config):
    grid = federation()
    FedAvg(config()).start(
        grid,
        model(1.0),
        num_rounds=1,
        train_config=train_config(),
        evaluate_config=ConfigRecord({"batches": 3}),
    )
    (evaluate, *_), (train, *_) = grid.requests("evaluate"), grid.requests("train")
    assert evaluate.content.config_records["config"]["batches"] == 3
    assert "lr" not in evaluate.content.config_records["config"]
    assert "batches" not in train.content.config_records["config"]


# ---- Time -------------------------------------------------------------------------------------------------------

CENTRES, SIZES = [0.0, 1.0, 2.0, 3.0, 4.0], [1] * 5  # C = 5 in F80: τ = .2, .4, .6, .8, 1


@pytest.mark.parametrize(
    ("participation", "seconds"),
    [("full", 1.0), ("fixed:0", 0.2), ("fixed:0,2", 0.6), ("fixed:3,1", 0.8), ("paired", 1.0)],
)
def test_a_round_lasts_as_long_as_its_slowest_participant(
    federation, model, train_config, participation, seconds
):
    seen = Recorder()
    strategy = FedAvg(config(participation=participation), observer=seen.observe)
    strategy.start(federation(CENTRES, SIZES), model(1.0), num_rounds=3, train_config=train_config())
    assert [p.time for p in seen.progress] == pytest.approx([0.0, seconds, 2 * seconds, 3 * seconds])


def test_time_of_rounds_that_draw_their_participants(federation, model, train_config):
    seen, grid = Recorder(), federation(CENTRES, SIZES)
    strategy = FedAvg(config(participation="uniform", fraction_train=0.4), observer=seen.observe)
    strategy.start(grid, model(1.0), num_rounds=8, train_config=train_config())
    tau = [0.2, 0.4, 0.6, 0.8, 1.0]
    durations = [max(tau[i] for i in grid.asked("train", r)) for r in range(1, 9)]
    assert [p.time for p in seen.progress] == pytest.approx([0.0, *np.cumsum(durations)])
    assert len(set(durations)) > 1


@pytest.mark.parametrize(
    ("participation", "budget", "rounds"),
    [
        ("full", 2.5, 2),  # a third round would end at 3
        ("full", 2.0, 2),  # a round that ends when the budget does still counts
        ("fixed:0,2", 2.0, 3),  # .6, 1.2, 1.8
        ("full", 0.5, 0),
        ("full", 0.0, 4),  # 0: no limit
    ],
)
def test_time_budget(federation, model, train_config, participation, budget, rounds):
    seen, grid = Recorder(), federation(CENTRES, SIZES)
    strategy = FedAvg(
        config(participation=participation, time_budget=budget, eval_every=100), observer=seen.observe
    )
    strategy.start(grid, model(1.0), num_rounds=4, train_config=train_config(), evaluate_fn=seen.evaluate)
    assert sum(bool(grid.asked("train", r)) for r in range(1, 5)) == rounds
    assert seen.rounds == ([0, rounds] if rounds else [0])  # the last model is evaluated, and once
    if budget:
        assert strategy.session.clock.now() <= budget


def test_a_budget_that_ends_between_two_evaluations_leaves_the_report_of_so_many_rounds(
    federation, model, train_config
):
    last = []
    for rounds, keys in ((9, {"time_budget": 3.5, "eval_every": 4}), (3, {})):
        seen = Recorder()
        strategy = FedAvg(config(**keys), fraction_evaluate=1.0, observer=seen.observe)
        strategy.start(
            federation(CENTRES, SIZES),
            model(1.0),
            num_rounds=rounds,
            train_config=train_config(),
            evaluate_fn=seen.evaluate,
        )
        last.append(seen.progress[-1])
    assert last[0].aggregation == last[1].aggregation == 3
    assert {"participants", "client-loss"} < last[0].metrics.keys()
    assert last[0].metrics == last[1].metrics


@pytest.mark.parametrize(
    ("kind", "expected"), [(FedAvg, None), (FedStale, None), (Mifa, [0.25, 0.75]), (FedAU, [0.25, 0.75])]
)
def test_where_tasks_fail_shares_are_known_of_methods_that_correct_for_it_alone(
    kind, expected, federation, model, train_config
):
    seen = Recorder()
    strategy = kind(task_failure=0.4, observer=seen.observe)
    grid = federation([0.0, 1.0], [1, 3])
    strategy.start(grid, model(1.0), num_rounds=8, train_config=train_config(), evaluate_fn=seen.evaluate)
    last = seen.progress[-1].clients
    assert last.get("expected-share") == (None if expected is None else pytest.approx(expected))
    assert sum(last["observed-share"]) == pytest.approx(1)


def test_the_budget_forgives_a_rounding_error(federation, model, train_config):
    # 1 − .7 is a bit more than .3 in floating point, and three of them more than .9.
    grid = federation(CENTRES, SIZES)
    FedAvg(config(participation="fixed:0", time_scenario="F70", time_budget=0.9)).start(
        grid, model(1.0), num_rounds=10, train_config=train_config()
    )
    assert len(grid.asked()) == 3


def test_on_a_wall_clock_real_seconds_count(federation, model, train_config):
    seen, grid = Recorder(), federation()
    grid.node(1).delay = 0.2
    FedAvg(config(time_budget=0.3), clock=WallClock(), observer=seen.observe).start(
        grid, model(1.0), num_rounds=50, train_config=train_config()
    )
    rounds = len(seen.progress) - 1
    assert 1 <= rounds <= 2  # each lasts .2 s or more; the budget is looked at between rounds
    assert seen.progress[1].time >= 0.2


# ---- What the caller gave ---------------------------------------------------------------------------------------


def test_the_callers_configs_are_not_changed(federation, model, train_config):
    given, evaluate = train_config(), ConfigRecord({"batches": 3})
    before = (dict(given), dict(evaluate))
    FedAvg(config()).start(
        federation(), model(1.0), num_rounds=2, train_config=given, evaluate_config=evaluate
    )
    assert (dict(given), dict(evaluate)) == before


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"client_weights": "size"}, "client_weights"),
        ({"time_scenario": "F800"}, "time_scenario"),
        ({"eval_every": -1}, "eval_every"),
        ({"participation": "half"}, "participation"),
    ],
)
def test_a_value_that_makes_no_sense_is_named_before_any_client_trains(federation, model, options, key):
    grid = federation()
    with pytest.raises(ValueError, match=key):
        FedAvg(config(**options)).start(grid, model(1.0), num_rounds=1)
    assert grid.requests() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"time_budget": 0.5},
            ["time_budget = 0.5 s is shorter than the first round: the model is the initial one"],
        ),
        (
            {"update_norm_bound": 1e-12},
            [
                "after 2 aggregations the model is the initial one: the moves were 0, or too short for its numbers "
                "(lr, server_lr, update_norm_bound)"
            ],
        ),
        ({"time_budget": 1.5}, []),
        ({"should_stop": lambda: True}, []),
    ],
)
def test_a_run_that_leaves_the_initial_model_says_so(federation, model, train_config, options, said, caplog):
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        FedAvg(**options).start(
            federation(), model(1.0, dtype="float32"), num_rounds=2, train_config=train_config()
        )
    assert [record.message for record in caplog.records] == said
