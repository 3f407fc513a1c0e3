"""Delay-adaptive asynchronous SGD: an arrival moves the model the less, the later it comes.

A. Koloskova, S. Stich and M. Jaggi, "Sharper convergence guarantees for asynchronous SGD for distributed and
federated learning", NeurIPS 2022; K. Mishchenko et al., "Asynchronous SGD beats minibatch SGD under arbitrary
delays", NeurIPS 2022. At every arrival

    W ← W + η_g d_i min(1, τ_c / δ) Δ_i

with δ the aggregations since the client was sent its model, and τ_c the concurrency: how many clients are at work.
Where no δ is above τ_c, as with equal task times, it is asynchronous FedAvg, exactly. To throw away what is later
than τ_c, the other variant of Koloskova et al., is Ringmaster with R = τ_c + 1.

A client is sent the model and sends one; the server keeps nothing beside it.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import AsynchronousConfig, StrategyConfig
from strategies.methods.shared.arrivals import EveryArrival


@dataclass(frozen=True)
class DelayAdaptiveConfig(AsynchronousConfig):
    """The method has no parameters of its own: τ_c is ``concurrency``, or the number of clients."""


def shrinkage(staleness: int, concurrency: int) -> float:
    """min(1, τ_c / δ)."""
    return min(1.0, concurrency / max(staleness, 1))


class DelayAdaptive(EveryArrival):
    """Asynchronous FedAvg with delay-adaptive steps (Koloskova et al. 2022, algorithm 1 with steps by delay).

    Rule: as asynchronous FedAvg, times min(1, τ_c/δ), τ_c the number of clients at work.
    Helps: where a few are so late that their steps must be short; they then count less.
    """

    Config: ClassVar[type[StrategyConfig]] = DelayAdaptiveConfig
    config: DelayAdaptiveConfig

    def discount(self, staleness: int) -> float:
        """Return min(1, τ_c / δ)."""
        return shrinkage(staleness, self.most_at_work)
