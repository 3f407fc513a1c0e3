"""What parts of a strategy are built with when they are tested alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import MetricRecord

from strategies import messages
from strategies.clients.roster import Client
from strategies.updates.chain import Contribution


def client(index: int, size: int | None = 1) -> Client:
    return Client(100 + index, index, size, MetricRecord())


def run_of(clients: Sequence[Client] = (), **values: Any) -> Any:
    """Return what a part asks of a run's state."""
    pace = SimpleNamespace(real_time=False, always=True, now=lambda: 0.0)
    known = {
        "clients": list(clients),
        "aggregations": 0,
        "any_moved": False,
        "pace": pace,
        "timeout": 5.0,
        "stopped": lambda: False,
        "model": np.zeros(2),
    }
    return SimpleNamespace(**known | values)


def contribution(index: int, update: Sequence[float] = (1.0, 0.0), **values: Any) -> Contribution:
    known: dict[str, Any] = {
        "base": np.zeros(len(update)),
        "version": 0,
        "staleness": 0,
        "metrics": MetricRecord({messages.NUM_EXAMPLES: 2}),
        "records": {},
        "num_bytes": 8,
    }
    return Contribution(client=client(index), update=np.array(update), **known | values)
