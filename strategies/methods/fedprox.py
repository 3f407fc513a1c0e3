"""FedProx: federated averaging with a proximal term in the local objective.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar and V. Smith, "Federated optimization in heterogeneous
networks", MLSys 2020; as in Dhasade, Kremer & Renard, eq. 4 and Buttaci 2024, eqs. 4.3-4.4:

    client i minimises f_i(w) + α/2 ‖w − w̄_t‖²:   w_i ← w_i − γ [ g_i(w_i) + α (w_i − w̄_t) ]
    server:                                         w̄_{t+1} = w̄_t + Σ_i p_i (w_i − w̄_t)

With α = 0 FedProx is exactly FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import FLOWERS_ORDER, StrategyConfig, SynchronousConfig
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.parameters import parameter
from strategies.flower import messages
from strategies.rounds.strategy import SynchronousStrategy


@dataclass(frozen=True)
class FedProxConfig(SynchronousConfig):
    """Parameters of FedProx.

    Parameters
    ----------
    proximal_mu : float
        α, the pull towards the received model (μ of Li et al. 2020)
    """

    positional: ClassVar[tuple[str, ...]] = (*FLOWERS_ORDER, "proximal_mu")

    proximal_mu: float = parameter(0.1, ge=0)


class FedProx(SynchronousStrategy):
    """FedProx (Li et al. 2020, algorithm 2).

    Rule: each local step is pulled to W, by α (w − W).
    Helps: where many or unequal local steps on non-IID data let models drift; elsewhere it is slower.
    """

    Config: ClassVar[type[StrategyConfig]] = FedProxConfig
    config: FedProxConfig

    proximal_mu = FlowerAttribute()

    def local_rule(self) -> dict[str, float]:
        """Return α for the clients, which add the pull α (w − w̄) to each gradient."""
        return {messages.ALPHA: self.config.proximal_mu}
