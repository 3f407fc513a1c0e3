"""Numbers of runs."""

import math

import numpy as np
import pytest

from studies.reproduce.runs import Runs, decide, geometric_mean, in_all, is_lower
from studies.tests.reproduce.made_up import make_run


def test_columns_tails_and_thresholds():
    run = make_run({"seed": 0}, {"accuracy": [0.1, 0.5, math.nan, 0.8], "loss": [4.0, 3.0, 2.0, 1.0]})
    assert np.isnan(run.column("accuracy")[2])
    assert np.isnan(run.column("divergence")).all()  # nothing recorded it
    assert run.tail("loss", 0.5).tolist() == [2.0, 1.0]  # of three after the start
    assert run.tail("loss").tolist() == [1.0]  # 5 % of 3, but at least one
    assert run.rounds_to(0.4) == 1  # 0.5 > 0.4 at aggregation 1
    assert run.rounds_to(0.5) == 3  # exceeds, not reaches
    assert math.isnan(run.rounds_to(0.9))


def test_a_tail_is_of_the_evaluations_there_were():
    # Ten of a hundred are kept: 5 % of them were five.
    run = make_run({}, {"loss": range(10)}, facts={"evaluations": 100})
    assert run.tail("loss").tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("rounds", "share", "count"), [(200, 0.05, 10), (400, 0.05, 20), (50, 0.2, 10), (30, 0.1, 3)]
)
def test_the_start_is_no_round_of_a_tail(rounds: int, share: float, count: int) -> None:
    run = make_run({}, {"loss": range(rounds + 1)})
    assert len(run.tail("loss", share)) == count


def test_the_federated_objective_has_two_names():
    run = make_run({"seed": 0}, {"federated-loss": [3.0, math.nan], "client-loss": [9.0, 2.0]})
    assert run.column("objective").tolist() == [3.0, 2.0]


def test_a_band_is_mean_and_deviation_of_step_functions():
    # At time 0: 0 and 2; from 1: 4 and 6; the second run ends at 2.
    first = make_run({"seed": 0}, {"time": [0, 1, 4], "loss": [0.0, 4.0, 100.0]})
    second = make_run({"seed": 1}, {"time": [0, 1, 2], "loss": [2.0, 6.0, 8.0]})
    runs = Runs([first, second])
    grid, curves = runs.curves("loss", points=5)
    assert grid.tolist() == [0, 0.5, 1, 1.5, 2]
    assert curves.tolist() == [[0, 0, 4, 4, 4], [2, 2, 6, 6, 8]]
    _, middle, spread = runs.band("loss")
    assert (middle[0], middle[-1], spread[0], spread[-1]) == (1, 6, 2**0.5, 8**0.5)


def test_over_rounds_a_band_has_the_runs_own_points():
    runs = Runs(make_run({"seed": s}, {"loss": [1.0 + s, 3.0 + s]}) for s in (0, 1))
    grid, middle, spread = runs.band("loss", "aggregation")
    assert (grid.tolist(), middle.tolist(), spread.tolist()) == ([0, 1], [1.5, 3.5], [0.5**0.5] * 2)


def test_a_curve_starts_where_it_starts():
    first = make_run({"seed": 0}, {"time": [0, 2, 4], "loss": [math.nan, 4.0, 5.0]})
    second = make_run({"seed": 1}, {"time": [0, 1, 4], "loss": [math.nan, 6.0, 7.0]})
    grid, middle, _ = Runs([first, second]).band("loss")
    assert np.isnan(middle[grid < 2]).all()
    assert middle[grid == 4] == 6


def test_runs_are_chosen_by_label():
    runs = Runs(make_run({"seed": s, "local-steps": k}, {"loss": [float(s)]}) for s in (0, 1) for k in (1, 5))
    assert [run["seed"] for run in runs.where(local_steps=5)] == [0, 1]
    assert len(runs.where(local_steps=[1, 5], seed=[1, 2])) == 2
    assert runs.labels("local-steps") == [1, 5]
    assert runs.where(seed=1).values("loss") == [1.0, 1.0]
    assert len(runs.where(seed=2)) == 0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([1.0], [1.1], True),
        ([1.0, 1.0, 1.0], [1.005, 1.001, 1.1], True),
        ([1.0, 1.0, 2.0], [1.5, 1.5, 1.5], None),  # seeds disagree
        ([2.0, 2.0, 1.0], [1.0, 1.0, 1.0], False),  # a tie isn't lower
        ([1.0], [math.nan], True),  # the other diverged
        ([math.nan], [1.0], False),
        ([math.nan], [math.nan], None),
        ([], [], None),
    ],
)
def test_seeds_decide_together_which_is_lower(low, high, expected):
    assert is_lower(low, high) is expected


def test_what_never_gets_there_takes_one_round_more():
    run = make_run({}, {"accuracy": [0.1, 0.5, 0.6]})
    assert (run.rounds_within(0.4), run.rounds_within(0.9)) == (1, 3)


def test_a_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([[1, 2], [3]], True),
        ([[1, -1], [3]], None),
        ([[-1, -2], [3]], False),
        ([[0, 1]], None),
        ([], None),
        ([[]], None),
    ],
)
def test_a_rule_holds_for_every_value_or_is_refuted_by_a_whole_cell(cells, expected):
    assert decide(cells, lambda value: value > 0, lambda value: value < 0) is expected


@pytest.mark.parametrize(
    ("facts", "expected"), [([True, True], True), ([True, None], None), ([None, False], False), ([], None)]
)
def test_a_claim_holds_if_each_of_its_facts_does(facts, expected):
    assert in_all(facts) is expected
