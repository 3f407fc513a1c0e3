"""Rennala SGD: a new model when B pieces of work on the present one have arrived; older work is thrown away.

A. Tyurin and P. Richtárik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
computation model", NeurIPS 2023:

    W ← W + η_g (1/B) Σ Δ_i        over the first B arrivals with δ = 0

A client works on until the model is there, and counts as often as it comes; whoever comes late is handed the present
model. It is minibatch SGD whose batch the fast gather, so that they count more: the run's ``expected-share`` says how
much. With C = B = 1 it is local training.

A client is sent the model and sends one, for nothing where it is late (``discarded-updates``); the server keeps the B
updates of the next model, 8 B D bytes at most, and forgets them with it.
"""

from dataclasses import dataclass
from typing import ClassVar

from strategies.core.config import StrategyConfig
from strategies.events.strategy import AsynchronousStrategy
from strategies.methods.shared.arrivals import BufferedConfig


@dataclass(frozen=True)
class RennalaConfig(BufferedConfig):
    """Parameters of Rennala.

    Parameters
    ----------
    buffer_size : int
        B, contributions that make an aggregation; it may be more than there are clients
    """


class Rennala(AsynchronousStrategy):
    """Rennala SGD (Tyurin and Richtárik 2023, section 4).

    New model: when `buffer-size` updates of the present model have arrived.
    Rule: the model moves by their mean; updates of older models are thrown away.
    Kept: these updates until then.
    Helps: where data are alike and stale updates harm; the fast count more.
    """

    Config: ClassVar[type[StrategyConfig]] = RennalaConfig
    config: RennalaConfig
    weighing: ClassVar[str] = "identical"
    works_on: ClassVar[bool] = True

    def ready(self, arrived: int) -> bool:
        """When there are B."""
        return arrived >= self.config.buffer_size

    def fresh(self, staleness: int) -> bool:
        """δ = 0."""
        return staleness == 0

    def identical_weight(self, num_clients: int) -> float:
        """1/B."""
        return 1 / self.config.buffer_size
