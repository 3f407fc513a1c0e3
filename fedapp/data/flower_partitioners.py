"""Partitioners that cut rows in their order: of rows sorted by label, and flwr_datasets' own.

They run on row numbers, labels and natural ids only: never on the inputs.
"""

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapp.data.dataset import Array, IntArray
from fedapp.data.errors import DataError, one_line
from strategies import streams

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

_SHARDS_PER_CLIENT = 2


def by_shards(rows: IntArray, labels: IntArray, num_clients: int, seed: int) -> list[IntArray]:
    """Cut the rows, sorted by label, into two shards per client of one size (±1), and deal these out at random."""
    shards = np.array_split(rows[np.argsort(labels, kind="stable")], _SHARDS_PER_CLIENT * num_clients)
    dealt = streams.generator(seed, "dealt-shards").permutation(len(shards)).reshape(num_clients, -1)
    return [np.concatenate([shards[shard] for shard in own]) for own in dealt]


def by_similarity(rows: IntArray, labels: IntArray, num_clients: int, similarity: float) -> list[IntArray]:
    """Deal out a share of the rows as they come, and the rest sorted by label, to clients of one size (±1).

    Parameters
    ----------
    rows, labels : int64 arrays (n,)
        In random order.
    num_clients : int
    similarity : float
        The share, from 0 to 1; of a client's rows it is rounded to whole ones.
    """
    sizes = np.array([len(part) for part in np.array_split(rows, num_clients)])
    alike = np.floor(similarity * sizes + 0.5).astype(np.int64)
    drawn = alike.sum()
    rest = rows[drawn:][np.argsort(labels[drawn:], kind="stable")]
    ends, rest_ends = np.cumsum(alike)[:-1], np.cumsum(sizes - alike)[:-1]
    pairs = zip(np.split(rows[:drawn], ends), np.split(rest, rest_ends), strict=True)
    return [np.concatenate(pair) for pair in pairs]


def flower_partition(
    partitioner: str,
    rows: IntArray,
    labels: Array,
    groups: Array | None,
    num_clients: int,
    min_samples: int,
    seed: int,
    *,
    dirichlet_alpha: float = 1.0,
    classes_per_client: int = 1,
) -> list[IntArray]:
    """Divide rows over clients with a partitioner of flwr_datasets.

    Parameters
    ----------
    partitioner : {"iid", "class-dirichlet", "pathological", "natural"}
    rows, labels : int64 arrays (n,)
        Row numbers into the dataset, already in random order where that matters, and their labels.
    groups : int64 array (n,) or None
        Natural ids; for "natural" those of exactly `num_clients` clients.
    num_clients, min_samples : int
    seed : int
    dirichlet_alpha : float
        α of class-dirichlet.
    classes_per_client : int
        Classes of each client, for pathological.

    Returns
    -------
    list of int64 arrays
        The row numbers of each client.

    Raises
    ------
    DataError
        If the partitioner can't divide the rows like this.
    """
    if partitioner == "iid":  # the division of IidPartitioner, which takes minutes for 100,000 clients
        return [np.asarray(client, np.int64) for client in np.array_split(rows, num_clients)]
    from datasets import Dataset as HFDataset

    columns: dict[str, Any] = {"row": rows, "label": labels}
    if groups is not None:
        columns["group"] = groups
    division = _partitioner(partitioner, num_clients, min_samples, seed, dirichlet_alpha, classes_per_client)
    # NaturalIdPartitioner draws a progress bar on stderr.
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            division.dataset = HFDataset.from_dict(columns)
            clients = [division.load_partition(i).with_format("numpy") for i in range(num_clients)]
            return [np.asarray(client[:]["row"], np.int64) for client in clients]
        except (ValueError, ZeroDivisionError) as error:
            advice = {
                "class-dirichlet": f" by dirichlet-alpha = {dirichlet_alpha}; a larger one or fewer clients are "
                "needed",
                "pathological": f" of classes-per-client = {classes_per_client} classes; more rows, fewer clients or "
                "other classes are needed",
            }.get(partitioner, "")
            raise DataError(
                f"partitioner = {partitioner!r}: {len(rows)} rows can't be divided over {num_clients} "
                f"clients with at least min-samples = {min_samples} each{advice} ({one_line(error)})"
            ) from error


def _partitioner(
    name: str, num_clients: int, min_samples: int, seed: int, alpha: float, classes: int
) -> "Partitioner":
    from flwr_datasets.partitioner import DirichletPartitioner, NaturalIdPartitioner, PathologicalPartitioner

    match name:
        case "class-dirichlet":
            return DirichletPartitioner(
                num_clients, "label", alpha, min_partition_size=min_samples, self_balancing=True, seed=seed
            )
        case "pathological":
            return PathologicalPartitioner(
                num_clients, "label", classes, class_assignment_mode="first-deterministic", seed=seed
            )
        case _:
            return NaturalIdPartitioner("group")
