"""Clients that fail, in virtual time."""

from collections.abc import Iterable

import pytest
from flwr.app import Message

from strategies import RunError
from strategies.flower import messages
from tests.strategies.events.runs import BAD, KINDS, bits, losses, text_of

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("fault", [*BAD, "unavailable", "unstorable", "drop"])
def test_a_client_that_never_answers_well_is_dropped_in_virtual_time(federation, start, caplog, fault):
    # p = (1, 2, 5)/8, τ = (.2, .6, 1). Client 2 misses at 1, 2 and 3 s and is dropped; then p = (1/3, 2/3)
    # Σ 1/τ = 20/3, d = 20/3 τ p = (4/9, 8/3).
    grid = federation()
    if fault in BAD:
        grid.spoil(2, fault)
    else:
        grid.lose(2, fault)
    run = start("async", grid, 30, lr=0.1, timeout=0.05)
    assert run.metric("contributions") == [1] * 30
    at = {p.aggregation: p for p in run.seen}
    before = [p for p in run.seen[1:] if p.time < 2.99][-1]
    after = run.seen[-1]
    assert after.time > 3.0
    assert before.clients["importance"] == [0.125, 0.25, 0.625]
    assert after.clients["importance"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert after.clients["weight"] == pytest.approx([4 / 9, 8 / 3, 0])
    assert after.clients["participation"][2] == 0
    assert sum(after.clients["participation"]) == 30 == len(at) - 1
    assert sum(run.metric("failures")) == 3
    assert "client 2 is dropped after 3 misses in a row" in text_of(caplog)
    assert text_of(caplog).count("is dropped") == 1
    assert f"client 2 (node {grid.node(2).node_id}), task 1: " in text_of(caplog)


def test_a_dropped_client_is_asked_again_and_counts_again(federation, start, caplog):
    # Dropped at 3 s, asked again at 3 + 10·1 s, due at 14 s. Until then 70 of client 0, 23 of client 1.
    grid = federation()
    grid.spoil(2, "raise")
    run = start("async", grid, 105, lr=0.05, observe=lambda p: grid.spoil(2, None) if p.time > 5 else None)
    back = next(p for p in run.seen[1:] if p.clients["participation"][2] == 1)
    assert back.time == pytest.approx(14.0)
    assert back.clients["importance"] == [0.125, 0.25, 0.625]
    assert back.clients["weight"] == pytest.approx([0.575 / 3, 1.15, 14.375 / 3])
    assert run.seen[back.aggregation - 1].clients["importance"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert (
        grid.asked()[: back.aggregation + 10].count(2) == 5
    )  # three, the fourth at 13 s, and the one after it
    assert text_of(caplog).count("client 2 answers again and counts again") == 1


def test_a_dropped_client_is_asked_again_after_ten_of_its_task_times(federation, start):
    grid = federation()
    grid.spoil(2, "raise")  # its tasks take 1 s
    run = start("async", grid, 200, lr=0.01, time_budget=13.5)
    timeline = run.strategy.session.timeline
    began = [span.began for span in [*timeline.take(), *timeline.under_way(13.5)] if span.client == 2]
    assert began == pytest.approx([0.0, 1.0, 2.0, 13.0])


def test_single_misses_do_not_add_up(federation, start, caplog):
    grid = federation()
    push = grid.push_messages

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        ids = []
        for m in requests:  # client 0 does every third task only
            grid.spoil(0, "raise" if m.content.config_records["config"].get(messages.TASK, 0) % 3 else None)
            ids += push([m])
        return ids

    grid.push_messages = pushed
    run = start("async", grid, 30, lr=0.1)
    assert sum(run.metric("failures")) > 6
    assert run.seen[-1].clients["participation"][0] > 3
    assert "is dropped" not in text_of(caplog)


@pytest.mark.parametrize("scheme", KINDS)
def test_a_doubled_reply_counts_once(federation, start, scheme):
    plain = start(scheme, federation(), 12, lr=0.1)
    grid = federation()
    for client in range(3):
        grid.lose(client, "twice")
    doubled = start(scheme, grid, 12, lr=0.1)
    assert bits(doubled) == bits(plain)
    assert doubled.events() == plain.events()


@pytest.mark.parametrize("fault", ["raise", "nan", "unavailable"])
def test_fedbuff_does_not_wait_for_a_dropped_client(federation, start, fault):
    """m = C: two contributions wait in the buffer when the third client is dropped."""
    grid = federation()
    grid.spoil(2, fault) if fault in BAD else grid.lose(2, fault)
    run = start("fedbuff", grid, 6, lr=0.1, buffer_size=3, limit=30, timeout=3600.0)
    # Misses at 1, 2, 3 s; then 0 and 1 by themselves, at 3 s, 3.6 s, …
    assert [p.time for p in run.seen[1:]] == pytest.approx([3.0, 3.6, 4.2, 4.8, 5.4, 6.0])
    assert run.seen[-1].clients["participation"] == [6, 6, 0]
    assert run.seen[-1].clients["weight"] == pytest.approx([1 / 3, 2 / 3, 0])


@pytest.mark.parametrize("scheme", KINDS)
def test_when_all_clients_fail_for_good_the_run_ends_with_an_error_that_says_so(federation, start, scheme):
    grid = federation()
    for client in range(3):
        grid.spoil(client, "raise")
    with pytest.raises(RuntimeError, match="no client is left"):
        start(scheme, grid, 50, limit=30, timeout=3600.0)


@pytest.mark.parametrize("scheme", KINDS)
def test_a_time_budget_ends_a_run_whose_clients_all_fail(federation, start, scheme):
    grid = federation()
    for client in range(3):
        grid.spoil(client, "raise")
    # Two misses each at most of the slow: not all dropped.
    with pytest.raises(RunError, match=r"^no client's work was accepted in"):
        start(scheme, grid, 3, limit=30, timeout=3600.0, time_budget=2.5)


def test_after_a_fault_the_losses_are_weighed_by_the_same_p_as_all_else(federation, start):
    grid = federation()
    grid.spoil(2, "raise")
    last = start("async", grid, 30, lr=0.1, evaluate=losses).seen[-1]
    # p = (1/3, 2/3, 0) after the drop: 8/3 + 8/3.
    assert last.clients["importance"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert last.metrics["surrogate-loss"] == pytest.approx(16 / 3)
    assert last.metrics["federated-loss"] == pytest.approx(16 / 3)
