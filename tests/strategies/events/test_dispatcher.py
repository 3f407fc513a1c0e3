"""The dispatcher alone: who is sent which model when, and the tasks that a resumed run goes on with."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from strategies import messages
from strategies.clients.client_statistics import ClientStatistics, Timeline
from strategies.clients.roster import Client
from strategies.core.config import AsynchronousConfig
from strategies.events.dispatcher import Dispatcher
from strategies.events.tasks import Retry, TaskTable
from strategies.flower.exchange import MessageClient
from tests.strategies.parts import begun, model_of, training_requests

TAU = [0.2, 0.6, 1.0]  # of F80


class Fixture:
    """A dispatcher with its own task table, over a grid of three clients."""

    def __init__(self, grid: Any, config: Any = None, **hooks: Any) -> None:
        self.grid = grid
        nodes = [grid.node(i).node_id for i in range(3)]
        self.clients = [Client(node, i, 1, {}) for i, node in enumerate(nodes)]
        self.run = begun(self.clients, config or AsynchronousConfig(), 1.0, 2.0)
        self.task_table = TaskTable(self.run)
        self.client_stats = ClientStatistics()
        usual: dict[str, Any] = {
            "concurrency": 0,
            "reference_steps": 4,
            "local_rule": dict,
            "extra_vectors": lambda clients: iter(()),
            "select_idle": lambda free: free,
            "resend_model": lambda client: None,
            "task_steps": lambda client: 0,
        }
        self.part = Dispatcher(
            self.run,
            self.task_table,
            training_requests(self.run),
            self.client_stats,
            Timeline(),
            SimpleNamespace(**(usual | hooks)),  # type: ignore[arg-type]
            without_messages=False,
        )
        self.part.begin(grid, MessageClient(grid, 1.0), ConfigRecord({"lr": 0.5}))

    def under_way(self) -> dict[int, Any]:
        return {task.member.client.index: task for task in self.task_table.tasks.values()}

    def due(self) -> dict[str, float]:
        return {item: due for due, item in self.task_table.queue if isinstance(item, str)}

    def arrive(self, index: int) -> Any:
        """Close the task of a client."""
        return self.task_table.close(self.under_way()[index])


@pytest.fixture
def make(federation):
    return lambda **options: Fixture(federation(), **options)


def test_newcomers_are_sent_the_model_and_their_tasks_are_due_by_the_scenario(make):
    it = make()
    it.part.dispatch(it.part.add_clients(it.clients[:2]))
    it.part.dispatch(it.part.add_clients(it.clients))
    tasks = it.under_way()
    assert sorted(tasks) == it.grid.asked() == [0, 1, 2]
    assert all((task.version, task.base.tolist()) == (0, [1.0, 2.0]) for task in tasks.values())
    assert it.due() == pytest.approx({tasks[i].message_id: TAU[i] for i in range(3)})
    sent = it.grid.requests()[2].content
    assert dict(sent["config"]) == {"lr": 0.5, "server-round": 1, messages.CLIENT: 2, messages.TASK: 1}
    assert it.task_table.interval_stats.bytes_down == 3 * messages.num_bytes(model_of())
    assert (it.task_table.dispatched, [it.client_stats[i].tasks for i in range(3)]) == (3, [1, 1, 1])
    assert {member.since for member in it.task_table.members.values()} == {0}


def test_the_next_model_goes_out_with_the_next_task_and_to_nobody_at_work(make):
    it = make()
    it.part.dispatch(it.part.add_clients(it.clients))
    it.run.clock.wait_until(0.5)
    member = it.arrive(0)
    it.run.model, it.run.aggregations = np.array([3.0, 4.0]), 1
    it.part.take_model()
    it.part.dispatch(it.task_table.members.values())
    assert it.grid.asked() == [0, 1, 2, 0]
    task = it.under_way()[0]
    assert (task.version, task.base.tolist(), task.sent, member.tasks) == (1, [3.0, 4.0], 0.5, 2)
    assert it.due()[task.message_id] == pytest.approx(0.7)


def test_the_method_chooses_among_those_that_are_free(make):
    offered: list[list[int]] = []

    def choose(free: Any) -> Any:
        offered.append([member.client.index for member in free])
        return free[-1:]

    it = make(select_idle=choose)
    it.part.dispatch(it.part.add_clients(it.clients))
    it.part.dispatch(it.task_table.members.values())
    assert (offered, sorted(it.under_way())) == ([[0, 1, 2], [0, 1]], [1, 2])
    it.part.dispatch([])  # without places there is nobody else to choose
    assert len(offered) == 2


def test_with_places_the_method_is_asked_also_where_none_of_the_named_clients_is_free(make):
    it = make(concurrency=1, select_idle=lambda free: free[:1] or [it.task_table.members[2]])
    it.part.dispatch(it.part.add_clients(it.clients))
    it.part.dispatch([])
    assert sorted(it.under_way()) == [0, 2]


def test_another_model_and_vectors_beside_it_go_to_those_for_whom_the_method_says_so(make):
    earlier = np.array([7.0, 8.0])
    it = make(
        resend_model=lambda client: (0, earlier) if client.index == 1 else None,
        extra_vectors=lambda clients: iter({"h": np.full(2, float(c.index))} for c in clients),
    )
    it.run.aggregations = 5
    it.part.dispatch(it.part.add_clients(it.clients))
    # The sixth aggregation began before they came.
    assert {member.since for member in it.task_table.members.values()} == {6}
    tasks = it.under_way()
    assert [(tasks[i].version, tasks[i].extra_vectors["h"].tolist()) for i in range(3)] == [
        (5, [0.0, 0.0]),
        (0, [1.0, 1.0]),
        (5, [2.0, 2.0]),
    ]
    sent = {
        m.content["config"][messages.CLIENT]: m.content["arrays"]["w"].numpy() for m in it.grid.requests()
    }
    assert sent[1].tolist() == [7.0, 8.0]
    assert it.task_table.interval_stats.bytes_down == 6 * messages.num_bytes(model_of())


def test_a_task_of_fewer_steps_takes_as_much_less_time(make):
    it = make(task_steps=lambda client: client.index + 1)  # of 4
    it.part.dispatch(it.part.add_clients(it.clients))
    tasks = it.under_way()
    assert [tasks[i].steps for i in range(3)] == [1, 2, 3]
    assert [it.due()[tasks[i].message_id] for i in range(3)] == pytest.approx([0.05, 0.3, 0.75])
    assert it.grid.requests()[1].content["config"][messages.STEPS] == 2


def test_a_request_that_cannot_be_stored_is_a_lost_task(make):
    it = make()
    it.grid.lose(1, "unstorable")
    it.part.dispatch(it.part.add_clients(it.clients))
    assert {index: task.lost for index, task in it.under_way().items()} == {0: False, 1: True, 2: False}


def test_a_client_that_goes_before_its_end_is_sent_nothing_and_its_task_ends_then(make):
    it = make(config=AsynchronousConfig(task_failure=0.999999))
    it.part.dispatch(it.part.add_clients(it.clients))
    assert it.grid.asked() == []
    assert [task.dropped_out for task in it.under_way().values()] == [True] * 3
    assert all(0 < due < 1 for due in it.due().values())


def test_who_is_back_as_another_node_is_sent_the_model_and_its_former_task_is_forgotten(make):
    it = make()
    it.part.dispatch(it.part.add_clients(it.clients))
    node = it.grid.add(77, {**it.grid.node(1).context.node_config})
    it.part.dispatch(it.part.add_clients([Client(node.node_id, 1, 1, {})]))
    assert (len(it.task_table.tasks), it.under_way()[1].member.client.node_id) == (3, 77)


def test_a_dropped_client_gets_a_task_when_it_is_asked_again(make):
    it = make()
    it.part.dispatch(it.part.add_clients(it.clients))
    member = it.arrive(2)
    member.drop(0)
    it.task_table.changed()
    it.part.dispatch(it.part.retry(member))
    assert sorted(it.under_way()) == [0, 1, 2]
    assert member.dropped  # until it answers


def test_a_resumed_run_sends_the_same_models_with_the_same_due_times(make):
    first = make(task_steps=lambda client: 4)
    first.part.dispatch(first.part.add_clients(first.clients))
    first.run.clock.wait_until(0.2)
    first.arrive(0)
    first.task_table.queue.push(9.0, 0, Retry(first.task_table.members[0]))
    first.run.model, first.run.aggregations = np.array([3.0, 4.0]), 1
    state = {**first.task_table.state(), **first.run.scheduler.state()}
    again = make(task_steps=lambda client: 4)
    again.run.restore({**first.run.state(), **state})
    again.run.begin(model_of(), again.run.pop_resume_state())
    again.task_table.restore(state)
    again.part.take_model()
    again.part.dispatch(again.part.resume(more=True))
    tasks = again.under_way()
    assert sorted(tasks) == [0, 1, 2]  # client 0 was free, and is sent the new model
    assert [(tasks[i].version, tasks[i].sent, tasks[i].steps) for i in range(3)] == [
        (1, 0.2, 4),
        (0, 0.0, 4),
        (0, 0.0, 4),
    ]
    assert tasks[1].base.tolist() == [1.0, 2.0]
    assert [again.due()[tasks[i].message_id] for i in (1, 2)] == pytest.approx(TAU[1:])
    assert any(isinstance(item, Retry) and due == 9.0 for due, item in again.task_table.queue)
