"""ACE, all-client engagement: every arrival is a step by the last updates of all clients.

X. Gu, K. Huang, J. Zhang and L. Huang, "Fast federated learning in the presence of arbitrary device unavailability"
(MIFA), NeurIPS 2021, algorithm 1, taken from rounds to arrivals as X. Chang et al. do, "Mitigating participation
imbalance bias in asynchronous federated learning", arXiv 2511.19066, 2025. Their delay-aware variant is ACED
(strategies/methods/aced.py). The server keeps each client's last update h_i. At every arrival

    h_i ← Δ_i,   W ← W + η_g Σ_j p_j h_j

The first model is made when all clients have answered once, so that it is exactly the model of synchronous FedAvg.
Clients that will never be available again, or never for as long as a task takes, are not waited for. A client that
joins later counts from its first reply on: until then its h_i is 0. Every client has weight p_i, however fast it is.
A contribution moves the model by p_i in each aggregation until the client's next contribution, in total by p_i P_i,
the time-based d_i that the run reports. Each step is as long as a synchronous round's, and there are Σ p_i P_i of
them from one contribution of a client to its next (C, if all are equally fast), so that η_g is 1/Σ p_i P_i by default
(``server_lr = 0``). With C = 1 ACE is local training. With a decreasing step size schedule, h_i has the step size of
the time when client i trained, which is larger than the current one.

A client receives the model and sends one back; the server keeps C vectors of float32, 4 C D bytes, and their sum
(``bytes-kept``). Beyond 4 GiB they go to a temporary file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.core.config import AsyncConfigBase, StrategyConfig
from strategies.flower.arrays import Vector
from strategies.methods.shared.answers import Answers
from strategies.methods.shared.arrivals import EveryArrival
from strategies.methods.shared.latest_updates import NAME, LatestUpdates
from strategies.updates.pipeline import Contribution


@dataclass(frozen=True)
class ACEConfig(AsyncConfigBase):
    """ACE has no parameters of its own."""


class ACE(EveryArrival):
    """ACE (Chang et al. 2025; Gu et al. 2021, algorithm 1, at every arrival).

    New model: at every arrival, once all have answered.
    Rule: W moves by Σ p_j h_j, h_j the last update of client j.
    Kept: all h_j.
    Helps: where data are non-IID, speeds differ and all clients stay.
    """

    Config: ClassVar[type[StrategyConfig]] = ACEConfig
    config: ACEConfig

    def stateful_components(self) -> Sequence[Any]:
        """Return nothing; note who may still answer in a new run."""
        self._answers = Answers(self.session)
        return ()

    @property
    def latest(self) -> LatestUpdates:
        """The last updates h_i of all clients, and their weighted sum h = Σ p_j h_j."""
        return LatestUpdates.of(self.session, NAME, self.session.client_weights())

    def default_server_lr(self) -> float:
        """Return 1/Σ p_i P_i: each step has updates of all clients, however few are at work."""
        return self.session.contribution_weights.step()

    def ready(self, arrived: int) -> bool:
        """Return True at every arrival, once all clients have answered."""
        return arrived >= 1 and self._answers.all_answered_once()

    def transform_update(self, contribution: Contribution) -> Vector:
        """Keep Δ_i (D,) as the client's last update, and return it."""
        self.latest.put(contribution.client.index, contribution.update)
        return contribution.update

    def server_update(self, total: Vector) -> Vector:
        """Return Σ p_j h_j, (D,)."""
        return self.latest.mean
