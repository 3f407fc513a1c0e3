"""How a run stands, once anybody looks: one whose process is gone has failed, and one that goes on goes on."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedapp
from fedapp.config import RunConfig
from fedapp.own.metrics import is_taken
from fedapp.report.client_tables import by_evaluation, last_clients, read_clients
from fedapp.report.files import GONE, read_summary, this_process
from fedapp.server import prepare, run
from fedapp.server.journal import machine
from fedapp.server.run_directory import RunDirectory
from strategies import DivergedError
from strategies.flower import messages
from tests.fedapp.server.conftest import Devices
from tests.runs import summary_of

RUNNING = {"status": "running", "process": this_process(), "strategy": "fedavg", "aggregations": 7}


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def write(path: Path, content: Any) -> None:
    (path / "summary.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def killed(tmp_path, repository):
    """Start a run in a process of its own; the call kills it, and returns its folder."""
    config = (
        f'results-dir="{tmp_path}" run-name="killed" model="logistic" num-server-rounds=100000 eval-every=1'
    )
    command = [sys.executable, "run_simulation.py", "--engine", "sequential", "--run-config", config]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--federation-config", "num-supernodes=3"], cwd=repository, stdout=log, stderr=log
        )
    path = tmp_path / "killed"
    deadline = time.monotonic() + 120
    while not ((path / "metrics.jsonl").exists() and (path / "metrics.jsonl").read_bytes().count(b"\n") > 2):
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def kill() -> Path:
        process.kill()
        process.wait(30)
        return path

    yield kill
    process.kill()
    process.wait(30)


def test_a_killed_run_has_failed_once_anybody_looks(killed, tmp_path):
    going = read_summary(tmp_path / "killed")
    assert going["status"] == "running"
    assert going["process"].keys() == {"host", "pid", "boot"}
    path = killed()
    assert summary_of(path)["status"] == "running"
    found = read_summary(path)
    assert (found["status"], found["reason"]) == ("failed", GONE)
    assert "process" not in found
    assert found["aggregations"] >= 1
    assert summary_of(path) == found  # and now it is written down
    assert read_summary(path) == found


def test_a_run_is_put_down_as_failed_only_if_nobody_has_its_lock(run_dir):
    write(run_dir, RUNNING)
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert read_summary(run_dir) == RUNNING
    finally:
        os.close(descriptor)
    assert read_summary(run_dir)["status"] == "failed"


@pytest.mark.parametrize(
    ("process", "status"),
    [
        ({"host": "elsewhere", "boot": "another", "pid": 1}, "running"),  # its lock can't be seen from here
        ({**this_process(), "boot": "before it went down"}, "failed"),
        ({**this_process(), "host": "a container of this machine"}, "failed"),
        ({"host": "elsewhere", "boot": "", "pid": 1}, "running"),
        (None, "failed"),  # of an earlier version
    ],
)
def test_a_run_of_another_machine_is_not_judged(run_dir, process, status):
    write(run_dir, {"status": "running", **({} if process is None else {"process": process})})
    assert read_summary(run_dir)["status"] == status


@pytest.mark.parametrize("status", ["finished", "interrupted", "stopped", "diverged", "failed"])
def test_what_has_ended_stays(run_dir, status):
    write(run_dir, {"status": status})
    before = (run_dir / "summary.json").stat().st_mtime_ns
    assert read_summary(run_dir) == {"status": status}
    assert (run_dir / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "{}", '{"status": "running", "process": 3}'])
def test_what_is_no_summary_is_none(run_dir, content):
    write(run_dir, content)
    assert read_summary(run_dir) == {}


def test_a_folder_without_one_has_none(run_dir):
    assert read_summary(run_dir) == {}
    assert read_summary(run_dir / "not there") == {}


def test_whoever_reads_keeps_nobody_from_going_on(go, tmp_path):
    path = go(checkpoint_every=1)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    released = subprocess.Popen(["sleep", "0.2"], pass_fds=[descriptor])  # as a reader that takes a moment
    os.close(descriptor)
    try:
        RunDirectory(RunConfig.load({"resume": str(path), "num-server-rounds": 5})).close()
    finally:
        released.wait(30)


def test_a_failure_says_why(go, tmp_path):
    with pytest.raises(RuntimeError):
        go(lr=1e30, num_server_rounds=2)
    summary = read_summary(tmp_path / "run")
    assert summary["status"] in ("failed", "diverged")
    assert summary["reason"].startswith("no client's work was accepted in 2 aggregations")


def test_a_resumed_run_keeps_what_was_told_of_its_devices(go):
    path = go(("oslo", "", "lima"), clock="wall", checkpoint_every=1)
    before = (path / "metrics.jsonl").read_text()
    experiment = prepare(RunConfig.load({"resume": str(path), "num-server-rounds": 5}), 3)
    run(Devices(("", "", "")), experiment)  # they don't say their names any more
    lines = (path / "metrics.jsonl").read_text()
    assert lines.startswith(before)
    last = last_clients(path)
    assert (last["name"], last["tasks"], last["participation"]) == (["oslo", "", "lima"], [5] * 3, [5] * 3)


def test_devices_are_in_the_record_and_a_simulation_has_none(go):
    def clients(path: Path) -> list[Any]:
        return list(by_evaluation(path).values())

    last = clients(go(("oslo", "", "lima"), clock="wall"))[-1]
    assert last["name"] == ["oslo", "", "lima"]
    assert (last["tasks"], last["participation"], last["failed"]) == ([3] * 3, [3] * 3, [0] * 3)
    grid = Devices(("", "", ""))
    grid.engine = "sequential"
    simulated = clients(go(("", "", ""), grid=grid, run_name="simulated"))
    assert len(simulated) == 4
    assert not any({"name", "tasks", "failed"} & known.keys() for known in simulated)


@pytest.mark.parametrize(("used", "named"), [(True, "NVIDIA H200"), (False, "a GPU")])
def test_of_a_gpu_that_only_clients_may_have_used_no_more_is_said(used, named, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: used)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "NVIDIA H200")
    assert machine().endswith(f" cores, {named}")


@pytest.mark.parametrize(("server_lr", "unstable"), [(1.0, True), (0.0, False)])
def test_a_run_whose_model_swings_says_so_beside_its_status(server_lr, unstable, tmp_path):
    keys: dict[str, Any] = {"model": "logistic", "l2": 1.0, "lr": 0.3, "local_epochs": 0, "local_steps": 2}
    keys |= {"strategy": "fedfix", "fedfix_interval": 0.05, "server_lr": server_lr, "eval_every": 1000}
    keys |= {"results_dir": str(tmp_path), "run_name": "swings", "figures": False, "checkpoint_every": 0}
    try:
        fedapp.run(num_clients=5, num_server_rounds=200, quiet=True, **keys)
    except DivergedError:
        assert unstable
    summary = json.loads((tmp_path / "swings" / "summary.json").read_text())
    assert ("unstable" in summary) == unstable
    assert not unstable or "what helps is a smaller lr or a smaller server_lr than 1" in summary["unstable"]


@pytest.mark.parametrize(
    "keys",
    [
        {"keep": "best", "best_of": "accuracy", "record_divergence": True},
        {"strategy": "fedbuff", "availability": "bernoulli:0.9", "test_on": "own", "task_failure": 0.1},
        {"dp": "central", "client_weights": "uniform", "participation": "poisson", "fraction_train": 0.5},
    ],
    ids=["rounds", "without", "privacy"],
)
def test_no_metric_of_ones_own_may_be_called_as_anything_in_a_runs_files(keys, tmp_path):
    made = fedapp.run(
        **{"model": "logistic", "num_clients": 4, "num_server_rounds": 3, "figures": False, "quiet": True},
        **keys,
        results_dir=tmp_path,
    )
    by_client = by_evaluation(made.path).values()
    found = {*summary_of(made.path), *made.metrics.columns, *read_clients(made.path).column_names}
    found |= {name for clients in by_client for name in clients} | messages.OURS
    assert {"weight", "expected", "importance", "status", "machine", "participants"} <= found
    assert {name for name in found if not is_taken(name)} == {"accuracy"}
    assert all(map(is_taken, messages.OUR_PREFIXES))
