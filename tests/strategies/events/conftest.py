"""Fixtures of the event loop's tests."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import ArrayRecord, MetricRecord

from strategies import FedAvg, Progress
from tests.strategies.events.runs import KINDS, Record, make


@pytest.fixture
def start(train_config, model):
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
        limit: float = 240.0,
        timeout: float = 10.0,
        evaluate: Callable[[int, ArrayRecord], MetricRecord] | None = None,
        observe: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        fraction_evaluate: float = 0.0,
        **options: Any,
    ) -> Record:
        record, end = Record(grid), time.monotonic() + limit

        def late() -> bool:
            record.in_time = record.in_time and time.monotonic() < end
            return not record.in_time or should_stop()

        def observer(progress: Progress) -> None:
            record.seen.append(progress)
            if observe:
                observe(progress)

        kind = FedAvg if scheme == "fedavg" else KINDS[scheme]
        config = kind.Config(**options) if scheme == "fedavg" else make(scheme, **options)
        record.strategy = kind(
            config, clock=clock, observer=observer, should_stop=late, fraction_evaluate=fraction_evaluate
        )
        record.arrays = record.strategy.start(
            grid,
            arrays or model(1.0),
            num_rounds=rounds,
            timeout=timeout,
            train_config=train_config(steps, lr),
            evaluate_fn=evaluate,
        ).arrays
        assert record.in_time, f"the loop stalled; it had done {len(record.seen) - 1} aggregations"
        return record

    return run


@pytest.fixture
def small(model):
    return model(0.1, -0.7, 3.3, 1e-3, dtype="float32")


@pytest.fixture
def quick(monkeypatch):
    """Deadlines, retries and looks at the nodes for a run of a second."""
    monkeypatch.setattr("strategies.timing.scheduler.SHORTEST_DEADLINE", 0.15)
    monkeypatch.setattr("strategies.events.pump.RETRY_AFTER", 1.2)
    monkeypatch.setattr("strategies.events.event_stream.REFRESH_EVERY", 0.02)
