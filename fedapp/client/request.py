"""What a message asks of a client: the run config, the model, the device to train on, and the rows to train on.

A client's rows are its share of a dataset that all know, or everything in a file of its own.
"""

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from fedapp import federation
from fedapp.config import ConfigError, RunConfig
from fedapp.data import DataError, Dataset
from fedapp.data.partition import OWN, own_split
from fedapp.training.gpu import gpu
from strategies.flower import messages
from strategies.flower.simulated import in_ray_actor


def device_of(config: RunConfig) -> torch.device:
    """Return the device that ``client-device`` asks for; ConfigError if this client has none."""
    if config.client_device == "cpu" or (config.client_device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("client-device = 'cuda': this client has no GPU; allowed are auto, cpu")
    _limit_gpu_share()
    return gpu(tf32=config.tf32)


@functools.cache
def _limit_gpu_share() -> None:
    """Keep to the fraction of the GPU's memory that Ray gave this worker."""
    if in_ray_actor():
        import ray

        share = ray.get_runtime_context().get_assigned_resources().get("GPU", 0)
        if 0 < share < 1:
            torch.cuda.set_per_process_memory_fraction(share)


# What torch would use by itself: on Ray, the worker's share of the cores.
ALL_THREADS = torch.get_num_threads()


def read_config(message: Message) -> tuple[ConfigRecord, RunConfig]:
    """Return a message's config record and the run config in it, and let torch use the threads it says."""
    record = record_of(message)
    config = config_of(record)
    use_threads(config)
    return record, config


def record_of(message: Message) -> ConfigRecord:
    """Return a message's config record."""
    record: ConfigRecord = message.content[messages.CONFIG]  # type: ignore[assignment]
    return record


def use_threads(config: RunConfig) -> None:
    """Let torch use the threads that a run's config gives its clients."""
    torch.set_num_threads(config.client_threads or ALL_THREADS)


def config_of(record: ConfigRecord) -> RunConfig:
    """Return the run config in a config record."""
    values = dict(record.items())
    return _config_of(tuple([values.get(key) for key in RunConfig.key_names()]))


@functools.lru_cache(maxsize=8)
def _config_of(values: tuple[object, ...]) -> RunConfig:
    """Check a config once, not with every message."""
    given = zip(RunConfig.key_names(), values, strict=True)
    return RunConfig.from_message({key: value for key, value in given if value is not None})


def sent_model(message: Message) -> ArrayRecord:
    """Return the model in a message."""
    arrays: ArrayRecord = message.content[messages.ARRAYS]  # type: ignore[assignment]
    return arrays


def integer(record: ConfigRecord, key: str) -> int:
    """Return a whole number of a config record."""
    return int(record[key])  # type: ignore[arg-type]


@dataclass(frozen=True)
class LocalData:
    """A client's rows of a dataset; ``partition_id`` is None where the node's own file is all its data.

    ``test_rows`` are those that it is tested on and never trains on; None where ``test-on`` isn't own.
    """

    dataset: Dataset
    rows: np.ndarray
    partition_id: int | None
    num_partitions: int | None
    key: tuple[object, ...]
    test_rows: np.ndarray | None = None


def local_data(config: RunConfig, record: ConfigRecord, context: Context) -> LocalData:
    """Find this client's rows.

    Raises
    ------
    DataError
        If the node's config names none, or they aren't what the model expects.
    """
    own_path = context.node_config.get("data-path")
    path = str(own_path) if own_path is not None else config.data_path
    partition_id, num_partitions = (
        node_number(context, "partition-id"),
        node_number(context, "num-partitions"),
    )
    # By its own data alone a device may find another kind.
    targets = None if own_path is None else federation.schema_of(record).targets
    dataset = expected_data(record, federation.dataset_of(config, num_partitions or 0, path, targets))
    if partition_id is not None and num_partitions:
        partition = federation.partition_of(config, num_partitions, path, targets)
        if not 0 <= partition_id < num_partitions:
            raise DataError(f"partition-id = {partition_id}: must be 0 to {num_partitions - 1}")
        rows = partition.client(partition_id)
        test_rows = partition.test_client(partition_id) if config.test_on == OWN else None
    elif own_path is not None:
        rows, test_rows = _split(config, dataset)
    else:
        raise DataError(
            "node-config: needs partition-id and num-partitions, or a data-path of the node's own"
        )
    if len(rows) == 0:
        raise no_rows(partition_id)
    source = federation.source_of(config, num_partitions or 0, path, targets)
    key = (source, partition_id, num_partitions, federation.division_of(config))
    return LocalData(dataset, rows, partition_id, num_partitions, key, test_rows)


def expected_data(record: ConfigRecord, dataset: Dataset) -> Dataset:
    """Return a dataset as the model of a request expects it; DataError if it can't be."""
    dataset = federation.schema_of(record).fit(dataset)
    moments = federation.moments_of(record)
    return dataset if moments is None else replace(dataset, moments=moments)


def no_rows(partition_id: int | None) -> DataError:
    """Return what is wrong with a client that has nothing to train on."""
    return DataError(f"client {partition_id}: it has no training examples")


def _split(config: RunConfig, dataset: Dataset) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a device's own training and test rows.

    By the seed alone, not by its place among the clients: what it is asked before it has one, such as the sums of its
    inputs, and what it trains on in a run that goes on with other devices, are of the same rows.
    """
    if config.test_on != OWN:
        return np.arange(dataset.num_train), None
    return own_split(np.arange(len(dataset.y)), config.test_fraction, config.seed, 0, config.hold_out)


def node_number(context: Context, key: str) -> int | None:
    """Return a whole number of the node's config, None if it isn't there."""
    value = context.node_config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise DataError(f"{key} = {value!r} in the node config: must be a whole number")
    return value


def trains_own_first(config: RunConfig) -> bool:
    """Tell whether a task begins with the arrays that are the client's own."""
    return bool(config.personal and config.personal_epochs)
