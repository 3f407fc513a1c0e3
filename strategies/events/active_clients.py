"""The clients that count in an asynchronous run, with numbers of each, kept up as clients come and go.

A client that comes or goes costs a copy of the numbers, and no look at the other clients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.clients.by_index import ByIndex
from strategies.clients.client_state import ClientState

Numbers = NDArray[np.float64]


class ActiveClients:
    """The clients that count, by index.

    Parameters
    ----------
    members : iterable of ClientState
        The clients, by index.

    Attributes
    ----------
    members : ByIndex of ClientState
        The clients, by index; a new sequence when clients come or go.
    """

    def __init__(self, members: Iterable[ClientState]) -> None:
        self.members = ByIndex(members)
        self._columns: dict[str, tuple[object, Numbers]] = {}

    def place(self, index: int) -> int | None:
        """Return the position of the client with an index; None if it doesn't count."""
        place, member = self.members.find(index)
        return None if member is None else place

    def replace(self, members: Mapping[int, ClientState | None]) -> list[ClientState | None]:
        """Let clients count as these indices, or none, if it is None; return those that counted, in this order."""
        found = {index: self.members.find(index) for index in sorted(members)}
        self.members = self.members.replaced(members)
        for name, (key, values) in self._columns.items():
            parts, start = list[Numbers](), 0
            for index, (place, former) in found.items():
                new = [] if members[index] is None else [np.nan]  # to be asked for
                parts += values[start:place], np.array(new)
                start = place + (former is not None)
            self._columns[name] = key, np.concatenate([*parts, values[start:]])
        return [found[index][1] for index in members]

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
