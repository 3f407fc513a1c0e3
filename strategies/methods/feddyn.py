"""FedDyn: a regularizer of each client, which moves its minimum to that of all.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough & V. Saligrama, "Federated learning based on
dynamic regularization", ICLR 2021, algorithm 1:

    client i, from w ← W:  w ← w − γ (g_i(w) − h_i + α (w − W))
    server:                h_i ← h_i − α Δ_i                        for the participants
                           H = Σ_i p_i h_i over all                 the paper's H ← H − α Σ_S p_i Δ_i, while p stays
                           W ← step(W, Σ_S d_i Δ_i − H/α)           the paper's step: Σ_S d_i w_i − H/α, for Σ d_i = 1

All h_i and H are 0 at first. With exact local minima h_i is client i's gradient at its last model. The server holds
every h_i, since Δ_i tells what it becomes: clients keep nothing and are sent the one vector −h_i. −H/α is the sum of
all updates there ever were, so the method's own step is larger than FedAvg's, the more so while clients do little
local work: as α → 0 it goes to v ← v + Δ, W ← W + Δ + v, with Δ = Σ p_i Δ_i and all clients. p_i change where
clients come and go, or tell their sizes with their replies: H is then summed anew, as a run rests where it is 0, and
that is the minimum of Σ p_i f_i for the same p_i alone. Who is away on devices counts for a while
(strategies/core/population.py). Where a participation scheme minimises another objective by design (paired,
fixed), p_i is that
objective's.

Sent: two vectors of the model's size to each participant, one back. Kept: the h_i, 4 C D bytes, beyond 4 GiB in a
temporary file; a round's updates until all are there, 8 D bytes of each participant.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.clients.roster import Client
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.parameters import parameter
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.methods.shared.latest_updates import LatestUpdates
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.chain import Contribution

GRADIENTS = "gradients"  # the h_i


@dataclass(frozen=True)
class FedDynConfig(SynchronousConfig):
    """Parameters of FedDyn.

    Parameters
    ----------
    feddyn_alpha : float
        α, the strength of FedDyn's regularizer, and of its pull to the global model (Acar et al. 2021, who try 0.1,
        0.01 and 0.001)
    """

    feddyn_alpha: float = parameter(0.01, ge=1e-6, le=1e6)


class FedDyn(SynchronousStrategy):
    """FedDyn (Acar et al. 2021, algorithm 1).

    Rule: each local step goes along g_i − h_i + α (w − W), −h_i/α the sum of a client's updates so far; the model
    moves by the mean of the updates, and of these sums.
    Sent: −h_i.
    Kept: h_i of each client, and their sum.
    Helps: where data are unlike and clients come near their own minimum in a round.
    """

    Config: ClassVar[type[StrategyConfig]] = FedDynConfig
    config: FedDynConfig
    streams: ClassVar[bool] = False
    by_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    past_the_sum: ClassVar[str] = "its server goes on from the updates of all earlier rounds"

    def local_rule(self) -> dict[str, float]:
        """Tell clients α; they add the pull α (w − W) to each gradient."""
        return {messages.ALPHA: self.config.feddyn_alpha}

    def companions(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield −h_i of each participant."""
        gradients = self.vectors(GRADIENTS)
        for client in clients:
            yield {messages.CONSTANT: -gradients.get(client.index)}

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Note h_i and H, and return step(W, Σ d_i Δ_i − H/α), (D,)."""
        gradients = self._gradients
        for c in contributions:
            gradients.add(c.client.index, -self.config.feddyn_alpha, c.update)
        return super().aggregate(model, contributions, weights)

    def direction(self, total: Vector) -> Vector:
        """Return Σ d_i Δ_i − H/α, (D,)."""
        return np.asarray(total - self._gradients.mean / self.config.feddyn_alpha)

    @property
    def _gradients(self) -> LatestUpdates:
        """h_i and H."""
        return LatestUpdates(self.memory, self.vectors(GRADIENTS), self.minimised())
