"""What server and clients each work out from the run config alone: data, division, model.

None of it is sent, and what a process has loaded it keeps: a Ray worker that serves many clients, message after
message, loads the data once.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fedapp.config import RunConfig
from fedapp.data import Dataset, Partition, load_dataset, make_partition
from fedapp.data.errors import expanded
from fedapp.models import build_model

# Keys that decide which client has which rows, apart from the dataset and the number of clients.
DIVISION_KEYS = (
    "partitioner", "class_imbalance", "data_imbalance", "min_samples",
    "dirichlet_alpha", "test_on", "test_fraction", "seed",
)  # fmt: skip
Division = tuple[tuple[str, Any], ...]

CPU = torch.device("cpu")


def dataset_of(config: RunConfig, num_clients: int, data_path: str | None = None) -> Dataset:
    """Open the run's dataset; ``data_path`` overrides the config's."""
    path = config.data_path if data_path is None else data_path
    return cached_dataset(
        config.dataset, path, num_clients if config.dataset == "synthetic" else 0, config.seed
    )


def partition_of(config: RunConfig, num_clients: int, data_path: str | None = None) -> Partition:
    """Return the division of the run's dataset over ``num_clients`` clients."""
    path = config.data_path if data_path is None else data_path
    return cached_partition(config.dataset, path, num_clients, division_of(config))


def division_of(config: RunConfig) -> Division:
    """Return the keys and values that decide which client has which rows."""
    return tuple((key, getattr(config, key)) for key in DIVISION_KEYS)


def model_of(
    config: RunConfig,
    kind: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    device: torch.device = CPU,
) -> nn.Module:
    """Return the run's initial model, the same in every process."""
    return cached_model(config.model, kind, input_shape, num_classes, config.init, config.seed, device)


def absolute(data_path: str) -> str:
    """Make a path independent of the working directory, which differs between server and clients."""
    return str(expanded(data_path).absolute()) if data_path else ""


@lru_cache(maxsize=2)
def cached_dataset(name: str, data_path: str, num_clients: int, seed: int) -> Dataset:
    """Load a dataset, once."""
    return load_dataset(name, data_path, num_clients=num_clients, seed=seed)


@lru_cache(maxsize=2)
def cached_partition(name: str, data_path: str, num_clients: int, division: Division) -> Partition:
    """Divide a dataset, once."""
    values = dict(division)
    dataset = cached_dataset(name, data_path, num_clients if name == "synthetic" else 0, values["seed"])
    return make_partition(dataset, num_clients, **values)


@lru_cache(maxsize=2)
def cached_model(
    name: str,
    kind: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    init: str,
    seed: int,
    device: torch.device,
) -> nn.Module:
    """Build an initial model, once."""
    model = build_model(
        name, kind=kind, input_shape=input_shape, num_classes=num_classes, init=init, seed=seed
    )
    return model.to(device)
