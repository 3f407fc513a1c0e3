"""Who wins a cell, and by how much.

A method is told apart from another if a paired t-test over the judged seeds says so, two-sided, at the rule's level.
It compares logarithms of times to the target, where a seed on which it wasn't reached counts as the whole time
budget, a bound; or means of the metric. Runs that differ by no more than the rule's tolerance on every seed are
alike: they win together. The best, by time only of those that reach the target on every seed, wins if it is told
apart from every other that isn't like it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from fedapp.report.series import Array
from studies.maps.plan import MapPlan
from studies.maps.scores import MapScore, sign_of

Measure = Literal["time", "mean"]
MEASURES: tuple[Measure, ...] = ("time", "mean")

WON, CLOSE, UNREACHED, INCOMPLETE, NONE = "won", "not told apart", "not reached", "not run", "all diverged"


@dataclass(frozen=True)
class Win:
    """What came of a cell by one measure.

    Attributes
    ----------
    outcome : str
        ``won``; ``not told apart``; ``not reached``, where no method reaches the target on every seed; ``not run``,
        where runs are missing; ``all diverged``.
    best : tuple of str
        The methods that win together; or, not told apart, the best and those that may be as good, best first.
    runner_up : str
        The best of the others; empty without one.
    by : float
        How far it is behind: the ratio of its time to the winner's, or the difference of the means. NaN without one.
    at_least : bool
        Whether that is a bound, as the runner-up didn't reach the target on every seed.
    """

    outcome: str
    best: tuple[str, ...] = ()
    runner_up: str = ""
    by: float = math.nan
    at_least: bool = False


def win(plan: MapPlan, scores: Sequence[MapScore], measure: Measure) -> Win:
    """Return who wins a cell by a measure."""
    if not all(each.is_complete for each in scores):
        return Win(INCOMPLETE)
    there = [each for each in scores if each.can_win]
    if not there:
        return Win(NONE)
    merit = {each.method: _merit(plan, each, measure) for each in there}
    order = sorted(merit, key=lambda method: -float(merit[method].mean()))
    by_name = {each.method: each for each in there}
    always = [method for method in order if by_name[method].reached == len(by_name[method].times)]
    if measure == "time" and not always:
        return Win(UNREACHED)
    best = always[0] if measure == "time" else order[0]
    tolerance = math.log1p(plan.rule.alike_time) if measure == "time" else plan.rule.alike_mean
    alike = [
        method
        for method in (always if measure == "time" else order)
        if float(np.abs(merit[best] - merit[method]).max()) <= tolerance + 1e-12
    ]
    others = [method for method in order if method not in alike]
    close = [method for method in others if not told_apart(merit[best] - merit[method], plan.rule.level)]
    # Methods that are alike are named in the order of the plan.
    together = tuple(method for method in plan.methods if method in alike)
    if not others:
        return Win(WON if len(there) < len(scores) else CLOSE, together)
    runner_up = others[0]
    behind = float((merit[best] - merit[runner_up]).mean())
    rival = by_name[runner_up]
    return Win(
        CLOSE if close else WON,
        (*together, *close),
        runner_up,
        math.exp(behind) if measure == "time" else behind,
        measure == "time" and rival.reached < len(rival.times),
    )


def told_apart(differences: Array, level: float) -> bool:
    """Tell whether paired differences are above 0 by a two-sided t-test; never from one seed."""
    number, mean = len(differences), float(differences.mean())
    if number < 2 or mean <= 0:
        return False
    spread = float(differences.std(ddof=1))
    if spread <= 1e-12 * abs(mean):
        return True
    return mean / (spread / math.sqrt(number)) > float(stats.t.ppf(1 - level / 2, number - 1))


def _merit(plan: MapPlan, each: MapScore, measure: Measure) -> Array:
    """Return what is better the higher it is, for each judged seed."""
    if measure == "mean":
        return sign_of(plan.metric) * np.array(each.means)
    return -np.log(np.maximum(np.minimum(each.times, plan.budget), 1e-9))
