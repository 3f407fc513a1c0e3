"""tasks.parquet: when each task began and ended, by any strategy, the last ones, and none twice after a resume."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import ipc

from fedapp import federation, server
from fedapp.config import RunConfig
from fedapp.engine.run import make_grid
from fedapp.report import client_tables
from fedapp.report.client_tables import TasksFile, read_tasks
from fedapp.report.page.content import page_content
from strategies.clients.client_statistics import LOST, UNDER_WAY, TaskSpan, TaskTiming, Timeline
from strategies.clock import VirtualClock

CLIENTS = 5
KEYS = {"model": "logistic", "time-scenario": "F80", "eval-every": 2, "checkpoint-every": 1}


def go(folder: Path, **values: Any) -> Path:
    federation.forget()
    given = (
        KEYS | {"results-dir": str(folder)} | {name.replace("_", "-"): each for name, each in values.items()}
    )
    if "resume" in given:
        given = {"resume": given["resume"], "num-server-rounds": given["num-server-rounds"]}
    grid = make_grid("vectorized", CLIENTS, 1)
    return server.run(grid, server.prepare(RunConfig.load(given), CLIENTS)).path


def in_its_clock(run: Path) -> list[tuple[Any, ...]]:
    columns = ("number", "client", "began", "ended", "outcome")
    return list(zip(*(read_tasks(run)[name].to_pylist() for name in columns), strict=True))


def test_a_round_lasts_as_long_as_its_slowest_client_and_the_others_wait(tmp_path):
    spans = in_its_clock(go(tmp_path, num_server_rounds=3))
    times = np.linspace(0.2, 1, CLIENTS)
    expected = [
        (CLIENTS * begun + client, client, begun, pytest.approx(begun + times[client]), "accepted")
        for begun in range(3)
        for client in range(CLIENTS)
    ]
    assert spans == expected


@pytest.mark.parametrize("strategy", ["async-fedavg", "fedbuff"])
def test_without_rounds_a_client_has_one_task_after_the_other(strategy, tmp_path):
    keys = {"buffer_size": 3} if strategy == "fedbuff" else {}
    run = go(tmp_path, strategy=strategy, num_server_rounds=12, **keys)
    table, end = read_tasks(run).to_pandas(), json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    done = table[table.outcome == "accepted"]
    assert (done.ended - done.began).to_numpy() == pytest.approx(np.linspace(0.2, 1, CLIENTS)[done.client])
    for _, own in table.groupby("client"):
        assert (own.began.to_numpy()[1:] >= own.ended.to_numpy()[:-1] - 1e-9).all()
    assert (done.ended.to_numpy()[1:] >= done.ended.to_numpy()[:-1]).all()
    assert table.ended.max() == pytest.approx(end["time"])
    assert set(table[~table.index.isin(done.index)].outcome) <= {UNDER_WAY}
    assert (table["wall-ended"] >= table["wall-began"]).all()


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_a_resumed_run_has_the_tasks_of_one_that_went_through(strategy, tmp_path):
    whole = go(tmp_path / "whole", strategy=strategy, num_server_rounds=10)
    part = go(tmp_path / "part", strategy=strategy, num_server_rounds=5)
    assert in_its_clock(part) != in_its_clock(whole)
    assert in_its_clock(go(tmp_path, resume=str(part), num_server_rounds=10)) == in_its_clock(whole)


def span(number: int, client: int = 0, outcome: str = "accepted") -> TaskSpan:
    return TaskSpan(client, float(number), number + 0.5, float(number), number + 0.5, outcome)


def test_the_last_are_kept_and_a_resume_goes_on_behind_them(tmp_path, monkeypatch):
    monkeypatch.setattr(client_tables, "MOST_TASKS", 10)
    monkeypatch.setattr(client_tables, "_SLACK", 5)
    file = TasksFile(tmp_path)
    for number in range(40):
        file.add([span(number)])
        assert file.sync() == number + 1
        assert file._table.rows <= 15
    assert read_tasks(tmp_path)["number"].to_pylist() == list(range(30, 40))
    again = TasksFile(tmp_path)
    again.cut(35)
    again.add([span(7)])
    again.publish(last=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tasks.parquet"]
    assert read_tasks(tmp_path)["number"].to_pylist()[-2:] == [34, 35]
    assert read_tasks(tmp_path)["began"].to_pylist()[-2:] == [34, 7]
    with pytest.raises(ValueError, match="has lost rows since the checkpoint: 36 of 50"):
        TasksFile(tmp_path).cut(50)


class Killed(BaseException):
    """What ends a process is no OSError, after which files are put in order."""


@pytest.mark.parametrize("published", [False, True])
def test_a_kill_at_any_moment_of_a_resume_loses_no_row_that_it_needs(published, tmp_path, monkeypatch):
    def kill_at(moment: int) -> None:
        moments = itertools.count()

        def dying(place: Any, name: str) -> None:
            real = getattr(place, name)

            def call(*arguments: Any, **more: Any) -> Any:
                if next(moments) == moment:
                    raise Killed
                return real(*arguments, **more)

            patched.setattr(place, name, call)

        for place, name in ((ipc, "new_stream"), (os, "fsync"), (os, "replace"), (Path, "unlink")):
            dying(place, name)

    killed = 0
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        file = TasksFile(folder)
        file.add([span(number) for number in range(8)])
        file.sync()
        file.publish(last=published)
        with monkeypatch.context() as patched:
            kill_at(moment)
            try:
                TasksFile(folder).cut(5)
            except Killed:
                killed += 1
        assert read_tasks(folder)["number"].to_pylist()[:5] == list(range(5))
        again = TasksFile(folder)
        again.cut(5)
        again.add([span(9)])
        again.publish(last=True)
        assert read_tasks(folder)["began"].to_pylist() == [0, 1, 2, 3, 4, 9]
        assert [path.name for path in folder.iterdir()] == ["tasks.parquet"]
        if killed <= moment:
            break
    assert killed >= 3


def test_a_timeline_by_hand():
    timeline = Timeline()
    timeline.begin(3, 1.0)
    timeline.arrived(3, 4.0)
    timeline.arrived(3, 5.0)  # a second reply is none
    timeline.end(3, 6.0, "refused")
    timeline.end(9, 6.0, "late")  # of no task that is known
    timeline.begin(1, 2.0, ends=2.5)
    timeline.begin(1, 7.0)
    assert [(each.client, each.began, each.ended, each.outcome) for each in timeline.take()] == [
        (3, 1.0, 4.0, "refused"),
        (1, 2.0, 2.5, LOST),
    ]
    assert timeline.take() == []
    (left,) = timeline.under_way(8.0)
    assert (left.client, left.began, left.ended, left.outcome) == (1, 7.0, 8.0, UNDER_WAY)


def test_a_timeline_of_several_at_once_is_that_of_each():
    clock, told = VirtualClock(), ([], [])
    at_once, each = (Timeline(lambda *task, to=to: to.append(task)) for to in told)
    at_once.watch = each.watch = clock
    for timeline in (at_once, each):
        timeline.begin(2, 0.5)  # lost when it is handed another
    clients, ends, parts = [0, 1, 2], [4.0, None, 6.0], [TaskTiming(1.0, 2.0, 1.0), None, None]
    at_once.begin_all(clients, 1.0, ends, parts)
    for client, end, part in zip(clients, ends, parts, strict=True):
        each.begin(client, 1.0, end, part)
    clock.wait_until(3.0)
    at_once.arrived_all([1, 9], 3.0)
    for client in (1, 9):
        each.arrived(client, 3.0)
    clock.wait_until(5.0)
    at_once.end_all([0, 1, 9], 5.0, ["accepted", "refused", "late"])
    for client, outcome in ((0, "accepted"), (1, "refused"), (9, "late")):
        each.end(client, 5.0, outcome)
    assert at_once.under_way(7.0) == each.under_way(7.0)
    assert at_once.take() == each.take()
    assert told[0] == told[1] == [(2, 0.5, LOST), (0, 3.0, "accepted"), (1, 2.0, "refused")]


def test_few_clients_are_bars_and_many_are_shares_of_time(tmp_path):
    file = TasksFile(tmp_path)
    file.add([span(number, outcome="late" if number == 3 else "accepted") for number in range(300)])
    file.publish(last=True)
    (run,) = page_content([tmp_path] * 1)["runs"]
    assert run["tasks"]["clients"] == [0]
    assert run["tasks"]["spans"]["late"] == {
        "client": [0],
        "began": [3],
        "ended": [3.5],
        "wall-began": [3],
        "wall-ended": [3.5],
    }
    file.cut(0)
    # 200 clients, the slower half of which works all the time, the other a tenth of it.
    every = [(client, begun) for begun in range(10) for client in range(200)]
    file.add([TaskSpan(c, b, b + (1.0 if c >= 100 else 0.1), 2 * b, 2 * b + 1, "accepted") for c, b in every])
    file.publish(last=True)
    (run,) = page_content([tmp_path])["runs"]
    shares = run["tasks"]["shares"]
    assert shares["clients"] == [2] * 100
    assert shares["mean"] == pytest.approx([0.1] * 50 + [1.0] * 50)
    virtual, wall = (np.array(shares[clock]["working"]) for clock in ("time", "wall-seconds"))
    assert virtual[:50].mean() == pytest.approx(0.1, abs=0.01)
    assert virtual[50:] == pytest.approx(1.0)
    assert np.average(wall, axis=1, weights=np.diff(shares["wall-seconds"]["edges"])) == pytest.approx(
        10 / 19
    )
    fleet = run["tasks"]["fleet"]["time"]
    assert sorted(fleet) == ["edges", "waiting", "working"]
    assert np.mean(fleet["working"]) == pytest.approx(0.55, abs=0.01)


@pytest.mark.parametrize("rounds", [40, 70])
def test_equal_rounds_look_alike(tmp_path, rounds):
    """Ten clients work 0.1, 0.2, … 1 seconds of rounds of a second: 55 % of the time, in whichever bin of time."""
    file = TasksFile(tmp_path)
    every = [(client, begun) for begun in range(rounds) for client in range(10)]
    file.add([TaskSpan(c, b, b + (c + 1) / 10, 2 * b, 2 * b + 1, "accepted") for c, b in every])
    file.publish(last=True)
    (run,) = page_content([tmp_path])["runs"]
    fleet = run["tasks"]["fleet"]["time"]
    assert fleet["working"] == pytest.approx([0.55] * (len(fleet["edges"]) - 1))
    assert (fleet["edges"][0], fleet["edges"][-1]) == (0, rounds)
