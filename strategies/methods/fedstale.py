"""FedVARP and FedStale: whoever isn't in a round counts by its last update.

D. Jhunjhunwala, P. Sharma, A. Nagarkatti & G. Joshi, "FedVARP: tackling the variance due to partial client
participation in federated learning", UAI 2022, algorithm 1, and A. Rodio & G. Neglia, "FedStale: leveraging stale
client updates in federated learning", ECAI 2024. With h_i the last update of client i, 0 at first, and h = Σ p_i h_i
over all clients,

    W ← step(W, Σ_S d_i (Δ_i − β h_i) + β h),   and then h_i ← Δ_i for the participants

β = 1 is FedVARP, which removes the variance of the draw. β = 0 is FedAvg, exactly; in between is FedStale, for last
updates that are too old to count in full. The papers' d_i are p_i / π_i, with π_i the probability of taking part; the
d_i of a participation scheme are unbiased in the same way (strategies/rounds/participation.py), and π_i isn't needed.
With all clients in every round FedStale is FedAvg for every β, up to rounding.

Where availability, deadlines or failures keep some clients away more often than others, q_i = E[d_i] isn't p_i, and
the run minimises Σ ((1 − β) q_i + β p_i) f_i, over the clients that ever take part: β = 1 corrects who takes part,
and β < 1 does so in part. An absent device keeps its p_i for a while (strategies/core/population.py). Under a
participation scheme that minimises another objective by design (paired, fixed), the p_i are those of that objective.
With a decreasing step size schedule, h_i has the step size of the time when client i trained.

Sent: the messages of FedAvg. Kept: the h_i, 4 C D bytes, beyond 4 GiB in a temporary file (nothing with β = 0); the
updates of a round until all have arrived, 8 D bytes for each participant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from strategies.clients.weights import Weights
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.parameters import parameter
from strategies.flower.arrays import Vector
from strategies.methods.shared.latest_updates import NAME, LatestUpdates
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.pipeline import Contribution


@dataclass(frozen=True)
class FedStaleConfig(SynchronousConfig):
    """Parameters of FedStale.

    Parameters
    ----------
    stale_weight : float
        β, the weight of the last updates of clients outside the round; 0: FedAvg; 1: FedVARP
    """

    stale_weight: float = parameter(1.0, ge=0, le=1)


class FedStale(SynchronousStrategy):
    """FedStale (Rodio and Neglia 2024; with β = 1 FedVARP: Jhunjhunwala et al. 2022, algorithm 1).

    Rule: W moves by Σ d_i (Δ_i − β h_i) + β Σ p_i h_i, h_i the last update of client i.
    Kept: all h_i.
    Helps: where few clients take part in a round and data are non-IID; a small β if last updates are old.
    """

    Config: ClassVar[type[StrategyConfig]] = FedStaleConfig
    config: FedStaleConfig
    aggregates_on_arrival: ClassVar[bool] = False
    uses_given_weights: ClassVar[bool] = True
    logs_own_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    side_channel: ClassVar[str] = "updates count again in later rounds"

    @property
    def latest(self) -> LatestUpdates:
        """The last updates h_i of all clients, and their weighted sum h = Σ p_i h_i."""
        return LatestUpdates.of(self.session, NAME, self.session.objective_weights())

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return step(W, Σ d_i (Δ_i − β h_i) + β h), (D,), and then set h_i ← Δ_i."""
        beta = self.config.stale_weight
        known = set(self.session.client_vectors(NAME).clients) if beta else set[int]()
        for index, share in self.session.objective_weights().items():
            self.session.client_stats[index].weight += beta * share if index in known else 0.0
        for c, weight in zip(contributions, weights, strict=True):
            counted = weight * (1 - beta * (c.client.index in known))
            self.session.client_stats[c.client.index].weight += counted
        updated_model = super().aggregate(model, contributions, weights)
        if beta:
            self.latest.take(contributions)
        return updated_model

    def transform_update(self, contribution: Contribution) -> Vector:
        """Return Δ_i − β h_i, (D,)."""
        beta, update = self.config.stale_weight, contribution.update
        if not beta:
            return update
        return update - beta * self.session.client_vectors(NAME).get(contribution.client.index)

    def server_update(self, total: Vector) -> Vector:
        """Return Σ d_i (Δ_i − β h_i) + β h, (D,)."""
        beta = self.config.stale_weight
        return total + beta * self.latest.mean if beta else total

    def expected_weights(self, p: Weights) -> Weights | None:
        """Return (1 − β) q_i + β p_i (n,) over the clients that ever take part; None if q_i can't be known."""
        beta, q = self.config.stale_weight, self.session.selection.expected(p)
        if q is None:
            return None
        return (1 - beta) * q + beta * self.session.selection.restricted(q > 0)
