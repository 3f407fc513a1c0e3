"""Sending messages and waiting for replies, over a grid that loses, doubles and delays them."""

import time
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message

from strategies.flower import messages
from strategies.flower.exchange import exchange


@pytest.fixture
def requests(model):
    """Make a training request to every node of a grid."""

    def make(grid: Any) -> list[Message]:
        return [
            messages.request(messages.TRAIN, node_id, ConfigRecord(), ttl=60.0, arrays=model(1.0))
            for node_id in grid.nodes
        ]

    return make


def test_all_replies_come_by_node_id(federation, requests):
    grid = federation()
    replies = exchange(grid, requests(grid), timeout=10.0)
    assert replies.keys() == grid.nodes.keys()
    for node_id, reply in replies.items():
        assert reply.metadata.src_node_id == node_id
        # The sizes are 1, 2, 5: each reply is that of its own node.
        assert (
            messages.metrics_of(reply)["num-examples"]
            == grid.nodes[node_id].context.node_config["num-examples"]
        )


def test_no_messages_no_wait(federation):
    began = time.monotonic()
    assert exchange(federation(), [], timeout=10.0) == {}
    assert time.monotonic() - began < 9.0


def test_messages_may_come_from_a_generator(federation, requests):
    grid = federation()
    assert len(exchange(grid, (m for m in requests(grid)), timeout=10.0)) == 3


def test_a_reply_missing_at_the_deadline_is_given_up(federation, requests):
    grid, began = federation(), time.monotonic()
    grid.lose(1, "drop")
    replies = exchange(grid, requests(grid), timeout=0.1)
    assert grid.nodes.keys() - replies.keys() == {grid.node(1).node_id}
    assert 0.1 <= time.monotonic() - began < 9.0


def test_a_reply_that_needs_some_polls_is_waited_for(federation, requests):
    grid = federation()
    grid.node(2).delay = 0.05
    began = time.monotonic()
    assert len(exchange(grid, requests(grid), timeout=10.0)) == 3
    assert 0.05 <= time.monotonic() - began < 9.0


def test_a_reply_that_came_before_the_deadline_counts(federation, requests, monkeypatch):
    # One poll at the start, the next at the deadline: the reply of 0.05 s is there by then.
    monkeypatch.setattr("strategies.flower.exchange.SHORTEST_POLL", 0.2)
    monkeypatch.setattr("strategies.flower.exchange.LONGEST_POLL", 0.2)
    grid = federation()
    grid.node(2).delay = 0.05
    assert len(exchange(grid, requests(grid), timeout=0.2)) == 3


def test_a_second_reply_is_ignored(federation, requests):
    grid = federation()
    grid.lose(0, "twice")
    replies = exchange(grid, requests(grid), timeout=10.0)
    assert replies.keys() == grid.nodes.keys()
    assert grid.pull_messages([m.metadata.message_id for m in grid.sent]) == []


def test_a_message_the_grid_could_not_store_counts_as_missing(federation, requests):
    grid, began = federation(), time.monotonic()
    grid.lose(1, "unstorable")
    replies = exchange(grid, requests(grid), timeout=10.0)
    assert replies.keys() == {grid.node(0).node_id, grid.node(2).node_id}
    assert time.monotonic() - began < 9.0  # and isn't waited for


def test_a_grid_that_marks_unstorable_messages_with_none_is_understood(federation, requests, monkeypatch):
    # Flower's HttpGrid keeps the order and puts None where a message wasn't stored.
    grid = federation()
    grid.lose(1, "unstorable")
    push = grid.push_messages
    monkeypatch.setattr(grid, "push_messages", lambda batch: [None, *push(batch)])
    assert len(exchange(grid, requests(grid), timeout=10.0)) == 2


def test_an_error_from_the_superlink_is_the_reply_of_the_node_that_was_asked(federation, requests):
    # Such a reply says that it comes from the SuperLink (node 1).
    grid = federation()
    grid.lose(1, "unavailable")
    replies = exchange(grid, requests(grid), timeout=10.0)
    assert replies[grid.node(1).node_id].has_error()
    assert "Node Unavailable" in messages.reason_of(replies[grid.node(1).node_id])


def test_while_replies_come_there_is_no_wait_between_polls(federation, requests, monkeypatch):
    # A grid in this process works while it is polled, and hands its replies out a few at a time.
    grid, asked = federation(), [0]
    pull = grid.pull_messages

    def one_at_a_time(ids: list[str]) -> list[Message]:
        asked[0] += 1
        return list(pull(ids[:1]))

    monkeypatch.setattr(grid, "pull_messages", one_at_a_time)
    monkeypatch.setattr("strategies.flower.exchange.SHORTEST_POLL", 100.0)
    monkeypatch.setattr("strategies.flower.exchange.LONGEST_POLL", 100.0)
    began = time.monotonic()
    assert len(exchange(grid, requests(grid), timeout=200.0)) == 3
    assert asked == [3]
    assert time.monotonic() - began < 50.0


def test_stopped_ends_the_wait_at_once(federation, requests):
    grid, began = federation(), time.monotonic()
    grid.lose(1, "drop")
    asked: list[float] = []

    def should_stop() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 3

    replies = exchange(grid, requests(grid), timeout=60.0, should_stop=should_stop)
    assert time.monotonic() - began < 30.0
    assert len(replies) == 2  # what has come is returned
    assert len(asked) == 4
