"""The books of the asynchronous loop: clients, their tasks under way, what has arrived, and what is due when."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from strategies import messages
from strategies.arrays import Vector
from strategies.clock import RESOLUTION
from strategies.roster import Client


@dataclass
class Member:
    """What the loop knows of a client."""

    client: Client
    tasks: int = 0  # handed out so far
    misses: int = 0  # in a row
    dropped: bool = False
    task: str = ""  # message id of its task under way
    contributions: int = 0
    weight: float = 0.0  # Σ d_i of its contributions
    observed: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum and number of real task times


@dataclass(frozen=True)
class Task:
    """A task under way: the model it started from, and when (clock seconds) it was sent; lost if it couldn't be."""

    member: Member
    version: int
    base: NDArray[Any]  # the model as sent (D,), shared by the clients that got the same
    message_id: str
    sent: float
    lost: bool


@dataclass(frozen=True)
class Contribution:
    """A client's work that has arrived: Δ_i against the model it was sent, and how old that model is."""

    member: Member
    delta: Vector
    version: int
    metrics: MetricRecord
    num_bytes: int


@dataclass(frozen=True)
class Standing:
    """By client index: p_i, d_i, and q̃_i, the share of the objective that client i has in the long run."""

    importance: dict[int, float]
    weight: dict[int, float]
    expected_share: dict[int, float] = field(default_factory=dict)


class Agenda:
    """Items by due time; those due within ``RESOLUTION`` of each other are equal and come in client order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Any]] = []
        self._count = 0  # breaks ties that remain, first come first served

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[float, Any]]:
        """Due times and items, in no order."""
        return ((due, item) for due, _, _, item in self._heap)

    def push(self, due: float, client: int, item: Any) -> None:
        """Add an item."""
        heapq.heappush(self._heap, (due, client, self._count, item))
        self._count += 1

    def next_due(self) -> float:
        """Return the earliest due time, infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> tuple[float, Any]:
        """Remove and return the next item and its due time."""
        equal = [heapq.heappop(self._heap)]
        while self._heap and self._heap[0][0] <= equal[0][0] + RESOLUTION:
            equal.append(heapq.heappop(self._heap))
        first = min(equal, key=lambda entry: (entry[1], entry[2]))
        for entry in equal:
            if entry is not first:
                heapq.heappush(self._heap, entry)
        return first[0], first[3]


class Tally:
    """What happened since the last evaluation."""

    def __init__(self) -> None:
        self.staleness: list[int] = []
        self.losses: list[float] = []
        self.bytes_up = self.bytes_down = self.failures = self.clipped = 0
        self.unevaluated = False

    def take(self, contributions: Sequence[Contribution], aggregation: int) -> None:
        """Count what an aggregation, the ``aggregation``-th from 0, took in."""
        self.unevaluated = True
        for contribution in contributions:
            self.staleness.append(aggregation - contribution.version)
            self.bytes_up += contribution.num_bytes
            if isinstance(loss := contribution.metrics.get(messages.TRAIN_LOSS), float):
                self.losses.append(loss)

    def metrics(self) -> MetricRecord:
        """Return the counts, and the staleness and training loss over them."""
        metrics = MetricRecord(
            {
                "contributions": len(self.staleness),
                messages.FAILURES: self.failures,
                messages.BYTES_DOWN: self.bytes_down,
                messages.BYTES_UP: self.bytes_up,
            }
        )
        if self.clipped:
            metrics[messages.CLIPPED] = self.clipped
        if self.staleness:
            metrics["staleness-mean"] = float(np.mean(self.staleness))
            metrics["staleness-max"] = max(self.staleness)
        if self.losses:
            metrics[messages.TRAIN_LOSS] = float(np.mean(self.losses))
        return metrics
