"""FedAU: an update counts the more, the more rarely its client takes part, by what was observed.

S. Wang & M. Ji, "A lightweight method for tackling unknown participation statistics in federated averaging", ICLR
2024, algorithms 1 and 2:

    W ← step(W, Σ_S p_i ω_i Δ_i)

with ω_i the mean of the intervals between the rounds in which client i took part before, in rounds, and 1 before its
first. The first interval begins where the client joins. An absence of K rounds counts as an interval of K, after
which the next begins, so that ω_i ≤ K. ω_i becomes 1/π_i, the inverse of the probability of taking part, without
anybody knowing it: availability, deadlines, failures and lost replies are corrected alike, where FedAvg shares the
weight of who is missing over the others. The run minimises Σ p_i f_i over the clients that ever take part; who is
away for more than K rounds on average counts less. FedAU is for rounds what time-based weights by observed
contributions are without rounds. With all clients in every round it is exactly FedAvg.

The weights of a round sum to 1 in the mean only. The participation scheme says who is drawn; its weights aren't read,
and a client that ``md`` draws twice counts once. Under a scheme that minimises another objective by design (paired,
fixed), the p_i are those of that objective. An absent device keeps its p_i for a while
(strategies/core/population.py).

Sent: the messages of FedAvg. Kept: three numbers for each client; the updates of a round until all have arrived, 8 D
bytes for each participant.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.parameters import parameter
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.pipeline import Contribution

# In the memory: by client index the rows below; the first is NaN before a client joins.
INTERVALS = "intervals"

INTERVAL_BOUND = 4.0  # with safeguards, ω_i over the clients' median


@dataclass(frozen=True)
class FedAUConfig(SynchronousConfig):
    """Parameters of FedAU.

    Parameters
    ----------
    participation_cutoff : int
        K, the longest interval between two participations that counts
    """

    participation_cutoff: int = parameter(50, ge=1)


def after_absence(row: Weights, server_round: int, cutoff: int) -> Weights:
    """Return a client's row when a round begins, with the intervals of K rounds that its absence has completed.

    Parameters
    ----------
    row : array (3,)
        The round in which the present interval began, the number of intervals before it, and their sum.
    """
    whole = (server_round - 1 - row[0]) // cutoff
    return np.asarray(row + whole * np.array([cutoff, 1, cutoff]))


class FedAU(SynchronousStrategy):
    """FedAU (Wang and Ji 2024, algorithms 1 and 2).

    Rule: W moves by Σ p_i ω_i Δ_i, ω_i the mean interval, in rounds, between participations of client i.
    Kept: three numbers for each client.
    Helps: as MIFA, if memory per client is short.
    """

    Config: ClassVar[type[StrategyConfig]] = FedAUConfig
    config: FedAUConfig
    uses_given_weights: ClassVar[bool] = True
    logs_own_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    side_channel: ClassVar[str] = "an update counts by how rarely its client takes part"

    def clients_present(self, clients: Sequence[Client]) -> None:
        """Begin the first interval of clients that are new."""
        rows = self.session.memory.get(INTERVALS, np.empty((0, 3)))
        missing = max(client.index for client in clients) + 1 - len(rows)
        if missing > 0:
            rows = np.concatenate([rows, np.tile([np.nan, 0.0, 0.0], (missing, 1))])
        new = [client.index for client in clients if np.isnan(rows[client.index, 0])]
        rows[new, 0] = self.session.aggregations
        self.session.memory[INTERVALS] = rows

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return p_i ω_i of the participants, and note that they take part."""
        rows, p = self.session.memory[INTERVALS], self.session.objective_weights()
        server_round = self.session.aggregations + 1
        weights, most = [], self._longest(rows)
        for contribution in contributions:
            index = contribution.client.index
            began, number, total = after_absence(rows[index], server_round, self.config.participation_cutoff)
            weights.append(p.get(index, 0.0) * min(total / number if number else 1.0, most))
            rows[index] = server_round, number + 1, total + server_round - began
            self.session.client_stats[index].weight += weights[-1]
        return weights

    def _longest(self, rows: Weights) -> float:
        """Return the largest ω_i that counts: with safeguards a multiple of the median of all clients' ω_i.

        A client makes its own absences; without a bound one that stays away for K rounds counts K p_i once.
        """
        if not self.session.safeguards.active:
            return math.inf
        known = rows[~np.isnan(rows[:, 0])]
        return INTERVAL_BOUND * float(
            np.median(np.where(known[:, 1] > 0, known[:, 2] / np.maximum(known[:, 1], 1), 1.0))
        )

    def expected_weights(self, p: Weights) -> Weights | None:
        """Return p_i (n,) over the clients that ever take part; None if it can't be known who does."""
        q = None if self.config.closes_early else self.session.selection.drawn(p)
        return None if q is None else self.session.selection.restricted(q > 0)
