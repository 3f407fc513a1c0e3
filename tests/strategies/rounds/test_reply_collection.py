"""The two reply collectors alone: of all replies, and until a deadline or the number of replies that is needed."""

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message

from strategies import FedAvg
from strategies.clients.client_metrics import MetricsMean
from strategies.clients.client_statistics import ACCEPTED, ClientStatistics, Timeline
from strategies.clients.roster import Client
from strategies.core.config import SynchronousConfig
from strategies.core.requests import PendingReplies
from strategies.flower import messages
from strategies.rounds.deadline_collector import DeadlineCollector
from strategies.rounds.reply_collection import AllReplies
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection
from tests.strategies.parts import begun, population, receiver, training_requests

SIZES = (1, 2, 5)  # their task times are 0.2, 0.6 and 1 s


class Alone:
    """A collector over a grid of three clients, and the rounds whose replies it collects."""

    part: Any

    def __init__(self, grid: Any, **options: Any) -> None:
        self.grid = grid
        clients = [Client(grid.node(i).node_id, i, n, {}, described=True) for i, n in enumerate(SIZES)]
        self.config = config = SynchronousConfig(**options)
        self.run = begun(clients, config, 1.0)
        self.client_stats, self.pending = ClientStatistics(), PendingReplies(self.run)
        self.timeline = Timeline(self.client_stats.add_task_time)
        self.requests = training_requests(self.run)
        able = FedAvg.capabilities
        self.selection = Selection(config, self.run, population(self.run), able)
        self.part = AllReplies(self.run, self.pending, self.timeline)
        if config.closes_early:
            parts = receiver(self.run), self.pending, self.timeline
            self.part = DeadlineCollector(config, self.run, self.selection, *parts, able)

    def round(self, number: int, weights: Sequence[float]) -> tuple[Round, list[Message], Any]:
        """Ask all that are free, with these weights; return the round, its replies and what settling it tells."""
        model, arrays, free = self.run.model, self.run.result.arrays, self.part.free_clients(self.grid)
        current = Round(number, model, arrays, model, free, weights, MetricsMean())
        requests = []
        for client in current.clients:
            fields = self.requests.fields(client, number, number, ConfigRecord({"lr": 0.5}))
            requests.append(self.requests.request(client, fields, self.run.result.arrays, {}))
            current.request_bytes[client.index] = messages.total_bytes(requests[-1])
        current.requests = [request.metadata for request in requests]
        replies = list(self.part.collect(current, self.grid, requests))
        seconds = self.part.duration(current)
        self.run.clock.wait_until(self.run.scheduler.now() + seconds)
        current.outcomes = dict.fromkeys((client.index for client in current.clients), ACCEPTED)
        current.record_outcomes(self.client_stats, self.timeline, self.run.scheduler.now())
        return current, replies, self.part.finish(current)

    def who(self, replies: Sequence[Message]) -> list[int]:
        index = {client.node_id: client.index for client in self.run.clients}
        return sorted(index[reply.metadata.src_node_id] for reply in replies)


@pytest.fixture
def make(federation):
    return lambda **options: Alone(federation(), **options)


P = [1 / 8, 2 / 8, 5 / 8]


def test_waiting_for_all_takes_as_long_as_the_slowest(make):
    it = make()
    current, replies, told = it.round(1, P)
    assert (it.who(replies), current.weights, dict(told)) == ([0, 1, 2], P, {})
    assert (it.run.scheduler.now(), it.part.busy_clients(), it.selection.number_to_draw()) == (1.0, [], None)
    assert it.part.free_clients(it.grid) is it.run.clients


def test_who_goes_away_before_its_end_is_not_asked(make):
    it = make(task_failure=0.999999)
    current, replies, _ = it.round(1, P)
    assert (replies, current.lost, it.grid.asked()) == ([], {0, 1, 2}, [])


def test_at_a_deadline_those_that_are_in_time_share_the_weight(make):
    it = make(round_deadline=0.7)
    current, replies, told = it.round(1, P)
    assert (it.who(replies), it.run.scheduler.now()) == ([0, 1], 0.7)
    assert current.weights == pytest.approx([1 / 3, 2 / 3])
    assert (told[messages.LATE_UPDATES], told[messages.DROPPED_UPDATES]) == (1, 1)
    assert it.grid.asked() == [0, 1]  # nobody works on what is dropped
    assert it.client_stats[2].late == 1
    # At work until 1 s: the others alone are free.
    assert [client.index for client in it.part.free_clients(it.grid)] == [0, 1]
    assert it.part.busy_clients() == [2]
    it.run.clock.wait_until(1.0)
    assert len(it.part.free_clients(it.grid)) == 3


def test_late_tasks_are_saved_and_restored(make):
    it, again = (make(round_deadline=0.7) for _ in range(2))
    it.round(1, P)
    state = it.part.state()
    assert state == {"late-tasks": [[2, 1.0]]}
    again.part.restore(state)
    assert again.part.busy_clients() == [2]


@pytest.mark.parametrize(
    ("failing", "in_time", "seconds", "weights"),
    [(None, [0, 1], 0.6, [1 / 3, 2 / 3]), (1, [0, 1, 2], 1.0, P), (2, [0, 1], 0.6, [1 / 3, 2 / 3])],
)
def test_a_round_closes_with_as_many_valid_replies_as_it_needs(make, failing, in_time, seconds, weights):
    it = make(over_select=0.5, participation="uniform", fraction_train=0.67)  # ⌈1.5 · 2⌉ are asked for 2
    if failing is not None:
        it.grid.spoil(failing, "nan")
    current, replies, _ = it.round(1, P)
    assert it.selection.number_to_draw() == 3
    assert (it.who(replies), it.run.scheduler.now()) == (in_time, seconds)
    assert current.weights == pytest.approx(weights)


def test_a_round_that_ends_after_the_time_budget_is_marked(make):
    it = make(round_deadline=0.7, time_budget=0.65)
    current, _, _ = it.round(1, P)
    assert current.exceeds_budget


def test_where_all_are_at_work_nobody_is_free(make):
    it = make(round_deadline=0.1)
    current, replies, told = it.round(1, P)
    assert (replies, current.clients, told[messages.LATE_UPDATES]) == ([], [], 3)
    assert (it.part.free_clients(it.grid), it.part.busy_clients()) == ([], [0, 1, 2])
