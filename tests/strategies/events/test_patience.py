"""Real time: how long an answer is waited for, and what never comes."""

import time
from collections.abc import Collection, Iterable

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from strategies import AsyncFedAvg, DivergedError, Progress, RunError
from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.clock import VirtualClock, WallClock
from strategies.events.evaluation import EvaluationUnderWay
from strategies.flower import messages
from strategies.flower.exchange import MessageClient
from strategies.flower.internals import give_id
from strategies.timing.scheduler import RealTimeScheduler
from tests.strategies.events.runs import KINDS, delayed, text_of

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def soon(quick, monkeypatch):
    """Who has failed is asked again at once: in a twentieth of the second that a task is taken to last."""
    monkeypatch.setattr("strategies.events.pump.RETRY_AFTER", 0.05)


# ---- Tasks -------------------------------------------------------------------------------------------------------


def test_a_tasks_deadline_by_hand():
    scheduler, member = (
        RealTimeScheduler(WallClock(), "F80", 0, 0.0),
        ClientState(Client(1, 0, 1, MetricRecord())),
    )

    def due(timeout: float = 3600.0) -> float:
        return scheduler.due(member, 100.0, timeout, lost=False) - 100.0

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
    assert scheduler.times([member], []).tolist() == [1.0]  # what was given up is no observation


def test_a_client_that_has_become_far_slower_counts_again(federation, start, quick, caplog):
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
        should_stop=enough,
    )
    assert text_of(caplog).count("client 2 is dropped") == 1
    assert run.strategy.session.task_table.members[2].latest > 0.3


# ---- Evaluations -------------------------------------------------------------------------------------------------


class Post:
    """What a Mail takes of a Grid; answers come when a test says so."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_available: list[Message] = []
        self.answered: set[str] = set()

    def push_messages(self, requests: Iterable[Message]) -> list[str]:
        names = []
        for request in requests:
            names.append(f"message {len(self.sent)}")
            give_id(request, names[-1])
            self.sent.append(request)
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        wanted = set(names)
        pulled = [reply for reply in self.is_available if reply.metadata.reply_to_message_id in wanted]
        self.is_available.clear()
        return pulled

    def answer(self, *nodes: int) -> None:
        """Let nodes answer the oldest of their requests that they haven't answered."""
        for node in nodes:
            request = next(
                m
                for m in self.sent
                if m.metadata.dst_node_id == node and m.metadata.message_id not in self.answered
            )
            self.answered.add(request.metadata.message_id)
            self.is_available.append(Message(RecordDict(), reply_to=request))


class Bench:
    """An evaluation of three nodes, 1 to 3, in virtual time, and what was told of it."""

    def __init__(self, stopped_at: float = 1e9) -> None:
        self.post, self.clock = Post(), VirtualClock()
        self.told: list[tuple[int, int, list[int]]] = []
        self.message_client = MessageClient(self.post, 3600.0, lambda: self.clock.now() >= stopped_at)  # type: ignore[arg-type]
        self.message_client.clock = self.clock  # type: ignore[assignment]
        self.evaluation = EvaluationUnderWay(
            self.message_client,
            lambda number, replies, late: self.told.append((number, len(replies), sorted(late))),
        )

    def begin(self, number: int) -> None:
        fields = ConfigRecord({messages.SERVER_ROUND: number})
        requests = [messages.request(messages.EVALUATE, node, fields, ttl=3600.0) for node in (1, 2, 3)]
        self.evaluation.begin(number, requests)

    def after(self, seconds: float, *nodes: int) -> None:
        self.clock.wait_until(self.clock.now() + seconds)
        self.post.answer(*nodes)
        self.message_client.poll(())


def test_a_lost_evaluation_is_given_up_by_what_others_take():
    bench = Bench()
    bench.begin(1)
    assert bench.evaluation.due == 3600.0  # nothing is known
    bench.after(2.0, 1, 2)
    assert bench.evaluation.due == 60.0  # as five times 2 s is less
    bench.begin(2)
    assert len(bench.post.sent) == 3  # not while the first is under way
    bench.after(58.5)
    bench.begin(3)
    assert bench.told == [(1, 2, [3])]
    assert len(bench.post.sent) == 6
    # The third answers what it was asked first, 61.5 s ago: too late to count, but five times as long is what it has.
    bench.after(1.0, 1, 2, 3)
    assert bench.told == [(1, 2, [3])]
    assert bench.evaluation.due == pytest.approx(60.5 + 5 * 61.5)
    bench.after(100.0, 3)
    assert bench.told[1:] == [(3, 3, [])]
    bench.begin(4)
    bench.after(1.0, 3)
    assert bench.evaluation.due == pytest.approx(161.5 + 60.0)  # the others are quick


def test_who_has_never_answered_has_as_long_as_the_slowest_while_others_are_to_come():
    bench = Bench()
    bench.begin(1)
    bench.after(1.0, 1)
    bench.after(99.0, 2)
    assert bench.evaluation.due == 500.0


@pytest.mark.parametrize(("takes", "told"), [(90.0, (3, [])), (3599.5, (3, [])), (1e9, (2, [3]))])
def test_at_the_end_who_has_never_answered_has_the_whole_timeout(takes, told):
    """A slow device is in the final evaluation; one that never answers doesn't hold it up for ever."""
    bench = Bench()
    bench.begin(1)
    bench.after(1.0, 1, 2)
    assert bench.evaluation.due == 60.0
    pull = bench.post.pull_messages

    def pulled(names: Iterable[str]) -> list[Message]:
        if bench.clock.now() >= takes and len(bench.post.answered) == 2:
            bench.post.answer(3)
        return pull(names)

    bench.post.pull_messages = pulled  # type: ignore[method-assign]
    bench.evaluation.wait(lambda nodes: None)
    assert bench.told == [(1, *told)]
    assert bench.clock.now() == pytest.approx(min(takes, 3600.0), abs=1.0)


def test_at_the_end_it_is_waited_for_no_longer():
    bench, missing = Bench(), list[Collection[int]]()
    bench.begin(1)
    bench.after(2.0, 1, 2, 3)
    bench.begin(2)
    bench.post.answer(1, 3)
    bench.evaluation.wait(missing.append)
    assert missing[0] == {2}  # 1 and 3 have answered
    assert not missing[-1]
    assert bench.clock.now() == pytest.approx(62.0)
    assert bench.told == [(1, 3, []), (2, 2, [2])]


def test_a_run_that_is_stopped_gives_nobody_up():
    bench = Bench(stopped_at=7.0)
    bench.begin(1)
    bench.evaluation.wait(lambda nodes: None)
    assert bench.told == []
    assert bench.clock.now() < 9.0


def test_one_that_is_lost_keeps_no_run(federation, start, quick, caplog):
    """A device that starts anew loses what it was asked; here twice, and the SuperLink says nothing of it."""
    grid = delayed(federation(), 0.01, 0.01, 0.01)
    state = {"told": 0, "lost": 0}

    def observe(progress: Progress) -> None:
        state["told"] += messages.EVALUATED in progress.metrics
        lose = state["told"] == 2 or progress.aggregation == 199  # and at the end
        grid.lose(1, "drop" if lose else "not at all", "evaluate")

    run = start(
        "async",
        grid,
        200,
        lr=0.01,
        clock=WallClock(),
        observe=observe,
        fraction_evaluate=1.0,
        timeout=3000.0,
        limit=200,
    )
    assert state["told"] > 2
    assert run.seen[-1].aggregation == 200
    w, last = run.values[-1], run.seen[-1]
    # 5 examples are more than twice the median of all three, and count as 4.
    assert last.metrics["client-loss"] == pytest.approx((1 * (3 - w) ** 2 + 4 * (-1 - w) ** 2) / 2 / 5)
    assert messages.EVALUATED not in last.metrics  # it is this model's
    said = "evaluation of aggregation 200: 1 of 3 haven't answered in time, it is without client 1"
    assert said in text_of(caplog)


# ---- Nobody ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", KINDS)
def test_an_app_that_always_raises_ends_a_run(federation, start, soon, scheme):
    grid = federation()
    for client in range(3):
        grid.spoil(client, "raise")
    with pytest.raises(
        RunError, match=r"^no client is left: each was lost or failed; the last reason was .*out of memory"
    ):
        start(scheme, grid, 5, clock=WallClock(), limit=60)
    assert all(grid.asked().count(client) >= 4 for client in range(3))


def test_so_do_models_that_are_never_finite(federation, start, soon):
    grid = federation()
    for client in range(3):
        grid.spoil(client, "nan")
    with pytest.raises(DivergedError, match="no client is left"):
        start("async", grid, 5, clock=WallClock(), limit=60)


def test_who_is_at_work_may_do_better(federation, start, soon):
    """Client 1 fails for the fourth time while client 0, which did so before, is at work: that comes of use."""
    grid = federation((3.0, 2.0), (1, 2))
    grid.spoil(0, "raise")
    grid.spoil(1, "raise")
    pull = grid.pull_messages

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        times = [grid.asked().count(client) for client in range(2)]
        if times[0] == 4:
            grid.spoil(0, None)
        tasks = {m.metadata.message_id: m.content["config"] for m in grid.requests()}
        waits = {(0, 5): times[1] < 5, (1, 4): times[0] < 5}  # by client and task
        held_replies = {
            name
            for name, config in tasks.items()
            if waits.get((config[messages.CLIENT], config[messages.TASK]))
        }
        return pull([name for name in message_ids if name not in held_replies])

    grid.pull_messages = pulled
    run = start("async", grid, 3, clock=WallClock(), limit=60)
    assert run.strategy.session.aggregations == 3
    assert run.strategy.session.task_table.members[1].invalid_replies > 3


def test_of_many_that_fail_one_is_always_at_work(federation, start, soon):
    """Whichever of the two has failed, the other has a task under way: the run ends all the same."""
    grid = federation((3.0, 2.0), (1, 2))
    grid.spoil(0, "raise")
    grid.spoil(1, "raise")
    pull = grid.pull_messages

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        under_way = {m.metadata.message_id: m.content["config"] for m in grid.requests()}
        names = [name for name in message_ids if name in grid._replies]
        if len(names) < 2 and grid.asked().count(0) + grid.asked().count(1) > 2:
            return pull([name for name in message_ids if name not in under_way])
        return pull([*(name for name in message_ids if name not in under_way), *names[:1]])

    grid.pull_messages = pulled
    with pytest.raises(RunError, match="no client is left"):
        start("async", grid, 5, clock=WallClock(), limit=60)
    assert max(grid.asked().count(client) for client in range(2)) < 12


def test_an_outage_before_the_first_answer_ends_no_run(federation, start, soon):
    """The SuperLink answers for devices that are offline; nobody has failed."""
    grid = federation()
    pull = grid.pull_messages

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        if min(grid.asked().count(client) for client in range(3)) == 7:
            for client in range(3):
                grid.lose(client, "not at all")
        return pull(message_ids)

    grid.pull_messages = pulled
    for client in range(3):
        grid.lose(client, "unavailable")
    run = start("async", grid, 3, clock=WallClock(), limit=120, timeout=60.0)
    assert run.strategy.session.aggregations == 3
    assert sum(account.lost for _, account in run.strategy.session.client_stats.items()) >= 18
    assert not any(account.failed for _, account in run.strategy.session.client_stats.items())


@pytest.mark.parametrize("how", ["silent", "worked"])
def test_whoever_may_be_well_again_is_waited_for(federation, model, train_config, soon, how):
    """One client never says anything; or all fail that did work before."""
    grid, end = delayed(federation(), 0.01, 0.01, 0.01), time.monotonic() + 60.0
    before: dict[int, int] = {}  # how often they were asked until they failed

    def fail() -> None:
        before.update((client, grid.asked().count(client)) for client in range(2))
        for client in range(3):
            grid.spoil(client, "raise")

    if how == "silent":
        fail()
        grid.lose(2)

    def asked_again() -> bool:
        """The fourth answer in vain, of one that was dropped, would end a run in which nobody may be well again."""
        return bool(before) and all(grid.asked().count(i) - number >= 5 for i, number in before.items())

    strategy = AsyncFedAvg(
        clock=WallClock(),
        observer=lambda progress: fail() if how == "worked" and progress.aggregation == 6 else None,
        should_stop=lambda: asked_again() or time.monotonic() > end,
        fraction_evaluate=0.0,
    )
    strategy.start(grid, model(1.0), num_rounds=100_000, timeout=0.3, train_config=train_config(1, 0.1))
    assert asked_again()
