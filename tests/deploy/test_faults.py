"""Faults on real processes: what becomes of a run, and what its log says. The rows of docs/operations.md's table."""

import time
from typing import Any

import pytest

from fedapp.deploy import keys
from fedapp.deploy.files import CONNECTION
from fedapp.deploy.flower import flwr
from fedapp.report.client_tables import by_evaluation, last_clients

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIES = {
    "nan": "its arrays hold values that aren't finite (NaN or infinity)",
    "wrong-shape": "is float32[1",
    "1e30": "whose square overflows float32",
    "always-fails": "this device is broken",
    "large": "and isn't read further",
}


def complete(trial: Any, rounds: int) -> None:
    """Every aggregation is on record, once and in order, and the run says that it finished."""
    assert trial.summary["status"] == "finished"
    assert [line["aggregation"] for line in trial.metrics] == list(range(rounds + 1))
    assert trial.deployment.status() == "finished:completed"


def wait_for_return(trial: Any, name: str) -> None:
    """Wait until a device that was away has connected again, and counts in the last of a run's aggregations."""
    trial.wait_for(lambda: len(trial.node_ids(name)) == 2)
    trial.wait_for(lambda: trial.metrics[-1]["participants"] == 2)
    assert trial.summary["status"] == "running"
    assert [line["aggregation"] for line in trial.metrics] == list(range(len(trial.metrics)))


def test_devices_that_fail_or_lie_are_left_out_and_named(make_trial):
    trial = make_trial({}, *({"fault": fault} for fault in LIES))
    trial.begin({"num-server-rounds": 2})
    output = trial.end()
    complete(trial, 2)
    for client, text in enumerate(LIES.values(), 1):
        for number in (1, 2):
            assert [
                line
                for line in output.splitlines()
                if f"round {number}: left out client {client} (device-{client}, node " in line
                and text in line
            ], output
    assert [line["participants"] for line in trial.metrics[1:]] == [1, 1]
    assert trial.summary["failures"] == 2 * len(LIES)
    assert trial.metrics[2]["train-loss"] < trial.metrics[1]["train-loss"]


def test_an_answer_to_an_old_task_is_not_counted(make_trial):
    trial = make_trial({}, {"fault": "old-task"})
    trial.begin({"num-server-rounds": 2, "round-timeout": 60.0})
    output = trial.end()
    complete(trial, 2)
    # The first answer is to the first task, as it should be; the second isn't to the second.
    assert [line["participants"] for line in trial.metrics[1:]] == [2, 1]
    assert "round 2: left out client 1 (device-1, node " in output


def test_a_device_that_hangs_is_given_up_at_the_deadline(make_trial):
    trial = make_trial({}, {"fault": "hangs"})
    trial.begin({"num-server-rounds": 2, "round-timeout": 60.0})
    output = trial.end()
    complete(trial, 2)
    assert [line["participants"] for line in trial.metrics[1:]] == [1, 1]
    assert "left out client 1 (device-1, node " in output
    assert "no reply before the deadline" in output


def test_async_training_does_not_wait_for_a_device_fifty_times_slower(make_trial):
    trial = make_trial({}, {"fault": "slow"})
    trial.begin({"strategy": "async-fedavg", "server-lr": 0.3, "num-server-rounds": 6, "local-epochs": 20})
    trial.end()
    complete(trial, 6)
    fast, slow = last_clients(trial.path)["participation"]
    assert fast + slow == 6
    assert fast > slow


@pytest.mark.parametrize("pause", [0, 70])
def test_a_supernode_killed_in_a_task_is_left_out_and_takes_part_again(pause, make_trial):
    trial = make_trial({}, {})
    trial.begin({"num-server-rounds": 1000})  # more than there is time for
    trial.wait_for_aggregation(1)
    trial.wait_for_task("device-1")
    before = len(trial.device_log("device-1"))
    trial.deployment.kill("device-1")
    time.sleep(pause)
    trial.supervise("device-1")
    wait_for_return(trial, "device-1")
    assert "left out client 1 (device-1, node " in trial.output
    assert sum(line.get("lost-tasks", 0) for line in trial.metrics) >= 1
    # The SuperLink refuses a key that it takes for online; the unit's pauses outlast that.
    assert ("Exit Code: 305" in trial.device_log("device-1")[before:]) == (pause == 0)
    former, node_id = trial.node_ids("device-1")
    assert node_id == former


def test_a_new_key_is_refused_until_it_is_registered(make_trial):
    trial = make_trial({}, {})
    trial.begin({"num-server-rounds": 1000})  # more than there is time for
    trial.wait_for_aggregation(1)
    trial.deployment.kill("device-1")
    folder = trial.deployment.folder
    keys.write_device(folder / "device-1")
    before = len(trial.device_log("device-1"))
    trial.supervise("device-1")
    trial.wait_for(lambda: "Exit Code: 305" in trial.device_log("device-1")[before:])
    flwr(folder, "supernode", "register", str(folder / "device-1" / "device.pub"), CONNECTION)
    wait_for_return(trial, "device-1")
    former, node_id = trial.node_ids("device-1")
    assert node_id != former


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_with_all_devices_away_the_run_waits_for_one(strategy, make_trial):
    trial = make_trial({}, {})
    trial.begin({"strategy": strategy, "num-server-rounds": 5})
    trial.wait_for_aggregation(1)
    for name in ("device-0", "device-1"):
        trial.deployment.kill(name)
    trial.wait_for(lambda: "no client is connected, the run waits for one" in trial.output)
    before = len(trial.metrics)
    assert before < 5
    trial.supervise("device-0")
    trial.end(600)
    complete(trial, 5)
    last = trial.metrics[-1]
    if strategy == "fedavg":
        assert last["participants"] == 1
    else:
        known = by_evaluation(trial.path)
        counts = [known[line["aggregation"]]["participation"] for line in (trial.metrics[before - 1], last)]
        assert counts[1][1] == counts[0][1]  # all that came since is of the device that is back


def test_a_superlink_killed_and_restarted_loses_nothing(make_trial):
    trial = make_trial({}, {})
    trial.begin({"num-server-rounds": 4})
    trial.wait_for_aggregation(1)
    trial.wait_for_task("device-1")
    trial.deployment.kill("superlink")
    time.sleep(10)
    trial.deployment.start_superlink()
    trial.deployment.wait_for_superlink()
    trial.end(600)
    complete(trial, 4)
    assert "Connection attempt failed, retrying" in trial.device_log("device-1")
