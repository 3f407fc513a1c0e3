"""FedDyn: a dynamic regularizer of each client, which moves its minimum to the minimum of the federated objective.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough & V. Saligrama, "Federated learning based on
dynamic regularization", ICLR 2021, algorithm 1:

    client i, from w ← W:  w ← w − γ (g_i(w) − h_i + α (w − W))
    server:                h_i ← h_i − α Δ_i                        for the participants
                           H = Σ_i p_i h_i over all clients         the paper's H ← H − α Σ_S p_i Δ_i, while p stays
                           W ← step(W, Σ_S d_i Δ_i − H/α)           the paper's step: Σ_S d_i w_i − H/α, for Σ d_i = 1

All h_i and H start from 0. With exact local minima h_i is client i's gradient at its last model. The server keeps
every h_i, because h_i follows from Δ_i: clients keep no state and are sent the vector −h_i. −H/α is the sum of all
updates so far, so the method's own step is larger than FedAvg's, the more so while clients do little local work: for
α → 0 the step becomes v ← v + Δ, W ← W + Δ + v, with Δ = Σ p_i Δ_i and all clients. The p_i change when clients
connect or disconnect, or report their sizes with their replies. H is then summed again with the new p_i: training is
stationary where H = 0, which is the minimum of Σ p_i f_i only for the same p_i. An absent device keeps its p_i for a
while (strategies/core/population.py). Under a participation scheme that minimises another objective by design
(paired, fixed), the p_i are those of that objective.

Sent: two vectors of the model's size to each participant, one back. Kept: the h_i, 4 C D bytes, beyond 4 GiB in a
temporary file; the updates of a round until all have arrived, 8 D bytes for each participant.
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
from strategies.updates.pipeline import Contribution
from strategies.updates.safeguards import clip_to_mean

GRADIENTS = "gradients"  # name of the h_i in the memory


@dataclass(frozen=True)
class FedDynConfig(SynchronousConfig):
    """Parameters of FedDyn.

    Parameters
    ----------
    feddyn_alpha : float
        α, the strength of the regularizer (Acar et al. 2021 try 0.001 to 0.1)
    """

    feddyn_alpha: float = parameter(0.01, ge=1e-6, le=1e6)


class FedDyn(SynchronousStrategy):
    """FedDyn (Acar et al. 2021, algorithm 1).

    Rule: each local step goes along g_i − h_i + α (w − W), −h_i/α the sum of client i's updates; W moves by the
    mean of the updates, and of these sums.
    Sent: −h_i.
    Kept: all h_i.
    Helps: where data are non-IID and clients come near their own minimum in a round.
    """

    Config: ClassVar[type[StrategyConfig]] = FedDynConfig
    config: FedDynConfig
    aggregates_on_arrival: ClassVar[bool] = False
    uses_given_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    side_channel: ClassVar[str] = "its server goes on from the updates of all earlier rounds"

    def local_rule(self) -> dict[str, float]:
        """Return α for the clients, which add the pull α (w − W) to each gradient."""
        return {messages.ALPHA: self.config.feddyn_alpha}

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield −h_i (D,) of each participant."""
        gradients = self.session.client_vectors(GRADIENTS)
        for client in clients:
            yield {messages.CONSTANT: -gradients.get(client.index)}

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Update h_i and H, and return step(W, Σ d_i Δ_i − H/α), (D,)."""
        gradients, alpha = self._gradients, self.config.feddyn_alpha
        mean = gradients.mean

        def moved(c: Contribution) -> Vector:
            return np.asarray(gradients.get(c.client.index) - alpha * c.update)

        distances = [float(np.linalg.norm(moved(c) - mean)) for c in contributions]
        bounds = self.session.safeguards.furthest([c.client for c in contributions], distances)
        for c, distance, most in zip(contributions, distances, bounds, strict=True):
            if distance > most:
                gradients.put(c.client.index, clip_to_mean(moved(c), mean, most))
            else:
                gradients.add(c.client.index, -alpha, c.update)
        return super().aggregate(model, contributions, weights)

    def server_update(self, total: Vector) -> Vector:
        """Return Σ d_i Δ_i − H/α, (D,)."""
        return np.asarray(total - self._gradients.mean / self.config.feddyn_alpha)

    @property
    def _gradients(self) -> LatestUpdates:
        """The h_i of all clients, and H = Σ p_i h_i."""
        return LatestUpdates.of(self.session, GRADIENTS, self.session.objective_weights())
