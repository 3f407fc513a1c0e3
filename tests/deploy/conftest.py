"""Deployments of real processes on loopback, ended with the test; and an app whose devices can be made faulty."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.plan import SUPEREXEC
from tests.deploy.command import deploy

Node = Mapping[str, int | str]
TASK_BEGINS = "flwr-clientapp"  # in a SuperNode's log
RUN_BEGINS = "Recording this run in"  # in the run's log
RESTART_PAUSE = 10.0  # seconds, RestartSec of the units


@pytest.fixture
def made(tmp_path):
    """The folder of a deployment for two devices with data of their own; nobody listens on its server's port."""
    out = tmp_path / "d"
    arguments = ("--host", "127.0.0.1", "--host", "fl.example.org", "--port", 1)
    assert deploy("init", out, *arguments, "--device", "oslo=/a", "--device", "bern=/b").exit_code == 0
    return out


@pytest.fixture(scope="session")
def faulty_app(repository, tmp_path_factory):
    """The app's source, with the ClientApp of faulty.py in place of its own."""
    source = tmp_path_factory.mktemp("app")
    for folder in ("fedapp", "strategies", "custom"):
        shutil.copytree(repository / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    shutil.copy(Path(__file__).parent / "faulty.py", source)
    text = (repository / "pyproject.toml").read_text()
    for before, after in (
        ('clientapp = "fedapp.client_app:app"', 'clientapp = "faulty:app"'),
        ("fab-include = [", 'fab-include = ["faulty.py", '),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (source / "pyproject.toml").write_text(text)
    return source


class Trial:
    """A run on a deployment of its own, and what it leaves behind."""

    def __init__(self, deployment: LocalDeployment, app: Path) -> None:
        self.deployment = deployment
        self.app = app
        self.path = deployment.folder / "results" / "run"
        self.log = deployment.folder / "run.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.given: dict[str, Any] = {}  # the run's config, as far as it was given
        self.ended: dict[str, float] = {}  # supervised services, and when they were last seen running

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start everything, and the run."""
        self.deployment.start()
        self.given = {
            "clock": "wall",
            "min-clients": len(self.deployment.deployment.devices),
            "round-timeout": 90.0,
            "local-epochs": 5,
            "results-dir": str(self.path.parent),
            "run-name": "run",
            **config,
        }
        self.start_run(self.given)

    def resume(self, **config: Any) -> None:
        """Go on with the run, which has ended, by a run of its own on the same SuperLink."""
        named = {key: value for key, value in self.given.items() if key not in ("results-dir", "run-name")}
        before = self.output.count(RUN_BEGINS)
        self.start_run({**named, **config, "resume": str(self.path)})
        self.wait_for(lambda: self.output.count(RUN_BEGINS) > before)

    def start_run(self, config: Mapping[str, Any]) -> None:
        """Start a run; what it prints is added to the log."""
        with self.log.open("ab") as log:
            self.process = self.deployment.start_run(self.app, config, stdout=log, stderr=log)

    def supervise(self, name: str) -> None:
        """Start a service again whenever it has ended, after a pause, as its systemd unit does."""
        self.ended[name] = time.monotonic()

    def end(self, seconds: float = 900) -> str:
        """Wait for the end of the run, as its folder or the SuperLink tells it, and return what it printed."""
        self.wait_for(lambda: self.summary.get("status", "running") != "running" or self.streamed(), seconds)
        while self.deployment.status() == "running":
            self.wait_for(lambda: True)
        return self.output

    def streamed(self) -> bool:
        """Tell whether the process that prints the run's log has ended."""
        return self.process is not None and self.process.poll() is not None

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def summary(self) -> dict[str, Any]:
        file = self.path / "summary.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def wait_for(self, condition: Callable[[], bool], seconds: float = 900) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain\n{self.output}")
            for name, since in self.ended.items():
                if self.deployment.processes[name].poll() is None:
                    self.ended[name] = time.monotonic()
                elif time.monotonic() > since + RESTART_PAUSE:
                    self._restart(name)
            time.sleep(0.2)

    def _restart(self, name: str) -> None:
        if name == "superlink":
            self.deployment.start_superlink()
        elif name == SUPEREXEC:
            self.deployment.start_superexec()
        else:
            self.deployment.start_supernode(name)

    def wait_for_aggregation(self, number: int) -> None:
        """Wait until an aggregation is in metrics.jsonl."""
        self.wait_for(lambda: len(self.metrics) > number)

    def device_log(self, name: str) -> str:
        return self.deployment.log(name).read_text()

    def node_ids(self, name: str) -> list[str]:
        """Return the node id of each connection that a device made, in order."""
        return re.findall(r"SuperNode ID: (\d+)", self.device_log(name))

    def wait_for_task(self, name: str) -> None:
        """Wait until a device begins its next task."""
        before = self.device_log(name).count(TASK_BEGINS)
        self.wait_for(lambda: self.device_log(name).count(TASK_BEGINS) > before)


@pytest.fixture
def make_trial(tmp_path, faulty_app):
    """Prepare a deployment of devices, each told its part of the data and what else is given."""
    with ExitStack() as stack:

        def make(*nodes: Node) -> Trial:
            configs = [
                {"partition-id": i, "num-partitions": len(nodes), **node} for i, node in enumerate(nodes)
            ]
            deployment = stack.enter_context(LocalDeployment(tmp_path / f"deployment-{len(nodes)}", configs))
            return Trial(deployment, faulty_app)

        yield make
