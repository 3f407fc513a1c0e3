"""The best value of an axis for each cell, found on seeds of their own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedapp.config import Value
from fedapp.report.recorded import RecordedRun
from fedapp.sweeps.plan import SweepPlan
from fedapp.sweeps.point import FINISHED, PlannedRun, folder_of
from strategies.flower.higher_is_better import less_is_better

Setting = tuple[Value, ...]


@dataclass(frozen=True)
class Pick:
    """What was picked for a cell.

    Attributes
    ----------
    cell : tuple
        The cell's labels, in the order of `SweepPlan.cell_axes`.
    value : tuple, optional
        Labels on the tuned axes, in the order of `SweepPlan.tune`; None if no run came to its end.
    scores : mapping
        Mean over tuning seeds of what was tuned by; NaN where a run failed or diverged.
    at_edge : list of str
        Tuned axes of numbers whose lowest or highest value it is: a better one may be beyond.
    """

    cell: Setting
    value: Setting | None
    scores: Mapping[Setting, float]
    at_edge: Sequence[str] = ()


def pick(plan: SweepPlan, planned: Sequence[PlannedRun], runs: Path, by: str) -> dict[Setting, Pick]:
    """Pick the best values of the tuned axes for each cell, from its runs on the tuning seeds.

    A value with a run that failed or diverged is none to pick.
    """
    values: dict[Setting, dict[Setting, list[float]]] = {}
    for each in planned:
        cell, tuned = setting_of(each, plan.cell_axes), setting_of(each, plan.tune)
        run = RecordedRun(folder_of(each, runs))
        final = run.final(by) if run.status == FINISHED else math.nan
        values.setdefault(cell, {}).setdefault(tuned, []).append(final)
    return {cell: _best(plan, cell, found, by) for cell, found in values.items()}


def setting_of(planned: PlannedRun, axes: Sequence[str]) -> Setting:
    """Return a run's labels on some axes."""
    return tuple(planned.labels[axis] for axis in axes)


def _best(plan: SweepPlan, cell: Setting, found: Mapping[Setting, Sequence[float]], by: str) -> Pick:
    scores = {tuned: float(np.mean(values)) for tuned, values in found.items()}
    finite = {tuned: score for tuned, score in scores.items() if math.isfinite(score)}
    if not finite:
        return Pick(cell, None, scores)
    sign = 1.0 if less_is_better(by) else -1.0
    value = min(finite, key=lambda tuned: sign * finite[tuned])
    edges = [
        axis
        for axis, label in zip(plan.tune, value, strict=True)
        if (numbers := [each for each in plan.labels(axis) if isinstance(each, int | float)])
        and len(numbers) > 2
        and label in (min(numbers), max(numbers))
    ]
    return Pick(cell, value, scores, edges)
