"""FedAMP: each client has a model of its own, and is sent a mean of those that are like it.

Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei & Y. Zhang, "Personalized cross-silo federated learning on non-IID
data", AAAI 2021, equations 2-5 and algorithm 1, with A(x) = 1 − e^{−x/σ}:

    server, for each participant:  u_i = Σ_j ξ_ij w_j
                                   ξ_ij = α_k A′(‖w_i − w_j‖²) for j ≠ i, ξ_ii = 1 − Σ_{j≠i} ξ_ij
    client i, from w ← u_i:        w ← w − γ (g_i(w) + μ (w − u_i));   w_i ← w

The sum is over all C clients that are there, the distance over what is trained; all w_i are the initial model at
first. The paper's α_k must be small enough for ξ_ii ≥ 0, and its A′(x) = e^{−x/σ}/σ is at most 1/σ; so it is told
here as a share a of the σ/C that always is: α_k = a σ / C, and ξ_ij = (a/C) e^{−‖w_i − w_j‖²/σ}. With a = 1, clients
that are equal are averaged evenly, and those that are far apart, by σ, not at all; a = 0 is training alone. The
paper's λ/α_k is μ here, and its client minimises f_i(w) + μ/2 ‖w − u_i‖² to the end, which local steps do by a part.

The global model, which nobody trains on, is W ← step(W, Σ p_i w_i − W): the mean of the personal ones, unless a
server optimizer is asked for.

Sent: u_i to each participant, in place of W, and w_i back; to evaluate also w_i. Kept: the w_i, 4 C D bytes, beyond
4 GiB in a temporary file; a round's models until all are there, 8 D bytes of each participant.
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
from strategies.updates.chain import Contribution

MODELS = "models"  # the w_i


@dataclass(frozen=True)
class FedAMPConfig(SynchronousConfig):
    """Parameters of FedAMP.

    Parameters
    ----------
    proximal_mu : float
        μ, the pull of a client's model towards the u_i that it was sent; the paper's λ/α_k
    fedamp_sigma : float
        σ, in squared distances of models: clients whose models are further apart hardly count for each other
    fedamp_alpha : float
        how much a client takes of others' models, at most: the α_k of Huang et al. 2021 is this times σ / C
    """

    proximal_mu: float = parameter(0.1, ge=0)
    fedamp_sigma: float = parameter(10.0, gt=0)
    fedamp_alpha: float = parameter(1.0, ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_protection("each client of FedAMP gets a mean of the others' models")


def attention(squares: NDArray[np.float64], own: Sequence[int], sigma: float, share: float) -> Vector:
    """Return ξ (L, C) of L clients, whose rows are ``own``, from their squared distances (L, C) to all C."""
    weights: Vector = share / squares.shape[1] * np.exp(-squares / sigma)
    places = np.arange(len(weights))
    weights[places, own] = 0.0
    weights[places, own] = 1.0 - weights.sum(1)
    return weights


class FedAMP(SynchronousStrategy):
    """FedAMP (Huang et al. 2021, algorithm 1).

    New model: when all participants have answered.
    Rule: each client starts from, and is pulled to, a mean of all clients' models, by how near they are to its own.
    Sent: that mean, u_i, in the place of the model.
    Kept: the last model of each client.
    Helps: where clients fall into groups of like data, whom one model can't suit.
    """

    Config: ClassVar[type[StrategyConfig]] = FedAMPConfig
    config: FedAMPConfig
    personal: ClassVar[bool] = True
    streams: ClassVar[bool] = False
    by_weights: ClassVar[bool] = True
    records_shares: ClassVar[bool] = True
    past_the_sum: ClassVar[str] = "each client is sent a mean of the others' models"
    _shares: dict[int, float]

    def local_rule(self) -> dict[str, float]:
        """Tell clients μ; they add the pull μ (w − u_i) to each gradient."""
        return {messages.ALPHA: self.config.proximal_mu}

    def evaluation_rule(self) -> dict[str, float]:
        """Tell nothing: what clients are judged by is sent."""
        return {}

    def personal_model(self, client: Client) -> Vector:
        """Return w_i (D,)."""
        return self._models.get(client.index)

    def begin(self, layout: Layout, model: Vector) -> None:
        """Begin with w_i = the initial model, (D,), of each client."""
        if MODELS not in self.memory.vectors:
            self.memory.vectors[MODELS] = ClientVectors(model, max(len(self.clients), 1))

    @property
    def _models(self) -> ClientVectors:
        return self.memory.vectors[MODELS]

    def companions(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield u_i of each participant, in the place of the global model."""
        everyone = [client.index for client in self.clients]
        rows, own = self._models.rows(everyone), [everyone.index(client.index) for client in clients]
        squares = squared_distances(self._models.matrix, rows, own, self.run.buffers_at)
        weights = attention(squares, own, self.config.fedamp_sigma, self.config.fedamp_alpha)
        for mean in pooled(weights, self._models.matrix, rows):
            yield {self.run.flower.arrayrecord_key: mean}

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Note w_i of the participants, and return step(W, Σ p_i w_i − W), (D,)."""
        self._shares = self.importance()
        for index, share in self._shares.items():
            self.accounts[index].weight += share
        for contribution in contributions:
            own = contribution.model
            if contribution.untrained is not None:
                own[self.run.buffers_at] = contribution.untrained
            self._models.put(contribution.client.index, own)
        return super().aggregate(model, contributions, weights)

    def direction(self, total: Vector) -> Vector:
        """Return Σ p_i w_i − W over all clients that are there, (D,), in place of the round's sum."""
        return np.asarray(self._models.weighted_sum(self._shares) - self.model)

    def expected_weights(self, p: Weights) -> Weights:
        """Return p_i (n,): who takes part changes w_i, not how much it counts."""
        return p
