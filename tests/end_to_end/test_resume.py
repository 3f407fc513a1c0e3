"""Runs that are killed with ``kill -9`` and resumed: equal bit for bit to those that weren't."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import run_simulation
from fedapp.config import RunConfig
from fedapp.deploy.local import LocalDeployment
from fedapp.report.clients import last_clients
from fedapp.server.run_directory import RunDirectory
from strategies import REGISTRY
from tests.selection import spread

pytestmark = pytest.mark.usefixtures("no_figures")

CLIENTS, ROUNDS = 4, 80
BASE: dict[str, Any] = {
    "model": "logistic",
    "local-epochs": 0,
    "local-steps": 2,
    "num-server-rounds": ROUNDS,
    "checkpoint-every": 3,
}
OWN: dict[str, dict[str, Any]] = {
    "fedavg": {
        "participation": "uniform",
        "fraction-train": 0.5,
        "server-optimizer": "yogi",
        "server-lr": 0.01,
    },
    "fedprox": {
        "time-scenario": "exponential",
        "eval-every": 4,
        "server-optimizer": "momentum",
        "server-lr": 0.2,
    },
    "spectral": {"participation": "uniform", "fraction-train": 0.5},
    "fednova": {"local-steps": 3, "step-heterogeneity": "range:1-4", "server-optimizer": "fedexp"},
    "scaffold": {"participation": "uniform", "fraction-train": 0.5},
    "feddyn": {"participation": "uniform", "fraction-train": 0.5, "feddyn-alpha": 0.1},
    "mifa": {
        "participation": "uniform",
        "fraction-train": 0.5,
        "server-optimizer": "momentum",
        "server-lr": 0.2,
    },
    "fedstale": {"participation": "uniform", "fraction-train": 0.5, "stale-weight": 0.5},
    "fedau": {"participation": "uniform", "fraction-train": 0.5, "participation-cutoff": 3},
    "ditto": {"participation": "uniform", "fraction-train": 0.5, "test-on": "own", "ditto-lambda": 0.5},
    "fedamp": {"participation": "uniform", "fraction-train": 0.5, "test-on": "own"},
    "async-fedavg": {"server-lr": 0.2, "server-optimizer": "momentum"},
    "fedfix": {"time-scenario": "exponential", "server-optimizer": "adam", "server-lr": 0.01},
    "fedbuff": {"buffer-size": 3, "eval-every": 2, "server-optimizer": "adagrad", "server-lr": 0.05},
    "fedasync": {"staleness-discount": "hinge:1,2", "eval-every": 3},
    "delay-adaptive": {"time-scenario": "exponential", "concurrency": 3},
    "ringmaster": {"delay-threshold": 3},
    "ringleader": {"time-scenario": "exponential", "eval-every": 2},
    "rennala": {"buffer-size": 2, "time-scenario": "exponential"},
    "ca2fl": {"buffer-size": 2, "server-optimizer": "momentum", "server-lr": 0.2},
    "ace": {"time-scenario": "exponential", "eval-every": 2},
    "aced": {"cache-age": 3, "time-scenario": "exponential"},
    "fadas": {"buffer-size": 2, "server-lr": 0.01},
}


@pytest.fixture
def run(pairs, tmp_path, capsys):
    """Run in this process, on the sequential engine; return the exit code and what an error said."""

    def run(**config: Any) -> tuple[int, str]:
        resumed = "resume" in config
        given = config if resumed else {**BASE, "results-dir": str(tmp_path), **config}
        arguments = ["--engine", "sequential", "--run-config", pairs(given)]
        code = run_simulation.main(
            arguments if resumed else [*arguments, "--federation-config", f"num-supernodes={CLIENTS}"]
        )
        return code, capsys.readouterr().err

    return run


@pytest.fixture
def run_and_kill(pairs, tmp_path, repository):
    """Run in a process that is killed when metrics.jsonl has so many lines; return the run directory."""

    def run(lines: int, name: str = "killed", **config: Any) -> Path:
        path = Path(config["resume"]) if "resume" in config else tmp_path / name
        given = (
            config
            if "resume" in config
            else {**BASE, "results-dir": str(tmp_path), "run-name": name, **config}
        )
        command = [
            sys.executable,
            "run_simulation.py",
            "--engine",
            "sequential",
            "--run-config",
            pairs(given),
        ]
        if "resume" not in config:
            command += ["--federation-config", f"num-supernodes={CLIENTS}"]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=repository, stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while process.poll() is None and count(path) < lines and time.monotonic() < deadline:
            time.sleep(0.002)
        assert process.poll() is None, (tmp_path / "log").read_text()
        process.kill()
        process.wait(timeout=30)
        return path

    return run


def count(path: Path) -> int:
    file = path / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def assert_same(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    first, second = (json.loads((path / "summary.json").read_text()) for path in (one, other))
    apart = {"wall-seconds": 0, "date": ""}  # one may end after midnight
    assert {**first, **apart} == {**second, **apart}
    assert first["status"] == "finished"
    before, after = ((path / "config.toml").read_text().splitlines() for path in (one, other))
    different = [line for line in before if line not in after]
    assert [line.partition(" ")[0] for line in different] == ["run-name"]


# A strategy's own state: tests/strategies/core/test_resume.py, for all of them.
@pytest.mark.parametrize(
    ("lines", "strategy"),
    spread([(11 + place % 6, name) for place, name in enumerate(REGISTRY)], 1),
)
def test_a_killed_run_resumed_equals_one_that_was_not(run, run_and_kill, tmp_path, strategy, lines):
    own = OWN.get(strategy, {})
    assert run(strategy=strategy, **own, **{"run-name": "whole"})[0] == 0
    path = run_and_kill(lines, strategy=strategy, **own)
    assert count(path) < count(tmp_path / "whole")
    assert json.loads((path / "summary.json").read_text())["status"] == "running"
    assert len(list((path / "checkpoint").glob("[0-9]*"))) == 1
    assert run(resume=str(path))[0] == 0
    assert_same(tmp_path / "whole", path)


@pytest.mark.ci
@pytest.mark.thorough
def test_a_run_that_is_killed_again_and_again_still_ends_the_same(run, run_and_kill, tmp_path):
    config = {"strategy": "fedbuff", "buffer-size": 2, "client-weights": "adjacency"}
    run(**config, **{"run-name": "whole"})
    path = run_and_kill(1, **config)  # before there is a checkpoint, as a rule
    for lines in (20, 47):
        run_and_kill(lines, resume=str(path))
    assert run(resume=str(path))[0] == 0
    assert_same(tmp_path / "whole", path)


def test_a_finished_run_says_so_and_goes_on_when_rounds_are_added(run, tmp_path):
    run(strategy="async-fedavg", **{"run-name": "whole", "num-server-rounds": 12, "server-lr": 0.2})
    run(strategy="async-fedavg", **{"run-name": "run", "num-server-rounds": 6, "server-lr": 0.2})
    path = tmp_path / "run"
    before = (path / "metrics.jsonl").read_bytes()
    code, error = run(resume=str(path))
    assert code == 1
    assert error == (
        f"error: resume = {str(path)!r}: that run is finished; it goes on if num-server-rounds or time-budget is "
        "raised, from 6 and 0\n"
    )
    assert (path / "metrics.jsonl").read_bytes() == before
    assert run(resume=str(path), **{"num-server-rounds": 12})[0] == 0
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["aggregation"] for line in lines] == list(range(13))
    assert (path / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    assert json.loads((path / "summary.json").read_text())["aggregations"] == 12
    assert "num-server-rounds = 12\n" in (path / "config.toml").read_text()


def test_another_config_is_refused_with_the_keys_named(run, tmp_path):
    run(strategy="fedprox", **{"run-name": "run", "num-server-rounds": 3})
    path = tmp_path / "run"
    code, error = run(
        resume=str(path), strategy="fedavg", lr=0.1, **{"num-server-rounds": 2, "model": "mlp", "seed": 0}
    )
    assert code == 1
    assert error == (
        f"error: resume = {str(path)!r}: that run has another config than strategy = 'fedavg' (it has 'fedprox'), "
        "num-server-rounds = 2 (it has 3), model = 'mlp' (it has 'logistic'); num-server-rounds and time-budget may "
        "be raised, checkpoint-every, min-clients, round-timeout, log-format, figures, metrics-port, metrics-host "
        "may change\n"
    )
    code, error = run(resume=str(tmp_path))
    assert (code, error.startswith(f"error: resume = {str(tmp_path)!r}: no run is there")) == (1, True)


def test_another_number_of_clients_is_refused(run, tmp_path, capsys):
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3})
    arguments = ["--engine", "sequential", "--run-config", f'resume="{tmp_path / "run"}" num-server-rounds=5']
    assert run_simulation.main([*arguments, "--federation-config", "num-supernodes=5"]) == 1
    assert capsys.readouterr().err == "error: num-supernodes = 5: the run to resume has 4 clients\n"


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("model.npy", lambda content: content[:-8]),
        ("model.npy", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("model.npy", None),
        ("state.json", lambda content: content[: len(content) // 2]),
        ("state.json", lambda content: content.replace(b'"time": 3', b'"time": 4')),
        ("checksums.json", lambda content: content[:5]),
        ("checksums.json", None),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_overwritten(run, tmp_path, name, spoil):
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3})
    path = tmp_path / "run"
    (file,) = path.glob(f"checkpoint/*/{name}")
    content = file.read_bytes()
    if spoil is None:
        file.unlink()
    else:
        assert spoil(content) != content
        file.write_bytes(spoil(content))
    before = (path / "metrics.jsonl").read_bytes()
    code, error = run(resume=str(path), **{"num-server-rounds": 5})
    assert code == 1
    assert error.startswith(f"error: resume = {str(path)!r}: its checkpoint can't be read (")
    assert error.count("\n") == 1
    assert (path / "metrics.jsonl").read_bytes() == before


def test_a_run_that_keeps_no_checkpoints_cannot_be_resumed(run, tmp_path):
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3, "checkpoint-every": 0})
    path = tmp_path / "run"
    assert not (path / "checkpoint").exists()
    code, error = run(resume=str(path), **{"num-server-rounds": 5})
    assert (code, error) == (
        1,
        f"error: resume = {str(path)!r}: that run was made with checkpoint-every = 0\n",
    )


def test_a_run_that_went_on_without_checkpoints_goes_on_from_the_one_that_it_has(run, tmp_path):
    run(strategy="fedavg", **{"run-name": "whole", "num-server-rounds": 6})
    run(strategy="fedavg", **{"run-name": "run", "num-server-rounds": 3})
    path = tmp_path / "run"
    assert run(resume=str(path), **{"num-server-rounds": 5, "checkpoint-every": 0})[0] == 0
    assert run(resume=str(path), **{"num-server-rounds": 6})[0] == 0
    assert count(path) == 7
    assert (path / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_a_run_that_is_still_going_on_cannot_be_resumed(run, tmp_path):
    config = {
        **BASE,
        "strategy": "fedavg",
        "results-dir": str(tmp_path),
        "run-name": "run",
        "num-server-rounds": 2,
    }
    directory = RunDirectory(RunConfig.load(config))
    directory.write_config(CLIENTS)
    refused = f"error: resume = {str(directory.path)!r}: that run is still going on\n"
    assert run(resume=str(directory.path)) == (1, refused)
    directory.close()
    assert run(resume=str(directory.path))[0] == 0  # it had no checkpoint yet: it starts over
    assert count(directory.path) == 3


@pytest.mark.parametrize(
    ("keys", "others"),
    [
        ({}, True),
        ({"aggregation-weights": "observed"}, False),
        ({"concurrency": 2}, False),
    ],
)
def test_weights_that_go_by_the_number_of_aggregations_are_said_to_be_others(
    run, tmp_path, caplog, keys, others
):
    path = tmp_path / "run"
    config = {**BASE, **keys, "strategy": "fedbuff", "buffer-size": 2, "num-server-rounds": 6}
    assert run(**config, **{"results-dir": str(tmp_path), "run-name": "run"})[0] == 0
    assert run(resume=str(path), **{"num-server-rounds": 12})[0] == 0
    said = "num-server-rounds = 12 (was 6): time-based weights of fedbuff are those of all aggregations"
    assert (said in caplog.text) is others


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_aggregation_that_was_reported_is_lost_when_the_serverapp_dies(tmp_path, repository):
    results = tmp_path / "results"
    config = {
        "strategy": "async-fedavg",
        "clock": "wall",
        "server-lr": 0.3,
        "num-server-rounds": 10,
        "min-clients": 2,
        "local-epochs": 5,
        "round-timeout": 120.0,
        "results-dir": str(results),
        "run-name": "run",
    }
    path = results / "run"
    nodes = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
    with LocalDeployment(tmp_path / "deployment", nodes) as deployment:
        deployment.start()
        with (tmp_path / "first.log").open("wb") as log:
            first = deployment.start_run(repository, config, stdout=log, stderr=log)
        wait_until(lambda: count(path) >= 5, 200)
        (server,) = server_apps(deployment.folder)
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not server_apps(deployment.folder), 30)
        reported = (path / "metrics.jsonl").read_bytes()
        reported = reported[: reported.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in reported.splitlines()]
        assert json.loads((path / "summary.json").read_text())["status"] == "running"
        first.wait(timeout=120)
        with (tmp_path / "second.log").open("wb") as log:
            second = deployment.start_run(repository, {"resume": str(path)}, stdout=log, stderr=log)
        second.wait(timeout=240)
    output = (tmp_path / "second.log").read_text()
    assert f"Run directory: {path}" in output, output
    assert (path / "metrics.jsonl").read_bytes().startswith(reported)
    rest = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["aggregation"] for line in rest] == list(range(11))
    assert rest[-1]["time"] > rest[len(lines) - 1]["time"]  # the run's clock goes on
    assert sum(last_clients(path)["participation"]) == 10
    assert rest[-1]["accuracy"] > rest[0]["accuracy"]
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["status"], summary["aggregations"], summary["engine"]) == ("finished", 10, "deployment")


def server_apps(folder: Path) -> list[int]:
    """Return the ServerApp processes of a deployment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            named = f"FLWR_HOME={folder}".encode() in (process / "environ").read_bytes()
            if named and b"flwr-serverapp" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
