"""The event loop: schedules, exact limits, faults, clocks and diagnostics, on bare quadratic clients."""

import gc
import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

from strategies import AsyncFedAvg, FedAvg, FedBuff, FedFix, Progress, messages
from strategies.clock import VirtualClock, WallClock
from strategies.ledger import Task
from strategies.time_scenario import TimeScenario

LOGGER = "flwr.strategies"
Model, Make = Callable[..., ArrayRecord], Callable[..., Any]
Event = tuple[float, dict[int, int]]  # time of an aggregation, and the staleness of each client in it

pytestmark = pytest.mark.timeout(60)

KINDS: dict[str, Any] = {"async": AsyncFedAvg, "fedfix": FedFix, "fedbuff": FedBuff}


def make(scheme: str, **options: Any) -> Any:
    """Return the config of a scheme; m = 2 by default."""
    return KINDS[scheme].Config(**{"buffer_size": 2} | options if scheme == "fedbuff" else options)


@dataclass
class Record:
    """What a run did: its strategy, its result and all that the observer was told."""

    grid: Any
    seen: list[Progress] = field(default_factory=list)
    strategy: Any = None
    arrays: ArrayRecord | None = None
    in_time: bool = True

    @property
    def values(self) -> list[float]:
        return [float(p.arrays["w"].numpy()[0]) for p in self.seen]

    @property
    def evaluations(self) -> list[Progress]:
        return [p for p in self.seen if p.evaluated]

    def metric(self, key: str) -> list[Any]:
        return [p.metrics.get(key) for p in self.seen[1:]]

    def events(self) -> list[Event]:
        """Return time and staleness of the contributions of every aggregation of a run without faults."""
        versions = {}  # of the model that came with each task
        for request in self.grid.requests():
            config = request.content.config_records["config"]
            versions[config["client"], config["task"]] = config["server-round"] - 1
        events, before = [], [0.0] * 1000
        for p in self.seen[1:]:
            after = p.clients["participation"]
            came = [i for i, (old, new) in enumerate(zip(before, after, strict=False)) if new > old]
            assert sum(after) - sum(before) == len(came) == p.metrics["contributions"]
            staleness = {i: p.aggregation - 1 - versions[i, int(after[i])] for i in came}
            if came:  # what is reported is the same
                assert p.metrics["staleness-mean"] == np.mean(list(staleness.values()))
                assert p.metrics["staleness-max"] == max(staleness.values())
            else:
                assert "staleness-mean" not in p.metrics
            events.append((p.time, staleness))
            before = after
        return events


Start = Callable[..., Record]


@pytest.fixture
def start(train_config: Make, model: Model) -> Start:
    """Run a strategy on a grid; a run that takes more than ``limit`` real seconds is stopped, and fails the test."""

    def run(
        scheme: str,
        grid: Any,
        rounds: int,
        *,
        arrays: ArrayRecord | None = None,
        steps: int = 1,
        lr: float = 0.5,
        clock: Any = None,
        limit: float = 20.0,
        timeout: float = 10.0,
        evaluate: Callable[[int, ArrayRecord], MetricRecord] | None = None,
        observe: Callable[[Progress], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Record:
        record, end = Record(grid), time.monotonic() + limit

        def late() -> bool:
            record.in_time = record.in_time and time.monotonic() < end
            return not record.in_time or stopped()

        def observer(progress: Progress) -> None:
            record.seen.append(progress)
            if observe:
                observe(progress)

        kind = FedAvg if scheme == "fedavg" else KINDS[scheme]
        config = kind.Config(**options) if scheme == "fedavg" else make(scheme, **options)
        record.strategy = kind(config, clock=clock, observer=observer, stopped=late)
        record.arrays = record.strategy.start(
            grid, arrays or model(1.0), num_rounds=rounds, timeout=timeout,
            train_config=train_config(steps, lr), evaluate_fn=evaluate,
        ).arrays  # fmt: skip
        assert record.in_time, f"the loop stalled; it had done {len(record.seen) - 1} aggregations"
        return record

    return run


def in_flight(grid: Any) -> dict[int, int]:
    """Replies that wait to be pulled, by node: the work that is under way."""
    nodes = {m.metadata.message_id: m.metadata.dst_node_id for m in grid.requests()}
    waiting = [nodes[message_id] for message_id in grid._replies if message_id in nodes]
    return {node_id: waiting.count(node_id) for node_id in waiting}


# ---- Schedules worked out by hand --------------------------------------------------------------------------

# Four clients, sizes 1 to 4: p = (.1, .2, .3, .4). F80: τ = (3, 7, 11, 15) fifteenths of a second.
SIZES, CENTRES, TAU = (1, 2, 3, 4), (4.0, 0.0, -2.0, 6.0), np.array([3, 7, 11, 15]) / 15
P = np.array([0.1, 0.2, 0.3, 0.4])

# "0@3": client 0 arrives at 3/15 s. A client in aggregation n gets model n; the staleness of its next contribution,
# in aggregation k, is k − 1 − n.
ASYNC_F80 = [  # 0 arrives every 3, 1 every 7, 2 every 11, 3 every 15
    (3, {0: 0}), (6, {0: 0}), (7, {1: 2}), (9, {0: 1}), (11, {2: 4}), (12, {0: 1}), (14, {1: 3}),
    (15, {0: 1}), (15, {3: 8}),  # at once: in client order
    (18, {0: 1}), (21, {0: 0}), (21, {1: 4}), (22, {2: 7}), (24, {0: 2}),
]  # fmt: skip
FEDFIX_F80 = [  # Δt = .5 s = 7.5; 0 and 1 answer within one interval, 2 and 3 within two; 3@15 is just in time
    (7.5, {0: 0, 1: 0}), (15, {0: 0, 1: 0, 2: 1, 3: 1}), (22.5, {0: 0, 1: 0}), (30, {0: 0, 1: 0, 2: 1, 3: 1}),
]  # fmt: skip
FEDFIX_F80_SHORT = [  # Δt = .1 s = 1.5; a cycle takes 2, 5, 8 and 10 intervals: 3, 7.5, 12, 15
    (1.5, {}), (3, {0: 1}), (4.5, {}), (6, {0: 1}), (7.5, {1: 4}), (9, {0: 1}), (10.5, {}),
    (12, {0: 1, 2: 7}), (13.5, {}), (15, {0: 1, 1: 4, 3: 9}),
]  # fmt: skip
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
    (1, {0: 0}), (2, {1: 1}), (4, {0: 1}), (4, {1: 1}), (4, {3: 4}), (5, {0: 2}), (5, {2: 6}), (5, {3: 2}),
    (6, {1: 4}), (8, {0: 3}), (8, {1: 1}),
]  # fmt: skip
FEDFIX_TRACE = [  # Δt = 2: 0@1 1@2; next 0@5 1@4; 1@4 3@4; next 1@6 3@5; all; next 0@7 1@8 2@11 3@10; 0@7 1@8
    (2, {0: 0, 1: 0}), (4, {1: 0, 3: 1}), (6, {0: 1, 1: 0, 2: 2, 3: 0}), (8, {0: 0, 1: 0}),
]  # fmt: skip
FEDBUFF_TRACE = [
    (2, {0: 0, 1: 0}),  # 0@1 1@2; next 0@5, 1@4
    (4, {1: 0, 3: 1}),  # next 1@6, 3@5
    (5, {0: 1, 2: 2}),  # 0@5 2@5, and 3@5 waits; next 0@6, 2@10
    (6, {0: 0, 3: 1}),  # 3@5 0@6, and 1@6 waits; next 0@9, 3@10
    (9, {0: 0, 1: 2}),  # 1@6 0@9
]
SUM = 15 * (1 / 3 + 1 / 7 + 1 / 11 + 1 / 15)  # Σ 1/τ = 9.5065
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
    # ⌈(2, 2, 5, 2.5) / 2⌉ = (1, 1, 3, 2)
    ("fedfix", {"fedfix_interval": 2.0}, "trace", 1, FEDFIX_TRACE, [0.1, 0.2, 0.9, 0.8]),
    # of five: 0 in four, 1 in three, 2 in one, 3 in two
    ("fedbuff", {}, "trace", 1, FEDBUFF_TRACE, [5 / 4 * 0.1, 5 / 3 * 0.2, 5 * 0.3, 5 / 2 * 0.4]),
]


def replay(events: Iterable[Event], d: Any, phi: float = 0.25, server_lr: float = 1.0) -> list[float]:
    """θ^{n+1} = θ^n + η_g Σ d_i φ (c_i − θ^ρ), from θ = 1: what the quadratic clients make of a schedule."""
    models = [1.0]
    for n, (_, staleness) in enumerate(events):
        moves = (d[i] * phi * (CENTRES[i] - models[n - old]) for i, old in staleness.items())
        models.append(models[-1] + server_lr * sum(moves))
    return models


@pytest.mark.parametrize(
    ("scheme", "options", "scenario", "unit", "schedule", "weights"),
    ROWS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_schedule_by_hand(
    federation: Make, start: Start, tmp_path: Any, scheme: str, options: dict[str, Any], scenario: str,
    unit: float, schedule: list[Event], weights: Any,
) -> None:  # fmt: skip
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

    def hand_out(clients: Iterable[int], now: float) -> None:
        for i in clients:
            tasks[i], version[i] = tasks[i] + 1, len(events)
            heapq.heappush(heap, (now + times.task_time(i, tasks[i]), i))

    hand_out(range(4), 0.0)
    while len(events) < rounds:
        waiting, now, tick = [], 0.0, interval * (len(events) + 1)
        while (
            heap and heap[0][0] <= tick
            if scheme == "fedfix"
            else len(waiting) < (m if scheme == "fedbuff" else 1)
        ):
            now, client = heapq.heappop(heap)
            waiting.append(client)
        now = tick if scheme == "fedfix" else now
        events.append((now, {i: len(events) - version[i] for i in sorted(waiting)}))
        hand_out(waiting, now)
    return events


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize(("scenario", "seed"), [("exponential", 0), ("exponential:F0", 5)])
def test_schedule_of_exponential_times(
    federation: Make, start: Start, scheme: str, scenario: str, seed: int
) -> None:
    expected = simulate(scheme, TimeScenario(scenario, 4, seed), 25)
    run = start(scheme, federation(CENTRES, SIZES), 25, lr=0.05, time_scenario=scenario, seed=seed)
    assert [staleness for _, staleness in run.events()] == [staleness for _, staleness in expected]
    assert [t for t, _ in run.events()] == pytest.approx([t for t, _ in expected], rel=1e-12)
    assert len({tuple(s) for _, s in expected}) > 3  # it isn't the same few over and over
    assert run.values == pytest.approx(replay(expected, run.seen[-1].clients["weight"], 0.05), rel=1e-11)


# ---- Exact limits ------------------------------------------------------------------------------------------


def bits(run: Record) -> list[bytes]:
    return [p.arrays["w"].data for p in run.seen]


@pytest.fixture
def small(model: Model) -> ArrayRecord:
    return model(0.1, -0.7, 3.3, 1e-3, dtype="float32")


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("interval", [1.0, 1.7])
def test_fedfix_with_a_long_interval_is_synchronous_fedavg_bit_for_bit(
    federation: Make, start: Start, small: ArrayRecord, weights: str, interval: float
) -> None:
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
    federation: Make, start: Start, model: Model, tmp_path: Any, scheme: str
) -> None:
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
def test_fedbuff_that_waits_for_all_is_synchronous_fedavg_bit_for_bit(
    federation: Make, start: Start, small: ArrayRecord, weights: str
) -> None:
    # `identical` has d = 1/m: equal to p for four clients of equal weight.
    common: dict[str, Any] = {"arrays": small, "steps": 7, "lr": 0.03, "time_scenario": "F0"}
    sizes = [3, 1, 7, 13] if weights == "time-based" else [5, 5, 5, 5]
    sync = start("fedavg", federation([1.0, -2.0, 0.3, 5.0], sizes), 8, **common)
    run = start(
        "fedbuff", federation([1.0, -2.0, 0.3, 5.0], sizes), 8, buffer_size=4, aggregation_weights=weights,
        **common,
    )  # fmt: skip
    assert bits(run) == bits(sync)
    assert [p.time for p in run.seen] == [p.time for p in sync.seen]
    assert len(set(bits(sync))) == 9


@pytest.mark.parametrize("weights", ["time-based", "identical"])
@pytest.mark.parametrize("scenario", ["F80", "exponential"])
def test_async_fedavg_with_one_client_is_local_descent_bit_for_bit(
    federation: Make, start: Start, small: ArrayRecord, weights: str, scenario: str
) -> None:
    run = start(
        "async", federation([0.3], [5], [1.9]), 6, arrays=small, steps=5, lr=0.03, time_scenario=scenario,
        aggregation_weights=weights,
    )  # fmt: skip
    w, expected = small["w"].numpy(), [small["w"].data]
    for n in range(6):
        w = w.astype(np.float64)
        for _ in range(5):
            w = w - 0.03 * (1.9 * (w - 0.3))
        w = w.astype(np.float32)
        assert run.seen[n + 1].arrays["w"].numpy().tobytes() == w.tobytes()
        expected.append(run.seen[n + 1].arrays["w"].data)
    assert len(set(expected)) == 7


# ---- Whatever the order and speed of the replies -----------------------------------------------------------


@pytest.mark.parametrize("scheme", KINDS)
def test_real_speed_and_order_change_nothing_in_virtual_time(
    federation: Make, start: Start, model: Model, scheme: str
) -> None:
    runs = []
    for seed in (0, 1, 2):
        grid = federation([1.0, -2.0, 0.3, 5.0, 0.9, 4.0], [3, 1, 7, 13, 5, 2], seed=seed)
        for node in grid.nodes.values():
            node.delay = seed * grid._random.random() * 0.02
        runs.append(
            start(
                scheme, grid, 18, arrays=model(0.1, 0.2, dtype="float32"), steps=3, lr=0.05,
                time_scenario="F0" if seed is None else "F60", eval_every=1,
            )
        )  # fmt: skip
    for other in runs[1:]:
        assert bits(other) == bits(runs[0])
        assert other.events() == runs[0].events()
        assert [(p.time, p.metrics, p.clients) for p in other.seen] == [
            (p.time, p.metrics, p.clients) for p in runs[0].seen
        ]


def test_work_is_handed_out_ahead_of_its_due_time(federation: Make, start: Start) -> None:
    # All workers busy: whenever the loop waits for one reply, every other client has its task already.
    grid, waiting = federation(CENTRES, SIZES), []
    pull = grid.pull_messages

    def watched(message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        if any(m.metadata.message_id in ids for m in grid.requests()):
            waiting.append(sum(in_flight(grid).values()))
        return pull(ids)

    grid.pull_messages = watched
    start("async", grid, 10)
    assert waiting == [4] * 10


@pytest.mark.parametrize("scheme", KINDS)
def test_the_same_object_can_be_started_again(
    federation: Make, model: Model, train_config: Make, scheme: str
) -> None:
    strategy = KINDS[scheme](make(scheme))
    one, two = (
        strategy.start(federation(), model(1.0), num_rounds=5, train_config=train_config(1, 0.1))
        .arrays["w"]
        .data
        for _ in "ab"
    )
    assert one == two


# ---- What is minimised -------------------------------------------------------------------------------------


def test_example_1_of_the_paper(federation: Make, start: Start) -> None:
    """Odd and even clients take turns, each pair with both kinds of data: eq. 22 holds, and it converges to θ*."""
    # F0, m = 2: clients 0 and 1 are in aggregations 1, 3, …; 2 and 3 in 2, 4, …; kinds of data at 1 and 4: θ* = 2.5.
    run = start(
        "fedbuff", federation([1.0, 4.0, 1.0, 4.0], [1] * 4), 60, lr=0.2, steps=2, time_scenario="F0",
        aggregation_weights="identical",
    )  # fmt: skip
    assert [list(staleness) for _, staleness in run.events()] == [[0, 1], [2, 3]] * 30
    phi, theta = 1 - (1 - 0.2) ** 2, run.values  # φ = 1 − (1 − η)^K
    assert theta[1] == pytest.approx(1 + phi * 1.5)
    for n in range(59):
        assert theta[n + 2] - theta[n + 1] + phi * theta[n] == pytest.approx(phi * 2.5, abs=1e-12)
    assert theta[-1] == pytest.approx(2.5, abs=1e-5)


@pytest.mark.parametrize(
    ("scenario", "weights", "limit"),
    [
        ("F0", "identical", 3.0),  # they take turns: q̃ = (1/2, 1/2) = p
        ("F50", "identical", 2.0),  # client 0 answers twice as often: q̃ = (2/3, 1/3), and 0·2/3 + 6/3
        ("F50", "time-based", 3.0),
    ],
)
def test_example_2_of_the_paper(
    federation: Make,
    start: Start,
    caplog: pytest.LogCaptureFixture,
    scenario: str,
    weights: str,
    limit: float,
) -> None:
    run = start(
        "async", federation([0.0, 6.0], [1, 1]), 600, lr=0.02, time_scenario=scenario, eval_every=600,
        aggregation_weights=weights,
    )  # fmt: skip
    assert np.mean(run.values[-6:]) == pytest.approx(limit, abs=0.06)  # eq. 30, for a small step
    said = [r.message for r in caplog.records if "this run minimised" in r.message]
    assert len(said) == (limit != 3.0)
    if said:
        assert "distance is 0.167" in said[0]  # ½ (2/3 − 1/2 + 1/2 − 1/3) = 1/6
        assert "client 0 counted most in excess, 0.6667 for 0.5000" in said[0]


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [("async", "time-based"), ("async", "identical"), ("fedfix", "time-based"), ("fedbuff", "time-based"),
     ("fedbuff", "identical")],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [SIZES, (1, 1, 1, 1)])
def test_quadratics_converge_to_the_optimum_of_the_expected_shares(
    federation: Make, start: Start, caplog: pytest.LogCaptureFixture, scheme: str, weights: str, sizes: Any
) -> None:
    rounds, centres = 500 if scheme == "async" else 300, [8.0, 3.0, 0.0, -9.0]
    run = start(
        scheme, federation(centres, sizes), rounds, lr=0.02, eval_every=rounds, aggregation_weights=weights
    )
    p = np.array(sizes) / sum(sizes)
    if weights == "time-based":
        q = p
    elif scheme == "async":
        q = (1 / TAU) / (1 / TAU).sum()
    else:  # how often each is in a buffer of the schedule
        counts = np.array(run.evaluations[-1].clients["participation"])
        assert counts[0] > 2 * counts[3]
        q = counts / counts.sum()
    optimum, federated = q @ centres, p @ centres
    if weights == "identical":
        assert abs(optimum - federated) > 2
    assert np.mean(run.values[-30:]) == pytest.approx(optimum, abs=0.3)
    assert run.evaluations[-1].clients["expected-share"] == pytest.approx(q.tolist(), rel=1e-9)
    said = [r.message for r in caplog.records if "this run minimised" in r.message]
    assert len(said) == (weights == "identical")


@pytest.mark.parametrize(
    ("scheme", "scenario"),
    [("async", "F80"), ("fedfix", "F80"), ("fedbuff", "F80"), ("async", "trace"), ("fedfix", "trace"),
     ("fedbuff", "trace"), ("fedbuff", "exponential")],
)  # fmt: skip
def test_expected_shares_are_those_observed_in_the_long_run(
    federation: Make, start: Start, tmp_path: Any, scheme: str, scenario: str
) -> None:
    if scenario == "trace":
        # Client 0: τ = 1 s, mostly .25 s. With Δt = .5: (1 + 1 + 1 + 7)/4 = 2.5 intervals a task, and not ⌈1/.5⌉ = 2;
        # client 1: 1.1 s is 3 intervals.
        (tmp_path / "times.csv").write_text("0,.25\n0,.25\n0,.25\n0,3.25\n1,1.1\n2,0.9\n3,1.5\n")
        scenario = f"trace:{tmp_path / 'times.csv'}"
    run = start(
        scheme, federation([0.0] * 4, SIZES), 400, lr=0.01, time_scenario=scenario, eval_every=400, limit=30
    )
    last = run.evaluations[-1].clients
    assert last["observed-share"] == pytest.approx(last["expected-share"], abs=0.012)


# ---- Server optimizers in the loop -------------------------------------------------------------------------


def test_sgd_with_rate_one_is_the_plain_sum(federation: Make, start: Start) -> None:
    one = start("async", federation(CENTRES, SIZES), 8, lr=0.25)
    two = start("async", federation(CENTRES, SIZES), 8, lr=0.25, server_lr=1.0, server_optimizer="sgd")
    assert bits(one) == bits(two)


def test_the_server_rate_scales_every_move(federation: Make, start: Start) -> None:
    run = start("async", federation(CENTRES, SIZES), 14, lr=0.25, server_lr=0.3)
    assert run.values == pytest.approx(replay(ASYNC_F80, SUM * TAU * P, server_lr=0.3), rel=1e-11)


def test_momentum_and_adam_take_the_place_of_the_server_rate(federation: Make, start: Start) -> None:
    # F0, all four in each: Σ p c = .4 − .6 + 2.4 = 2.2. Update 1: .25 (2.2 − 1) = .3.
    common: dict[str, Any] = {"lr": 0.25, "buffer_size": 4, "time_scenario": "F0", "server_lr": 0.1}
    run = start("fedbuff", federation(CENTRES, SIZES), 2, server_optimizer="momentum", **common)
    # θ = 1 + .1·.3 = 1.03; update .25·1.17 = .2925, v = .9·.3 + .2925 = .5625, θ = 1.08625.
    assert run.values == pytest.approx([1.0, 1.03, 1.08625], rel=1e-12)
    run = start("fedbuff", federation(CENTRES, SIZES), 2, server_optimizer="adam", **common)
    # m = .03, v = .99e-6 + .01·.09 = .00090099: θ = 1 + .1·.03 / (√.00090099 + .001).
    first = 1 + 0.003 / (0.00090099**0.5 + 0.001)
    update = 0.25 * (2.2 - first)
    m, v = 0.9 * 0.03 + 0.1 * update, 0.99 * 0.00090099 + 0.01 * update**2
    assert run.values == pytest.approx([1.0, first, first + 0.1 * m / (v**0.5 + 0.001)], rel=1e-12)


def test_an_interval_without_arrivals_leaves_model_and_momentum_alone(federation: Make, start: Start) -> None:
    # Δt = .1, τ = .25 each (F0 is 1 s: ten intervals): only the tenth moves.
    run = start(
        "fedfix", federation(CENTRES, SIZES), 14, lr=0.25, time_scenario="F0", fedfix_interval=0.1,
        server_optimizer="momentum",
    )  # fmt: skip
    # d = 10 p; 1 + 10·.3 = 4 at the tenth, and no coasting after it.
    assert run.values == pytest.approx([1.0] * 10 + [4.0] * 5)


# ---- Diagnostics -------------------------------------------------------------------------------------------


def losses(aggregation: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": 1.5, "client-losses": [8.0, 4.0, 0.0]})


def test_every_diagnostic_of_a_small_run_by_hand(federation: Make, start: Start, model: Model) -> None:
    # p = (1, 2, 5)/8, τ = (.2, .6, 1): 0@.2 0@.4 0@.6 1@.6 | 0@.8 0@1. d = 23/3 τ p = (.575/3, 1.15, 14.375/3).
    run = start("async", federation(), 6, eval_every=4, evaluate=losses)
    assert [p.evaluated for p in run.seen] == [True, False, False, False, True, False, True]
    assert [p.time for p in run.seen] == pytest.approx([0, 0.2, 0.4, 0.6, 0.6, 0.8, 1.0])
    four, last = run.seen[4], run.seen[6]
    assert set(four.clients) == {
        "participation", "weight", "task-time", "importance", "expected-share", "observed-share", "loss",
    }  # fmt: skip
    assert four.clients["loss"] == [8, 4, 0]
    assert four.clients["participation"] == [3, 1, 0]
    assert four.clients["weight"] == pytest.approx([0.575 / 3, 1.15, 14.375 / 3])
    assert four.clients["task-time"] == pytest.approx([0.2, 0.6, 1.0])
    assert four.clients["importance"] == [0.125, 0.25, 0.625]
    assert four.clients["expected-share"] == pytest.approx([0.125, 0.25, 0.625])
    assert four.clients["observed-share"] == pytest.approx([1 / 3, 2 / 3, 0])  # .575 : 1.15 : 0
    assert last.clients["participation"] == [5, 1, 0]
    assert last.clients["observed-share"] == pytest.approx([2.875 / 6.325, 3.45 / 6.325, 0])
    # Staleness 0, 0, 0 and 3; then 0@.8 had model 3 (n = 4) and 0@1 model 5 (n = 5).
    assert (four.metrics["staleness-mean"], four.metrics["staleness-max"]) == (0.75, 3)
    assert (last.metrics["staleness-mean"], last.metrics["staleness-max"]) == (0.5, 1)
    assert (four.metrics["contributions"], last.metrics["contributions"]) == (4, 2)
    # Down: three at the start and one after each aggregation but the last; up: one per contribution.
    size = messages.num_bytes(model(1.0))
    assert [p.metrics["bytes-down"] for p in (four, last)] == [7 * size, 1 * size]
    assert [p.metrics["bytes-up"] for p in (four, last)] == [4 * size, 2 * size]
    assert (four.metrics["failures"], four.metrics["loss"]) == (0, 1.5)
    assert four.metrics["weights-distance"] == pytest.approx(0, abs=1e-12)
    # p: 1 + 1 + 0 = 2, and 36/8 + 2·4/8 + 5·4/8 = 8. Here q̃ = p.
    for name in ("federated-loss", "surrogate-loss"):
        assert four.metrics[name] == pytest.approx(2.0)
        assert four.metrics[f"{name}-std"] == pytest.approx(8**0.5)
    assert "client-losses" not in four.metrics
    # The mean of the losses that the clients trained from: ½ (1 − c)² at model 1 for client 0's first and client 1.
    before = [run.values[k] for k in (0, 1, 2)]
    expected = [0.5 * (w - 3) ** 2 for w in before] + [0.5 * (1 - 2) ** 2]
    assert four.metrics["train-loss"] == pytest.approx(np.mean(expected))


def test_the_surrogate_loss_is_that_of_the_expected_shares(federation: Make, start: Start) -> None:
    run = start("async", federation(), 1, evaluate=losses, aggregation_weights="identical", lr=0.1)
    # q̃ = (15, 5, 3)/23: (120 + 20)/23; Σ q̃ f² = (960 + 80)/23.
    mean = 140 / 23
    assert run.seen[1].metrics["surrogate-loss"] == pytest.approx(mean)
    assert run.seen[1].metrics["surrogate-loss-std"] == pytest.approx((1040 / 23 - mean**2) ** 0.5)
    assert run.seen[1].metrics["federated-loss"] == pytest.approx(2.0)
    # ½ (|15/23 − 1/8| + |5/23 − 1/4| + |3/23 − 5/8|) = 15/23 − 1/8
    assert run.seen[1].metrics["weights-distance"] == pytest.approx(15 / 23 - 1 / 8)


def test_client_evaluation_is_the_federated_objective(federation: Make, start: Start) -> None:
    run = start("async", federation(), 2, client_evaluation=True, aggregation_weights="identical")
    # 0@.2: 1 + .5·2 = 2, 0@.4: 2.5. f = ½ Σ p (w − c)²: ½ (1/8 + 0 + 5·9/8), ½ (1/32 + 1/16 + 5·12.25/8).
    assert run.values == [1.0, 2.0, 2.5]
    assert run.metric("client-loss") == pytest.approx([2.875, 0.5 * (1 / 32 + 1 / 16 + 5 * 12.25 / 8)])


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize(
    ("eval_every", "rounds", "expected"),
    [(1, 3, [0, 1, 2, 3]), (2, 4, [0, 2, 4]), (2, 5, [0, 2, 4, 5]), (10, 3, [0, 3]), (1, 0, [0])],
)
def test_rounds_and_evaluations(
    federation: Make, start: Start, recwarn: pytest.WarningsRecorder, scheme: str, eval_every: int, rounds: int,
    expected: list[int],
) -> None:  # fmt: skip
    evaluated = []

    def evaluate(aggregation: int, arrays: ArrayRecord) -> MetricRecord:
        evaluated.append((aggregation, float(arrays["w"].numpy()[0])))
        return MetricRecord({"loss": 0.5})

    run = start(scheme, federation(), rounds, eval_every=eval_every, evaluate=evaluate, lr=0.1)
    assert [p.aggregation for p in run.seen] == list(range(rounds + 1))  # observed every one
    assert [aggregation for aggregation, _ in evaluated] == expected
    assert [p.aggregation for p in run.evaluations] == expected
    assert [value for _, value in evaluated] == [run.values[n] for n in expected]  # each of its own model
    assert run.arrays is not None
    assert run.arrays["w"].data == run.seen[-1].arrays["w"].data
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]  # no 0/0
    if rounds == 0:
        assert run.grid.asked() == []  # nobody works for nothing


@pytest.mark.parametrize(
    ("scheme", "budget", "times"),
    [
        ("async", 0.75, [0, 0.2, 0.4, 0.6, 0.6]),  # 0@.8 is too late
        ("async", 0.6, [0, 0.2, 0.4, 0.6, 0.6]),  # what ends with the budget counts
        ("async", 0.1, [0]),
        ("fedfix", 1.4, [0, 0.5, 1.0]),
        ("fedfix", 1.0, [0, 0.5, 1.0]),
        ("fedbuff", 1.0, [0, 0.6, 1.0]),  # 0@.2 1@.6, 0@.8 2@1
    ],
)
def test_time_budget(federation: Make, start: Start, scheme: str, budget: float, times: list[float]) -> None:
    evaluated: list[int] = []
    run = start(
        scheme, federation(), 100, time_budget=budget, eval_every=100, lr=0.1,
        evaluate=lambda n, _: evaluated.append(n) or MetricRecord({"loss": 1.0}),
    )  # fmt: skip
    aggregations = [p for p in run.seen if p.aggregation or not p.time]
    assert sorted({p.aggregation for p in aggregations}) == list(range(len(times)))
    assert run.strategy.clock.now() <= budget
    assert [p.time for p in run.seen][: len(times)] == pytest.approx(times)
    assert evaluated == ([0, len(times) - 1] if len(times) > 1 else [0])  # the last model, and once


@pytest.mark.parametrize("scheme", KINDS)
def test_stopped_in_the_middle(federation: Make, start: Start, scheme: str) -> None:
    count = [0]

    def observe(progress: Progress) -> None:
        count[0] = progress.aggregation

    run = start(scheme, federation(), 1000, observe=observe, stopped=lambda: count[0] >= 3, eval_every=2)
    assert [p.aggregation for p in run.seen] == [0, 1, 2, 3, 3]  # and the last complete model is evaluated
    assert run.seen[-1].evaluated
    assert run.arrays is not None
    assert run.arrays["w"].data == run.seen[3].arrays["w"].data


@pytest.mark.parametrize("scheme", KINDS)
def test_stopped_before_any_client_answered(
    federation: Make, start: Start, scheme: str, model: Model
) -> None:
    run = start(scheme, federation(), 5, stopped=lambda: True)
    assert run.arrays is not None
    assert run.arrays["w"].data == model(1.0)["w"].data


def test_stopped_while_waiting_for_a_reply(federation: Make, start: Start) -> None:
    grid, began = federation(), time.monotonic()
    grid.node(0).delay = 30.0
    start("async", grid, 5, stopped=lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 2.0


def test_clients_without_a_description_are_weighted_by_the_sizes_in_their_replies(
    federation: Make, start: Start
) -> None:
    # As strategies/roster.py promises; the order is by node id, so only the set of weights is known.
    run = start("fedfix", federation(describes=False, node_ids=[5, 6, 7]), 4, fedfix_interval=1.0, lr=0.1)
    assert sorted(run.seen[-1].clients["importance"]) == [0.125, 0.25, 0.625]


# ---- Faults in virtual time --------------------------------------------------------------------------------

BAD = ["raise", "nan", "inf", "shape", "dtype", "name", "bytes", "npz", "stype", "no-arrays"]


def text_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == LOGGER)


@pytest.mark.parametrize("fault", [*BAD, "unavailable", "unstorable", "drop"])
def test_a_client_that_never_answers_well_is_dropped_in_virtual_time(
    federation: Make, start: Start, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    # p = (1, 2, 5)/8, τ = (.2, .6, 1). Client 2 misses at 1, 2 and 3 s and is dropped; then p = (1/3, 2/3),
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


def test_a_dropped_client_is_asked_again_and_counts_again(
    federation: Make, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_single_misses_do_not_add_up(
    federation: Make, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    grid = federation()
    push = grid.push_messages

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        ids = []
        for m in requests:  # client 0 does every third task only
            grid.spoil(0, "raise" if m.content.config_records["config"].get("task", 0) % 3 else None)
            ids += push([m])
        return ids

    grid.push_messages = pushed
    run = start("async", grid, 30, lr=0.1)
    assert sum(run.metric("failures")) > 6
    assert run.seen[-1].clients["participation"][0] > 3
    assert "is dropped" not in text_of(caplog)


@pytest.mark.parametrize("scheme", KINDS)
def test_a_doubled_reply_counts_once(federation: Make, start: Start, scheme: str) -> None:
    plain = start(scheme, federation(), 12, lr=0.1)
    grid = federation()
    for client in range(3):
        grid.lose(client, "twice")
    doubled = start(scheme, grid, 12, lr=0.1)
    assert bits(doubled) == bits(plain)
    assert doubled.events() == plain.events()


@pytest.mark.parametrize("fault", ["raise", "nan", "unavailable"])
def test_fedbuff_does_not_wait_for_a_dropped_client(federation: Make, start: Start, fault: str) -> None:
    """m = C: two contributions wait in the buffer when the third client is dropped."""
    grid = federation()
    grid.spoil(2, fault) if fault in BAD else grid.lose(2, fault)
    run = start("fedbuff", grid, 6, lr=0.1, buffer_size=3, limit=3.0)
    # Misses at 1, 2, 3 s; then 0 and 1 by themselves, at 3 s, 3.6 s, …
    assert [p.time for p in run.seen[1:]] == pytest.approx([3.0, 3.6, 4.2, 4.8, 5.4, 6.0])
    assert run.seen[-1].clients["participation"] == [6, 6, 0]
    assert run.seen[-1].clients["weight"] == pytest.approx([1 / 3, 2 / 3, 0])


@pytest.mark.parametrize("scheme", KINDS)
def test_when_all_clients_fail_for_good_the_run_ends_with_an_error_that_says_so(
    federation: Make, start: Start, scheme: str
) -> None:
    grid = federation()
    for client in range(3):
        grid.spoil(client, "raise")
    with pytest.raises(RuntimeError, match="no client is left"):
        start(scheme, grid, 50, limit=3.0)


@pytest.mark.parametrize("scheme", KINDS)
def test_a_time_budget_ends_a_run_whose_clients_all_fail(federation: Make, start: Start, scheme: str) -> None:
    grid = federation()
    for client in range(3):
        grid.spoil(client, "raise")
    run = start(
        scheme, grid, 3, limit=3.0, time_budget=2.5
    )  # two misses each at most of the slow: not all dropped
    assert run.values[-1] == 1.0


def test_after_a_fault_the_losses_are_weighed_by_the_same_p_as_all_else(
    federation: Make, start: Start
) -> None:
    grid = federation()
    grid.spoil(2, "raise")
    last = start("async", grid, 30, lr=0.1, evaluate=losses).seen[-1]
    # p = (1/3, 2/3, 0) after the drop: 8/3 + 8/3.
    assert last.clients["importance"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert last.metrics["surrogate-loss"] == pytest.approx(16 / 3)
    assert last.metrics["federated-loss"] == pytest.approx(16 / 3)


# ---- Wall time ---------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines, retries and looks at the nodes for a run of a second."""
    monkeypatch.setattr("strategies.pace.SHORTEST_DEADLINE", 0.15)
    monkeypatch.setattr("strategies.events.RETRY_AFTER", 1.2)
    monkeypatch.setattr("strategies.pace.REFRESH_EVERY", 0.02)


def delayed(grid: Any, *delays: float) -> Any:
    for client, delay in enumerate(delays):
        grid.node(client).delay = delay
    return grid


def check_accounts(run: Record) -> None:
    """Nothing is counted twice: participation adds up to the contributions, none without a task of its own."""
    last = run.evaluations[-1].clients["participation"]
    assert sum(last) == sum(p.metrics.get("contributions", 0) for p in run.seen[1:])
    tasks = [
        (m.content.config_records["config"]["client"], m.content.config_records["config"]["task"])
        for m in run.grid.requests()
    ]
    assert len(set(tasks)) == len(tasks)
    for client, count in enumerate(last):
        assert count <= sum(index == client for index, _ in tasks)


@pytest.mark.parametrize("scheme", KINDS)
def test_wall_time_without_faults(federation: Make, start: Start, quick: None, scheme: str) -> None:
    grid = delayed(federation(), 0.02, 0.04, 0.06)
    run = start(scheme, grid, 12, lr=0.1, clock=WallClock(), fedfix_interval=0.05) if scheme == "fedfix" else start(
        scheme, grid, 12, lr=0.1, clock=WallClock()
    )  # fmt: skip
    assert [p.aggregation for p in run.seen] == list(range(13))
    check_accounts(run)
    assert sum(run.metric("failures")) == 0
    assert run.evaluations[-1].clients["participation"][0] > 0
    assert all(n <= 1 for n in in_flight(grid).values())  # one task per client at a time
    assert run.events()[-1][1] is not None  # staleness as reported, checked inside


def test_task_times_are_running_means_of_what_was_observed(
    federation: Make, start: Start, quick: None
) -> None:
    grid, sent, observed = delayed(federation(), 0.03, 0.08, 30.0), {}, {0: [], 1: []}
    push, pull = grid.push_messages, grid.pull_messages

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        requests = list(requests)
        ids = push(requests)
        for m in requests:
            sent[m.metadata.message_id] = (time.monotonic(), m.content.config_records["config"].get("client"))
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
    run = start("async", grid, 8, lr=0.1, clock=WallClock(), timeout=30.0)
    last = run.seen[-1].clients
    tau = last["task-time"]
    assert len(observed[0]) >= 3
    assert observed[0][0] < 0.07 < observed[0][1]
    assert tau[:2] == pytest.approx([np.mean(observed[0]), np.mean(observed[1])], abs=0.015)
    assert tau[2] == pytest.approx(np.mean(tau[:2]))  # it hasn't answered: the mean of the others
    # The weights use these estimates (eq. 36), and the report has them.
    expected = sum(1 / t for t in tau) * np.array(tau) * [0.125, 0.25, 0.625]
    assert last["weight"] == pytest.approx(expected.tolist(), rel=1e-9)
    assert last["expected-share"] == pytest.approx([0.125, 0.25, 0.625])
    first = run.seen[1].clients["task-time"]
    assert first == pytest.approx([first[0]] * 3)  # when only one has answered, all are like it


def test_fedfix_aggregates_about_every_interval(federation: Make, start: Start, quick: None) -> None:
    run = start(
        "fedfix", delayed(federation(), 0.01, 0.12, 0.25), 8, lr=0.1, clock=WallClock(), fedfix_interval=0.1
    )
    times = [p.time for p in run.seen[1:]]
    assert np.diff(times) == pytest.approx([0.1] * 7, abs=0.08)
    assert np.mean(np.diff(times)) == pytest.approx(0.1, abs=0.02)
    assert run.seen[-1].clients["participation"][0] >= 6
    check_accounts(run)


def test_fedfix_counts_its_intervals_from_the_first_task(federation: Make, start: Start, quick: None) -> None:
    """The clock has run for a while, as through Ray's start and the handshake: no burst of empty intervals."""
    clock = WallClock()
    time.sleep(0.6)
    run = start(
        "fedfix", delayed(federation(), 0.01, 0.02, 0.03), 5, lr=0.1, clock=clock, fedfix_interval=0.1
    )
    assert run.metric("contributions") == [3] * 5
    assert np.diff([p.time for p in run.seen[1:]]).min() > 0.05


def test_fedfix_does_not_make_up_for_missed_intervals(federation: Make, start: Start, quick: None) -> None:
    def evaluate(aggregation: int, arrays: ArrayRecord) -> MetricRecord:
        time.sleep(0.5 if aggregation == 2 else 0.0)
        return MetricRecord({"loss": 1.0})

    run = start(
        "fedfix", delayed(federation(), 0.01, 0.02, 0.03), 6, lr=0.1, clock=WallClock(), fedfix_interval=0.1,
        evaluate=evaluate,
    )  # fmt: skip
    assert all(c >= 1 for c in run.metric("contributions"))


@pytest.mark.parametrize("scheme", ["async", "fedfix"])
def test_no_busy_waiting(federation: Make, start: Start, scheme: str) -> None:
    grid, pulls = delayed(federation(), 1.0, 1.0, 1.0), [0]
    pull = grid.pull_messages

    def counted(message_ids: Iterable[str]) -> Iterable[Message]:
        pulls[0] += 1
        return pull(message_ids)

    grid.pull_messages = counted
    used = time.process_time()
    options = {"fedfix_interval": 1.0} if scheme == "fedfix" else {}
    run = start(scheme, grid, 1, lr=0.1, clock=WallClock(), **options)
    assert pulls[0] < 300
    assert time.process_time() - used < 0.5
    if scheme == "async":
        assert 1.0 <= run.seen[1].time < 1.4  # and it is noticed soon


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [("async", fault) for fault in [*BAD, "unavailable", "unstorable", "drop", "twice"]]
    + [("fedbuff", fault) for fault in ("raise", "unstorable", "drop", "twice")],
)
def test_wall_faults_do_not_stall_the_loop(
    federation: Make, start: Start, quick: None, caplog: pytest.LogCaptureFixture, scheme: str, fault: str
) -> None:
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
        scheme, grid, 100_000, lr=0.01, clock=WallClock(), timeout=0.15, observe=observe, limit=4.0,
        stopped=lambda: enough[0], **options,
    )  # fmt: skip
    check_accounts(run)
    if fault == "twice":
        assert sum(run.metric("failures")) == 0
        return
    assert run.evaluations[-1].clients["participation"][2] == 0
    assert run.evaluations[-1].clients["importance"] == pytest.approx([1 / 3, 2 / 3, 0])
    assert text_of(caplog).count("client 2 is dropped after 3 misses in a row") == 1


def test_a_late_reply_to_an_abandoned_task_is_never_counted(
    federation: Make, start: Start, quick: None
) -> None:
    grid = delayed(federation(), 0.02, 0.02, 0.25)  # given up after .15 s; its replies come later
    run = start("async", grid, 100_000, lr=0.01, clock=WallClock(), timeout=0.15, limit=5, time_budget=0.8)
    check_accounts(run)
    assert run.evaluations[-1].clients["participation"][2] == 0
    assert sum(p.metrics.get("failures", 0) for p in run.seen) >= 3


def test_a_node_that_comes_back_under_another_id(
    federation: Make,
    start: Start,
    add_node: Make,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is dropped, comes back, and is then asked once at a time: not for its retry on top."""
    monkeypatch.setattr("strategies.pace.SHORTEST_DEADLINE", 5.0)  # no task is given up
    grid = delayed(federation(), 0.02, 0.03, 0.02)
    grid.spoil(2, "raise")

    def observe(progress: Progress) -> None:
        if progress.clients and progress.clients["importance"][2] == 0 and 77 not in grid.nodes:
            grid.node(2).present = False
            add_node(grid, 2, 2, 77, **{"fault-train": ""}).context.node_config.pop("fault-train")
            grid.nodes[77].delay = 0.02

    run = start("async", grid, 100_000, lr=0.01, clock=WallClock(), observe=observe, limit=6, time_budget=1.0)
    check_accounts(run)
    assert text_of(caplog).count("client 2 is dropped") == 1
    assert text_of(caplog).count("client 2 is back, as node 77") == 1
    last = run.evaluations[-1].clients
    assert last["participation"][2] > 3
    assert last["importance"] == [0.125, 0.25, 0.625]
    assert all(count <= 1 for count in in_flight(grid).values())


def test_a_stale_retry_does_not_double_work_that_waits_in_the_buffer(
    federation: Make, start: Start, add_node: Make, quick: None
) -> None:
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
    run = start("fedfix", grid, 4, lr=0.01, clock=WallClock(), fedfix_interval=0.3)
    check_accounts(run)
    assert 77 in {m.metadata.dst_node_id for m in grid.requests()}
    assert np.diff([p.clients["participation"][2] for p in run.seen[1:]]).max() == 1


def test_a_node_that_is_replaced_while_its_work_waits_in_the_buffer(
    federation: Make, start: Start, add_node: Make, quick: None
) -> None:
    """FedFix with a long interval: client 0's work has arrived, then its node comes back under another id."""
    grid = delayed(federation(), 0.01, 0.4, 0.4)
    pull, began = grid.pull_messages, time.monotonic()

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        if time.monotonic() - began > 0.1 and 77 not in grid.nodes:
            grid.node(0).present = False
            add_node(grid, like=0, partition=0, node_id=77).delay = 0.01
        return pull(message_ids)

    grid.pull_messages = pulled
    run = start("fedfix", grid, 4, lr=0.01, clock=WallClock(), fedfix_interval=0.25)
    check_accounts(run)
    assert 77 in {m.metadata.dst_node_id for m in grid.requests()}
    # From then on it counts once per interval.
    assert all(count <= 1 for count in in_flight(grid).values())
    participation = [p.clients["participation"][0] for p in run.seen[2:]]
    assert np.diff(participation).max() <= 1


def test_a_node_that_is_replaced_and_fails_while_its_work_waits_in_the_buffer(
    federation: Make, start: Start, add_node: Make, quick: None
) -> None:
    """Its client is dropped while a good contribution of it waits: that one counts or not, but nothing breaks."""
    grid = delayed(federation(), 0.01, 0.1, 0.1)
    pull, began = grid.pull_messages, time.monotonic()

    def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
        if time.monotonic() - began > 0.08 and 77 not in grid.nodes:
            grid.node(0).present = False
            add_node(grid, 0, 0, 77, **{"fault-train": "raise"})
        return pull(message_ids)

    grid.pull_messages = pulled
    run = start("fedfix", grid, 3, lr=0.01, clock=WallClock(), fedfix_interval=0.4)
    check_accounts(run)


def test_with_all_nodes_away_the_run_waits_and_asks_who_is_back_at_once(
    federation: Make,
    start: Start,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each is dropped, as it misses three tasks, and comes back under its own id, long before its retry."""
    monkeypatch.setattr("strategies.events.RETRY_AFTER", 1e6)
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
        "async", grid, 30, lr=0.01, clock=WallClock(), limit=8,
        observe=lambda progress: switch(False) if progress.aggregation == 3 else None,
    )  # fmt: skip
    check_accounts(run)
    assert len(run.seen) == 31
    assert text_of(caplog).count("no client is connected") == 1
    assert run.evaluations[-1].clients["importance"] == [0.125, 0.25, 0.625]


def test_a_late_joiner_takes_part(federation: Make, start: Start, add_node: Make, quick: None) -> None:
    grid = delayed(federation(), 0.02, 0.03, 0.02)

    def observe(progress: Progress) -> None:
        if progress.aggregation == 5:
            add_node(grid, 0, 3, 77, **{"num-examples": 8}).delay = 0.02

    run = start("async", grid, 100_000, lr=0.01, clock=WallClock(), observe=observe, time_budget=0.6, limit=5)
    last = run.evaluations[-1].clients
    assert last["importance"] == [1 / 16, 2 / 16, 5 / 16, 8 / 16]
    assert last["participation"][3] > 2
    check_accounts(run)
    assert all(count <= 1 for count in in_flight(grid).values())


@pytest.mark.parametrize("how", ["drop", "slow"])
def test_a_newcomer_that_does_not_describe_itself_stalls_nobody(
    federation: Make, start: Start, add_node: Make, quick: None, how: str
) -> None:
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
        limit=6,
        timeout=3.0 if how == "slow" else 4.0,
    )
    # Sixty arrivals at 2 to 3 in .02 s take less than a second; the handshake's timeout is 3 s or more.
    assert np.diff([p.time for p in run.seen]).max() < 1.0


def test_all_clients_fail_in_wall_time_until_they_are_well_again(
    federation: Make, start: Start, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    grid, began = delayed(federation(), 0.01, 0.01, 0.01), time.monotonic()
    for client in range(3):
        grid.spoil(client, "raise")
    push = grid.push_messages

    def pushed(requests: Iterable[Message]) -> Iterable[str]:
        if time.monotonic() - began > 0.5:
            for client in range(3):
                grid.spoil(client, None)
        return push(requests)

    grid.push_messages = pushed
    # None has been observed: τ is taken as 1 s, and 1.2 s pass until they are asked again.
    run = start("async", grid, 5, lr=0.01, clock=WallClock(), limit=8)
    assert text_of(caplog).count("is dropped") == 3
    assert text_of(caplog).count("counts again") == 3
    assert run.seen[-1].aggregation == 5
    check_accounts(run)


def test_in_wall_time_a_run_without_anybody_can_be_stopped(
    federation: Make, start: Start, quick: None
) -> None:
    grid, began = federation(), time.monotonic()
    for client in range(3):
        grid.spoil(client, "raise")
    run = start("async", grid, 5, clock=WallClock(), limit=8, stopped=lambda: time.monotonic() - began > 1.0)
    assert run.values[-1] == 1.0


def test_a_wall_run_stops_with_its_time_budget(federation: Make, start: Start, quick: None) -> None:
    run = start(
        "async", delayed(federation(), 0.02, 0.02, 0.02), 100_000, lr=0.01, clock=WallClock(), time_budget=0.3,
        eval_every=100_000, limit=5,
    )  # fmt: skip
    assert 0.2 < run.seen[-1].time < 0.6
    assert run.seen[-1].evaluated
    check_accounts(run)


def test_models_of_answered_tasks_are_not_kept(federation: Make, start: Start, quick: None) -> None:
    """In wall time a deadline is minutes away: what a finished task started from must not wait for it."""
    run = start(
        "async", delayed(federation(), 0.001, 0.001, 0.001), 60, clock=WallClock(), timeout=600, lr=0.01
    )
    known = [
        task
        for task in gc.get_objects()
        if isinstance(task, Task) and task.member in run.strategy.ledger.members.values()
    ]
    assert len(known) <= 3


def test_virtual_clock_is_the_default(federation: Make, start: Start) -> None:
    assert isinstance(start("async", federation(), 1).strategy.clock, VirtualClock)
