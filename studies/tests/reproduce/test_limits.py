"""004's report: distances to the two minimisers, and verdicts on numbers made up so that they differ."""

import numpy as np
import pytest
import safetensors.numpy

from fedapp import federation
from fedapp.sweeps.runner import perform
from studies.reproduce import limits
from studies.reproduce.experiment import collect
from studies.reproduce.plan import read_plan
from studies.reproduce.store import FILE, read_stored
from studies.tests.reproduce.made_up import check_figures, make_run, outcome, results_of
from studies.theory.problems import ClientData, Logistic

PLAN = read_plan("004-limits")


# By μ: level and closed form, the levels of both bounds, and the largest share of each that was seen.
DRAWN = [[0.1, 0.02, 0.0201, 0.3, 0.2, 0.9, 0.8], [0.05, 0.01, 0.0101, 0.15, 0.07, 0.95, 0.85]]


def results(common, normalised, drawn=DRAWN):
    """Distances to the minimisers of Σ E_k J_k and of Σ J_k by μ: of common steps, and of μ/E_k."""
    runs, numbers = [], {"least mean squares": [[0.1, 0.5, 0.4]], limits.DRAWN: drawn}
    for kind, by_step in ((False, common), (True, normalised)):
        for lr, pair in by_step.items():
            labels = {"seed": 0, "normalize-steps": kind, "lr": lr}
            run = make_run(labels, {"loss": [1.0]}, lr=lr, normalize_steps=kind)
            runs.append(run)
            numbers[run.planned.key] = pair
    return results_of(runs, numbers=numbers)


@pytest.mark.parametrize(
    ("common", "normalised", "expected"),
    [
        ({0.1: [0.2, 0.9], 0.05: [0.1, 0.95]}, {0.1: [1.0, 0.02], 0.05: [1.0, 0.01]}, ("holds", "holds")),
        ({0.1: [0.2, 0.9], 0.05: [0.15, 0.95]}, {0.1: [1.0, 0.02], 0.05: [1.0, 0.03]}, ("doesn't hold",) * 2),
        ({0.1: [0.2, 0.9], 0.05: [0.1, 0.5]}, {0.1: [1.0, 0.02], 0.05: [0.3, 0.01]}, ("doesn't hold",) * 2),
    ],
)
def test_each_kind_of_step_has_its_limit(tmp_path, common, normalised, expected):
    report = limits.limits(results(common, normalised), PLAN, tmp_path)
    assert tuple(outcome(report, f"004-1-{kind}") for kind in ("biased", "unbiased")) == expected
    by_name = {row.quantity: row for row in report.rows}
    assert by_name["common μ, μ = 0.05: distance to the minimiser of Σ E_k J_k"].ours == [common[0.05][0]]
    assert (
        next(row for name, row in by_name.items() if name.startswith("least mean squares")).published == 0.4
    )
    levels = [
        (row.ours, row.published)
        for name, row in by_name.items()
        if name.startswith(f"{limits.DRAWN}, μ = 0.05")
    ]
    assert levels == [([0.01], 0.0101), ([0.07], 0.15)]
    check_figures(report.figures)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        (None, 0.0, "holds"),
        (5, 1.01, "doesn't hold"),  # a round above eq. 5.57
        (6, 1.01, "doesn't hold"),  # or above the bound with numbers
        (2, 0.012, "doesn't hold"),  # a level off the closed form
        (1, 0.0104, "doesn't hold"),  # still near it, and no longer ∝ μ
    ],
)
def test_the_mean_square_error_has_three_tests(tmp_path, column, value, expected):
    drawn = [[*DRAWN[0]], [*DRAWN[1]]]
    if column is not None:
        drawn[1][column] = value
    if column == 1:
        drawn[0][1] = 0.0192
    report = limits.limits(results({0.1: [0.2, 0.9]}, {0.1: [1.0, 0.02]}, drawn), PLAN, tmp_path)
    assert outcome(report, "004-2-mean-square") == expected


def test_without_final_models_there_is_no_verdict(tmp_path):
    whole = results({0.1: [0.2, 0.9]}, {0.1: [1.0, 0.02]})
    report = limits.limits(results_of(whole.runs), PLAN, tmp_path)
    assert {verdict.outcome for verdict in report.verdicts} == {"not run"}


@pytest.mark.parametrize("normalize", ["symmetric", "standardize"])
def test_minimisers_are_on_the_inputs_that_the_models_see(normalize):
    base = {**PLAN.base, "normalize": normalize}
    run, *_ = PLAN.model_copy(update={"base": base}).runs()
    config, number = run.config, run.num_clients
    partition = federation.partition_of(config, number)
    dataset = federation.with_moments(config, federation.dataset_of(config, number), partition)
    clients = [
        ClientData(dataset.inputs(rows, normalize).reshape(len(rows), -1).astype(float), dataset.y[rows])
        for rows in (partition.client(i) for i in range(number))
    ]
    _, unbiased = limits._minimisers(run)
    assert np.linalg.norm(Logistic(clients, dataset.num_classes, config.l2).gradient(unbiased)) <= 1e-9


def test_distances_are_measured_from_the_final_model(tmp_path):
    grid = {"seed": [0], "normalize-steps": [False, True], "lr": [0.05]}
    base = {**PLAN.base, "num-server-rounds": 200, "eval-every": 200}
    plan = PLAN.model_copy(update={"grid": grid, "base": base, "settings": {"lms-steps": [0.2]}})
    assert [perform(run, tmp_path / "runs", "vectorized") for run in plan.runs()] == ["", ""]
    collect(plan, tmp_path)
    numbers = read_stored(tmp_path / FILE).numbers
    common, normalised = (numbers[run.key] for run in plan.runs())
    assert common[0] < common[1]
    assert normalised[1] < 0.1 < normalised[0]
    ((step, level, floor),) = numbers["least mean squares"]
    assert (step, level) == (0.2, pytest.approx(floor, rel=0.2))
    ((step, level, floor, printed, with_numbers, *shares),) = numbers[limits.DRAWN]
    assert (step, level) == (0.2, pytest.approx(floor, rel=0.2))
    assert floor < min(printed, with_numbers)
    assert 0 < min(shares) <= max(shares) < 1
    # A run in the file isn't measured again, whatever has become of its model.
    model = next((tmp_path / "runs").glob("*/model.safetensors"))
    safetensors.numpy.save_file({}, model)
    collect(plan, tmp_path)
    assert read_stored(tmp_path / FILE).numbers == numbers
