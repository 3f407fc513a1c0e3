"""The best value of an axis for each cell, found on seeds of their own."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedapp.config import ConfigError, Value
from fedapp.data import DataError
from fedapp.federation import dataset_of, division_of, partition_of, source_of
from fedapp.own import OwnPartError
from fedapp.own.metrics import with_directions
from fedapp.report.cells import Cell, equal_time
from fedapp.report.differences import has_own_data
from fedapp.report.files import LOSS, measured_by, stated_directions
from fedapp.report.recorded import RecordedRun
from fedapp.report.verdict.doubts import unequal_tries
from fedapp.sweeps.plan import METRICS, SweepPlan
from fedapp.sweeps.point import FINISHED, PlannedRun, folder_of
from strategies.flower.higher_is_better import higher_is_better, unknown_direction

# How a metric's direction is stated for a sweep.
HOW_STATED = (
    "by = 'min:NAME' or 'max:NAME' states it, as do metrics = 'min:module:name' and the function's attribute "
    "higher_is_better"
)

Setting = tuple[Value, ...]


@dataclass(frozen=True)
class Pick:
    """The values that were picked for a cell.

    Attributes
    ----------
    cell : tuple
        The cell's labels, in the order of `SweepPlan.cell_axes`.
    value : tuple, optional
        Labels on the tuned axes, in the order of `SweepPlan.tune`; None if no run came to its end.
    scores : mapping
        Mean of the metric over the tuning seeds; NaN where a run failed or diverged.
    at_edge : list of str
        Tuned axes whose lowest or highest number was picked: a better value may be beyond.
    time : float, optional
        The time at which the values were compared; None for the end of their runs.
    """

    cell: Setting
    value: Setting | None
    scores: Mapping[Setting, float]
    at_edge: Sequence[str] = ()
    time: float | None = None


def pick(plan: SweepPlan, planned: Sequence[PlannedRun], runs: Path, by: str) -> dict[Setting, Pick]:
    """Pick the best values of the tuned axes for each cell, from its runs on the tuning seeds.

    The values of a method without rounds are compared at equal time, as `equal_time` says. A value with a run that
    failed or diverged is none to pick.

    Raises
    ------
    ConfigError
        If it isn't known whether a lower or a higher value is better.
    """
    named = (RecordedRun(folder_of(each, runs)).config.get(METRICS, "") for each in planned)
    higher = _known_direction(plan, by, stated_directions(*named))
    tried: dict[Setting, dict[Setting, list[RecordedRun]]] = {}
    for each in planned:
        cell, tuned = setting_of(each, plan.cell_axes), setting_of(each, plan.tune)
        tried.setdefault(cell, {}).setdefault(tuned, []).append(RecordedRun(folder_of(each, runs)))
    return {cell: _best(plan, cell, *_scores(found, by), higher=higher) for cell, found in tried.items()}


def check_direction(plan: SweepPlan, planned: Sequence[PlannedRun]) -> None:
    """Refuse to tune by a metric of which it isn't known whether a lower or a higher value is better.

    Raises
    ------
    ConfigError, OwnPartError
    """
    for names in dict.fromkeys(each.config.metrics for each in planned):
        by = plan.metric or next(iter(measured_by(names)[1:]), LOSS)
        _known_direction(plan, by, stated_directions(with_directions(names)))


def check_tested_rows(plan: SweepPlan, planned: Sequence[PlannedRun]) -> None:
    """Refuse to tune what changes the rows that runs are tested on: a better score may come of easier rows.

    Raises
    ------
    ConfigError
    """
    first: dict[Setting, PlannedRun] = {}
    for each in planned:
        other = first.setdefault((*setting_of(each, plan.cell_axes), each.config.seed), each)
        with suppress(DataError, OwnPartError):  # the run itself says so
            if not _tested_alike(other, each):
                named = (
                    " ".join(f"{axis}={run.labels[axis]}" for axis in plan.tune) for run in (other, each)
                )
                raise ConfigError(
                    f"tune = {', '.join(plan.tune)}: {' and '.join(named)} are tested on different rows, so their "
                    "scores can't be compared; without tune the table has both"
                )


def _tested_alike(one: PlannedRun, other: PlannedRun) -> bool:
    """Return True if two runs are tested on rows of the same data, numbers and targets."""
    both = [(each.config, each.num_clients) for each in (one, other)]
    sources = [source_of(*each) for each in both]
    if sources[0] == sources[1] and division_of(one.config) == division_of(other.config):
        return True
    data = [(each.name, each.data_path if has_own_data(each.name) else "") for each in sources]
    rows = [np.sort(partition_of(*each).test_indices) for each in both]
    if data[0] != data[1] or not np.array_equal(rows[0], rows[1]):
        return False
    targets = [dataset_of(*each).y[rows[0]] for each in both]
    return np.array_equal(targets[0], targets[1])


def _known_direction(plan: SweepPlan, by: str, stated: Mapping[str, bool]) -> bool:
    """Return whether a higher value of the metric by which values are picked is better."""
    higher = higher_is_better(by, {**stated, **plan.stated})
    if higher is None:
        raise ConfigError(f"tune = {', '.join(plan.tune)}: {unknown_direction(by)}; {HOW_STATED}")
    return higher


def _scores(
    tried: Mapping[Setting, Sequence[RecordedRun]], by: str
) -> tuple[dict[Setting, float], float | None]:
    """Return the mean of a metric over the runs of each value, NaN where a run didn't finish; and at which time."""
    cells = [Cell("", [run for run in each if run.status == FINISHED]) for each in tried.values()]
    time = equal_time(cells)
    scores = {
        value: float(np.mean(cell.scores(by, time))) if len(cell.runs) == len(each) else math.nan
        for (value, each), cell in zip(tried.items(), cells, strict=True)
    }
    return scores, time


def tuning_doubts(
    plan: SweepPlan, picks: Mapping[Setting, Pick], tried: Sequence[PlannedRun], runs: Path
) -> list[str]:
    """Return a line for each setting whose best value is at the end of what was tried, and for unequal tries."""
    of_cells: dict[Setting, list[PlannedRun]] = {}
    for each in tried:
        of_cells.setdefault(setting_of(each, plan.cell_axes), []).append(each)
    tries: dict[Setting, set[Setting]] = {}
    for cell, members in of_cells.items():
        # A key at its default isn't among a run's unread keys, so that of another run tells.
        summaries = [RecordedRun(folder_of(each, runs)).summary for each in members]
        unread = {key for summary in summaries for key in summary.get("unread-keys", ())}
        read = [axis for axis in plan.tune if axis not in unread]
        tries[cell] = {setting_of(each, read) for each in members}
    names = {cell: plan.name_of(dict(zip(plan.cell_axes, cell, strict=True))) for cell in tries}
    edges = [
        f"{axis} of {names[chosen.cell]} is best at the end of what was tried; go on beyond it"
        for chosen in picks.values()
        for axis in chosen.at_edge
    ]
    unequal = unequal_tries({names[cell]: len(each) for cell, each in tries.items()})
    return [*edges, unequal] if unequal else edges


def setting_of(planned: PlannedRun, axes: Sequence[str]) -> Setting:
    """Return a run's labels on some axes."""
    return tuple(planned.labels[axis] for axis in axes)


def _best(
    plan: SweepPlan, cell: Setting, scores: Mapping[Setting, float], time: float | None, *, higher: bool
) -> Pick:
    finite = {tuned: score for tuned, score in scores.items() if math.isfinite(score)}
    if not finite:
        return Pick(cell, None, scores)
    sign = -1.0 if higher else 1.0
    value = min(finite, key=lambda tuned: sign * finite[tuned])
    edges = [
        axis
        for axis, label in zip(plan.tune, value, strict=True)
        if (numbers := [each for each in plan.labels(axis) if isinstance(each, int | float)])
        and len(numbers) > 2
        and label in (min(numbers), max(numbers))
    ]
    return Pick(cell, value, scores, edges, time)
