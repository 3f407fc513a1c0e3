"""Verdicts and figures of 003's reports, on numbers made up so that a claim holds, or doesn't."""

import math

import numpy as np
import pytest

from fedapp.reproduce import paper_003, paper_003_sensitivity, study_003_graph
from fedapp.reproduce.experiment import Results
from fedapp.reproduce.plan import read_plan
from fedapp.reproduce.runs import Runs
from tests.reproduce.made_up import check_figures, evidence, make_run, outcome, plan_with, results_of

BALANCED, IMBALANCED = "femnist balanced", "femnist imbalanced"


def table_runs(rounds):
    """Runs by (data, β) whose accuracy passes 75 % after so many rounds, one per seed."""
    return [
        make_run(
            {"loss": "convex", "data": data, "perturbation-beta": beta, "seed": seed},
            {"accuracy": (column := [0.5] * min(at, 40) + [0.8] * max(0, 41 - at)), "loss": column},
        )
        for (data, beta), by_seed in rounds.items()
        for seed, at in enumerate(by_seed)
    ]


def table_plan(balanced=(BALANCED,), imbalanced=(IMBALANCED,)):
    """The plan that ships with other readings of the data, the registered ones first."""
    thresholds = {
        "003-3-direction": {"data": list(imbalanced)},
        "003-3-magnitude": {"data": list(imbalanced), "published": 1.6, "close": 0.15},
        "003-3-balanced": {"data": list(balanced), "band": 0.1},
    }
    return plan_with("003-table-4-2", thresholds, grid={"data": [*imbalanced, *balanced]})


@pytest.mark.parametrize(
    ("slow", "fast", "balanced", "expected"),
    [
        ((16, 32), (10, 20), (10, 10), ("holds", "holds", "holds")),
        ((16, 32), (10, 20), (8, 8), ("holds", "holds", "doesn't hold")),  # 10/8 is a difference
        (
            (21, 21),
            (20, 20),
            (10, 10),
            ("holds", "doesn't hold", "not decided"),
        ),  # 1.05 is none either
        ((20, 20), (22, 10), (10, 10), ("not decided", "holds", "holds")),  # seeds disagree; 1.45 on average
        ((20, 20), (22, 22), (10, 10), ("doesn't hold", "doesn't hold", "not decided")),
        ((16, 99), (10, 20), (10, 10), ("holds", "not decided", "not decided")),  # never, at β = 1
    ],
)
def test_direction_magnitude_and_balanced_half_are_three_claims(tmp_path, slow, fast, balanced, expected):
    rounds = {
        (IMBALANCED, 1.0): slow,
        (IMBALANCED, 0.5): fast,
        (BALANCED, 1.0): (10, 10),
        (BALANCED, 0.5): balanced,
    }
    report = paper_003.table_4_2(results_of(table_runs(rounds)), table_plan(), tmp_path)
    assert (
        tuple(outcome(report, f"003-3-{part}") for part in ("direction", "magnitude", "balanced")) == expected
    )
    by_name = {row.quantity: row for row in report.rows}
    assert by_name[f"{BALANCED}, convex, β = 1: rounds to 75%"].ours == [10.0, 10.0]
    assert by_name[f"{BALANCED}, convex, β = 1: rounds to 75%"].published == 28
    assert by_name[f"{IMBALANCED}, convex, β = 0.5: accuracy, %"].published == 81.24
    check_figures(report.figures)


def test_the_registered_reading_is_judged_and_the_others_are_shown(tmp_path):
    other = f"{IMBALANCED}, B"
    rounds = {
        (IMBALANCED, 1.0): (19, 22), (IMBALANCED, 0.5): (25, 25), (other, 1.0): (32, 32), (other, 0.5): (20, 20),
        (BALANCED, 1.0): (10, 10), (BALANCED, 0.5): (10, 10),
    }  # fmt: skip
    results = results_of(table_runs(rounds))
    report = paper_003.table_4_2(results, table_plan(imbalanced=(IMBALANCED, other)), tmp_path)
    assert outcome(report, "003-3-direction") == "doesn't hold"
    assert evidence(report, "003-3-direction") == (
        f"{IMBALANCED}: 19, 22 rounds at β = 1, 25, 25 at β = 0.5; "
        f"other readings: {other} (would hold): 32, 32 rounds at β = 1, 20, 20 at β = 0.5"
    )
    report = paper_003.table_4_2(results, table_plan(imbalanced=(other, IMBALANCED)), tmp_path)
    assert outcome(report, "003-3-direction") == outcome(report, "003-3-magnitude") == "holds"


def test_without_its_runs_a_reading_is_not_judged(tmp_path):
    rounds = {
        (IMBALANCED, 1.0): (3, 3),
        (IMBALANCED, 0.5): (2, 2),
        (BALANCED, 1.0): (3, 3),
        (BALANCED, 0.5): (3, 3),
    }
    runs = table_runs(rounds)
    report = paper_003.table_4_2(results_of(runs[:-1], lack=runs[-1:]), table_plan(), tmp_path)
    assert outcome(report, "003-3-direction") == "holds"
    assert outcome(report, "003-3-balanced") == "not run"
    assert evidence(report, "003-3-balanced") == f"{BALANCED}: 1 of 8 runs aren't there"


SETTINGS = {
    "E 1": {"local_epochs": 1}, "E 5": {"local_epochs": 5}, "E 10": {"local_epochs": 10, "lr": 0.012},
    "E 20": {"local_epochs": 20}, "G 1": {"clip_norm": 1.0}, "G 10": {"clip_norm": 10.0}, "γ 1e-3": {"lr": 0.001},
    "γ 1e-2": {"lr": 0.01}, "γ 1e-1": {"lr": 0.1},
}  # fmt: skip


def sensitivity_runs(gain=0.1, clipped=0.5, loose=0.0, dip=0.3):
    """Runs on one dataset: what small β gains, what clipping leaves and costs, and how far γ = 0.1 falls back."""
    runs = []
    for setting, config in SETTINGS.items():
        for beta in (1.0, 0.5):
            level = clipped if setting == "G 1" else 0.8 + gain * (beta == 0.5) - loose * (setting == "G 10")
            low = level - dip * (setting == "γ 1e-1" and beta == 0.5)
            labels = {"data": "femnist", "setting": setting, "perturbation-beta": beta, "seed": 0}
            metrics = {"accuracy": [0.1, level, low, level], "loss": [3.0, 1.0, 1.0, 1.0]}
            runs.append(make_run(labels, metrics, **config))
    return runs


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("holds", "holds", "holds")),
        ({"gain": -0.1}, ("doesn't hold", "holds", "holds")),
        ({"clipped": 0.95}, ("holds", "doesn't hold", "holds")),
        ({"loose": 0.1}, ("holds", "doesn't hold", "holds")),
        ({"dip": 0.0}, ("holds", "holds", "doesn't hold")),
    ],
)
def test_figures_4_3_to_4_8_look_at_epochs_clipping_and_step_size(tmp_path, changes, expected):
    parts = ("epochs", "clipping", "step-size")
    claims = [f"003-4-{part}" for part in parts]
    plan = plan_with("003-figures-4", {claim: {"data": ["femnist"]} for claim in claims})
    report = paper_003_sensitivity.figures_4(results_of(sensitivity_runs(**changes)), plan, tmp_path)
    assert tuple(outcome(report, f"003-4-{part}") for part in parts) == expected
    if not changes:
        # Accuracy averaged over the rounds, E = 1: (0.1 + 3 · 0.9)/4 − (0.1 + 3 · 0.8)/4 = 0.075.
        assert "+7.50 at E = 1" in evidence(report, "003-4-epochs")
        assert "add up to 30.0 points with β = 0.5 and 0.0" in evidence(report, "003-4-step-size")
    check_figures(report.figures)


def test_ladders_have_all_values_there_are_and_the_usual_one_once():
    plan = read_plan("003-figures-4")
    own = Runs(sensitivity_runs())
    ladder = paper_003_sensitivity._ladder
    assert ladder(own, "4-5-clipping", plan) == {"G = 1": "G 1", "G = 10": "G 10", "G = ∞": "E 10"}
    assert list(ladder(own, "4-7-step-size", plan)) == [
        "γ = 0.001", "γ = 0.01", "γ = 0.012", "γ = 0.1",
    ]  # fmt: skip
    assert list(ladder(own, "4-3-epochs", plan)) == [
        "E = 1",
        "E = 5",
        "E = 10",
        "E = 20",
    ]


def graph_plan():
    """The study's plan on the embedded digits, small."""
    claims = read_plan("003-graph").claims
    plan = plan_with("003-graph", {claim: {"datasets": ["digits"]} for claim in claims})
    sizes = {"datasets": ["digits", "cifar100"], "num-clients": 8, "seeds": [0, 1]}
    return plan.model_copy(update={"settings": {**plan.settings, **sizes}})


def test_the_study_of_graphs_is_drawn_from_its_numbers(tmp_path):
    plan = graph_plan()
    numbers = study_003_graph.measure(plan, Runs([]), {}, "/nowhere")
    assert list(numbers.pop("absent")) == ["cifar100"]
    assert len(numbers) == 2 * 4 * 2
    cell = numbers["digits, 8 clients, φ² = 0, κ⁻¹ = 10, seed 0"]
    assert sum(cell["counts"]) == len(cell["heat"]) == 8 * 7 / 2
    assert numbers["digits, 8 clients, φ² = 0, κ⁻¹ = 10, seed 1"]["heat"] == []  # the first is drawn
    panel = study_003_graph._panel(cell, 0.0, 10.0)
    above = panel.heat[np.triu_indices(8, 1)]
    assert float(np.median(above)) == pytest.approx(cell["median"], rel=0.02)
    np.testing.assert_array_equal(panel.heat, panel.heat.T)
    results = Results([], Runs([]), numbers, {}, {"cifar100": "no file"})
    report = study_003_graph.report(results, plan, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} <= {"holds", "doesn't hold"}
    assert len(report.rows) == 4 * 2 * 4
    check_figures(report.figures)
    again = study_003_graph.measure(plan, Runs([]), dict.fromkeys(numbers, "known"), "/nowhere")
    assert list(again.pop("absent")) == ["cifar100"]
    assert again == dict.fromkeys(numbers, "known")


@pytest.mark.parametrize(
    ("homogeneities", "expected"), [([8.0, 6.0, 4.0, 3.0], "holds"), ([8.0, 6.0, 4.0, 2.0], "doesn't hold")]
)
def test_homogeneity_falls_steeply_up_to_the_bend(homogeneities, expected, tmp_path):
    plan = graph_plan()
    kappas = plan.setting("class-imbalances")
    cell = {
        "median": 0.1, "skewness": 2.0, "theta": 1.0, "phi": 1.0, "eigenvalues": [0.0, 1.0], "first-bin": 500,
        "counts": [1], "every": 1, "heat": [-100],
    }  # fmt: skip
    numbers = {
        f"digits, 8 clients, φ² = {phi:g}, κ⁻¹ = {kappa:g}, seed {seed}": {**cell, "homogeneity": value}
        for kappa, value in zip(kappas, homogeneities, strict=True)
        for phi in (0.0, 1.0)
        for seed in (0, 1)
    }
    report = study_003_graph.report(Results([], Runs([]), numbers, {}, {"cifar100": ""}), plan, tmp_path)
    assert outcome(report, "003-2-homogeneity") == expected
    assert outcome(report, "003-1-lognormal") == "doesn't hold"  # 2 > 1
    assert outcome(report, "003-1-grows") == outcome(report, "003-2-spectrum") == "doesn't hold"  # all alike
    assert not math.isnan(report.rows[0].mean)
