"""Clients sorted by what a model is worth to them: which numbers are drawn, and where a figure is made."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedapp.report import figures as all_figures
from fedapp.report.by_client import FIGURE, draw_by_client, draw_clients_of_runs, scores_of
from fedapp.report.client_tables import ClientsFile
from fedapp.report.comparison import Comparison
from fedapp.report.recorded import RecordedRun
from tests.report.test_comparison import write_run


def with_clients(folder: Path, columns: dict[str, list[float]], **config: Any) -> Path:
    run = write_run(folder, [0.0, 1.0], [0.1, 0.5], **config)
    file = ClientsFile(run)
    file.append(0, 0.0, {"accuracy": [0.1, 0.1, 0.1]}, {})
    file.append(1, 1.0, columns, {})
    file.publish(last=True)
    return run


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is drawn."""
    drawn: list[Figure] = []
    save = all_figures._save_png
    monkeypatch.setattr(
        all_figures, "_save_png", lambda figure, path: drawn.append(figure) or save(figure, path)
    )
    return drawn


def lines_of(figure: Figure) -> list[tuple[str, str, list[float]]]:
    (axes,) = figure.axes
    return [
        (str(x.get_label()), x.get_linestyle(), np.asarray(x.get_ydata()).tolist()) for x in axes.get_lines()
    ]


def test_a_runs_clients_are_sorted_and_told_in_words(tmp_path, figures):
    columns = {
        "accuracy": [0.4, math.nan, 0.2],
        "personal-accuracy": [0.6, 0.5, 0.9],
        "loss": [1.0, 2.0, 3.0],
    }
    run = with_clients(tmp_path / "run", columns)
    assert {whose: found.tolist() for whose, found in scores_of(run, "accuracy").items()} == {
        "": [0.4, 0.2],
        "personal-": [0.6, 0.5, 0.9],
    }
    assert draw_by_client(run) == run / FIGURE
    assert lines_of(figures[0]) == [
        ("global model\n1 of 3 clients: no accuracy\nmean 0.3, worst tenth 0.2", "-", [0.2, 0.4]),
        ("own models\nmean 0.667, worst tenth 0.5", "--", [0.5, 0.6, 0.9]),
    ]
    with Image.open(run / FIGURE) as image:
        assert image.size == (1200, 630)


def test_costs_begin_with_the_largest_and_many_clients_are_a_line(tmp_path, figures):
    run = with_clients(tmp_path / "run", {"rmse": np.arange(1000.0).tolist()}, metrics="rmse")
    lines = (run / "metrics.jsonl").read_text().replace("accuracy", "rmse")
    (run / "metrics.jsonl").write_text(lines)
    draw_by_client(run)
    ((label, _, values),) = lines_of(figures[0])
    assert label == "global model\nmean 500, worst tenth 950"
    assert values[0] == 999
    assert figures[0].axes[0].get_lines()[0].get_markevery() == 1 / 8


def test_runs_are_over_each_other_and_those_without_clients_left_out(tmp_path, figures):
    one = with_clients(tmp_path / "one", {"accuracy": [0.1, 0.9, 0.5]})
    other = with_clients(
        tmp_path / "other", {"accuracy": [0.3, 0.2, 0.1], "personal-accuracy": [0.7, 0.8, 0.9]}
    )
    without = write_run(tmp_path / "without", [0.0], [0.5])
    runs = {path.name: RecordedRun(path) for path in (without, one, other)}
    assert draw_clients_of_runs(tmp_path / "all.png", runs) == [tmp_path / "all.png"]
    assert [line[0].partition("\n")[0] for line in lines_of(figures[0])] == [
        "one, global model",
        "other, global model",
        "other, own models",
    ]
    nothing = {"without": RecordedRun(without)}
    assert draw_clients_of_runs(tmp_path / "none.png", nothing) == []
    assert draw_by_client(without) is None
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("own", [True, False])
def test_a_comparison_has_them_where_clients_have_test_rows_of_their_own(own, tmp_path):
    config = {"test-on": "own"} if own else {}
    runs = [
        with_clients(tmp_path / name, {"accuracy": [0.1, 0.9]}, lr=lr, **config)
        for name, lr in (("one", 0.1), ("two", 0.2))
    ]
    paths = Comparison([RecordedRun(run) for run in runs]).write(tmp_path / "out")
    assert (tmp_path / "out" / FIGURE in paths) is own
    assert ("![clients](clients.png)" in (tmp_path / "out" / "comparison.md").read_text()) is own
