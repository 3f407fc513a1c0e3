"""Real time: how long an answer is waited for, and what never comes."""

import time
from collections.abc import Iterable

import pytest
from flwr.app import Message, MetricRecord

from strategies import AsyncFedAvg, DivergedError, Progress, RunError, messages
from strategies.clock import WallClock
from strategies.ledger import Ledger, Member
from strategies.pace import WallPace
from strategies.roster import Client
from tests.strategies.events.runs import KINDS, Make, Start, delayed, text_of

pytestmark = pytest.mark.timeout(600)

# ---- Tasks -------------------------------------------------------------------------------------------------------


def test_a_tasks_deadline_by_hand() -> None:
    pace, member = WallPace(WallClock(), "F80", 0, 0.0), Member(Client(1, 0, 1, MetricRecord()))

    def due(timeout: float = 3600.0) -> float:
        return pace.due(member, 100.0, timeout, lost=False) - 100.0

    assert due() == 3600.0  # nothing is known of it
    member.seconds, member.answers, member.latest = 60.0, 3, 20.0
    assert due() == 100.0  # five times 20 s
    assert due(timeout=50.0) == 50.0
    member.latest = 90.0
    assert due() == 450.0  # it has become slower
    member.seconds, member.latest = 3.0, 1.0
    assert due() == 60.0
    member.misses = 2
    assert due() == 60.0  # others may wait for it
    member.misses = 3
    member.drop(0)
    assert due() == 480.0
    member.misses = 5
    assert due() == 60.0 * 32
    member.misses = 5000
    assert due() == 3600.0
    assert pace.times([member], Ledger()).tolist() == [1.0]  # what was given up is no observation


def test_a_client_that_has_become_far_slower_counts_again(
    federation: Make, start: Start, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    grid = delayed(federation(), 0.02, 0.03, 0.02)

    def observe(progress: Progress) -> None:
        if progress.clients and progress.clients["participation"][2] == 3:
            grid.node(2).delay = 0.4  # it had .15 s

    def enough() -> bool:
        return "client 2 answers again" in text_of(caplog)

    run = start(
        "async",
        grid,
        100_000,
        lr=0.01,
        clock=WallClock(),
        observe=observe,
        limit=60,
        timeout=30.0,
        stopped=enough,
    )
    assert text_of(caplog).count("client 2 is dropped") == 1
    assert run.strategy.ledger.members[2].latest > 0.3


# ---- Evaluations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["one", "all"])
def test_an_evaluation_that_is_lost_stops_no_other(
    federation: Make, start: Start, quick: None, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    """A device that starts anew loses what it was asked, and the SuperLink says nothing of it until the timeout."""
    grid = delayed(federation(), 0.01, 0.01, 0.01)

    def observe(progress: Progress) -> None:
        asked = len(grid.requests(messages.EVALUATE))
        for client in range(3) if which == "all" else [1]:
            grid.lose(client, "drop" if 6 <= asked < 9 else "not at all", "evaluate")

    began = time.monotonic()
    run = start(
        "async", grid, 100_000, lr=0.01, clock=WallClock(), observe=observe, fraction_evaluate=1.0, timeout=300.0,
        time_budget=1.5, limit=60,
    )  # fmt: skip
    assert time.monotonic() - began < 30
    evaluated = run.metric("client-loss")
    assert sum(value is not None for value in evaluated) > 4
    said = "client 0, client 1, client 2" if which == "all" else "client 1"
    number = "3 of 3" if which == "all" else "1 of 3"
    assert f": {number} haven't answered in time, it is without {said}" in text_of(caplog)


def test_one_that_is_lost_at_the_end_keeps_no_run(
    federation: Make, start: Start, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    grid = delayed(federation(), 0.01, 0.01, 0.01)
    lost = 40

    def observe(progress: Progress) -> None:
        if progress.aggregation == lost - 1:
            grid.lose(1, "drop", "evaluate")

    began = time.monotonic()
    run = start(
        "async", grid, lost, lr=0.01, clock=WallClock(), observe=observe, fraction_evaluate=1.0, timeout=300.0,
        limit=60,
    )  # fmt: skip
    assert time.monotonic() - began < 30
    assert run.seen[-1].aggregation == lost
    w, last = run.values[-1], run.seen[-1]
    assert last.metrics["client-loss"] == pytest.approx((1 * (3 - w) ** 2 + 5 * (-1 - w) ** 2) / 2 / 6)
    assert messages.EVALUATED not in last.metrics  # it is this model's
    assert (
        f"evaluation of aggregation {lost}: 1 of 3 haven't answered in time, it is without client 1"
        in text_of(caplog)
    )
    assert run.strategy.at_work() == []


def test_slow_evaluations_are_waited_for_once_they_are_known(
    federation: Make, model: Make, train_config: Make, quick: None
) -> None:
    grid, end = delayed(federation(), 0.01, 0.01, 0.01), time.monotonic() + 30
    push, slow, told = grid.push_messages, [], []

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        ids = []
        for request in requests:  # at first client 2 is as fast as the others, then it takes .4 s: it has .15
            evaluates = request.metadata.message_type == messages.EVALUATE
            node = grid.nodes[request.metadata.dst_node_id]
            later = evaluates and node is grid.node(2) and len(grid.requests(messages.EVALUATE)) >= 6
            node.delay = 0.4 if later else 0.01
            slow.extend([request.content.config_records["config"]["server-round"]] if later else [])
            ids += push([request])
        return ids

    grid.push_messages = pushed

    def observe(progress: Progress) -> None:
        if slow and progress.metrics.get(messages.EVALUATED, 0) >= slow[0]:
            told.append(progress.metrics["client-replies"])

    strategy = AsyncFedAvg(
        clock=WallClock(), observer=observe, stopped=lambda: told[-1:] == [3] or time.monotonic() > end, eval_every=1,
        evaluate_metrics_aggr_fn=lambda contents, key: MetricRecord({"replies": len(contents)}),
    )  # fmt: skip
    strategy.start(grid, model(1.0), num_rounds=100_000, timeout=300.0, train_config=train_config(1, 0.01))
    assert told[0] == 2  # the first is given up
    assert told[-1] == 3


# ---- Nobody ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", KINDS)
def test_an_app_that_always_raises_ends_a_run(
    federation: Make, start: Start, quick: None, scheme: str
) -> None:
    grid = federation()
    for client in range(3):
        grid.spoil(client, "raise")
    with pytest.raises(
        RunError, match=r"^no client is left: each was lost or failed; the last reason was .*out of memory"
    ):
        start(scheme, grid, 5, clock=WallClock(), limit=60)
    assert all(grid.asked().count(client) >= 4 for client in range(3))


def test_so_do_models_that_are_never_finite(federation: Make, start: Start, quick: None) -> None:
    grid = federation()
    for client in range(3):
        grid.spoil(client, "nan")
    with pytest.raises(DivergedError, match="no client is left"):
        start("async", grid, 5, clock=WallClock(), limit=60)


@pytest.mark.parametrize("how", ["silent", "worked"])
def test_whoever_may_be_well_again_is_waited_for(
    federation: Make, model: Make, train_config: Make, quick: None, how: str
) -> None:
    """One client never says anything; or all fail that did work before."""
    grid, began = delayed(federation(), 0.01, 0.01, 0.01), time.monotonic()
    for client in range(3):
        if how == "silent":
            grid.spoil(client, "raise")
    if how == "silent":
        grid.lose(2)

    def observe(progress: Progress) -> None:
        if progress.aggregation == 6:
            for client in range(3):
                grid.spoil(client, "raise")

    strategy = AsyncFedAvg(
        clock=WallClock(),
        observer=observe,
        stopped=lambda: time.monotonic() - began > 4.0,
        fraction_evaluate=0.0,
    )
    strategy.start(grid, model(1.0), num_rounds=100_000, timeout=0.3, train_config=train_config(1, 0.1))
    assert time.monotonic() - began > 4.0
    assert min(grid.asked().count(client) for client in range(2)) >= 4
