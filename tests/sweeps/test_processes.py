"""Runs of a sweep and other processes: one that makes a run itself, one that is killed."""

import gc
import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.cli import app
from fedapp.config import RunConfig
from fedapp.sweeps.point import PlannedRun
from fedapp.sweeps.runner import perform, run_missing
from strategies import FederatedStrategy, RunError
from tests.runs import summary_of

TINY = {"model": "logistic", "batch-size": 0, "num-server-rounds": 2, "checkpoint-every": 1}

HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_another_process_makes_is_left_to_it(tmp_path):
    planned = PlannedRun({"case": "αβ"}, RunConfig.load(TINY), 3)
    assert perform(planned, tmp_path, "sequential") == ""
    run = tmp_path / f"run-{planned.key}"  # which nothing in its label can call
    summary = summary_of(run)
    (run / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        assert (
            perform(planned, tmp_path, "sequential") == f"resume = {str(run)!r}: that run is still going on"
        )
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        other.communicate()
    assert perform(planned, tmp_path, "sequential") == ""  # from its checkpoint


def test_a_run_that_was_cut_off_goes_on_with_the_data_where_they_are_now(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDAPP_CACHE", str(tmp_path / "cache"))
    first, moved, runs = tmp_path / "first.npz", tmp_path / "moved.npz", tmp_path / "runs"
    rng = np.random.default_rng(0)
    content = {"x_train": rng.integers(0, 256, (60, 28, 28), np.uint8), "y_train": np.arange(60) % 10}
    np.savez(first, **content, x_test=content["x_train"][:20], y_test=content["y_train"][:20])

    def planned(path) -> PlannedRun:
        return PlannedRun({}, RunConfig.load({**TINY, "dataset": "mnist", "data-path": str(path)}), 3)

    assert perform(planned(first), runs, "sequential") == ""
    run = runs / planned(first).name
    summary = summary_of(run)
    (run / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    first.rename(moved)
    assert "no such file or folder" in perform(planned(first), runs, "sequential")
    assert perform(planned(moved), runs, "sequential") == ""
    assert "resumed from aggregation 2" in (run / "log.txt").read_text("utf-8")


def test_a_script_from_standard_input_has_workers(tmp_path):
    script = """
import fedapp

swept = fedapp.sweep(model="logistic", num_server_rounds=1, lr=[0.1, 0.2], jobs=2, quiet=True, out="swept")
print(swept.table["runs"].tolist())
"""
    made = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (made.returncode, made.stdout) == (0, "[1, 1]\n"), made.stderr


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_process_that_makes_many_runs_keeps_nothing_of_them(engine, tmp_path):
    """Python's own collection, which comes only after dozens of runs, is off."""

    def kept() -> int:
        return sum(issubclass(type(each), FederatedStrategy) for each in gc.get_objects())

    gc.collect()
    before = kept()
    gc.disable()
    try:
        for seed in range(3):
            planned = PlannedRun.of({"seed": seed}, {**TINY, "seed": seed, "num-clients": 3})
            assert perform(planned, tmp_path, engine) == ""
            assert kept() == before
    finally:
        gc.enable()


def test_a_worker_that_is_killed_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "own_deadly_data.py").write_text(
        "import os, signal\ndef load():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    out = str(tmp_path / "out")
    arguments = [
        "sweep",
        "seed=0",
        "-c",
        "dataset='own_deadly_data:load'",
        "--engine",
        "sequential",
        "-o",
        out,
    ]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True)
    assert "error: a worker process was killed, perhaps for want of memory; the same command" in done.output


@pytest.mark.thorough
def test_a_strategy_with_keys_of_its_own_goes_through_a_process(tmp_path):
    tiny = "strategy=custom.half_life:HalfLife model=logistic num-server-rounds=1 num-clients=2"
    done = CliRunner().invoke(app, ["sweep", "half-life=1.0,2.0", "-c", tiny, "-o", str(tmp_path)])
    assert done.exit_code == 0, done.output
    finished = [json.loads(path.read_text())["status"] for path in tmp_path.rglob("summary.json")]
    assert finished == ["finished", "finished"]


def test_an_experiment_says_so_in_one_line_too(tmp_path, monkeypatch):
    def killed(*_, **__):
        raise RunError("a worker process was killed")

    monkeypatch.setattr("studies.reproduce.command.run_missing", killed)
    done = CliRunner().invoke(app, ["reproduce", "compare", "--quick", "--out", str(tmp_path)])
    assert (done.exit_code, done.output) == (1, "error: a worker process was killed\n")


def test_a_run_that_was_interrupted_interrupts_the_sweep(monkeypatch, tmp_path):
    """A worker's run may know of Ctrl-C although the sweep's own process never heard of it."""
    monkeypatch.setattr("fedapp.sweeps.runner.perform", lambda *_: "interrupted: ")
    with pytest.raises(KeyboardInterrupt):
        run_missing([PlannedRun.of({}, {"num-clients": 2})], tmp_path, engine="sequential", jobs=0)
