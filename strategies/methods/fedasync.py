"""FedAsync: at every arrival the model is mixed with the client's, the less the later it comes.

C. Xie, S. Koyejo and I. Gupta, "Asynchronous federated optimization", 2019, algorithm 1:

    W ← (1 − α_t) W + α_t w_i        α_t = α s(δ)

with the whole model w_i of the client, not its update, and δ the aggregations since it was sent one. It is the step
η_g α_t (w_i − W) with η_g = 1, so that a server optimizer and ``server_lr`` mean what they mean elsewhere. All
clients count the same, whatever their importance, and the fast ones more often. With C = 1 and α = 1 it is local
training. This is the paper's option I; of option II, whose local steps are pulled to the model that was sent,
by ρ (w − W), there is nothing here.

A client is sent the model and sends one; the server keeps nothing beside it.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import EventsConfig, StrategyConfig
from strategies.core.parameters import parameter
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import EveryArrival
from strategies.methods.shared.staleness import discount_of, discount_parameter
from strategies.updates.chain import Contribution


@dataclass(frozen=True)
class FedAsyncConfig(EventsConfig):
    """Parameters of FedAsync.

    Parameters
    ----------
    mixing_alpha : float
        α, the share of an arriving model in the next global one
    staleness_discount : str
        s(δ), the factor of a contribution that is δ aggregations old: 1, (δ + 1)^−A, or 1 up to B and beyond it
        1/(A (δ − B) + 1)
    """

    mixing_alpha: float = parameter(0.6, gt=0, le=1)
    staleness_discount: str = discount_parameter()


class FedAsync(EveryArrival):
    """FedAsync (Xie et al. 2019, algorithm 1).

    Rule: the model is mixed with the client's, W + α s(δ) (w_i − W).
    Helps: where data are alike and speeds aren't; the fast count more.
    """

    Config: ClassVar[type[StrategyConfig]] = FedAsyncConfig
    config: FedAsyncConfig
    weighing: ClassVar[str] = "identical"

    def own_lr(self) -> float:
        """1: α says how far."""
        return 1.0

    def identical_weight(self, num_clients: int) -> float:
        """Return α."""
        return self.config.mixing_alpha

    @property
    def discounts(self) -> bool:
        """Unless s = 1."""
        return not discount_of(self.config.staleness_discount).constant

    def discount(self, staleness: int) -> float:
        """Return s(δ)."""
        return discount_of(self.config.staleness_discount)(staleness)

    def counted(self, contribution: Contribution) -> Vector:
        """Return w_i − W, W the present model and not the one that the client was sent."""
        return contribution.model - self.model
