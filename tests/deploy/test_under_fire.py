"""What was done to real deployments, and what became of the run, its model and its accounts.

Each device adds a constant at a place of its own of the model's first array (faulty.py), so that the final model
tells how often, and with which weight, each update moved it. The rows of docs/operations.md's table.
"""

import os
import random
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.optimize import brentq
from scipy.stats import norm

from fedapp.deploy import keys
from fedapp.deploy.plan import LOOPBACK, SUPEREXEC
from fedapp.report.client_tables import by_evaluation, last_clients, read_tasks
from tests.deploy.command import deploy
from tests.deploy.faulty import ADDED
from tests.end_to_end.processes import server_apps
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SERVER_APP = "server-app"
DEVICES = ("device-0", "device-1", "device-2")
SMALL = {"model": "logistic", "partitioner": "iid", "num-server-rounds": 1000, "round-timeout": 240.0}


@pytest.fixture
def three(make_trial, tmp_path):
    """A trial of three devices, each of which adds at a place of its own, that keeps their first models."""
    return make_trial(*({"fault": f"adds:{place}:{tmp_path}"} for place in range(3)))


def moved(trial: Any, folder: Path) -> np.ndarray:
    """Return how often ``ADDED`` is in the final model at each device's place, (3,)."""
    first = np.load(folder / "first-0.npy")
    final = next(
        values for values in load_file(trial.path / "model.safetensors").values() if values.ndim == 2
    )
    return (final.flat[:3] - first.flat[:3]) / ADDED


def complete(trial: Any) -> list[dict[str, Any]]:
    """Return the lines after the first: each aggregation is on record once, in order, and the run has finished."""
    assert trial.summary["status"] == "finished", trial.output
    assert trial.deployment.status() == "finished:completed"
    lines = trial.metrics
    assert [line["aggregation"] for line in lines] == list(range(len(lines)))
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    return lines[1:]


def check_accounts(trial: Any, folder: Path, synchronous: bool) -> None:
    """The model has moved by what the record says, no more and no less; bytes and seconds are those of the tasks."""
    lines, clients = complete(trial), last_clients(trial.path)
    updates = np.array(clients["participation"])
    if synchronous:
        known = by_evaluation(trial.path)
        so_far = [np.zeros(3), *(np.array(known[line["aggregation"]]["participation"]) for line in lines)]
        parts = np.diff(so_far, axis=0)  # (rounds, 3): who took part
        assert parts.min() >= 0
        assert parts.max() == 1
        assert parts.sum(axis=1).tolist() == [line["participants"] for line in lines]
        # Those that take part count by their examples.
        weights = parts * [int((folder / f"examples-{place}").read_text()) for place in range(3)]
        due = (weights.T / weights.sum(axis=1)).sum(axis=1)
        np.testing.assert_allclose(moved(trial, folder), due, rtol=1e-4)
    else:
        assert updates.sum() == lines[-1]["aggregation"]
        share = moved(trial, folder) / moved(trial, folder).sum()
        np.testing.assert_allclose(share, clients["observed-share"], rtol=1e-3)
    sizes = np.array(clients["bytes"]) / updates
    assert sizes.tolist() == [sizes[0]] * 3  # each reply is as large
    assert lines[-1]["bytes-up"] == sizes[0] * updates.sum() == trial.summary["bytes-up"]
    tasks = read_tasks(trial.path).to_pylist()
    for client, number in enumerate(updates):
        assert sum(t["client"] == client and t["outcome"] == "accepted" for t in tasks) == number
    assert all(0 <= t["began"] <= t["ended"] <= lines[-1]["time"] + 1 for t in tasks)
    ended = sum(t["ended"] - t["began"] for t in tasks if t["outcome"] != "under way")
    assert lines[-1]["device-seconds"] == pytest.approx(ended)


def kill(trial: Any, victim: str) -> None:
    """Kill a service or the ServerApp, and wait until all three devices take part again."""
    before = {name: len(trial.node_ids(name)) for name in DEVICES}
    done = trial.metrics[-1]["aggregation"]
    if victim == SERVER_APP:
        (process,) = server_apps(trial.deployment.folder)
        os.kill(process, signal.SIGKILL)
        trial.wait_for(lambda: trial.deployment.status() == "finished:failed")
        trial.resume()
    else:
        trial.deployment.kill(victim)
        trial.supervise(victim)
    if victim in DEVICES:
        trial.wait_for(lambda: len(trial.node_ids(victim)) > before[victim])
    trial.wait_for(lambda: trial.metrics[-1]["aggregation"] > done)


def finish(trial: Any) -> None:
    """Let a run that has more rounds than there is time for finish: stop it, and resume it for one more."""
    assert deploy("stop", trial.deployment.folder).exit_code == 0
    trial.wait_for(lambda: trial.summary["status"] == "stopped")
    trial.resume(**{"stop-at": "loss>=0"})
    trial.end(600)


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_every_process_is_killed_twice_at_random_times(strategy, three, tmp_path):
    trial, rng = three, random.Random(0)
    # With identical weights and a given step each contribution moves the model alike: shares of weight are shares of
    # movement. Without it the step follows the number of clients, which changes when one is killed.
    weights = {} if strategy == "fedavg" else {"aggregation-weights": "identical", "server-lr": 0.1}
    trial.begin({**SMALL, "strategy": strategy, **weights})
    trial.wait_for_aggregation(2)
    for victim in (*DEVICES, "superlink", SERVER_APP) * 2:
        time.sleep(rng.uniform(0, 20))
        kill(trial, victim)
    finish(trial)
    check_accounts(trial, tmp_path, synchronous=strategy == "fedavg")
    ids = [set(trial.node_ids(name)) for name in DEVICES]
    assert [len(each) for each in ids] == [1, 1, 1]  # the same clients


def test_a_device_stopped_for_two_minutes_is_left_out_and_takes_part_again(three, tmp_path):
    trial = three
    trial.begin(SMALL)
    trial.wait_for_aggregation(1)
    trial.wait_for_task("device-1")
    groups = [trial.deployment.processes[name].pid for name in ("device-1", f"device-1-{SUPEREXEC}")]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    time.sleep(120)
    assert trial.metrics[-1]["participants"] == 2  # the rounds go on
    for group in groups:
        os.killpg(group, signal.SIGCONT)
    trial.supervise("device-1")
    trial.wait_for(lambda: trial.metrics[-1]["participants"] == 3)
    finish(trial)
    check_accounts(trial, tmp_path, synchronous=True)
    assert "left out client 1 (device-1, node " in trial.output
    assert len(set(trial.node_ids("device-1"))) == 1


def test_a_device_whose_clock_is_an_hour_off_says_so_and_takes_part_once_it_is_right(
    three, tmp_path, monkeypatch
):
    trial, clock = three, tmp_path / "clock"
    clock.write_text("-200")  # Flower accepts up to 5 min behind
    folder = Path(__file__).parent / "clock"
    for name, value in {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "WRONG_CLOCK": "device-1",
        "CLOCK": str(clock),
    }.items():
        monkeypatch.setenv(name, value)
    trial.begin(SMALL)
    trial.wait_for_aggregation(1)
    trial.wait_for(lambda: trial.metrics[-1]["participants"] == 3)
    for offset, said in (("+3600", "3600 s ahead of"), ("-3600", "3600 s behind")):
        before = len(trial.device_log("device-1"))
        clock.write_text(offset)
        trial.supervise("device-1")
        trial.wait_for(lambda: said in trial.device_log("device-1")[before:])  # noqa: B023
        trial.wait_for(lambda: trial.metrics[-1]["participants"] == 2)
        clock.write_text("+0")
        trial.wait_for(lambda: trial.metrics[-1]["participants"] == 3)
    finish(trial)
    check_accounts(trial, tmp_path, synchronous=True)


def test_an_expired_certificate_ends_the_run_and_with_a_renewed_one_it_goes_on(three, tmp_path):
    trial = three
    trial.begin(SMALL)
    trial.wait_for_aggregation(1)
    folder = trial.deployment.folder
    pair = keys.Authority.read(folder).server_certificate([LOOPBACK], timedelta(hours=-1))
    keys.replace_pair(folder / "superlink" / "server.crt", *pair)
    trial.deployment.kill("superlink")
    for name in (*DEVICES, SUPEREXEC):
        trial.supervise(name)
    trial.deployment.start_superlink()
    trial.wait_for(lambda: all("certificate has expired" in trial.device_log(name) for name in DEVICES))
    # Its own message may be refused, which is one line, or it ends with the SuperExec, whose requests are refused.
    trial.wait_for(lambda: not server_apps(folder))
    assert "Traceback" not in (trial.path / "log.txt").read_text()
    if trial.summary["status"] == "failed":
        assert "isn't trusted any more (certificate has expired)" in trial.summary["reason"]
    result = deploy("status", folder)
    assert result.exit_code == 1
    assert "expired" in result.output
    done = len(trial.metrics)
    assert deploy("renew", folder).exit_code == 0
    trial.deployment.kill("superlink")
    trial.deployment.start_superlink()
    trial.deployment.wait_for_superlink()
    trial.wait_for(lambda: trial.deployment.status() == "finished:failed")
    trial.resume()
    trial.wait_for_aggregation(done + 1)
    finish(trial)
    check_accounts(trial, tmp_path, synchronous=True)


def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(three, tmp_path):
    trial = three
    trial.begin(SMALL)
    trial.wait_for_aggregation(1)
    folder = trial.deployment.folder
    for config, said in (
        ({"run-name": "run", "results-dir": str(trial.path.parent)}, "that run is still going on"),
        ({"resume": str(trial.path)}, "that run is still going on"),
    ):
        log_path = folder / "second.log"
        with log_path.open("wb") as log:
            second = trial.deployment.start_run(
                trial.app, {**SMALL, "clock": "wall", **config}, stdout=log, stderr=log
            )
        trial.wait_for(lambda: second.poll() is not None)  # noqa: B023
        lines = [line for line in log_path.read_text().splitlines() if "ERROR" in line]
        assert len(lines) == 1
        assert said in lines[0]
        assert trial.deployment.status() == "finished:failed"
    trial.wait_for_aggregation(len(trial.metrics) + 1)
    finish(trial)
    check_accounts(trial, tmp_path, synchronous=True)


REQUESTS = ("fleet/push-object", "fleet/pull-object", "runtime/push-messages", "runtime/pull-messages")


def test_requests_are_in_flight_when_the_superlink_is_killed(three, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_LOG_LEVEL", "DEBUG")  # the SuperLink logs each request
    trial = three
    trial.begin({**SMALL, "round-timeout": 90.0})  # an upload that was cut off may be lost
    trial.wait_for_aggregation(1)
    log = trial.deployment.log("superlink")
    for request in REQUESTS:
        before = log.read_text().count(request)
        wait_until(lambda: log.read_text().count(request) > before)  # noqa: B023
        trial.deployment.kill("superlink")
        done = len(trial.metrics)
        time.sleep(10)
        trial.deployment.start_superlink()
        trial.wait_for_aggregation(done)
    trial.wait_for(lambda: trial.metrics[-1]["participants"] == 3)
    finish(trial)
    check_accounts(trial, tmp_path, synchronous=True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_ends_the_run_with_one_line_and_with_room_it_goes_on(small_disk, three, tmp_path):
    trial = three
    trial.path = small_disk / "run"
    trial.begin({**SMALL, "results-dir": str(small_disk)})
    trial.wait_for_aggregation(2)
    fill(small_disk / "filler")
    before = trial.metrics
    output = trial.end()
    assert trial.deployment.status() == "finished:failed"
    said = r"can't be written to any more \(.*No space left on device\); what it has stays"
    assert len(re.findall(re.escape(f"{trial.path} ") + said, output)) == 1, output
    assert trial.metrics[: len(before)] == before
    (small_disk / "filler").unlink()
    there = len(trial.metrics)
    trial.resume()
    trial.wait_for_aggregation(there)
    assert trial.metrics[: len(before)] == before
    finish(trial)
    check_accounts(trial, tmp_path, synchronous=True)


def fill(file: Path) -> None:
    """Write to a file until its disk is full."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError:
        os.close(descriptor)


def test_a_private_run_counts_what_it_sent_before_it_was_killed(make_trial):
    trial, noise, delta = make_trial({}, {}, {}), 2.0, 1e-5
    private = {"dp": "central", "client-weights": "uniform", "dp-clipping-norm": 0.5, "dp-delta": delta}
    trial.begin({**SMALL, **private, "dp-noise-multiplier": noise})
    trial.wait_for_aggregation(1)
    for victim in (SERVER_APP, "superlink", SERVER_APP):
        kill(trial, victim)
    finish(trial)
    lines = complete(trial)
    releases = len((trial.path / "releases.txt").read_text().splitlines())
    assert releases > len(lines)  # some rounds were sent twice
    # n Gaussian mechanisms are one with z / √n (Dong, Roth & Su 2022), whose ε is Balle & Wang's (2018).
    mu = releases**0.5 / noise

    def beyond(epsilon: float) -> float:
        return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    assert trial.summary["dp-epsilon"] == pytest.approx(brentq(beyond, 0, 100), rel=1e-3)
