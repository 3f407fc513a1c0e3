"""Ctrl-C from Python and in a sweep: real processes, a complete record, nothing left behind, and it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.processes import home_of_processes, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FROM_PYTHON = "import json, sys, fedapp; fedapp.run(num_clients=4, **json.loads(sys.argv[1]))"


@pytest.fixture
def home(tmp_path):
    with home_of_processes(tmp_path / "home") as folder:
        yield folder


@pytest.fixture
def begin(repository, home):
    """Start Python with these arguments, as a terminal does: in a group of its own."""

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=repository,
            env={**os.environ, "FLWR_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start


def interrupted(process: subprocess.Popen[str], due: Callable[[], bool]) -> str:
    """Interrupt a process's group once it is due; return what it said."""
    deadline = time.monotonic() + 300
    while not due():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=300)[0]


def summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_a_run_from_python_is_interrupted_and_resumed(begin, home, tmp_path):
    run = tmp_path / "run"
    keys = {
        "model": "logistic",
        "num_server_rounds": 1_000_000,
        "results_dir": str(tmp_path),
        "run_name": "run",
    }
    first = begin("-c", FROM_PYTHON, json.dumps(keys))
    said = interrupted(first, lambda: lines(run) > 5 and any((run / "checkpoint").glob("[0-9]*")))
    assert first.returncode == -signal.SIGINT, said
    assert f"KeyboardInterrupt: what the run has recorded is in {run}" in said
    told, number = summary(run), lines(run)
    assert told["status"] == "interrupted"
    assert told["aggregations"] == number - 1
    assert all((run / name).is_file() for name in ("model.safetensors", "curves.png", "tasks.parquet"))
    assert processes_of(home) == []
    again = begin("-c", FROM_PYTHON, json.dumps({"resume": str(run)}))
    said = interrupted(again, lambda: lines(run) > number + 5)
    assert "resumed from aggregation " in said
    assert summary(run)["aggregations"] == lines(run) - 1 > told["aggregations"]
    assert processes_of(home) == []


def test_a_sweep_is_interrupted_and_the_same_command_goes_on(begin, home, tmp_path):
    sweep = tmp_path / "sweep"
    config = "model=logistic num-clients=4 num-server-rounds=100"
    command = ("-m", "fedapp.cli", "sweep", "seed=0-2", "-c", config, "--jobs", "2", "-o", str(sweep))

    def ended() -> list[Path]:
        return [path for path in sorted(sweep.glob("runs/*")) if summary(path).get("status") == "finished"]

    def goes_on() -> bool:
        return bool(ended()) and any(
            summary(path).get("status") == "running" for path in sweep.glob("runs/*")
        )

    first = begin(*command)
    said = interrupted(first, goes_on)
    assert first.returncode == 130, said
    assert "interrupted: the same command goes on from here" in said
    assert "Traceback" not in said
    assert processes_of(home) == []
    assert not any(summary(path).get("status") == "running" for path in sweep.glob("runs/*"))
    kept = {path: (path / "metrics.jsonl").stat().st_mtime_ns for path in ended()}
    assert 0 < len(kept) < 3
    again = begin(*command)
    said = again.communicate(timeout=600)[0]
    assert again.returncode == 0, said
    assert len(ended()) == 3
    assert {path: (path / "metrics.jsonl").stat().st_mtime_ns for path in kept} == kept
    assert (sweep / "report.md").is_file()
    assert processes_of(home) == []


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_that_is_told_to_end_leaves_its_runs_interrupted(begin, home, tmp_path, jobs):
    sweep = tmp_path / "sweep"
    config = "model=logistic num-clients=4 num-server-rounds=1000000"
    command = ("sweep", "seed=0-2", "-c", config, "--jobs", jobs, "-o", str(sweep))
    process = begin("-m", "fedapp.cli", *command)
    deadline = time.monotonic() + 300
    while sum(lines(path) > 2 for path in sweep.glob("runs/*")) < int(jobs):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()  # its workers aren't told
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 130, said
    assert "interrupted: the same command goes on from here" in said
    assert "Traceback" not in said
    ended = [summary(path.parent)["status"] for path in sweep.glob("runs/*/summary.json")]
    assert ended == ["interrupted"] * int(jobs)
    assert processes_of(home) == []
