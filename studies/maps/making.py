"""Makes a map's runs: a pilot that says how long all will take, then cell by cell, tuning before judging."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console

from fedapp.sweeps.point import PlannedRun
from fedapp.sweeps.runner import run_missing, worker_pool
from studies.maps.curves import FILE, MapCurve, collected, metric_in, read_curves, write_curves
from studies.maps.plan import MapPlan, Spot
from studies.maps.scores import pick
from studies.maps.search import candidates, tune

RUNS = "runs"
AT_ONCE = 40  # runs, after which the curves are written: what a kill of the machine can cost at most


class MapRuns:
    """The runs of a map in a folder.

    Parameters
    ----------
    folder : Path
        Holds curves.parquet, and ``runs`` with a folder for each run.
    engine, jobs
        See `fedapp.sweeps.runner.run_missing`.
    minutes : float
        No run is started after that.
    """

    def __init__(
        self,
        plan: MapPlan,
        folder: Path,
        *,
        engine: str,
        jobs: int,
        console: Console,
        minutes: float = math.inf,
    ) -> None:
        self.plan, self.folder, self.engine, self.jobs, self.console = plan, folder, engine, jobs, console
        self.end = time.monotonic() + 60 * minutes
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
        tuning = self._tuning(plan.spots)
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
                while self._run(self._tuning([spot])):  # of a search what is wanted next follows from these
                    pass
                self._run(self._judged([spot]))
                if self._left <= 0:
                    self._say(f"the time is over: {self._outlook(self._tuning(plan.spots))}")
                    return

    @property
    def _left(self) -> float:
        """Return the minutes in which runs may still be started."""
        return (self.end - time.monotonic()) / 60

    def _tuning(self, spots: Sequence[Spot]) -> list[PlannedRun]:
        """Return the tuning runs in some cells; of a search those that it has got to."""
        if not self.plan.is_searched:
            return self.plan.tuning_runs(spots)
        return [
            self.plan.run(spot, method, candidate, seed)
            for spot in spots
            for method in self.plan.methods
            for candidate, seed in tune(self.plan, spot, method, self.curves).wanted
        ]

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

    def _run(self, planned: Sequence[PlannedRun]) -> bool:
        """Make those that are missing and haven't failed, and tell whether any was made."""
        missing = list(
            {
                each.key: each
                for each in planned
                if each.key not in self.curves and each.name not in self.failures
            }.values()
        )
        before = len(self.curves)
        for at in range(0, len(missing), AT_ONCE):
            if self._left > 0:
                self.failures |= run_missing(
                    missing[at : at + AT_ONCE],
                    self.folder / RUNS,
                    engine=self.engine,
                    jobs=self.jobs,
                    minutes=self._left,
                    console=self.console,
                    workers=self._workers,
                )
                self._collect(missing[at : at + AT_ONCE])
        return len(self.curves) > before

    def _collect(self, planned: Sequence[PlannedRun]) -> None:
        """Keep what has ended."""
        found, versions = collected(planned, self.folder / RUNS, self.plan.metric, self.curves)
        if found:
            self.curves |= found
            self.versions = versions or self.versions
            write_curves(self.folder / FILE, self.curves, self.versions, self.plan.metric)

    def _pilot(self) -> list[PlannedRun]:
        """Return a run of the plan for each problem and method that has none yet, from the middle of the map.

        A search has none: it goes cell by cell, so that each that is complete can be judged.
        """
        plan = self.plan
        if plan.is_searched:
            return []
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
        if self.plan.is_searched:
            return self._outlook_of_search()
        left = [each for each in {each.key: each for each in tuning}.values() if each.key not in self.curves]
        total = self._total(tuning)
        done = self._done()
        minutes = (self._seconds(left) + self._seconds_of_judged()) / max(self.jobs, 1) / 60
        about = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
        return (
            f"{total} runs, {done} are there: {total - done} to make, about {about} with --jobs "
            f"{self.jobs}, by the {len(self.curves)} runs so far"
        )

    def _outlook_of_search(self) -> str:
        """Say how many cells are complete, and how long the others take as far as is known."""
        plan, known, minutes, done = self.plan, _usual_seconds(self.curves), 0.0, 0
        seeds = range(len(plan.tuning.seeds))
        for spot in plan.spots:
            ended = True
            for method in plan.methods:
                left = self._judged_left(spot, method)
                if tune(plan, spot, method, self.curves).wanted:
                    tried = len(candidates(plan, spot.problem, method))
                    left += sum(math.ceil(tried / 2**seed) for seed in seeds)
                ended &= not left
                minutes += left * _expected(known, {**spot._asdict(), "method": method}) / 60 if left else 0
            done += ended
        time_left = f", about {minutes / 60 / max(self.jobs, 1):.1f} hours with --jobs {self.jobs}"
        return (
            f"{done} of {len(plan.spots)} cells are complete, {len(self.curves)} runs"
            f"{time_left if math.isfinite(minutes) else ''}"
        )

    def _judged_left(self, spot: Spot, method: str) -> int:
        """Return how many judged runs of a method in a cell aren't there: all, while it has no value."""
        value = pick(self.plan, spot, method, self.curves)
        if value is None:
            ended = self.plan.is_searched and not tune(self.plan, spot, method, self.curves).wanted
            return 0 if ended else len(self.plan.seeds)
        return sum(
            self.plan.run(spot, method, value, seed).key not in self.curves for seed in self.plan.seeds
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
            for method in plan.methods:
                if (
                    plan.is_same_upwards(method, spot.across)
                    and spot.upwards != plan.sides(spot.problem)[1][0]
                ):
                    continue
                each = _expected(known, {**spot._asdict(), "method": method})
                total += self._judged_left(spot, method) * each
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
