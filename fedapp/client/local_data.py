"""Which rows are a client's: its share of a dataset that all know, or everything in a file of its own."""

from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ConfigRecord, Context

from fedapp import federation
from fedapp.config import RunConfig
from fedapp.data import DataError, Dataset
from fedapp.data.dataset import Targets
from fedapp.data.partition import OWN, own_split


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
    dataset = expected_data(config, record, num_partitions or 0, path, targets)
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


def expected_data(
    config: RunConfig,
    record: ConfigRecord,
    num_partitions: int,
    path: str | None = None,
    targets: Targets | None = None,
) -> Dataset:
    """Open the dataset that a request's model expects; ``path`` and ``targets`` override the config's."""
    dataset = federation.schema_of(record).fit(federation.dataset_of(config, num_partitions, path, targets))
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
    return own_split(np.arange(len(dataset.y)), config.test_fraction, config.seed, 0)


def node_number(context: Context, key: str) -> int | None:
    """Return a whole number of the node's config, None if it isn't there."""
    value = context.node_config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise DataError(f"{key} = {value!r} in the node config: must be a whole number")
    return value
