"""Label and quantity skew: the federated data generation of Buttaci 2024, §3.4.1, with both margins held.

Class imbalance κ⁻¹ ≥ 0: class k's samples are split over the C clients by d_k ~ Dirichlet(κ 1_C); κ⁻¹ = 0 is
even. Data imbalance φ² ≥ 0: client sizes s_i ~ lognormal of log-variance φ²; φ² = 0 is equal.

Class k has N_k samples and client i gets s_i, so the table of counts is the one with these margins that iterative
proportional fitting reaches from d_k(i) s_i. Fitting scales rows and columns, so only the table's cross-ratios
count: those of independent Gamma(κ) variables. A Dirichlet(α 1_K) over the classes of each client (Hsu et al. 2019;
Fraboni et al. 2023, §5.1) has the same ones, with κ = α: with both margins held the two divisions are one.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedapp.data.dataset import Array, IntArray
from strategies import streams

Table = NDArray[np.float64]

# From here on (nats between a class's largest and smallest cells) a table no longer changes: almost every client
# has one class, and what the others split follows from the margins alone.
_LARGEST_SPREAD = 1e7

_CLOSE = 1e-6  # samples by which a row of the fitted table may miss its margin
_MAX_NEWTON, _MAX_HALVINGS = 100, 40


def client_sizes(
    num_rows: int, num_clients: int, data_imbalance: float, min_samples: int, rng: np.random.Generator
) -> IntArray:
    """Draw the clients' sizes s_i ~ lognormal with log-variance φ², rescaled to Σ s_i = N (Buttaci 2024, §3.4.1).

    Parameters
    ----------
    num_rows, num_clients : int
        N samples and C clients.
    data_imbalance : float
        φ²; 0 gives sizes equal to within one sample.
    min_samples : int
        Smaller clients get ``min_samples``, and the others share the rest in proportion; C * min_samples <= N.
    rng : numpy.random.Generator

    Returns
    -------
    int64 array (C,)
    """
    logs = math.sqrt(data_imbalance) * rng.standard_normal(num_clients)
    shares = np.exp(logs - logs.max())
    sizes = np.full(num_clients, min_samples)
    free = np.ones(num_clients, dtype=bool)
    while free.any():
        rest = num_rows - min_samples * int((~free).sum())
        # Shares of e^-1000 of the largest are 0: where only such clients are left, they share alike.
        sizes[free] = largest_remainder(shares[free] if shares[free].any() else np.ones(free.sum()), rest)
        small = free & (sizes < min_samples)
        if not small.any():
            break
        sizes[small], free = min_samples, free & ~small
    return sizes


def log_gamma_table(
    num_classes: int, num_clients: int, class_imbalance: float, rng: np.random.Generator
) -> Table:
    """Draw the logarithms of independent Gamma(κ) variables, κ = 1 / ``class_imbalance``, float64 (K, C).

    A row, divided by its sum, is a Dirichlet(κ 1_C); a column a Dirichlet(κ 1_K). In logarithms, as
    Gamma(κ) = Gamma(κ + 1) U^(1/κ), because for small κ the variates underflow to 0. κ⁻¹ = 0: all the same.
    """
    shape = (num_classes, num_clients)
    if class_imbalance == 0:
        return np.zeros(shape)
    kappa = min(max(1 / class_imbalance, 1e-290), 1e290)
    uniform = 1 - rng.random(shape)  # in (0, 1], so that the logarithm is finite
    return np.log(rng.standard_gamma(kappa + 1, shape)) + np.log(uniform) / kappa


def fit_margins(log_table: Table, rows: IntArray, columns: IntArray) -> Table:
    """Scale rows and columns of a positive table until it has these margins: the limit of iterative fitting.

    That limit is e^(a_k + b_i) times the table. With b eliminated, a maximises the concave
    Σ_k N_k a_k − Σ_i s_i ln Σ_k e^(a_k + L_ki), by Newton's method. Where cells differ by very many orders of
    magnitude, the table's logarithms are first scaled down and let grow, each time from the last solution.

    Parameters
    ----------
    log_table : float64 array (K, C)
        L, natural logarithms.
    rows, columns : int64 arrays (K,) and (C,)
        N_k > 0 and s_i > 0, of equal sum.

    Returns
    -------
    float64 array (K, C)
        Columns have their sums to rounding, rows to within ``_CLOSE``.
    """
    if len(rows) > len(columns):  # the smaller side has the unknowns
        return fit_margins(log_table.T, columns, rows).T
    centred = log_table - log_table.max(axis=0)
    spread = float(-centred.min())
    scale, top = min(1.0, 1 / max(spread, 1.0)), min(1.0, _LARGEST_SPREAD / max(spread, 1.0))
    before = (0.0, np.zeros(len(rows)))
    a = np.log(rows / rows.sum())
    while True:
        a = _newton(centred * scale, rows, columns, a)
        if scale >= top:
            return _softmax(a[:, None] + centred * scale)[0] * columns
        slope = (a - before[1]) / (scale - before[0])  # potentials end up linear in the scale
        before, scale = (scale, a), min(2 * scale, top)
        a = a + slope * (scale - before[0])


def _newton(log_table: Table, rows: IntArray, columns: IntArray, a: Array) -> Array:
    """Maximise Σ N_k a_k − Σ s_i ln Σ_k e^(a_k + L_ki) from a (K,), as far as rounding lets it."""
    p, level = _softmax(a[:, None] + log_table)
    value = rows @ a - columns @ level
    best, missed = a, math.inf
    for _ in range(_MAX_NEWTON):
        weighted = p * columns
        gradient = rows - weighted.sum(axis=1)
        if not np.abs(gradient).max() < missed and missed <= _CLOSE:
            break
        best, missed = a, np.abs(gradient).max()
        hessian = np.diag(weighted.sum(axis=1)) - weighted @ p.T
        # a is determined up to a constant, and hardly at all where every client has one class only.
        hessian += 1e-9 * rows.mean() * np.eye(len(a))
        step = np.linalg.solve(hessian, gradient)
        step -= step.mean()
        step *= min(1.0, 5 / max(np.abs(step).max(), 1e-300))
        for _ in range(_MAX_HALVINGS):
            p, level = _softmax((a + step)[:, None] + log_table)
            trial = rows @ (a + step) - columns @ level
            if trial >= value - 1e-14 * columns @ np.abs(level):  # the rounding of the sums
                break
            step /= 2
        a, value = a + step, trial
    return best


def _softmax(logits: Table) -> tuple[Table, Array]:
    """Return e^logits over its sum by column, and the logarithms of these sums (C,)."""
    top = logits.max(axis=0)
    powers = np.exp(logits - top)
    sums = powers.sum(axis=0)
    return powers / sums, top + np.log(sums)


def round_to_margins(
    table: Table, rows: IntArray, columns: IntArray, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Round a table up or down, cell by cell, so that both margins hold exactly.

    Cells with the largest fractions are rounded up first, of equal ones those that ``rng`` draws. Units that are left
    then, because one margin of every open cell is full, find their places by a maximum flow over the cells with a
    fraction, which moves others aside. There is such a rounding, as the table has these margins.

    Parameters
    ----------
    table : float64 array (K, C)
        Non-negative, with these margins to rounding.
    rows, columns : int64 arrays (K,) and (C,)
    rng : numpy.random.Generator

    Returns
    -------
    int64 array (K, C)
    """
    counts = np.floor(table + _CLOSE).astype(np.int64)
    need, room = rows - counts.sum(axis=1), columns - counts.sum(axis=0)
    fractions = table - counts
    eligible = fractions > _CLOSE
    cells = rng.permutation(np.flatnonzero(eligible))
    cells = cells[np.argsort(-fractions.ravel()[cells], kind="stable")]
    up = np.zeros(table.shape, dtype=bool)
    left, free = need.tolist(), room.tolist()
    for k, i in zip(*(axis.tolist() for axis in np.divmod(cells, table.shape[1])), strict=True):
        if left[k] > 0 and free[i] > 0:
            up[k, i] = True
            left[k] -= 1
            free[i] -= 1
    if any(left):
        _reroute(up, eligible, np.array(left), np.array(free))
        counts += up
        # No unit is left now, unless the table misses a margin by more than its fractions.
        need, room = rows - counts.sum(axis=1), columns - counts.sum(axis=0)
        np.add.at(counts, (np.repeat(np.arange(len(need)), need), np.repeat(np.arange(len(room)), room)), 1)
        return counts
    return counts + up


def _reroute(up: NDArray[np.bool_], eligible: NDArray[np.bool_], need: IntArray, room: IntArray) -> None:
    """Place what rows still need in columns with room, in place, moving other units between a row's cells."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    num_rows, num_columns = up.shape
    source, sink = num_rows + num_columns, num_rows + num_columns + 1
    to_k, to_i = np.nonzero(eligible & ~up)
    back_k, back_i = np.nonzero(up)
    needy, open_ = np.flatnonzero(need > 0), np.flatnonzero(room > 0)
    tails = np.concatenate([to_k, num_rows + back_i, np.full(len(needy), source), num_rows + open_])
    heads = np.concatenate([num_rows + to_i, back_k, needy, np.full(len(open_), sink)])
    ones = np.ones(len(to_k) + len(back_k), dtype=np.int64)
    capacities = np.concatenate([ones, need[needy], room[open_]]).astype(np.int32)
    graph = coo_array((capacities, (tails, heads)), shape=(sink + 1, sink + 1)).tocsr()
    flow = maximum_flow(graph, source, sink).flow.tocoo()
    moved = (flow.data > 0) & (flow.row < num_rows) & (flow.col >= num_rows) & (flow.col < source)
    undone = (flow.data > 0) & (flow.col < num_rows) & (flow.row >= num_rows) & (flow.row < source)
    up[flow.row[moved], flow.col[moved] - num_rows] = True
    up[flow.col[undone], flow.row[undone] - num_rows] = False


def largest_remainder(weights: Array, total: int) -> IntArray:
    """Share `total` items out in proportion to `weights` by the largest-remainder (Hamilton) method.

    Parameters
    ----------
    weights : float array (C,)
        Non-negative, with a positive sum.
    total : int
        Number of items.

    Returns
    -------
    int64 array (C,)
        Sums to `total`; each entry is its quota rounded down or up.
    """
    quotas = weights / weights.sum() * total
    counts: IntArray = np.floor(quotas).astype(np.int64)
    by_remainder = np.argsort(counts - quotas, kind="stable")
    counts[by_remainder[: total - counts.sum()]] += 1
    return counts


def label_quantity_skew(
    labels: Array,
    num_clients: int,
    class_imbalance: float = 0.0,
    data_imbalance: float = 0.0,
    min_samples: int = 2,
    seed: int = 0,
) -> tuple[IntArray, IntArray]:
    """Divide all samples over the clients with label and quantity skew (Buttaci 2024, §3.4.1).

    Parameters
    ----------
    labels : array (N,)
        Labels of any sortable type.
    num_clients : int
        C, with C * min_samples <= N.
    class_imbalance, data_imbalance : float
        κ⁻¹ and φ², both >= 0.
    min_samples : int
        No client gets fewer: see `client_sizes`.
    seed : int

    Returns
    -------
    indices : int64 array (N,)
        Positions in `labels`, clients one after the other, ascending within a client.
    offsets : int64 array (C + 1,)
        Client i has indices[offsets[i]:offsets[i + 1]].
    """
    _, codes, class_sizes = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    class_sizes = class_sizes.astype(np.int64)
    sizes_rng = streams.generator(seed, "client-sizes")
    sizes = client_sizes(len(labels), num_clients, data_imbalance, min_samples, sizes_rng)
    gammas = log_gamma_table(
        len(class_sizes), num_clients, class_imbalance, streams.generator(seed, "class-shares")
    )
    some = sizes > 0
    counts = np.zeros(gammas.shape, np.int64)
    rng = streams.generator(seed, "dealt-rows")
    table = fit_margins(gammas[:, some], class_sizes, sizes[some])
    counts[:, some] = round_to_margins(table, class_sizes, sizes[some], rng)

    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(codes[shuffled], kind="stable")]
    owner = np.empty(len(labels), np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(num_clients), len(class_sizes)), counts.ravel())
    return group_by_owner(owner, num_clients)


def group_by_owner(owner: IntArray, num_clients: int) -> tuple[IntArray, IntArray]:
    """Turn the owner of each position (N,) into indices (N,) and offsets (C + 1,); a client's ascend."""
    offsets = np.zeros(num_clients + 1, np.int64)
    np.cumsum(np.bincount(owner, minlength=num_clients), out=offsets[1:])
    return np.argsort(owner, kind="stable").astype(np.int64), offsets
