"""What each method came to in each cell: the tuned value that was picked, and the measures on the judged seeds."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedapp.report.series import spread_text
from fedapp.sweeps.point import FINISHED
from studies.maps.curves import MapCurve
from studies.maps.measures import mean_over, sign_of, time_to
from studies.maps.plan import Candidate, MapPlan, Spot
from studies.maps.search import tune

Curves = Mapping[str, MapCurve]


@dataclass(frozen=True)
class MapScore:
    """A method in a cell.

    Attributes
    ----------
    value : float or Candidate, optional
        The tuned key's (`MapPlan.tuned`), or those of a search, as picked; None if each had a run that diverged, or
        runs are missing.
    at_edge : bool
        Whether it is the lowest or highest that was tried, or a search ended before it was inside: a better one may
        be beyond.
    times : tuple of float
        Virtual seconds to the target on each judged seed; infinite where it wasn't reached.
    means : tuple of float
        Mean of the metric over the time budget on each.
    diverged : int
        Judged runs that diverged.
    is_complete : bool
        Whether all runs that are needed have ended.
    """

    method: str
    value: float | Candidate | None = None
    at_edge: bool = False
    times: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    diverged: int = 0
    is_complete: bool = False

    @property
    def can_win(self) -> bool:
        """Whether every judged run came to its end."""
        return self.is_complete and self.value is not None and not self.diverged

    @property
    def reached(self) -> int:
        """Judged seeds on which the target was reached."""
        return sum(map(math.isfinite, self.times))

    def time_text(self) -> str:
        """Write the mean time to the target over the seeds, or on how many it wasn't reached."""
        if not self.times:
            return "-"
        missed = len(self.times) - self.reached
        return f"not reached in {missed} of {len(self.times)}" if missed else spread_text(self.times, 2)

    def mean_text(self) -> str:
        """Write the mean of the metric, mean ± standard deviation over the seeds."""
        return spread_text(self.means, 4)


def pick(plan: MapPlan, spot: Spot, method: str, curves: Curves) -> float | Candidate | None:
    """Return the tuned value with the best mean of the metric over the time budget, averaged over the tuning seeds.

    One with a run that diverged isn't picked; of equals the lowest is. None if there is none, or a run is missing.
    """
    if plan.is_searched:
        return tune(plan, spot, method, curves).best
    sign, best, found = sign_of(plan.metric), -math.inf, None
    for value in plan.tried(spot.problem, method):
        runs = [curves.get(plan.run(spot, method, value, seed).key) for seed in plan.tuning.seeds]
        if any(run is None for run in runs):
            return None
        scores = [
            sign * mean_over(run, plan.budget) if run.status == FINISHED else math.nan for run in runs if run
        ]
        if (score := float(np.mean(scores))) > best:  # never with NaN
            best, found = score, value
    return found


def is_tuned(plan: MapPlan, spot: Spot, method: str, curves: Curves) -> bool:
    """Tell whether all of a method's tuning runs in a cell have ended."""
    if plan.is_searched:
        return not tune(plan, spot, method, curves).wanted
    return all(
        plan.run(spot, method, value, seed).key in curves
        for value in plan.tried(spot.problem, method)
        for seed in plan.tuning.seeds
    )


def score(plan: MapPlan, spot: Spot, method: str, curves: Curves) -> MapScore:
    """Return what a method came to in a cell."""
    value = pick(plan, spot, method, curves)
    if value is None:
        return MapScore(method, is_complete=is_tuned(plan, spot, method, curves))
    runs = [curves.get(plan.run(spot, method, value, seed).key) for seed in plan.seeds]
    there = [run for run in runs if run is not None]
    ends = Counter(run.status for run in there)
    finished = [run for run in there if run.status == FINISHED]
    problem, sign = plan.problems[spot.problem], sign_of(plan.metric)
    return MapScore(
        method,
        value,
        _at_edge(plan, spot, method, value, curves),
        tuple(time_to(run, problem.target, plan.budget, sign) for run in finished),
        tuple(mean_over(run, plan.budget) for run in finished),
        sum(number for status, number in ends.items() if status != FINISHED),
        len(there) == len(plan.seeds),
    )


def _at_edge(plan: MapPlan, spot: Spot, method: str, value: float | Candidate, curves: Curves) -> bool:
    if plan.is_searched:
        return tune(plan, spot, method, curves).is_open
    tried = plan.tried(spot.problem, method)
    return value in (tried[0], tried[-1]) and len(tried) > 2


def scores_of(plan: MapPlan, curves: Curves) -> dict[Spot, list[MapScore]]:
    """Return every method's score in every cell."""
    return {spot: [score(plan, spot, method, curves) for method in plan.methods] for spot in plan.spots}
