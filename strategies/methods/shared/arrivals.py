"""When asynchronous methods make a model: at every arrival, or when so many have arrived."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from strategies.core.config import AsyncConfigBase
from strategies.core.parameters import parameter
from strategies.events.strategy import AsynchronousStrategy
from strategies.timing.scheduler import Times

log = logging.getLogger("flwr.strategies")


def contribution_periods(times: Times) -> Times:
    """P_i = τ_i Σ_j 1/τ_j: arrivals of all clients while client i works once. τ: shape (C,), seconds."""
    return np.asarray(times * (1 / times).sum())


class EveryArrival(AsynchronousStrategy):
    """A new model at every arrival.

    New model: at every arrival.
    """

    #: Every arrival is an aggregation of its own.
    aggregates_each_arrival: ClassVar[bool] = True

    def ready(self, arrived: int) -> bool:
        """At every arrival."""
        return arrived >= 1

    def contribution_periods(self, times: Times) -> Times:
        """Count all arrivals."""
        return contribution_periods(times)


@dataclass(frozen=True)
class BufferedConfig(AsyncConfigBase):
    """What every method with a buffer can be told.

    Parameters
    ----------
    buffer_size : int
        m, contributions of an aggregation; 0: a tenth of the clients, 2 to 10 (area: 1; rennala, malenia: all)
    """

    buffer_size: int = parameter(0, ge=0)


class BufferSize:
    """m, the contributions that make an aggregation: as given, or else by the number of clients at the start.

    Parameters
    ----------
    given : int
        The config's ``buffer_size``; 0: the method's own.
    own : callable
        Returns the method's own m for a number of clients.
    """

    def __init__(self, given: int, own: Callable[[int], int]) -> None:
        self._given, self._own, self._m = given, own, given

    def begin(self, num_clients: int) -> None:
        """Set m for so many clients, and log it where it isn't given; it stays when clients come or go."""
        if self._given:
            return
        before, self._m = self._m, self._own(num_clients)
        if before != self._m:
            log.info(
                "buffer_size = 0: m = %d contributions make a model, for %d clients", self._m, num_clients
            )

    def of(self, num_clients: int) -> int:
        """Return m; before the start, of so many clients."""
        return self._m or self._own(num_clients)


class Buffered(AsynchronousStrategy):
    """Aggregates every m contributions. A client whose update is in the buffer idles until then.

    New model: every `buffer-size` contributions.
    """

    config: BufferedConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._size = BufferSize(self.config.buffer_size, self.own_buffer_size)

    def own_buffer_size(self, num_clients: int) -> int:
        """Return m for ``buffer_size = 0``: C/10, at least 2 and what a rule or a sum needs, at most 10; or C."""
        least = 2 if self.session.secure is None else self.session.secure.fewest
        if self.session.robust is not None:
            least = max(least, self.session.robust.rule.least)
        return min(max(least, min(num_clients // 10, 10)), num_clients)

    @property
    def m(self) -> int:
        """The number of contributions that make an aggregation."""
        return self._size.of(len(self.session.task_table.active_clients))

    def ready(self, arrived: int) -> bool:
        """When the buffer is full; with fewer clients left than that, when all have arrived."""
        return arrived >= min(self.m, len(self.session.task_table.active_clients))

    def identical_weight(self, num_clients: int) -> float:
        """1/m."""
        return 1 / min(self.m, num_clients)

    def check(self, num_clients: int) -> None:
        """A buffer larger than the federation would never fill, and a robust rule may need a larger one."""
        super().check(num_clients)
        self._size.begin(num_clients)
        if self.config.buffer_size > num_clients:
            raise ValueError(
                f"buffer_size = {self.config.buffer_size}: there are {num_clients} clients, must be at most that"
            )
        secure, robust = self.session.secure, self.session.robust
        if secure is not None:
            if self.m < secure.fewest:
                raise ValueError(
                    f"buffer_size = {self.m} with secure_sums: a sum is of {secure.fewest} clients or more"
                )
            secure.check(self.m)
        if robust is not None and self.m < (least := robust.rule.least):
            raise ValueError(
                f"{robust.rule.text}: needs {least} contributions in the buffer or more, buffer_size = {self.m}"
            )
