"""Devices with workers: real SuperLink, SuperNodes and workers, and the bits of a simulation."""

import json

import pytest

from fedapp.client_app import app
from fedapp.config import RunConfig
from fedapp.deploy.local import LocalDeployment
from fedapp.engine.sequential import SequentialGrid
from fedapp.server import prepare, run
from tests.waiting import wait_until

# Noise is drawn from the seed on nodes that hold a part of common data; the spectral method sends two models.
CONFIG = {"strategy": "spectral", "num-server-rounds": 4, "seed": 7, "run-name": "run"}
NODES = [{"partition-id": i, "num-partitions": 2} for i in range(2)]
SECONDS = 300.0
FALLS_BACK = "No worker for this message, its own process works"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_devices_with_workers_train_the_model_of_a_simulation_though_one_is_killed(
    tmp_path_factory, repository
):
    folder = tmp_path_factory.mktemp("w")
    own = RunConfig.load({**CONFIG, "results-dir": str(folder / "simulated")})
    expected = run(SequentialGrid(app, 2), prepare(own, 2)).path / "model.safetensors"
    metrics, log = folder / "results" / "run" / "metrics.jsonl", folder / "run.log"
    with LocalDeployment(folder / "d", NODES, workers=True) as deployment:
        deployment.start()
        config = {**CONFIG, "clock": "wall", "min-clients": 2, "results-dir": str(folder / "results")}
        with log.open("wb") as output:
            process = deployment.start_run(repository, config, stdout=output, stderr=output)
        wait_until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1, log.read_text, SECONDS
        )
        deployment.processes["device-0-worker"].kill()
        assert process.wait(SECONDS) == 0
        devices = [deployment.log(f"device-{i}").read_text() for i in range(2)]
        workers = [deployment.log(f"device-{i}-worker").read_text() for i in range(2)]
    assert json.loads(metrics.read_text().splitlines()[-1])["aggregation"] == 4, log.read_text()
    assert metrics.with_name("model.safetensors").read_bytes() == expected.read_bytes()
    assert workers[1].count("Answered query.describe") == workers[1].count("Answered query.direction") == 1
    assert workers[1].count("Answered train") == 4
    assert FALLS_BACK not in devices[1]
    assert workers[0].count("Answered train") + devices[0].count(FALLS_BACK) >= 4
    assert FALLS_BACK in devices[0]
