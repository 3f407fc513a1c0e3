"""The bookkeeping of tasks alone: who is free, who waits, what a buffer holds, and what is saved."""

import numpy as np
import pytest

from strategies.clients.member import Member
from strategies.events.tasks import Task, TaskLedger
from tests.strategies.parts import client, contribution, run_of


@pytest.fixture
def ledger():
    made = TaskLedger(run_of(), works_on=False)
    made.members = {index: Member(client(index)) for index in (2, 0, 1)}
    made.changed()
    return made


def task(ledger: TaskLedger, index: int, lost: bool = False) -> Task:
    return Task(ledger.members[index], 3, np.array([1.0, 2.0]), f"task-{index}", 0.5, lost)


def test_who_has_a_task_is_not_free_until_it_is_closed(ledger):
    assert ledger.free == [0, 1, 2]
    ledger.open(task(ledger, 1), due=4.0)
    ledger.open(task(ledger, 2, lost=True), due=2.0)
    assert (ledger.free, ledger.at_work(), ledger.queue.next_due()) == ([0], [1], 2.0)
    ledger.close(ledger.tasks["task-1"])
    assert ledger.free == [0, 1]


def test_who_waits_for_an_aggregation_is_free_after_it_or_where_clients_work_on(ledger):
    for index in (2, 0, 2):
        ledger.keep(contribution(index))
    assert (ledger.free, ledger.members[2].waiting) == ([1], 2)
    assert [each.client.index for each in ledger.take_out(ledger.buffer)] == [0, 2, 2]
    assert (ledger.free, ledger.buffer, ledger.members[2].waiting) == ([0, 1, 2], [], 0)
    on = TaskLedger(run_of(), works_on=True)
    on.members = {0: Member(client(0))}
    on.keep(contribution(0))
    assert on.free == [0]


def test_a_dropped_member_counts_no_longer_and_is_free_only_if_it_is_asked_again(ledger):
    changes = ledger.changes
    ledger.members[1].drop(4)
    ledger.changed()
    assert [member.client.index for member in ledger.counting] == [0, 2]
    assert (ledger.free, ledger.changes) == ([0, 2], changes + 1)
    ledger.ask_again(ledger.members[1])
    assert ledger.free == [0, 1, 2]
    ledger.members[0].there = False
    ledger.moved(ledger.members[0])
    assert ledger.free == [1, 2]


def test_contributions_and_their_weights_add_up(ledger):
    ledger.count(ledger.members[0], 0.25)
    ledger.count(ledger.members[0], 0.5)
    assert (ledger.members[0].contributions, ledger.members[0].weight) == (2, 0.75)


def test_a_state_gives_the_members_back_and_drops_those_that_are_gone(ledger):
    ledger.count(ledger.members[2], 0.5)
    ledger.members[0].tasks, ledger.members[1].tasks = 2, 1
    ledger.open(task(ledger, 1), due=4.0)
    state = ledger.state()
    assert state["tasks-under-way"] == [(3, 1, 0.5)]
    assert (state["versions"], state["bases"].tolist()) == ([3], [[1.0, 2.0]])
    again = TaskLedger(run_of())
    again.restore(state)
    again.resume({0: client(0), 2: client(2)}, aggregations=3)
    assert again.dispatched == 3
    assert [(m.client.index, m.dropped, m.gone) for m in again.members.values()] == [
        (2, False, 0),
        (0, False, 0),
        (1, True, 3),
    ]
    assert (again.members[2].contributions, again.members[2].weight) == (1, 0.5)
