"""``fedapp compare``: runs beside each other where all have come equally far."""

import csv
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from PIL import Image
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.report import figures
from fedapp.report.cells import best_of
from fedapp.report.comparison import Comparison
from fedapp.report.differences import has_own_data
from fedapp.report.exports import frame_of
from fedapp.report.page.content import page_content
from fedapp.report.recorded import RecordedRun
from fedapp.sweeps.looking import recorded


def write_run(
    folder: Path,
    times: Sequence[float],
    accuracies: Sequence[float],
    *,
    status: str = "finished",
    more: dict[str, float] | None = None,
    **config: object,
) -> Path:
    """Write a run with one evaluation at each time, of 1 MB up and 1 MB down each, and ``more`` metrics."""
    folder.mkdir(parents=True)
    content = {
        "strategy": "fedavg",
        "dataset": "digits",
        "model": "mlp",
        "clock": "virtual",
        "seed": 0,
        **config,
    }
    (folder / "config.toml").write_text(tomli_w.dumps(content))
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    lines = [
        {
            "aggregation": at,
            "time": time,
            "accuracy": accuracy,
            "bytes-up": 10**6 * at,
            "bytes-down": 10**6 * at,
            **(more or {}),
        }
        for at, (time, accuracy) in enumerate(zip(times, accuracies, strict=True))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Two seeds of a slow setting, and one of a quick one."""
    slow = [0.0, 10.0, 20.0]
    return [
        write_run(tmp_path / "fedavg-digits-mlp-001", slow, [0.1, 0.5, 0.8], seed=0, lr=0.1),
        write_run(tmp_path / "fedavg-digits-mlp-002", slow, [0.1, 0.7, 0.9], seed=1, lr=0.1),
        write_run(tmp_path / "quick", [0, 4, 8, 12], [0.1, 0.3, 0.6, 0.7], strategy="fedfix", lr=0.25),
    ]


def test_a_mean_of_fewer_seeds_than_there_are_says_so(tmp_path):
    ends = [0.8, 0.6, math.nan]
    comparison = Comparison(
        [
            RecordedRun(write_run(tmp_path / str(seed), [0.0, 1.0], [0.1, end], seed=seed))
            for seed, end in enumerate(ends)
        ]
    )
    assert comparison.rows("accuracy")[0][1:3] == ["3", "0.700 ± 0.14 (2 of 3)"]
    assert frame_of(comparison)["seeds"].tolist() == [2]


def test_settings_are_compared_where_all_have_come(runs):
    comparison = Comparison([RecordedRun(path) for path in runs])
    assert comparison.axes == {"time": 12.0, "aggregation": 2.0, "bytes": 4.0}
    assert comparison.title == "digits mlp"
    assert comparison.header == ["", "seeds", "at the end", "at time 12", "at round 2", "at 4 MB"]
    assert comparison.rows("accuracy") == [
        ["fedavg lr=0.1", "2", "0.850 ± 0.071", "0.600 ± 0.14", "0.850 ± 0.071", "0.850 ± 0.071"],
        ["fedfix lr=0.25", "1", "0.700", "0.700", "0.600", "0.600"],
    ]


def test_with_a_method_without_rounds_the_best_is_sought_at_equal_time(runs, tmp_path):
    """At its end FedAvg has .85, at time 20; at time 12 it has .6, and FedFix .7."""
    fedavg, fedfix = (
        Comparison([RecordedRun(path) for path in some])
        for some in (
            runs,
            [*runs[:2], write_run(tmp_path / "f", [0, 12], [0.1, 0.7], more={"contributions": 3})],
        )
    )
    assert (fedavg.time, fedfix.time) == (None, 12.0)
    best = [best_of(each.cells, "accuracy", each.time) for each in (fedavg, fedfix)]
    assert best == [fedavg.cells[0], fedfix.cells[1]]
    axes = [
        page_content([path for run in each.runs if (path := run.path)])["axis"] for each in (fedavg, fedfix)
    ]
    assert axes == ["aggregation", "time"]


def budgeted(folder: Path, name: str, times: Sequence[float], **more: Any) -> RecordedRun:
    """A finished run with time-budget = 10, of at most 1,000 aggregations."""
    accuracies = [0.1 + 0.8 * at / (len(times) - 1) for at in range(len(times))]
    keys = {"time-budget": 10.0, "num-server-rounds": 1000}
    path = write_run(folder / name, times, accuracies, strategy=name, **keys, **more)
    return RecordedRun(path)


def test_runs_of_one_time_budget_are_compared_there(tmp_path):
    """FedBuff's last aggregation is at 9.956 of 10: its model counts until the next one, as FedAvg's of round 10."""
    fedavg = budgeted(tmp_path, "fedavg", [0.0, 5.0, 10.0 + 5e-10])
    fedbuff = budgeted(tmp_path, "fedbuff", [0.0, 4.0, 9.956], more={"contributions": 4})
    comparison = Comparison([fedavg, fedbuff])
    assert comparison.axes["time"] == 10.0
    assert comparison.header[:4] == ["", "seeds", "at the end", "at time 10"]
    assert [row[3] for row in comparison.rows("accuracy")] == ["0.900", "0.900"]
    assert comparison.time is None  # all have reached it: each run's end is there


def test_a_run_that_its_aggregations_or_a_metric_ended_has_not_reached_its_budget(tmp_path):
    run = budgeted(tmp_path, "fedavg", [0.0, 2.0, 4.0])
    summaries: list[tuple[dict[str, Any], float]] = [
        ({"status": "finished", "aggregations": 2}, 10.0),
        ({"status": "finished", "aggregations": 1000}, 4.0),
        ({"status": "finished", "aggregations": 2, "reason": "target reached: accuracy"}, 4.0),
        ({"status": "interrupted", "aggregations": 2}, 4.0),
    ]
    for summary, reached in summaries:
        (run.path / "summary.json").write_text(json.dumps(summary))
        assert RecordedRun(run.path).reach("time") == reached


def test_aggregations_are_not_compared_with_rounds(tmp_path):
    """An aggregation of FedBuff has the work of a few clients, a round that of all."""
    fedavg = budgeted(tmp_path, "fedavg", [0.0, 5.0, 10.0])
    fedbuff = budgeted(tmp_path, "fedbuff", [0.0, 4.0, 8.0], more={"contributions": 4})
    assert "aggregation" in Comparison([fedavg]).axes
    comparison = Comparison([fedavg, fedbuff])
    assert list(comparison.axes) == ["time", "bytes"]
    assert not any("round" in name for name in comparison.header)


def test_warnings_are_named_once_for_each_setting(runs):
    lines = [
        "10:00 INFO    a round",
        "10:00 WARNING not read by fedavg: dp-delta",
        "10:01 WARNING lr = {} is large",
    ]
    for number, run in enumerate(runs[:2]):
        (run / "log.txt").write_text("\n".join("2026-01-01 " + line.format(number) for line in lines))
    (runs[0] / "log.txt").open("a").write("\n2026-01-01 10:02 WARNING one more\n")
    comparison = Comparison([RecordedRun(path) for path in runs])
    assert [row[1] for row in comparison.rows("accuracy")] == ["2, !", "1"]
    assert comparison.remarks == [
        "fedavg lr=0.1: warning: lr = 0 is large",
        "fedavg lr=0.1, 1 of 2 runs: warning: one more",
    ]
    assert page_content(runs)["runs"][0]["summary"]["warnings"] == "2: lr = 0 is large"


def test_the_command_prints_and_draws(runs, tmp_path):
    arguments = ["compare", str(tmp_path / "*"), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "90"})
    assert done.exit_code == 0, done.output
    assert "0.600 ± 0.14" in done.output
    assert Image.open(tmp_path / "out" / "comparison.png").width == 1200
    assert (
        "| fedfix lr=0.25 | 1 | 0.700 | 0.700 | 0.600 | 0.600 |"
        in (tmp_path / "out" / "comparison.md").read_text()
    )


def test_a_figure_for_a_paper_has_text_and_says_what_its_bands_are(runs, tmp_path):
    arguments = ["compare", *map(str, runs), "-o", str(tmp_path / "out"), "--format", "pdf,svg,png"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "comparison.pdf").read_bytes().startswith(b"%PDF")
    drawn = (tmp_path / "out" / "comparison.svg").read_text()
    assert ">lines and bands: mean ± 1 s.d. of 2 seeds</" in drawn
    assert ">fedfix lr=0.25</" in drawn
    assert "comparison.svg" in done.output
    assert (tmp_path / "out" / "comparison.png").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["-o", "out", "--format", "pdf,eps"],
            "--format pdf,eps: 'eps' is no format of figures; allowed are pdf, svg, png",
        ),
        (["--format", "pdf"], "--format pdf: goes with --out, which has the figure"),
    ],
)
def test_a_format_that_is_none_is_one_line(runs, options, message):
    done = CliRunner().invoke(app, ["compare", *map(str, runs), *options])
    assert (done.exit_code, done.output.strip()) == (1, f"error: {message}")


def test_brackets_in_values_are_shown(tmp_path):
    for number, options in enumerate(("betas=[0.9,0.95]", "[/x]")):
        write_run(
            tmp_path / f"r{number}",
            [0.0, 1.0],
            [0.1, 0.5],
            **{"optimizer-options": options, "dataset": "hf:[data]", "model": "[/m]"},
        )
    done = CliRunner().invoke(app, ["compare", *map(str, tmp_path.iterdir())], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "optimizer-options=betas=[0.9,0.95]" in done.output
    assert "optimizer-options=[/x]" in done.output
    assert "hf:[data] [/m]: accuracy" in done.output


@pytest.mark.parametrize("form", ["csv", "json", "latex", "markdown"])
def test_a_comparison_for_other_programs(runs, tmp_path, form):
    (runs[0] / "log.txt").write_text("2026-01-01 10:00 WARNING something\n")
    done = CliRunner().invoke(app, ["compare", *map(str, runs), f"--{form}"])
    assert done.exit_code == 0, done.output
    assert "warning: something" in done.stderr
    if form == "csv":
        rows = list(csv.DictReader(done.stdout.splitlines()))
    elif form == "json":
        rows = json.loads(done.stdout)["rows"]
    else:
        cited = r"FedAvg~\cite{mcmahan2017communication}, lr=0.1"
        name = cited if form == "latex" else "FedAvg, lr=0.1 (McMahan et al. 2017)"
        row = [name, "2, 1 !", "0.850 ± 0.071", "0.600 ± 0.141", "0.850"]
        sign = " | " if form == "markdown" else " & "
        assert sign.join(row) in done.stdout.replace(r"$\pm$", "±")
        return
    assert [row["run"] for row in rows] == ["fedavg lr=0.1", "fedfix lr=0.25"]
    numbers = [float(row[key] or "nan") for row in rows for key in ("seeds", "end", "end-std", "equal-time")]
    assert numbers == pytest.approx([2, 0.85, 0.05 * 2**0.5, 0.6, 1, 0.7, float("nan"), 0.7], nan_ok=True)


def test_one_form_at_a_time(runs):
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "--csv", "--json"])
    assert done.output.strip() == (
        "error: --csv, --json, --latex, --markdown: one at a time, and --csv and --json without --out"
    )


def test_in_80_columns_nothing_is_cut_off(runs, tmp_path):
    write_run(tmp_path / "other", [0, 4, 8, 12], [0.1, 0.3, 0.6, 0.7213], strategy="fedfix", lr=0.25, seed=1)
    done = CliRunner().invoke(
        app, ["compare", str(tmp_path / "*"), "-o", str(tmp_path)], env={"COLUMNS": "80"}
    )
    assert done.exit_code == 0, done.output
    rows = Comparison([RecordedRun(path) for path in [*runs, tmp_path / "other"]]).rows("accuracy")
    printed = done.output.split()
    assert all(printed.count(word) >= 1 for row in rows for cell in row[2:] for word in cell.split())
    assert "MB" in printed


def test_runs_that_did_not_end_well_are_counted_and_named(runs, tmp_path):
    bad = write_run(tmp_path / "bad", [0, 1], [0.1, 0.1], status="diverged", seed=2, lr=0.1)
    comparison = Comparison([RecordedRun(path) for path in [*runs, bad]])
    assert comparison.rows("accuracy")[0][:3] == ["fedavg lr=0.1", "2 of 3: 1 diverged", "0.850 ± 0.071"]
    assert comparison.remarks == ["fedavg lr=0.1 seed=2: diverged"]


@pytest.mark.parametrize("status", ["interrupted", "stopped"])
def test_a_run_that_was_ended_before_its_end_cuts_nobody_short(runs, tmp_path, status):
    ended = write_run(tmp_path / "ended", [0, 1], [0.1, 0.2], status=status, seed=2, lr=0.1)
    comparison = Comparison([RecordedRun(path) for path in [*runs, ended]])
    assert comparison.rows("accuracy")[0][:3] == ["fedavg lr=0.1", f"2 of 3: 1 {status}", "0.850 ± 0.071"]
    assert comparison.axes["time"] == 12.0
    assert comparison.remarks == [f"fedavg lr=0.1 seed=2: {status}"]


def test_where_none_came_to_its_end_that_is_said(tmp_path):
    ended = [
        write_run(tmp_path / name, [0, 1], [0.1, 0.2], status="interrupted", lr=lr)
        for name, lr in (("a", 0.1), ("b", 0.2))
    ]
    comparison = Comparison([RecordedRun(path) for path in ended])
    assert [row[1:] for row in comparison.rows("accuracy")] == [["0 of 1: 1 interrupted", "-"]] * 2
    assert comparison.remarks == [
        "no run came to its end: nothing is compared",
        "lr=0.1: interrupted",
        "lr=0.2: interrupted",
    ]


def test_clocks_of_runs_that_are_not_shown_do_not_matter(runs, tmp_path):
    real = write_run(tmp_path / "real", [0, 100], [0.1, 0.9], status="failed", clock="wall")
    comparison = Comparison([RecordedRun(path) for path in [*runs, real]])
    assert comparison.axes["time"] == 12.0
    assert comparison.remarks == ["fedavg clock=wall seed=0: failed"]


def test_a_run_that_goes_on_is_compared_as_far_as_it_is(runs, tmp_path):
    young = write_run(tmp_path / "young", [0, 5], [0.1, 0.2], seed=2, lr=0.1)
    summary = {
        "status": "running",
        "process": {"host": "another", "boot": "another"},
    }  # whose lock isn't seen
    (young / "summary.json").write_text(json.dumps(summary))
    comparison = Comparison([RecordedRun(path) for path in [*runs, young]])
    assert comparison.rows("accuracy")[0][1] == "3"
    assert comparison.axes["time"] == 5.0


@pytest.mark.parametrize(
    ("broken_line", "why"), [('{"aggreg', "not JSON"), ("3", "'3' is no JSON object")], ids=["cut", "number"]
)
def test_a_broken_record_is_said_and_the_others_are_compared(runs, tmp_path, broken_line, why):
    broken = write_run(tmp_path / "broken", [0, 1, 2], [0.1, 0.2, 0.3], seed=2, lr=0.1)
    path = broken / "metrics.jsonl"
    first, _, last = path.read_text().splitlines()
    path.write_text("\n".join([first, broken_line, last]) + "\n")
    said = f"{path}, line 2: {why}"
    comparison = Comparison([RecordedRun(path) for path in [*runs, broken]])
    assert comparison.rows("accuracy")[0][:3] == [
        "fedavg lr=0.1",
        "2 of 3: 1 unreadable",
        "0.850 ± 0.071",
    ]
    assert comparison.remarks == ["fedavg lr=0.1 seed=2: unreadable"]
    listed = CliRunner().invoke(app, ["list", str(tmp_path)], env={"COLUMNS": "300"})
    assert listed.exit_code == 0, listed.output
    assert re.search("broken +unreadable", listed.output)
    assert f"broken: {said}" in " ".join(listed.output.split())
    (run,) = page_content([broken])["runs"]
    assert run["curves"] == {}
    assert run["left_out"][0].startswith(f"the curves: {said}")


def test_times_of_two_clocks_are_not_compared(runs, tmp_path):
    real = write_run(tmp_path / "real", [0, 100], [0.1, 0.9], clock="wall")
    comparison = Comparison([RecordedRun(path) for path in [*runs, real]])
    assert list(comparison.axes) == ["aggregation", "bytes"]
    assert any("two clocks" in note for note in comparison.remarks)


def rows_of(*runs: Path) -> dict[str, list[str]]:
    """The name of each setting, and how many seeds it has and where they came."""
    return {row[0]: row[1:3] for row in Comparison([RecordedRun(path) for path in runs]).rows("accuracy")}


def test_runs_on_other_data_are_no_seeds_of_one_setting(tmp_path):
    data = {"a": "/data/easy.npz", "b": "/data/hard.npz", "c": "/other/hard.npz"}
    runs = {
        name: write_run(tmp_path / name, [0, 1], [0.1, 0.9], dataset="npz", **{"data-path": path})
        for name, path in data.items()
    }
    again = write_run(tmp_path / "d", [0, 1], [0.1, 0.7], seed=1, dataset="npz", **{"data-path": data["a"]})
    assert rows_of(runs["a"], runs["b"], again) == {
        "data-path=easy.npz": ["2", "0.800 ± 0.14"],
        "data-path=hard.npz": ["1", "0.900"],
    }
    assert list(rows_of(*runs.values())) == [
        "data-path=easy.npz",
        "data-path=data/hard.npz",
        "data-path=other/hard.npz",
    ]


def test_what_is_known_by_its_name_is_the_same_wherever_it_is(tmp_path):
    runs = [
        write_run(tmp_path / name, [0, 1], [0.1, 0.9], dataset=dataset, **{"data-path": path})
        for name, dataset, path in (
            ("a", "mnist", "/here"),
            ("b", "mnist", "/there"),
            ("c", "own.data:rows", "/here"),
            ("d", "own.data:rows", "/there"),
        )
    ]
    assert rows_of(*runs) == {
        "mnist": ["2 runs of 1 seed", "0.900"],
        "own.data:rows data-path=here": ["1", "0.900"],
        "own.data:rows data-path=there": ["1", "0.900"],
    }
    assert all(map(has_own_data, ("npz", "files")))


def test_settings_are_told_apart_by_their_values_and_not_by_how_these_are_rounded(tmp_path):
    values: list[Any] = [0.1, 0.1000001, 0.25, 1, 1.0]
    runs = [
        write_run(tmp_path / str(number), [0, 1], [0.1, 0.9], lr=value) for number, value in enumerate(values)
    ]
    assert {name: seeds for name, (seeds, _) in rows_of(*runs).items()} == {
        "lr=0.1": "1",
        "lr=0.1000001": "1",
        "lr=0.25": "1",
        "lr=1": "2 runs of 1 seed",
    }


def test_runs_of_one_seed_are_one_draw(tmp_path):
    """Accuracy 0.4 and 0.6 of seed 0 count as 0.5; with 0.9 of seed 1 the deviation is 0.4 / √2."""
    runs = [
        write_run(tmp_path / str(number), [0, 1], [0.1, accuracy], seed=seed)
        for number, (accuracy, seed) in enumerate([(0.4, 0), (0.6, 0), (0.9, 1)])
    ]
    alone, both = (Comparison([RecordedRun(path) for path in some]) for some in (runs[:2], runs))
    assert alone.rows("accuracy")[0][1:] == ["2 runs of 1 seed", *["0.500"] * 4]
    assert both.rows("accuracy")[0][1:] == ["3 runs of 2 seeds", *["0.700 ± 0.28"] * 4]
    _, middle, spread = both.cells[0].band("accuracy", "time")
    assert middle == pytest.approx([0.1, 0.7])
    assert spread == pytest.approx([0, 0.4 / 2**0.5])
    assert (alone.cells[0].band("accuracy", "time")[2] == 0).all()


def test_runs_whose_configs_cannot_be_read_are_no_seeds_of_one_setting(tmp_path):
    runs = [write_run(tmp_path / name, [0, 1], [0.1, 0.9]) for name in ("a", "b")]
    for run in runs:
        (run / "config.toml").write_text("cut off = ")
    assert list(rows_of(*runs)) == ["a", "b"]


def test_a_run_is_compared_once_by_whatever_paths_it_is_named(runs, tmp_path):
    (tmp_path / "link").symlink_to(runs[0])
    around = tmp_path / "quick" / ".." / runs[0].name
    assert len(recorded([str(path) for path in (*runs, tmp_path / "link", around)])) == len(runs)


def test_a_pattern_in_a_folder_with_brackets_finds_its_runs(tmp_path):
    folder = tmp_path / "swept [1]"
    for name in ("a", "b"):
        write_run(folder / name, [0, 1], [0.1, 0.9])
    assert [run.path.name for run in recorded([str(folder / "*")])] == ["a", "b"]


def test_what_can_not_be_compared_is_one_line(runs, tmp_path):
    for arguments, message in (
        ([str(runs[0])], "there must be two runs"),
        ([str(runs[0]), str(runs[0])], "there must be two runs"),
        ([str(tmp_path / "none*")], "no run is there"),
    ):
        done = CliRunner().invoke(app, ["compare", *arguments])
        assert done.exit_code == 1
        assert message in done.output


def test_the_title_names_the_table_that_all_runs_have(tmp_path):
    table = {"dataset": "files", "data-path": "/data/hospitals.csv"}
    runs = [
        write_run(tmp_path / name, [0, 1], [0.1, 0.9], lr=lr, **table)
        for name, lr in (("a", 0.1), ("b", 0.2))
    ]
    assert "hospitals.csv" in Comparison([RecordedRun(path) for path in runs]).title


def test_the_view_of_curves_has_room_for_the_deviation_over_seeds(tmp_path, monkeypatch):
    runs = [
        write_run(tmp_path / f"{seed}", [0, 1, 2, 3], [0.1, level, level, level], seed=seed)
        for seed, level in ((0, 0.6), (1, 0.8))
    ]
    drawn = []
    monkeypatch.setattr(figures, "_save_png", lambda figure, _: drawn.append(figure))
    Comparison([RecordedRun(path) for path in runs]).write(tmp_path / "out")
    low, high = drawn[0].axes[0].get_ylim()
    assert low < 0.7 - 0.2 / 2**0.5 < 0.7 + 0.2 / 2**0.5 < high  # mean and deviation by hand
