"""The verdict on a table of results: paired t-tests of all pairs, corrected by Holm's method.

The leader is chosen by the data that then judge it. So the correction is for all k(k−1)/2 pairs of k settings: one
for the k − 1 pairs with the leader would let more sweeps have a false pair than the level says.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedapp.report.series import Array
from fedapp.report.verdict.paired import (
    are_equal,
    deviation_interval,
    holm_adjusted,
    holm_levels,
    interval,
    p_value,
    seeds_needed,
)
from fedapp.report.verdict.verdict import Pair, Verdict
from fedapp.report.verdict.wording import sentences_on

LEVEL = 0.05  # chance of any false pair

Results = Mapping[str, Mapping[Hashable, float]]


def judge(
    results: Iterable[tuple[str, Hashable, float]],
    metric: str,
    *,
    higher: bool,
    place: str = "at the end",
    level: float = LEVEL,
) -> Verdict:
    """Return the verdict on results of settings.

    Parameters
    ----------
    results : iterable of (setting, seed, value)
        Values that aren't finite are left out. Runs of one seed have the same division of the data, first model and
        draws, so settings are compared seed by seed.
    higher : bool
        Whether a higher value of the metric is better.
    place : str
        Where the runs are compared, for the sentences.
    level : float
        The chance of any false pair among all.
    """
    by_setting = by_seed(results)
    sign = 1.0 if higher else -1.0
    mean = {setting: float(np.mean(list(values.values()))) for setting, values in by_setting.items()}
    order = sorted(mean, key=lambda setting: -sign * mean[setting])
    pairs = _pairs(by_setting, order, sign, level)
    of_best = [pair for pair in pairs if pair.better == order[0]]
    leader = order[0] if of_best and all(pair.apart for pair in of_best) else ""
    means = {setting: mean[setting] for setting in order}
    found = Verdict(metric, place, leader, means, tuple(pairs))
    return replace(found, sentences=sentences_on(found, higher=higher))


def by_seed(results: Iterable[tuple[str, Hashable, float]]) -> dict[str, dict[Hashable, float]]:
    """Return finite values by setting and seed; settings without one are left out."""
    found: dict[str, dict[Hashable, float]] = {}
    for setting, seed, value in results:
        if math.isfinite(value):
            found.setdefault(setting, {})[seed] = value
    return found


def _pairs(results: Results, order: Sequence[str], sign: float, level: float) -> list[Pair]:
    """Return all pairs that share a seed, the better setting of each first."""
    known = {
        (better, other): differences
        for better, other in itertools.combinations(order, 2)
        if len(differences := _advantages(results[better], results[other], sign))
    }
    ps = np.array([p_value(differences) for differences in known.values()])
    adjusted, levels = holm_adjusted(ps), holm_levels(ps, level)
    return [
        _pair(better, other, differences, p, own_level, apart=bool(p <= level), is_of_best=better == order[0])
        for ((better, other), differences), p, own_level in zip(
            known.items(), adjusted.tolist(), levels.tolist(), strict=True
        )
    ]


def _advantages(better: Mapping[Hashable, float], other: Mapping[Hashable, float], sign: float) -> Array:
    return np.array([sign * (better[seed] - other[seed]) for seed in better if seed in other])


def _pair(
    better: str, other: str, differences: Array, p: float, level: float, *, apart: bool, is_of_best: bool
) -> Pair:
    deviation = math.nan
    if len(differences) > 1:
        deviation = 0.0 if are_equal(differences) else float(differences.std(ddof=1))
    difference = float(differences.mean())
    needed: list[int | None] = [None] * 3
    if is_of_best and not apart and len(differences) > 1:
        deviations = (deviation, *deviation_interval(deviation, len(differences)))
        needed = [seeds_needed(difference, each, level) for each in deviations]
    low, high = interval(differences, level)
    return Pair(
        better,
        other,
        len(differences),
        difference,
        deviation,
        p,
        level,
        low,
        high,
        apart=apart,
        needed=needed[0],
        needed_from=needed[1],
        needed_to=needed[2],
    )
