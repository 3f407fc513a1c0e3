"""What each client did when: parts of tasks and absences by hand; and after a resume."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp import federation, server
from fedapp.config import RunConfig
from fedapp.engine.run import make_grid
from fedapp.report import client_tables
from fedapp.report.activity import AWAY, RECEIVING, SENDING, STATES, WAITING, WORKING, read_activity
from fedapp.report.client_tables import TasksFile, last_away, read_away, read_tasks, write_away
from strategies.clients.client_statistics import LOST, TaskSpan, TaskTiming, Timeline

CLIENTS, STEPS = 5, 3
SPEEDS, DOWN, UP, LATENCY = [900.0, 2100.0, 400.0, 1300.0, 700.0], 3e5, 1e5, 0.05
PERIOD = 9.7
STRETCHES = [[(0.0, 5.1)], [(1.3, 9.1)], [(0.0, PERIOD)], [(0.0, 2.9), (4.1, 8.3)], [(3.7, 9.3)]]
GONE = [
    [(5.1, PERIOD)],
    [(0.0, 1.3), (9.1, PERIOD)],
    [],
    [(2.9, 4.1), (8.3, PERIOD)],
    [(0.0, 3.7), (9.3, PERIOD)],
]
DEADLINE = {"round-deadline": 1.2}
ASYNC = {"strategy": "async-fedavg", "aggregation-weights": "observed"}


@pytest.fixture
def go(tmp_path):
    """Run a fleet, or go on with a run; return its folder."""
    with (tmp_path / "devices.csv").open("w", newline="") as file:
        csv.writer(file).writerows([i, speed, DOWN, UP, LATENCY] for i, speed in enumerate(SPEEDS))
    with (tmp_path / "there.csv").open("w", newline="") as file:
        csv.writer(file).writerows([i, a, b, PERIOD] for i, own in enumerate(STRETCHES) for a, b in own)
    fixed = {
        "model": "logistic",
        "batch-size": 0,
        "local-epochs": 0,
        "local-steps": STEPS,
        "checkpoint-every": 1,
        "results-dir": str(tmp_path),
        "time-scenario": f"profile:{tmp_path / 'devices.csv'}",
    }

    def run(name: str, rounds: int, *, there: bool = True, resume: Path | None = None, **values: Any) -> Path:
        federation.forget()
        presence = {} if there else {"availability": f"trace:{tmp_path / 'there.csv'}"}
        given = {**fixed, **presence, **values, "run-name": name, "num-server-rounds": rounds}
        if resume is not None:
            given = {"resume": str(resume), "num-server-rounds": rounds}
        return server.run(
            make_grid("vectorized", CLIENTS, 1), server.prepare(RunConfig.load(given), CLIENTS)
        ).path

    return run


def parts_by_hand(run: Path) -> list[tuple[float, float, float]]:
    """Return what each client's task is made of, by the bytes of a round in which all took part."""
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    down, up = first["bytes-down"] / CLIENTS, first["bytes-up"] / CLIENTS
    sizes = np.diff(np.load(run / "partition.npz")["client_offsets"])
    return [
        (8 * down / DOWN + LATENCY / 2, STEPS * size / speed, 8 * up / UP + LATENCY / 2)
        for size, speed in zip(sizes.tolist(), SPEEDS, strict=True)
    ]


def columns(run: Path, *names: str) -> list[tuple[Any, ...]]:
    return list(zip(*(read_tasks(run)[name].to_pylist() for name in names), strict=True))


def test_the_parts_of_a_task_add_up_to_its_time(go):
    run = go("run", 3)
    by_hand = parts_by_hand(run)
    rows = columns(run, "client", "began", "ended", "receiving", "sending")
    assert len(rows) == 3 * CLIENTS
    for client, began, ended, receiving, sending in rows:
        assert (receiving, sending) == (
            by_hand[client][0],
            by_hand[client][2],
        )  # to the last bit, at any time
        assert ended - began == pytest.approx(sum(by_hand[client]), rel=1e-12)
    found = read_activity(run)
    assert found is not None
    assert found.has_timing
    assert found.absences
    total = [sum((ended - began).sum() for _, began, ended in [found.spans(state)]) for state in STATES[:-1]]
    receiving, working, sending = (3 * sum(each) for each in zip(*by_hand, strict=True))
    assert total == pytest.approx([receiving, working, sending, 0])
    # All wait for the slowest: what is left of three rounds.
    share = found.shares(np.zeros(CLIENTS, np.int64), np.array([0.0, found.end]))
    longest = max(map(sum, by_hand))
    assert found.end == pytest.approx(3 * longest)
    assert share[WAITING][0, 0] == pytest.approx(1 - sum(map(sum, by_hand)) / CLIENTS / longest)


@pytest.mark.parametrize("keys", [{}, ASYNC])
def test_a_task_that_is_lost_has_the_parts_up_to_then_and_absences_are_the_availabilitys(go, keys):
    by_hand = parts_by_hand(go("all", 1))
    run = go("run", 70 if keys else 18, there=False, **keys)
    rows = columns(run, "client", "began", "ended", "receiving", "sending", "outcome")
    assert len({row[0] for row in rows if row[-1] == LOST}) > 1
    for client, began, ended, receiving, sending, outcome in rows:
        down, work, up = by_hand[client]
        took = ended - began
        assert receiving == pytest.approx(min(down, took), abs=1e-9)
        assert sending == pytest.approx(min(up, max(0.0, took - down - work)), abs=1e-9)
        assert outcome != "accepted" or took == pytest.approx(down + work + up)
    found = read_away(run)
    assert found is not None
    end = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    assert end > 2 * PERIOD
    assert (found.since, found.until) == (0, pytest.approx(end))
    for client, gone in enumerate(GONE):
        every = [(n * PERIOD + a, n * PERIOD + b) for n in range(9) for a, b in gone]
        expected: list[tuple[float, float]] = []
        for begins, ends in every:
            if expected and abs(expected[-1][1] - begins) < 1e-9:  # over the end of a period
                begins = expected.pop()[0]
            expected.append((begins, ends))
        expected = [(begins, min(ends, end)) for begins, ends in expected if begins < end]
        own = found.client == client
        assert found.began[own] == pytest.approx([begins for begins, _ in expected])
        assert found.ended[own] == pytest.approx([ends for _, ends in expected])
    # Who is away has no task: all states of a client together are the whole time, and no time is counted twice.
    read = read_activity(run)
    assert read is not None
    shares = read.shares(np.arange(CLIENTS), np.linspace(0, end, 200))
    assert sum(shares.values()) == pytest.approx(np.ones((CLIENTS, 199)))
    gone_for = (found.ended - found.began).sum() / end / CLIENTS
    assert shares[AWAY].mean() == pytest.approx(gone_for)


@pytest.mark.parametrize(("keys", "rounds"), [({}, (3, 6)), (DEADLINE, (5, 9)), (ASYNC, (8, 16))])
def test_a_resumed_run_has_the_files_of_one_that_went_through(go, keys, rounds):
    names = ("number", "client", "began", "ended", "outcome", "receiving", "sending")
    whole = go("whole", rounds[1], there=False, **keys)
    part = go("part", rounds[0], there=False, **keys)
    if keys is DEADLINE:
        (state,) = part.glob("checkpoint/[0-9]*/state.json")
        assert json.loads(state.read_text())["strategy"]["late-tasks"]
    assert columns(part, *names) != columns(whole, *names)
    go("part", rounds[1], resume=part)
    assert columns(part, *names) == columns(whole, *names)
    assert (part / client_tables.AWAY).read_bytes() == (whole / client_tables.AWAY).read_bytes()


def test_where_nobody_comes_and_goes_no_file_says_so_and_whole_task_times_have_no_parts(go):
    run = go("run", 2, **{"time-scenario": "F80"})
    assert read_away(run) is None
    assert set(columns(run, "receiving", "sending")) == {(None, None)}
    found = read_activity(run)
    assert found is not None
    assert (found.has_timing, found.absences) == (False, True)
    assert found.spans(WORKING)[2] == pytest.approx(found.ended)


def test_parts_that_a_task_is_cut_off_in():
    parts = TaskTiming(1.0, 2.0, 4.0)
    for ends, expected in (
        (0.5, (0.5, 0)),
        (2.5, (1, 0)),
        (5.0, (1, 2)),
        (7.0, (1, 4)),
        (7.0 - 1e-9, (1, 4)),
    ):
        timeline_ = Timeline()
        timeline_.begin(0, 10.0, 10.0 + ends, parts)
        assert timeline_.timing(0) == parts
        (under_way,) = timeline_.under_way(10.5)
        assert (under_way.receiving, under_way.sending) == (0.5, 0)
        timeline_.end(0, 30.0, LOST)
        assert timeline_.timing(0) is None
        (span,) = timeline_.take()
        assert (span.receiving, span.sending) == pytest.approx(expected)


def test_of_too_many_absences_those_of_the_last_time_are_kept(tmp_path, monkeypatch):
    def gone(since: float, until: float) -> Any:
        """Three clients that go for half a second in each, and one that has left at 3 s."""
        for client in range(3):
            yield client, ((n, n + 0.5) for n in range(int(until)) if n + 0.5 > since)
        yield 3, iter([(max(3.0, since), until)])

    whole = last_away(gone, 1000.0)
    assert (len(whole.client), whole.since) == (3001, 0)
    monkeypatch.setattr(client_tables, "MOST_ABSENCES", 100)
    found = last_away(gone, 1000.0)
    assert 30 < len(found.client) <= 100
    assert found.since > 900
    for client in range(3):
        times = found.began[found.client == client]
        assert times.tolist() == [n for n in range(1000) if n + 0.5 > found.since]
    assert found.began[found.client == 3].tolist() == [found.since]
    write_away(tmp_path, found)
    read = read_away(tmp_path)
    assert read is not None
    assert all(np.array_equal(a, b) for a, b in zip(read, found, strict=True))
    file = TasksFile(tmp_path)
    file.add([TaskSpan(0, 5.0, 6.0, 0, 1, "accepted"), TaskSpan(0, 999.5, 1000.0, 0, 1, "accepted")])
    file.publish(last=True)
    shown = read_activity(tmp_path)
    assert shown is not None
    assert (shown.start, shown.end) == (found.since, 1000)  # before, nobody knows who waited


def test_shares_of_time_by_hand(tmp_path):
    write_away(
        tmp_path,
        client_tables.Away(
            np.array([0, 1], np.int32), np.array([2.0, 0.0]), np.array([6.0, 10.0]), 0.0, 10.0
        ),
    )
    file = TasksFile(tmp_path)
    # Client 0 goes while it works, and ends what it began (``bernoulli``); client 1 never comes.
    file.add(
        [
            TaskSpan(0, 1.0, 4.0, 0.0, 1.0, "accepted", 0.5, 1.0),
            TaskSpan(0, 8.0, 10.0, 1.0, 2.0, "accepted", 2.0, 0),
        ]
    )
    file.publish(last=True)
    found = read_activity(tmp_path)
    assert found is not None
    shares = found.shares(np.array([0, 1]), np.array([0.0, 5.0, 10.0]))
    assert {state: share.tolist() for state, share in shares.items()} == {
        RECEIVING: [[0.1, 0.4], [0, 0]],
        WORKING: [[0.3, 0], [0, 0]],
        SENDING: [[0.2, 0], [0, 0]],
        AWAY: [[0.2, 0.2], [1, 1]],
        WAITING: [[pytest.approx(0.2), pytest.approx(0.4)], [0, 0]],
    }
    half = found.within(0.0, 5.0)
    assert (half.start, half.end, len(half.place)) == (0, 5, 1)
    assert half.shares(np.array([0, 1]), np.array([0.0, 5.0]))[AWAY].tolist() == [[0.2], [1]]
    by_machine = read_activity(tmp_path, wall=True)
    assert by_machine is not None
    assert (by_machine.has_timing, by_machine.absences, len(by_machine.away[0])) == (False, False, 0)
    assert by_machine.clients.tolist() == [0, 1]


@pytest.mark.parametrize(("most", "bins"), [(30, 20), (100, 80)])
def test_the_share_at_work_of_equal_rounds_does_not_swing(tmp_path: Path, most: int, bins: int) -> None:
    """40 rounds of 1 s: two clients work 1 s and 0.5 s of each; a bin holds two rounds, or half of one."""
    file = TasksFile(tmp_path)
    file.add(
        [
            TaskSpan(client, float(at), at + 1 / (client + 1), at, at + 1.0, "accepted", None, None)
            for at in range(40)
            for client in range(2)
        ]
    )
    file.publish(last=True)
    found = read_activity(tmp_path)
    assert found is not None
    edges = found.bins(most)
    working = found.shares(np.zeros(2, np.int64), edges)[WORKING][0]
    assert len(working) == bins
    halves = working if bins == 20 else working.reshape(40, 2).mean(1)
    assert halves == pytest.approx(0.75)
