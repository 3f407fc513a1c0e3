"""FedAvgM under Flower's name: averaging with heavy-ball momentum on the server.

T.-M. H. Hsu, H. Qi and M. Brown, "Measuring the effects of non-identical data distribution for federated visual
classification", 2019, section 4:

    v ← β v + Σ_i d_i Δ_i,   W ← W + η v
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import FLOWERS_ORDER, StrategyConfig, SynchronousConfig
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.parameters import parameter
from strategies.methods.flower_names.own_optimizer import OwnOptimizer
from strategies.updates.server_optimizer import Momentum, ServerOptimizer


@dataclass(frozen=True)
class FedAvgMConfig(SynchronousConfig):
    """Parameters of FedAvgM.

    Parameters
    ----------
    server_learning_rate : float
        η, the server's learning rate
    server_momentum : float
        β, the decay of v
    """

    positional: ClassVar[tuple[str, ...]] = (*FLOWERS_ORDER, "server_learning_rate", "server_momentum")

    server_learning_rate: float = parameter(1.0, gt=0)
    server_momentum: float = parameter(0.0, ge=0, lt=1)

    def new_optimizer(self) -> ServerOptimizer:
        """Return heavy-ball momentum with the decay β."""
        return Momentum(self.server_learning_rate, self.server_momentum)


class FedAvgM(OwnOptimizer):
    """FedAvgM (Hsu et al. 2019, section 4), as Flower has it."""

    Config: ClassVar[type[StrategyConfig]] = FedAvgMConfig
    config: FedAvgMConfig
    lr_keyword = "server_learning_rate"

    server_learning_rate = FlowerAttribute()
    server_momentum = FlowerAttribute()
