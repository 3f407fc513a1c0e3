"""Numbers that don't compare: runs that were tested on different rows, or by different functions of one name."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import fedapp
from fedapp.report.cells import best_of, cells_of, why_unlike
from fedapp.report.comparison import Comparison
from fedapp.report.exports import json_of
from fedapp.report.page.content import page_content
from fedapp.report.paper import latex_of
from fedapp.report.recorded import RecordedRun
from tests.report.test_comparison import write_run


def run_on(folder: Path, rows: list[int] | None, accuracy: float = 0.5, **config: object) -> RecordedRun:
    path = write_run(folder, [0.0, 1.0], [0.1, accuracy], **config)
    if rows is not None:
        np.savez(path / "partition.npz", test_indices=np.array(rows))
    return RecordedRun(path)


def unlike(*runs: RecordedRun, key: str = "accuracy") -> str:
    return why_unlike(cells_of(runs), key)


OTHER_ROWS = "tested on different rows: test-on=held-out and test-on=own"


def test_runs_that_were_tested_on_the_same_rows_are_alike(tmp_path):
    one = run_on(tmp_path / "a", [3, 1, 2], lr=0.1, **{"test-on": "held-out"})
    other = run_on(tmp_path / "b", [1, 2, 3], lr=0.2, **{"test-on": "held-out"})
    assert unlike(one, other) == ""
    seeds = [
        run_on(tmp_path / f"{lr}-{seed}", [seed, seed + 1], lr=lr, seed=seed)
        for lr in (0.1, 0.2)
        for seed in (0, 1)
    ]
    assert unlike(*seeds) == ""  # seed by seed
    assert (
        unlike(run_on(tmp_path / "c", None, lr=0.3), run_on(tmp_path / "d", [1], lr=0.4)) == ""
    )  # not on record


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"test-on": "held-out"}, {"test-on": "own"}, OTHER_ROWS),
        (
            {"dataset": "mnist"},
            {"dataset": "cifar10"},
            "tested on different rows: dataset=mnist and dataset=cifar10",
        ),
        ({"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 1}, "tested on different rows: seed=0 and seed=1"),
        ({"lr": 0.1}, {"lr": 0.2}, "tested on different rows"),
    ],
)
def test_runs_that_were_tested_on_other_rows_are_not(one, other, expected, tmp_path):
    assert unlike(run_on(tmp_path / "a", [1, 2], **one), run_on(tmp_path / "b", [2, 3], **other)) == expected


def test_a_metric_that_is_another_function_is_not_alike(tmp_path):
    keys = [{"loss": "mse", "metrics": "custom.a:score"}, {"loss": "mae", "metrics": "max:custom.b:score"}]
    runs = [run_on(tmp_path / str(at), [1], **own) for at, own in enumerate(keys)]
    assert unlike(*runs) == ""
    assert unlike(*runs, key="client-loss-mean") == "client-loss-mean is not one function: mae, mse"
    assert unlike(*runs, key="score") == "score is not one function: custom.a:score, custom.b:score"


def test_what_does_not_compare_is_in_the_first_line_and_nothing_is_bold(tmp_path):
    runs = [
        run_on(tmp_path / how, [at], 0.5 + at / 10, **{"test-on": how})
        for at, how in enumerate(("held-out", "own"))
    ]
    compared = Comparison(runs)
    assert best_of(compared.cells, "accuracy") is None
    (table,) = compared.tables()
    assert not any(row.style for row in table.rows)
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    assert captured.get().strip().splitlines()[0].strip() == OTHER_ROWS
    compared.write(tmp_path / "out")
    assert f"**Not comparable:** {OTHER_ROWS}" in (tmp_path / "out" / "comparison.md").read_text("utf-8")
    assert latex_of(compared).startswith(f"% not comparable: {OTHER_ROWS}\n")
    assert f"not comparable: {OTHER_ROWS}" in json_of(compared)
    assert page_content([run.path for run in runs])["place"] == f"at the end; not comparable: {OTHER_ROWS}"


def test_real_runs_on_held_out_and_on_own_rows_are_told_apart(tmp_path):
    keys = {"model": "logistic", "num_clients": 3, "num_server_rounds": 1, "figures": False, "quiet": True}
    made = fedapp.sweep(**keys, test_on=["held-out", "own"], out=tmp_path, engine="sequential")
    report = (tmp_path / "report.md").read_text("utf-8")
    assert f"**Not comparable:** {OTHER_ROWS}\n\n| test-on |" in report
    assert "Bold" not in report
    again = fedapp.sweep(**keys, lr=[0.1, 0.2], out=tmp_path / "lr", engine="sequential")
    assert "Not comparable" not in (tmp_path / "lr" / "report.md").read_text("utf-8")
    assert fedapp.compare(*made.results).remarks[0] == f"not comparable: {OTHER_ROWS}"
    assert not fedapp.compare(*again.results).remarks


def test_parts_of_python_are_named_without_digests_unless_two_have_one_name(tmp_path):
    one, other, same = "python:narrow_0123abcd", "python:wide_0123abcd", "python:narrow_9876fedc"
    runs = [run_on(tmp_path / name[-8:], None, model=name) for name in (one, same)]
    assert [cell.name for cell in cells_of(runs)] == ["narrow_0123abcd", "narrow_9876fedc"]
    runs = [run_on(tmp_path / name[7:10], None, model=name) for name in (one, other)]
    assert [cell.name for cell in cells_of(runs)] == ["python:narrow", "python:wide"]
    assert Comparison(runs[:1]).title == "fedavg digits python:narrow"
