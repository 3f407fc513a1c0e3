"""What server and clients each work out from the run config alone: data, division, model, and rows as tensors.

None of it is sent, and what a process has loaded it keeps: a Ray worker that serves many clients, message after
message, loads the data once, and keeps rows on a device as long as they are worth their memory. What changes on disk
meanwhile counts from the next run on that begins here (`renew`).
"""

from collections import OrderedDict
from dataclasses import fields, replace
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedapp.config import RunConfig
from fedapp.data import DataError, Dataset, Division, Normalize, Partition, load_dataset, make_partition
from fedapp.data.dataset import DataColumns, Targets
from fedapp.data.errors import PREFIX, expanded
from fedapp.data.given.function import load_function
from fedapp.data.loading import folder_of, is_function, is_generated, state_of
from fedapp.data.moments import Moments
from fedapp.data.partition import number_of_natural_clients
from fedapp.data.standardize import sums_of
from fedapp.models import build_model
from fedapp.names import MODELS, Form, Part
from fedapp.training.evaluation import metrics_of
from fedapp.training.losses import LOSSES, loss_of
from fedapp.training.optimizer import optimizer_of
from fedapp.training.parts import take_logits, unpack

CPU = torch.device("cpu")


class Source(NamedTuple):
    """The arguments of ``fedapp.data.load_dataset``, and the state of the dataset's files (``state_of``)."""

    name: str
    data_path: str
    num_clients: int
    seed: int
    targets: Targets | None
    columns: DataColumns
    state: str = ""


def columns_of(config: RunConfig) -> DataColumns:
    """Return how the run's data are read; keys that the kind of data doesn't read have their defaults."""
    cells = ("missing", "missing_values", "encode", "csv_encoding", "separator", "decimal")
    read = {key: getattr(config, key) for key in cells} if config.dataset == "files" else {}
    return DataColumns(
        config.input_column,
        config.label_column,
        config.group_column,
        config.drop_column,
        image_size=config.image_size,
        image_mode=config.image_mode,
        **read,
    )


_states: dict[Source, str] = {}  # looked up once a run, not with every message


def source_of(
    config: RunConfig, num_clients: int, data_path: str | None = None, targets: Targets | None = None
) -> Source:
    """Return the source of the run's dataset; ``data_path`` and ``targets`` override the config's."""
    generated = is_generated(config.dataset) or is_function(config.dataset)
    source = Source(
        config.dataset,
        config.data_path if data_path is None else data_path,
        num_clients if generated else 0,
        config.seed,
        targets or targets_of(config),
        columns_of(config),
    )
    if source not in _states:
        _states[source] = state_of(**_arguments(source))
    return source._replace(state=_states[source])


def renew() -> None:
    """Look again whether files of data, and parts of the user's own, have changed since they were loaded.

    Data that haven't changed stay loaded.
    """
    _states.clear()
    for cached in (cached_model, loss_of, metrics_of, optimizer_of):
        cached.cache_clear()


def targets_of(config: RunConfig) -> Targets | None:
    """Return the kind of targets that the run's loss needs; None: the data's."""
    return loss_of(config.loss).targets


def dataset_of(
    config: RunConfig, num_clients: int, data_path: str | None = None, targets: Targets | None = None
) -> Dataset:
    """Open the run's dataset; ``data_path`` and ``targets`` override the config's."""
    return cached_dataset(source_of(config, num_clients, data_path, targets))


def natural_clients(config: RunConfig) -> int:
    """Return the number of all natural clients that the run's data have.

    0 where the run has no natural clients, or its data are made for a number of clients.
    """
    name = config.dataset
    if config.partitioner != "natural" or is_generated(name):
        return 0
    if is_function(name) and "num_clients" in signature(load_function(name)).parameters:
        return 0
    dataset = dataset_of(config.model_copy(update=local_folders(config)), 0)
    return number_of_natural_clients(dataset, division_of(config))


def partition_of(
    config: RunConfig, num_clients: int, data_path: str | None = None, targets: Targets | None = None
) -> Partition:
    """Return the division of the run's dataset over ``num_clients`` clients."""
    source = source_of(config, num_clients, data_path, targets)
    return cached_partition(source, num_clients, division_of(config))


def with_moments(config: RunConfig, dataset: Dataset, partition: Partition) -> Dataset:
    """Return a dataset that knows mean and deviation of all clients' training rows, where the run needs them."""
    if config.normalize != "standardize":
        return dataset
    return replace(dataset, moments=sums_of(dataset, partition.client_indices).moments())


def division_of(config: RunConfig) -> Division:
    """Return the keys and values that decide which client has which rows."""
    return Division(**{field.name: getattr(config, field.name) for field in fields(Division)})


def model_of(
    config: RunConfig, kind: str, form: Form, num_classes: int, device: torch.device = CPU
) -> nn.Module:
    """Return the run's initial model, the same in every process."""
    built_in = config.loss in LOSSES
    return cached_model(config.model, kind, form, num_classes, config.init, config.seed, device, built_in)


def absolute(data_path: str) -> str:
    """Make a path independent of the working directory, which differs between server and clients."""
    return str(expanded(data_path).absolute()) if data_path else ""


def local_folders(config: RunConfig) -> dict[str, str]:
    """Return the keys that name a place on this machine, with absolute paths.

    Raises
    ------
    DataError
        If two of them do.
    """
    path = absolute(config.data_path)
    folder = folder_of(config.dataset) if config.dataset.startswith(PREFIX) else None
    if folder is None:
        return {"data_path": path}
    if path:
        raise DataError(f"data-path = {config.data_path!r}: dataset = {config.dataset!r} is a place already")
    return {"data_path": "", "dataset": f"{PREFIX}{folder.absolute()}"}


@lru_cache(maxsize=2)
def cached_dataset(source: Source) -> Dataset:
    """Load a dataset, once."""
    return load_dataset(**_arguments(source))


def _arguments(source: Source) -> dict[str, Any]:
    return {key: value for key, value in source._asdict().items() if key != "state"}


@lru_cache(maxsize=2)
def cached_partition(source: Source, num_clients: int, division: Division) -> Partition:
    """Divide a dataset, once."""
    return make_partition(cached_dataset(source), num_clients, division)


@lru_cache(maxsize=2)
def cached_model(
    name: str,
    kind: str,
    form: Form,
    num_classes: int,
    init: str,
    seed: int,
    device: torch.device,
    built_in_loss: bool,
) -> nn.Module:
    """Build an initial model, once; a loss of the user's own gets mappings as the model returns them."""
    model = build_model(name, kind=kind, input_shape=form, num_classes=num_classes, init=init, seed=seed)
    parts = [part for part in form if isinstance(part, Part)]
    if name not in MODELS:  # which return logits
        model = take_logits(model, of_mappings=built_in_loss)
    return (unpack(model, parts) if parts else model).to(device)


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
        self._bytes = 0  # size of all kept tensors

    def clear(self) -> None:
        """Drop all inputs and labels."""
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


def tried_tensors(config: RunConfig, dataset: Dataset, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of some rows, to try the parts of a run on.

    Inputs aren't normalized where devices tell mean and deviation later; what is missing of them is 0 then.
    """
    known = config.normalize != "standardize" or dataset.moments is not None
    x, y = to_tensors(dataset, rows, config.normalize if known else False, CPU)
    return (x if known or dataset.kind == "text" else torch.nan_to_num(x)), y


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
