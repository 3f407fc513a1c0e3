"""Label and quantity skew: the federated data generation of 003 §3.4.1.

Class imbalance κ⁻¹ ≥ 0: class k's samples are split over the C clients by d_k ~ Dirichlet(κ 1_C); κ⁻¹ = 0 is
even. Data imbalance φ² ≥ 0: client sizes s_i ~ lognormal(ln(N/C) - φ²/2, φ²), with mean N/C; φ² = 0 is equal.
Here the two combine so that class k's samples go to client i in proportion to d_k(i) s_i, by largest
remainder.
"""

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from fedapp.data.dataset import Array, IntArray
from strategies import streams


def client_log_sizes(
    num_rows: int, num_clients: int, data_imbalance: float, rng: np.random.Generator
) -> Array:
    """Draw ln s_i with s_i ~ lognormal(ln(N/C) - φ²/2, φ²), so that E[s_i] = N/C (003 §3.4.1).

    Parameters
    ----------
    num_rows, num_clients : int
        N samples and C clients.
    data_imbalance : float
        φ², the variance of ln s_i.
    rng : numpy.random.Generator

    Returns
    -------
    float64 array (C,)
    """
    mean = math.log(num_rows / num_clients) - data_imbalance / 2
    return mean + math.sqrt(data_imbalance) * rng.standard_normal(num_clients)


def log_dirichlet(
    num_classes: int, num_clients: int, class_imbalance: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw ln d_k up to a constant per class, d_k ~ Dirichlet(κ 1_C) with κ = 1/class_imbalance (003 §3.4.1).

    In logarithms, as Gamma(κ) = Gamma(κ + 1) U^(1/κ), because for small κ the variates underflow to 0.

    Parameters
    ----------
    num_classes, num_clients : int
    class_imbalance : float
        κ⁻¹; 0 gives an even split.
    rng : numpy.random.Generator

    Returns
    -------
    float64 array (num_classes, num_clients)
    """
    shape = (num_classes, num_clients)
    if class_imbalance == 0:
        return np.zeros(shape)
    kappa = min(max(1 / class_imbalance, 1e-290), 1e290)
    uniform = 1 - rng.random(shape)  # in (0, 1], so that the logarithm is finite
    return np.log(rng.standard_gamma(kappa + 1, shape)) + np.log(uniform) / kappa


def largest_remainder(weights: Array, total: int, first: int = 0) -> IntArray:
    """Share `total` items out in proportion to `weights` by the largest-remainder (Hamilton) method.

    Parameters
    ----------
    weights : float array (C,)
        Non-negative, with a positive sum.
    total : int
        Number of items.
    first : int
        Of equal remainders, those from this index on (cyclically) come first.

    Returns
    -------
    int64 array (C,)
        Sums to `total`; each entry is its quota rounded down or up.
    """
    quotas = weights / weights.sum() * total
    counts: IntArray = np.floor(quotas).astype(np.int64)
    turn = (np.arange(len(weights)) - first) % len(weights)
    by_remainder = np.lexsort((turn, counts - quotas))
    counts[by_remainder[: total - counts.sum()]] += 1
    return counts


def class_counts(class_sizes: IntArray, log_shares: Array) -> IntArray:
    """Return how many samples of each class go to each client.

    Parameters
    ----------
    class_sizes : int64 array (K,)
        Samples per class.
    log_shares : float array (K, C)
        ln(d_k(i) s_i), up to a constant per class.

    Returns
    -------
    int64 array (K, C)
        Row k sums to class_sizes[k].
    """
    shares = np.exp(log_shares - log_shares.max(axis=1, keepdims=True))
    counts = np.empty(shares.shape, np.int64)
    first = 0
    for k, size in enumerate(class_sizes):
        counts[k] = largest_remainder(shares[k], int(size), first)
        # Even shares tie everywhere: going on where the last class stopped keeps the sizes equal, too.
        first = (first + int(size)) % shares.shape[1]
    return counts


def label_quantity_skew(
    labels: Array,
    num_clients: int,
    class_imbalance: float = 0.0,
    data_imbalance: float = 0.0,
    min_samples: int = 2,
    seed: int = 0,
) -> tuple[IntArray, IntArray]:
    """Divide all samples over the clients with label and quantity skew (003 §3.4.1).

    Parameters
    ----------
    labels : array (N,)
        Labels of any sortable type.
    num_clients : int
        C, with C * min_samples <= N.
    class_imbalance, data_imbalance : float
        κ⁻¹ and φ², both >= 0.
    min_samples : int
        A client with fewer takes samples, drawn at random, from whichever client is then the largest.
    seed : int

    Returns
    -------
    indices : int64 array (N,)
        Positions in `labels`, clients one after the other, ascending within a client.
    offsets : int64 array (C + 1,)
        Client i has indices[offsets[i]:offsets[i + 1]].

    Raises
    ------
    ValueError
        If there are too few samples, or a parameter is out of range.
    """
    if not (num_clients >= 1 and min_samples >= 0 and num_clients * min_samples <= len(labels) > 0):
        raise ValueError(
            f"{len(labels)} samples are too few for {num_clients} clients with {min_samples} each"
        )
    if not (0 <= class_imbalance < math.inf and 0 <= data_imbalance < math.inf):
        raise ValueError(f"imbalances must be finite and >= 0, are {class_imbalance} and {data_imbalance}")
    _, codes, class_sizes = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    sizes_rng = streams.generator(seed, "client-sizes")
    dirichlet_rng = streams.generator(seed, "class-shares")
    rows_rng = streams.generator(seed, "dealt-rows")
    log_sizes = client_log_sizes(len(labels), num_clients, data_imbalance, sizes_rng)
    log_split = log_dirichlet(len(class_sizes), num_clients, class_imbalance, dirichlet_rng)
    counts = class_counts(class_sizes.astype(np.int64), log_split + log_sizes)

    shuffled = rows_rng.permutation(len(labels))
    by_class = shuffled[np.argsort(codes[shuffled], kind="stable")]
    owner = np.empty(len(labels), np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(num_clients), len(class_sizes)), counts.ravel())
    _fill_up(owner, num_clients, min_samples, rows_rng)
    return group_by_owner(owner, num_clients)


def group_by_owner(owner: IntArray, num_clients: int) -> tuple[IntArray, IntArray]:
    """Turn the owner of each position (N,) into indices (N,) and offsets (C + 1,); a client's ascend."""
    offsets = np.zeros(num_clients + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=num_clients), out=offsets[1:])
    return np.argsort(owner, kind="stable").astype(np.int64), offsets


def _fill_up(owner: IntArray, num_clients: int, min_samples: int, rng: np.random.Generator) -> None:
    """Give clients under `min_samples` samples of whichever client is the largest at the time, in place."""
    sizes = np.bincount(owner, minlength=num_clients)
    takers = np.repeat(np.arange(num_clients), np.maximum(min_samples - sizes, 0))
    if len(takers) == 0:
        return
    shuffled = rng.permutation(len(owner))
    by_owner = shuffled[np.argsort(owner[shuffled], kind="stable")]
    ends = np.cumsum(sizes)
    heap = [(-int(size), client) for client, size in enumerate(sizes) if size > min_samples]
    heapq.heapify(heap)
    for taker in takers:
        negative_size, donor = heap[0]
        ends[donor] -= 1
        owner[by_owner[ends[donor]]] = taker
        heapq.heapreplace(heap, (negative_size + 1, donor))
