"""Stragglers: participants that a round closes on before they are done.

As in T. Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, section 5.2: of each round's
participants a share is drawn, and each of these gets done a part of its usual local work, of E epochs (or steps) 1 to
E with equal probability. Either that partial work counts, or the round goes without it.
"""

from collections.abc import Sequence
from itertools import compress

from strategies import streams
from strategies.clients.roster import Client
from strategies.core.config import SynchronousConfig
from strategies.flower import messages


class Stragglers:
    """The stragglers of a round, and the part of its usual work that each does.

    Parameters
    ----------
    config : SynchronousConfig
        Its ``stragglers`` and ``drop_stragglers``, and the seed.
    """

    def __init__(self, config: SynchronousConfig) -> None:
        self.config = config
        self._fractions: dict[int, float] = {}

    @property
    def drops(self) -> bool:
        """Whether the work of stragglers is dropped."""
        return self.config.drop_stragglers and self.config.stragglers > 0

    def number(self, participants: int) -> int:
        """Return the number of stragglers: the rounded share, and all participants only if the share is 1."""
        share = self.config.stragglers
        return participants if share == 1 else min(int(share * participants + 0.5), max(participants - 1, 0))

    def num_active(self, participants: int) -> int:
        """Return the number of participants whose work counts."""
        return participants - self.number(participants) * self.config.drop_stragglers

    def without_stragglers(
        self, participants: Sequence[Client], weights: Sequence[float] | None, server_round: int
    ) -> tuple[Sequence[Client], Sequence[float] | None]:
        """Draw a round's stragglers; return the clients that get a request, and their weights d_i.

        Those that are dropped aren't asked, since what they send wouldn't count; the others share their weight.
        """
        self._fractions = {}
        if not (number := self.number(len(participants))):
            return participants, weights
        rng = streams.generator(self.config.seed, "stragglers", server_round)
        late = set(rng.choice(len(participants), number, replace=False).tolist())
        if not self.config.drop_stragglers:
            indices = [participants[place].index for place in sorted(late)]
            self._fractions = {index: 1.0 - float(rng.random()) for index in indices}
            return participants, weights
        stays = [place not in late for place in range(len(participants))]
        kept = list(compress(participants, stays))
        return kept, None if weights is None else _shared(weights, list(compress(weights, stays)))

    def part(self, index: int) -> float:
        """Return the part of its usual work that a participant does, by its index, in (0, 1]."""
        return self._fractions.get(index, 1.0)

    def request_fields(self, client: Client) -> dict[str, float]:
        """Return the additional fields of a participant's request: the part of its work, if it straggles."""
        return {messages.PART: self._fractions[client.index]} if client.index in self._fractions else {}


def _shared(weights: Sequence[float], own: list[float]) -> list[float]:
    """Return some of the weights d_i, scaled up to the sum of all; as they are if all are 0."""
    total, rest = sum(weights), sum(own)
    return [d * total / rest for d in own] if rest > 0 else own
