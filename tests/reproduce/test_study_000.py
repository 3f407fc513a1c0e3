"""The synthetic study of 000: what it works out from the data, and the study as a whole with fewer steps."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedapp.models import PERCEPTRON_SLOPE
from fedapp.reproduce import study_000_synthetic as study
from fedapp.reproduce.synthetic_problem import NUM_CLIENTS, Points, Problem


@pytest.fixture
def authors_data(repository: Path) -> Path:
    """The folder with the authors' data in it."""
    folder = Path(os.environ.get("FEDAPP_TEST_DATA") or repository.parent / "shared" / "data")
    if not (folder / "synthetic_000").is_dir():
        pytest.skip("no real data; set FEDAPP_TEST_DATA to its folder")
    return folder


@pytest.fixture
def two_clients() -> Problem:
    """With slope (1, 1) the scores are −1, 1 (labels 0, 1), and 0, 3 for the outlier."""
    usual = np.array([[-1.0, 0.0], [1.0, 0.0]]), np.array([0.0, 1.0])
    outlier = np.array([[0.0, 0.0], [1.5, 1.5]]), np.array([0.0, 1.0])
    return Problem([usual, outlier], usual, (1.0, 1.0))


def sigmoid(z: float) -> float:
    return 1 / (1 + np.exp(-z))


# From the data ---------------------------------------------------------------------------------------------


def test_one_point_by_hand() -> None:
    point = Points(np.array([0.5]), np.array([1.0]))
    assert float(point.loss(0.5)) == pytest.approx(np.log1p(np.exp(-1.0)))
    assert float(point.gradient(0.5)) == pytest.approx(sigmoid(1.0) - 1)
    assert point.smoothness == pytest.approx(0.25, rel=1e-4)  # σ' has its largest value, 1/4, at 0
    assert point.loss([0.0, 1.0]).shape == (2,)


def test_two_clients_by_hand(two_clients: Problem) -> None:
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


def test_the_authors_constants_are_those_of_the_diagonal_slope(authors_data: Path) -> None:
    config = study.plan_runs(quick=True, data_path=str(authors_data / "synthetic_000"))[0].config
    problem = Problem.of(config)
    assert [len(y) for _, y in problem.clients] == [100] * NUM_CLIENTS
    assert problem.slope == PERCEPTRON_SLOPE
    diagonal = Problem(problem.clients, problem.test, study.DIAGONAL)
    assert diagonal.smoothness == pytest.approx(study.SMOOTHNESS, abs=0.002)
    assert diagonal.limit_divergence == pytest.approx(study.ZETA, abs=0.002)
    assert problem.smoothness == pytest.approx(0.134, abs=0.001)
    assert round(problem.distance) == study.DISTANCE


# The study -------------------------------------------------------------------------------------------------


def test_the_runs_of_the_full_study() -> None:
    planned = study.plan_runs(quick=False)
    assert len(planned) == len({run.name for run in planned}) == 7 * 3
    assert {run.num_clients for run in planned} == {20}
    by_case = {str(run.labels["case"]): run.config for run in planned}
    assert [by_case[f"tau-{steps}"].local_steps for steps in (10, 50, 300, 1000)] == [10, 50, 300, 1000]
    assert (by_case["fedprox"].proximal_mu, by_case["fedprox"].local_steps) == (0.1, 3000)
    assert (by_case["iid"].partitioner, by_case["iid"].local_steps) == ("iid", 1000)
    for config in by_case.values():
        assert (config.participation, config.batch_size, config.lr) == ("paired", 0, 0.2)


def test_authors_runs_and_generated_ones_have_names_of_their_own(authors_data: Path) -> None:
    theirs, ours = (study.plan_runs(quick=True, data_path=path) for path in (str(authors_data), ""))
    assert not {run.name for run in theirs} & {run.name for run in ours}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the study take fewer steps."""
    for name, value in {
        "LOCAL_STEPS": (4, 20, 80, 250),
        "LONG": 400,
        "QUICK_ROUNDS": 5,
        "QUICK_LONG_ROUNDS": 4,
    }.items():
        monkeypatch.setattr(study, name, value)


@pytest.mark.usefixtures("small")
def test_the_study_as_a_whole(tmp_path: Path) -> None:
    study.main([str(tmp_path), "--quick", "--engine", "sequential"])
    report = (tmp_path / "report.md").read_text("utf-8")
    for claim in ("000-1", "000-2", "000-3", "000-4"):
        assert f"| {claim} |" in report
    assert "0.407" in report
    assert "0.19 |" in report
    for name in ("figure-2.png", "figure-3.png", "figure-5.png"):
        with Image.open(tmp_path / name) as image:
            assert image.width == 1200
    with (tmp_path / "numbers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 6 + 2 * 5  # rounds from 0, of five and of two cases
    after = [row for row in rows if row["aggregation"] != "0"]  # before round 1 nobody has trained
    last = {row["case"]: {key: float(row[key]) for key in ("loss", "divergence", "drift")} for row in after}
    # From 20 steps on the plateaus are in order; more steps drift further apart, IID clients hardly.
    assert last["tau-20"]["loss"] < last["tau-80"]["loss"] < last["tau-250"]["loss"] < last["tau-400"]["loss"]
    for key in ("divergence", "drift"):
        found = [last[f"tau-{steps}"][key] for steps in (4, 20, 80, 250, 400)]
        assert found == sorted(found)
        assert last["iid"][key] < 0.2 * last["tau-250"][key]
    assert last["fedprox"]["loss"] < last["tau-400"]["loss"]
    changed = (tmp_path / "report.md").stat().st_mtime_ns
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/summary.json")}
    assert len(runs) == 7
    study.run(tmp_path, quick=True, engine="sequential")  # nothing is run again
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert (tmp_path / "report.md").stat().st_mtime_ns > changed
