"""The handshake: which node is which client, and what becomes of nodes that come late, leave or answer badly."""

import logging
import threading
from itertools import permutations
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from strategies import AsyncFedAvg, FedAvg, RunError
from strategies.clients.roster import Client, Roster
from strategies.clock import WallClock
from strategies.flower import messages
from strategies.flower.exchange import wait_for_nodes
from strategies.flower.grids import NodeChanges

LOGGER = "flwr.strategies"


def refresh(roster: Roster, grid: Any) -> list[Client]:
    return roster.refresh(grid, ConfigRecord())


def partitions(clients: list[Client], grid: Any) -> list[int]:
    """Return the partition that each client's node really holds."""
    return [grid.nodes[client.node_id].context.node_config["partition-id"] for client in clients]


@pytest.mark.parametrize("node_ids", list(permutations([10, 20, 30])))
def test_clients_are_ordered_by_partition_whatever_their_node_ids(federation, node_ids):
    grid = federation(node_ids=node_ids)
    clients = refresh(Roster(), grid)
    assert [(c.index, c.node_id, c.num_examples) for c in clients] == [
        (0, node_ids[0], 1),
        (1, node_ids[1], 2),
        (2, node_ids[2], 5),
    ]
    assert [c.description["partition-id"] for c in clients] == [0, 1, 2]


def test_nobody_is_asked_twice(federation):
    grid, roster = federation(), Roster()
    assert refresh(roster, grid) == refresh(roster, grid)
    assert sorted(grid.asked(messages.DESCRIBE)) == [0, 1, 2]


def test_the_config_goes_with_the_question(federation):
    grid = federation()
    Roster().refresh(grid, ConfigRecord({"dataset": "digits"}))
    for request in grid.requests(messages.DESCRIBE):
        assert request.content.config_records["config"]["dataset"] == "digits"


def test_without_a_handler_clients_are_ordered_by_node_id_and_have_no_size(federation, caplog):
    grid = federation(node_ids=[30, 10, 20], describes=False)
    with caplog.at_level(logging.INFO, LOGGER):
        clients = refresh(Roster(), grid)
    assert [(c.index, c.node_id, c.num_examples) for c in clients] == [
        (0, 10, None),
        (1, 20, None),
        (2, 30, None),
    ]
    said = "3 clients: no answer to query.describe (the app has no handler of it, which may be left out): ordered by"
    assert said in caplog.text
    assert len(grid.requests("query.describe")) == 1  # one that has no handler answers for all


def test_without_a_handler_a_late_joiner_is_the_last(federation, add_node):
    grid, roster = federation(node_ids=[30, 10, 20], describes=False), Roster()
    refresh(roster, grid)
    add_node(grid, like=0, partition=3, node_id=5)
    assert [c.node_id for c in refresh(roster, grid)] == [10, 20, 30, 5]


def test_without_a_handler_a_silent_node_does_not_stop_the_others(federation, caplog):
    grid = federation(describes=False, node_ids=[30, 10, 20])
    grid.lose(1, "drop", "query")
    with caplog.at_level(logging.WARNING, LOGGER):
        clients = refresh(Roster(timeout=0.05), grid)
    assert sorted(partitions(clients, grid)) == [0, 2]
    assert f"node {grid.node(1).node_id} can't take part: no answer" in caplog.text


@pytest.mark.parametrize("fault", ["refuse", "drop", "unavailable"])
def test_a_node_whose_description_fails_is_left_out_and_named(federation, caplog, fault):
    grid, roster = federation(), Roster(timeout=0.05)
    if fault == "refuse":
        grid.spoil(1, "refuse", "query")
    else:
        grid.lose(1, fault, "query")
    with caplog.at_level(logging.WARNING, LOGGER):
        clients = refresh(roster, grid)
    assert [c.index for c in clients] == [0, 2]
    (warning,) = [r.getMessage() for r in caplog.records if "can't take part" in r.getMessage()]
    assert f"node {grid.node(1).node_id} " in warning
    assert {"refuse": "out of memory", "drop": "no answer", "unavailable": "Node Unavailable"}[
        fault
    ] in warning
    assert refresh(roster, grid) == clients  # and isn't asked again
    assert sorted(grid.asked(messages.DESCRIBE)) == [0, 1, 2]


@pytest.mark.parametrize("poll", ["refresh", "poll"])
def test_a_node_that_was_offline_when_it_was_asked_takes_part_once_it_is_back(federation, poll):
    grid, roster = federation(), Roster()
    node = grid.node(1)
    node.transport["query"] = "unavailable"  # restarted just then; a device with a key keeps its node id
    assert [c.index for c in refresh(roster, grid)] == [0, 2]
    node.transport.clear()
    node.present = False
    assert [c.index for c in getattr(roster, poll)(grid, ConfigRecord())] == [0, 2]
    node.present = True
    for _ in range(2):  # without waiting, the answer is there at the next look
        clients = getattr(roster, poll)(grid, ConfigRecord())
    assert [c.index for c in clients] == [0, 1, 2]
    assert sorted(grid.asked(messages.DESCRIBE)) == [0, 1, 1, 2]


@pytest.mark.parametrize("value", ["list", "nan", "inf", "negative"])
@pytest.mark.parametrize("key", ["partition-id", "num-examples", "num-partitions"])
def test_a_senseless_description_does_not_stop_the_server(federation, caplog, key, value):
    grid = federation(num_partitions=3)
    grid.spoil(1, f"metric:{key}={value}", "query")
    with caplog.at_level(logging.WARNING, LOGGER):
        clients = refresh(Roster(timeout=0.05), grid)
    assert {0, 2} <= set(partitions(clients, grid))
    assert len({c.index for c in clients}) == len(clients)
    assert all(c.num_examples is None or c.num_examples >= 0 for c in clients)


def test_a_late_joiner_is_taken_in_at_the_next_refresh(federation, add_node):
    grid, roster = federation(), Roster()
    assert [c.index for c in refresh(roster, grid)] == [0, 1, 2]
    add_node(grid, like=0, partition=3, node_id=99)
    assert [c.index for c in refresh(roster, grid)] == [0, 1, 2, 3]
    assert roster.clients[3].node_id == 99


def test_a_node_that_left_is_no_client_until_it_is_back(federation):
    grid, roster = federation(), Roster()
    everyone = refresh(roster, grid)
    grid.node(1).present = False
    assert [c.index for c in refresh(roster, grid)] == [0, 2]
    grid.node(1).present = True
    assert refresh(roster, grid) == everyone
    assert sorted(grid.asked(messages.DESCRIBE)) == [0, 1, 2]


def test_a_grid_that_says_who_came_and_went_is_not_asked_for_all_nodes(federation, add_node, monkeypatch):
    grid, changed, asked = federation(), list[tuple[int, bool]](), list[int]()

    def node_changes(since: int) -> NodeChanges:
        asked.append(since)
        last = dict(changed[since:])
        came = [node for node, there in last.items() if there]
        return NodeChanges(len(changed), came, [node for node in last if node not in came])

    changed += [(node, True) for node in grid.nodes]
    grid.node_changes = node_changes
    roster = Roster()
    assert [client.index for client in refresh(roster, grid)] == [0, 1, 2]
    monkeypatch.setattr(grid, "get_node_ids", None)
    assert [client.index for client in roster.poll(grid, ConfigRecord())] == [0, 1, 2]
    gone = grid.node(1).node_id
    grid.node(1).present = False
    changed.append((gone, False))
    assert [client.index for client in roster.poll(grid, ConfigRecord())] == [0, 2]
    successor = add_node(grid, 1, partition=1, node_id=99).node_id
    changed += [(successor, True), (gone, True), (gone, False)]
    assert [client.node_id for client in roster.poll(grid, ConfigRecord()) if client.index == 1] == [
        successor
    ]
    changed.append((gone, True))  # the node that replaced it stays
    assert [client.node_id for client in roster.poll(grid, ConfigRecord()) if client.index == 1] == [
        successor
    ]
    assert asked == sorted(asked)


def test_a_run_waits_when_all_nodes_are_away(federation, caplog):
    grid, roster = federation(), Roster(timeout=30.0)
    refresh(roster, grid)
    for partition in range(3):
        grid.node(partition).present = False

    def come_back() -> None:
        grid.node(2).present = True

    timer = threading.Timer(0.3, come_back)
    timer.start()
    with caplog.at_level(logging.WARNING, LOGGER):
        assert [c.index for c in refresh(roster, grid)] == [2]
    timer.join()
    assert "no client is connected, the run waits for one for up to 30 s" in caplog.text
    grid.node(2).present = False
    roster.timeout = 0.2
    with pytest.raises(RuntimeError, match="no client can take part"):
        refresh(roster, grid)


def test_a_node_that_does_not_say_its_partition_takes_no_other_clients_place(federation):
    grid = federation(node_ids=[10, 20, 30])
    del grid.node(1).context.node_config["partition-id"]
    clients = refresh(Roster(), grid)
    assert [(c.index, c.node_id) for c in clients] == [(0, 10), (2, 30), (3, 20)]


def test_who_has_not_answered_an_evaluation_is_named_also_when_gone(federation, caplog):
    strategy = AsyncFedAvg()
    grid = federation(range(12), [1] * 12, node_ids=[100 - i for i in range(12)])
    strategy.session.run.clients = refresh(strategy.session.population.roster, grid)
    grid.node(1).present = False
    strategy.session.run.clients = strategy.session.population.roster.poll(grid, ConfigRecord())
    with caplog.at_level(logging.WARNING, LOGGER):
        for number, late in enumerate(([99], [7, 98, 99], list(grid.nodes)), 40):
            strategy.session.evaluator.name_missing(number, late, len(late))
    without = [r.getMessage().rpartition("it is without ")[2] for r in caplog.records]
    ten = ", ".join(f"client {i}" for i in range(10))
    assert without == ["client 1", "client 1, client 2, node 7", f"{ten} and 2 more"]


def test_a_second_node_of_a_partition_is_refused_and_named(federation, add_node, caplog):
    grid = federation(node_ids=[10, 20, 30])
    add_node(grid, like=1, partition=1, node_id=99)
    with caplog.at_level(logging.WARNING, LOGGER):
        clients = refresh(Roster(), grid)
    assert [c.node_id for c in clients] == [10, 20, 30]
    assert "node 99 can't take part: client 1 is node 20 already" in caplog.text


def test_a_node_that_takes_over_a_partition_becomes_its_client(federation, add_node):
    grid, roster = federation(node_ids=[10, 20, 30]), Roster()
    refresh(roster, grid)
    grid.nodes[20].present = False
    add_node(grid, like=1, partition=1, node_id=99)
    assert [(c.index, c.node_id) for c in refresh(roster, grid)] == [(0, 10), (1, 99), (2, 30)]
    grid.nodes[20].present = True  # which doesn't make its client two
    assert [c.index for c in refresh(roster, grid)] == [0, 1, 2]


def test_start_up_waits_until_all_partitions_are_there(federation):
    # A simulation registers its nodes while the ServerApp is already running.
    grid = federation(num_partitions=3)
    grid.node(2).joins_after = 6
    assert [c.index for c in refresh(Roster(), grid)] == [0, 1, 2]


def test_start_up_waits_for_as_many_as_most_say_there_are(federation):
    grid = federation(num_partitions=3)
    grid.node(1).context.node_config["num-partitions"] = 4
    assert [c.index for c in refresh(Roster(timeout=0.05), grid)] == [0, 1, 2]


def test_a_partition_far_beyond_the_clients_is_refused(federation, caplog):
    grid = federation(node_ids=[10, 20, 30], num_partitions=3)
    grid.nodes[20].context.node_config["partition-id"] = 10**9  # lists by client would be as long
    with caplog.at_level(logging.WARNING, LOGGER):
        assert [c.index for c in refresh(Roster(), grid)] == [0, 2]
    assert "node 20 can't take part: partition-id = 1000000000: must be 0 to 99999" in caplog.text


def test_without_num_partitions_it_starts_with_those_that_are_there(federation):
    grid = federation()
    grid.node(2).joins_after = 6
    assert [c.index for c in refresh(Roster(), grid)] == [0, 1]


def test_a_run_under_way_does_not_wait_for_nodes_that_left(federation, add_node):
    # Two of three leave, one comes back under a new node id: go on with two, not fail for want of three.
    grid, roster = federation(node_ids=[10, 20, 30], num_partitions=3), Roster(timeout=0.1)
    refresh(roster, grid)
    grid.nodes[10].present = grid.nodes[20].present = False
    add_node(grid, like=0, partition=0, node_id=99)
    assert [(c.index, c.node_id) for c in refresh(roster, grid)] == [(0, 99), (2, 30)]


def test_so_many_nodes_are_waited_for_every_time_where_that_is_asked_for(federation, caplog):
    grid, roster = federation(node_ids=[10, 20, 30]), Roster(min_nodes=3, timeout=10.0)
    refresh(roster, grid)
    grid.nodes[20].joins_after = 5  # it is away, and comes back
    with caplog.at_level(logging.WARNING, LOGGER):
        assert [c.index for c in refresh(roster, grid)] == [0, 1, 2]
    said = [r.getMessage() for r in caplog.records]
    assert said == ["2 clients are connected, the run waits for 3 (min_available_nodes) for up to 10 s"]
    grid.nodes[20].present, roster.timeout = False, 0.05
    with pytest.raises(RunError, match=r"^2 of 3 clients connected within 0\.05 s$"):
        refresh(roster, grid)


@pytest.mark.parametrize(("options", "rounds"), [({"min_available_nodes": 3}, 3), ({"min_clients": 3}, 0)])
def test_that_is_min_available_nodes_and_not_min_clients(options, rounds):
    roster = FedAvg(**options).session.population.roster
    assert (roster.min_clients, roster.min_nodes) == (3, rounds)


def test_no_client_at_all_is_an_error(federation, caplog):
    grid = federation()
    for partition in range(3):
        grid.spoil(partition, "refuse", "query")
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        pytest.raises(RuntimeError, match="no client can take part"),
    ):
        refresh(Roster(), grid)
    for node_id in grid.nodes:
        assert f"node {node_id} can't take part" in caplog.text


def test_too_few_clients_within_the_timeout_is_an_error(federation):
    with pytest.raises(RuntimeError, match=r"3 of 4 clients connected within 0\.05 s"):
        refresh(Roster(min_clients=4, timeout=0.05), federation())


def test_min_clients_are_waited_for(federation):
    grid = federation()
    grid.node(1).joins_after = 6
    assert [c.index for c in refresh(Roster(min_clients=3), grid)] == [0, 1, 2]


def test_nodes_are_waited_for_until_no_more_come(federation):
    grid = federation()
    for partition, looks in enumerate([0, 1, 2]):  # one more at each look
        grid.node(partition).joins_after = looks
    assert len(wait_for_nodes(grid, 1, timeout=10.0)) == 3


def test_a_grid_whose_nodes_are_all_connected_is_asked_for_them_once(federation, monkeypatch):
    monkeypatch.setattr(WallClock, "wait_until", lambda *_: pytest.fail("waited"))
    assert len(wait_for_nodes(federation(), 3, timeout=10.0)) == 3


def test_a_stop_ends_the_wait_for_nodes(federation):
    assert len(wait_for_nodes(federation(), 4, timeout=60.0, should_stop=lambda: True)) == 3


@pytest.mark.parametrize("answers", [0, 1, 5])
def test_a_stop_ends_the_handshake(federation, answers):
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        assert asked < 200, "asked 200 times, answered yes, and still going"
        return asked > answers

    grid = federation()
    for partition in range(3):
        grid.lose(partition, "drop", "query")
    assert refresh(Roster(timeout=60.0, should_stop=should_stop), grid) == []


# ---- Reading messages -------------------------------------------------------------------------------------------


def _reply(content: RecordDict | Error) -> Message:
    return Message(content, reply_to=messages.request(messages.TRAIN, 5, ConfigRecord(), ttl=60.0))


def test_metrics_under_another_name_are_found():
    metrics = MetricRecord({"num-examples": 3})
    assert messages.metrics_of(_reply(RecordDict({"fit": metrics}))) == metrics
    both = RecordDict({"fit": MetricRecord({"num-examples": 4}), "metrics": metrics})
    assert messages.metrics_of(_reply(both)) == metrics
    assert messages.metrics_of(_reply(RecordDict())) == MetricRecord()


def test_the_reason_is_the_last_line_of_a_traceback():
    reason = "Traceback (most recent call last):\n  File ...\nRuntimeError: out of memory\n"
    assert messages.reason_of(_reply(Error(code=2, reason=reason))) == "RuntimeError: out of memory"
    assert messages.reason_of(_reply(Error(code=2))) == "error code 2"
    assert messages.reason_of(_reply(Error(code=3, reason="Message Unavailable"))) == messages.NO_REPLY
    assert len(messages.reason_of(_reply(Error(code=2, reason="x" * 10_000)))) == 500


def test_what_the_superlink_says_by_itself_is_no_fault_of_the_devices():
    codes = {code: messages.fault_of(_reply(Error(code))) for code in range(9)}
    assert [code for code, fault in codes.items() if fault == messages.LATE] == [3, 4]
    assert codes[5] == messages.LOST  # it went while it worked
    assert {codes[code] for code in (0, 1, 2, 6, 7, 8)} == {messages.FAILED}
    assert messages.fault_of(None) == messages.LATE
    assert messages.fault_of(_reply(RecordDict())) == messages.REFUSED
