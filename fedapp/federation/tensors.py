"""Rows of a dataset as tensors on a device, kept as long as they are worth their memory."""

from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedapp.config import RunConfig
from fedapp.data import Dataset, Normalize
from fedapp.data.moments import Moments
from fedapp.federation.loaded import (
    Division,
    Source,
    cached_dataset,
    cached_partition,
    division_of,
    source_of,
)

# Prepared inputs kept per process (bytes); clients used longest ago go first.
TENSOR_BUDGET = 1 << 30

# Bytes of inputs that are prepared at once.
AT_ONCE = 64 << 20


def training_tensors(
    config: RunConfig, num_clients: int, device: torch.device, moments: Moments | None = None
) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of all clients on ``device``, in the order of the partition's client rows."""
    source = source_of(config, num_clients)
    return cached_tensors(source, num_clients, division_of(config), config.normalize, moments, device)


def held_out_tensors(
    config: RunConfig, num_clients: int, device: torch.device, moments: Moments | None = None
) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of the test rows on ``device``, in the order of the partition."""
    source = source_of(config, num_clients)
    division = division_of(config)
    return cached_tensors(source, num_clients, division, config.normalize, moments, device, tests=True)


@lru_cache(maxsize=2)
def cached_tensors(
    source: Source,
    num_clients: int,
    division: Division,
    normalize: Normalize,
    moments: Moments | None,
    device: torch.device,
    *,
    tests: bool = False,
) -> tuple[Tensor, Tensor]:
    """Put a division's training rows, or its test rows, on a device, once."""
    partition = cached_partition(source, num_clients, division)
    dataset = replace(cached_dataset(source), moments=moments)
    rows = partition.test_indices if tests else partition.client_indices
    return to_tensors(dataset, rows, normalize, device)


class TensorCache:
    """Inputs and labels of clients, on their device, within a budget of bytes."""

    def __init__(self, budget: int = TENSOR_BUDGET) -> None:
        self.budget = budget
        self._kept: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()
        self._bytes = 0  # of all that is kept

    def clear(self) -> None:
        """Drop them all."""
        self._kept.clear()
        self._bytes = 0

    def get(
        self,
        key: tuple[object, ...],
        dataset: Dataset,
        rows: np.ndarray,
        normalize: Normalize,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (n, ...) and labels (n,) or targets (n, M) of ``rows``; ``key`` names them."""
        key = (*key, normalize, dataset.moments, str(device))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        pair = to_tensors(dataset, rows, normalize, device)
        self._kept[key] = pair
        self._bytes += _bytes_of(pair)
        while len(self._kept) > 1 and self._bytes > self.budget:
            self._bytes -= _bytes_of(self._kept.popitem(last=False)[1])
        return pair


def _bytes_of(pair: tuple[Tensor, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in pair)


def to_tensors(
    dataset: Dataset, rows: np.ndarray, normalize: Normalize, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Copy rows of a dataset into tensors on ``device``: inputs scaled as configured, and targets.

    Targets are int64 labels (n,), or float32 numbers (n, M).
    """
    labels = torch.tensor(dataset.y[rows])  # a copy: the map is read-only
    one = dataset.inputs(rows[:1], normalize)
    # torch's own memory is aligned alike in every process, and sums depend on alignment.
    inputs = torch.empty((len(rows), *one.shape[1:]), dtype=torch.from_numpy(one).dtype, device=device)
    step = max(AT_ONCE // max(one.nbytes, 1), 1)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        inputs[part] = torch.from_numpy(dataset.inputs(rows[part], normalize))
    return inputs, labels.to(device)
