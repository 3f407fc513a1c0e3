"""What devices that lie about their times may weigh: the units by hand, and whole runs on a clock that jumps."""

import heapq
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from strategies import (
    FADAS,
    AsyncFedAvg,
    DelayAdaptive,
    FedAsync,
    FedBuff,
    FedCompass,
    FedFix,
    Rennala,
    Ringmaster,
    clock,
)
from strategies.clock import WallClock
from strategies.events.own_time import CAPACITY, UNSEEN, OwnTime
from strategies.flower import messages
from strategies.updates import pipeline

RATE = 4.0
EVERYBODY = dict.fromkeys(range(5))


def test_dues_of_back_to_back_tasks_add_up_to_the_aggregations_whatever_the_rates():
    own, given, number = OwnTime(), np.zeros(5), 0
    for _ in range(100):  # four clients at rate 1, one at 10
        for index in [0, 4, 4, 4, 1, 4, 4, 2, 4, 4, 3, 4, 4, 4]:
            number += 1
            given[index] += own.due(index, 0.2, number, 0)
            own.pay(index, number, 0, 0.0)
    assert given.sum() == pytest.approx(number, rel=0.01)
    assert given / given.sum() == pytest.approx([0.2] * 5, abs=1e-3)


def test_a_late_answer_has_its_due_once_and_a_burst_next_to_nothing():
    own = OwnTime()
    assert own.due(0, 0.2, 33, 0) == pytest.approx(6.6)
    own.pay(0, 33, 0, 1.6)  # 5 of which counted
    assert own.due(0, 0.2, 34, 0) == pytest.approx(1.8)
    own.pay(0, 34, 0, 0.0)
    assert own.due(0, 0.2, 35, 0) == pytest.approx(0.2)
    # Who was dropped after aggregation 35, and is back when there are 95, is due what has come since.
    assert own.due(0, 0.2, 100, 95) == pytest.approx(1.0)
    again = OwnTime()
    again.restore(own.state())
    assert again.due(0, 0.2, 35, 0) == pytest.approx(0.2)


def within(own: OwnTime, index: int, rate: float = RATE) -> bool:
    own.note(index, EVERYBODY)
    return own.within(index, EVERYBODY, rate)


def test_a_client_counts_at_most_four_times_as_often_as_the_median_of_the_others():
    own, counted = OwnTime(), 0
    for _ in range(100):
        counted += sum(within(own, 0) for _ in range(20))
        assert all(within(own, index) for index in range(1, 5))
    assert counted == pytest.approx(CAPACITY + 99 * RATE, abs=RATE)
    assert all(
        OwnTime().within(0, dict.fromkeys(range(2)), RATE) for _ in range(50)
    )  # either may be the faulty one
    unbounded = OwnTime()
    assert all(within(unbounded, 0, 0.0) for _ in range(50))


def test_what_a_client_sends_beyond_the_rate_of_the_others_counts_where_it_goes_their_way():
    east, west, north = np.array([1.0, 0.0]), np.array([-1.0, 0.0]), np.array([0.0, 1.0])
    for sent, counts in ((west, 1 + 99), (east, 2000.0), (north, 2000.0)):
        own, counted = OwnTime(), 0
        for _ in range(100):
            assert all(own.agrees(index, EVERYBODY, east) for index in range(1, 5))
            counted += sum(own.agrees(0, EVERYBODY, sent) for _ in range(20))
            again = OwnTime()
            again.restore(own.state())
            own = again
        assert counted == pytest.approx(counts, abs=1)
    # As long as fewer than three have answered, nobody knows the others' way.
    first = OwnTime()
    assert sum(first.agrees(0, EVERYBODY, east) for _ in range(20)) == 1


def test_a_client_that_was_away_has_one_contribution_at_once_that_isn_t_judged_by_the_course():
    # Client 0 was away, and has credit for three. Half as many as there are others must have counted since its last.
    east, west = np.array([1.0, 0.0]), np.array([-1.0, 0.0])
    for sent, counts in ((west, 1), (east, 5)):
        own = OwnTime()
        assert own.agrees(0, EVERYBODY, sent)
        for _ in range(6):
            assert all(own.agrees(index, EVERYBODY, east) for index in range(1, 5))
        again = OwnTime()
        again.restore(own.state())
        assert sum(again.agrees(0, EVERYBODY, sent) for _ in range(5)) == counts
        assert all(again.agrees(index, EVERYBODY, east) for index in range(1, 3))
        assert again.agrees(0, EVERYBODY, sent)


def test_a_client_that_was_opposed_is_not_cleared_by_a_few_updates_that_are_noise():
    own, east = OwnTime(), np.array([1.0, 0.0])
    counted = []
    for cosine in (*[-0.5] * 10, *[0.05] * 9, *[0.9] * 3):
        assert all(own.agrees(index, EVERYBODY, east) for index in range(1, 5))
        own.agrees(0, EVERYBODY, np.array([cosine, np.sqrt(1 - cosine**2)]))  # what is unseen
        counted.append(own.agrees(0, EVERYBODY, np.array([cosine, np.sqrt(1 - cosine**2)])))
    assert counted == [False] * 19 + [True] * 3


def test_a_client_that_leads_the_course_isn_t_judged_by_its_own_updates():
    own, east = OwnTime(), np.eye(40)[0]
    noise = np.eye(40)[1:]  # of each honest update, at a right angle to all others
    against = noise[-1] - 0.4 * east  # always the same: a course with it would agree
    counted = 0
    for turn in range(30):
        for index in range(1, 5):
            own.agrees(index, EVERYBODY, noise[(4 * turn + index) % 30] + 0.5 * east)
        counted += sum(own.agrees(0, EVERYBODY, against) for _ in range(4))
    assert counted == 30  # as often as the others


@pytest.mark.parametrize(("mean", "most"), [(0.08, 0.99), (-0.25, 0.05)])
def test_many_updates_tell_what_a_single_one_doesn_t(mean, most):
    # Cosines with the course of mean 0.08 or -0.25 and deviation 0.15, as of updates that are mostly noise: one in
    # five of an honest client's is below -0.05.
    rng, own, east = np.random.default_rng(0), OwnTime(), np.array([1.0, 0.0])
    counted, sent = 0, 0
    for _ in range(100):
        assert all(own.agrees(index, EVERYBODY, east) for index in range(1, 5))
        own.agrees(0, EVERYBODY, east * 0.0)  # what is unseen
        for cosine in np.clip(rng.normal(mean, 0.15, 5), -1, 1):
            sent += 1
            counted += own.agrees(0, EVERYBODY, np.array([cosine, np.sqrt(1 - cosine**2)]))
    assert counted >= most * sent if mean > 0 else counted <= most * sent


def exponential(rng: np.random.Generator, index: int) -> float:
    return rng.exponential()


def half_normal(rng: np.random.Generator, index: int) -> float:
    return abs(rng.normal())


@pytest.mark.parametrize("law", [exponential, half_normal])
@pytest.mark.parametrize("num_clients", [3, 5, 10])
def test_of_honest_clients_with_random_times_hardly_anything_is_cut(law, num_clients):
    rng, own, number, contributions, refused = np.random.default_rng(0), OwnTime(), 0, 0, 0
    present, p, most = dict.fromkeys(range(num_clients)), 1 / num_clients, float(num_clients)  # η_g = 1/C
    given, cut = np.zeros(num_clients), 0.0
    queue = [(law(rng, index), index) for index in present]
    heapq.heapify(queue)
    while contributions < 5000:
        now, index = heapq.heappop(queue)
        heapq.heappush(queue, (now + law(rng, index), index))
        contributions += 1
        own.note(index, present)
        if not own.within(index, present, RATE):
            refused += 1
            continue
        number += 1
        due = own.due(index, p, number, 0)
        given[index] += min(due, most)
        own.pay(index, number, 0, left := min(max(due - most, 0.0), most))
        cut += due - min(due, most) - left
    assert given / given.sum() == pytest.approx([p] * num_clients, abs=0.01)
    assert cut <= 0.01 * given.sum()
    assert refused <= 0.01 * contributions


@pytest.fixture(autouse=True)
def passes_at_once(monkeypatch):
    """Let the machine's clock jump to the end of every sleep."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 1e-3)

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


@pytest.fixture
def started(federation, model, train_config):
    """Run a method with five clients whose tasks take ``times(client, task)`` seconds; return the strategy."""

    def run(
        kind: Any,
        times: Callable[[int, int], float],
        seconds: float = 60.0,
        centres: Any = (0.0, 1.0, 2.0, 3.0, 4.0),
        **options: Any,
    ) -> Any:
        grid, tasks = federation(list(centres), [1] * 5), [0] * 5
        push = grid.push_messages

        def pushed(requests: Iterable[Message]) -> list[str]:
            ids: list[str] = []
            for request in requests:
                node = grid.nodes[request.metadata.dst_node_id]
                if request.metadata.message_type == messages.TRAIN:
                    index = node.context.node_config["partition-id"]
                    tasks[index] += 1
                    node.delay = times(index, tasks[index])
                ids += push([request])
            return ids

        grid.push_messages = pushed
        strategy = kind(
            clock=WallClock(), time_budget=seconds, fraction_evaluate=0.0, eval_every=10**6, **options
        )
        strategy.start(grid, model(1.0), num_rounds=10**6, train_config=train_config(1, 0.01))
        return strategy

    return run


@pytest.fixture
def shares(started):
    """Run a method as ``started`` does; return the clients' shares and numbers of contributions."""

    def run(*arguments: Any, **options: Any) -> Any:
        members = started(*arguments, **options).session.task_table.members
        weights = np.array([members[index].weight for index in range(5)])
        return weights / weights.sum(), [members[index].contributions for index in range(5)]

    return run


def usual(index: int, task: int) -> float:
    return 0.6 + 0.2 * index


def late_then_burst(index: int, task: int) -> float:
    return usual(index, task) if index else (8.0 if task == 1 else 0.05)


def fast(index: int, task: int) -> float:
    return usual(index, task) if index else 0.05


def far_slower(index: int, task: int) -> float:
    return 0.3 + 0.01 * index if index else 5.0


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedBuff, FedFix])
@pytest.mark.parametrize("times", [usual, late_then_burst, fast, far_slower])
def test_a_client_weighs_what_its_own_time_is_due(kind, times, shares):
    found, _ = shares(kind, times)
    assert found == pytest.approx([0.2] * 5, abs=0.02)


def f80(index: int, task: int) -> float:
    return 0.2 * (index + 1)


EQUAL = [100.0] * 5  # no client arrives there
FAVOUR_FAST = [FedAsync, DelayAdaptive, Ringmaster, Rennala, FADAS, FedCompass]


@pytest.mark.parametrize("kind", FAVOUR_FAST)
def test_where_fast_clients_count_more_nothing_is_cut_of_honest_fixed_times(kind, shares, caplog):
    _, contributions = shares(kind, f80, 10.0, EQUAL)
    assert contributions[0] > 3 * np.median(contributions[1:])
    assert "are discarded" not in caplog.text


@pytest.mark.parametrize("kind", FAVOUR_FAST)
def test_where_fast_clients_count_more_a_reversed_one_counts_as_often_as_the_others(
    kind, shares, monkeypatch
):
    make = pipeline.Contribution.of.__func__

    def made(cls: Any, *arguments: Any, **options: Any) -> Any:
        contribution = make(cls, *arguments, **options)
        if contribution.client.index == 0:
            np.negative(contribution.update, out=contribution.update)
        return contribution

    monkeypatch.setattr(pipeline.Contribution, "of", classmethod(made))
    _, contributions = shares(kind, fast, 15.0, EQUAL)
    assert contributions[0] <= 1.5 * np.median(contributions[1:]) + UNSEEN


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedBuff, FedFix, *FAVOUR_FAST])
def test_an_update_of_any_length_that_is_there_at_once_waits_for_those_of_others(kind, started):
    centres = [1e9, 1.0, 2.0, 3.0, 4.0]  # an honest step from 1 is at most 0.03 long, the fast client's 10^7
    assert abs(started(kind, fast, 3.0, centres).session.model).max() < 10
