"""The measures of a run: when it reached the target, and the mean of the metric over the time budget."""

import math

import numpy as np

from strategies.clock import RESOLUTION
from strategies.flower.higher_is_better import higher_is_better
from studies.maps.curves import MapCurve


def time_to(curve: MapCurve, target: float, budget: float, sign: float) -> float:
    """Return the time of the first evaluation within the budget that reaches the target; infinite without one.

    A budget forgives a rounding error, as a run's does.
    """
    good = (sign * curve.values >= sign * target) & (curve.times <= budget + RESOLUTION)
    return float(curve.times[np.argmax(good)]) if good.any() else math.inf


def mean_over(curve: MapCurve, budget: float) -> float:
    """Return the mean of the metric over the time budget, each value from its evaluation to the next."""
    known = np.isfinite(curve.values) & (curve.times <= budget + RESOLUTION)
    times, values = curve.times[known], curve.values[known]
    if not len(times):
        return math.nan
    lasts = np.diff([*times, max(budget, times[-1])])
    return float(values @ lasts / lasts.sum()) if lasts.sum() > 0 else float(values[-1])


def sign_of(metric: str) -> float:
    """Return −1 for a metric of which a lower value is better; a plan has none whose direction isn't known."""
    return 1.0 if higher_is_better(metric) else -1.0
