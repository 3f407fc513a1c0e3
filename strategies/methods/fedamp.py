"""FedAMP: each client has a personal model, and is sent a weighted mean of the models similar to it.

Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei & Y. Zhang, "Personalized cross-silo federated learning on non-IID
data", AAAI 2021, equations 2-5 and algorithm 1, with A(x) = 1 − e^{−x/σ}:

    server, for each participant:  u_i = Σ_j ξ_ij w_j
                                   ξ_ij = α_k A′(‖w_i − w_j‖²) for j ≠ i, ξ_ii = 1 − Σ_{j≠i} ξ_ij
    client i, from w ← u_i:        w ← w − γ (g_i(w) + μ (w − u_i));   w_i ← w

The sum is over all C connected clients, and the distance is computed without the buffers; each w_i starts from the
initial model. The paper's α_k must be small enough for ξ_ii ≥ 0, and A′(x) = e^{−x/σ}/σ is at most 1/σ, so that
α_k ≤ σ/C is always small enough. The parameter here is the share a of this bound: α_k = a σ / C, and
ξ_ij = (a/C) e^{−‖w_i − w_j‖²/σ}. With a = 1, clients with equal models are averaged with equal weights, and clients
with a squared distance far above σ aren't averaged; with a = 0 each client trains alone. μ here is the paper's λ/α_k.
The paper's client minimises f_i(w) + μ/2 ‖w − u_i‖² exactly; local steps minimise it approximately.

The global model, which no client trains, is W ← step(W, Σ p_i w_i − W): the mean of the personal models, unless
another server optimizer is chosen.

Sent: u_i to each participant, in place of W, and w_i back; for an evaluation also w_i. Kept: the w_i, 4 C D bytes,
beyond 4 GiB in a temporary file; the models of a round until all have arrived, 8 D bytes for each participant.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.core.client_vectors import ClientVectors, pooled, squared_distances
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.parameters import parameter
from strategies.flower import messages
from strategies.flower.arrays import Layout, Vector
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.pipeline import Contribution

MODELS = "models"  # name of the personal models w_i in the memory


@dataclass(frozen=True)
class FedAMPConfig(SynchronousConfig):
    """Parameters of FedAMP.

    Parameters
    ----------
    proximal_mu : float
        μ, the pull of a client's model towards the u_i that it was sent; the paper's λ/α_k
    fedamp_sigma : float
        σ, the squared distance beyond which clients' models hardly count for each other
    fedamp_alpha : float
        the most that a client takes of others' models
    """

    proximal_mu: float = parameter(0.1, ge=0)
    fedamp_sigma: float = parameter(10.0, gt=0)
    fedamp_alpha: float = parameter(1.0, ge=0, le=1)


def attention(squares: NDArray[np.float64], own: Sequence[int], sigma: float, share: float) -> Vector:
    """Return ξ (L, C) of L clients, whose rows are ``own``, from their squared distances (L, C) to all C."""
    weights: Vector = share / squares.shape[1] * np.exp(-squares / sigma)
    places = np.arange(len(weights))
    weights[places, own] = 0.0
    weights[places, own] = 1.0 - weights.sum(1)
    return weights


class FedAMP(SynchronousStrategy):
    """FedAMP (Huang et al. 2021, algorithm 1).

    Rule: each client starts from u_i and is pulled to it, the mean of all clients' models, weighted by similarity.
    Sent: u_i, in place of the model.
    Kept: all clients' last models.
    Helps: where clients form groups with similar data, and no one model suits all groups.
    """

    Config: ClassVar[type[StrategyConfig]] = FedAMPConfig
    config: FedAMPConfig
    personal: ClassVar[bool] = True
    aggregates_on_arrival: ClassVar[bool] = False
    uses_given_weights: ClassVar[bool] = True
    logs_own_weights: ClassVar[bool] = True
    side_channel: ClassVar[str] = "each client is sent a mean of the others' models"
    leaks_models: ClassVar[bool] = True  # each client gets a mean of the others' models
    _shares: dict[int, float]

    def local_rule(self) -> dict[str, float]:
        """Return μ for the clients, which add the pull μ (w − u_i) to each gradient."""
        return {messages.ALPHA: self.config.proximal_mu}

    def evaluation_rule(self) -> dict[str, float]:
        """Return {}: the server sends each client its personal model for an evaluation."""
        return {}

    def personal_model(self, client: Client) -> Vector:
        """Return the personal model w_i (D,) of a client."""
        return self._models.get(client.index)

    def begin(self, layout: Layout, model: Vector) -> None:
        """Set the personal model w_i of each client to the initial model (D,)."""
        self.session.client_vectors(MODELS, model)

    @property
    def _models(self) -> ClientVectors:
        return self.session.client_vectors(MODELS)

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield u_i (D,) of each participant, which is sent in place of the global model."""
        everyone = [client.index for client in self.session.clients]
        rows, own = self._models.rows(everyone), [everyone.index(client.index) for client in clients]
        squares = squared_distances(self._models.matrix, rows, own, self.session.run.buffers_at)
        weights = attention(squares, own, self.config.fedamp_sigma, self.config.fedamp_alpha)
        for mean in pooled(weights, self._models.matrix, rows):
            yield {self.session.run.flower.arrayrecord_key: mean}

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Store w_i of the participants, and return step(W, Σ p_i w_i − W), (D,)."""
        self._shares = self.session.client_weights()
        self.session.client_stats.add_weights(self._shares)
        for contribution in contributions:
            own = contribution.model
            if contribution.buffer_values is not None:
                own[self.session.run.buffers_at] = contribution.buffer_values
            self._models.put(contribution.client.index, own)
        return super().aggregate(model, contributions, weights)

    def server_update(self, total: Vector) -> Vector:
        """Return Σ p_i w_i − W over all connected clients, (D,), in place of the round's sum."""
        return np.asarray(self._models.weighted_sum(self._shares) - self.session.model)

    def expected_weights(self, p: Weights) -> Weights:
        """Return p_i (n,): participation changes w_i, but not the weight of a client."""
        return p
