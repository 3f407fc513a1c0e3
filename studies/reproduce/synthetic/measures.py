"""Measurements of the runs and the data of Dhasade et al.'s synthetic problem, one value per seed."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedapp.report.series import Array
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.runs import Runs, mean
from studies.theory.constants import Constants
from studies.theory.convex import convex_bound


def problem_name(seed: int) -> str:
    """Return the name of a seed's problem among the numbers."""
    return f"problem, seed {seed}"


class Measured:
    """Curves and constants; ``cases`` are the cases that have a run for every seed."""

    def __init__(self, results: Results, plan: Plan) -> None:
        self.plan = plan
        self.seeds: list[int] = plan.labels("seed")
        self.cases = [case for case in plan.labels("case") if not results.missing(case=case)]
        self.problems: Mapping[int, Mapping[str, Any]] = {
            seed: results.numbers[problem_name(seed)]
            for seed in self.seeds
            if problem_name(seed) in results.numbers
        }
        self._numbers = results.numbers
        self._runs = results.runs

    def has(self, *cases: str) -> bool:
        """Tell whether these cases and every seed's data are there."""
        return set(cases) <= set(self.cases) and len(self.problems) == len(self.seeds)

    def each(self, case: str) -> Runs:
        """Return a case's runs, by seed."""
        return self._runs.where(case=case)

    def curve(self, case: str, key: str) -> Array:
        """Return a metric after each round, from round 0, mean over seeds."""
        return np.asarray(np.mean([run.column(key) for run in self.each(case)], axis=0))

    def constants(self, key: str) -> list[float]:
        """Return a constant of the problem, by seed."""
        return [float(problem[key]) for problem in self.problems.values()]

    def plateaus(self, case: str) -> list[float]:
        """Test loss at the end."""
        share = self.plan.setting("plateau")
        return [float(run.tail("loss", share).mean()) for run in self.each(case)]

    def reached(self, case: str) -> list[float]:
        """First round whose test loss is close to the plateau, NaN if none is; later losses swing with the draws."""
        within = self.plan.setting("within")
        rounds = []
        for run, plateau in zip(self.each(case), self.plateaus(case), strict=True):
            close = np.flatnonzero(np.abs(run.column("loss") / plateau - 1) <= within)
            rounds.append(float(run.column("aggregation")[close[0]]) if close.size else math.nan)
        return rounds

    def divergences(self, case: str) -> list[float]:
        """Largest divergence of all rounds."""
        return [float(np.nanmax(run.column("divergence"))) for run in self.each(case)]

    def biases(self, case: str) -> list[float]:
        """The final b."""
        return [self._numbers.get(run.planned.key, np.nan) for run in self.each(case)]

    def gaps(self, case: str) -> list[float]:
        """F − F* at the end, on the training points."""
        share = self.plan.setting("plateau")
        return [
            float(run.tail("client-loss", share).mean()) - self.problems[run.config.seed]["least-loss"]
            for run in self.each(case)
            if run.config.seed in self.problems
        ]

    def gap_curve(self, case: str) -> Array:
        """Mean of F − F* over the rounds so far, from round 1: theorem 2.1's mean, over the ends of rounds alone."""
        curves = [
            run.column("client-loss")[1:] - self.problems[run.config.seed]["least-loss"]
            for run in self.each(case)
        ]
        return np.cumsum(np.mean(curves, axis=0)) / np.arange(1, len(curves[0]) + 1)

    def bound(self, case: str, rounds: ArrayLike) -> Array:
        """Theorem 2.1 with the measured constants, mean over seeds."""
        bounds = []
        for run in self.each(case):
            problem = self.problems[run.config.seed]
            constants = Constants(
                run.planned.num_clients,
                L=problem["local-smoothness"],
                zeta2=self._zeta(run.config.seed) ** 2,
                distance2=problem["distance"] ** 2,
                sigma2=0.0,
            )
            bounds.append(
                convex_bound(rounds, constants, lr=run.config.lr, local_steps=run.config.local_steps)
            )
        return np.asarray(np.mean(bounds, axis=0))

    def end(self, case: str) -> tuple[float, float]:
        """Bound and measured mean gap after the last round; means over seeds."""
        gap = self.gap_curve(case)
        return float(self.bound(case, len(gap))), float(gap[-1])

    def optimum(self) -> float:
        """Least test loss of any b, mean over seeds."""
        return mean(self.constants("least-test-loss"))

    def _zeta(self, seed: int) -> float:
        """ζ of a seed: the largest divergence of the case that claim 000-1-zeta names."""
        case = self.plan.threshold("000-1-zeta", "cases")[0]
        return float(np.nanmax(self.each(case).where(seed=seed)[0].column("divergence")))
