"""Ringmaster ASGD: every arrival is a step, unless it is too old.

A. Maranjyan, A. Tyurin and P. Richtárik, "Ringmaster ASGD: the first asynchronous SGD with optimal time complexity",
ICML 2025:

    δ < R: W ← W + η_g Δ_i        else Δ_i is thrown away        and the client is handed the newest model either way

with δ the aggregations since the client was sent its model. All arrivals count the same, as the paper's workers have
the same data; a client that is always late never counts, which the run's ``expected-share`` and the log say. With
R = ∞ (``delay_threshold = 0``) it is asynchronous FedAvg with identical weights, exactly.

A client is sent the model and sends one, for nothing where it is too old (``discarded-updates``); the server keeps
nothing beside the model.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import EventsConfig, StrategyConfig
from strategies.core.parameters import parameter
from strategies.methods.shared.arrivals import EveryArrival


@dataclass(frozen=True)
class RingmasterConfig(EventsConfig):
    """Parameters of Ringmaster.

    Parameters
    ----------
    delay_threshold : int
        R: a contribution that is so many aggregations old, or older, is thrown away; 0: none is
    """

    delay_threshold: int = parameter(10, ge=0)


class Ringmaster(EveryArrival):
    """Ringmaster ASGD (Maranjyan et al. 2025, algorithm 4).

    Rule: the model moves by Δ_i where δ < R; what is older is thrown away.
    Helps: where data are alike and some are too slow to be of use; those never count.
    """

    Config: ClassVar[type[StrategyConfig]] = RingmasterConfig
    config: RingmasterConfig
    weighing: ClassVar[str] = "identical"

    def fresh(self, staleness: int) -> bool:
        """δ < R."""
        return not self.config.delay_threshold or staleness < self.config.delay_threshold

    @property
    def observes_periods(self) -> bool:
        """With a threshold nobody knows beforehand whose work will count."""
        return super().observes_periods or self.config.delay_threshold > 0
