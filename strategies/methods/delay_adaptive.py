"""Delay-adaptive asynchronous SGD: the staler a contribution, the less it moves the model.

A. Koloskova, S. Stich and M. Jaggi, "Sharper convergence guarantees for asynchronous SGD for distributed and
federated learning", NeurIPS 2022; K. Mishchenko et al., "Asynchronous SGD beats minibatch SGD under arbitrary
delays", NeurIPS 2022. At every arrival

    W ← W + η_g d_i min(1, τ_c / δ) Δ_i

with δ the number of aggregations since the client was sent its model, and τ_c the concurrency: the number of clients
at work. If no δ is above τ_c, as with equal task times, the method is exactly asynchronous FedAvg. The other variant
of Koloskova et al., which discards contributions with δ > τ_c, is Ringmaster with R = τ_c + 1.

A client receives the model and sends one back; the server keeps only the model.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import AsynchronousConfig, StrategyConfig
from strategies.methods.shared.arrivals import EveryArrival


@dataclass(frozen=True)
class DelayAdaptiveConfig(AsynchronousConfig):
    """The method has no parameters of its own: τ_c is ``concurrency``, or the number of clients."""


def shrinkage(staleness: int, concurrency: int) -> float:
    """Return min(1, τ_c / δ), the factor of a contribution of staleness δ."""
    return min(1.0, concurrency / max(staleness, 1))


class DelayAdaptive(EveryArrival):
    """Asynchronous FedAvg with delay-adaptive steps (Koloskova et al. 2022, algorithm 1 with steps by delay).

    Rule: asynchronous FedAvg's, times min(1, τ_c/δ), τ_c the number of clients at work.
    Helps: where a few clients are very late; these clients count less.
    """

    Config: ClassVar[type[StrategyConfig]] = DelayAdaptiveConfig
    config: DelayAdaptiveConfig

    def discount(self, staleness: int) -> float:
        """Return min(1, τ_c / δ), the factor of a contribution of staleness δ."""
        return shrinkage(staleness, self.max_concurrency)
