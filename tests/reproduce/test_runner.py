"""Runs that are made, found again, repeated and reported, in real worker processes."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.config import ConfigError
from fedapp.reproduce.runner import _only_one, perform, run_missing

ENGINE = {"engine": "sequential"}


def stamps(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}


def test_only_what_is_not_there_is_run_and_failures_do_not_stop_the_rest(plan, tmp_path):
    cases = [{"label": "good"}, {"label": "bad", "dataset": "mnist", "data-path": "/nowhere"}]
    planned = plan(grid={"seed": [0, 1], "case": cases}).runs(data_path="/nowhere")
    runs, failures = run_missing(planned, tmp_path, **ENGINE, jobs=1)
    assert [(run["seed"], run["case"]) for run in runs] == [(0, "good"), (1, "good")]
    assert sorted(failures) == sorted(run.name for run in planned if run.labels["case"] == "bad")
    assert all("no such file" in reason for reason in failures.values())
    before = stamps(tmp_path)

    shutil.rmtree(runs[1].path / "model.safetensors", ignore_errors=True)
    (runs[1].path / "summary.json").write_text('{"status": "running"}')  # killed, with no checkpoint
    again, _ = run_missing(planned[::2], tmp_path, **ENGINE, jobs=1)
    assert [run.finished for run in again] == [True, True]
    after = stamps(tmp_path)
    assert after[runs[0].path.name] == before[runs[0].path.name]
    assert after[runs[1].path.name] != before[runs[1].path.name]


def test_no_time_is_no_run_but_a_report_on_what_is_there(plan, tmp_path):
    planned = plan().runs()
    assert perform(planned[0], tmp_path, "sequential") == ""
    runs, failures = run_missing(planned, tmp_path, **ENGINE, jobs=1, minutes=0)
    assert [run["seed"] for run in runs] == [0]
    assert failures == {}


def test_a_part_of_the_grid_can_be_run_and_the_report_is_on_all_there_is(plan, tmp_path):
    planned = plan().runs()
    runs, _ = run_missing(planned, tmp_path, **ENGINE, jobs=1, only="*seed-1*")
    assert [run["seed"] for run in runs] == [1]
    runs, _ = run_missing(planned, tmp_path, **ENGINE, jobs=1, only=planned[0].name)
    assert [run["seed"] for run in runs] == [0, 1]
    with pytest.raises(ConfigError, match="--only seed-9: no run has such a name"):
        run_missing(planned, tmp_path, **ENGINE, jobs=1, only="seed-9")


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(plan, tmp_path):
    base = {**plan().base, "num-server-rounds": 6, "checkpoint-every": 1}
    planned = plan(base=base).runs()[0]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert perform(planned, whole, "sequential") == ""
    shutil.copytree(whole, cut)
    run = cut / planned.name
    # What a kill after the last checkpoint leaves behind: no word of an end.
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    stamp = (run / "partition.png").stat().st_ino
    assert perform(planned, cut, "sequential") == ""
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    assert (run / "model.safetensors").read_bytes() == (
        whole / planned.name / "model.safetensors"
    ).read_bytes()
    assert (run / "metrics.jsonl").read_text() == (whole / planned.name / "metrics.jsonl").read_text()
    assert (run / "partition.png").stat().st_ino != stamp  # it did go on


def test_two_processes_do_not_share_a_folder(tmp_path):
    with _only_one(tmp_path), pytest.raises(ConfigError, match="another process"), _only_one(tmp_path):
        pass


def test_the_command_makes_a_report(plan_file, tmp_path):
    axis = [{"label": name, "strategy": name, "fraction-train": 1.0} for name in ("fedavg", "fedprox")]
    path = plan_file(grid={"seed": [0, 1], "strategy": axis}, claims={"000-0": "nobody looks at this one"})
    arguments = ["reproduce", path, "--quick", "--engine", "sequential", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "out" / "mine-quick"
    report = (folder / "report.md").read_text()
    assert "**Quick**: one seed" in report
    assert "2 of 2 runs" in report
    assert "| 000-0 | nobody looks at this one | **not decided** |" in report
    assert (folder / "comparison.png").stat().st_size < 150_000
    assert len((folder / "table.csv").read_text().splitlines()) == 1 + 2 * 4
    assert str(tmp_path) not in report


def test_the_command_lists_experiments_and_names_what_is_wrong(tmp_path):
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert listed.exit_code == 0
    assert "003-table-4-2" in listed.output
    assert "[003-3]" in listed.output
    unknown = CliRunner().invoke(app, ["reproduce", "004", "--out", str(tmp_path)])
    assert unknown.exit_code == 1
    assert "NAME = '004': allowed are 000-femnist" in str(unknown.exception) + unknown.output
    engine = CliRunner().invoke(app, ["reproduce", "compare", "--engine", "ray"])
    assert engine.exit_code == 1
