"""Pending replies alone: who is waited for, until each has answered or the wait is over."""

from flwr.app import Message, MetricRecord, RecordDict

from strategies.clients.roster import Client
from strategies.core.requests import PendingReplies
from tests.strategies.parts import run_of


def test_who_has_not_answered_is_at_work_until_the_wait_is_over(federation):
    grid = federation()
    nodes = list(grid.get_node_ids())
    run = run_of([Client(node, i, 1, MetricRecord()) for i, node in enumerate(nodes)])
    part, told = PendingReplies(run), []
    requests = [Message(RecordDict(), node, "query.describe") for node in nodes[:2]]
    seen = []
    for reply in part.awaited(grid, requests, told.append):
        seen.append(reply.metadata.src_node_id)
        assert sorted(part.busy_clients()) == sorted({0, 1} - set(told))
    assert sorted(seen) == sorted(nodes[:2])
    assert (sorted(told), part.busy_clients()) == ([0, 1], [])


def test_an_answer_counts_once():
    part = PendingReplies(run_of())
    part.expect({11: 0, 12: 1})
    assert part.busy_clients() == [0, 1]
    assert [part.answered(node) for node in (12, 12, 13)] == [1, None, None]
    assert part.busy_clients() == [0]
