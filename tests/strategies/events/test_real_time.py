"""Real time: estimates, intervals, and clients that fail, leave and come back."""

import gc
import time
from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

from strategies import Progress
from strategies.clock import RESOLUTION, VirtualClock, WallClock
from strategies.events.tasks import Task
from strategies.flower import messages
from tests.selection import THOROUGH
from tests.strategies.events.runs import BAD, KINDS, check_accounts, delayed, text_of

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("scheme", KINDS)
def test_wall_time_without_faults(federation, start, quick, scheme):
    grid = delayed(federation(), 0.02, 0.04, 0.06)
    run = (
        start(scheme, grid, 12, lr=0.1, clock=WallClock(), fedfix_interval=0.05)
        if scheme == "fedfix"
        else start(scheme, grid, 12, lr=0.1, clock=WallClock())
    )
    assert [p.aggregation for p in run.seen] == list(range(13))
    check_accounts(run)
    assert sum(run.metric("failures")) == 0
    assert run.evaluations[-1].clients["participation"][0] > 0
    assert all(n <= 1 for n in grid.under_way().values())  # one task per client at a time
    assert run.events()[-1][1] is not None  # staleness as reported, checked inside


def test_task_times_are_running_means_of_what_was_observed(federation, start, quick):
    grid, sent, observed = delayed(federation(), 0.03, 0.08, 30.0), {}, {0: [], 1: []}
    push, pull = grid.push_messages, grid.pull_messages

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        requests = list(requests)
        ids = push(requests)
        for m in requests:
            sent[m.metadata.message_id] = (
                time.monotonic(),
                m.content.config_records["config"].get(messages.CLIENT),
            )
        return ids

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        replies = pull(message_ids)
        for m in replies:
            began, client = sent[m.metadata.reply_to_message_id]
            if client in observed:
                observed[client].append(time.monotonic() - began)
                grid.node(0).delay = 0.09  # slower from its second task on
        return replies

    grid.push_messages, grid.pull_messages = pushed, pulled
    run = start("async", grid, 8, lr=0.1, clock=WallClock(), timeout=30.0, safeguards="off")
    last = run.seen[-1].clients
    tau = last["task-time"]
    assert len(observed[0]) >= 3
    assert observed[0][1] > 0.06  # of 0.03 and 0.09
    for client in range(
        2
    ):  # as long as they took, but for what a busy machine adds between two looks at the clock
        assert 0.5 * min(observed[client]) < tau[client] < 2 * max(observed[client])
    assert tau[2] == pytest.approx(np.mean(tau[:2]))  # it hasn't answered: the mean of the others
    # The weights use these estimates (eq. 36), and the report has them.
    expected = sum(1 / t for t in tau) * np.array(tau) * [0.125, 0.25, 0.625]
    assert last["weight"] == pytest.approx(expected.tolist(), rel=1e-9)
    assert last["expected-share"] == pytest.approx([0.125, 0.25, 0.625])
    first = run.seen[1].clients["task-time"]
    assert first == pytest.approx([first[0]] * 3)  # when only one has answered, all are like it


def test_fedfix_never_aggregates_before_an_interval_is_over(federation, start, quick):
    run = start(
        "fedfix", delayed(federation(), 0.01, 0.12, 0.25), 5, lr=0.1, clock=WallClock(), fedfix_interval=0.1
    )
    for number, progress in enumerate(run.seen[1:], 1):
        assert progress.time >= 0.1 * number - RESOLUTION  # never early; late where the machine is busy
    assert run.seen[-1].clients["participation"][0] >= 3
    check_accounts(run)


def test_fedfix_counts_its_intervals_from_the_first_task(federation, start, quick):
    """The clock has run for a while, as through Ray's start and the handshake: no burst of empty intervals."""
    clock, before = WallClock(), time.monotonic()
    time.sleep(0.3)
    run = start(
        "fedfix", delayed(federation(), 0.01, 0.02, 0.03), 3, lr=0.1, clock=clock, fedfix_interval=0.1
    )
    assert run.seen[1].time >= 0.1
    assert clock.now() <= time.monotonic() - before - 0.3
    assert all(run.metric("contributions"))


def test_fedfix_does_not_make_up_for_missed_intervals(federation, start, quick):
    def evaluate(aggregation: int, arrays: ArrayRecord) -> MetricRecord:
        time.sleep(0.3 if aggregation == 1 else 0.0)
        return MetricRecord({"loss": 1.0})

    run = start(
        "fedfix",
        delayed(federation(), 0.01, 0.02, 0.03),
        4,
        lr=0.1,
        clock=WallClock(),
        fedfix_interval=0.1,
        evaluate=evaluate,
    )
    assert all(c >= 1 for c in run.metric("contributions"))


@pytest.mark.parametrize("scheme", ["async", "fedfix"])
def test_no_busy_waiting(federation, start, scheme):
    grid, pulls = delayed(federation(), 0.4, 0.4, 0.4), [0]
    pull = grid.pull_messages

    def counted(message_ids: Iterable[str]) -> Iterable[Message]:
        pulls[0] += 1
        return pull(message_ids)

    grid.pull_messages = counted
    used = time.process_time()
    options = {"fedfix_interval": 0.6} if scheme == "fedfix" else {}
    run = start(scheme, grid, 1, lr=0.1, clock=WallClock(), **options)
    assert pulls[0] < 120
    assert time.process_time() - used < 0.2
    if scheme == "async":
        assert 0.4 <= run.seen[1].time < 30  # and it is noticed soon, if the machine isn't busy


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [("async", fault) for fault in (*BAD[:2], "unavailable", "unstorable", "drop", "twice")]
    + [("fedbuff", fault) for fault in ("raise", "unstorable", "drop", "twice")]
    # In virtual time all are in the default run.
    + [pytest.param("async", fault, marks=THOROUGH) for fault in BAD[2:]],
)
def test_wall_faults_do_not_stall_the_loop(federation, start, quick, caplog, scheme, fault):
    grid = delayed(federation(), 0.01, 0.02, 0.02)
    if fault in BAD:
        grid.spoil(2, fault)
    else:
        grid.lose(2, fault)
    enough = [False]

    def observe(progress: Progress) -> None:  # until client 2 is dropped, and a little longer
        dropped = progress.clients and progress.clients["importance"][2] == 0
        enough[0] = enough[0] or (progress.time > 0.3 if fault == "twice" else bool(dropped))

    options = {"buffer_size": 3} if scheme == "fedbuff" else {}
    run = start(
        scheme,
        grid,
        100_000,
        lr=0.01,
        clock=WallClock(),
        timeout=0.15,
        observe=observe,
        limit=40,
        should_stop=lambda: enough[0],
        **options,
    )
    check_accounts(run)
    if fault == "twice":
        assert sum(run.metric("failures")) == 0
        return
    assert run.evaluations[-1].clients["participation"][2] == 0
    assert run.evaluations[-1].clients["importance"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert text_of(caplog).count("client 2 is dropped after 3 misses in a row") == 1


def test_a_late_reply_to_an_abandoned_task_is_never_counted(federation, start, quick):
    grid = delayed(federation(), 0.02, 0.02, 0.25)  # given up after .15 s; its replies come later
    run = start("async", grid, 100_000, lr=0.01, clock=WallClock(), timeout=0.15, limit=50, time_budget=0.8)
    check_accounts(run)
    assert run.evaluations[-1].clients["participation"][2] == 0
    assert sum(p.metrics.get("failures", 0) for p in run.seen) >= 3


def test_a_node_that_comes_back_under_another_id(federation, start, add_node, quick, monkeypatch, caplog):
    """It is dropped, comes back, and is then asked once at a time: not for its retry on top."""
    monkeypatch.setattr("strategies.timing.scheduler.SHORTEST_DEADLINE", 5.0)  # no task is given up
    grid = delayed(federation(), 0.02, 0.03, 0.02)
    grid.spoil(2, "raise")

    def observe(progress: Progress) -> None:
        if progress.clients and progress.clients["importance"][2] == 0 and 77 not in grid.nodes:
            grid.node(2).present = False
            add_node(grid, 2, 2, 77, **{"fault-train": ""}).context.node_config.pop("fault-train")
            grid.nodes[77].delay = 0.02

    def enough() -> bool:
        return sum(message.metadata.dst_node_id == 77 for message in grid.requests()) > 8

    run = start(
        "async", grid, 100_000, lr=0.01, clock=WallClock(), observe=observe, limit=60, should_stop=enough
    )
    check_accounts(run)
    assert text_of(caplog).count("client 2 is dropped") == 1
    assert text_of(caplog).count("client 2 is back, as node 77") == 1
    last = run.evaluations[-1].clients
    assert last["participation"][2] > 3
    assert last["importance"] == [1 / 7, 2 / 7, 4 / 7]  # 5 is more than twice the median
    assert all(count <= 1 for count in grid.under_way().values())


def test_a_stale_retry_does_not_double_work_that_waits_in_the_buffer(federation, start, add_node, quick):
    """FedFix: dropped, back as another node, and its work waits for the interval's end when the retry is due."""
    grid = delayed(federation(), 0.02, 0.02, 0.02)
    grid.spoil(2, "raise")
    push = grid.push_messages

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        ids = push(requests)
        if grid.asked().count(2) >= 3 and 77 not in grid.nodes:  # its third task fails too
            node = add_node(grid, 2, 2, 77)
            node.delay = 0.02
            node.context.node_config.pop("fault-train")
            next(n for n in grid.nodes.values() if "fault-train" in n.context.node_config).present = False
        return ids

    grid.push_messages = pushed
    run = start("fedfix", grid, 4, lr=0.01, clock=WallClock(), fedfix_interval=0.2)
    check_accounts(run)
    assert 77 in {m.metadata.dst_node_id for m in grid.requests()}
    assert np.diff([p.clients["participation"][2] for p in run.seen[1:]]).max() == 1


def test_a_node_that_is_replaced_while_its_work_waits_in_the_buffer(federation, start, add_node, quick):
    """FedFix with a long interval: client 0's work has arrived, then its node comes back under another id."""
    grid = delayed(federation(), 0.01, 0.2, 0.2)
    pull, began = grid.pull_messages, time.monotonic()

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        if time.monotonic() - began > 0.05 and 77 not in grid.nodes:
            grid.node(0).present = False
            add_node(grid, like=0, partition=0, node_id=77).delay = 0.01
        return pull(message_ids)

    grid.pull_messages = pulled
    run = start("fedfix", grid, 4, lr=0.01, clock=WallClock(), fedfix_interval=0.13)
    check_accounts(run)
    assert 77 in {m.metadata.dst_node_id for m in grid.requests()}
    # From then on it counts once per interval.
    assert all(count <= 1 for count in grid.under_way().values())
    participation = [p.clients["participation"][0] for p in run.seen[2:]]
    assert np.diff(participation).max() <= 1


def test_a_node_that_is_replaced_and_fails_while_its_work_waits_in_the_buffer(
    federation, start, add_node, quick
):
    """Its client is dropped while a good contribution of it waits: that one counts or not, but nothing breaks."""
    grid = delayed(federation(), 0.01, 0.05, 0.05)
    pull, began = grid.pull_messages, time.monotonic()

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        if time.monotonic() - began > 0.04 and 77 not in grid.nodes:
            grid.node(0).present = False
            add_node(grid, 0, 0, 77, **{"fault-train": "raise"})
        return pull(message_ids)

    grid.pull_messages = pulled
    run = start("fedfix", grid, 3, lr=0.01, clock=WallClock(), fedfix_interval=0.2)
    check_accounts(run)


def test_with_all_nodes_away_the_run_waits_and_asks_who_is_back_at_once(
    federation, start, quick, monkeypatch, caplog
):
    """Each is dropped, as it misses three tasks, and comes back under its own id, long before its retry."""
    monkeypatch.setattr("strategies.events.pump.RETRY_AFTER", 1e6)
    grid = delayed(federation(), 0.02, 0.02, 0.02)
    pull = grid.pull_messages

    def switch(present: bool) -> None:
        for node in grid.nodes.values():
            node.present = present
            node.transport = {} if present else {"train": "unavailable"}

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        text = text_of(caplog)
        if "no client is connected, the run waits for one" in text and text.count("is dropped after 3") == 3:
            switch(True)
        return pull(message_ids)

    grid.pull_messages = pulled
    run = start(
        "async",
        grid,
        30,
        lr=0.01,
        clock=WallClock(),
        limit=80,
        observe=lambda progress: switch(False) if progress.aggregation == 3 else None,
    )
    check_accounts(run)
    assert len(run.seen) == 31
    assert text_of(caplog).count("no client is connected") == 1
    assert run.evaluations[-1].clients["importance"] == [1 / 7, 2 / 7, 4 / 7]


def test_a_late_joiner_takes_part(federation, start, add_node, quick):
    grid = delayed(federation(), 0.02, 0.03, 0.02)

    def observe(progress: Progress) -> None:
        if progress.aggregation == 5:
            add_node(grid, 0, 3, 77, **{"num-examples": 8}).delay = 0.02

    def enough() -> bool:
        return grid.asked().count(3) > 3

    run = start(
        "async", grid, 100_000, lr=0.01, clock=WallClock(), observe=observe, limit=240, should_stop=enough
    )
    last = run.evaluations[-1].clients
    assert last["importance"] == [1 / 15, 2 / 15, 5 / 15, 7 / 15]  # 8 is more than twice the median, 3.5
    assert last["participation"][3] > 2
    check_accounts(run)
    assert all(count <= 1 for count in grid.under_way().values())


@pytest.mark.parametrize("how", ["drop", "slow"])
def test_a_newcomer_that_does_not_describe_itself_stalls_nobody(federation, start, add_node, quick, how):
    grid = delayed(federation(), 0.02, 0.03, 0.02)

    def observe(progress: Progress) -> None:
        if progress.aggregation == 5:
            add_node(grid, 0, 3, 77).transport["query"] = "drop"

    run = start(
        "async",
        grid,
        60,
        lr=0.01,
        clock=WallClock(),
        observe=observe,
        limit=60,
        timeout=3.0 if how == "slow" else 4.0,
    )
    # Sixty arrivals at 2 to 3 in .02 s take less than a second; the handshake's timeout is 3 s or more.
    assert np.diff([p.time for p in run.seen]).max() < 2.5


def test_all_clients_fail_in_wall_time_until_they_are_well_again(federation, start, caplog, monkeypatch):
    # None has been observed: τ is taken as 1 s, and 0.1 s pass until they are asked again. Deadlines are long:
    # no answer is late, however busy the machine is.
    monkeypatch.setattr("strategies.events.pump.RETRY_AFTER", 0.1)
    grid = delayed(federation(), 0.01, 0.01, 0.01)
    for client in range(3):
        grid.spoil(client, "raise")
    push = grid.push_messages

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        if text_of(caplog).count("is dropped") == 3:
            for client in range(3):
                grid.spoil(client, None)
        return push(requests)

    grid.push_messages = pushed
    run = start(
        "async",
        grid,
        100_000,
        lr=0.01,
        clock=WallClock(),
        limit=80,
        should_stop=lambda: text_of(caplog).count("counts again") == 3,
    )
    assert text_of(caplog).count("is dropped") == 3
    assert text_of(caplog).count("counts again") == 3
    assert run.seen[-1].aggregation >= 2  # those of the clients that were back before
    check_accounts(run)


def test_in_wall_time_a_run_without_anybody_can_be_stopped(federation, start, quick):
    grid, began = federation(), time.monotonic()
    for client in range(3):
        grid.spoil(client, "raise")
    run = start(
        "async", grid, 5, clock=WallClock(), limit=80, should_stop=lambda: time.monotonic() - began > 0.3
    )
    assert run.values[-1] == 1.0


def test_a_wall_run_stops_with_its_time_budget(federation, start, quick):
    run = start(
        "async",
        delayed(federation(), 0.02, 0.02, 0.02),
        100_000,
        lr=0.01,
        clock=WallClock(),
        time_budget=0.3,
        eval_every=100_000,
        limit=50,
        fraction_evaluate=1.0,
    )
    assert 0.2 < run.seen[-1].time < 4
    assert run.seen[-1].evaluated
    assert "client-loss" in run.seen[-1].metrics  # the clients are waited for, as no report comes after it
    check_accounts(run)


def test_models_of_answered_tasks_are_not_kept(federation, start, quick):
    """In wall time a deadline is minutes away: what a finished task started from must not wait for it."""
    run = start(
        "async", delayed(federation(), 0.001, 0.001, 0.001), 60, clock=WallClock(), timeout=600, lr=0.01
    )
    known = [
        task
        for task in gc.get_objects()
        if isinstance(task, Task) and task.member in run.strategy.session.task_table.members.values()
    ]
    assert len(known) <= 3


def test_virtual_clock_is_the_default(federation, start):
    assert isinstance(start("async", federation(), 1).strategy.session.clock, VirtualClock)
