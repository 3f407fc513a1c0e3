"""FedAsync: every arrival mixes the client's model into the global one; a staler model has a smaller weight.

C. Xie, S. Koyejo and I. Gupta, "Asynchronous federated optimization", 2019, algorithm 1:

    W ← (1 − α_t) W + α_t w_i        α_t = α s(δ)

with the client's model w_i, not its update, and δ the number of aggregations since the client was sent its model.
The mixing is the step η_g α_t (w_i − W) with η_g = 1, so that a server optimizer and ``server_lr`` have their usual
meaning. All contributions have equal weight, whatever the importance of the client, and fast clients contribute more
often. With C = 1 and α = 1 FedAsync is local training. This is the paper's option I; option II, whose local steps
are pulled to the model that was sent by ρ (w − W), isn't implemented.

A client receives the model and sends one back; the server keeps only the model.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import AsyncConfigBase, StrategyConfig
from strategies.core.parameters import parameter
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import EveryArrival
from strategies.methods.shared.staleness import discount_of, discount_parameter
from strategies.updates.pipeline import Contribution


@dataclass(frozen=True)
class FedAsyncConfig(AsyncConfigBase):
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

    Rule: W moves by α s(δ) (w_i − W).
    Helps: where data are IID and speeds differ; fast clients count more.
    """

    Config: ClassVar[type[StrategyConfig]] = FedAsyncConfig
    config: FedAsyncConfig
    default_aggregation_weights: ClassVar[str] = "identical"

    def default_server_lr(self) -> float:
        """Return η_g = 1, because α already scales the step."""
        return 1.0

    def identical_weight(self, num_clients: int) -> float:
        """Return α, the weight of every contribution."""
        return self.config.mixing_alpha

    @property
    def discounts_staleness(self) -> bool:
        """Whether staleness changes the weight of a contribution: False if s(δ) = 1."""
        return not discount_of(self.config.staleness_discount).constant

    def discount(self, staleness: int) -> float:
        """Return s(δ), the factor of a contribution of staleness δ."""
        return discount_of(self.config.staleness_discount)(staleness)

    def transform_update(self, contribution: Contribution) -> Vector:
        """Return w_i − W, (D,), with W the current model instead of the one that the client was sent."""
        return contribution.model - self.session.model
