"""Verdicts on FedFix's own interval, on numbers made up."""

import pytest

from studies.reproduce import fedfix_auto
from studies.reproduce.plan import read_plan
from studies.tests.reproduce.made_up import evidence, make_run, outcome, results_of

PLAN = read_plan("fedfix-auto")
INTERVALS = ("0.25", "0.5", "1", "2", "4", "auto")


def run_of(interval, seed, time, scenario="F80"):
    """Make a run that exceeds 85 % at a time: halfway between two evaluations."""
    labels = {"seed": seed, "time-scenario": scenario, "lr": 0.1, "interval": interval}
    curve = {"accuracy": [0.1, 0.8, 0.9, 0.7], "time": [0.0, time - 1, time + 1, time + 2]}
    return make_run(labels, curve, time_budget=20.0, seed=seed)


def test_time_is_on_the_line_between_evaluations():
    assert fedfix_auto.time_to(run_of("1", 1, 6.0), 0.85) == pytest.approx(6.0)
    assert fedfix_auto.time_to(run_of("1", 1, 6.0), 0.05) == 0.0
    assert fedfix_auto.time_to(run_of("1", 1, 6.0), 0.95) == 20.0


@pytest.mark.parametrize(
    ("auto", "expected"),
    [([5.0] * 4, "holds"), ([5.6] * 4, "doesn't hold"), ([5.3, 6.5, 5.6, 6.0], "not decided")],
)
def test_auto_is_compared_with_the_best_fixed_interval(tmp_path, auto, expected):
    times = {interval: [6.0 + i] * 4 for i, interval in enumerate(INTERVALS)} | {
        "1": [5.0] * 4,
        "auto": auto,
    }
    runs = [run_of(name, seed + 1, time) for name, own in times.items() for seed, time in enumerate(own)]
    tried = [run_of(name, 0, 1.0) for name in INTERVALS]  # the tuning's seed isn't judged
    report = fedfix_auto.compare(results_of([*tried, *runs]), PLAN, tmp_path)
    assert outcome(report, "fedfix-auto-f80") == expected
    assert " times that of Δt = 1 (" in evidence(report, "fedfix-auto-f80")
    assert outcome(report, "fedfix-auto-f0") == "not run"
