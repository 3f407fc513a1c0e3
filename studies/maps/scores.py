"""The score of each method in each cell: the values found in tuning, and the measures on the judged seeds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedapp.report.series import spread_text
from fedapp.sweeps.point import FINISHED
from studies.maps.curves import MapCurve
from studies.maps.measures import mean_over, sign_of, time_to
from studies.maps.plan import Candidate, MapPlan, Spot
from studies.maps.search import tune

Curves = Mapping[str, MapCurve]


@dataclass(frozen=True)
class MapScore:
    """The score of a method in a cell.

    Attributes
    ----------
    tuned : Candidate, optional
        The values that were found in tuning; None if each had a run that diverged, or runs are missing.
    tuning : float
        The score of these values in tuning, the higher the better; −∞ without any.
    is_open : bool
        Whether the search ended while it was still ahead: better values may be beyond.
    times : tuple of float
        Virtual seconds to the target on each judged seed; infinite where it wasn't reached.
    means : tuple of float
        Mean of the metric over the time budget on each judged seed.
    diverged : int
        Judged runs that diverged.
    is_complete : bool
        Whether all runs that are needed have ended.
    """

    method: str
    tuned: Candidate | None = None
    tuning: float = -math.inf
    is_open: bool = False
    times: tuple[float, ...] = ()
    means: tuple[float, ...] = ()
    diverged: int = 0
    is_complete: bool = False

    @property
    def can_win(self) -> bool:
        """Whether every judged run came to its end."""
        return self.is_complete and self.tuned is not None and not self.diverged

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


def score(plan: MapPlan, spot: Spot, method: str, curves: Curves) -> MapScore:
    """Return the score of a method in a cell."""
    tuning = tune(plan, spot, method, curves)
    if tuning.best is None:
        return MapScore(method, is_complete=not tuning.wanted)
    runs = [curves.get(plan.run(spot, method, tuning.best, seed).key) for seed in plan.seeds]
    there = [run for run in runs if run is not None]
    # As in tuning, a run whose metric was never finite counts as one that diverged.
    finished = [run for run in there if run.status == FINISHED and math.isfinite(mean_over(run, plan.budget))]
    problem, sign = plan.problems[spot.problem], sign_of(plan.metric)
    return MapScore(
        method,
        tuning.best,
        tuning.score,
        tuning.is_open,
        tuple(time_to(run, problem.target, plan.budget, sign) for run in finished),
        tuple(mean_over(run, plan.budget) for run in finished),
        len(there) - len(finished),
        len(there) == len(plan.seeds),
    )


def scores_of(plan: MapPlan, curves: Curves) -> dict[Spot, list[MapScore]]:
    """Return every method's score in every cell, without methods that were added and lack runs there."""
    found: dict[Spot, list[MapScore]] = {}
    for spot in plan.spots:
        every = (score(plan, spot, method, curves) for method in plan.methods_of(spot))
        found[spot] = [each for each in every if each.is_complete or not plan.is_added(each.method)]
    return found
