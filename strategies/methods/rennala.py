"""Rennala SGD: a new model when B updates of the current one have arrived; stale updates are discarded.

A. Tyurin and P. Richtárik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
computation model", NeurIPS 2023:

    W ← W + η_g (1/B) Σ Δ_i        over the first B arrivals with δ = 0

A client keeps working until the new model is made, and each of its updates counts; a client with a stale update is
sent the current model. Rennala is minibatch SGD with a batch that mostly fast clients fill, so that they count more:
the run's ``expected-share`` shows the share of each client. With C = B = 1 Rennala is local training.

A client receives the model and sends one back, which is discarded if it is stale (``discarded-updates``); the server
keeps the B updates of the next model, at most 8 B D bytes, until that model is made.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.core.config import StrategyConfig
from strategies.events.strategy import AsynchronousStrategy
from strategies.methods.shared.arrivals import BufferedConfig, BufferSize


@dataclass(frozen=True)
class RennalaConfig(BufferedConfig):
    """Parameters of Rennala.

    Parameters
    ----------
    buffer_size : int
        B, contributions that make an aggregation; it may be more than there are clients; 0: as many as there are
    """


class Rennala(AsynchronousStrategy):
    """Rennala SGD (Tyurin and Richtárik 2023, section 4).

    New model: every `buffer-size` updates of the present model.
    Rule: W moves by the mean of these updates; updates of older models are discarded.
    Helps: where data are IID and stale updates harm; fast clients count more.
    """

    Config: ClassVar[type[StrategyConfig]] = RennalaConfig
    config: RennalaConfig
    default_aggregation_weights: ClassVar[str] = "identical"
    trains_while_waiting: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # B = C: with fewer, work of all but the fastest would be late.
        self._size = BufferSize(self.config.buffer_size, _as_many)

    def default_server_lr(self) -> float:
        """Return η_g = 1: no update is stale, so that B of them are the participants of a round."""
        return 1.0

    @property
    def m(self) -> int:
        """B, the number of contributions that make an aggregation."""
        return self._size.of(len(self.session.task_table.active_clients))

    def check(self, num_clients: int) -> None:
        """Set B by the number of clients where it isn't given."""
        super().check(num_clients)
        self._size.begin(num_clients)

    def ready(self, arrived: int) -> bool:
        """Return True when B contributions have arrived."""
        return arrived >= self.m

    def is_fresh_enough(self, staleness: int) -> bool:
        """Return True if δ = 0; other contributions are discarded."""
        return staleness == 0

    def identical_weight(self, num_clients: int) -> float:
        """Return 1/B, the weight of every contribution."""
        return 1 / self.m


def _as_many(num_clients: int) -> int:
    return num_clients
