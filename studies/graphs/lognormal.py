"""The lognormal model of the misalignments of a graph's clients (Buttaci 2024, definition 3.3).

Its fit, and a test whether it holds; ``mis`` (C, C) is that of ``strategies.clients.graph.misalignment``.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from strategies.clients.graph import FLOOR, Matrix, floored

_ROUNDS = 99  # of a round robin, at most, in which clients are paired off


class Lognormal(NamedTuple):
    """mis ~ lognormal(−θ, φ²), fitted to ``pairs`` pairs, of which ``floored`` are at the floor."""

    theta: float
    phi: float
    pairs: int
    floored: int


def fit_lognormal(mis: ArrayLike, floor: float = FLOOR) -> Lognormal:
    """Fit (θ, φ) of definition 3.3 (eq. 3.3): θ = −mean and φ² = variance (over n) of ln mis, i < j.

    The maximum of the likelihood if pairs are independent; θ = 2 hom. Needs 2 clients.
    """
    values = _pairs(floored(mis, floor), 2)
    mean, deviation = float(np.log(values).mean()), float(np.log(values).std())
    return Lognormal(-mean, deviation, len(values), int((values == floor).sum()))


class Normality(NamedTuple):
    """Test of ln mis for normality: ``p_value``; skewness and excess kurtosis over all pairs, 0 for a normal."""

    p_value: float
    skewness: float
    excess_kurtosis: float


def normality(mis: ArrayLike, floor: float = FLOOR) -> Normality:
    """Test whether ln mis is normal (the assumption in definition 3.3). Needs 6 clients.

    The C(C−1)/2 pairs come from C directions only: a test that takes them as independent would reject any model. So
    the clients are paired off, each in one pair (⌊C/2⌋ pairs that share no client), and Shapiro–Wilk tests the values
    of these pairs; the test is repeated for up to 99 of the C−1 rounds of a round robin. Twice the median of the
    p-values is a valid, conservative p-value under any dependence. All three fields are NaN if all pairs are equal.
    """
    from scipy.stats import shapiro

    logs = np.log(floored(mis, floor))
    values = _pairs(logs, 6)
    if np.ptp(values) == 0:
        return Normality(math.nan, math.nan, math.nan)
    C, z = len(logs), (values - values.mean()) / values.std()
    even, p_values = C + C % 2, []  # for odd C, the client paired with the dummy index C sits out
    for turn in np.linspace(0, even - 2, min(even - 1, _ROUNDS)).astype(int).tolist():
        seats = np.concatenate([[0], np.roll(np.arange(1, even), turn)])
        pairs = np.stack([seats, seats[::-1]])[:, : even // 2]
        sample = logs[tuple(pairs[:, pairs.max(axis=0) < C])]
        p_values.append(float(shapiro(sample).pvalue) if np.ptp(sample) > 0 else 0.0)
    return Normality(min(1.0, 2 * float(np.median(p_values))), float((z**3).mean()), float((z**4).mean() - 3))


def _pairs(matrix: Matrix, least: int) -> Matrix:
    """Return the entries i < j of a matrix (C, C); a ValueError if C < ``least``."""
    if len(matrix) < least:
        raise ValueError(f"mis: needs {least} clients or more, has {len(matrix)}")
    return np.asarray(matrix[np.triu_indices(len(matrix), 1)])
