"""FedAWE: a client that comes back scales its update by the rounds that it missed, and goes on from its own model.

M. Xiang, S. Ioannidis, E. Yeh, C. Joe-Wong and L. Su, "Efficient federated learning against heterogeneous and
non-stationary client unavailability", NeurIPS 2024, algorithm 1. Client i has a model x_i, W_0 at first, and was
present last in round τ_i, 0 at first. In round t, with participants A,

    client i ∈ A, from w_i ← x_i:   w_i ← w_i − γ g_i(w_i)                E times
    echo of its update:             x_i† = x_i + η_g (t − τ_i) C p_i (w_i − x_i)
    server:                         W = (1/|A|) Σ_A x_i†
    for i ∈ A alone:                x_i ← W,   τ_i ← t

A client that missed rounds makes up for them by the factor t − τ_i, without more local steps: the factors of a client
add up to the number of rounds up to its last one, however unlikely it was to take part. The mean goes to the
participants alone, so that the clients' models mix as by gossip, each pair with equal weight. So the run minimises
Σ p_i f_i over the clients that ever take part, and no probability has to be known, or to stay as it is. The paper's
p_i are 1/C; with others the factor C p_i, of the update alone, keeps the mixing equal. With all clients in every
round FedAWE is FedAvg.

Here the server sends x_i in place of W, so that any ClientApp will do, and one that restarts has lost nothing; it has
the models that clients were sent last, one for each round in which a client was present for the last time, and drops
a model that no client has any more. In the paper clients keep x_i, and are sent W once a round is over: the models
are the same. The step is that of the server optimizer from the mean of the participants' x_i, by the mean of their
echoes; with ``sgd`` it is the rule above, η_g being ``server_lr``.

The participation scheme says who is drawn; its weights aren't read, and a client that ``md`` draws twice counts once.
Under a scheme that minimises another objective by design (paired, fixed), the p_i are those of that objective. An
absent device keeps its p_i for a while (strategies/core/population.py). A client that joins late begins with the
model of that time, and its first round has the factor 1. Long absences make long steps: γ η_g E (t − τ_i) is to be
small.

Sent: x_i to each participant, in place of W. Kept: a number for each client, and the models above, at most one for
each client, 4 D bytes each with values of 32 bits (``bytes-kept``); the updates of a round until all have arrived,
8 D bytes for each participant.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.flower.arrays import Layout, Vector
from strategies.methods.shared.sent_models import SentModels
from strategies.rounds.strategy import SynchronousStrategy
from strategies.updates.pipeline import Contribution

MISSED_BOUND = 4.0  # with safeguards, t − τ_i over the clients' median


class FedAWE(SynchronousStrategy):
    """FedAWE (Xiang et al. 2024, algorithm 1).

    Rule: a participant's update of its own model counts p_i times the rounds since its last one; the mean of the
    participants' models goes to them alone.
    Sent: each participant's own model, in place of W.
    Kept: the models that clients were sent last.
    Helps: as FedAU, also where it changes how often clients are there; long absences need small steps.
    """

    uses_given_weights: ClassVar[bool] = True
    logs_own_weights: ClassVar[bool] = True
    corrects_participation: ClassVar[bool] = True
    side_channel: ClassVar[str] = (
        "an update counts by how rarely its client takes part, from a model of its own"
    )

    def stateful_components(self) -> Sequence[Any]:
        """Return the models that clients were sent last."""
        self._sent = SentModels(self._layout)
        return [self._sent]

    def _layout(self) -> Layout:
        return self.session.run.layout

    def clients_present(self, clients: Sequence[Client]) -> None:
        """Let clients that are new begin with the present model."""
        new = [client.index for client in clients if client.index not in self._sent.rounds]
        self._sent.send(new, self.session.aggregations)

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield x_i (D,) of each participant, which is sent in place of W; nothing where it is W."""
        self._sent.hold(self.session.aggregations, self.session.model)  # also where nobody takes part
        return map(self._own_model, clients)

    def _own_model(self, client: Client) -> Mapping[str, Vector]:
        if self._sent.rounds[client.index] == self.session.aggregations:
            return {}
        return {self.session.run.flower.arrayrecord_key: self._sent.get(client.index)}

    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return (t − τ_i) C p_i / |A| of the participants."""
        p = self.session.objective_weights()
        scale = sum(share > 0 for share in p.values()) / len(contributions)
        missed = self._missed()
        return [p.get(c.client.index, 0.0) * missed[c.client.index] * scale for c in contributions]

    def _missed(self) -> dict[int, float]:
        """Return t − τ_i by client index; with safeguards at most a multiple of the median.

        A client makes its own absences; without a bound one that stays away for long counts for all of that time.
        """
        number = self.session.aggregations + 1
        missed = {index: float(number - last) for index, last in self._sent.rounds.items()}
        if not self.session.safeguards.active:
            return missed
        most = MISSED_BOUND * float(np.median(list(missed.values())))
        return {index: min(rounds, most) for index, rounds in missed.items()}

    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return step(mean of the x_i, mean of their echoes), (D,), which the participants have from now on."""
        first = contributions[0].base
        mean = first + sum(c.base - first for c in contributions[1:]) / len(contributions)
        updated_model = super().aggregate(mean, contributions, weights)
        p, missed = self.session.objective_weights(), self._missed()
        here = [contribution.client.index for contribution in contributions]
        self.session.client_stats.add_weights({i: p.get(i, 0.0) * missed[i] for i in here})
        self._sent.send(here, self.session.aggregations + 1)
        return updated_model

    def expected_weights(self, p: Weights) -> Weights | None:
        """Return p_i (n,) over the clients that ever take part; None if it can't be known who does."""
        q = None if self.config.closes_early else self.session.selection.drawn(p)
        return None if q is None else self.session.selection.restricted(q > 0)
