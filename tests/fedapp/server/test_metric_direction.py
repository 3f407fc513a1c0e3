"""Which values of a metric of the user's own are better: stated, known by its name, or asked for before a run."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import fedapp
from fedapp.config import ConfigError
from fedapp.own import OwnPartError
from fedapp.own.metrics import with_directions
from fedapp.report import read_config
from fedapp.report.files import stated_directions
from fedapp.report.runs import runs_table
from fedapp.report.table import closing_table
from tests.runs import lines_of, summary_of

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5]) + 4).astype(np.float32)

KEYS: dict[str, Any] = {
    "dataset": (X, Y),
    "model": "logistic",
    "loss": "mse",
    "num_clients": 3,
    "num_server_rounds": 3,
    "engine": "sequential",
    "figures": False,
    "quiet": True,
}


def median_mae(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((outputs - targets).abs().median())


def far_off(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """A cost whose name doesn't say so."""
    return median_mae(outputs, targets)


def score(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return -median_mae(outputs, targets)


score.higher_is_better = True  # type: ignore[attr-defined]


def named(function: Any, direction: str = "") -> str:
    return f"{direction}{__name__}:{function.__name__}"


def run(folder: Path, name: str = "run", **keys: Any) -> Path:
    return fedapp.run(**{**KEYS, "results_dir": str(folder), "run_name": name, **keys}).path


@pytest.mark.parametrize("metrics", [named(median_mae), named(far_off, "min:"), named(score)])
def test_tuning_picks_the_value_with_the_smaller_error(metrics, tmp_path):
    made = fedapp.sweep(
        **{**KEYS, "figures": None, "engine": "sequential"} | {"figures": False},
        lr=[0.0001, 0.05],
        metrics=metrics,
        tune="lr",
        out=tmp_path,
    )
    assert made.tuning is not None
    assert set(made.tuning.loc[made.tuning["picked"], "lr"]) == {0.05}


def test_tuning_by_a_metric_of_unknown_direction_is_refused_before_any_run(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^tune = lr: it isn't known whether a lower or a higher far-off is better; by = 'min:NAME' or "
        r"'max:NAME' states it, as do metrics = 'min:module:name' and the function's attribute higher_is_better$",
    ):
        fedapp.sweep(**KEYS, lr=[0.0001, 0.05], metrics=named(far_off), tune="lr", out=tmp_path)
    assert not list(tmp_path.rglob("config.toml"))
    made = fedapp.sweep(
        **KEYS, lr=[0.0001, 0.05], metrics=named(far_off), tune="lr", by="min:far-off", out=tmp_path
    )
    assert made.tuning is not None
    assert set(made.tuning.loc[made.tuning["picked"], "lr"]) == {0.05}


def test_a_sweep_without_tuning_marks_no_best_and_says_why(tmp_path):
    plan = {**KEYS, "lr": [0.0001, 0.05], "seed": [0, 1, 2]}  # one seed leaves every difference undecided
    made = fedapp.sweep(**plan, metrics=named(far_off), out=tmp_path)
    assert [
        note for note in made.remarks if note.startswith("no setting is marked as the best: it isn't known")
    ]
    assert "Bold" not in (tmp_path / "report.md").read_text("utf-8")
    stated = fedapp.sweep(**plan, metrics=named(far_off, "min:"), out=tmp_path / "stated")
    assert not stated.remarks
    lines = (tmp_path / "stated" / "report.md").read_text("utf-8").splitlines()
    assert [line.split("|")[1] for line in lines if line.startswith("| **")] == [" **0.05** "]


@pytest.mark.parametrize(
    "keys", [{"keep": "best"}, {"patience": 2}, {"keep": "best", "best_of": "client-far-off-worst-tenth"}]
)
def test_the_best_by_a_metric_of_unknown_direction_is_refused_before_a_run(keys, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^best-of = '.*far-off.*': it isn't known whether a lower or a higher "
    ):
        run(tmp_path, metrics=named(far_off), **{"best_of": "far-off", **keys})
    with pytest.raises(
        ConfigError, match=r"^stop-at = .*: it isn't known whether a lower or a higher far-off "
    ):
        run(tmp_path, metrics=named(far_off), stop_at="client-far-off-best<=0.1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metrics", [named(median_mae), named(far_off, "min:"), named(score)])
def test_the_best_model_is_the_one_with_the_smallest_error(metrics, tmp_path):
    by = metrics.rpartition(":")[2].replace("_", "-")
    path = run(tmp_path, metrics=metrics, keep="best", best_of=by)
    errors = [abs(line[by]) for line in lines_of(path)]
    assert errors[0] > errors[-1]
    assert summary_of(path)["best-aggregation"] == int(np.argmin(errors)) > 0
    line = lines_of(path)[-1]
    worst, best = abs(line[f"client-{by}-worst-tenth"]), abs(line[f"client-{by}-best"])
    assert worst > best


def test_the_record_states_a_functions_own_direction_and_the_run_is_resumed_without_it(tmp_path):
    path = run(tmp_path, metrics=named(score), keep="best", best_of="score", checkpoint_every=1)
    config = read_config(path)
    assert (config["metrics"], config["best-of"]) == (named(score, "max:"), "score")
    assert stated_directions(config["metrics"]) == {"score": True}
    keys = {"metrics": named(score), "best_of": "score", "num_server_rounds": 4, "resume": str(path)}
    assert len(lines_of(fedapp.run(**keys, quiet=True).path)) == 5
    with pytest.raises(ConfigError, match=r"has another config than metrics = 'min:"):
        fedapp.run(**{**keys, "num_server_rounds": 5, "metrics": named(score, "min:")}, quiet=True)


def test_an_unknown_direction_is_said_and_no_evaluation_is_the_best(tmp_path):
    path = run(tmp_path, metrics=named(far_off))
    said = f"metrics = '{named(far_off)}': it isn't known whether a lower or a higher value is better, so that no "
    assert (path / "log.txt").read_text("utf-8").count(said) == 1
    assert "run_options" not in (path / "log.txt").read_text("utf-8")
    for stated, caption in (("", False), ("min:", True)):
        table = closing_table(summary_of(path), lines_of(path), {"metrics": named(far_off, stated)})
        assert ("lowest far-off" in str(table.caption)) is caption
        assert ("bold" in [row.style for row in table.rows]) is caption


def test_runs_beside_each_other_have_no_best_either(tmp_path):
    paths = [run(tmp_path, name, metrics=named(far_off), lr=lr) for name, lr in (("a", 0.01), ("b", 0.05))]
    compared = fedapp.compare(*map(str, paths))
    assert [note for note in compared.remarks if note.startswith("far-off: no run is marked as the best: ")]
    assert not [note for note in compared.remarks if note.startswith("loss: ")]


@pytest.mark.parametrize(
    ("metrics", "match"),
    [("min:accuracy", "a higher accuracy is better"), ("accuracy,max:rmse", "a lower rmse is better")],
)
def test_a_built_in_metric_has_its_own_direction(metrics, match, tmp_path):
    with pytest.raises(OwnPartError, match=rf"^metrics = .*: {match}$"):
        run(tmp_path, metrics=metrics)


def test_the_attribute_is_a_truth_value():
    def strange(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return 0.0

    strange.higher_is_better = "yes"  # type: ignore[attr-defined]
    with pytest.raises(
        OwnPartError, match=r"its attribute higher_is_better is 'yes'; allowed are True, False$"
    ):
        with_directions(fedapp.own.register(strange))
    assert with_directions("auto") == "auto"
    assert with_directions(f" accuracy, {named(score)}") == f"accuracy,{named(score, 'max:')}"
    assert with_directions(named(score, "min:")) == named(score, "min:")  # what the config states counts


def test_the_metric_that_the_user_names_first_is_in_the_list(tmp_path):
    run(tmp_path, metrics=f"mae,rmse,{named(score)}", keep="best", best_of="rmse")
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(runs_table([tmp_path / "run"], differences=False))
    header, row = (line.split() for line in captured.get().splitlines() if line.strip() and "─" not in line)
    assert header[-4:] == ["mae", "rmse", "score", "loss"]
    assert row[header.index("kept")] == str(summary_of(tmp_path / "run")["best-aggregation"])
