"""Clients in the order of their index, in a run in which they come and go.

A sequence doesn't change: whoever holds it goes on seeing the clients that it was made of. When a client comes or
goes, a new sequence shares all blocks but one with the former sequence. The new one costs a copy of a block and of
the list of blocks, and no look at the other clients.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Protocol, TypeVar, overload

BLOCK = 512  # clients of a block; one that grows to twice as many is split


class Indexed(Protocol):
    """A client, or its state."""

    @property
    def index(self) -> int:
        """Its index in the federation."""


T = TypeVar("T", bound=Indexed)

INDEX = attrgetter("index")


class ByIndex(Sequence[T]):
    """Items in ascending order of their index, of which each has one of its own.

    Parameters
    ----------
    items : iterable of T
        The items, in this order.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        items = list(items)
        self._blocks = [items[start : start + BLOCK] for start in range(0, len(items), BLOCK)]
        self._firsts = [block[0].index for block in self._blocks]

    @cached_property
    def _ends(self) -> list[int]:
        """The number of items up to the end of each block."""
        return list(accumulate(map(len, self._blocks)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, place: int) -> T: ...

    @overload
    def __getitem__(self, place: slice) -> list[T]: ...

    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return list(self)[place]
        place = range(len(self))[place]
        number = bisect_right(self._ends, place)
        return self._blocks[number][place - self._ends[number]]

    def find(self, index: int) -> tuple[int, T | None]:
        """Return the position of the item with an index, and the item; where it would be, and None, without one."""
        number, place, item = _find(self._blocks, self._firsts, index)
        return (self._ends[number - 1] if number else 0) + place, item

    def replaced(self, items: Mapping[int, T | None]) -> "ByIndex[T]":
        """Return a sequence with other items at some indices; None: with no item there."""
        new = ByIndex[T]()
        new._blocks, new._firsts = self._blocks.copy(), self._firsts.copy()
        for index, item in items.items():
            number, place, former = _find(new._blocks, new._firsts, index)
            block = new._blocks[number].copy() if new._blocks else []
            block[place : place + (former is not None)] = [] if item is None else [item]
            size = BLOCK if len(block) >= 2 * BLOCK else 2 * BLOCK
            parts = [block[start : start + size] for start in range(0, len(block), size)]
            new._blocks[number : number + 1] = parts
            new._firsts[number : number + 1] = [part[0].index for part in parts]
        return new


def _find(blocks: Sequence[list[T]], firsts: Sequence[int], index: int) -> tuple[int, int, T | None]:
    """Return the number of an index's block, the place in the block, and the item there; None without an item.

    ``firsts`` are the first indices of the blocks.
    """
    if not blocks:
        return 0, 0, None
    number = max(bisect_right(firsts, index) - 1, 0)
    block = blocks[number]
    place = bisect_left(block, index, key=INDEX)
    there = place < len(block) and block[place].index == index
    return number, place, block[place] if there else None
