"""Rounds that close early on real SuperNodes, of which one is slow: no round waits for it."""

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fedapp.report.client_tables import read_tasks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


# Longer than a device's first task takes, with all that it imports, on a machine that others use too.
ENOUGH = 120.0


def outcomes(path: Path, client: int) -> list[str]:
    """Return what became of a client's tasks, in order."""
    rows = read_tasks(path).to_pylist()
    return [row["outcome"] for row in rows if row["client"] == client]


def complete(trial: Any, rounds: int) -> None:
    assert trial.summary["status"] == "finished", trial.output
    assert [line["aggregation"] for line in trial.metrics] == list(range(rounds + 1))


def test_a_device_that_hangs_is_late_once_and_not_asked_again(make_trial):
    trial = make_trial({}, {"fault": "hangs"})
    trial.begin({"num-server-rounds": 3, "round-deadline": ENOUGH, "round-timeout": 3600.0})
    trial.end(600)
    complete(trial, 3)
    lines = trial.metrics[1:]
    assert [line["participants"] for line in lines] == [1, 1, 1]
    assert [line["late-updates"] for line in lines] == [1, 0, 0]
    assert outcomes(trial.path, 1) == ["late"]
    assert outcomes(trial.path, 0) == ["accepted"] * 3
    summary = trial.summary
    assert (summary["tasks-late"], summary["tasks-dropped"], summary["failures"]) == (1, 1, 0)
    assert summary["bytes-wasted"] > 0


@pytest.mark.timeout(1800)
def test_a_device_that_never_answers_costs_later_rounds_less_than_three_times_the_usual(make_trial):
    trial, rounds = make_trial({}, {}, {}, {}, {"fault": "hangs"}), 5
    trial.begin({"num-server-rounds": rounds, "round-timeout": 3600.0})
    trial.end(1500)
    complete(trial, rounds)
    lines = trial.metrics
    assert [line["participants"] for line in lines[1:]] == [4] * rounds
    assert lines[1].get("late-updates") == 1, f"{lines}\n{trial.output}"
    assert outcomes(trial.path, 4) == ["late"]
    assert trial.summary["failures"] == 0
    assert "left out client 4 (device-4, node " in trial.output
    assert "a round waits 10 times as long as half of the clients took" in trial.output
    rows = [row for row in read_tasks(trial.path).to_pylist() if row["outcome"] == "accepted"]
    usual = median(row["ended"] - row["began"] for row in rows)
    assert median(b["time"] - a["time"] for a, b in pairwise(lines[1:])) <= 3 * usual
