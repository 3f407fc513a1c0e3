"""What was done to real deployments, and what became of the run, its model and its accounts.

Each device adds a constant at a place of its own of the model's first array (faulty.py), so that the final model
tells how often, and with which weight, each update moved it. The rows of docs/operations.md's table.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedapp.report.client_tables import by_evaluation, last_clients, read_tasks
from tests.deploy.command import deploy
from tests.deploy.faulty import ADDED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

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


def check_accounts(trial: Any, folder: Path) -> None:
    """The model has moved by what the record says, no more and no less; bytes and seconds are those of the tasks."""
    lines, clients = complete(trial), last_clients(trial.path)
    updates = np.array(clients["participation"])
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
    sizes = np.array(clients["bytes"]) / updates
    assert sizes.tolist() == [sizes[0]] * 3  # each reply is as large
    assert lines[-1]["bytes-up"] == sizes[0] * updates.sum() == trial.summary["bytes-up"]
    tasks = read_tasks(trial.path).to_pylist()
    for client, number in enumerate(updates):
        assert sum(t["client"] == client and t["outcome"] == "accepted" for t in tasks) == number
    assert all(0 <= t["began"] <= t["ended"] <= lines[-1]["time"] + 1 for t in tasks)
    ended = sum(t["ended"] - t["began"] for t in tasks if t["outcome"] != "under way")
    assert lines[-1]["device-seconds"] == pytest.approx(ended)


def finish(trial: Any) -> None:
    """Let a run that has more rounds than there is time for finish: stop it, and resume it for one more."""
    assert deploy("stop", trial.deployment.folder).exit_code == 0
    trial.wait_for(lambda: trial.summary["status"] == "stopped")
    trial.resume(**{"stop-at": "loss>=0"})
    trial.end(600)


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
    check_accounts(trial, tmp_path)


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
    check_accounts(trial, tmp_path)


def fill(file: Path) -> None:
    """Write to a file until its disk is full."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(4096))
    except OSError:
        os.close(descriptor)
