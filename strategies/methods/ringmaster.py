"""Ringmaster ASGD: every arrival is a step of the model, unless its update is too stale.

A. Maranjyan, A. Tyurin and P. Richtárik, "Ringmaster ASGD: the first asynchronous SGD with optimal time complexity",
ICML 2025:

    δ < R: W ← W + η_g Δ_i        else Δ_i is discarded; the client is sent the current model either way

with δ the number of aggregations since the client was sent its model. All contributions have equal weight, because
the paper's workers have the same data; a client that is always too stale never counts, which the run's
``expected-share`` and the log report. With R = ∞ (``delay_threshold = 0``) Ringmaster is exactly asynchronous FedAvg
with identical weights.

A client receives the model and sends one back, which is discarded if it is too stale (``discarded-updates``); the
server keeps only the model.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import AsyncConfigBase, StrategyConfig
from strategies.core.parameters import parameter
from strategies.methods.shared.arrivals import EveryArrival


@dataclass(frozen=True)
class RingmasterConfig(AsyncConfigBase):
    """Parameters of Ringmaster.

    Parameters
    ----------
    delay_threshold : int
        R: contributions R or more aggregations old are discarded; 0: none
    """

    delay_threshold: int = parameter(10, ge=0)


class Ringmaster(EveryArrival):
    """Ringmaster ASGD (Maranjyan et al. 2025, algorithm 4).

    Rule: W moves by Δ_i if δ < R.
    Helps: where data are IID and some clients are too slow to be of use; these clients never count.
    """

    Config: ClassVar[type[StrategyConfig]] = RingmasterConfig
    config: RingmasterConfig
    default_aggregation_weights: ClassVar[str] = "identical"

    def is_fresh_enough(self, staleness: int) -> bool:
        """Return True if δ < R; other contributions are discarded."""
        return not self.config.delay_threshold or staleness < self.config.delay_threshold

    @property
    def observes_periods(self) -> bool:
        """Whether periods are observed: with a threshold, the accepted contributions can't be predicted."""
        return super().observes_periods or self.config.delay_threshold > 0
