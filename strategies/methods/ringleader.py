"""Ringleader ASGD: rounds of two phases over a table of clients' mean updates, one step for each client and round.

A. Maranjyan & P. Richtárik, "Ringleader ASGD: the first asynchronous SGD with optimal time complexity under data
heterogeneity", arXiv 2509.22860, 2025. The server keeps for each client the sum G_i and the number b_i of its updates
of this round, and G⁺_i, b⁺_i of the next one, all 0 at first.

    phase 1   every arrival: G_i ← G_i + Δ_i, b_i ← b_i + 1; the client goes on with the model that it has.
              When all b_i ≥ 1, the client that came last makes the round's first step:
                  W ← W + η_g Σ_i p_i G_i / b_i,   and is sent the new model
    phase 2   an arrival of a client that has made no step in this round: the same sum, a step, and the new model;
              of one that has made its step: G⁺_i ← G⁺_i + Δ_i, b⁺_i ← b⁺_i + 1; it goes on with the model it has.
              After one step of each client G, b ← G⁺, b⁺, and phase 1 begins.

So every client counts p_i in every step, however fast it is, no work is thrown away, and fast clients send several
updates, whose mean is less noisy. A client gets one model a round, and no update in the table is of a model more than
2C − 2 steps old. With C = 1 Ringleader is local training. If no client comes twice before the slowest, the first step
is FedAvg's. The paper's p_i are 1/C. A round's C steps are each as long as FedAvg's, so η_g is 1/C by default
(``server_lr = 0``).

Clients that will never be available again, never for as long as a task takes, or that were dropped after several
failures, are not waited for; the p_i of the others are then scaled to sum 1. A client that joins in phase 2 counts
from the next round on. A client whose task was lost, or that waited for a place (``concurrency``), is sent the newest
model.

A client receives a model and sends one back; the server keeps 2 C vectors of float32, 8 C D bytes (``bytes-kept``),
beyond 4 GiB each C of them in a temporary file, and the models that clients have, at most C.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.core.config import AsyncConfigBase, StrategyConfig
from strategies.events.strategy import AsynchronousStrategy
from strategies.flower.arrays import Layout, Vector
from strategies.methods.shared.answers import Answers
from strategies.methods.shared.latest_updates import NAME, LatestUpdates
from strategies.timing.scheduler import Times
from strategies.updates.pipeline import Contribution

NEXT = "next"  # the vectors G⁺_i / b⁺_i; those of G_i / b_i have the name NAME
COUNTS, STEPPING = "counts", "stepping"  # in the memory: the rows below by client index; if it is phase 2
B, B_NEXT, STEPPED = range(3)  # b_i, b⁺_i, whether the client has made its step in this round
TAKEN = np.empty(0)  # in the place of vectors that are in a table


@dataclass(frozen=True)
class RingleaderConfig(AsyncConfigBase):
    """Ringleader has no parameters of its own."""


class Ringleader(AsynchronousStrategy):
    """Ringleader ASGD (Maranjyan and Richtárik 2025, algorithm 1).

    New model: in rounds, once all have answered, at one arrival of each client.
    Rule: W moves by Σ p_i × the mean of client i's updates in this round.
    Kept: each client's mean updates of two rounds.
    Helps: where data are non-IID, gradients noisy and speeds differ; no client idles.
    """

    Config: ClassVar[type[StrategyConfig]] = RingleaderConfig
    config: RingleaderConfig
    trains_while_waiting: ClassVar[bool] = True
    _steps = False  # whether the client of the newest contribution makes a step
    _again: tuple[int, int, NDArray[Any]] | None = None  # who goes on with which version, and that model (D,)

    def stateful_components(self) -> Sequence[Any]:
        """Return nothing; note who may still answer in a new run."""
        self._answers = Answers(self.session)
        return ()

    def begin(self, layout: Layout, model: Vector) -> None:
        """Forget who was to go on in an earlier run; one that is resumed has sent all models again."""
        self._again, self._steps = None, False

    def predict_num_aggregations(self, times: Times, seconds: float) -> int:
        """Return C for every round: that of the slowest client's task, or of all tasks by turns (``concurrency``)."""
        places = min(self.concurrency or len(times), len(times))
        a_round = max(float(times.max()), float(times.sum()) / places if self.concurrency else 0.0)
        return len(times) * max(int(seconds / a_round * (1 + 1e-9)), 1)

    def default_server_lr(self) -> float:
        """Return 1/C of the clients that count now: the steps of a round move the model as a round of FedAvg does."""
        return 1 / max(len(self.session.task_table.active_clients), 1)

    def on_contribution(self, contribution: Contribution) -> Contribution:
        """Take a contribution into a table; what waits is that its client makes a step."""
        self._answers.note(contribution.client.index)
        self._steps = self._take(contribution)
        going_on = contribution.client.index, contribution.version, contribution.base
        self._again = None if self._steps else going_on
        return replace(contribution, update=TAKEN, base=TAKEN)

    def ready(self, arrived: int) -> bool:
        """Return True if the client of the newest contribution makes a step."""
        return self._steps

    def resend_model(self, client: Client) -> tuple[int, NDArray[Any]] | None:
        """Return the model that a client has, if it has just delivered an update and made no step."""
        if self._again is None or self._again[0] != client.index:
            return None
        return self._again[1:]

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return step(W, Σ p_i G_i / b_i), (D,)."""
        self._steps = False
        return self.session.server_step.apply(model, self.session.server_step.note_nonzero(self._table.mean))

    def _take(self, contribution: Contribution) -> bool:
        """Add an update to the table of this round or of the next; return True if its client makes a step."""
        index, counts = contribution.client.index, self._counts(contribution.client.index)
        if self.session.memory.get(STEPPING) and not self._waits_for(counts, STEPPED):
            self._begin_round(counts)
        stepping = self.session.memory.get(STEPPING)
        if stepping and (counts[index, STEPPED] or not counts[index, B]):
            self._add(NEXT, B_NEXT, index, contribution.update)
            return False
        self._add(NAME, B, index, contribution.update)
        if not stepping and self._waits_for(counts, B):
            return False
        self.session.memory[STEPPING] = True
        counts[index, STEPPED] = 1
        return True

    def _waits_for(self, counts: NDArray[np.int64], what: int) -> bool:
        """Return True if any client still has to answer in phase 1 (B), or to make its step in phase 2 (STEPPED)."""
        return any(
            self._answers.may_come(member)
            for member in self.session.task_table.active_clients
            if not counts[member.client.index, what] and (what == B or counts[member.client.index, B])
        )

    def _begin_round(self, counts: NDArray[np.int64]) -> None:
        """Let the table of the next round be that of this one: G, b ← G⁺, b⁺."""
        vectors = self.session.memory.client_vectors
        vectors[NAME], vectors[NEXT] = self.session.client_vectors(NEXT), self.session.client_vectors(NAME)
        counts[:, B], counts[:, B_NEXT], counts[:, STEPPED] = counts[:, B_NEXT], 0, 0
        self.session.memory[STEPPING] = False
        LatestUpdates.forget(self.session.memory)

    def _add(self, name: str, count: int, index: int, update: Vector) -> None:
        """Add an update (D,) of a client to the mean of those in a table."""
        counts = self._counts(index)
        # In phase 2 the sum over the table moves with it; before, it is not needed.
        stepping = name == NAME and self.session.memory.get(STEPPING)
        table = self._table if stepping else self.session.client_vectors(name)
        before = table.get(index) if counts[index, count] else np.zeros_like(update)
        counts[index, count] += 1
        table.put(index, before + (update - before) / counts[index, count])

    @property
    def _table(self) -> LatestUpdates:
        """G_i / b_i of the clients in this round, and Σ p_i G_i / b_i."""
        p, counts = self.session.client_weights(), self.session.memory[COUNTS]
        there = {index: share for index, share in p.items() if index < len(counts) and counts[index, B]}
        total = sum(there.values())
        shares = there if len(there) == len(p) else {i: share / total for i, share in there.items()}
        return LatestUpdates.of(self.session, NAME, shares)

    def _counts(self, index: int) -> NDArray[np.int64]:
        """Return b_i, b⁺_i and whether i has made its step, by client index, of this client and all that count."""
        known: NDArray[np.int64] = self.session.memory.get(COUNTS, np.empty((0, 3), dtype=np.int64))
        size = 1 + max(index, *(member.client.index for member in self.session.task_table.active_clients), 0)
        if len(known) < size:
            more = np.zeros((size - len(known), 3), dtype=np.int64)
            self.session.memory[COUNTS] = known = np.concatenate([known, more])
        return known
