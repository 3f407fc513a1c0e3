"""SCAFFOLD: each client corrects its steps by control variates, the difference of its gradients from the mean.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich & A. T. Suresh, "SCAFFOLD: Stochastic controlled
averaging for federated learning", ICML 2020, algorithm 1, option II:

    client i, from w ← W:  w ← w − γ_i (g_i(w) + c − c_i)          K_i times
    server:                c_i ← c_i − c − Δ_i / (K_i γ_i)         for the participants
                           W ← step(W, Σ_S d_i Δ_i),   c = Σ_i p_i c_i over all clients

All c_i start from 0, so that the first round equals FedAvg's; with one local step and all clients every round does,
up to rounding. The server keeps every c_i, because c_i follows from Δ_i and the path K_i γ_i that the client reports
(strategies/methods/shared/local_path.py): clients keep no state and are sent the vector c − c_i. With momentum the
path is the one of J. Wang et al. 2020, and c_i is still a mean of the client's gradients during its local steps. If
a client doesn't report its path, its c_i isn't updated, and the log warns of it. An absent device keeps its p_i for
a while (strategies/core/population.py). Under a participation scheme that minimises another objective by design
(paired, fixed), the p_i are those of that objective.

Sent: two vectors of the model's size to each participant, one back. Kept: the c_i, 4 C D bytes, beyond 4 GiB in a
temporary file; the updates of a round until all have arrived, 8 D bytes for each participant.
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
from strategies.updates.pipeline import Contribution
from strategies.updates.safeguards import LEAST_NORMS, clip_to_mean

VARIATES = "variates"
# With safeguards a c_i is at most so many times as far from c as the median c_i of its round: a bad c_i counts twice,
# in every client's steps by c, and by its own client's update. On non-IID data c_i are far apart: with 1, two of ten
# clients that collude left 25 of 87 %; a smaller factor costs honest clients more. Our addition.
FURTHEST = 0.65


class Scaffold(SynchronousStrategy):
    """SCAFFOLD (Karimireddy et al. 2020, algorithm 1, option II).

    Rule: each local step goes along g_i + c − c_i, c_i the mean of client i's last gradients, c that of all c_i.
    Needs: the length of each client's path.
    Sent: c − c_i.
    Kept: all c_i.
    Helps: where data are non-IID and clients take many local steps; with few participants the c_i are old.
    """

    aggregates_on_arrival: ClassVar[bool] = False
    uses_given_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    side_channel: ClassVar[str] = "clients are sent a mean of all clients' gradients"
    _common: Vector

    def local_rule(self) -> dict[str, float]:
        """Ask clients to report the length of their local path."""
        return {messages.PATH: 1.0}

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield c − c_i (D,) of each participant."""
        variates = self._variates
        self._common = variates.mean
        for client in clients:
            yield {messages.CONSTANT: self._common - variates.get(client.index)}

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Set c_i ← c_i − c − Δ_i / s_i for path s_i, and return step(W, Σ d_i Δ_i), (D,)."""
        variates, paths = self._variates, paths_of(contributions, self.session.safeguards.path_bound)
        reported = [(c, path) for c, path in zip(contributions, paths, strict=True) if not np.isnan(path)]

        def moved(c: Contribution, path: float) -> Vector:
            return np.asarray(variates.get(c.client.index) - self._common - c.update / path)

        if self.session.safeguards.active and not _enough(len(reported), len(contributions)):
            self.session.run.warn_once(
                "only %d of %d clients report their path: with safeguards no c_i is updated, or these few would make "
                "c alone",
                len(reported),
                len(contributions),
            )
            reported = []
        distances = [float(np.linalg.norm(moved(c, path) - self._common)) for c, path in reported]
        bounds = self.session.safeguards.furthest([c.client for c, _ in reported], distances, FURTHEST)
        for (c, path), most in zip(reported, bounds, strict=True):
            variates.put(c.client.index, clip_to_mean(moved(c, path), self._common, most))
        return super().aggregate(model, contributions, weights)

    @property
    def _variates(self) -> LatestUpdates:
        """The control variates c_i of all clients, and c = Σ p_i c_i."""
        return LatestUpdates.of(self.session, VARIATES, self.session.objective_weights())


def _enough(reported: int, number: int) -> bool:
    """Return True if all clients of a round report their path, or most and enough for a median."""
    return reported == number or (reported >= LEAST_NORMS and 2 * reported > number)
