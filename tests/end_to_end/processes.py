"""Processes of Flower, each known by its FLWR_HOME and ended by whoever made that."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


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


def server_apps(home: Path) -> list[int]:
    """Return those of them that are ServerApps; ``home`` may be a folder above."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = f"FLWR_HOME={home}".encode() in (folder / "environ").read_bytes()
            if named and b"flwr-serverapp" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


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


def command_of(*arguments: str) -> list[str]:
    """Return the call of one of Flower's commands."""
    return [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]]


def environment_of(home: Path) -> dict[str, str]:
    """Flower finds its other commands on the PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "FLWR_HOME": str(home), "PATH": path}


class Devices:
    """A SuperLink and three SuperNodes, each with its part of the data, for run after run."""

    def __init__(self, home: Path, ports: list[int]) -> None:
        self.home = home
        self.port, *self.node_ports = ports
        self.environment = environment_of(home)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self._start("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port))
        wait_until(self._answers, "the SuperLink didn't start")
        self.processes = [self.start(partition) for partition in range(3)]

    def start(self, partition: int) -> subprocess.Popen[bytes]:
        """Start a SuperNode."""
        return self._start(
            "flower-supernode",
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--port",
            str(self.node_ports[partition]),
            "--node-config",
            f"partition-id={partition} num-partitions=3",
        )

    def start_run(self, config: Mapping[str, Any], log: Path) -> subprocess.Popen[bytes]:
        """Start the app on all three; the command ends with the run, and what it prints goes to a file."""
        config = {"clock": "wall", "min-clients": 3, **config}
        command = command_of("flwr", "run", ".", "here", "--stream", "--run-config", toml_pairs(config))
        with log.open("wb") as file:
            return subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=file, stderr=file)

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.home / f"{arguments[0]}-{len(processes_of(self.home))}.log").open("wb") as log:
            command = command_of(*arguments)
            return subprocess.Popen(command, cwd=self.home, env=self.environment, stdout=log, stderr=log)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200
        except httpx.TransportError:
            return False
