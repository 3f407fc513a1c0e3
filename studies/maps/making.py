"""Makes a map's runs, cell by cell, tuning before judging, so that each cell that is complete can be judged."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console

from fedapp.config import ConfigError
from fedapp.sweeps.point import PlannedRun
from fedapp.sweeps.runner import run_missing, worker_pool
from studies.maps.curves import FILE, MapCurve, collected, metric_in, read_curves, write_curves
from studies.maps.plan import MapPlan, Spot
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
        kept = metric_in(folder / FILE)
        self.curves, self.versions = read_curves(folder / FILE)
        if self.curves and kept != plan.metric:
            name = f"curves-{kept}.parquet"  # the runs that it is from may be gone
            self._say(
                f"{FILE} has {kept}, not {plan.metric}: it is kept as {name}, and made anew from what {RUNS} holds"
            )
            (folder / FILE).replace(folder / name)
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
        planned = [*self._tuning(plan.spots), *self._judged(plan.spots)]
        self._collect(planned)
        for each in planned:
            if each.removed and each.key not in self.curves:
                removed = ", ".join(f"{key} = {value!r}" for key, value in each.removed.items())
                raise ConfigError(
                    f"methods.{each.labels['method']}: {removed}: is no key any more, so that runs with it can't be "
                    "made; leave the method out"
                )
        with worker_pool(self.jobs) if self.jobs else contextlib.nullcontext() as self._workers:
            self._say(self._outlook())
            for at, spot in enumerate(plan.spots, 1):
                where = f"cell {at} of {len(plan.spots)}: {spot.problem}, {plan.across.name} {spot.across}, "
                self._say(f"{where}{plan.upwards.name} {spot.upwards}")
                while self._run(self._tuning([spot])):  # what is wanted next follows from these
                    pass
                self._run(self._judged([spot]))
                if self._left <= 0:
                    self._say(f"the time is over: {self._outlook()}")
                    return

    @property
    def _left(self) -> float:
        """Return the minutes in which runs may still be started."""
        return (self.end - time.monotonic()) / 60

    def _tuning(self, spots: Sequence[Spot]) -> list[PlannedRun]:
        """Return the tuning runs in some cells that the searches have got to."""
        return [
            self.plan.run(spot, method, candidate, seed)
            for spot in spots
            for method in self.plan.methods_of(spot)
            for candidate, seed in tune(self.plan, spot, method, self.curves).wanted
        ]

    def _judged(self, spots: Sequence[Spot]) -> list[PlannedRun]:
        """Return the judged runs in some cells of the methods that have been tuned."""
        return [
            self.plan.run(spot, method, best, seed)
            for spot in spots
            for method in self.plan.methods_of(spot)
            if (best := tune(self.plan, spot, method, self.curves).best) is not None
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

    def _outlook(self) -> str:
        """Say how many cells are complete, and how long the others take as far as is known."""
        plan, known, minutes, done = self.plan, _usual_seconds(self.curves), 0.0, 0
        for spot in plan.spots:
            left = {method: self._left_of(spot, method) for method in plan.methods_of(spot)}
            done += not any(left.values())
            minutes += sum(
                number * _expected(known, {**spot._asdict(), "method": method}) / 60
                for method, number in left.items()
                if number
            )
        hours = minutes / 60 / max(self.jobs, 1)
        about = f", about {hours:.1f} hours with --jobs {self.jobs}" if math.isfinite(hours) else ""
        return f"{done} of {len(plan.spots)} cells are complete, {len(self.curves)} runs{about}"

    def _left_of(self, spot: Spot, method: str) -> int:
        """Return how many runs of a method in a cell aren't there: about as many, before its search has ended."""
        plan = self.plan
        tuning = tune(plan, spot, method, self.curves)
        if tuning.wanted:
            tried = len(candidates(plan, spot.problem, method))
            halved: int = sum(math.ceil(tried / 2**at) for at in range(len(plan.tuning.seeds)))
            return halved + len(plan.seeds)
        if tuning.best is None:
            return 0
        return sum(plan.run(spot, method, tuning.best, seed).key not in self.curves for seed in plan.seeds)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


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
