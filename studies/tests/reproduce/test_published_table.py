"""Published tables of accuracies are judged cell by cell, by their deviation or a margin."""

from pathlib import Path

import pytest

from fedapp.models import build_model
from studies.reproduce.plan import Plan, read_plan
from studies.reproduce.published_table import accuracies
from studies.tests.reproduce.made_up import evidence, make_run, outcome, results_of

PLAN, FLGO = read_plan("niid-bench"), read_plan("flgo-bench")


def table(shift: float, plan: Plan = PLAN, after: float = -0.05):
    """Make three runs of each cell: so many points from the published accuracy in round 2, and less after it."""
    runs = []
    for claim in plan.claims.values():
        cell, there = claim.thresholds, (claim.thresholds["published"] + shift) / 100
        for seed in plan.labels("seed"):
            labels = {"seed": seed, "division": cell["division"], "method": cell["method"]}
            runs.append(make_run(labels, {"accuracy": [0.1, there, there + after]}))
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


@pytest.mark.parametrize(("after", "expected"), [(0.0, "holds"), (-0.005, "doesn't hold")])
def test_of_flgos_table_the_end_of_the_runs_counts(tmp_path: Path, after: float, expected: str):
    report = accuracies(results_of(table(0.0, FLGO, after)), FLGO, tmp_path)
    assert {each.outcome for each in report.verdicts} == {expected}
    assert report.rows[0].quantity == "Dirichlet(0.1), FedAvg: accuracy of the last 5 % of the rounds, %"


def test_flgos_model_is_as_published_and_a_fifth_of_its_rounds_is_enough():
    (name,) = {run.config.model for run in FLGO.runs("data")}
    model = build_model(name, kind="image", input_shape=(1, 28, 28), num_classes=10)
    layers = [tuple(each.shape) for each in model.parameters() if each.ndim > 1]
    assert layers == [(32, 1, 5, 5), (64, 32, 5, 5), (512, 3136), (10, 512)]
    assert {FLGO.too_short(claim) for claim in FLGO.claims} == {""}
    cells = [(run.labels["method"], run.labels["seed"]) for run in FLGO.runs("data")]
    assert cells[:3] == [("FedAvg", 0), ("FedAvg", 1), ("FedAvg", 2)]  # cell by cell
    assert {run.config.clip_norm for run in FLGO.runs("data") if run.config.strategy == "feddyn"} == {0.0}
