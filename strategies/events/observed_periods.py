"""The observed periods P_i of clients, kept up while a run goes on, at a cost that doesn't grow with their number.

P_i is the number of aggregations from one contribution of client i to the next. It is the smaller of two estimates:
a_i / c_i, and the same with one more contribution that took the mean period of all clients, A / K. So the first
contribution of a new client is worth no more than one of a client with the mean period.

    P_i = min(a_i / max(c_i, 1), (a_i + A / K) / (c_i + 1)),    A = Σ a_j,    K = max(Σ c_j, 1)

c_i is the number of contributions of client i, and a_i the number of aggregations since client i joined, with the one
under way, at least 1. All a_j grow by one with every aggregation, so that A is kept up without a sum over clients; A
is a whole number, and so exact.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Observable(Protocol):
    """The counts of one client."""

    contributions: int
    since: int  # aggregations that came before it


def contribution_periods(members: Sequence[Observable], aggregations: int) -> NDArray[np.float64]:
    """Return P_i (n,) of the clients ``members`` after a number of aggregations, by the formula above."""
    there = np.array([max(aggregations + 1 - member.since, 1) for member in members], np.float64)
    counts = np.array([member.contributions for member in members])
    typical = there.sum() / max(counts.sum(), 1)
    return np.asarray(np.minimum(there / np.maximum(counts, 1), (there + typical) / (counts + 1)))


class Observed:
    """A and K of the clients that count, for P_i of a few of them at every aggregation.

    Parameters
    ----------
    members : iterable of Observable
        The clients that count.

    Attributes
    ----------
    contributions : int
        K, the number of their contributions.
    """

    def __init__(self, members: Iterable[Observable]) -> None:
        members = list(members)
        self.contributions = sum(member.contributions for member in members)
        # ``since`` of the clients that came after the aggregations so far, whose a_i is 1; the largest first.
        self._new = sorted((member.since for member in members), reverse=True)
        self._grown, self._before = 0, 0  # number of the other clients, and the sum of their ``since``
        self._until = -1  # the aggregations so far, by which the two were told apart

    def replace(self, former: Observable | None, member: Observable | None) -> None:
        """Let a client count in place of another one, with its counts of now."""
        if former is not None:
            self.contributions -= former.contributions
            if former.since > self._until:
                self._new.remove(former.since)
            else:
                self._grown, self._before = self._grown - 1, self._before - former.since
        if member is not None:
            self.contributions += member.contributions
            if member.since > self._until:
                insort(self._new, member.since, key=int.__neg__)
            else:
                self._grown, self._before = self._grown + 1, self._before + member.since

    def contributed(self) -> None:
        """Note a contribution of a client."""
        self.contributions += 1

    def period(self, member: Observable, aggregations: int) -> float:
        """Return P_i of a client after a number of aggregations, which never decreases between calls."""
        while self._new and self._new[-1] <= aggregations:
            self._before += self._new.pop()
            self._grown += 1
        self._until = max(self._until, aggregations)
        all_there = self._grown * (aggregations + 1) - self._before + len(self._new)
        there, count = float(max(aggregations + 1 - member.since, 1)), member.contributions
        typical = all_there / max(self.contributions, 1)
        return min(there / max(count, 1), (there + typical) / (count + 1))
