"""Asynchronous FedAvg: a new model at every arrival.

papers/002_840aee1ee8a82ff9.txt, section 4.3:

    time-based (eq. 36)   d_i = (Σ_j 1/τ_j) τ_i p_i
    identical             d_i = 1
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.asynchronous import AsynchronousConfig, AsynchronousStrategy, Times
from strategies.base import StrategyConfig


@dataclass(frozen=True)
class AsyncFedAvgConfig(AsynchronousConfig):
    """Asynchronous FedAvg has no parameters of its own."""


def periods(times: Times) -> Times:
    """P_i = τ_i Σ_j 1/τ_j: arrivals of all clients while client i works once. τ: shape (C,), seconds."""
    return np.asarray(times * (1 / times).sum())


class AsyncFedAvg(AsynchronousStrategy):
    """Asynchronous FedAvg (papers/002_840aee1ee8a82ff9.txt, eq. 36)."""

    Config: ClassVar[type[StrategyConfig]] = AsyncFedAvgConfig

    def ready(self, arrived: int) -> bool:
        """At every arrival."""
        return arrived >= 1

    def periods(self, times: Times) -> Times:
        """Count all arrivals."""
        return periods(times)
