"""How long a round on devices waits for a reply that doesn't come: by what its client, or the median one, takes.

Let M be the time after which half of the clients that were asked have answered; failures don't count as answers.
Before M a round waits for all clients, because the network may be slow for all. Then it waits for client i

    10 × M, at least 60 s      if i has never been asked before
    2.5 × M, at least 5 s      if i has been asked before, and has never answered
    2.5 × max(M, U_i), at least 5 s, with U_i the mean or the last time of i's replies, whichever is longer

and never longer than the timeout, nor than 2 M plus the client's budget of extra seconds, 60 M and at
least a minute at first: what a round waits for the client beyond 2 M is taken from it, and every round adds M/4. A
device makes its own times, and so can't stretch a run for long by them: n rounds wait at most 2.25 n M and the budget
for it. A slow device that has spent its budget has 2.25 M.

A client that never answers thus costs a later round 2.5 M, and a slow client is waited for as soon as its first reply
is there, in time or late, as long as its budget lasts. One that misses k rounds in a row isn't asked in the
2^(k−1) − 1 rounds after its last one.
"""

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import numpy as np

from strategies.timing.scheduler import SHORTEST_DEADLINE


class Wait(NamedTuple):
    """A round waits ``times`` as long as a client usually takes, and ``least`` seconds at least."""

    times: float
    least: float


# Three times M with what a round does beside; five seconds are two polls of a SuperNode.
USUAL = Wait(2.5, 5.0)
FIRST = Wait(10.0, SHORTEST_DEADLINE)
# Of a client's budget: its begin; the times M that each reply is awaited without it, and that a round adds to it.
BUDGET, FREE, REFILL = Wait(60.0, SHORTEST_DEADLINE), 2.0, 0.25


class Limit(NamedTuple):
    """The seconds after which a client's reply isn't awaited any more, and the reason in words."""

    seconds: float
    why: str


@dataclass
class _Known:
    """A client's replies: their total and last time in seconds, and their number; its misses in a row and rest.

    ``spent``: the seconds of its budget for which rounds have waited.
    """

    seconds: float = 0.0
    answers: int = 0
    latest: float = 0.0
    misses: int = 0
    rests_until: int = 0
    spent: float = 0.0

    @property
    def typical(self) -> float:
        return max(self.seconds / self.answers, self.latest) if self.answers else 0.0


class ReplyTimeouts:
    """The usual times of clients for one kind of request, and how long a round waits for each."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def answered(self, client: int, seconds: float, *, late: bool = False) -> None:
        """Note that a client's reply took so many seconds; ``late``: its round was over."""
        known = self._known.setdefault(client, _Known())
        known.seconds, known.answers, known.latest = known.seconds + seconds, known.answers + 1, seconds
        if not late:
            known.misses = known.rests_until = 0

    def missed(self, client: int, number: int) -> None:
        """Note that a client's reply wasn't there when round ``number`` closed."""
        known = self._known.setdefault(client, _Known())
        known.misses += 1
        known.rests_until = number + 2 ** min(known.misses - 1, 30)

    def is_backing_off(self, client: int, number: int) -> bool:
        """Return True if a client isn't to be asked in round ``number``, because it missed several in a row."""
        return client in self._known and number < self._known[client].rests_until

    def limits(self, took: Mapping[int, float], missing: Collection[int]) -> dict[int, Limit] | None:
        """Return how long each missing reply is awaited; None: as long as it takes.

        Parameters
        ----------
        took : mapping of int to float
            Seconds after which each client has answered in this round, by its index.
        missing : collection of int
            The clients that haven't answered.
        """
        if (half := self._half(took, missing)) is None:
            return None
        return {client: self.limit(client, half) for client in missing}

    def limit(self, client: int, half: float) -> Limit:
        """Return how long a client's reply is awaited, if half of the clients took ``half`` seconds."""
        return self._limit(self._known.get(client, _Known()), half)

    @staticmethod
    def _half(took: Mapping[int, float], missing: Collection[int]) -> float | None:
        """Return M, the seconds after which half of the clients have answered; None if fewer have."""
        if len(took) < max(len(missing), 1):
            return None
        return sorted(took.values())[-(-(len(took) + len(missing)) // 2) - 1]

    def charge(self, took: Mapping[int, float], missing: Collection[int], seconds: float) -> None:
        """Take what a round of so many seconds has waited for each client from its budget, and refill the budget."""
        if (half := self._half(took, missing)) is None:
            return
        for client, waited in {**took, **dict.fromkeys(missing, seconds)}.items():
            self.spend(client, waited, half)

    def spend(self, client: int, waited: float, half: float) -> None:
        """Take what was waited for a client from its budget, and refill the budget; ``half`` is M."""
        known = self._known.setdefault(client, _Known())
        known.spent = max(known.spent + max(waited - FREE * half, 0.0) - REFILL * half, 0.0)

    @staticmethod
    def _limit(known: _Known, half: float) -> Limit:
        wait = USUAL if known.answers or known.misses else FIRST
        typical = max(half, known.typical)
        whose = "it usually takes" if known.typical > half else "half of the clients took"
        least = f", and at least {wait.least:g} s" if wait.least >= wait.times * typical else ""
        left = max(max(BUDGET.times * half, BUDGET.least) - known.spent, 0.0)
        if FREE * half + left < max(wait.times * typical, wait.least):
            return Limit(
                FREE * half + left,
                f"a round waits {FREE:g} times as long as half of the clients took, as it has waited "
                f"{known.spent:.3g} s longer for this one so far",
            )
        return Limit(
            max(wait.times * typical, wait.least),
            f"a round waits {wait.times:g} times as long as {whose}{least}",
        )

    # ---- Saved and restored --------------------------------------------------------------------------------------

    def state(self, name: str) -> dict[str, Any]:
        """Return the usual times under a name; nothing where none is known."""
        rows = [(client, *astuple(known)) for client, known in sorted(self._known.items())]
        return {name: np.array(rows, dtype=np.float64)} if rows else {}

    @classmethod
    def restored(cls, state: Mapping[str, Any], name: str) -> "ReplyTimeouts":
        """Return the usual times of a state."""
        reply_timeouts = cls()
        for client, seconds, answers, latest, misses, rests, spent in np.array(state.get(name, ())).tolist():
            known = _Known(seconds, int(answers), latest, int(misses), int(rests), spent)
            reply_timeouts._known[int(client)] = known
        return reply_timeouts
