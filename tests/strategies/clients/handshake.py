"""A graph of clients made with a federation, for the tests of both."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import ConfigRecord

from strategies.clients.client_graph import DirectionGraph
from strategies.clients.roster import Client, Roster


class Handshake:
    """A roster and a graph that look at a grid together, as a strategy does every round."""

    def __init__(self, grid: Any, timeout: float = 10.0, **options: Any) -> None:
        self.grid = grid
        self.timeout = timeout
        self.roster = Roster(timeout=timeout)
        self.graph = DirectionGraph(**options)

    def __call__(self, should_stop: Callable[[], bool] = lambda: False, **config: Any) -> list[Client]:
        record = ConfigRecord(config)
        clients = self.roster.refresh(self.grid, record)
        return self.graph.refresh(self.grid, clients, record, self.timeout, should_stop)


def indices(clients: list[Client]) -> list[int]:
    return [client.index for client in clients]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
