"""FedNova: each update is divided by the length of its client's local path before the updates are averaged.

J. Wang, Q. Liu, H. Liang, G. Joshi & H. V. Poor, "Tackling the objective inconsistency problem in heterogeneous
federated optimization", NeurIPS 2020, eq. 9 and algorithm 1:

    client i:  Δ_i = −γ Σ_k a_ik g_ik,  its path s_i = γ ‖a_i‖₁: γ K_i for plain SGD
    server:    W ← step(W, s_eff Σ_S d_i Δ_i / s_i),   s_eff = Σ_S d_i s_i / Σ_S d_i

so that clients with many steps don't pull the global minimum towards their own. With momentum ρ,
‖a_i‖₁ = (K_i − ρ(1−ρ^K_i)/(1−ρ)) / (1−ρ); each client reports its s_i (strategies/methods/shared/local_path.py), so
that γ may differ between clients, too. The division by Σ d_i is our addition, for participation schemes whose weights
sum to 1 only in expectation. With equal s_i FedNova is exactly FedAvg. A client that doesn't report its path counts
with s_eff, and the log warns of it.

With secure sums each client masks d_i Δ_i / s_i and d_i s_i, and the server has their sums alone: a client that
doesn't report its path is left out, and safeguards bound neither paths nor lengths, which nobody sees.

Sent: the messages of FedAvg. Kept: the updates of a round until all have arrived, 8 D bytes for each participant.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from strategies.clients.weights import Weights
from strategies.core.capabilities import from_sums
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.methods.shared.local_path import paths_of
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.pipeline import Contribution


def scales(paths: Weights, weights: Sequence[float]) -> Weights:
    """Return s_eff / s_i (n,), 1 where s_i is NaN, from paths s_i (n,) and weights d_i (n,)."""
    known = ~np.isnan(paths)
    if not known.any():
        return np.ones(len(paths))
    ratios, d = paths[known] / paths[known][0], np.asarray(weights, dtype=np.float64)[known]
    if not d.sum() > 0:
        return np.ones(len(paths))
    scale = np.ones(len(paths))
    scale[known] = (np.sum(d * ratios) / np.sum(d)) / ratios  # exactly 1 if all paths are equal
    return scale


class FedNova(SynchronousStrategy):
    """FedNova (Wang et al. 2020, eq. 9).

    Rule: each update is divided by the length of its client's local path, before the mean.
    Needs: the length of each client's path.
    Helps: where clients take unequal numbers of steps.
    """

    uses_given_weights: ClassVar[bool] = True
    divides_by_path: ClassVar[bool] = True
    side_channel: ClassVar[str] = "an update counts by how far its client's steps went"
    _scales: dict[int, float]

    def local_rule(self) -> dict[str, float]:
        """Ask clients to report the length of their local path."""
        return {messages.PATH: 1.0}

    @from_sums
    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return step(W, s_eff Σ d_i Δ_i / s_i), (D,)."""
        scale = scales(paths_of(contributions, self.session.safeguards.path_bound), weights)
        # With safeguards a reported path makes no update count for more than its length may be: our addition.
        lengths = scale * [float(np.linalg.norm(c.update)) for c in contributions]
        bounds = self.session.safeguards.furthest([c.client for c in contributions], lengths.tolist())
        longer = lengths > bounds
        scale[longer] *= (np.array(bounds) / lengths)[longer]
        self._scales = {c.client.index: float(s) for c, s in zip(contributions, scale, strict=True)}
        return super().aggregate(model, contributions, weights)

    @from_sums
    def transform_update(self, contribution: Contribution) -> Vector:
        """Return Δ_i s_eff / s_i, (D,)."""
        return contribution.update * self._scales[contribution.client.index]
