"""What the tests of the event loop share: schemes, the record of a run, and arithmetic on schedules."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord

from strategies import AsyncFedAvg, FedBuff, FedFix, Progress
from strategies.flower import messages

LOGGER = "flwr.strategies"
Event = tuple[float, dict[int, int]]  # time of an aggregation, and the staleness of each client in it

KINDS: dict[str, Any] = {"async": AsyncFedAvg, "fedfix": FedFix, "fedbuff": FedBuff}


def make(scheme: str, **options: Any) -> Any:
    """Return the config of a scheme; by default m = 2, η_g = 1 and an evaluation at every aggregation."""
    usual = {"eval_every": 1, "server_lr": 1.0, "min_clients": 1}
    return KINDS[scheme].Config(**usual | ({"buffer_size": 2} if scheme == "fedbuff" else {}) | options)


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
            versions[config[messages.CLIENT], config[messages.TASK]] = config["server-round"] - 1
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


# Four clients, sizes 1 to 4: p = (.1, .2, .3, .4). F80: τ = (3, 7, 11, 15) fifteenths of a second.
SIZES, CENTRES, TAU = (1, 2, 3, 4), (4.0, 0.0, -2.0, 6.0), np.array([3, 7, 11, 15]) / 15
P = np.array([0.1, 0.2, 0.3, 0.4])


# "0@3": client 0 arrives at 3/15 s. A client in aggregation n gets model n; the staleness of its next contribution,
# in aggregation k, is k − 1 − n.
ASYNC_F80 = [  # 0 arrives every 3, 1 every 7, 2 every 11, 3 every 15
    (3, {0: 0}),
    (6, {0: 0}),
    (7, {1: 2}),
    (9, {0: 1}),
    (11, {2: 4}),
    (12, {0: 1}),
    (14, {1: 3}),
    (15, {0: 1}),
    (15, {3: 8}),  # at once: in client order
    (18, {0: 1}),
    (21, {0: 0}),
    (21, {1: 4}),
    (22, {2: 7}),
    (24, {0: 2}),
]

SUM = 15 * (1 / 3 + 1 / 7 + 1 / 11 + 1 / 15)  # Σ 1/τ = 9.5065


def replay(events: Iterable[Event], d: Any, phi: float = 0.25, server_lr: float = 1.0) -> list[float]:
    """θ^{n+1} = θ^n + η_g Σ d_i φ (c_i − θ^ρ), from θ = 1: what the quadratic clients make of a schedule."""
    models = [1.0]
    for n, (_, staleness) in enumerate(events):
        moves = (d[i] * phi * (CENTRES[i] - models[n - old]) for i, old in staleness.items())
        models.append(models[-1] + server_lr * sum(moves))
    return models


def bits(run: Record) -> list[bytes]:
    return [p.arrays["w"].data for p in run.seen]


def losses(aggregation: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": 1.5, "client-losses": [8.0, 4.0, 0.0]})


BAD = ["raise", "nan", "inf", "shape", "dtype", "name", "bytes", "npz", "stype", "no-arrays"]


def text_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == LOGGER)


def delayed(grid: Any, *delays: float) -> Any:
    for client, delay in enumerate(delays):
        grid.node(client).delay = delay
    return grid


def check_accounts(run: Record) -> None:
    """Nothing is counted twice: participation adds up to the contributions, none without a task of its own."""
    last = run.evaluations[-1].clients["participation"]
    assert sum(last) == sum(p.metrics.get("contributions", 0) for p in run.seen[1:])
    tasks = [
        (config[messages.CLIENT], config[messages.TASK])
        for config in (m.content.config_records["config"] for m in run.grid.requests())
    ]
    assert len(set(tasks)) == len(tasks)
    for client, count in enumerate(last):
        assert count <= sum(index == client for index, _ in tasks)
