"""When asynchronous methods make a model: at every arrival, or when so many have arrived."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.core.config import EventsConfig
from strategies.core.parameters import parameter
from strategies.events.strategy import AsynchronousStrategy
from strategies.timing.scheduler import Times


def periods(times: Times) -> Times:
    """P_i = τ_i Σ_j 1/τ_j: arrivals of all clients while client i works once. τ: shape (C,), seconds."""
    return np.asarray(times * (1 / times).sum())


class EveryArrival(AsynchronousStrategy):
    """A new model at every arrival.

    New model: at every arrival.
    """

    every_arrival: ClassVar[bool] = True

    def ready(self, arrived: int) -> bool:
        """At every arrival."""
        return arrived >= 1

    def periods(self, times: Times) -> Times:
        """Count all arrivals."""
        return periods(times)


@dataclass(frozen=True)
class BufferedConfig(EventsConfig):
    """What every method with a buffer can be told.

    Parameters
    ----------
    buffer_size : int
        m, contributions that make an aggregation, at most as many as there are clients
    """

    buffer_size: int = parameter(10, ge=1)


class Buffered(AsynchronousStrategy):
    """A new model when m contributions have arrived; whose work waits is handed that model, and none before it.

    New model: when `buffer-size` contributions have arrived.
    """

    config: BufferedConfig

    def ready(self, arrived: int) -> bool:
        """When the buffer is full; with fewer clients left than that, when all have arrived."""
        return arrived >= min(self.config.buffer_size, len(self.ledger.counting))

    def identical_weight(self, num_clients: int) -> float:
        """1/m."""
        return 1 / min(self.config.buffer_size, num_clients)

    def check(self, num_clients: int) -> None:
        """A buffer larger than the federation would never fill, and a robust rule may need a larger one."""
        super().check(num_clients)
        if self.config.buffer_size > num_clients:
            raise ValueError(
                f"buffer_size = {self.config.buffer_size}: there are {num_clients} clients, must be at most that"
            )
        if self.robust is not None and self.config.buffer_size < (least := self.robust.rule.least):
            raise ValueError(
                f"{self.robust.rule.text}: needs {least} contributions in the buffer or more, buffer_size = "
                f"{self.config.buffer_size}"
            )
