"""MIFA: the last update of every client counts in every round, also without a new reply.

X. Gu, K. Huang, J. Zhang & L. Huang, "Fast federated learning in the presence of arbitrary device unavailability",
NeurIPS 2021, algorithm 1:

    h_i ← Δ_i              for the participants
    W ← step(W, Σ_i p_i h_i)   over all clients

The first model is made when all clients have answered once (the paper's first round waits for all): until then
updates are collected, and the model doesn't change. Clients that will never be available again, or never for as long
as a task takes, or whose first ``MAX_MISSES`` tasks have failed, are not waited for. A client that joins later counts
from its first reply on. An absent device keeps its weight for a while (strategies/core/population.py); then the other
clients share its weight. With all clients in every round MIFA is FedAvg, up to the cache's float32. The paper keeps
Δ_i / γ with the γ of the update's round, and multiplies by the current γ: the server doesn't know γ, and keeps Δ_i.
Both are equal for constant γ; with a decreasing schedule, an old update counts with the larger γ of its own round.
Under a participation scheme that minimises another objective by design (paired, fixed), the p_i are those of that
objective, and only clients that the scheme ever draws count.

Sent: the messages of FedAvg. Kept: the h_i, 4 C D bytes, beyond 4 GiB in a temporary file; the updates of a round
until all have arrived, 8 D bytes for each participant.
"""

from collections.abc import Sequence, Set
from typing import ClassVar

import numpy as np

from strategies.clients.client_statistics import MAX_MISSES
from strategies.clients.weights import Weights
from strategies.flower.arrays import Layout, Vector
from strategies.methods.shared.latest_updates import LatestUpdates
from strategies.rounds.strategy import SynchronousStrategy
from strategies.timing.availability import NEVER
from strategies.updates.pipeline import Contribution

UPDATES, BEGUN = "updates", "begun"  # in the memory: h_i; whether there is a first model


class Mifa(SynchronousStrategy):
    """MIFA (Gu et al. 2021, algorithm 1).

    Rule: the last updates of all clients count, also of those that are away.
    Kept: all clients' last updates.
    Helps: where some clients take part more often than others.
    """

    aggregates_on_arrival: ClassVar[bool] = False
    uses_given_weights: ClassVar[bool] = True
    logs_own_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    side_channel: ClassVar[str] = "updates count again in later rounds"
    reuses_last_update: ClassVar[bool] = True
    _shares: dict[int, float]
    # Indices of clients, and of those among them that never complete a task.
    _never: tuple[tuple[int, ...], set[int]] = (), set()

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Set h_i ← Δ_i, and return step(W, Σ p_i h_i), (D,), or W unchanged until all clients have answered."""
        session, updates = self.session, self.session.client_vectors(UPDATES)
        answered = set(updates.clients) | {contribution.client.index for contribution in contributions}
        p = self._waited_for(answered)
        here = {i: share for i, share in p.items() if i in answered}
        session.run.model_unchanged = not session.memory.get(BEGUN) and len(here) < len(p)
        if session.run.model_unchanged:
            for contribution in contributions:
                updates.put(contribution.client.index, contribution.update)
            session.run.warn_once(
                "the model stays as it is until all %d clients that count have answered once", len(p)
            )
            return model.copy()
        session.memory[BEGUN] = True
        total = sum(here.values())
        self._shares = here if abs(total - 1) < 1e-9 else {i: share / total for i, share in here.items()}
        LatestUpdates(session.memory, updates, self._shares).take(contributions)
        session.client_stats.add_weights(self._shares)
        return super().aggregate(model, contributions, weights)

    def begin(self, layout: Layout, model: Vector) -> None:
        """Forget the clients of an earlier run that never complete a task."""
        self._never = (), set()

    def _waited_for(self, answered: Set[int]) -> dict[int, float]:
        """Return p_i of the clients that count, by index: all that have answered or still may answer."""
        scheduler, accounts = self.session.scheduler, self.session.client_stats
        now, shares, never = scheduler.now(), self.session.objective_weights(), self._never_done()
        for client in self.session.population.active_clients:
            i = client.index
            if i in answered:
                continue
            if i in never or scheduler.next_available(client, now) == NEVER:
                shares.pop(i, None)
            elif accounts.missed(i) >= MAX_MISSES and shares.pop(i, 0.0):
                self.session.run.warn_once(
                    f"{client} has never answered, {MAX_MISSES} tasks of its came to nothing: nobody "
                    "waits for it, and it counts from its first answer on"
                )
        return {i: share for i, share in shares.items() if share}

    def _never_done(self) -> set[int]:
        """Return the indices of clients known to be never available for as long as a task takes."""
        if self.session.scheduler.always:
            return set()
        indices = tuple(client.index for client in self.session.population.active_clients)
        if self._never[0] != indices:
            population = self.session.population
            expected = self.session.selection.expected(
                population.client_weights_of(population.active_clients)
            )
            never = () if expected is None else np.flatnonzero(expected == 0).tolist()
            self._never = indices, {indices[place] for place in never}
        return self._never[1]

    def expected_weights(self, p: Weights) -> Weights:
        """Return p_i (n,), 0 for excluded clients: participation changes h_i, but not the weight of a client."""
        counting = self._waited_for(set(self.session.client_vectors(UPDATES).clients))
        shares = np.array(
            [counting.get(client.index, 0.0) for client in self.session.population.active_clients]
        )
        return shares if self.session.scheduler.always else shares / (shares.sum() or 1.0)

    def server_update(self, total: Vector) -> Vector:
        """Return Σ p_i h_i over all clients, (D,), in place of the round's sum."""
        return LatestUpdates.of(self.session, UPDATES, self._shares).mean
