"""An axis of an experiment that is tuned: its best value is found on seeds that aren't judged, cell by cell.

Only the runs at the best value are judged; which runs these are is known once the tuning runs are there.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from pydantic import Field

from fedapp.config import ConfigError, Value
from fedapp.sweeps.plan import SEED, Strict
from fedapp.sweeps.point import Axis, PlannedRun, labels_along
from strategies.flower.higher_is_better import higher_is_better, unknown_direction
from studies.reproduce.runs import KEPT, OBJECTIVE, Curves, Run, Runs, has_labels, mean

Cell = tuple[Value, ...]


class Tuning(Strict):
    """The table ``[tuning]``.

    Attributes
    ----------
    axis : str
        Axis of the grid that is tuned; all its values are tried.
    seeds : list of int
        Seeds of the tuning runs; none of them is a seed of the grid.
    by : str
        The metric that is best at the best value, mean over these seeds: of a loss the lowest over the last 5 % of a
        run; of another metric the highest over the whole run, as where the time to a target is judged.
    of : dict
        Labels on other axes of the runs that are tried; all labels of those axes get the best value of these.
    """

    axis: str
    seeds: list[int] = Field(min_length=1)
    by: str
    of: dict[str, Value] = Field(default_factory=dict)

    def check(self, grid: Mapping[str, Axis]) -> None:
        """Raise ValueError, unless the grid has these axes and labels, and judges other seeds."""
        if self.by != "objective" and higher_is_better(self.by) is None:
            raise ValueError(f"tuning.by: {unknown_direction(self.by)}; a name such as mean-error says it")
        labels = {axis: labels_along(choices) for axis, choices in grid.items()}
        for axis, label in {self.axis: None, **self.of}.items():
            if axis not in labels:
                raise ValueError(f"tuning: {axis!r} is no axis; there are {', '.join(grid)}")
            if label is not None and label not in labels[axis]:
                raise ValueError(f"tuning.of.{axis} = {label!r}: has {', '.join(map(str, labels[axis]))}")
        if both := [seed for seed in self.seeds if seed in labels.get(SEED, [])]:
            raise ValueError(f"tuning.seeds: {both[0]} is judged")

    def tried(self, grid: Mapping[str, Axis]) -> dict[str, Axis]:
        """Return the grid of the runs that are tried."""
        only: dict[str, Axis] = {
            axis: [each for each in grid[axis] if labels_along([each]) == [label]]
            for axis, label in self.of.items()
        }
        return {**grid, **only, SEED: list(self.seeds)}

    def wanted(self, planned: Sequence[PlannedRun], curves: Mapping[str, Curves]) -> list[PlannedRun]:
        """Return the tuning runs, and the runs to judge of each cell whose tuning runs are all there.

        Runs of other cells that were judged before are kept, as they may be the ones to judge.
        """
        tries = [each for each in planned if self._is_tried(each)]
        best = self._best(tries, curves)
        return [
            each
            for each in planned
            if self._is_tried(each)
            or (
                best[cell] == each.labels[self.axis]
                if (cell := self._cell(each)) in best
                else each.key in curves
            )
        ]

    def tries(self, runs: Runs) -> Runs:
        """Return the runs that were tried."""
        return runs.where(seed=self.seeds)

    def _best(self, tries: Sequence[PlannedRun], curves: Mapping[str, Curves]) -> dict[Cell, Value]:
        """Return the best value of each cell whose tuning runs are all there.

        Raises
        ------
        ConfigError
            If none of a cell's runs has the metric.
        """
        cells: dict[Cell, list[PlannedRun]] = {}
        for each in tries:
            cells.setdefault(self._cell(each), []).append(each)
        found: dict[Cell, Value] = {}
        for cell, own in cells.items():
            if all(each.key in curves for each in own):
                runs = Runs(Run(each, curves[each.key]) for each in own)
                self._check_metric(runs)
                found[cell] = min(runs.labels(self.axis), key=partial(self._score, runs))
        return found

    def _check_metric(self, runs: Runs) -> None:
        there = {name for run in runs for name in run.curves.columns}
        if there.isdisjoint(OBJECTIVE if self.by == "objective" else [self.by]):
            raise ConfigError(f"tuning.by = {self.by!r}: the runs have {', '.join(sorted(there - {*KEPT}))}")

    def _score(self, runs: Runs, label: Value) -> float:
        own = [run for run in runs if run[self.axis] == label]
        is_loss = self.by == "objective" or not higher_is_better(self.by)
        score = mean([float((run.tail if is_loss else run.column)(self.by).mean()) for run in own])
        return (score if is_loss else -score) if math.isfinite(score) else math.inf

    def _is_tried(self, planned: PlannedRun) -> bool:
        return has_labels(planned, {SEED: self.seeds})

    def _cell(self, planned: PlannedRun) -> Cell:
        """Return the labels on the axes that tell cells apart."""
        return tuple(
            label for axis, label in planned.labels.items() if axis not in (SEED, self.axis, *self.of)
        )
