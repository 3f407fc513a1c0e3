"""What a run of the app has on record of rounds that close early: sums, outcomes, the page; and how it goes on."""

import json

import numpy as np
import pytest

from fedapp import client_app, server
from fedapp.config import ConfigError, RunConfig
from fedapp.engine.sequential import SequentialGrid
from fedapp.report.client_tables import last_clients, read_tasks
from fedapp.report.page.timeline import timeline
from tests.runs import lines_of, summary_of

CLIENTS = 4  # F80: tasks take 0.2, 0.467, 0.733 and 1 s


@pytest.fixture
def go(run_app):
    """Run the app for four rounds; return the run's folder."""
    given = {"model": "logistic", "num-server-rounds": 4, "checkpoint-every": 1, "eval-every": 1}
    return lambda name="run", **values: run_app({**given, **values}, CLIENTS, name=name)


def test_what_was_late_and_wasted_is_summed(go):
    path = go(**{"round-deadline": 0.5})
    lines, summary = lines_of(path), summary_of(path)
    # Rounds begin at 0, 0.5, 0.967 and 1.467: client 2 is free in the third again, client 3 in the fourth.
    assert [line.get("late-updates") for line in lines] == [None, 2, 0, 1, 1]
    assert [line.get("participants") for line in lines] == [None, 2, 2, 2, 2]
    assert [line.get("tasks-late") for line in lines] == [None, 2, 2, 3, 4]
    assert (summary["tasks-late"], summary["tasks-dropped"], summary["failures"]) == (4, 4, 0)
    down = [line["bytes-down"] for line in lines]
    model = down[1] / 4
    assert down == [0, 4 * model, 6 * model, 9 * model, 12 * model]
    assert summary["bytes-wasted"] == 4 * model
    assert summary["bytes-up"] == 8 * model


def test_late_tasks_are_on_record_and_on_the_page(go):
    path = go(**{"round-deadline": 0.5})
    rows = read_tasks(path).to_pylist()
    late = [
        (row["client"], round(row["began"], 3), round(row["ended"], 3))
        for row in rows
        if row["outcome"] == "late"
    ]
    assert late == [(2, 0.0, 0.733), (3, 0.0, 1.0), (2, 0.967, 1.7), (3, 1.467, 2.467)]
    drawn = timeline(path, 1000, 100, [])["spans"]
    assert sorted(drawn) == ["accepted", "late"]
    assert sorted(drawn["late"]["client"]) == [2, 2, 3, 3]
    clients = last_clients(path)
    assert clients["participation"] == [4, 4, 0, 0]
    assert "expected-share" not in clients
    assert clients["observed-share"][2:] == [0, 0]


@pytest.mark.parametrize("strategy", ["fedavg", "spectral"])
def test_a_run_that_goes_on_is_the_same_to_the_last_bit(go, tmp_path, strategy):
    own = {"strategy": strategy, "round-deadline": 0.5}
    whole, part = (
        go("whole", **own, **{"num-server-rounds": 7}),
        go("part", **own, **{"num-server-rounds": 3}),
    )
    state = json.loads(next((part / "checkpoint").glob("*/state.json")).read_text())["strategy"]
    assert [task[0] for task in state["late-tasks"]] == [2]  # after the third round
    experiment = server.prepare(RunConfig.load({"resume": str(part), "num-server-rounds": 7}), CLIENTS)
    server.run(SequentialGrid(client_app.app, CLIENTS), experiment)
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (whole / name).read_bytes() == (part / name).read_bytes()
    ended = [
        [row for row in read_tasks(path).to_pylist() if row["outcome"] != "under way"]
        for path in (whole, part)
    ]
    kept = [[(row["client"], row["began"], row["ended"], row["outcome"]) for row in rows] for rows in ended]
    assert np.array_equal(sorted(set(kept[0])), sorted(set(kept[1])))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"over-select": 0.5, "participation": "uniform"},
            "over-select = 0.5: all 4 clients are asked without it; fraction-train = 1 must be less",
        ),
        (
            {"round-deadline": 1.0, "participation": "paired"},
            "round-deadline = 1.0 with participation = 'paired': the scheme says which client",
        ),
        ({"round-deadline": 1.0, "late": "drop"}, "unknown key 'late'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_client_starts(values, text):
    with pytest.raises(ConfigError) as error:
        server.prepare(RunConfig.load(values), CLIENTS)
    assert str(error.value).startswith(text)
