"""Whole runs, as a user starts them: real processes, real Ray, real files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

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


def toml_pairs(values: Mapping[str, Any]) -> str:
    """Write ``key=value`` pairs in the syntax of --run-config."""

    def text(value: Any) -> str:
        return (
            str(value).lower()
            if isinstance(value, bool)
            else f'"{value}"'
            if isinstance(value, str)
            else str(value)
        )

    return " ".join(f"{key}={text(value)}" for key, value in values.items())


@pytest.fixture(scope="session")
def pairs() -> Callable[[Mapping[str, Any]], str]:
    return toml_pairs


@pytest.fixture(scope="session")
def simulate(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run ``run_simulation.py`` in a process of its own."""

    def run(config: Mapping[str, Any], *, federation: str = "num-supernodes=4", engine: str = "ray") -> Run:
        results = tmp_path_factory.mktemp("results")
        given = {"results-dir": str(results), "run-name": "run", **config}
        command = [sys.executable, "run_simulation.py", "--engine", engine, "--run-config", toml_pairs(given)]
        command += ["--federation-config", federation]
        done = subprocess.run(
            command,
            cwd=repository,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
        )
        return Run(done.returncode, done.stdout, results / str(given["run-name"]))

    return run


@pytest.fixture
def flower_home(tmp_path: Path) -> Iterator[Path]:
    """A FLWR_HOME of the test's own; every process that was started with it is ended, by process id."""
    home = tmp_path / "flower"
    home.mkdir()
    yield home
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_of(home):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 20
        while processes_of(home) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert processes_of(home) == []


def processes_of(home: Path) -> list[int]:
    """Return the processes whose environment names ``home``, and that aren't dead already."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={home}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture
def flower(repository: Path, flower_home: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a Flower command with the test's FLWR_HOME."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]]
        return subprocess.run(
            command,
            cwd=repository,
            env=environment_of(flower_home) | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
        )

    return run


@pytest.fixture
def start_flower(flower_home: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Start a long-running Flower process with the test's FLWR_HOME; it ends with the test."""

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        log = (flower_home / f"{'-'.join(arguments[:1])}-{len(processes_of(flower_home))}.log").open("wb")
        command = [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]]
        return subprocess.Popen(
            command, cwd=flower_home, env=environment_of(flower_home), stdout=log, stderr=log
        )

    return start


@pytest.fixture
def flower_environment(flower_home: Path) -> dict[str, str]:
    """The environment of Flower's commands, with the test's FLWR_HOME."""
    return environment_of(flower_home)


@pytest.fixture
def wait_for_superlink() -> Callable[[int], None]:
    """Wait until the SuperLink on a port answers."""

    def wait(port: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, "the SuperLink didn't start"
            time.sleep(0.2)

    return wait


def environment_of(home: Path) -> dict[str, str]:
    """Flower finds its other commands on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "FLWR_HOME": str(home), "PATH": path}
