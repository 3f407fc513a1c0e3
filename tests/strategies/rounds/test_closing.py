"""The two closings of a round alone: wait for all, or close at a deadline or with as many replies as are needed."""

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message

from strategies import FedAvg
from strategies.clients.accounts import ACCEPTED, Accounts, Timeline
from strategies.clients.client_metrics import MetricsMean
from strategies.clients.roster import Client
from strategies.core.config import SynchronousConfig
from strategies.core.requests import PendingReplies
from strategies.flower import messages
from strategies.rounds.closing import Closing, WaitForAll
from strategies.rounds.deadline import RoundSize
from strategies.rounds.early_closing import EarlyClosing
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection
from tests.strategies.parts import begun, population, receiver, training_requests

SIZES = (1, 2, 5)  # their task times are 0.2, 0.6 and 1 s


class Alone:
    """A closing over a grid of three clients, and rounds that it closes."""

    part: Closing

    def __init__(self, grid: Any, **options: Any) -> None:
        self.grid = grid
        clients = [Client(grid.node(i).node_id, i, n, {}, described=True) for i, n in enumerate(SIZES)]
        self.config = config = SynchronousConfig(**options)
        self.run = begun(clients, config, 1.0)
        self.accounts, self.pending = Accounts(), PendingReplies(self.run)
        self.timeline = Timeline(self.accounts.took)
        self.requests = training_requests(self.run)
        if config.round_deadline or config.over_select:
            people, able = population(self.run), FedAvg.capabilities
            selection = Selection(config, self.run, people, able)
            size = RoundSize(self.run, lambda: selection.scheme, config.over_select)
            self.part = EarlyClosing(
                config,
                self.run,
                people,
                selection,
                size,
                receiver(self.run),
                self.pending,
                self.accounts,
                self.timeline,
                able,
            )
        else:
            self.part = WaitForAll(self.run, self.pending, self.timeline)

    def round(self, number: int, weights: Sequence[float]) -> tuple[Round, list[Message], Any]:
        """Ask all that are free, with these weights; return the round, its replies and what settling it tells."""
        current = Round(number, self.run.model, self.part.free(self.grid), weights, MetricsMean())
        self.part.open(current)
        requests = []
        for client in current.clients:
            fields = self.requests.fields(client, number, number, ConfigRecord({"lr": 0.5}))
            requests.append(self.requests.request(client, fields, self.run.result.arrays, {}))
            self.part.sent(client, requests[-1])
        self.part.ready(current)
        replies = list(self.part.replies(current, self.grid, requests))
        seconds = self.part.duration(current, number)
        self.run.clock.wait_until(self.run.pace.now() + seconds)
        current.outcomes = dict.fromkeys((client.index for client in current.clients), ACCEPTED)
        return current, replies, self.part.settle(current)

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
    assert (it.run.pace.now(), it.part.early, it.part.busy(), it.part.state()) == (1.0, False, [], {})
    assert (it.part.number_to_draw(), it.part.nobody([])) == (None, None)
    assert it.part.free(it.grid) is it.part.may_evaluate() is it.run.clients
    assert not it.part.cut_off()


def test_who_goes_away_before_its_end_is_not_asked(make):
    it = make(task_failure=0.999999)
    current, replies, _ = it.round(1, P)
    assert (replies, current.lost, it.grid.asked()) == ([], {0, 1, 2}, [])


def test_at_a_deadline_those_that_are_in_time_share_the_weight(make):
    it = make(round_deadline=0.7)
    current, replies, told = it.round(1, P)
    assert (it.who(replies), it.run.pace.now()) == ([0, 1], 0.7)
    assert current.weights == pytest.approx([1 / 3, 2 / 3])
    assert (told[messages.LATE_UPDATES], told[messages.DROPPED_UPDATES]) == (1, 1)
    assert it.grid.asked() == [0, 1]  # nobody works on what is dropped
    assert it.accounts[2].late == 1
    # At work until 1 s: the others alone are free.
    assert [client.index for client in it.part.free(it.grid)] == [0, 1]
    assert it.part.busy() == [2]
    it.run.clock.wait_until(1.0)
    assert len(it.part.free(it.grid)) == 3


def test_late_work_is_saved_and_restored_and_forgotten(make):
    it, again = (make(round_deadline=0.7) for _ in range(2))
    it.round(1, P)
    state = it.part.state()
    assert state == {"late-tasks": [[2, 1.0]]}
    again.part.restore(state)
    assert again.part.busy() == [2]
    again.part.reset()
    assert again.part.state() == {}
    with pytest.raises(ValueError, match="the checkpoint is of an earlier version, which kept late work"):
        again.part.restore({"late-tasks": [[2, 1, 0.0, 1.0, 5 / 8, 0, 8]]})


@pytest.mark.parametrize(
    ("failing", "in_time", "seconds", "weights"),
    [(None, [0, 1], 0.6, [1 / 3, 2 / 3]), (1, [0, 1, 2], 1.0, P), (2, [0, 1], 0.6, [1 / 3, 2 / 3])],
)
def test_a_round_closes_with_as_many_valid_replies_as_it_needs(make, failing, in_time, seconds, weights):
    it = make(over_select=0.5, participation="uniform", fraction_train=0.67)  # ⌈1.5 · 2⌉ are asked for 2
    if failing is not None:
        it.grid.spoil(failing, "nan")
    current, replies, _ = it.round(1, P)
    assert it.part.number_to_draw() == 3
    assert (it.who(replies), it.run.pace.now()) == (in_time, seconds)
    assert current.weights == pytest.approx(weights)


def test_a_round_beyond_the_time_budget_is_cut_off(make):
    it = make(round_deadline=0.7, time_budget=0.65)
    assert not it.part.cut_off()
    it.round(1, P)
    assert it.part.cut_off()
    it.part.begin()
    assert not it.part.cut_off()


def test_where_all_are_at_work_nobody_is_asked(make):
    it = make(round_deadline=0.1)
    current, replies, told = it.round(1, P)
    assert (replies, current.clients, told[messages.LATE_UPDATES]) == ([], [], 3)
    assert it.part.nobody(it.part.free(it.grid)) == ([], [])
