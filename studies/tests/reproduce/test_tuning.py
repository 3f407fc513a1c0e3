"""An axis whose best value is found on other seeds than those that are judged."""

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from fedapp.config import ConfigError
from studies.reproduce.command import make
from studies.reproduce.runs import Curves
from studies.reproduce.store import FILE, read_stored
from studies.tests.reproduce.conftest import TINY

GRID = {
    "problem": [{"label": "even"}, {"label": "uneven", "class-imbalance": 20.0}],
    "seed": [0, 1],
    "lr": [0.01, 0.1, 1.0],
    "strategy": ["fedavg", "fedprox"],
}
TUNING = {"axis": "lr", "seeds": [7, 8], "by": "loss", "of": {"strategy": "fedavg"}}


def curves_of(runs, losses):
    """Curves of tried runs that end at a loss by problem and step size, on seed 8 at 0.2 more."""
    found = {}
    for run in runs:
        loss = losses[run.labels["problem"]][run.labels["lr"]] + 0.2 * (run.config.seed == 8)
        columns = {"aggregation": np.arange(2.0), "time": np.arange(2.0), "loss": np.array([9.0, loss])}
        found[run.key] = Curves(run.name, columns, {"evaluations": 2})
    return found


def labels_of(runs):
    return [tuple(run.labels.values()) for run in runs]


def test_all_values_are_tried_on_other_seeds_and_the_best_of_each_cell_is_judged(plan):
    made = plan(grid=GRID, tuning=TUNING)
    every, tries = made.runs(), made.runs(curves={})
    assert labels_of(tries) == [
        (problem, seed, lr, "fedavg")
        for problem in ("even", "uneven")
        for seed in (7, 8)
        for lr in (0.01, 0.1, 1.0)
    ]
    assert len(every) == 12 + 2 * 2 * 3 * 2
    assert [run.config.seed for run in tries[:3]] == [7, 7, 7]

    losses = {"even": {0.01: 0.5, 0.1: 0.3, 1.0: np.nan}, "uneven": {0.01: 0.1, 0.1: 0.1, 1.0: 0.4}}
    curves = curves_of(tries, losses)
    judged = labels_of(made.runs(curves=curves))[12:]
    assert judged == [
        (problem, seed, lr, strategy)
        for problem, lr in (("even", 0.1), ("uneven", 0.01))  # of equal ones the first
        for seed in (0, 1)
        for strategy in ("fedavg", "fedprox")
    ]

    judged_runs = made.runs(curves=curves)[12:]
    for key in (tries[-1].key, tries[0].key):  # of uneven, then of both, not all are there
        del curves[key]
        assert labels_of(made.runs(curves=curves))[12:] == (judged[:4] if tries[0].key in curves else [])
    curves |= {run.key: Curves(run.name, {}, {}) for run in judged_runs}  # what was judged before stays
    assert labels_of(made.runs(curves=curves))[12:] == judged


def test_of_an_accuracy_the_highest_over_the_whole_run_is_the_best(plan):
    made = plan(grid=GRID, tuning={**TUNING, "by": "accuracy"})
    tries = made.runs(curves={})
    heights = {0.01: [0.9, 0.1], 0.1: [0.2, 0.7], 1.0: [np.nan, 0.9]}  # at the end 0.1 is ahead of 0.01
    curves = {
        run.key: Curves(run.name, {"accuracy": np.array(heights[run.labels["lr"]])}, {"evaluations": 2})
        for run in tries
    }
    assert {run.labels["lr"] for run in made.runs(curves=curves)[12:]} == {0.01}


def test_a_metric_that_no_run_has_is_an_error(plan):
    made = plan(grid=GRID, tuning={**TUNING, "by": "los-loss"})
    losses = {name: {0.01: 0.5, 0.1: 0.3, 1.0: 0.2} for name in ("even", "uneven")}
    with pytest.raises(ConfigError, match=r"^tuning\.by = 'los-loss': the runs have loss$"):
        made.runs(curves=curves_of(made.runs(curves={}), losses))


def test_one_command_tries_and_then_judges(plan_file, tmp_path):
    grid = {"seed": [0, 1], "lr": [0.001, 0.3], "strategy": ["fedavg", "fedprox"]}
    path = plan_file(grid=grid, tuning={**TUNING, "seeds": [7]})

    def run(**changed):
        options = {
            "quick": False,
            "engine": "sequential",
            "data_path": "",
            "jobs": 1,
            "console": Console(quiet=True),
        }
        return make(path, tmp_path / "out", **{**options, **changed}).read_text()

    with pytest.raises(
        ConfigError, match=r"--only seed-0\*: which of these are judged is known when seed-7-lr"
    ):
        run(only="seed-0*")
    report = run(only="seed-7*")
    assert "- 2 of 6 runs, seeds 7, " in report
    assert "Full settings." not in report
    report = run()
    assert "- Full settings.\n- 6 of 6 runs, seeds 0, 1, 7, " in report
    assert '[tuning]\naxis = "lr"\nseeds = [7]\nby = "loss"\nof = { strategy = "fedavg" }' in report
    names = [curves.name for curves in read_stored(tmp_path / "out" / "mine" / FILE).curves.values()]
    assert sorted(name.rpartition("-")[0] for name in names) == [
        "seed-0-lr-0.3-fedavg",
        "seed-0-lr-0.3-fedprox",
        "seed-1-lr-0.3-fedavg",
        "seed-1-lr-0.3-fedprox",
        "seed-7-lr-0.001-fedavg",
        "seed-7-lr-0.3-fedavg",
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"axis": "momentum"}, "'momentum' is no axis; there are problem, seed, lr, strategy"),
        ({"of": {"strategy": "scaffold"}}, "tuning.of.strategy = 'scaffold': has fedavg, fedprox"),
        ({"seeds": [5, 1]}, "tuning.seeds: 1 is judged"),
        ({"seeds": []}, "at least 1 item"),
    ],
)
def test_a_tuning_that_is_not_possible_is_an_error(plan, changed, said):
    with pytest.raises(ValidationError, match=said):
        plan(grid=GRID, tuning={**TUNING, **changed})


def test_a_value_whose_run_explodes_is_the_worst_one(plan_file, tmp_path):
    grid = {"seed": [0], "lr": [0.1, 1e30], "strategy": ["fedavg"]}
    base = {**TINY, "model": "mlp", "num-server-rounds": 4}
    path = plan_file(grid=grid, base=base, tuning={"axis": "lr", "seeds": [7], "by": "loss"})
    options = {"quick": False, "engine": "sequential", "data_path": "", "jobs": 1}
    for _ in range(2):  # what has exploded once isn't tried again
        report = make(path, tmp_path / "out", console=Console(quiet=True), **options).read_text()
        assert "- 3 of 3 runs, seeds 0, 7, " in report
        curves = read_stored(tmp_path / "out" / "mine" / FILE).curves.values()
        (exploded,) = (each for each in curves if each.facts["status"] == "diverged")
        assert np.isnan(exploded.columns["loss"]).all()
        assert "- Full settings.\n" in report
        assert "Not there" not in report
        assert [each.name.startswith("seed-0-lr-0.1") for each in curves].count(True) == 1
        begun = {path: path.stat().st_mtime for path in tmp_path.glob("out/mine/runs/*/config.toml")}
    assert begun == {path: path.stat().st_mtime for path in tmp_path.glob("out/mine/runs/*/config.toml")}
