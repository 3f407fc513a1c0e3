"""ACE, all-client engagement: every arrival is a step by the last updates of all clients.

X. Gu, K. Huang, J. Zhang and L. Huang, "Fast federated learning in the presence of arbitrary device unavailability"
(MIFA), NeurIPS 2021, algorithm 1, taken from rounds to arrivals as X. Chang et al. do, "Mitigating participation
imbalance bias in asynchronous federated learning", arXiv 2511.19066, 2025. Its delay-aware variant, ACED, isn't
here. The server keeps each client's last update h_i. At every arrival

    h_i ← Δ_i,   W ← W + η_g Σ_j p_j h_j

The first model is made when all have answered once, so that it is synchronous FedAvg's, exactly; nobody waits for
one who is never there any more, or never for as long as its task takes. A client that joins later counts from its
first answer on: until then its h_i is 0. All count p_i, however fast they are; a contribution moves the model by p_i
in each aggregation until the next comes, in all by p_i P_i, the time-based d_i that the run reports. Each step is as
long as a round's, so η_g is 1/C by default (``server_lr = 0``). With C = 1 it is local training.
Where steps shrink by a schedule, h_i counts by the steps of its own time, which are longer than today's.

A client is sent the model and sends one; the server keeps C vectors of float32, 4 C D bytes, and their sum
(``bytes-kept``). Beyond 4 GiB they go to a temporary file.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.clients.member import Member
from strategies.core.config import EventsConfig, StrategyConfig
from strategies.flower.arrays import Vector
from strategies.methods.shared.arrivals import EveryArrival
from strategies.methods.shared.latest_updates import NAME, LatestUpdates
from strategies.timing.availability import NEVER
from strategies.updates.chain import Contribution


@dataclass(frozen=True)
class ACEConfig(EventsConfig):
    """ACE has no parameters of its own."""


class ACE(EveryArrival):
    """ACE (Chang et al. 2025; Gu et al. 2021, algorithm 1, at every arrival).

    New model: at every arrival, once all have answered.
    Rule: the model moves by Σ p_j h_j, h_j the last update of each client.
    Kept: the last update of each client.
    Helps: where data are unlike and speeds are too, and all clients stay: all count p_i.
    """

    Config: ClassVar[type[StrategyConfig]] = ACEConfig
    config: ACEConfig

    @property
    def latest(self) -> LatestUpdates:
        """h_i and h."""
        return LatestUpdates(self.memory, self.vectors(NAME), self.importance())

    def ready(self, arrived: int) -> bool:
        """At every arrival, once all have answered."""
        if self.aggregations:
            return arrived >= 1
        # Not whoever has answered: safeguards may still hold that back.
        counting, waits = self.ledger.counting, {c.client.index for c in self.ledger.buffer}
        if any(member.client.index not in waits and self._may_answer(member) for member in counting):
            self.run.warn_once(
                "no model is made until all %d clients that count have answered once", len(counting)
            )
            return False
        return True

    def _may_answer(self, member: Member) -> bool:
        """Tell whether a client will answer: not if it never comes again, or never for as long as its task takes."""
        if self.pace.always or member.waiting or self.ledger.busy(member):
            return True
        if self.pace.comes(member.client, self.pace.now()) == NEVER:
            return False
        return bool(np.isfinite(self.contribution_weights.cycles([member])[0]))

    def counted(self, contribution: Contribution) -> Vector:
        """Keep Δ_i."""
        self.latest.put(contribution.client.index, contribution.update)
        return contribution.update

    def direction(self, total: Vector) -> Vector:
        """Return Σ p_j h_j."""
        return self.latest.mean
