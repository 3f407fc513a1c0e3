"""What a run is judged by: accuracy, or what it has in its place; on the terminal, in lists and in figures."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.report import figures
from fedapp.report.figures import _heat_map, _stacked_bars, draw_curves, new_figure
from fedapp.report.files import best_at, measured_by, metrics_among, step_of
from fedapp.report.page.content import page_content
from fedapp.report.table import closing_table
from tests.runs import lines_of, summary_of

CONFIG = 'strategy = "{}"\ndataset = "d"\nmodel = "m"\nmetrics = "{}"\n'


@pytest.mark.parametrize(
    ("keys", "named", "expected"),
    [
        (("loss", "accuracy", "train-loss"), "auto", ["accuracy", "loss"]),
        (("r2", "loss", "rmse", "time"), "auto", ["rmse", "r2", "loss"]),
        (("loss", "time"), "none", ["loss"]),
        (("loss", "mae", "r2"), "r2, mae", ["r2", "mae", "loss"]),
        (("accuracy", "auroc", "loss"), "auroc,accuracy", ["auroc", "accuracy", "loss"]),
        (("accuracy", "auroc", "loss"), "max:auroc", ["auroc", "accuracy", "loss"]),
        (("loss", "within-ten"), "custom.mine:Scores.within_ten", ["within-ten", "loss"]),
        (
            ("loss", "personal-accuracy-mean", "accuracy", "personal-top5-mean", "top5"),
            "top5",
            ["top5", "personal-top5-mean", "accuracy", "loss"],
        ),
        (("loss", "personal-rmse-mean", "rmse", "r2"), "auto", ["rmse", "personal-rmse-mean", "r2", "loss"]),
        ((), "auto", []),
    ],
)
def test_the_metrics_among_numbers(keys, named, expected):
    assert metrics_among(keys, named) == expected
    own = {name for name in expected if not name.startswith("personal-")}
    assert own <= {*measured_by(named), "accuracy"}


@pytest.mark.parametrize(("metric", "best"), [("rmse", 1), ("r2", 2), ("loss", 1), ("accuracy", None)])
def test_the_best_evaluation_goes_by_which_way_is_better(metric, best):
    records = [{"rmse": 2.0, "r2": -1.0, "loss": 4.0}, {"rmse": 1.0, "r2": None, "loss": 1.0}, {"r2": 0.5}]
    assert best_at(records, metric) == best


def write(folder: Path, *, strategy: str = "fedavg", named: str = "auto", rounds: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(strategy, named))
    metrics: dict[str, list[float]] = {"loss": [4.0, 1.0, 1.5]}
    if named != "none":
        metrics |= {"rmse": [2.0, 0.9, 1.2], "r2": [-1.0, 0.4, 0.3]}
    count = "participants" if rounds else "contributions"
    lines = [
        {"aggregation": at, "time": 1.0 * at, **{key: each[at] for key, each in metrics.items()}}
        for at in range(3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**line, count: 2}) + "\n" for line in lines))
    final = {key: each[-1] for key, each in metrics.items()}
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "strategy": strategy, **final}))
    return folder


def closing(folder: Path, named: str) -> str:
    records = lines_of(folder)
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(closing_table(summary_of(folder), records, {"metrics": named}))
    return capture.get()


def test_the_closing_table_of_numbers(tmp_path):
    text = closing(write(tmp_path / "run"), "auto")
    assert "rmse 1.2000, r2 0.3000, loss 1.5000" in text
    assert "lowest rmse 0.9000 at round 1" in text
    assert "accuracy" not in text
    (best,) = (line for line in text.splitlines() if line.rstrip().endswith("best"))
    assert best.split() == ["1", "1.0", "1.0000", "0.9000", "0.4000", "best"]
    alone = closing(write(tmp_path / "alone", named="none", rounds=False), "none")
    assert "lowest loss 1.0000 at aggregation 1" in alone


@pytest.mark.parametrize(
    ("named", "rounds", "labels"),
    [
        ("auto", True, [("server round", "loss"), ("server round", "rmse")]),
        ("auto", False, [("aggregation", "loss"), ("aggregation", "rmse")]),
        ("r2", True, [("server round", "loss"), ("server round", "r2")]),
        ("none", True, [("server round", "loss")]),
    ],
)
def test_curves_are_of_what_a_run_has(named, rounds, labels, tmp_path, monkeypatch):
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "_save_png", lambda figure, _: drawn.append(figure))
    draw_curves(write(tmp_path / "run", named=named, rounds=rounds))
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in drawn[0].axes] == labels


def test_parts_of_numbers_are_tenths():
    bars, heat = new_figure(4, ""), new_figure(4, "")
    _stacked_bars(bars, np.ones((3, 4), int), [], strata="tenth")
    _heat_map(heat, np.ones((3, 4), int), strata="tenth")
    legend = bars.axes[0].get_legend()
    assert legend is not None
    assert legend.get_title().get_text() == "tenth of\nthe target,\n0: lowest"
    assert heat.axes[1].get_ylabel() == "tenth of the target, 0: lowest"


def test_lists_and_the_page_go_by_it(tmp_path):
    runs = [write(tmp_path / "a"), write(tmp_path / "b", strategy="fedprox")]
    listed = CliRunner().invoke(app, ["list", str(tmp_path)]).output
    assert "rmse" in listed
    assert "accuracy" not in listed
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "out" / "comparison.md").read_text()
    assert [line for line in written.splitlines() if line.startswith("## ")] == [
        "## rmse",
        "## r2",
        "## loss",
    ]
    assert page_content(runs)["scores"] == ["rmse", "loss"]


def test_what_a_step_is_called():
    assert step_of([{"aggregation": 0}, {"participants": 3}]) == "round"
    assert step_of([{"aggregation": 0}, {"contributions": 3}]) == "aggregation"


def test_the_title_of_curves_says_what_they_show_and_of_which_run(tmp_path, monkeypatch):
    folder = write(tmp_path / "run")
    config = {"strategy": "fedavg", "dataset": "files", "data-path": "/data/hospitals.csv", "model": "mlp"}
    (folder / "config.toml").write_text(tomli_w.dumps({**config, "label-column": "died", "lr": 0.5}))
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "_save_png", lambda figure, _: drawn.append(figure))
    draw_curves(folder)
    assert drawn[0].get_suptitle() == "Test loss and rmse over server rounds\nfedavg, hospitals.csv, mlp"


def test_signs_that_the_font_lacks_are_one_line(tmp_path, caplog):
    figure = new_figure(2, "clinics \u4e2d\u6587 and Gen\u00e8ve")
    figures.save(figure, tmp_path / "f.png")
    figures.save(figure, tmp_path / "g.png")
    assert [record.getMessage() for record in caplog.records] == [
        "figures have boxes for \u4e2d\u6587, which their font, DejaVu Sans, hasn't"
    ]
