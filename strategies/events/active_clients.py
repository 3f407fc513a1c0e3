"""The clients that count in an asynchronous run, with numbers of each, kept up as clients come and go.

A client that comes or goes costs a copy of the list and of the numbers, and no look at the other clients.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.clients.client_state import ClientState

Numbers = NDArray[np.float64]


def _index(member: ClientState) -> int:
    return member.client.index


class ActiveClients:
    """The clients that count, by index.

    Parameters
    ----------
    members : sequence of ClientState
        The clients, by index.

    Attributes
    ----------
    members : list of ClientState
        The clients, by index; a new list when clients come or go.
    """

    def __init__(self, members: Sequence[ClientState]) -> None:
        self.members = list(members)
        self._columns: dict[str, tuple[object, Numbers]] = {}

    def place(self, index: int) -> int | None:
        """Return the position of the client with an index; None if it doesn't count."""
        place = bisect_left(self.members, index, key=_index)
        there = place < len(self.members) and _index(self.members[place]) == index
        return place if there else None

    def replace(self, index: int, member: ClientState | None) -> ClientState | None:
        """Let a client count as its index, or none; return the one that counted."""
        place = bisect_left(self.members, index, key=_index)
        former = self.members[place : place + 1]
        if former and _index(former[0]) != index:
            former = []
        new = [] if member is None else [member]
        self.members = self.members.copy()
        self.members[place : place + len(former)] = new
        for name, (key, values) in self._columns.items():  # NaN: to be asked for
            parts = (values[:place], [np.nan] * len(new), values[place + len(former) :])
            self._columns[name] = key, np.concatenate(parts)
        return former[0] if former else None

    def column(
        self, name: str, values_of: Callable[[Sequence[ClientState]], Numbers], key: object = None
    ) -> Numbers:
        """Return a number of each client (n,), which stays the same while ``key`` does; don't change the array.

        ``values_of`` returns the numbers (n,) of clients, which don't depend on each other; NaN isn't kept.
        """
        known = self._columns.get(name)
        if known is None or known[0] != key:
            values = np.asarray(values_of(self.members), dtype=np.float64)
        else:
            values, missing = known[1], np.flatnonzero(np.isnan(known[1]))
            if len(missing):
                values = values.copy()
                values[missing] = values_of([self.members[place] for place in missing.tolist()])
        self._columns[name] = key, values
        return values
