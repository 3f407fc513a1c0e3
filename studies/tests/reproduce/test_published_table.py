"""A published table of accuracies is judged cell by cell, by its deviation or a margin."""

from pathlib import Path

import pytest

from studies.reproduce.plan import read_plan
from studies.reproduce.published_table import accuracies
from studies.tests.reproduce.made_up import evidence, make_run, outcome, results_of

PLAN = read_plan("niid-bench")


def table(shift: float):
    """Make three runs of each cell, which peak so many points from the published accuracy in their second round."""
    runs = []
    for claim in PLAN.claims.values():
        cell, best = claim.thresholds, (claim.thresholds["published"] + shift) / 100
        for seed in PLAN.labels("seed"):
            labels = {"seed": seed, "division": cell["division"], "method": cell["method"]}
            runs.append(make_run(labels, {"accuracy": [0.1, best, best - 0.05]}))
    return runs


@pytest.mark.parametrize(
    ("shift", "expected"), [(0.0, "holds"), (0.29, "holds"), (-0.29, "holds"), (0.31, "doesn't hold")]
)
def test_a_cell_holds_within_a_margin_of_the_published(tmp_path: Path, shift: float, expected: str):
    report = accuracies(results_of(table(shift)), PLAN, tmp_path)
    assert {verdict.claim for verdict in report.verdicts} == set(PLAN.claims)
    assert {each.outcome for each in report.verdicts if each.claim.startswith("niid-1")} == {expected}
    assert outcome(report, "niid-2-fednova") == "holds"  # within two deviations, .78 points
    assert f"{shift:+.2f} points" in evidence(report, "niid-1-fedavg")
    assert report.figures[0].exists()


def test_a_cell_without_all_its_runs_is_not_run(tmp_path: Path):
    runs = table(0.0)
    report = accuracies(results_of(runs[1:], lack=runs[:1]), PLAN, tmp_path)
    assert outcome(report, "niid-1-fedavg") == "not run"
    assert outcome(report, "niid-1-scaffold") == "holds"
