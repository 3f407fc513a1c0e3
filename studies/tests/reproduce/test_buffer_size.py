"""Verdicts on FedBuff's buffers, on numbers made up."""

import pytest

from studies.reproduce import buffer_size
from studies.reproduce.plan import read_plan
from studies.tests.reproduce.made_up import evidence, make_run, outcome, results_of

PLAN = read_plan("buffer-size")
CELL = "10 clients, unlike, F80"


def run_of(size, seed, accuracy, lr=0.1):
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
    judged = [run_of(size, seed + 1, end) for size, own in ends.items() for seed, end in enumerate(own)]
    tried = [run_of(size, 0, 0.95, lr) for size in ends for lr in (0.03, 0.1, 0.3)]  # aren't judged
    report = buffer_size.compare(results_of([*tried, *judged]), PLAN, tmp_path)
    assert outcome(report, "buffer-size-10-unlike-undiscounted") == expected
    assert evidence(report, "buffer-size-10-unlike-undiscounted").endswith("below the best, m = 5")
    assert outcome(report, "buffer-size-10-unlike") == "not run"


def test_a_step_size_at_the_end_of_those_tried_is_marked(tmp_path):
    judged = [run_of(size, seed, 0.9, lr) for size, lr in ((2, 0.1), (5, 0.3)) for seed in (1, 2, 3)]
    tried = [run_of(2, 0, 0.9, lr) for lr in (0.03, 0.1, 0.3)]
    names = [row.quantity for row in buffer_size.compare(results_of([*tried, *judged]), PLAN, tmp_path).rows]
    assert names == [
        f"{CELL}, constant, m = 2, γ = 0.1: final accuracy",
        f"{CELL}, constant, m = 5, γ = 0.3, an end of those tried: final accuracy",
    ]
