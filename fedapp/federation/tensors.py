"""Rows of a dataset as tensors on a device, kept as long as they are worth their memory."""

from collections import OrderedDict
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedapp.config import RunConfig
from fedapp.data import Dataset, Normalize
from fedapp.federation.loaded import Division, cached_dataset, cached_partition, division_of

# Prepared inputs kept per process (bytes); clients used longest ago go first.
TENSOR_BUDGET = 1 << 30


def training_tensors(config: RunConfig, num_clients: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of all clients on ``device``, in the order of the partition's client rows."""
    return cached_tensors(
        config.dataset, config.data_path, num_clients, division_of(config), config.normalize, device
    )


@lru_cache(maxsize=1)
def cached_tensors(
    name: str,
    data_path: str,
    num_clients: int,
    division: Division,
    normalize: Normalize,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Put a division's rows on a device, once."""
    partition = cached_partition(name, data_path, num_clients, division)
    dataset = cached_dataset(
        name, data_path, num_clients if name == "synthetic" else 0, dict(division)["seed"]
    )
    return to_tensors(dataset, partition.client_indices, normalize, device)


class TensorCache:
    """Inputs and labels of clients, on their device, within a budget of bytes."""

    def __init__(self, budget: int = TENSOR_BUDGET) -> None:
        self.budget = budget
        self._kept: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()

    def clear(self) -> None:
        """Drop them all."""
        self._kept.clear()

    def get(
        self,
        key: tuple[object, ...],
        dataset: Dataset,
        rows: np.ndarray,
        normalize: Normalize,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Return inputs (n, ...) and labels (n,) of ``rows``; ``key`` names them."""
        key = (*key, normalize, str(device))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        pair = to_tensors(dataset, rows, normalize, device)
        self._kept[key] = pair
        while len(self._kept) > 1 and sum(x.nbytes + y.nbytes for x, y in self._kept.values()) > self.budget:
            self._kept.popitem(last=False)
        return pair


def to_tensors(
    dataset: Dataset, rows: np.ndarray, normalize: Normalize, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Copy rows of a dataset into tensors on ``device``: inputs scaled as configured, and labels."""
    inputs = dataset.inputs(rows, normalize)
    labels = torch.tensor(dataset.y[rows], dtype=torch.int64)
    return torch.tensor(inputs).to(device), labels.to(device)
