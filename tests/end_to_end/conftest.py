"""Whole runs, as a user starts them: real processes, real Ray, real files."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
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
        pytest.fail("no answer in time")
    return process.stdout.readline().strip()


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray of two CPUs that all runs of the session share."""
    with until_closed("-c", RAY) as process:
        yield answer_of(process)


@pytest.fixture(scope="session")
def driver() -> Iterator[subprocess.Popen[str]]:
    """A process for run after run, as a notebook is."""
    with until_closed("-m", "tests.end_to_end.driver") as process:
        yield process


@pytest.fixture(scope="session")
def simulate(
    driver: subprocess.Popen[str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Run]:
    """Call ``run_simulation.main`` in a process that other runs have used, on a Ray that they have used."""

    def run(config: Mapping[str, Any], *, federation: str = "num-supernodes=4", engine: str = "ray") -> Run:
        arguments, path = call(tmp_path_factory, config, federation, engine)
        log = path.parent / "log"
        address = request.getfixturevalue("ray_address") if engine == "ray" else ""
        assert driver.stdin
        print(json.dumps([arguments, str(log), address]), file=driver.stdin, flush=True)
        code = answer_of(driver)
        return Run(int(code) if code else -1, log.read_text(), path)

    return run


@pytest.fixture(scope="session")
def simulate_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
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


@contextmanager
def home_of_processes(home: Path) -> Iterator[Path]:
    """Make a FLWR_HOME; every process that was started with it is ended, by process id."""
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


@pytest.fixture
def flower_home(tmp_path: Path) -> Iterator[Path]:
    """A FLWR_HOME of the test's own."""
    with home_of_processes(tmp_path / "flower") as home:
        yield home


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
