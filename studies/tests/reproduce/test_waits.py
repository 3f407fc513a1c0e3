"""Verdicts on FedFix's own interval and on FedBuff's buffers, on numbers made up."""

import pytest

from studies.reproduce import waits
from studies.reproduce.plan import read_plan
from studies.tests.reproduce.made_up import evidence, make_run, outcome, results_of

FEDFIX, FEDBUFF = read_plan("fedfix-auto"), read_plan("buffer-size")
INTERVALS = ("0.25", "0.5", "1", "2", "4", "auto")
CELL = "10 clients, unlike, F80"


def run_of(interval, seed, time, scenario="F80"):
    """Make a run that exceeds 85 % at a time: halfway between two evaluations."""
    labels = {"seed": seed, "time-scenario": scenario, "lr": 0.1, "interval": interval}
    curve = {"accuracy": [0.1, 0.8, 0.9, 0.7], "time": [0.0, time - 1, time + 1, time + 2]}
    return make_run(labels, curve, time_budget=20.0, seed=seed)


def test_time_is_on_the_line_between_evaluations():
    assert waits.time_to(run_of("1", 1, 6.0), 0.85) == pytest.approx(6.0)
    assert waits.time_to(run_of("1", 1, 6.0), 0.05) == 0.0
    assert waits.time_to(run_of("1", 1, 6.0), 0.95) == 20.0


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
    report = waits.intervals(results_of([*tried, *runs]), FEDFIX, tmp_path)
    assert outcome(report, "fedfix-auto-f80") == expected
    assert " times that of Δt = 1 (" in evidence(report, "fedfix-auto-f80")
    assert outcome(report, "fedfix-auto-f0") == "not run"


def run_with(size, seed, accuracy, lr=0.1):
    """Make a run that ends at an accuracy."""
    labels = {"seed": seed, "lr": lr, "case": f"{CELL}, m = {size}", "staleness-discount": "constant"}
    return make_run(
        labels, {"accuracy": [0.99, accuracy]}, buffer_size=size, lr=lr, seed=seed, num_clients=10
    )


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.901, 0.901, 0.901], "holds"),
        ([0.88, 0.88, 0.88], "doesn't hold"),
        ([0.86, 0.905, 0.87], "not decided"),
    ],
)
def test_a_buffer_is_compared_with_the_best_one_by_the_last_accuracy(tmp_path, accuracies, expected):
    ends = {1: [0.5] * 3, 2: accuracies, 5: [0.91, 0.91, 0.91], 10: [0.7] * 3}
    judged = [run_with(size, seed + 1, end) for size, own in ends.items() for seed, end in enumerate(own)]
    tried = [run_with(size, 0, 0.95, lr) for size in ends for lr in (0.03, 0.1, 0.3)]  # aren't judged
    report = waits.buffers(results_of([*tried, *judged]), FEDBUFF, tmp_path)
    assert outcome(report, "buffer-size-10-unlike-undiscounted") == expected
    assert evidence(report, "buffer-size-10-unlike-undiscounted").endswith("below the best, m = 5")
    assert outcome(report, "buffer-size-10-unlike") == "not run"


def test_a_step_size_at_the_end_of_those_tried_is_marked(tmp_path):
    judged = [run_with(size, seed, 0.9, lr) for size, lr in ((2, 0.1), (5, 0.3)) for seed in (1, 2, 3)]
    tried = [run_with(2, 0, 0.9, lr) for lr in (0.03, 0.1, 0.3)]
    names = [row.quantity for row in waits.buffers(results_of([*tried, *judged]), FEDBUFF, tmp_path).rows]
    assert names == [
        f"{CELL}, constant, m = 2, γ = 0.1: final accuracy",
        f"{CELL}, constant, m = 5, γ = 0.3, an end of those tried: final accuracy",
    ]


def test_a_claim_in_which_a_step_size_is_at_the_end_is_not_decided(tmp_path):
    judged = [
        run_with(size, seed, 0.9, 0.3 if size == 5 else 0.1) for size in (1, 2, 5, 10) for seed in (1, 2, 3)
    ]
    tried = [run_with(size, 0, 0.95, lr) for size in (1, 2, 5, 10) for lr in (0.03, 0.1, 0.3)]
    report = waits.buffers(results_of([*tried, *judged]), FEDBUFF, tmp_path)
    assert outcome(report, "buffer-size-10-unlike-undiscounted") == "not decided"
