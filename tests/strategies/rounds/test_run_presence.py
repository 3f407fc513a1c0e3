"""A run that is stopped, and clients that come and go."""

import logging
from contextlib import nullcontext

import pytest

from strategies import FedAvg, Progress, RunError
from tests.strategies.rounds.recorder import Recorder, config

LOGGER = "flwr.strategies"


# ---- Stopping ---------------------------------------------------------------------------------------------------


def test_a_stop_between_rounds_keeps_the_last_model(federation, model, values_of, train_config):
    seen, grid = Recorder(), federation()
    strategy = FedAvg(
        config(eval_every=100), observer=seen.observe, should_stop=lambda: len(seen.progress) >= 3
    )
    result = strategy.start(
        grid, model(1.0), num_rounds=50, train_config=train_config(), evaluate_fn=seen.evaluate
    )
    assert values_of(result.arrays) == [0.4375]  # two rounds
    assert grid.asked("train", 3) == []
    assert seen.evaluated == [(0, 1.0), (2, 0.4375)]


def test_a_stop_in_mid_round_keeps_the_last_complete_round(federation, model, values_of, train_config):
    seen, grid = Recorder(), federation()

    def observe(progress: Progress) -> None:
        seen.observe(progress)
        if progress.aggregation == 1:
            grid.lose(2, "drop")  # so that round 2 has fast clients only when the stop comes

    strategy = FedAvg(observer=observe, should_stop=lambda: bool(grid.asked("train", 2)))
    result = strategy.start(
        grid, model(1.0), num_rounds=50, timeout=60.0, train_config=train_config(), evaluate_fn=seen.evaluate
    )
    assert grid.asked("train", 2) == [0, 1, 2]
    assert values_of(result.arrays) == [0.625]  # round 1
    assert list(result.train_metrics_clientapp) == [1]
    assert seen.evaluated[-1] == (1, 0.625)
    assert strategy.session.clock.now() == 1.0


def test_a_stop_before_the_first_round_returns_the_initial_model(federation, model, same_bytes):
    grid, initial = federation(), model(1.0)
    result = FedAvg(should_stop=lambda: True).start(grid, initial, num_rounds=3)
    assert same_bytes(result.arrays, initial)
    assert grid.requests() == []


# ---- Clients that come and go -----------------------------------------------------------------------------------


def test_a_late_joiner_takes_part_from_the_next_round(federation, model, train_config):
    grid = federation()
    grid.node(2).present = False
    strategy = FedAvg(observer=lambda p: setattr(grid.node(2), "present", p.aggregation >= 1))
    strategy.start(grid, model(1.0), num_rounds=3, train_config=train_config())
    assert [grid.asked("train", r) for r in (1, 2, 3)] == [[0, 1], [0, 1, 2], [0, 1, 2]]


def test_a_node_that_left_is_not_asked_and_its_weight_goes_to_the_others(
    federation, model, values_of, train_config
):
    grid = federation()
    strategy = FedAvg(observer=lambda p: setattr(grid.node(1), "present", p.aggregation < 1))
    result = strategy.start(grid, model(1.0), num_rounds=2, train_config=train_config())
    assert [grid.asked("train", r) for r in (1, 2)] == [[0, 1, 2], [0, 2]]
    # Round 1: w = .625. Round 2 with p = 1/6, 5/6: c̄ = (3 − 5)/6 = −1/3; w − ½ (w + 1/3)
    assert values_of(result.arrays) == pytest.approx([0.625 - 0.5 * (0.625 + 1 / 3)], rel=1e-14)
    assert result.train_metrics_clientapp[2]["failures"] == 0


@pytest.mark.parametrize("absent", [0, 2])
def test_fixed_participation_with_an_absent_client_takes_the_rest_and_says_so(
    absent, federation, model, values_of, train_config, caplog
):
    grid = federation()
    grid.node(absent).present = False
    with caplog.at_level(logging.WARNING, LOGGER):
        result = FedAvg(config(participation=f"fixed:1,{absent}")).start(
            grid, model(1.0), num_rounds=1, train_config=train_config()
        )
    assert grid.asked() == [1]  # the client with index 1, whichever of those there it is
    assert values_of(result.arrays) == [1.5]  # 1 + 1 · .5
    assert f"clients that aren't there: [{absent}]" in caplog.text


def test_fixed_participation_with_nobody_there_is_an_error(federation, model):
    grid = federation()
    with pytest.raises(RunError, match=r"participation = 'fixed:7': none of these clients is there"):
        FedAvg(config(participation="fixed:7")).start(grid, model(1.0), num_rounds=1)


@pytest.mark.parametrize("next_available", [True, False])
def test_who_is_enough_may_still_come_in_flowers_simulation(
    next_available, federation, model, train_config, add_node, caplog
):
    # Apps needn't say how many clients there will be. Of 3, 0.85 are all; of 4, they are 3.
    grid = federation(describes=False, node_ids=[1, 2, 3])
    grid.engine = "ray"

    def observe(progress: Progress) -> None:
        if next_available and progress.aggregation == 1:
            add_node(grid, 0, 3, 4)

    options = {"participation": "uniform", "fraction_train": 0.85, "over_select": 0.3}
    strategy = FedAvg(client_weights="uniform", **options, observer=observe)
    text = "over_select = 0.3: all 3 clients are asked without it; fraction_train = 0.85 must be less"
    with nullcontext() if next_available else pytest.raises(RunError, match=text):
        strategy.start(grid, model(1.0), num_rounds=3, train_config=train_config())
    assert strategy.session.aggregations == (3 if next_available else 1)
    assert caplog.text.count(f"{text}; more clients may come") == 1
    assert len(grid.asked("train", 1)) == 3


def test_each_run_of_a_loop_around_it_is_checked(federation, model, train_config):
    strategy = FedAvg(client_weights="uniform", aggregation_rule="krum")
    args = 1, model(1.0), train_config()
    assert len(list(strategy.configure_train(*args, federation()))) == 3
    with pytest.raises(RunError, match="needs 3 clients a round"):
        strategy.configure_train(*args, federation((3.0, 2.0), (1, 2)))
