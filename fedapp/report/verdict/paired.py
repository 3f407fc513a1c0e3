"""Paired comparisons over seeds: Student's t-test, its interval, Holm's correction, and the number of seeds needed.

Functions take differences (n,), one for each seed that two settings share.
"""

import math

import numpy as np

from fedapp.report.series import Array

POWER = 0.8  # chance that enough seeds tell two settings apart
DEVIATION_LEVEL = 0.05  # chance that the interval of a deviation misses it
MOST_SEEDS = 1000  # beyond this number only "more than" is said

# Spread below this share of the mean is rounding: all differences are equal.
_ROUNDING = 1e-12


def are_equal(differences: Array) -> bool:
    """Return True if all differences are one number, but for rounding: a t-test divides by their spread."""
    return float(np.ptp(differences)) <= _ROUNDING * float(np.abs(differences).max())


def p_value(differences: Array) -> float:
    """Return the two-sided p-value of Student's paired t-test, which is the one-sample test of the differences.

    It is 1 where all differences are 0, or of one seed. Where all are equal but not 0, as of metrics on few test
    rows, t isn't defined: the p-value is 2^(1−n), that of the sign test.
    """
    from scipy import stats  # a second to import

    number = len(differences)
    if number < 2 or not differences.any():
        return 1.0
    if are_equal(differences):
        return float(2.0 ** (1 - number))
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def interval(differences: Array, level: float) -> tuple[float, float]:
    """Return Student's two-sided interval of the mean difference, which misses it with chance ``level``.

    NaN of one seed; the difference itself where all are equal.
    """
    from scipy import stats  # a second to import

    if len(differences) < 2:
        return math.nan, math.nan
    if are_equal(differences):
        return float(differences[0]), float(differences[0])
    error = float(stats.sem(differences))
    low, high = stats.t.interval(1 - level, len(differences) - 1, float(differences.mean()), error)
    return float(low), float(high)


def holm_adjusted(ps: Array) -> Array:
    """Return p-values (m,) adjusted by Holm's method (1979): it bounds the chance of any false rejection."""
    order, number = np.argsort(ps, kind="stable"), len(ps)
    steps = np.minimum(1.0, ps[order] * (number - np.arange(number)))
    adjusted = np.empty(number)
    adjusted[order] = np.maximum.accumulate(steps)
    return adjusted


def holm_levels(ps: Array, level: float) -> Array:
    """Return the level (m,) at which Holm's method compares each p-value.

    The i-th smallest of m p-values is compared with level / (m − i + 1) as long as all before it are rejected; from
    the first that isn't rejected on, the others are compared with that one's level. So an interval at this level
    excludes 0 exactly where Holm's method rejects.
    """
    order, number = np.argsort(ps, kind="stable"), len(ps)
    rejected = int((holm_adjusted(ps) <= level).sum())
    places = np.minimum(np.arange(number), rejected)
    levels = np.empty(number)
    levels[order] = level / (number - places)
    return levels


def power_of(difference: float, deviation: float, number: int, level: float) -> float:
    """Return the chance that a two-sided paired t-test over ``number`` seeds rejects at a level.

    Parameters
    ----------
    difference, deviation : float
        True mean and standard deviation of the normal differences.
    """
    from scipy import stats  # a second to import

    freedom, shift = number - 1, difference / deviation * math.sqrt(number)
    bound = float(stats.t.ppf(1 - level / 2, freedom))
    tails = stats.nct.sf(bound, freedom, shift), stats.nct.cdf(-bound, freedom, shift)
    return float(np.nansum(tails))  # scipy returns NaN for some tails below 1e-30


def deviation_interval(deviation: float, number: int, level: float = DEVIATION_LEVEL) -> tuple[float, float]:
    """Return the interval of a normal standard deviation (n − 1) of ``number`` values, by the χ² distribution."""
    from scipy import stats  # a second to import

    low, high = stats.chi2.ppf([level / 2, 1 - level / 2], number - 1)
    return deviation * math.sqrt((number - 1) / high), deviation * math.sqrt((number - 1) / low)


def seeds_needed(difference: float, deviation: float, level: float) -> int | None:
    """Return the fewest seeds with which a paired t-test at a level rejects with chance `POWER`.

    Without a spread that is the fewest seeds whose sign test rejects. None without a difference, of one seed, or if
    it takes more than `MOST_SEEDS`.
    """
    if difference == 0 or math.isnan(deviation):
        return None
    if deviation == 0:
        return math.ceil(1 - math.log2(level))

    def is_enough(number: int) -> bool:
        return power_of(abs(difference), deviation, number, level) >= POWER

    if not is_enough(MOST_SEEDS):
        return None
    few, enough = 1, MOST_SEEDS
    while enough - few > 1:  # power grows with the number of seeds
        middle = (few + enough) // 2
        few, enough = (few, middle) if is_enough(middle) else (middle, enough)
    return enough
