"""Schedules worked out by hand, the limits where a scheme is another one, and what may change neither."""

import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from strategies.timing.time_scenario import TimeScenario
from tests.strategies.events.runs import (
    ASYNC_F80,
    CENTRES,
    KINDS,
    SIZES,
    SUM,
    TAU,
    Event,
    P,
    bits,
    make,
    replay,
)

pytestmark = pytest.mark.timeout(600)

FEDFIX_F80 = [  # Δt = .5 s = 7.5; 0 and 1 answer within one interval, 2 and 3 within two; 3@15 is just in time
    (7.5, {0: 0, 1: 0}),
    (15, {0: 0, 1: 0, 2: 1, 3: 1}),
    (22.5, {0: 0, 1: 0}),
    (30, {0: 0, 1: 0, 2: 1, 3: 1}),
]
FEDFIX_F80_SHORT = [  # Δt = .1 s = 1.5; a cycle takes 2, 5, 8 and 10 intervals: 3, 7.5, 12, 15
    (3, {0: 0}),
    (6, {0: 0}),
    (7.5, {1: 2}),
    (9, {0: 1}),
    (12, {0: 0, 2: 4}),  # an empty interval is none
    (15, {0: 0, 1: 2, 3: 5}),
]
FEDBUFF_F80 = [  # m = 2
    (7, {0: 0, 1: 0}),  # 0@3 waits for 1@7; next 0@10, 1@14
    (11, {0: 0, 2: 1}),  # 0@10 2@11; next 0@14, 2@22
    (14, {0: 0, 1: 1}),  # at once; next 0@17, 1@21
    (17, {0: 0, 3: 3}),  # 3@15 0@17; next 0@20, 3@32
    (21, {0: 0, 1: 1}),  # 0@20 1@21; next 0@24, 1@28
    (24, {0: 0, 2: 3}),  # 2@22 0@24
]
# Seconds of the tasks, in turn: client 0: 1, 3; 1: 2; 2: 5; 3: 4, 1. Means (2, 2, 5, 2.5).
TRACE = "client,seconds\n0,1\n0,3\n1,2\n2,5\n3,4\n3,1\n"
ASYNC_TRACE = [  # 0@1,4,5,8  1@2,4,6,8  2@5,10  3@4,5,9
    (1, {0: 0}),
    (2, {1: 1}),
    (4, {0: 1}),
    (4, {1: 1}),
    (4, {3: 4}),
    (5, {0: 2}),
    (5, {2: 6}),
    (5, {3: 2}),
    (6, {1: 4}),
    (8, {0: 3}),
    (8, {1: 1}),
]
FEDFIX_TRACE = [  # Δt = 2: 0@1 1@2; next 0@5 1@4; 1@4 3@4; next 1@6 3@5; all; next 0@7 1@8 2@11 3@10; 0@7 1@8
    (2, {0: 0, 1: 0}),
    (4, {1: 0, 3: 1}),
    (6, {0: 1, 1: 0, 2: 2, 3: 0}),
    (8, {0: 0, 1: 0}),
]
FEDBUFF_TRACE = [
    (2, {0: 0, 1: 0}),  # 0@1 1@2; next 0@5, 1@4
    (4, {1: 0, 3: 1}),  # next 1@6, 3@5
    (5, {0: 1, 2: 2}),  # 0@5 2@5, and 3@5 waits; next 0@6, 2@10
    (6, {0: 0, 3: 1}),  # 3@5 0@6, and 1@6 waits; next 0@9, 3@10
    (9, {0: 0, 1: 2}),  # 1@6 0@9
]
ROWS = [
    # scheme, options, scenario, unit of time, schedule, d_i
    ("async", {}, "F80", 1 / 15, ASYNC_F80, SUM * TAU * P),
    ("async", {"aggregation_weights": "identical"}, "F80", 1 / 15, ASYNC_F80, [1, 1, 1, 1]),
    ("fedfix", {"fedfix_interval": 0.5}, "F80", 1 / 15, FEDFIX_F80, [0.1, 0.2, 2 * 0.3, 2 * 0.4]),
    ("fedfix", {"fedfix_interval": 0.1}, "F80", 1 / 15, FEDFIX_F80_SHORT, [0.2, 5 * 0.2, 8 * 0.3, 10 * 0.4]),
    # 0 is in all six, 1 in three, 2 in two, 3 in one: P = (1, 2, 3, 6)
    ("fedbuff", {}, "F80", 1 / 15, FEDBUFF_F80, [0.1, 2 * 0.2, 3 * 0.3, 6 * 0.4]),
    ("fedbuff", {"aggregation_weights": "identical"}, "F80", 1 / 15, FEDBUFF_F80, [0.5] * 4),
    # Σ 1/τ = .5 + .5 + .2 + .4 = 1.6; d = 1.6 (2, 2, 5, 2.5) p
    ("async", {}, "trace", 1, ASYNC_TRACE, [0.32, 0.64, 2.4, 1.6]),
    # Means of ⌈(1, 3) / 2⌉, ⌈2 / 2⌉, ⌈5 / 2⌉ and ⌈(4, 1) / 2⌉: (1.5, 1, 3, 1.5)
    ("fedfix", {"fedfix_interval": 2.0}, "trace", 1, FEDFIX_TRACE, [0.15, 0.2, 0.9, 0.6]),
    # ⌈(2, 2, 5, 2.5) / 2⌉ = (1, 1, 3, 2)
    (
        "fedfix",
        {"fedfix_interval": 2.0, "fedfix_periods": "of-mean"},
        "trace",
        1,
        FEDFIX_TRACE,
        [0.1, 0.2, 0.9, 0.8],
    ),
    # of five: 0 in four, 1 in three, 2 in one, 3 in two
    ("fedbuff", {}, "trace", 1, FEDBUFF_TRACE, [5 / 4 * 0.1, 5 / 3 * 0.2, 5 * 0.3, 5 / 2 * 0.4]),
]


@pytest.mark.parametrize(
    ("scheme", "options", "scenario", "unit", "schedule", "weights"),
    ROWS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_schedule_by_hand(federation, start, tmp_path, scheme, options, scenario, unit, schedule, weights):
    if scenario == "trace":
        (tmp_path / "times.csv").write_text(TRACE)
        scenario = f"trace:{tmp_path / 'times.csv'}"
    run = start(scheme, federation(CENTRES, SIZES), len(schedule), lr=0.25, time_scenario=scenario, **options)
    assert [staleness for _, staleness in run.events()] == [staleness for _, staleness in schedule]
    assert [t for t, _ in run.events()] == pytest.approx([t * unit for t, _ in schedule], rel=1e-12)
    assert all(p.clients["weight"] == pytest.approx(list(weights), rel=1e-12) for p in run.seen[1:])
    assert run.values == pytest.approx(replay(schedule, weights), rel=1e-11)


def simulate(scheme: str, times: TimeScenario, rounds: int, m: int = 2, interval: float = 0.5) -> list[Event]:
    """Play a schedule without ties in the plainest way."""
    tasks, version = [0] * 4, [0] * 4
    heap: list[tuple[float, int]] = []
    events: list[Event] = []
    ticks = 0

    def hand_out(clients: Iterable[int], now: float) -> None:
        for i in clients:
            tasks[i], version[i] = tasks[i] + 1, len(events)
            heapq.heappush(heap, (now + times.task_time(i, tasks[i]), i))

    hand_out(range(4), 0.0)
    while len(events) < rounds:
        ticks += 1
        waiting, now, tick = [], 0.0, interval * ticks
        while (
            heap and heap[0][0] <= tick
            if scheme == "fedfix"
            else len(waiting) < (m if scheme == "fedbuff" else 1)
        ):
            now, client = heapq.heappop(heap)
            waiting.append(client)
        now = tick if scheme == "fedfix" else now
        if not waiting:
            continue
        events.append((now, {i: len(events) - version[i] for i in sorted(waiting)}))
        hand_out(waiting, now)
    return events


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize(("scenario", "seed"), [("exponential", 0), ("exponential:F0", 5)])
def test_schedule_of_exponential_times(federation, start, scheme, scenario, seed):
    expected = simulate(scheme, TimeScenario(scenario, 4, seed), 25)
    run = start(scheme, federation(CENTRES, SIZES), 25, lr=0.05, time_scenario=scenario, seed=seed)
    assert [staleness for _, staleness in run.events()] == [staleness for _, staleness in expected]
    assert [t for t, _ in run.events()] == pytest.approx([t for t, _ in expected], rel=1e-12)
    assert len({tuple(s) for _, s in expected}) > 3  # it isn't the same few over and over
    assert run.values == pytest.approx(replay(expected, run.seen[-1].clients["weight"], 0.05), rel=1e-11)


# ---- Exact limits --------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("interval", [1.0, 1.7])
def test_fedfix_with_a_long_interval_is_synchronous_fedavg_bit_for_bit(
    federation, start, small, weights, interval
):
    common: dict[str, Any] = {"arrays": small, "steps": 7, "lr": 0.03, "client_weights": weights}
    sizes = [3, 1, 7, 13, 5]
    sync = start("fedavg", federation([1.0, -2.0, 0.3, 5.0, 0.9], sizes), 8, **common)
    run = start(
        "fedfix", federation([1.0, -2.0, 0.3, 5.0, 0.9], sizes), 8, fedfix_interval=interval, **common
    )
    assert bits(run) == bits(sync)
    assert len(set(bits(sync))) == 9
    assert run.metric("staleness-max") == [0] * 8
    assert [p.time for p in run.seen] == pytest.approx([interval * n for n in range(9)])


@pytest.mark.parametrize("scheme", ["fedfix", "fedbuff"])
def test_contributions_are_added_in_client_order_whoever_arrives_first(
    federation, start, model, tmp_path, scheme
):
    # The last client is the fastest; in float64 the order of a sum shows: 1e16 + 1 − 1e16 is 0, 1e16 − 1e16 + 1 is 1.
    (tmp_path / "times.csv").write_text("0,1\n1,0.8\n2,0.6\n3,0.4\n")
    centres, sizes = [1e16, 3.0, -1e16, 5.0], [1, 1, 1, 1]
    options = {"fedfix_interval": 1.0} if scheme == "fedfix" else {"buffer_size": 4}
    common: dict[str, Any] = {"arrays": model(1.0, 0.1), "time_scenario": f"trace:{tmp_path / 'times.csv'}"}
    sync = start("fedavg", federation(centres, sizes), 3, **common)
    assert bits(start(scheme, federation(centres, sizes), 3, **options, **common)) == bits(sync)
    other = start("fedavg", federation(centres[::-1], sizes), 3, **common)
    assert bits(other) != bits(sync)  # so that this test can fail


@pytest.mark.parametrize("weights", ["time-based", "identical"])
def test_fedbuff_that_waits_for_all_is_synchronous_fedavg_bit_for_bit(federation, start, small, weights):
    # `identical` has d = 1/m: equal to p for four clients of equal weight.
    common: dict[str, Any] = {"arrays": small, "steps": 7, "lr": 0.03, "time_scenario": "F0"}
    sizes = [3, 1, 7, 13] if weights == "time-based" else [5, 5, 5, 5]
    sync = start("fedavg", federation([1.0, -2.0, 0.3, 5.0], sizes), 8, **common)
    run = start(
        "fedbuff",
        federation([1.0, -2.0, 0.3, 5.0], sizes),
        8,
        buffer_size=4,
        aggregation_weights=weights,
        **common,
    )
    assert bits(run) == bits(sync)
    assert [p.time for p in run.seen] == [p.time for p in sync.seen]
    assert len(set(bits(sync))) == 9


@pytest.mark.parametrize("weights", ["time-based", "identical"])
@pytest.mark.parametrize("scenario", ["F80", "exponential"])
def test_async_fedavg_with_one_client_is_local_descent_bit_for_bit(
    federation, start, small, weights, scenario
):
    run = start(
        "async",
        federation([0.3], [5], [1.9]),
        6,
        arrays=small,
        steps=5,
        lr=0.03,
        time_scenario=scenario,
        aggregation_weights=weights,
    )
    w, expected = small["w"].numpy(), [small["w"].data]
    for n in range(6):
        w = w.astype(np.float64)
        for _ in range(5):
            w = w - 0.03 * (1.9 * (w - 0.3))
        w = w.astype(np.float32)
        assert run.seen[n + 1].arrays["w"].numpy().tobytes() == w.tobytes()
        expected.append(run.seen[n + 1].arrays["w"].data)
    assert len(set(expected)) == 7


# ---- Whatever the order and speed of the replies --------------------------------------------------


@pytest.mark.parametrize("scheme", KINDS)
def test_real_speed_and_order_change_nothing_in_virtual_time(federation, start, model, scheme):
    runs = []
    for seed in (0, 1, 2):
        grid = federation([1.0, -2.0, 0.3, 5.0, 0.9, 4.0], [3, 1, 7, 13, 5, 2], seed=seed)
        for node in grid.nodes.values():
            node.delay = seed * grid.random.random() * 0.005
        runs.append(
            start(
                scheme,
                grid,
                18,
                arrays=model(0.1, 0.2, dtype="float32"),
                steps=3,
                lr=0.05,
                time_scenario="F0" if seed is None else "F60",
                eval_every=1,
            )
        )
    for other in runs[1:]:
        assert bits(other) == bits(runs[0])
        assert other.events() == runs[0].events()
        assert [(p.time, p.metrics, p.clients) for p in other.seen] == [
            (p.time, p.metrics, p.clients) for p in runs[0].seen
        ]


def test_work_is_handed_out_ahead_of_its_due_time(federation, start):
    # All workers busy: whenever the loop waits for one reply, every other client has its task already.
    grid, waiting = federation(CENTRES, SIZES), []
    pull = grid.pull_messages

    def watched(message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        if any(m.metadata.message_id in ids for m in grid.requests()):
            waiting.append(sum(grid.under_way().values()))
        return pull(ids)

    grid.pull_messages = watched
    start("async", grid, 10)
    assert waiting == [4] * 10


@pytest.mark.parametrize("scheme", KINDS)
def test_the_same_object_can_be_started_again(federation, model, train_config, scheme):
    strategy = KINDS[scheme](make(scheme))
    one, two = (
        strategy.start(federation(), model(1.0), num_rounds=5, train_config=train_config(1, 0.1))
        .arrays["w"]
        .data
        for _ in "ab"
    )
    assert one == two
