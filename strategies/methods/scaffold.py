"""SCAFFOLD: each client corrects its steps by how its gradients differ from those of all.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich & A. T. Suresh, "SCAFFOLD: Stochastic controlled
averaging for federated learning", ICML 2020, algorithm 1, option II:

    client i, from w ← W:  w ← w − γ_i (g_i(w) + c − c_i)          K_i times
    server:                c_i ← c_i − c − Δ_i / (K_i γ_i)         for the participants
                           W ← step(W, Σ_S d_i Δ_i),   c = Σ_i p_i c_i over all

All c_i are 0 at first, so that the first round is FedAvg's; with one step each and all clients every round is, up to
rounding. The server holds every c_i, since Δ_i and the path K_i γ_i that a client tells
(strategies/methods/shared/local_path.py)
say what it becomes: clients keep nothing and are sent the one vector c − c_i. With momentum the path is that of J.
Wang et al. 2020, and c_i still a mean of the client's gradients on the way. Of a client that doesn't tell its path
no c_i is learnt, and the log says so. Who is away on devices counts for a while
(strategies/core/population.py). Where a
participation scheme minimises another objective by design (paired, fixed), p_i is that objective's.

Sent: two vectors of the model's size to each participant, one back. Kept: the c_i, 4 C D bytes, beyond 4 GiB in a
temporary file; a round's updates until all are there, 8 D bytes of each participant.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.methods.shared.latest_updates import LatestUpdates
from strategies.methods.shared.local_path import paths_of
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.chain import Contribution

VARIATES = "variates"


class Scaffold(SynchronousStrategy):
    """SCAFFOLD (Karimireddy et al. 2020, algorithm 1, option II).

    Rule: each local step goes along g_i + c − c_i, c_i the mean of a client's last gradients, c that of all c_i.
    Needs: clients that tell how far their steps went.
    Sent: c − c_i.
    Kept: c_i of each client.
    Helps: where data are unlike and local work is much; where few take part, c_i are out of date.
    """

    streams: ClassVar[bool] = False
    by_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    past_the_sum: ClassVar[str] = "clients are sent a mean of all clients' gradients"
    of_one_round: ClassVar[str] = "SCAFFOLD notes of an update by the corrections that its own round sent"
    _common: Vector

    def local_rule(self) -> dict[str, float]:
        """Ask clients how far their steps went."""
        return {messages.PATH: 1.0}

    def companions(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield c − c_i of each participant."""
        variates = self._variates
        self._common = variates.mean
        for client in clients:
            yield {messages.CONSTANT: self._common - variates.get(client.index)}

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Note c_i ← c_i − c − Δ_i / s_i, and return step(W, Σ d_i Δ_i), (D,)."""
        variates = self._variates
        for c, path in zip(contributions, paths_of(contributions, self.safeguards.path_bound), strict=True):
            if not np.isnan(path):
                i = c.client.index
                variates.put(i, variates.get(i) - self._common - c.update / path)
        return super().aggregate(model, contributions, weights)

    @property
    def _variates(self) -> LatestUpdates:
        """c_i and c."""
        return LatestUpdates(self.memory, self.vectors(VARIATES), self.minimised())
