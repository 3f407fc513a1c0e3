"""From runs' folders to curves.parquet, and from there to a report."""

import json
import shutil
from pathlib import Path

import pytest

from fedapp.config import ConfigError
from fedapp.server.journal import machine
from fedapp.sweeps.runner import perform, run_missing
from studies.reproduce import beyond
from studies.reproduce.experiment import Results, collect, measurer_of, report_on, reporter_of
from studies.reproduce.plan import plan_names, read_plan
from studies.reproduce.runs import Curves, Run
from studies.reproduce.store import FILE, read_stored

STRATEGIES = [{"label": name, "strategy": name} for name in ("fedavg", "fedprox")]


@pytest.fixture
def small(plan):
    """A plan of two runs."""
    return plan(grid={"seed": [0], "strategy": STRATEGIES})


def run_all(plan, folder: Path) -> None:
    for run in plan.runs():
        assert perform(run, folder / "runs", "sequential") == ""


def test_runs_stay_in_the_file_though_their_folders_are_gone(small, plan, tmp_path):
    run_all(small, tmp_path)
    ended = json.loads(next(tmp_path.glob("runs/*/summary.json")).read_text())
    assert (ended["machine"], len(ended["date"])) == (machine(), len("2020-02-02"))
    assert collect(small, tmp_path) == []
    assert collect(small, tmp_path) == []
    shutil.rmtree(tmp_path / "runs")
    collect(small, tmp_path)
    assert len(read_stored(tmp_path / FILE).curves) == 2

    more = plan(grid={"seed": [0, 1], "strategy": STRATEGIES[:1]})
    have = read_stored(tmp_path / FILE).curves
    run_missing(more.runs(), tmp_path / "runs", engine="sequential", jobs=1, have=have)
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 1  # seed 0 was there
    (remark,) = collect(more, tmp_path)
    assert remark == f"1 runs in {tmp_path / FILE} are no longer planned: dropped"
    stored = read_stored(tmp_path / FILE)
    assert sorted(stored.seeds.values()) == [0, 1]
    report = report_on(more, tmp_path).read_text()
    assert "- Full settings." in report
    assert "- 2 of 2 runs, seeds 0, 1, " in report
    assert "engine sequential" in report


def test_a_part_of_the_grid_is_not_the_full_settings(small, plan, tmp_path):
    run_all(small, tmp_path)
    whole = plan(grid={"seed": [0, 1], "strategy": STRATEGIES})
    collect(
        whole, tmp_path, failures={"seed-1": f"ValueError: {tmp_path}/runs is odd\nreally", "seed-2": "no"}
    )
    report = report_on(whole, tmp_path).read_text()
    assert "Full settings" not in report
    assert "- 2 of 4 runs, seeds 0, " in report
    assert "Not there: seed-1: ValueError: OUT/runs is odd really" in report
    results = Results.of(whole, read_stored(tmp_path / FILE))
    assert results.missing() == results.missing(seed=[0, 1]) == "2 of 4 runs aren't there"
    assert results.missing(seed=0) == ""
    assert results.missing(seed=[0, 2]) == "2 isn't planned"


def test_nothing_at_all_is_a_report_too(small, tmp_path):
    collect(small, tmp_path)
    assert "- 0 of 2 runs" in report_on(small, tmp_path).read_text()


def test_numbers_are_measured_once_and_kept(small, tmp_path, monkeypatch):
    def measure(plan, runs, known, data_path):
        times.append(len(runs))
        folders = [run.folder is not None and run.folder.exists() for run in runs]
        found = known.get("seen") or {"runs": len(runs), "folders": all(folders)}
        return {"seen": found, "absent": {"a set": f"no file in {data_path}"}}

    times: list[int] = []
    monkeypatch.setattr(beyond, "measure_comparison", measure, raising=False)
    run_all(small, tmp_path)
    collect(small, tmp_path, data_path="/where")
    first = (tmp_path / FILE).read_bytes()
    shutil.rmtree(tmp_path / "runs")
    collect(small, tmp_path, data_path="/where")
    assert times == [2, 2]
    assert (tmp_path / FILE).read_bytes() == first
    stored = read_stored(tmp_path / FILE)
    assert stored.numbers == {"seen": {"runs": 2, "folders": True}}
    assert stored.absent == {"a set": "no file in DATA-PATH"}
    assert {"date", "versions", "machine", "seconds"} <= stored.measured.keys()
    report = report_on(small, tmp_path).read_text()
    assert "Not there: a set: no file in DATA-PATH" in report
    assert "Full settings" not in report


@pytest.mark.parametrize("name", list(plan_names()))
def test_every_experiment_has_a_report_and_a_study_measures(name):
    plan = read_plan(name)
    assert callable(reporter_of(plan))
    assert measurer_of(plan) is not None or not plan.is_study


def test_a_comparison_needs_no_axis_called_strategy(plan, tmp_path):
    rates = plan(grid={"seed": [0], "rate": [{"label": "slow", "lr": 0.1}, {"label": "fast", "lr": 0.5}]})
    run_missing(rates.runs(), tmp_path / "runs", engine="sequential", jobs=1)
    collect(rates, tmp_path)
    report = report_on(rates, tmp_path).read_text()
    assert "| slow | 0.1 |" in report
    assert "| fast | 0.5 |" in report


def test_an_axis_that_a_report_needs_is_named(plan):
    run = Run(plan().runs()[0], Curves("x", {}, {}))
    with pytest.raises(
        ConfigError, match=r"grid\.case: this report needs an axis of that name; there are seed"
    ):
        run["case"]
