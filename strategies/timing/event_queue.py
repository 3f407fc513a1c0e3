"""A queue of events, ordered by clock time."""

import heapq
from collections.abc import Iterator
from typing import Any

from strategies.clock import RESOLUTION
from strategies.timing.availability import NEVER


class EventQueue:
    """Events by due time; those due within ``RESOLUTION`` of the earliest are equal and come in client order.

    Adding and removing an event takes O(log n) steps, however many are due at the same time.
    """

    def __init__(self) -> None:
        self._later: list[tuple[float, int, int, Any]] = []  # by due time
        self._equal: list[tuple[int, int, float, Any]] = []  # equal to the earliest, by client
        self._dues: list[tuple[float, int]] = []  # their due times, also of some that are removed
        self._removed: set[int] = set()  # which of these are
        self._count = 0  # breaks ties that remain, first come first served

    def __len__(self) -> int:
        return len(self._later) + len(self._equal)

    def __iter__(self) -> Iterator[tuple[float, Any]]:
        """The due times and items, in no order."""
        yield from ((due, item) for due, _, _, item in self._later)
        yield from ((due, item) for _, _, due, item in self._equal)

    def push(self, due: float, client: int, item: Any) -> None:
        """Add an item."""
        if due < self.next_due():  # the others may not be equal to it
            for owner, count, time, each in self._equal:
                heapq.heappush(self._later, (time, owner, count, each))
            self._equal, self._dues, self._removed = [], [], set()
        heapq.heappush(self._later, (due, client, self._count, item))
        self._count += 1

    def next_due(self) -> float:
        """Return the earliest due time, infinity if there is none."""
        return min(self._dues[0][0] if self._dues else NEVER, self._later[0][0] if self._later else NEVER)

    def pop(self) -> tuple[float, Any]:
        """Remove and return the next item and its due time."""
        earliest = self.next_due()
        while self._later and self._later[0][0] <= earliest + RESOLUTION:
            due, client, count, item = heapq.heappop(self._later)
            heapq.heappush(self._equal, (client, count, due, item))
            heapq.heappush(self._dues, (due, count))
        _, count, due, item = heapq.heappop(self._equal)
        self._removed.add(count)
        while self._dues and self._dues[0][1] in self._removed:
            self._removed.remove(heapq.heappop(self._dues)[1])
        return due, item
