"""Makes a map's runs: a pilot that says how long all will take, then cell by cell, tuning before judging."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console

from fedapp.sweeps.point import PlannedRun
from fedapp.sweeps.runner import run_missing, worker_pool
from studies.maps.curves import FILE, MapCurve, collected, metric_in, read_curves, write_curves
from studies.maps.plan import SAME_UPWARDS, MapPlan, Spot
from studies.maps.scores import pick

RUNS = "runs"


class MapRuns:
    """The runs of a map in a folder.

    Parameters
    ----------
    folder : Path
        Holds curves.parquet, and ``runs`` with a folder for each run.
    engine, jobs
        See `fedapp.sweeps.runner.run_missing`.
    """

    def __init__(self, plan: MapPlan, folder: Path, *, engine: str, jobs: int, console: Console) -> None:
        self.plan, self.folder, self.engine, self.jobs, self.console = plan, folder, engine, jobs, console
        self.curves, self.versions = read_curves(folder / FILE)
        if self.curves and (kept := metric_in(folder / FILE)) != plan.metric:
            self._say(f"{FILE} has {kept}, not {plan.metric}: it is made anew, from what {RUNS} holds")
            self.curves, self.versions = {}, {}
        self.failures: dict[str, str] = {}
        self._workers: ProcessPoolExecutor | None = None

    def make(self) -> None:
        """Make what isn't there.

        Raises
        ------
        ConfigError
            If a run's config isn't possible, or another process makes runs in this folder: before a run begins.
            If a run comes to its end without the plan's metric.
        """
        plan = self.plan
        tuning = plan.tuning_runs(plan.spots)
        self._collect([*tuning, *self._judged(plan.spots)])
        with worker_pool(self.jobs) if self.jobs else contextlib.nullcontext() as self._workers:
            if pilot := self._pilot():
                self._say(
                    f"{len(pilot)} of {self._total(tuning)} runs first, to know how long they take: "
                    f"{len(plan.problems)} problems × {len(plan.methods)} methods"
                )
                self._run(pilot)
            self._say(self._outlook(tuning))
            for at, spot in enumerate(plan.spots, 1):
                where = f"cell {at} of {len(plan.spots)}: {spot.problem}, {plan.across.name} {spot.across}, "
                self._say(f"{where}{plan.upwards.name} {spot.upwards}")
                self._run(plan.tuning_runs([spot]))
                self._run(self._judged([spot]))

    def _judged(self, spots: Sequence[Spot]) -> list[PlannedRun]:
        """Return the judged runs of what has been picked in some cells."""
        picks = [
            (spot, name, pick(self.plan, spot, name, self.curves))
            for spot in spots
            for name in self.plan.methods
        ]
        return [
            self.plan.run(spot, method, value, seed)
            for spot, method, value in picks
            if value is not None
            for seed in self.plan.seeds
        ]

    def _run(self, planned: Sequence[PlannedRun]) -> None:
        missing = [each for each in planned if each.key not in self.curves]
        if missing:
            self.failures |= run_missing(
                missing,
                self.folder / RUNS,
                engine=self.engine,
                jobs=self.jobs,
                console=self.console,
                workers=self._workers,
            )
            self._collect(missing)

    def _collect(self, planned: Sequence[PlannedRun]) -> None:
        """Keep what has ended."""
        found, versions = collected(planned, self.folder / RUNS, self.plan.metric, self.curves)
        if found:
            self.curves |= found
            self.versions = versions or self.versions
            write_curves(self.folder / FILE, self.curves, self.versions, self.plan.metric)

    def _pilot(self) -> list[PlannedRun]:
        """Return a run of the plan for each problem and method that has none yet, from the middle of the map."""
        plan = self.plan
        known = {(curve.labels["problem"], curve.labels["method"]) for curve in self.curves.values()}
        middle = plan.upwards.labels[len(plan.upwards.labels) // 2]
        return [
            plan.run(
                Spot(name, plan.across.labels[0], middle),
                method,
                _middle(plan.tried(name, method)),
                plan.tuning.seeds[0],
            )
            for name in plan.problems
            for method in plan.methods
            if (name, method) not in known
        ]

    def _outlook(self, tuning: Sequence[PlannedRun]) -> str:
        """Say how many runs there are to make, and how long that takes as far as is known."""
        left = [each for each in {each.key: each for each in tuning}.values() if each.key not in self.curves]
        total = self._total(tuning)
        done = self._done()
        minutes = (self._seconds(left) + self._seconds_of_judged()) / max(self.jobs, 1) / 60
        about = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
        return (
            f"{total} runs, {done} are there: {total - done} to make, about {about} with --jobs "
            f"{self.jobs}, by the {len(self.curves)} runs so far"
        )

    def _total(self, tuning: Sequence[PlannedRun]) -> int:
        return len({each.key for each in tuning}) + self.plan.number_judged()

    def _done(self) -> int:
        planned = [*self.plan.tuning_runs(self.plan.spots), *self._judged(self.plan.spots)]
        return len({each.key for each in planned} & self.curves.keys())

    def _seconds(self, planned: Sequence[PlannedRun]) -> float:
        """Return how long runs will take."""
        known = _usual_seconds(self.curves)
        return sum(_expected(known, each.labels) for each in planned)

    def _seconds_of_judged(self) -> float:
        """Return how long the judged runs will take that aren't there: some have no value yet."""
        plan, known, total = self.plan, _usual_seconds(self.curves), 0.0
        for spot in plan.spots:
            for method, own in plan.methods.items():
                if own.get(SAME_UPWARDS) and spot.upwards != plan.upwards.labels[0]:
                    continue
                value = pick(plan, spot, method, self.curves)
                there = (
                    0
                    if value is None
                    else sum(plan.run(spot, method, value, seed).key in self.curves for seed in plan.seeds)
                )
                each = _expected(known, {**spot._asdict(), "method": method})
                total += (len(plan.seeds) - there) * each
        return total

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _middle(values: Sequence[float]) -> float:
    return values[len(values) // 2]


# What runs have in common that take about as long, the more the better.
_ALIKE = (("problem", "method", "upwards"), ("problem", "method"), ("problem",), ())


def _usual_seconds(curves: Mapping[str, MapCurve]) -> dict[tuple[object, ...], float]:
    """Return the mean seconds of runs that have labels in common, by these."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for curve in curves.values():
        for names in _ALIKE:
            groups.setdefault((names, *(curve.labels[name] for name in names)), []).append(curve.seconds)
    return {key: float(np.mean(values)) for key, values in groups.items()}


def _expected(known: Mapping[tuple[object, ...], float], labels: Mapping[str, object]) -> float:
    keys = ((names, *(labels[name] for name in names)) for names in _ALIKE)
    return next((known[key] for key in keys if key in known), math.nan)
