"""Ditto: each client also trains a personal model, which is pulled to the global model.

T. Li, S. Hu, A. Beirami & V. Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021,
algorithm 1:

    client i, from w ← W:    w ← w − γ g_i(w)                    FedAvg's step; the server sees only w
    and from its own v_i:    v_i ← v_i − γ (g_i(v_i) + λ (v_i − W))
    server:                  W ← step(W, Σ_S d_i Δ_i)

W is the model that the client was sent. Both models take the same number of steps, of the same size, on minibatches
with the same law, from separate random streams. v_i starts from the first model that the client was sent. W is the
model of FedAvg, bit for bit. With λ = 0 each client trains v_i without the others; the larger λ, the nearer v_i stays
to W, as long as γ λ < 2: the pull overshoots beyond.

The client keeps v_i in Flower's ``context.state``, and never sends it. Only in a simulation the server asks for v_i
when it writes a checkpoint, and returns it to the client of a resumed run (strategies/core/kept_models.py).

Sent: the messages of FedAvg. Kept: v_i on each client, for this run alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies import streams
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.kept_models import KeptByClients
from strategies.core.parameters import parameter
from strategies.flower import messages
from strategies.flower.arrays import Layout, Vector
from strategies.rounds.strategy import SynchronousStrategy

RUN = "run"  # the run's number, under which clients keep their personal models


@dataclass(frozen=True)
class DittoConfig(SynchronousConfig):
    """Parameters of Ditto.

    Parameters
    ----------
    ditto_lambda : float
        λ, the pull of a client's own model towards the global one (Li et al. 2021 try 0.05 to 2)
    """

    ditto_lambda: float = parameter(0.1, or_zero=True, ge=1e-6, le=1e6)


class Ditto(SynchronousStrategy):
    """Ditto (Li et al. 2021, algorithm 1).

    Rule: FedAvg's; each participant also trains its own model v_i, pulled to W.
    Kept: v_i, on each client.
    Helps: where no one model suits all clients.
    """

    Config: ClassVar[type[StrategyConfig]] = DittoConfig
    config: DittoConfig
    personal: ClassVar[bool] = True

    def _layout(self) -> Layout:
        return self.session.run.layout

    def _number(self) -> int:
        return int(self.session.memory[RUN])

    def local_rule(self) -> dict[str, float]:
        """Return λ of the pull λ (v − W) for the clients."""
        return {messages.PERSONAL: self.config.ditto_lambda}

    def evaluation_rule(self) -> dict[str, float]:
        """Return λ and the run's number, so that clients evaluate v beside W."""
        return {**self.local_rule(), messages.KEPT_FOR: self._number()}

    def task_fields(self) -> dict[str, int]:
        """Return the run's number, under which clients keep v."""
        return {messages.KEPT_FOR: self._number()}

    def begin(self, layout: Layout, model: Vector) -> None:
        """Draw a number for the run, unless it is resumed and has one."""
        self.session.memory.setdefault(RUN, int(streams.unpredictable().integers(1, messages.LARGEST)))

    def stateful_components(self) -> Sequence[Any]:
        """Return the personal models of a simulation's clients."""
        kept = KeptByClients(self.session.run, self._layout, self._number)
        self.session.population.listeners.append(kept.hand_back)
        return [kept]
