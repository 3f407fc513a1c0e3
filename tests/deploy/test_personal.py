"""A device's own model on real processes: it outlives its SuperNode, and goes on from where it was."""

import os
import signal

import numpy as np
import pytest

from fedapp.client.kept import RECORD
from fedapp.deploy.local import LocalDeployment
from fedapp.report.client_tables import last_clients
from strategies.flower.internals import context_from_bytes
from tests.end_to_end.softmax import KEYS, Problem
from tests.runs import summary_of
from tests.waiting import wait_until

ROUNDS, STEPS, SECONDS = 7, 3, 800.0

# What a client keeps is the work of its own tasks alone, whatever became of the global model meanwhile.
ALONE = {
    "a model": {"strategy": "ditto", "ditto-lambda": 0.0},
    "all layers": {"strategy": "fedavg", "personal": "*"},
}
CONFIG = {
    **KEYS,
    "test-on": "own",
    "client-evaluation": True,
    "local-steps": STEPS,
    "l2": 0.01,
    "num-server-rounds": ROUNDS,
    "clock": "wall",
    "min-clients": 2,
    "round-timeout": 60.0,
    "run-name": "run",
}
NODES = [{"partition-id": i, "num-partitions": 2} for i in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kept", ALONE)
def test_what_a_client_keeps_goes_on_after_a_supernode_was_started_anew(tmp_path_factory, repository, kept):
    folder = tmp_path_factory.mktemp("p")
    path, log = folder / "results" / "run", folder / "run.log"
    metrics = path / "metrics.jsonl"
    with LocalDeployment(folder / "d", NODES) as deployment:
        deployment.start()
        with log.open("wb") as output:
            config = {**CONFIG, **ALONE[kept], "results-dir": str(folder / "results")}
            process = deployment.start_run(repository, config, stdout=output, stderr=output)
        wait_until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, log.read_text, SECONDS
        )
        before = float(last_clients(path)["participation"][0])
        os.killpg(deployment.processes["device-0"].pid, signal.SIGTERM)
        deployment.processes["device-0"].wait(60)
        deployment.start_supernode("device-0")
        assert process.wait(SECONDS) == 0
        said = deployment.log("device-0").read_text()
    summary = summary_of(path)
    assert (summary["status"], summary["aggregations"]) == ("finished", ROUNDS), log.read_text()
    assert "This client's own model of this run is back from" in said
    problem = Problem(path)
    done = last_clients(path)["participation"]
    assert 2 <= before < done[0], "nothing was trained on one side of the restart"
    for i in range(2):
        (file,) = (folder / "d" / f"device-{i}" / "superexec" / "state").iterdir()
        arrays = context_from_bytes(file.read_bytes()).state[RECORD]
        own = np.c_[arrays["1.weight"].numpy(), arrays["1.bias"].numpy()]  # type: ignore[index, call-overload]
        # A task whose reply was lost on its way has been done, too.
        tried = [
            problem.descend(i, np.zeros((10, 65)), STEPS * int(done[i] + lost), l2=0.01) for lost in (0, 1)
        ]
        assert min(np.linalg.norm(own - w) / np.linalg.norm(w) for w in tried) < 1e-4
    assert {"personal-accuracy", "personal-loss"} <= set(last_clients(path))
