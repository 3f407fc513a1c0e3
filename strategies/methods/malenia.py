"""Malenia SGD: all clients work on one model, until each has answered and their answers are many enough.

A. Tyurin and P. Richtárik, "Optimal time complexities of parallel stochastic optimization methods under a fixed
computation model", NeurIPS 2023, method 6, for clients whose data differ. B_i is the number of updates of the present
model that client i has sent. The new model is made when

    B_i ≥ 1 for every i,   and   (1/C Σ_i 1/B_i)^−1 ≥ S/C,
    W ← W + η_g Σ_i p_i (1/B_i) Σ_b Δ_ib

The paper's p_i are 1/C: then the variance of the step is at most that of a mean over S updates. A client keeps
working until the new model is made, and each of its updates counts. A client with a stale update is sent the current
model, and the update is discarded. So every client counts p_i in every step, however fast it is; where Rennala takes
the mean over all updates, Malenia takes the mean of the clients' means. With S = C, the default, the model waits for
one update of each client; if no client comes twice before the slowest, the step is FedAvg's. With C = S = 1 Malenia
is local training.

Clients that will never be available again, never for as long as a task takes, or that were dropped after several
failures, are not waited for. If such a client has sent updates of the present model before, they count; the harmonic
mean is over the clients that may still answer. The p_i of clients without an update are shared by the others.

A client receives the model and sends one back, which is discarded if it is stale (``discarded-updates``); the server
keeps the clients' means, C vectors of float32, 4 C D bytes (``bytes-kept``), beyond 4 GiB in a temporary file.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from strategies.clients.client_state import ClientState
from strategies.core.config import StrategyConfig
from strategies.events.strategy import AsynchronousStrategy
from strategies.flower.arrays import Layout, Vector
from strategies.methods.shared.answers import Answers
from strategies.methods.shared.arrivals import BufferedConfig
from strategies.timing.scheduler import Times
from strategies.updates.pipeline import Contribution

MEANS = "means"  # the vectors (1/B_i) Σ_b Δ_ib
TAKEN = np.empty(0)  # in the place of updates that are in a mean


def suffices(number: int, inverses: float, s: int) -> bool:
    """Return True if counts B_i of n clients with Σ 1/B_i = ``inverses`` have a harmonic mean of S/n or more."""
    return number * number >= s * inverses * (1 - 1e-9)


@dataclass(frozen=True)
class MaleniaConfig(BufferedConfig):
    """Parameters of Malenia.

    Parameters
    ----------
    buffer_size : int
        S: an aggregation has one update of each client at least, and S/C in the harmonic mean over clients; 0: S = C
    """


class Malenia(AsynchronousStrategy):
    """Malenia SGD (Tyurin and Richtárik 2023, algorithm 6).

    New model: when all have answered, and their numbers of answers have a harmonic mean of `buffer-size`/C or more.
    Rule: W moves by Σ p_i × the mean of client i's updates; updates of older models are discarded.
    Kept: each client's mean update of the present model.
    Helps: where data are non-IID, gradients noisy, and stale updates harm; it waits for the slowest.
    """

    Config: ClassVar[type[StrategyConfig]] = MaleniaConfig
    config: MaleniaConfig
    trains_while_waiting: ClassVar[bool] = True
    uses_given_weights: ClassVar[bool] = True

    def stateful_components(self) -> Sequence[Any]:
        """Return nothing; note who may still answer in a new run."""
        self._answers = Answers(self.session)
        return ()

    def begin(self, layout: Layout, model: Vector) -> None:
        """Begin to count; also in a run that is resumed, which begins with a new model."""
        self._counts = Counter[int]()  # B_i by client index

    def default_server_lr(self) -> float:
        """Return η_g = 1: no update is stale, and the weights of an aggregation sum to 1 as in a round."""
        return 1.0

    def is_fresh_enough(self, staleness: int) -> bool:
        """Return True if δ = 0; other contributions are discarded."""
        return staleness == 0

    def on_contribution(self, contribution: Contribution) -> Contribution:
        """Take an update into its client's mean; what waits is its weight."""
        index, means = contribution.client.index, self.session.client_vectors(MEANS)
        self._answers.note(index)
        self._counts[index] += 1
        before = means.get(index) if self._counts[index] > 1 else np.zeros_like(contribution.update)
        means.put(index, before + (contribution.update - before) / self._counts[index])
        self.session.server_step.note_nonzero(contribution.update)
        return replace(contribution, update=TAKEN)

    def ready(self, arrived: int) -> bool:
        """Return True when all clients that may answer have, and their counts B_i have the harmonic mean S/C."""
        clients, answers = self.session.task_table.active_clients, self._answers
        if not arrived or any(not self._counts[m.client.index] and answers.may_come(m) for m in clients):
            return False
        there = [member for member in clients if self._counts[member.client.index]]
        if self._are_enough(there):
            return True
        return self._are_enough([member for member in there if answers.may_come(member, again=True)])

    def _are_enough(self, clients: Sequence[ClientState]) -> bool:
        """Return True if the counts B_i of these n clients, 1 or more each, have the harmonic mean S/n."""
        counts = [self._counts[member.client.index] for member in clients]
        return not counts or suffices(
            len(counts), sum(1 / count for count in counts), self.config.buffer_size
        )

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return p_i / B_i, with the p_i of the clients that have answered scaled to sum 1."""
        p = self.session.client_weights()
        numbers = Counter(contribution.client.index for contribution in contributions)
        total = sum(p.get(index, 0.0) for index in numbers) or 1.0
        total = 1.0 if math.isclose(total, 1.0, rel_tol=1e-9) else total
        return [p.get(c.client.index, 0.0) / total / numbers[c.client.index] for c in contributions]

    def weights_over_time(self) -> Mapping[int, float] | None:
        """Return Σ of p_i so far, by client index: each aggregation has all that are there; None before the first."""
        members = self.session.task_table.members
        return {i: members[i].weight for i in members} if self.session.aggregations else None

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return step(W, Σ p_i × the mean of client i's updates), (D,), and begin to count anew."""
        shares: dict[int, float] = {}
        for contribution, weight in zip(contributions, weights, strict=True):
            index = contribution.client.index
            shares[index] = shares.get(index, 0.0) + weight
        self._counts.clear()
        return self.session.server_step.apply(model, self.session.client_vectors(MEANS).weighted_sum(shares))

    def predict_num_aggregations(self, times: Times, seconds: float) -> int:
        """Return how many models so many seconds have, by playing the arrivals through.

        With a ``concurrency`` of M < C the next client is drawn by chance, so that all have had a turn after about
        (Σ τ_i / M) Σ_{k ≤ C} 1/k seconds.
        """
        number = len(times)
        if 0 < self.concurrency < number:
            turns = float(times.sum()) / self.concurrency * sum(1 / k for k in range(1, number + 1))
            return max(int(seconds / max(float(times.max()), turns) * (1 + 1e-9)), 1)
        # When each client's task is done, the client, and the model that it began with.
        queue = [(time, client, 0) for client, time in enumerate(times.tolist())]
        heapq.heapify(queue)
        done, counts, inverses = 0, Counter[int](), 0.0
        while queue[0][0] <= seconds * (1 + 1e-9):
            now, client, version = queue[0]
            if version == done:
                inverses += 1 / (counts[client] + 1) - (1 / counts[client] if counts[client] else 0)
                counts[client] += 1
                if len(counts) == number and suffices(number, inverses, self.config.buffer_size):
                    done, counts, inverses = done + 1, Counter[int](), 0.0
            heapq.heapreplace(queue, (now + float(times[client]), client, done))
        return max(done, 1)
