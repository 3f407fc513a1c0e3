"""Ringleader against its rule in numpy, its limits, the models that clients are sent, and clients that fail."""

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import FedAvg, Ringleader, messages
from strategies.testing import MemoryGrid
from strategies.timing.time_scenario import TimeScenario

CENTRES, SIZES, GAMMA = (4.0, 0.0, -2.0, 6.0), (1, 2, 3, 4), 0.25
P, C = np.array(SIZES) / 10, 4


def reference(task_time: Callable[[int, int], float], steps: int, eta: float) -> list[float]:
    """The two phases, by the paper's tables of sums and counts."""
    models, held = [1.0], np.ones(C)  # what each client has
    G, b, G_next, b_next = np.zeros(C), np.zeros(C), np.zeros(C), np.zeros(C)
    phase, stepped = 1, set[int]()
    heap = [(round(task_time(i, 1), 9), i, 1, task_time(i, 1)) for i in range(C)]
    heapq.heapify(heap)
    while len(models) <= steps:
        _, i, task, now = heapq.heappop(heap)
        delta = GAMMA * (CENTRES[i] - held[i])
        if phase == 2 and i in stepped:
            G_next[i], b_next[i] = G_next[i] + delta, b_next[i] + 1
        else:
            G[i], b[i] = G[i] + delta, b[i] + 1
            if phase == 2 or b.all():
                phase = 2
                stepped.add(i)
                models.append(models[-1] + eta * float(P @ (G / b)))
                held[i] = models[-1]
        if len(stepped) == C:
            G, b, G_next, b_next = G_next, b_next, np.zeros(C), np.zeros(C)
            phase, stepped = 1, set()
        due = now + task_time(i, task + 1)
        heapq.heappush(heap, (round(due, 9), i, task + 1, due))
    return models


@pytest.mark.parametrize("scenario", ["F80", "exponential"])
def test_a_run_is_its_papers_rule(go, scenario):
    expected = reference(TimeScenario(scenario, C, 3).task_time, 50, 0.3)
    models, _, _ = go(Ringleader, 50, server_lr=0.3, time_scenario=scenario, seed=3)
    assert models == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert len(set(models)) == 51


def test_of_one_client_it_is_local_training(go, federation):
    one, other = (
        go(kind, 8, grid=federation([4.0], [3]), **options)[0]
        for kind, options in ((Ringleader, {"server_lr": 0.0}), (FedAvg, {}))
    )
    assert one == pytest.approx(other, rel=1e-6)


def test_the_first_step_is_fedavgs_if_nobody_comes_twice_before_the_slowest(go):
    models = go(Ringleader, 2, time_scenario="F49")[0]  # the fastest has its second task done at 1.02 s
    assert models[1] == pytest.approx(go(FedAvg, 1)[0][1], rel=1e-6)


def test_the_models_that_clients_are_sent_by_hand(go, federation, tmp_path):
    # Tasks of client 0 take 2 s, of client 1 take 5 s. "0@2": client 0 arrives at 2.
    #   0@2, 0@4     phase 1: goes on with model 0, twice
    #   1@5          b = (2, 1): step 1, and client 1 has model 1
    #   0@6          phase 2: step 2, and client 0 has model 2; the round is over
    #   0@8          phase 1: goes on with model 2
    #   0@10, 1@10   in client order: client 0 goes on with model 2; client 1 makes step 3, and has model 3
    #   0@12         step 4, and client 0 has model 4
    path = tmp_path / "times.csv"
    path.write_text("client,seconds\n0,2\n1,5\n")
    _, grid, _ = go(Ringleader, 4, grid=federation([4.0, 0.0], [1, 1]), time_scenario=f"trace:{path}")
    sent = [
        (
            request.content.config_records["config"][messages.CLIENT],
            request.content.config_records["config"][messages.SERVER_ROUND] - 1,
        )
        for request in grid.requests()
    ]
    assert sent == [(0, 0), (1, 0), (0, 0), (0, 0), (1, 1), (0, 2), (0, 2), (0, 2), (1, 3)]
    # What they were sent is what that version was.
    first, second = (request.content.array_records["arrays"]["w"].data for request in grid.requests()[5:7])
    assert first == second


def counting_versions(steps: int) -> ClientApp:
    """Clients whose update is 1 at the place of the version that they were sent, and 0 elsewhere."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        w = message.content.array_records["arrays"]["w"].numpy().copy()
        w[message.content.config_records["config"][messages.SERVER_ROUND] - 1] += 1.0
        metrics = MetricRecord({"num-examples": 1})
        return Message(
            RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics}), reply_to=message
        )

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"partition-id": context.node_config["partition-id"], "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def delays_of(times: Sequence[Sequence[float]], path: Path, steps: int) -> list[int]:
    """Return how old the oldest update is that counts in each step."""
    rows = [f"{client},{seconds}" for client, own in enumerate(times) for seconds in own]
    path.write_text("\n".join(["client,seconds", *rows]))
    grid = MemoryGrid(counting_versions(steps), [{"partition-id": client} for client in range(len(times))])
    seen: list[np.ndarray] = []
    Ringleader(
        observer=lambda progress: seen.append(progress.arrays["w"].numpy().astype(float)),
        fraction_evaluate=0.0,
        time_scenario=f"trace:{path}",
        min_clients=1,
        server_lr=1.0,
    ).start(grid, ArrayRecord({"w": Array(np.zeros(steps))}), num_rounds=steps)
    moves = [after - before for before, after in pairwise(seen)]
    # Every step is a mean of all clients' updates, whatever they are.
    assert [move.sum() for move in moves] == pytest.approx([1.0] * steps, rel=1e-6)
    return [step - int(np.flatnonzero(move > 1e-9)[0]) for step, move in enumerate(moves)]


@settings(max_examples=10)
@given(times=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_no_update_that_counts_is_older_than_two_rounds_but_two(times, tmp_path):
    assert max(delays_of(times, tmp_path / "times.csv", 14)) <= 2 * len(times) - 2


def test_and_that_old_they_do_get(tmp_path):
    # Client 2 makes the first step of the first round at 1 s, and is sent model 1. Its updates of model 1 count until
    # the last step of the second round, at 4 s, which moves model 5.
    assert max(delays_of([[1.0], [1.0], [1.0]], tmp_path / "times.csv", 12)) == 4


# ---- Reports, clients that fail, come and go -----------------------------------------------------------------------


def test_all_count_by_their_importance_and_memory_is_two_vectors_a_client(go, federation):
    _, _, strategy = go(Ringleader, 60, server_lr=0.02)
    shares = strategy.session.client_columns()
    assert shares["expected-share"] == pytest.approx(P, rel=1e-9)
    assert shares["observed-share"] == pytest.approx(P, abs=0.05)
    assert strategy.session.client_state_bytes() == 2 * 4 * 4
    assert not strategy.session.task_table.interval_stats.discarded
    assert all(contribution.update.size == 0 for contribution in strategy.session.task_table.buffer)


def test_who_fails_is_waited_for_until_it_is_dropped(go, federation):
    grid = federation(CENTRES, SIZES)
    grid.spoil(3, "raise")  # the slowest: its third task in vain ends at 3 s
    models, _, strategy = go(Ringleader, 40, grid=grid, server_lr=0.3)
    assert strategy.session.task_table.members[3].dropped
    assert models[-1] == pytest.approx(P[:3] @ CENTRES[:3] / P[:3].sum(), abs=0.05)
    assert strategy.session.client_columns()["participation"][3] == 0


def test_who_is_gone_for_good_is_not_waited_for(go, tmp_path):
    path = tmp_path / "there.csv"
    path.write_text("client,start,end\n0,0,1e9\n1,0,1e9\n2,0,3.9\n3,0,1e9\n")
    models, _, _ = go(Ringleader, 80, availability=f"trace:{path}", server_lr=0.3)
    rest = [0, 1, 3]
    assert models[-1] == pytest.approx(P[rest] @ np.array(CENTRES)[rest] / P[rest].sum(), abs=0.05)


def test_who_is_never_there_for_long_enough_is_not_waited_for(go, tmp_path):
    # One of clients 2 and 3 is always at work, on a task of 1 s that it leaves after half a second.
    path = tmp_path / "there.csv"
    path.write_text("client,start,end,period\n0,0,1,1\n1,0,1,1\n2,0,0.5,1\n3,0.5,1,1\n")
    there = {"availability": f"trace:{path}", "time_scenario": "F0", "time_budget": 60.0}
    models, _, _ = go(Ringleader, 20, server_lr=0.3, **there)
    assert len(models) == 21
    assert models[-1] == pytest.approx(P[:2] @ CENTRES[:2] / P[:2].sum(), abs=0.1)


def test_who_never_gets_a_place_while_it_is_there_for_long_enough_is_not_waited_for(go, federation, caplog):
    there = {"availability": "diurnal:0.3,4", "seed": 42, "concurrency": 1, "time_budget": 2000.0}
    models, _, strategy = go(Ringleader, 12, grid=federation(CENTRES[:3], SIZES[:3]), **there)
    assert len(models) == 13
    assert strategy.session.client_columns()["participation"][2] == 0
    assert caplog.text.count("it went away before each of its last 200 tasks was done") == 1


def test_few_at_work_at_once(go, federation):
    models, grid, strategy = go(Ringleader, 30, concurrency=2, server_lr=0.3)
    assert set(grid.asked()) == {0, 1, 2, 3}
    assert np.isfinite(models).all()
    assert strategy.predict_num_aggregations(np.array([1.0, 2.0, 3.0, 6.0]), 60.0) == 4 * 10


def test_a_run_of_no_given_length_has_a_step_for_each_client_and_task_of_the_slowest():
    assert Ringleader().predict_num_aggregations(np.array([0.2, 0.6, 1.0]), 40.0) == 120
