"""Verdicts on the graph of clients by last updates, on numbers made up."""

from pathlib import Path

import numpy as np
import pytest

from strategies.clients import graph
from studies.reproduce import graph_sources
from studies.reproduce.plan import read_plan
from studies.reproduce.runs import Run, Runs
from studies.tests.reproduce.made_up import evidence, make_run, outcome, results_of

PLAN = read_plan("graph-sources")
SEEDS, IMBALANCES = range(1, 5), (1.0, 10.0, 100.0)


def run_of(source: str, seed: int, imbalance: float, accuracy: float) -> Run:
    labels = {"source": source, "seed": seed, "class-imbalance": imbalance, "lr": 0.1}
    return make_run(labels, {"accuracy": [0.1, accuracy]}, seed=seed, class_imbalance=imbalance, lr=0.1)


@pytest.mark.parametrize(
    ("falls", "rho", "gain", "outcomes"),
    [
        (lambda seed: 1.0, 0.6, 0.0, ["holds", "holds", "holds"]),
        (lambda seed: -1.0, 0.4, -0.02, ["doesn't hold", "doesn't hold", "doesn't hold"]),
        (lambda seed: 1.0 if seed > 1 else -1.0, 0.6, -0.01, ["not decided", "holds", "not decided"]),
    ],
)
def test_verdicts(tmp_path, falls, rho, gain, outcomes):
    runs, numbers = [], {}
    for seed in SEEDS:
        for place, imbalance in enumerate(IMBALANCES):
            data = run_of("data", seed, imbalance, 0.8 + seed / 100)
            ours = run_of("updates", seed, imbalance, 0.8 + seed / 100 + gain + (seed - 2.5) / 1000)
            runs += [data, ours]
            numbers[f"homogeneity {ours.planned.key}"] = 2.0 - place * falls(seed)
            numbers[f"correlation {ours.planned.key}"] = rho + (seed - 1) / 100
    report = graph_sources.compare(results_of(runs, numbers=numbers), PLAN, tmp_path)
    claims = ["1-homogeneity", "2-pairs", "3-accuracy-10"]
    assert [outcome(report, f"graph-sources-{claim}") for claim in claims] == outcomes
    # Of −1.5 to 1.5 tenths of a point Student's t for three degrees of freedom makes 3.182 × 0.129 / √4.
    assert evidence(report, "graph-sources-3-accuracy-100").endswith(f"{100 * gain:+.2f} ± 0.21")
    lacking = graph_sources.compare(results_of(runs[:-1], lack=runs[-1:]), PLAN, tmp_path)
    assert outcome(lacking, "graph-sources-3-accuracy-100") == "not run"


def test_what_is_measured_of_graphs(tmp_path: Path) -> None:
    A = np.array([[0, 1, 2, 3], [1, 0, 4, 5], [2, 4, 0, 7], [3, 5, 7, 0]], dtype=float)
    other = 8 * (A > 0) - A  # the pairs in the opposite order
    runs = []
    for source, adjacency in (("data", A), ("updates", other)):
        (tmp_path / source).mkdir()
        np.savez(tmp_path / source / "graph.npz", adjacency=adjacency)
        made = run_of(source, 1, 10.0, 0.5)
        runs.append(Run(made.planned, made.curves, tmp_path / source))
    numbers = graph_sources.measure_compare(PLAN, Runs(runs), {}, "")
    data, updates = (run.planned.key for run in runs)
    assert numbers[f"homogeneity {data}"] == graph.homogeneity(A) == 22 / 12
    assert numbers[f"correlation {updates}"] == pytest.approx(-1.0)
    gone = [Run(run.planned, run.curves) for run in runs]
    assert graph_sources.measure_compare(PLAN, Runs(gone), numbers, "") == numbers
