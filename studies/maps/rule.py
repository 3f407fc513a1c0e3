"""Who wins a cell, and by how much.

A method is told apart from another if a paired t-test over the judged seeds says so, two-sided, at the rule's level.
It compares logarithms of times to the target, where a seed on which it wasn't reached counts as the whole time
budget, a bound; or means of the metric. The best, by time only of those that reach the target on every seed, wins if
it is told apart from every other, and none of these was still ahead when its search ended.

A method with several optimizers at the server (``of``) takes part in a cell with the one that tuning found best
there, so that a method wins, not an optimizer.

The p-value of a win, the largest of its comparisons, is adjusted for all cells and measures of the map by Holm's
method. The one adjusted by Benjamini and Hochberg's, which bounds the share of false wins, stands beside it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from scipy import stats

from fedapp.report.series import Array
from fedapp.report.verdict.paired import are_equal, holm_adjusted, interval, p_value
from studies.maps.measures import sign_of
from studies.maps.plan import MapPlan, Spot
from studies.maps.scores import MapScore

Measure = Literal["time", "mean"]
MEASURES: tuple[Measure, ...] = ("time", "mean")

WON, CLOSE, UNREACHED, INCOMPLETE, NONE = "won", "not told apart", "not reached", "not run", "all diverged"


@dataclass(frozen=True)
class Win:
    """The outcome of a cell by one measure.

    Attributes
    ----------
    outcome : str
        ``won``; ``not told apart``; ``not reached``, where no method reaches the target on every seed; ``not run``,
        where runs are missing; ``all diverged``.
    best : tuple of str
        The winner; or, not told apart, the best and those that may be as good, best first: by a test by itself, or,
        where the adjustment takes the win away, by a test that is adjusted by the same factor.
    runner_up : str
        The best of the others; empty without one.
    by : float
        The runner-up's distance: its time over the winner's, or the difference of the means. NaN without a runner-up.
    at_least : bool
        Whether ``by`` is a lower bound, as the runner-up didn't reach the target on every seed.
    p : float
        The largest p-value of the best one's comparisons; NaN without one.
    by_rival : mapping of str to float
        The p-value of each comparison, in the order of the others' merits.
    low, high : float
        The interval of ``by``, at one less the rule's level.
    holm, hochberg : float
        ``p`` adjusted for the family of all cells and measures, by Holm's method and by Benjamini and Hochberg's.
    """

    outcome: str
    best: tuple[str, ...] = ()
    runner_up: str = ""
    by: float = math.nan
    at_least: bool = False
    p: float = field(default=math.nan, compare=False)
    by_rival: Mapping[str, float] = field(default_factory=dict, compare=False)
    low: float = field(default=math.nan, compare=False)
    high: float = field(default=math.nan, compare=False)
    holm: float = field(default=math.nan, compare=False)
    hochberg: float = field(default=math.nan, compare=False)


Wins = Mapping[tuple[Spot, Measure], Win]


def wins_of(plan: MapPlan, scores: Mapping[Spot, Sequence[MapScore]]) -> dict[tuple[Spot, Measure], Win]:
    """Return who wins each cell by each measure, after the adjustment for all of them."""
    found = {(spot, measure): win(plan, own, measure) for spot, own in scores.items() for measure in MEASURES}
    ps = np.array([1.0 if math.isnan(each.p) else each.p for each in found.values()])
    for place, holm, hochberg in zip(
        found, holm_adjusted(ps), stats.false_discovery_control(ps), strict=True
    ):
        each = found[place]
        found[place] = replace(each, holm=float(holm), hochberg=float(hochberg))
        if each.outcome == WON and each.by_rival and holm > plan.rule.level:
            close = (rival for rival, p in each.by_rival.items() if p * holm / each.p > plan.rule.level)
            found[place] = replace(found[place], outcome=CLOSE, best=(*each.best, *close))
    return found


def win(plan: MapPlan, scores: Sequence[MapScore], measure: Measure) -> Win:
    """Return who wins a cell by a measure, judged by itself."""
    if not all(each.is_complete for each in scores):
        return Win(INCOMPLETE)
    there = [each for each in standing(plan, scores) if each.can_win]
    if not there:
        return Win(NONE)
    merits = {each.method: merit(plan, each, measure) for each in there}
    order = sorted(merits, key=lambda method: -float(merits[method].mean()))
    by_name = {each.method: each for each in there}
    always = [method for method in order if by_name[method].reached == len(by_name[method].times)]
    if measure == "time" and not always:
        return Win(UNREACHED)
    best = always[0] if measure == "time" else order[0]
    others = [method for method in order if method != best]
    if not others:
        return Win(WON, (best,))
    close = [
        method
        for method in others
        if by_name[method].is_open or not told_apart(merits[best] - merits[method], plan.rule.level)
    ]
    runner_up = others[0]
    ahead = merits[best] - merits[runner_up]
    rival = by_name[runner_up]
    by_rival = {method: advantage_p(merits[best] - merits[method]) for method in others}
    scale = math.exp if measure == "time" else float
    low, high = interval(ahead, plan.rule.level)
    return Win(
        CLOSE if close else WON,
        (best, *close),
        runner_up,
        scale(float(ahead.mean())),
        measure == "time" and rival.reached < len(rival.times),
        max(by_rival.values()),
        by_rival,
        scale(low),
        scale(high),
    )


def standing(plan: MapPlan, scores: Sequence[MapScore]) -> list[MapScore]:
    """Return the scores of a cell that are compared: of each method's optimizers the one that did best in tuning."""
    best: dict[str, MapScore] = {}
    for each in scores:
        if (family := plan.family(each.method)) not in best or each.tuning > best[family].tuning:
            best[family] = each
    return list(best.values())


def told_apart(differences: Array, level: float) -> bool:
    """Tell whether paired differences are above 0 by a two-sided t-test; never from one seed."""
    return advantage_p(differences) < level


def advantage_p(differences: Array) -> float:
    """Return the p-value of a two-sided paired t-test; 1 where the mean isn't above 0, or of one seed.

    It is 0 where all differences are one number above 0.
    """
    if len(differences) < 2 or float(differences.mean()) <= 0:
        return 1.0
    return 0.0 if are_equal(differences) else p_value(differences)


def merit(plan: MapPlan, each: MapScore, measure: Measure) -> Array:
    """Return a method's score on each judged seed, (seeds,), higher is better; by time the logarithm of 1/time."""
    if measure == "mean":
        return sign_of(plan.metric) * np.array(each.means)
    return -np.log(np.maximum(np.minimum(each.times, plan.budget), 1e-9))
