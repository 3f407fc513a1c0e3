"""The rows of all clients in one tensor, by which tasks are stacked: all read at once, or as they are needed."""

import mmap
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedapp.config import RunConfig
from fedapp.data import Dataset, Division, Normalize
from fedapp.data.moments import Moments
from fedapp.federation.loaded import (
    CPU,
    Source,
    cached_dataset,
    cached_partition,
    division_of,
    source_of,
    training_tensors,
)

# Addresses without memory behind them: pages come as they are written. Python 3.11 has no name for it.
_UNRESERVED = 0x4000 if sys.platform == "linux" else 0


class Rows(Protocol):
    """Inputs x (N, ...) and targets y (N,) or (N, M) of all clients, in the order of the partition."""

    @property
    def x(self) -> Tensor:
        """Inputs."""
        ...

    @property
    def y(self) -> Tensor:
        """Targets."""
        ...

    def need(self, begin: int, end: int) -> None:
        """Load the rows from ``begin`` to ``end``, those of one client, if they aren't loaded."""
        ...


RowsOf = Callable[[RunConfig, int, torch.device, Moments | None], Rows]


@dataclass(frozen=True, eq=False)
class AllRows:
    """Rows that are all there."""

    x: Tensor
    y: Tensor

    def need(self, begin: int, end: int) -> None:
        """Do nothing."""


def all_rows(config: RunConfig, num_clients: int, device: torch.device, moments: Moments | None) -> Rows:
    """Return all rows on a device, read once."""
    return AllRows(*training_tensors(config, num_clients, device, moments))


class RowsAsNeeded:
    """Rows that are read, from the memory-mapped dataset, when they are needed.

    They stand where they would among all rows, so that nothing that is computed depends on which are there; those
    that aren't take no memory.

    Parameters
    ----------
    dataset : Dataset
        It knows its moments where inputs are standardized.
    indices : int array (N,)
        Row numbers in the order of the partition.
    """

    def __init__(self, dataset: Dataset, indices: np.ndarray, normalize: Normalize) -> None:
        self._dataset, self._indices, self._normalize = dataset, indices, normalize
        self._there: set[int] = set()
        self._lock = threading.Lock()
        one = dataset.inputs(indices[:1], normalize)
        shape = (len(indices), *one.shape[1:])
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED
        memory = mmap.mmap(-1, max(prod(shape) * one.itemsize, 1), flags=flags)
        self._x = np.frombuffer(memory, one.dtype, prod(shape)).reshape(shape)
        self.x, self.y = torch.from_numpy(self._x), torch.tensor(dataset.y[indices])

    def need(self, begin: int, end: int) -> None:
        """Read a client's rows, once."""
        with self._lock:
            if begin not in self._there:
                self._x[begin:end] = self._dataset.inputs(self._indices[begin:end], self._normalize)
                self._there.add(begin)

    @property
    def clients(self) -> int:
        """How many clients' rows have been read."""
        return len(self._there)


def rows_as_needed(
    config: RunConfig, num_clients: int, device: torch.device, moments: Moments | None
) -> Rows:
    """Return rows that are read as they are needed; on a GPU, which has no such memory, all of them."""
    if device != CPU:
        return all_rows(config, num_clients, device, moments)
    return _as_needed(
        source_of(config, num_clients), num_clients, division_of(config), config.normalize, moments
    )


@lru_cache(maxsize=2)
def _as_needed(
    source: Source, num_clients: int, division: Division, normalize: Normalize, moments: Moments | None
) -> RowsAsNeeded:
    dataset = replace(cached_dataset(source), moments=moments)
    return RowsAsNeeded(dataset, cached_partition(source, num_clients, division).client_indices, normalize)
