"""Curves of several runs on one axis, as step functions, and mean and spread of numbers."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

POINTS = 300  # points of a curve over all runs
DIGITS = 3  # decimals of metrics in tables and sentences


def steps(grid: Array, x: Array, y: Array) -> Array:
    """Return a step function's values on a grid: NaN before the first that is known."""
    known = np.isfinite(x) & np.isfinite(y)
    at = np.searchsorted(x[known], grid, side="right")
    return np.append(np.nan, y[known])[at]


def on_one_grid(xs: Sequence[Array], ys: Sequence[Array], points: int = POINTS) -> tuple[Array, Array]:
    """Return x (points,), up to where the first run ends, and every run's y there, (runs, points).

    The points are those of the runs if all have the same, as over rounds; evenly spaced ones otherwise.
    """
    if all(np.array_equal(xs[0], other) for other in xs[1:]):
        return xs[0], np.stack(ys)
    grid = np.linspace(0, min(float(np.nanmax(x)) for x in xs), points)
    return grid, np.stack([steps(grid, x, y) for x, y in zip(xs, ys, strict=True)])


def spaced(size: int, most: int) -> NDArray[np.int64]:
    """Return up to ``most`` of the first ``size`` whole numbers, evenly spaced, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(np.int64))


def with_extremes(values: Sequence[float], most: int) -> NDArray[np.int64]:
    """Return at most ``most`` places in values: of each of equal stretches the lowest and the highest value's.

    The first and the last place are among them; values that aren't finite count as neither.
    """
    if len(values) <= most:
        return np.arange(len(values))
    known = np.array(values)
    edges = np.linspace(0, len(values), (most - 2) // 2 + 1).round().astype(np.int64)
    found = {0, len(values) - 1}
    for begin, end in itertools.pairwise(edges.tolist()):
        stretch = known[begin:end]
        is_finite = np.isfinite(stretch)
        found.add(begin + int(np.where(is_finite, stretch, np.inf).argmin()))
        found.add(begin + int(np.where(is_finite, stretch, -np.inf).argmax()))
    return np.array(sorted(found))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation (n − 1) of finite values; NaN of none, and of the spread of one."""
    finite = [value for value in values if math.isfinite(value)]
    mean = float(np.mean(finite)) if finite else math.nan
    return mean, float(np.std(finite, ddof=1)) if len(finite) > 1 else math.nan


def metric_text(value: float, digits: int = DIGITS) -> str:
    """Write a metric; - for one that isn't finite."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def spread_text(values: Sequence[float], digits: int = DIGITS, *, equal: bool = False) -> str:
    """Write mean ± standard deviation of the finite values, and their number unless all are finite; - of none.

    With ``equal`` the deviation has the decimals of the mean, else two digits.
    """
    mean, spread = mean_and_spread(values)
    if not math.isfinite(mean):
        return "-"
    form = f".{digits}f" if equal else ".2g"
    text = metric_text(mean, digits) + (f" ± {spread:{form}}" if math.isfinite(spread) else "")
    finite = sum(map(math.isfinite, values))
    return text if finite == len(values) else f"{text} ({finite} of {len(values)})"
