"""The tuning of a method in a cell: candidates drawn at random, successive halving, then a walk.

Each method has the same number of tries, drawn once from the product of its values. All are run on the first tuning
seed, the better half of them on the second, a quarter on the third. From the best of those that ran on every seed the
walk goes on: each of its keys one value down and one up, past the end of the values if need be. A neighbour that is
behind on the seeds so far is dropped; the best of those ahead on all seeds takes the place of the best, whose
neighbours are tried next. The walk ends where no neighbour is ahead, so that no best value is the end of a grid.

The next runs follow from the curves alone, so that a search that was stopped goes on where it was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from fedapp.config import ConfigError
from fedapp.sweeps.point import FINISHED
from strategies import streams
from studies.maps.curves import MapCurve
from studies.maps.measures import mean_over, sign_of
from studies.maps.plan import Candidate, MapPlan, Spot

DOWN, UP = -1, 1


@dataclass(frozen=True)
class Tuning:
    """The state of a method's tuning in a cell.

    Attributes
    ----------
    wanted : tuple of (Candidate, int)
        Runs to make next, each a candidate on a seed; empty at the end.
    best : Candidate, optional
        The best candidate, at the end; None if every candidate diverged.
    score : float
        Its mean score over the tuning seeds, the higher the better; −∞ without one.
    is_open : bool
        Whether the walk took all its steps and the last one was still ahead: a better value may be beyond.
    """

    wanted: tuple[tuple[Candidate, int], ...] = ()
    best: Candidate | None = None
    score: float = -math.inf
    is_open: bool = False


def tries(grid: Mapping[str, Sequence[float]], number: int, seed: int) -> list[Candidate]:
    """Draw candidates from the product of each key's values, all different; all of them if there are fewer."""
    every = [tuple(zip(grid, values, strict=True)) for values in product(*grid.values())]
    order = streams.generator(seed, "map-tries").permutation(len(every))
    return [every[at] for at in order[:number]]


def candidates(plan: MapPlan, problem: str, method: str) -> list[Candidate]:
    """Return a method's tries, the same in every cell of a problem."""
    return tries(plan.grid(problem, method), plan.tuning.tries, plan.tuning.seed)


def tune(plan: MapPlan, spot: Spot, method: str, curves: Mapping[str, MapCurve]) -> Tuning:
    """Return the runs that a method's tuning in a cell needs next, or its result."""
    own = _Race(plan, spot, method, curves)
    drawn = candidates(plan, spot.problem, method)
    if wanted := own.halving(drawn):
        return Tuning(wanted)
    return own.walk(max(drawn, key=own.final))


class _Race:
    """The scores of a method's candidates in a cell, seed by seed, and the rules that read them."""

    def __init__(self, plan: MapPlan, spot: Spot, method: str, curves: Mapping[str, MapCurve]) -> None:
        self.plan, self.spot, self.method, self.curves = plan, spot, method, curves
        self.seeds = plan.tuning.seeds

    def halving(self, drawn: Sequence[Candidate]) -> tuple[tuple[Candidate, int], ...]:
        """Return the runs that the halving still lacks on the first seed where it lacks any."""
        field = list(drawn)
        for number, seed in enumerate(self.seeds):
            if wanted := self._lacking(field, seed):
                return wanted
            scores = {each: self.mean(each, number + 1) for each in field}
            there = [each for each in field if scores[each] > -math.inf]
            kept = math.ceil(len(drawn) / 2 ** (number + 1))
            field = sorted(there, key=lambda each: -scores[each])[:kept]
        return ()

    def walk(self, best: Candidate) -> Tuning:
        """Go from the best to its neighbours, while one is ahead; from one that diverged to smaller first keys.

        Every neighbour that doesn't diverge is ahead of a best that did.
        """
        if self.final(best) == -math.inf:  # so did all that the halving kept: begin at the smallest other one
            first = best[0][0]
            drawn = candidates(self.plan, self.spot.problem, self.method)
            best = min(drawn, key=lambda each: (self._diverged(each), dict(each)[first]))
        for _ in range(self.plan.tuning.steps + 1):
            for seed in self.seeds:  # the halving may have dropped it before the last seed
                if wanted := self._lacking([best], seed):
                    return Tuning(wanted)
            is_stable = self.final(best) > -math.inf
            rivals = self._neighbours(best)
            for number, seed in enumerate(self.seeds):
                if wanted := self._lacking(rivals, seed):
                    return Tuning(wanted)
                bar = self.mean(best, number + 1) if is_stable else -math.inf
                rivals = [each for each in rivals if self.mean(each, number + 1) > bar]
            if rivals:
                best = max(rivals, key=self.final)
            elif is_stable:
                return Tuning(best=best, score=self.final(best))
            elif (smaller := self._moved(best, best[0][0], DOWN)) is not None:
                best = smaller
            else:
                return Tuning()
        score = self.final(best)
        return Tuning(best=best if score > -math.inf else None, score=score, is_open=True)

    def mean(self, candidate: Candidate, number: int) -> float:
        """Return the mean score over the first tuning seeds; −∞ if a run diverged."""
        scores = [self._score(candidate, seed) for seed in self.seeds[:number]]
        if -math.inf in scores or None in scores:
            return -math.inf
        return float(np.mean([each for each in scores if each is not None]))

    def final(self, candidate: Candidate) -> float:
        """Return the mean score over all tuning seeds; −∞ for one that wasn't run on all, or diverged."""
        return self.mean(candidate, len(self.seeds))

    def _score(self, candidate: Candidate, seed: int) -> float | None:
        """Return a run's score, the higher the better: −∞ if it diverged; None if it isn't there."""
        curve = self.curves.get(self.plan.run(self.spot, self.method, candidate, seed).key)
        if curve is None:
            return None
        score = sign_of(self.plan.metric) * mean_over(curve, self.plan.budget)
        return score if curve.status == FINISHED and math.isfinite(score) else -math.inf

    def _lacking(self, field: Sequence[Candidate], seed: int) -> tuple[tuple[Candidate, int], ...]:
        """Return the runs on a seed that aren't there, of candidates that diverged on no other seed."""
        return tuple(
            (each, seed) for each in field if self._score(each, seed) is None and not self._diverged(each)
        )

    def _diverged(self, candidate: Candidate) -> bool:
        """Tell whether a candidate diverged on a seed on which it was run."""
        return -math.inf in [self._score(candidate, seed) for seed in self.seeds]

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        found = (self._moved(candidate, key, by) for key, _ in candidate for by in (DOWN, UP))
        return [each for each in found if each is not None]

    def _moved(self, candidate: Candidate, key: str, by: int) -> Candidate | None:
        """Return a candidate with one key a value down or up; None where the key's range ends."""
        values = self.plan.grid(self.spot.problem, self.method)[key]
        value = beside(values, dict(candidate)[key], by)
        if value is None or value > self.plan.tuning.most.get(key, math.inf):
            return None
        moved = tuple((name, value if name == key else own) for name, own in candidate)
        try:
            self.plan.run(self.spot, self.method, moved, self.seeds[0])
        except ConfigError:  # the run config allows no such value
            return None
        return moved


def beside(values: Sequence[float], value: float, by: int) -> float | None:
    """Return the value before (−1) or after (+1) one of some values, which are extrapolated past their ends.

    None if they can't be extrapolated.
    """
    ladder = sorted(values)
    while value not in ladder:
        further = _further(ladder, UP if value > ladder[-1] else DOWN)
        if further is None:
            return None
        ladder = sorted([*ladder, further])
    at = ladder.index(value) + by
    return ladder[at] if 0 <= at < len(ladder) else _further(ladder, by)


def _further(ladder: Sequence[float], by: int) -> float | None:
    """Return the next value past an end: two steps are as large as the last two, of two values one as the last one.

    0.01, 0.03, 0.1 go on with 0.3, and down with 0.003; whole numbers go on with whole numbers.
    """
    ends = list(ladder) if by == UP else list(ladder)[::-1]
    if len(ends) < 2:
        return None
    base, over = (ends[-2], ends[-3]) if len(ends) > 2 else (ends[-1], ends[-2])
    if not over or not base or not ends[-1]:
        return None
    value: float = float(f"{base * ends[-1] / over:.6g}")
    if all(isinstance(each, int) for each in ladder):
        value = round(value)
    return value if value > 0 and (value - ends[-1]) * by > 0 else None
