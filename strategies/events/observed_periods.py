"""How often clients have contributed, kept up while a run goes on: P_i of one client in a few steps, of however many.

P_i, the aggregations from one contribution of client i to the next, is as observed since the client is there or,
where that is less, together with one contribution at the mean period of all, A / K: a newcomer's first is worth no
more than one of those like it.

    P_i = min(a_i / max(c_i, 1), (a_i + A / K) / (c_i + 1)),    A = Σ a_j,    K = max(Σ c_j, 1)

with c_i its contributions and a_i the aggregations since it is there, at least 1, with the one under way. All a_j
grow by one with every aggregation, so that A needs no sum over the clients; being a whole number, it is exact.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Observable(Protocol):
    """The counts of one client."""

    contributions: int
    since: int  # aggregations that came before it


def periods(members: Sequence[Observable], aggregations: int) -> NDArray[np.float64]:
    """Return P_i (n,) of all clients that count, after a number of aggregations: the formula, over all clients."""
    there = np.array([max(aggregations + 1 - member.since, 1) for member in members], np.float64)
    counts = np.array([member.contributions for member in members])
    usual = there.sum() / max(counts.sum(), 1)
    return np.asarray(np.minimum(there / np.maximum(counts, 1), (there + usual) / (counts + 1)))


class Observed:
    """A and K of the clients that count, for P_i of a few of them at every aggregation.

    Parameters
    ----------
    members : iterable of Observable
        All that count; where others do, this is to be made anew.

    Attributes
    ----------
    contributions : int
        K, the number of their contributions.
    """

    def __init__(self, members: Iterable[Observable]) -> None:
        members = list(members)
        self.contributions = sum(member.contributions for member in members)
        # Those that came after the aggregations so far: a_i is 1, and grows when they have been there for one.
        self._new = sorted((member.since for member in members), reverse=True)
        self._grown, self._before = 0, 0  # how many others there are, and Σ of their aggregations before

    def contributed(self) -> None:
        """Note a contribution of a client."""
        self.contributions += 1

    def period(self, member: Observable, aggregations: int) -> float:
        """Return P_i of a client after a number of aggregations, which never decreases between calls."""
        while self._new and self._new[-1] <= aggregations:
            self._before += self._new.pop()
            self._grown += 1
        all_there = self._grown * (aggregations + 1) - self._before + len(self._new)
        there, count = float(max(aggregations + 1 - member.since, 1)), member.contributions
        usual = all_there / max(self.contributions, 1)
        return min(there / max(count, 1), (there + usual) / (count + 1))
