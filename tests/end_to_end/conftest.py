"""Whole runs, as a user starts them: real processes, real Ray, real files."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.processes import (
    ROOT,
    Devices,
    command_of,
    environment_of,
    home_of_processes,
    toml_pairs,
)

TIMEOUT = 240  # seconds; a run takes about 15


@dataclass(frozen=True)
class Run:
    """A finished command: its exit code, what it printed, and its run directory."""

    returncode: int
    output: str
    path: Path

    @property
    def model(self) -> bytes:
        return (self.path / "model.safetensors").read_bytes()


@pytest.fixture(scope="session")
def pairs():
    return toml_pairs


RAY = """
import ray, sys
print(ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)["gcs_address"], flush=True)
sys.stdin.read()
"""


@contextmanager
def until_closed(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that ends when its standard input does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, text=True, **pipes
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()
        process.wait(timeout=60)


def answer_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that it prints."""
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT)
    if not ready:
        process.kill()
        process.wait()  # whoever asks next sees that it is gone
        pytest.fail("no answer in time")
    return process.stdout.readline().strip()


@pytest.fixture(scope="session")
def ray_address():
    """A Ray of two CPUs that all runs of the session share."""
    with until_closed("-c", RAY) as process:
        yield answer_of(process)


@pytest.fixture(scope="session")
def simulate(request, tmp_path_factory):
    """Call ``run_simulation.main`` in a process that other runs have used, on a Ray that they have used.

    The process is for run after run, as a notebook is; one that gave no answer in time is followed by a new one.
    """
    with ExitStack() as processes:
        used: list[subprocess.Popen[str]] = []

        def run(
            config: Mapping[str, Any], *, federation: str = "num-supernodes=4", engine: str = "ray"
        ) -> Run:
            if not used or used[-1].poll() is not None:
                used.append(processes.enter_context(until_closed("-m", "tests.end_to_end.driver")))
            driver = used[-1]
            arguments, path = call(tmp_path_factory, config, federation, engine)
            log = path.parent / "log"
            address = request.getfixturevalue("ray_address") if engine == "ray" else ""
            assert driver.stdin
            print(json.dumps([arguments, str(log), address]), file=driver.stdin, flush=True)
            code = answer_of(driver)
            return Run(int(code) if code else -1, log.read_text(), path)

        yield run


@pytest.fixture(scope="session")
def simulate_alone(tmp_path_factory):
    """Run ``run_simulation.py`` in a process of its own, with a Ray of its own."""

    def run(config: Mapping[str, Any], *, federation: str = "num-supernodes=4", engine: str = "ray") -> Run:
        arguments, path = call(tmp_path_factory, config, federation, engine)
        done = subprocess.run(
            [sys.executable, "run_simulation.py", *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
        )
        return Run(done.returncode, done.stdout, path)

    return run


def call(
    tmp_path_factory: pytest.TempPathFactory, config: Mapping[str, Any], federation: str, engine: str
) -> tuple[list[str], Path]:
    """Return the arguments of a run and its folder, a new one."""
    results = tmp_path_factory.mktemp("results")
    given = {"results-dir": str(results), "run-name": "run", **config}
    arguments = ["--engine", engine, "--run-config", toml_pairs(given), "--federation-config", federation]
    return arguments, results / str(given["run-name"])


@pytest.fixture
def flower_home(tmp_path):
    """A FLWR_HOME of the test's own."""
    with home_of_processes(tmp_path / "flower") as home:
        yield home


@pytest.fixture
def flower(flower_home):
    """Run a Flower command with the test's FLWR_HOME."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command_of(*arguments),
            cwd=ROOT,
            env=environment_of(flower_home) | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
        )

    return run


@pytest.fixture(scope="module")
def devices(tmp_path_factory, unused_ports):
    with home_of_processes(tmp_path_factory.mktemp("devices") / "flower") as home:
        yield Devices(home, unused_ports(4))
