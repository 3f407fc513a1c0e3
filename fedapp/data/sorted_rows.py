"""Divisions of rows that are sorted by label: in shards, or beside a share that is dealt out at random."""

import numpy as np

from fedapp.data.dataset import IntArray
from strategies import streams

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
