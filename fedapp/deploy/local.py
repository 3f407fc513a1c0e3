"""A whole deployment on this machine: real SuperLink, SuperNodes and their SuperExecs, TLS, keys and secrets."""

import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w

from fedapp.deploy.files import CONNECTION, write_deployment
from fedapp.deploy.flower import BIN, ask, connected, inherited
from fedapp.deploy.plan import LOOPBACK, SUPEREXEC, WORKER, DeployError, Deployment, Device
from fedapp.deploy.registration import register

START_TIMEOUT = 120.0  # seconds until the SuperLink must answer
STATUS_POLL = 5.0  # seconds between two questions whether the run has ended
STOP_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL

NodeConfigs = Iterable[Mapping[str, int | str]]


class LocalDeployment:
    """A deployment below one folder; every process it starts is ended with it, children included.

    Parameters
    ----------
    folder : Path
        A new or empty folder: keys, start-up files, databases, and a log per process.
    node_configs : iterable of mapping
        The node config of each device's SuperNode; device i is called ``device-i``.
    workers : bool
        Whether each device has a worker (``fedapp.worker``).
    proxied : bool
        Whether the SuperLink is behind a proxy, which the caller starts from the folder's `proxy`.

    Attributes
    ----------
    processes : dict of str to Popen
        The last process started under each name: superlink, superexec, device-0, device-0-superexec, …
    """

    def __init__(
        self, folder: Path, node_configs: NodeConfigs, *, workers: bool = False, proxied: bool = False
    ) -> None:
        self.folder = folder.absolute()
        self.workers = workers
        configs = [dict(config) for config in node_configs]
        port, backend, *node_ports = free_ports(2 + len(configs))
        devices = tuple(
            Device(f"device-{place}", config, node_port)
            for place, (config, node_port) in enumerate(zip(configs, node_ports, strict=True))
        )
        self.deployment = Deployment((LOOPBACK,), port, str(self.folder), devices, backend if proxied else 0)
        self.services = {service.name: service for service in self.deployment.services}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._connections = ExitStack()  # the ways to the SuperLink of commands that print a run's log
        write_deployment(self.folder, self.deployment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything, the SuperNodes after their keys are registered.

        Raises
        ------
        DeployError
            If the SuperLink doesn't answer, or refuses a key.
        """
        self.start_superlink()
        self.start_superexec()
        self.wait_for_superlink()
        for answer in register(self.folder, self.deployment):
            if answer.refused:
                raise DeployError(answer.line)
        for device in self.deployment.devices:
            self.start_supernode(device.name)

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink, on the state that is in its database."""
        return self._start("superlink")

    def start_superexec(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink's SuperExec; relative paths of a run are relative to this process's folder."""
        return self._start(SUPEREXEC)

    def start_supernode(self, name: str) -> subprocess.Popen[bytes]:
        """Start a device's SuperNode, and its SuperExec and worker, if devices have workers, unless these two run."""
        for other in (WORKER, SUPEREXEC) if self.workers else (SUPEREXEC,):
            running = self.processes.get(f"{name}-{other}")
            if running is None or running.poll() is not None:
                self._start(f"{name}-{other}")
        return self._start(name)

    def wait_for_superlink(self) -> None:
        """Wait until the SuperLink answers.

        Raises
        ------
        DeployError
            If it ends, or doesn't answer within ``START_TIMEOUT`` seconds.
        """
        url = f"https://{self.deployment.superlink_address}/health"
        trust = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                left = max(deadline - time.monotonic(), 0.1)
                with urllib.request.urlopen(url, timeout=left, context=trust):
                    return
            except OSError:
                ended = self.processes["superlink"].poll() is not None
            if ended or time.monotonic() > deadline:
                raise DeployError(f"the SuperLink didn't start; see {self.log('superlink')}")
            time.sleep(0.2)

    def run(self, app: Path, run_config: Mapping[str, Any]) -> bool:
        """Run an app, show what it prints, and tell whether it completed."""
        self.start_run(app, run_config).wait()
        while not (status := self.status()).startswith("finished"):
            if status == "none":  # it couldn't even be started
                return False
            time.sleep(STATUS_POLL)  # the stream broke off before the run ended
        return status == "finished:completed"

    def start_run(self, app: Path, run_config: Mapping[str, Any], **output: Any) -> subprocess.Popen[bytes]:
        """Start a run, and return the process that prints the run's log; ``output`` is for Popen."""
        options = self.folder / "run.toml"
        options.write_text(tomli_w.dumps(dict(run_config)), "utf-8")
        command = ["run", str(app), CONNECTION, "--stream", "--run-config", str(options)]
        environment = self._connections.enter_context(connected(self.folder))
        return self._spawn([str(BIN / "flwr"), *command], environment, **output)

    def status(self) -> str:
        """Return what the SuperLink says of the last run, such as ``running`` or ``finished:completed``."""
        runs = ask(self.folder, "list")["runs"]
        return str(runs[0]["status"]) if runs else "none"

    def log(self, name: str) -> Path:
        """Return the file of a process's output; a SuperNode and its SuperExec have one together."""
        return self.folder / f"{name.removesuffix(f'-{SUPEREXEC}')}.log"

    def kill(self, name: str) -> None:
        """End a process and its children at once, as a power cut does; a SuperNode with its SuperExec and worker."""
        for each in (name, f"{name}-{SUPEREXEC}", f"{name}-{WORKER}"):
            if each in self.processes:
                _signal(self.processes[each], signal.SIGKILL)
                self.processes[each].wait()

    def stop(self) -> None:
        """End every process, the last started first."""
        for process in reversed(self._started):
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        for process in reversed(self._started):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal(process, signal.SIGKILL)  # also what it may have left behind
            process.wait()
        self._started.clear()
        self._connections.close()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        service = self.services[name]
        command = [str(BIN / service.command[0]), *service.command[1:]]
        own = service.environment(str(self.folder), worker=self.workers)
        with self.log(name).open("ab") as log:
            self.processes[name] = self._spawn(command, inherited(own), stdout=log, stderr=log)
        return self.processes[name]

    def _spawn(
        self, command: list[str], environment: dict[str, str], **output: Any
    ) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C is for us alone, and its children can be ended with it.
        process = subprocess.Popen(command, env=environment, start_new_session=True, **output)
        self._started.append(process)
        return process


def free_ports(count: int) -> list[int]:
    """Find TCP ports on loopback that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a process's group, which has its process id."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
