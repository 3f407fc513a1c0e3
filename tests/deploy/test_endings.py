"""How runs end on a real SuperLink: a config error, ``flwr stop``, a killed ServerApp; and what is told meanwhile."""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapp.deploy.files import CONNECTION
from fedapp.deploy.flower import flwr
from fedapp.deploy.local import LocalDeployment
from fedapp.report.client_tables import last_clients
from fedapp.report.files import GONE, read_summary
from tests.end_to_end.processes import server_apps
from tests.runs import lines_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COLOUR = re.compile(r"\x1b\[\d+m")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """A SuperLink and two SuperNodes."""
    nodes = [{"partition-id": part, "num-partitions": 2} for part in range(2)]
    with LocalDeployment(tmp_path_factory.mktemp("endings") / "deployment", nodes) as deployment:
        deployment.start()
        yield deployment


class Trial:
    """A run, and what it leaves behind."""

    def __init__(self, deployment: LocalDeployment, app: Path, folder: Path, config: dict[str, Any]) -> None:
        self.deployment = deployment
        self.path, self.log = folder / "results" / "run", folder / "run.log"
        given = {
            "clock": "wall",
            "min-clients": 2,
            "num-server-rounds": 200,
            "model": "logistic",
            "results-dir": str(self.path.parent),
            "run-name": "run",
        }
        with self.log.open("wb") as log:
            self.process = deployment.start_run(app, {**given, **config}, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        return COLOUR.sub("", self.log.read_text())

    @property
    def raw(self) -> dict[str, Any]:
        """summary.json as it stands, read by nobody who judges."""
        file = self.path / "summary.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: self.output)

    def wait_for_aggregation(self, number: int) -> None:
        self.wait_for(lambda: self.raw.get("aggregations", 0) >= number)

    def server_apps(self) -> list[int]:
        return server_apps(self.deployment.folder)


@pytest.fixture
def start(deployment, repository, tmp_path):
    return lambda **config: Trial(
        deployment, repository, tmp_path, {name.replace("_", "-"): value for name, value in config.items()}
    )


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"lr": -1.0}, "lr = -1.0: must be a number > 0"),
        ({"min_clients": 3, "round_timeout": 1.0}, "2 of 3 clients connected within 1 s"),
        (
            {"metrics_port": 9100, "metrics_host": "192.0.2.1"},
            "metrics-port = 9100, metrics-host = '192.0.2.1': ",
        ),
    ],
)
def test_an_error_of_the_config_is_one_line_and_the_run_has_failed(config, line, start, deployment):
    trial = start(**config)
    trial.wait_for(lambda: deployment.status() == "finished:failed")
    trial.wait_for(lambda: trial.process.poll() is not None)
    said = [text for text in trial.output.splitlines() if text.startswith("ERROR")]
    assert len(said) == 1, trial.output
    assert re.fullmatch(r"ERROR\s*:\s+" + re.escape(line) + ".*", said[0])
    assert "Traceback" not in trial.output
    assert "Exit Code" not in trial.output
    runs = json.loads(flwr(deployment.folder, "list", CONNECTION, "--format", "json"))["runs"]
    assert line in runs[0]["status-details"]
    trial.wait_for(lambda: not trial.server_apps())
    assert not trial.path.exists()


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_after_flwr_stop_the_record_says_stopped_and_is_complete(strategy, start, deployment):
    trial = start(strategy=strategy)
    trial.wait_for_aggregation(1)
    run = json.loads(flwr(deployment.folder, "list", CONNECTION, "--format", "json"))["runs"][0]["run-id"]
    flwr(deployment.folder, "stop", str(run), CONNECTION)
    trial.wait_for(lambda: not trial.server_apps())
    assert deployment.status() == "finished:stopped"
    assert trial.raw["status"] == "stopped"
    assert "reason" not in trial.raw
    lines = lines_of(trial.path)
    assert trial.raw["aggregations"] == lines[-1]["aggregation"]
    assert last_clients(trial.path)["name"] == ["device-0", "device-1"]
    for name in ("model.safetensors", "curves.png", "checkpoint"):
        assert (trial.path / name).exists()


def test_after_sigterm_the_record_says_interrupted(start, deployment):
    trial = start()
    trial.wait_for_aggregation(1)
    (process,) = trial.server_apps()
    os.kill(process, signal.SIGTERM)
    trial.wait_for(lambda: not trial.server_apps())
    assert trial.raw["status"] == "interrupted"
    trial.wait_for(lambda: deployment.status() == "finished:failed")


def test_a_killed_serverapp_has_failed_once_anybody_looks(start, deployment):
    trial = start()
    trial.wait_for_aggregation(1)
    (process,) = trial.server_apps()
    assert read_summary(trial.path)["status"] == "running"
    os.kill(process, signal.SIGKILL)
    trial.wait_for(lambda: not trial.server_apps())
    assert trial.raw["status"] == "running"
    trial.wait_for(
        lambda: read_summary(trial.path)["status"] == "failed"
    )  # a dying process keeps its lock a moment
    assert (trial.raw["status"], trial.raw["reason"]) == ("failed", GONE)
    trial.wait_for(lambda: deployment.status() == "finished:failed")


def test_a_run_is_told_of_in_json_and_to_prometheus(start, free_port):
    trial = start(num_server_rounds=3, log_format="json", metrics_port=free_port)
    trial.wait_for_aggregation(1)
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    assert re.search(
        r'fedapp_client_updates_total\{client="1",device="device-1",outcome="accepted"\} [12]', text
    )
    assert "fedapp_clients_connected 2.0" in text
    trial.wait_for(lambda: trial.process.poll() is not None)
    lines = [json.loads(line) for line in trial.output.splitlines() if line.startswith("{")]
    joined = [line["device"] for line in lines if line["message"].endswith("takes part")]
    assert joined == ["device-0", "device-1"]
    assert lines[-1]["message"] == f"finished: {trial.path}"
