"""What server and clients each work out from the run config alone, and so agree on: data, division, model.

Nothing here is sent: a client computes its rows from the config in the message. What a process has loaded it keeps:
a Ray worker that serves many clients, message after message, loads the data once.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedapp.config import RunConfig
from fedapp.data import Dataset, Normalize, Partition, load_dataset, make_partition
from fedapp.data.schema import Schema
from fedapp.models import build_model

# What the server adds to the run config in a message, so that a client with data of its own can check them;
# the last two only where there are names.
DATA_KIND = "data-kind"
INPUT_SHAPE = "input-shape"
NUM_CLASSES = "num-classes"
DATA_TYPE = "data-type"
CLASS_NAMES = "class-names"
COLUMNS = "columns"

# Keys that decide which client has which rows, apart from the dataset and the number of clients.
DIVISION_KEYS = (
    "partitioner", "class_imbalance", "data_imbalance", "min_samples",
    "dirichlet_alpha", "test_on", "test_fraction", "seed",
)  # fmt: skip
Division = tuple[tuple[str, Any], ...]

CPU = torch.device("cpu")

# Prepared inputs kept per process (bytes); clients used longest ago go first.
TENSOR_BUDGET = 1 << 30


def dataset_of(config: RunConfig, num_clients: int, data_path: str | None = None) -> Dataset:
    """Open the run's dataset; ``data_path`` overrides the config's."""
    path = config.data_path if data_path is None else data_path
    return _dataset(config.dataset, path, num_clients if config.dataset == "synthetic" else 0, config.seed)


def partition_of(config: RunConfig, num_clients: int, data_path: str | None = None) -> Partition:
    """Return the division of the run's dataset over ``num_clients`` clients."""
    path = config.data_path if data_path is None else data_path
    return _partition(config.dataset, path, num_clients, division_of(config))


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
    return _model(config.model, kind, input_shape, num_classes, config.init, config.seed, device)


def schema_fields(dataset: Dataset) -> dict[str, Any]:
    """Return the fields of a message that tell clients what the model expects of their data."""
    schema = Schema.of(dataset)
    fields = {
        DATA_KIND: schema.kind,
        DATA_TYPE: schema.dtype,
        INPUT_SHAPE: list(schema.shape),
        NUM_CLASSES: schema.num_classes,
        CLASS_NAMES: list(schema.classes),
        COLUMNS: list(schema.columns),
    }
    return {key: value for key, value in fields.items() if value != []}


def schema_of(record: Mapping[str, Any]) -> Schema:
    """Read those fields back."""
    return Schema(
        record[DATA_KIND],
        record[DATA_TYPE],
        tuple(record[INPUT_SHAPE]),
        record[NUM_CLASSES],
        tuple(record.get(CLASS_NAMES, ())),
        tuple(record.get(COLUMNS, ())),
    )


def absolute(data_path: str) -> str:
    """Make a path independent of the working directory, which differs between server and clients."""
    return str(Path(data_path).expanduser().absolute()) if data_path else ""


@lru_cache(maxsize=2)
def _dataset(name: str, data_path: str, num_clients: int, seed: int) -> Dataset:
    return load_dataset(name, data_path, num_clients=num_clients, seed=seed)


@lru_cache(maxsize=2)
def _partition(name: str, data_path: str, num_clients: int, division: Division) -> Partition:
    values = dict(division)
    dataset = _dataset(name, data_path, num_clients if name == "synthetic" else 0, values["seed"])
    return make_partition(dataset, num_clients, **values)


@lru_cache(maxsize=2)
def _model(
    name: str,
    kind: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    init: str,
    seed: int,
    device: torch.device,
) -> nn.Module:
    model = build_model(
        name, kind=kind, input_shape=input_shape, num_classes=num_classes, init=init, seed=seed
    )
    return model.to(device)


def training_tensors(config: RunConfig, num_clients: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of all clients on ``device``, in the order of the partition's client rows."""
    return _training(
        config.dataset, config.data_path, num_clients, division_of(config), config.normalize, device
    )


@lru_cache(maxsize=1)
def _training(
    name: str,
    data_path: str,
    num_clients: int,
    division: Division,
    normalize: Normalize,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    partition = _partition(name, data_path, num_clients, division)
    dataset = _dataset(name, data_path, num_clients if name == "synthetic" else 0, dict(division)["seed"])
    return to_tensors(dataset, partition.client_indices, normalize, device)


class TensorCache:
    """Inputs and labels of clients, on their device, within a budget of bytes."""

    def __init__(self, budget: int = TENSOR_BUDGET) -> None:
        self.budget = budget
        self._kept: OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]] = OrderedDict()

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
