"""ACED: ACE over the clients whose last update isn't too old.

X. Chang et al., "Mitigating participation imbalance bias in asynchronous federated learning", arXiv 2511.19066, 2025:
the delay-aware variant of ACE (strategies/methods/ace.py). The server keeps each client's last update h_i. At every
arrival

    h_i ← Δ_i,   W ← W + η_g Σ_A p_j h_j / Σ_A p_j,   A = {j: h_j arrived at most τ aggregations ago}

Of the paper only the abstract could be read; the rule is that of its authors' public code (AsyncFL, ``stalesgd.py``),
where A are the clients that began their present task at most τ steps ago. That is the same where every client is sent
a task as soon as it has answered; where ``concurrency`` keeps clients idle, here h_j ages from its arrival. The code
differs in three things: it takes a step after every C arrivals, not at each; the mean over A has equal weights, as
here with ``client_weights = "uniform"``; and it knows an empty A, which takes no step. At each arrival A has at least
the client that has just arrived. τ = ∞ (``cache_age = 0``) is ACE, exactly. The first model is made when all clients
have answered once.

A client whose tasks last longer than τ aggregations counts for τ + 1 of them, and then not until its next answer; the
others count more meanwhile. So client i has the share

    q_i = mean over aggregations n of p_i 1{i ∈ A_n} / Σ_{j ∈ A_n} p_j

of the objective that is minimised, which the run reports as it came about. Slow clients count less than p_i, and no
old update moves the model. By default (``server_lr = 0``) η_g is 1/Σ p_i min(P_i, τ + 1), with P_i the aggregations
from one contribution of client i to the next, as ACE's.

A client receives the model and sends one back; the server keeps C vectors of float32, 4 C D bytes, and their sum
(``bytes-kept``). Beyond 4 GiB they go to a temporary file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from strategies.core.config import AsyncConfigBase, StrategyConfig
from strategies.core.parameters import parameter
from strategies.flower.arrays import Vector
from strategies.methods.shared.answers import Answers
from strategies.methods.shared.arrivals import EveryArrival
from strategies.methods.shared.last_arrivals import last_arrivals
from strategies.methods.shared.latest_updates import NAME, LatestUpdates
from strategies.updates.pipeline import Contribution

GIVEN = "given"  # array by client index: what each client's updates have moved the model so far


@dataclass(frozen=True)
class ACEDConfig(AsyncConfigBase):
    """Parameters of ACED.

    Parameters
    ----------
    cache_age : int
        τ, aggregations for which a client's last update counts; 0: until its next
    """

    cache_age: int = parameter(100, ge=0)


class ACED(EveryArrival):
    """ACED (Chang et al. 2025, section on a delay-aware ACE, of which the abstract alone was read).

    New model: at every arrival, once all have answered.
    Rule: ACE's, over the clients whose last update is at most `cache-age` aggregations old.
    Kept: all clients' last updates.
    Helps: as ACE, where last updates of late clients mislead; these clients count less.
    """

    Config: ClassVar[type[StrategyConfig]] = ACEDConfig
    config: ACEDConfig

    def stateful_components(self) -> Sequence[Any]:
        """Return nothing; note who may still answer in a new run."""
        self._answers = Answers(self.session)
        return ()

    @property
    def latest(self) -> LatestUpdates:
        """The last updates h_i of the clients in A, 0 of the others, and their weighted sum Σ_A p_j h_j."""
        return LatestUpdates.of(self.session, NAME, self.session.client_weights())

    def default_server_lr(self) -> float:
        """Return 1/Σ p_i min(P_i, τ + 1)."""
        age = self.config.cache_age
        return self.session.contribution_weights.step(longest=age + 1 if age else math.inf)

    def ready(self, arrived: int) -> bool:
        """Return True at every arrival, once all clients have answered."""
        return arrived >= 1 and self._answers.all_answered_once()

    @property
    def discounts_staleness(self) -> bool:
        """Whether a contribution may count for less than the time until the client's next: False without a limit."""
        return self.config.cache_age > 0

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return p_i min(P_i, τ + 1), what a contribution counts until it is too old, before A is normalised."""
        weights, age = super().weigh(contributions), self.config.cache_age
        if not age:
            return weights
        p = self.session.client_weights()
        most = [(age + 1) * p.get(contribution.client.index, 0.0) for contribution in contributions]
        return np.minimum(weights, most).tolist()  # type: ignore[no-any-return]

    def transform_update(self, contribution: Contribution) -> Vector:
        """Keep Δ_i (D,) as the client's last update, and return it."""
        index = contribution.client.index
        self.latest.put(index, contribution.update)
        last_arrivals(self.session.memory, index + 1)[index] = self.session.aggregations + 1
        return contribution.update

    def server_update(self, total: Vector) -> Vector:
        """Forget the updates that are too old, and return Σ_A p_j h_j / Σ_A p_j, (D,)."""
        latest, age = self.latest, self.config.cache_age
        if not age:
            return latest.mean
        arrived = last_arrivals(
            self.session.memory, max(latest.client_weights) + 1
        )  # 0: that client isn't in A
        for index in np.flatnonzero((arrived > 0) & (arrived <= self.session.aggregations - age)).tolist():
            latest.put(index, np.zeros_like(total))
            arrived[index] = 0
        apart = sum(share for index, share in latest.client_weights.items() if not arrived[index])
        given = np.zeros(len(arrived))
        known = self.session.memory.get(GIVEN, given)
        given[: len(known)] = known
        indices = list(latest.client_weights)
        counted = np.array(list(latest.client_weights.values())) * (arrived[indices] > 0)
        given[indices] += counted / counted.sum()
        self.session.memory[GIVEN] = given
        return latest.mean / (1 - apart) if apart else latest.mean

    def weights_over_time(self) -> Mapping[int, float] | None:
        """Return Σ_n p_i 1{i ∈ A_n} / Σ_{A_n} p_j so far, by client index; None before a step with τ."""
        given = self.session.memory.get(GIVEN)
        return None if given is None else dict(enumerate(given.tolist()))
