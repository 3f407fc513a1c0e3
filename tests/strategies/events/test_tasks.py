"""The bookkeeping of tasks alone: who is free, who waits, what a buffer holds, and what is saved."""

import numpy as np
import pytest

from strategies.clients.client_state import ClientState
from strategies.events.tasks import Task, TaskTable
from tests.strategies.parts import client, contribution, run_of


@pytest.fixture
def task_table():
    made = TaskTable(run_of(), trains_while_waiting=False)
    made.members = {index: ClientState(client(index)) for index in (2, 0, 1)}
    made.changed()
    return made


def task(task_table: TaskTable, index: int, lost: bool = False) -> Task:
    return Task(task_table.members[index], 3, np.array([1.0, 2.0]), f"task-{index}", 0.5, lost)


def test_who_has_a_task_is_not_free_until_it_is_closed(task_table):
    assert task_table.free == [0, 1, 2]
    task_table.open(task(task_table, 1), due=4.0)
    task_table.open(task(task_table, 2, lost=True), due=2.0)
    assert (task_table.free, task_table.busy_clients(), task_table.queue.next_due()) == ([0], [1], 2.0)
    task_table.close(task_table.tasks["task-1"])
    assert task_table.free == [0, 1]


def test_who_waits_for_an_aggregation_is_free_after_it_or_where_clients_work_on(task_table):
    for index in (2, 0, 2):
        task_table.add_to_buffer(contribution(index))
    assert (task_table.free, task_table.members[2].waiting) == ([1], 2)
    assert [each.client.index for each in task_table.take_out(task_table.buffer)] == [0, 2, 2]
    assert (task_table.free, task_table.buffer, task_table.members[2].waiting) == ([0, 1, 2], [], 0)
    on = TaskTable(run_of(), trains_while_waiting=True)
    on.members = {0: ClientState(client(0))}
    on.add_to_buffer(contribution(0))
    assert on.free == [0]


def test_a_dropped_member_counts_no_longer_and_is_free_only_if_it_is_asked_again(task_table):
    changes = task_table.changes
    task_table.members[1].drop(4)
    task_table.changed()
    assert [member.client.index for member in task_table.active_clients] == [0, 2]
    assert (task_table.free, task_table.changes) == ([0, 2], changes + 1)
    task_table.ask_again(task_table.members[1])
    assert task_table.free == [0, 1, 2]
    task_table.members[0].is_available = False
    task_table.refresh_idle(task_table.members[0])
    assert task_table.free == [1, 2]


def test_who_comes_and_goes_one_by_one_is_noted_like_all_at_once(task_table):
    def sizes(members):
        return np.array([float(member.client.index) for member in members])

    def noted():
        active = task_table.active
        places = [active.place(index) for index in range(7)]
        return active.members, places, active.column("index", sizes).tolist(), list(task_table.free)

    assert noted()[2:] == ([0.0, 1.0, 2.0], [0, 1, 2])
    for index in (6, 3):
        task_table.changed([task_table.join(client(index), since=0)])
        one_by_one = noted()
        task_table.changed()
        assert noted() == one_by_one
    task_table.members[1].drop(4)
    task_table.changed([task_table.members[1]])
    task_table.forget(task_table.members[6])
    one_by_one = noted()
    assert one_by_one[1:] == ([0, None, 1, 2, None, None, None], [0.0, 2.0, 3.0], [0, 2, 3])
    task_table.changed()
    assert noted() == one_by_one
    task_table.members[1].count_again(5)
    task_table.changed([task_table.members[1]])
    assert noted()[3] == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [200, 2000])
def test_clients_that_come_together_cost_no_look_at_the_others(number):
    asked = []

    def sizes(members):
        asked.extend(member.index for member in members)
        return np.array([member.client.num_examples for member in members])

    task_table = TaskTable(run_of())
    task_table.members = {index: ClientState(client(index)) for index in range(number)}
    task_table.active.column("size", sizes)
    asked.clear()
    came = [task_table.join(client(index), since=0) for index in range(number, number + 100)]
    task_table.changed(came)
    assert len(task_table.active.column("size", sizes)) == len(task_table.active_clients) == number + 100
    assert asked == [member.index for member in came]


def test_contributions_and_their_weights_add_up(task_table):
    task_table.count(task_table.members[0], 0.25)
    task_table.count(task_table.members[0], 0.5)
    assert (task_table.members[0].contributions, task_table.members[0].weight) == (2, 0.75)


def test_a_state_gives_the_members_back_and_drops_those_that_are_gone(task_table):
    task_table.count(task_table.members[2], 0.5)
    task_table.members[0].tasks, task_table.members[1].tasks = 2, 1
    task_table.open(task(task_table, 1), due=4.0)
    state = task_table.state()
    assert state["tasks-under-way"] == [(3, 1, 0.5)]
    assert (state["versions"], state["bases"].tolist()) == ([3], [[1.0, 2.0]])
    again = TaskTable(run_of())
    again.restore(state)
    again.resume({0: client(0), 2: client(2)}, aggregations=3)
    assert again.dispatched == 3
    assert [(m.client.index, m.dropped, m.dropped_at) for m in again.members.values()] == [
        (2, False, 0),
        (0, False, 0),
        (1, True, 3),
    ]
    assert (again.members[2].contributions, again.members[2].weight) == (1, 0.5)
