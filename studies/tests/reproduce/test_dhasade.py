"""The reports on Dhasade et al.: what is worked out from the synthetic data, and verdicts on numbers made up."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.models import PERCEPTRON_SLOPE
from fedapp.sweeps.runner import perform
from studies.reproduce import femnist
from studies.reproduce import synthetic_report as synthetic
from studies.reproduce.experiment import Results, collect
from studies.reproduce.plan import read_plan
from studies.reproduce.runs import Runs
from studies.reproduce.store import FILE, read_stored
from studies.reproduce.synthetic.measures import Measured
from studies.reproduce.synthetic.problem import Points, SyntheticProblem
from studies.tests.reproduce.made_up import check_figures, make_run, outcome, results_of

PLAN = read_plan("000-synthetic")


@pytest.fixture
def authors_data(repository: Path) -> Path:
    """The folder with the authors' data in it."""
    folder = Path(os.environ.get("FEDAPP_TEST_DATA") or repository.parent / "shared" / "data")
    if not (folder / "synthetic_000").is_dir():
        pytest.skip("no real data; set FEDAPP_TEST_DATA to its folder")
    return folder


@pytest.fixture
def two_clients() -> SyntheticProblem:
    """With slope (1, 1) the scores are −1, 1 (labels 0, 1), and 0, 3 for the outlier."""
    usual = np.array([[-1.0, 0.0], [1.0, 0.0]]), np.array([0.0, 1.0])
    outlier = np.array([[0.0, 0.0], [1.5, 1.5]]), np.array([0.0, 1.0])
    return SyntheticProblem([usual, outlier], usual, (1.0, 1.0))


def sigmoid(z: float) -> float:
    return 1 / (1 + np.exp(-z))


# From the data ---------------------------------------------------------------------------------------------


def test_one_point_by_hand() -> None:
    point = Points(np.array([0.5]), np.array([1.0]))
    assert float(point.loss(0.5)) == pytest.approx(np.log1p(np.exp(-1.0)))
    assert float(point.gradient(0.5)) == pytest.approx(sigmoid(1.0) - 1)
    assert point.smoothness == pytest.approx(0.25, rel=1e-4)  # σ' has its largest value, 1/4, at 0
    assert point.loss([0.0, 1.0]).shape == (2,)


def test_two_clients_by_hand(two_clients: SyntheticProblem) -> None:
    usual, outlier = two_clients.locals
    # By symmetry: σ(−1 + b) + σ(1 + b) = 1 at b = 0; σ(b) + σ(3 + b) = 1 at b = −1.5.
    assert usual.minimiser == pytest.approx(0, abs=1e-9)
    assert outlier.minimiser == pytest.approx(-1.5)
    # F has the scores −1, 0, 1, 3; at its minimiser the four probabilities add up to the two labels.
    best = two_clients.objective.minimiser
    assert sum(sigmoid(score + best) for score in (-1, 0, 1, 3)) == pytest.approx(2)
    assert two_clients.distance == pytest.approx(-best)
    # One usual client: half the outlier and half the others is F itself.
    assert two_clients.paired_minimiser == pytest.approx(best)
    at_own = [abs(sum(sigmoid(s + b) for s in (-1, 0, 1, 3)) - 2) / 4 for b in (0, -1.5)]
    assert two_clients.limit_divergence == pytest.approx(max(at_own))
    gaps = [
        abs(sigmoid(b) + sigmoid(3 + b) - sigmoid(b - 1) - sigmoid(b + 1)) / 4
        for b in np.arange(-15, 10, 0.001)
    ]
    assert two_clients.largest_divergence == pytest.approx(
        max(gaps), rel=1e-4
    )  # ∂f_i − ∂F is half ∂f_1 − ∂f_2
    curvature = [
        np.mean([sigmoid(s + b) * (1 - sigmoid(s + b)) for s in (-1, 0, 1, 3)])
        for b in np.arange(-15, 10, 0.001)
    ]
    assert two_clients.smoothness == pytest.approx(max(curvature), rel=1e-4)
    assert two_clients.local_smoothness >= two_clients.smoothness


def test_classes_by_hand(two_clients: SyntheticProblem) -> None:
    assert two_clients.classes() == [
        {"outlier": False, "label": 0, "mean": [-1.0, 0.0], "deviation": [0.0, 0.0]},
        {"outlier": False, "label": 1, "mean": [1.0, 0.0], "deviation": [0.0, 0.0]},
        {"outlier": True, "label": 0, "mean": [0.0, 0.0], "deviation": [0.0, 0.0]},
        {"outlier": True, "label": 1, "mean": [1.5, 1.5], "deviation": [0.0, 0.0]},
    ]


def test_the_authors_constants_are_those_of_the_diagonal_slope(authors_data: Path) -> None:
    planned = PLAN.runs(str(authors_data))[0]
    problem = SyntheticProblem.of(planned.config, planned.num_clients)
    assert [len(y) for _, y in problem.clients] == [100] * 20
    assert problem.slope == PERCEPTRON_SLOPE
    diagonal = SyntheticProblem(problem.clients, problem.test, tuple(PLAN.setting("diagonal")))
    assert diagonal.smoothness == pytest.approx(0.190, abs=0.002)
    assert diagonal.limit_divergence == pytest.approx(0.407, abs=0.002)
    assert problem.smoothness == pytest.approx(0.134, abs=0.001)
    assert round(problem.distance) == 2


# The report on the synthetic problem -----------------------------------------------------------------------


def test_the_runs_of_the_full_study() -> None:
    planned = PLAN.runs("/data")
    assert len(planned) == len({run.key for run in planned}) == 7 * 3
    assert {run.num_clients for run in planned} == {20}
    by_case = {str(run.labels["case"]): run.config for run in planned}
    for steps in (10, 50, 300, 1000, 3000):
        assert by_case[f"τ = {steps}"].local_steps == steps
    prox, iid = by_case["FedProx, τ = 3000"], by_case["IID, τ = 1000"]
    assert (prox.proximal_mu, prox.local_steps) == (0.1, 3000)
    assert (iid.partitioner, iid.local_steps) == ("iid", 1000)
    for config in by_case.values():
        assert (config.participation, config.batch_size, config.lr) == ("paired", 0, 0.2)
        assert config.data_path == "/data/synthetic_000"


CONSTANTS = {
    "smoothness": 0.19,
    "local-smoothness": 0.2,
    "distance": 2.0,
    "limit-divergence": 0.41,
    "least-loss": 0.1,
    "largest-divergence": 0.5,
    "diagonal-smoothness": 0.19,
    "diagonal-limit-divergence": 0.41,
    "diagonal-distance": 1.04,
    "least-test-loss": 0.2,
    "paired-test-loss": 0.21,
    "classes": [{"outlier": False, "label": 0, "mean": [0, 0], "deviation": [1, 1]}],
}

# Plateau of the test loss, round that reaches it, largest divergence.
CASES = {
    "τ = 10": (0.25, 4, 0.1),
    "τ = 50": (0.3, 3, 0.2),
    "τ = 300": (0.4, 2, 0.3),
    "τ = 1000": (0.5, 1, 0.4),
    "τ = 3000": (0.6, 1, 0.42),
    "IID, τ = 1000": (0.201, 1, 0.01),
    "FedProx, τ = 3000": (0.3, 3, 0.2),
}


def synthetic_results(numbers: dict[str, Any], **changes: tuple[float, int, float]) -> Results:
    runs = []
    for case, (plateau, reached, divergence) in {**CASES, **changes}.items():
        loss = [1.0] * reached + [plateau] * (10 - reached)
        metrics = {"loss": loss, "client-loss": loss, "divergence": [math.nan] + [divergence] * 9}
        steps = int(case.rpartition(" ")[2])
        for seed in (0, 1, 2):
            runs.append(
                make_run({"case": case, "seed": seed}, metrics, local_epochs=0, local_steps=steps, seed=seed)
            )
    problems = {f"problem, seed {seed}": {**CONSTANTS, **numbers} for seed in (0, 1, 2)}
    biases = {run.planned.key: -2.0 for run in runs}
    return results_of(runs, numbers={**problems, **biases})


@pytest.mark.parametrize(
    ("changes", "numbers", "fails"),
    [
        ({}, {}, set()),
        ({"τ = 300": (0.28, 2, 0.3)}, {}, {"000-1-plateau"}),
        ({"τ = 300": (0.4, 5, 0.3)}, {}, {"000-1-speed"}),
        ({"τ = 300": (0.4, 2, 0.15)}, {}, {"000-1-divergence"}),
        ({"τ = 1000": (0.5, 1, 0.35)}, {}, {"000-1-zeta"}),
        ({"IID, τ = 1000": (0.25, 1, 0.01)}, {}, {"000-2"}),
        ({"FedProx, τ = 3000": (0.45, 3, 0.2)}, {}, {"000-4"}),
        ({"FedProx, τ = 3000": (0.3, 1, 0.2)}, {}, {"000-4"}),
        ({}, {"smoothness": 0.134}, {"000-3-smoothness"}),
        ({}, {"distance": 1.4}, {"000-3-distance"}),
        ({}, {"least-loss": -1e9}, {"000-3-bound"}),
    ],
)
def test_each_part_has_its_own_verdict(
    tmp_path: Path, changes: dict[str, Any], numbers: dict[str, Any], fails: set[str]
) -> None:
    report = synthetic.synthetic(synthetic_results(numbers, **changes), PLAN, tmp_path)
    outcomes = {verdict.claim: verdict.outcome for verdict in report.verdicts}
    assert outcomes.keys() == PLAN.claims.keys()
    assert {claim for claim, found in outcomes.items() if found == "doesn't hold"} == fails
    assert set(outcomes.values()) <= {"holds", "doesn't hold"}
    if not fails:
        check_figures(report.figures)
        assert "| τ = 10 | 0.25 ± 0 | 4 ± 0 | 0.1 ± " in report.extra[0]


def test_a_plateau_that_no_round_comes_near_is_not_reached_in_the_first(tmp_path: Path) -> None:
    results = synthetic_results({})
    for run in results.runs.where(case=["τ = 1000", "FedProx, τ = 3000"]):
        # It swings about 0.45 and about 0.3, and is never within 2 % of that.
        run.curves.columns["loss"][:] = (0.45 if run["case"] == "τ = 1000" else 0.3) + np.resize(
            [0.1, -0.1], 10
        )
    measured = Measured(results, PLAN)
    assert np.isnan(measured.reached("τ = 1000")).all()
    report = synthetic.synthetic(results, PLAN, tmp_path)
    assert outcome(report, "000-1-speed") == outcome(report, "000-4") == "not decided"


def test_without_data_or_runs_there_is_no_verdict(tmp_path: Path) -> None:
    whole = synthetic_results({})
    no_data = results_of(whole.runs, numbers={})
    report = synthetic.synthetic(no_data, PLAN, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} == {"not run"}
    assert report.figures == []
    first, *others = whole.runs.where(case="τ = 10")
    rest = [run for run in whole.runs if run is not first]
    report = synthetic.synthetic(results_of(rest, lack=[first], numbers=whole.numbers), PLAN, tmp_path)
    assert outcome(report, "000-1-plateau") == "not run"
    assert outcome(report, "000-2") == "holds"
    assert [path.name for path in report.figures] == ["figure-3.png"]
    assert len(others) == 2


def test_a_run_and_its_problem_are_measured(tmp_path: Path) -> None:
    grid = {"seed": [0], "case": [{"label": "τ = 10", "local-steps": 2}]}
    plan = PLAN.as_quick().model_copy(update={"grid": grid})
    assert [perform(run, tmp_path / "runs", "sequential") for run in plan.runs()] == [""]
    collect(plan, tmp_path)
    numbers = read_stored(tmp_path / FILE).numbers
    (run,) = Results.of(plan, read_stored(tmp_path / FILE)).runs
    problem = numbers["problem, seed 0"]
    assert problem.keys() == CONSTANTS.keys()
    assert problem["least-test-loss"] <= problem["paired-test-loss"]
    assert run.final("loss") == pytest.approx(problem["least-test-loss"], abs=0.5)
    assert -10 < numbers[run.planned.key] < 0
    assert (np.diff(run.column("loss")) < 0).any()

    other = plan.model_copy(update={"settings": {**plan.settings, "diagonal": [2.0, 0.0]}})
    assert "problem, seed 0" not in Results.of(other, read_stored(tmp_path / FILE)).numbers
    collect(other, tmp_path)
    again = read_stored(tmp_path / FILE).numbers
    changed = {key for key, value in again["problem, seed 0"].items() if value != problem[key]}
    assert changed == {"diagonal-smoothness", "diagonal-limit-divergence", "diagonal-distance"}
    assert again[run.planned.key] == numbers[run.planned.key]


# FEMNIST ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iid", "writer", "end", "expected"),
    [
        ((10, 10, 10), (15, 16, 15), 0.8, ("holds", "holds", "holds")),
        ((10, 10, 10), (10, 9, 8), 0.8, ("doesn't hold", "doesn't hold", "holds")),
        ((10, 10, 10), (12, 12, 9), 0.95, ("not decided", "doesn't hold", "doesn't hold")),
        (
            (10, 10, 10),
            (15, 16, 99),
            0.7,
            ("holds", "not decided", "holds"),
        ),  # never: one round more than there are
    ],
)
def test_femnist_by_writer_is_slower_and_ends_lower(
    tmp_path: Path, iid: tuple[int, ...], writer: tuple[int, ...], end: float, expected: tuple[str, ...]
) -> None:
    runs = []
    for partitioner, reached, last in (("iid", iid, 0.9), ("natural", writer, end)):
        for seed, at in enumerate(reached):
            curve = [0.1 if number < at else 0.8 for number in range(20)] + [last]
            labels = {"partitioner": partitioner, "seed": seed}
            runs.append(make_run(labels, {"accuracy": curve, "loss": curve}, partitioner=partitioner))
    counts = {"clients": 290, "training": 30_000, "test": 7_000}
    numbers = {
        "iid, seed 0": counts,
        "natural, seed 0": counts,
        "shared, seed 0": {"training": 29_000, "test": 1},
    }
    plan = read_plan("000-femnist")
    report = femnist.femnist(results_of(runs, numbers=numbers), plan, tmp_path)
    assert tuple(outcome(report, f"000-5-{part}") for part in ("slower", "ratio", "final")) == expected
    rows = {row.quantity: row.ours for row in report.rows}
    assert rows["by writer: training rows"] == [30_000]
    assert rows["both sides: test rows"] == [1]
    check_figures(report.figures)
    report = femnist.femnist(results_of(runs[:-1], lack=runs[-1:]), plan, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} == {"not run"}


def test_the_rows_of_both_sides_are_counted(tmp_path: Path) -> None:
    runs = []
    for partitioner, rows, test in (("iid", [0, 1, 2, 3], [7]), ("natural", [1, 2, 5], [7, 8])):
        run = make_run({"partitioner": partitioner, "seed": 0}, {"loss": [1.0]})
        folder = tmp_path / partitioner
        folder.mkdir()
        np.savez(
            folder / "partition.npz", client_indices=rows, client_offsets=[0, 1, len(rows)], test_indices=test
        )
        runs.append(replace(run, folder=folder))
    plan = read_plan("000-femnist")
    numbers = femnist.measure_femnist(plan, Runs(runs), {}, "")
    assert numbers == {
        "iid, seed 0": {"clients": 2, "training": 4, "test": 1},
        "natural, seed 0": {"clients": 2, "training": 3, "test": 2},
        "shared, seed 0": {"training": 2, "test": 1},
    }
    gone = Runs(replace(run, folder=tmp_path / "gone") for run in runs)
    assert femnist.measure_femnist(plan, gone, numbers, "") == numbers
