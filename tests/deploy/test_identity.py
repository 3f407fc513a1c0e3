"""Identity on real SuperNodes: who says the partition of another isn't believed, and tags are the operator's."""

import pytest

from fedapp.deploy.nodes import NodeRecords, registered_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("on_record", [True, False])
def test_a_device_that_says_anothers_partition_takes_no_part(on_record, make_trial):
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


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_a_run_on_a_tag_has_the_devices_that_have_it(strategy, make_trial):
    trial = make_trial({}, {}, {})
    trial.deployment.start()
    out = trial.deployment.folder
    records = NodeRecords.read(out)
    for name in ("device-0", "device-2"):
        records.tag(name, ["hospital"])
    trial.deployment.start = lambda: None  # it runs
    told = registered_nodes(out, trial.deployment.deployment)
    given = {"strategy": strategy, "num-server-rounds": 2, "min-clients": 2}
    trial.begin({**given, "registered-nodes": told, "participation": "tag:hospital"})
    output = trial.end()
    assert trial.summary["status"] == "finished", output
    assert "(device-1, node" not in output
    assert "(device-0, node" in output
    assert "flwr-clientapp" not in trial.device_log("device-1")  # no message was sent to it
