"""Verdicts and figures on methods at equal time, each with learning rates of its own, on numbers made up."""

import math

import pytest

from studies.reproduce import equal_time
from studies.tests.reproduce.made_up import check_figures, evidence, make_run, outcome, plan_with, results_of

PARTS = ("002-4-fedfix-sync", "002-4-fedfix-async", "002-4-sync-async")
# By how much the loss is above that at the best rate; the best one isn't the same for all.
RATES = {
    "sync": {0.01: 0.5, 0.03: 0.0, 0.1: 0.3},
    "async": {1e-4: 0.2, 3e-4: 0.0, 1e-3: math.nan},
    "FedFix-0.5": {0.01: 0.4, 0.03: 0.0, 0.1: 0.1},
}
LABELS = [f"{method}, γ = {rate:g}" for method, rates in RATES.items() for rate in rates]
OF_X = {"problems": ["X"], "scenarios": ["F0"]}
PLAN = plan_with("002-figure-4", dict.fromkeys(PARTS, OF_X), grid={"method": LABELS})


def runs_with(losses, rates=RATES, scenario="F0"):
    """Runs of each method, at each of its rates, on two seeds; losses at the best rate by seed."""

    def run(method, seed, rate, loss):
        labels = {
            "problem": "X",
            "seed": seed,
            "num-clients": 4,
            "time-scenario": scenario,
            "method": f"{method}, γ = {rate:g}",
        }
        return make_run(labels, {"federated-loss": [3.0, loss]}, time_budget=10.0, lr=rate, seed=seed)

    return [
        run(method, seed, rate, loss + worse)
        for method, by_seed in losses.items()
        for rate, worse in rates[method].items()
        for seed, loss in enumerate(by_seed)
    ]


@pytest.mark.parametrize(
    ("fedfix", "expected"), [([0.5, 0.6], "holds"), ([1.5, 1.6], "doesn't hold"), ([0.5, 1.5], "not decided")]
)
def test_methods_are_compared_at_their_own_best_rates(tmp_path, fedfix, expected):
    runs = runs_with({"sync": [1.0, 1.0], "async": [2.0, 2.0], "FedFix-0.5": fedfix})
    report = equal_time.figure_4(results_of(runs), PLAN, tmp_path)
    assert outcome(report, "002-4-fedfix-sync") == expected
    assert outcome(report, "002-4-sync-async") == "holds"
    assert evidence(report, "002-4-sync-async") == (
        "loss of sync and of async, X, 4, F0: 1.000 (γ = 0.03), 2.000 (γ = 0.0003), lower in 2 of 2 seeds"
    )
    ahead = sum(loss < 1 for loss in fedfix)
    assert evidence(report, "002-4-fedfix-sync").endswith(f", lower in {ahead} of 2 seeds")
    # Every rate is shown, the best one as such; one that diverged on a seed is none.
    rows = {row.quantity: row.ours for row in report.rows}
    assert rows["X, 4 clients, F0, sync, γ = 0.01: federated loss, last 5 %"] == [1.5, 1.5]
    assert rows["X, 4 clients, F0, sync, γ = 0.03 (best): federated loss, last 5 %"] == [1.0, 1.0]
    assert sum("(best)" in name for name in rows) == len(RATES)
    check_figures(report.figures)
    report = equal_time.figure_4(results_of(runs[1:], lack=runs[:1]), PLAN, tmp_path)
    assert outcome(report, "002-4-fedfix-sync") == outcome(report, "002-4-sync-async") == "not run"
    assert outcome(report, "002-4-fedfix-async") == "holds"  # has all its runs


def test_at_an_end_of_its_rates_nobody_knows_which_would_have_been_best(tmp_path):
    rates = {**RATES, "async": {1e-4: 0.0, 3e-4: 0.1, 1e-3: 0.2}}
    runs = runs_with({"sync": [1.0, 1.0], "async": [2.0, 2.0], "FedFix-0.5": [0.5, 0.5]}, rates)
    report = equal_time.figure_4(results_of(runs), PLAN, tmp_path)
    assert outcome(report, "002-4-sync-async") == outcome(report, "002-4-fedfix-async") == "not decided"
    assert evidence(report, "002-4-sync-async").endswith("2.000 (γ = 0.0001, an end), lower in 2 of 2 seeds")
    assert outcome(report, "002-4-fedfix-sync") == "holds"


def test_table_2_by_hand(tmp_path):
    runs = runs_with({"sync": [1.0], "async": [2.0], "FedFix-0.5": [0.5]})
    report = equal_time.figure_4(results_of(runs), PLAN, tmp_path)
    # F0, C = 4, p = 1/4: async d = (4 · 1) · 1 · 1/4 = 1, N = 4 · 10; FedFix d = ⌈1/0.5⌉/4 = 0.5, N = 10/0.5.
    assert "| 4, F0 | sync | 0.25 to 0.25 | 10 | 1 | 1 | 0 | 0 | 1 |" in report.extra[0]
    assert "| 4, F0 | async | 1 to 1 | 40 | 0.25 | 0 | 1 | – | 4 |" in report.extra[0]
    assert "| 4, F0 | FedFix-0.5 | 0.5 to 0.5 | 20 | 0.5 | 1 | 0 | – | 2 |" in report.extra[0]


def test_a_grid_that_has_begun_is_drawn(tmp_path):
    runs = runs_with({"sync": [1.0, 1.0]}) + runs_with({"async": [2.0]}, scenario="F80")
    report = equal_time.figure_4(results_of(runs), PLAN, tmp_path)
    check_figures(report.figures)
    assert outcome(equal_time.figure_4(results_of([]), PLAN, tmp_path), "002-4-sync-async") == "not run"
