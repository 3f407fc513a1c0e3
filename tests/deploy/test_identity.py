"""Identity on real SuperNodes: a device that says the partition of another isn't believed."""

from collections.abc import Callable
from typing import Any

import pytest

from fedapp.deploy.nodes import NodeRecords

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("on_record", [True, False])
def test_a_device_that_says_anothers_partition_takes_no_part(
    on_record: bool, make_trial: Callable[..., Any]
) -> None:
    trial = make_trial({}, {}, {"partition-id": 0})
    trial.deployment.start()
    nodes = {node.device: node.node_id for node in NodeRecords.read(trial.deployment.folder).nodes}
    record = ", ".join(f"device-{i}:{nodes[f'device-{i}']}:{i}" for i in range(3))
    trial.deployment.start = lambda: None  # it runs
    trial.begin({"num-server-rounds": 2, "registered-nodes": record if on_record else ""})
    output = trial.end()
    assert trial.summary["status"] == "finished", output
    assert [line["participants"] for line in trial.metrics[1:]] == [1 + on_record] * 2
    last = [line for line in output.splitlines() if "never counted in this run" in line]
    refused = ["device-2"] if on_record else ["device-0", "device-2"]
    assert sorted(line.split("node ")[1].split()[0] for line in last) == sorted(
        nodes[name] for name in refused
    )
    reason = (
        "device-2 holds partition 2 by registered_nodes"
        if on_record
        else "also says partition-id = 0, and nothing tells whose it is"
    )
    assert all(reason in line for line in last)
