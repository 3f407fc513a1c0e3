"""A queue of events, ordered by clock time."""

import heapq
from collections.abc import Iterator
from typing import Any

from strategies.clock import RESOLUTION
from strategies.timing.availability import NEVER


class EventQueue:
    """Events by due time; those due within ``RESOLUTION`` of each other are equal and come in client order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Any]] = []
        self._count = 0  # breaks ties that remain, first come first served

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[float, Any]]:
        """The due times and items, in no order."""
        return ((due, item) for due, _, _, item in self._heap)

    def push(self, due: float, client: int, item: Any) -> None:
        """Add an item."""
        heapq.heappush(self._heap, (due, client, self._count, item))
        self._count += 1

    def next_due(self) -> float:
        """Return the earliest due time, infinity if there is none."""
        return self._heap[0][0] if self._heap else NEVER

    def pop(self) -> tuple[float, Any]:
        """Remove and return the next item and its due time."""
        equal = [heapq.heappop(self._heap)]
        while self._heap and self._heap[0][0] <= equal[0][0] + RESOLUTION:
            equal.append(heapq.heappop(self._heap))
        first = min(equal, key=lambda entry: (entry[1], entry[2]))
        for entry in equal:
            if entry is not first:
                heapq.heappush(self._heap, entry)
        return first[0], first[3]
