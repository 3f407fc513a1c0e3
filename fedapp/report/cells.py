"""Runs that differ in their seed alone, as one: mean ± standard deviation, beside others at the same point.

Several runs of one seed, such as a run and its repetition, are one draw: they count as their mean, and the standard
deviation is over distinct seeds.
"""

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from fedapp.report.differences import described, descriptions, differing, values_of
from fedapp.report.files import FAILED, RUNNING
from fedapp.report.recorded import AXES, RecordedRun, directions_of
from fedapp.report.series import Array, on_one_grid, spread_text
from fedapp.report.tested import unlike_runs
from strategies.flower.higher_is_better import higher_is_better

T = TypeVar("T", float, Array)

MOST_WARNINGS = 5  # warnings of a setting that are listed; log.txt has the others

_NUMBER = re.compile(r"\d[\d.e+-]*")

# The statuses of runs whose numbers are shown: runs that came to their end, or go on. Interrupted runs aren't shown.
SHOWN = ("finished", RUNNING, "?")
LOST = frozenset({FAILED, "diverged"})


@dataclass(frozen=True)
class Tuning:
    """The tuning of a sweep's settings.

    Attributes
    ----------
    keys : tuple of str
        The keys that were tuned.
    text : str
        What was tuned, by which metric and on which seeds.
    by : str
        The metric by which the sweep compares settings.
    doubts : tuple of str
        What may spoil the verdict on the settings.
    names : mapping of str to (str, str)
        What the sweep's plan calls the setting of each run, by the name of its folder, and its label in legends.
    """

    keys: tuple[str, ...] = ()
    text: str = ""
    by: str = ""
    doubts: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)


UNTUNED = Tuning()


@dataclass(frozen=True, eq=False)
class Cell:
    """Runs of one setting.

    Attributes
    ----------
    name : str
        The values of keys in which the setting differs from the others.
    runs : sequence of RecordedRun
        The runs that came to their end or go on.
    lacking : sequence of str
        The status of each other run of the setting.
    labels : mapping
        The setting's cells of a table, by column.
    label : str
        Its name in legends, without keys that were tuned; by default ``name``.
    """

    name: str
    runs: Sequence[RecordedRun]
    lacking: Sequence[str] = ()
    labels: Mapping[str, object] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name)

    @cached_property
    def seeds(self) -> list[Hashable]:
        """The distinct seeds of the runs, in their order."""
        return list(dict.fromkeys(map(seed_of, self.runs)))

    @property
    def method(self) -> str:
        """The strategy of the runs; empty without runs."""
        return str(self.runs[0].config.get("strategy", "")) if self.runs else ""

    @property
    def seeds_text(self) -> str:
        """The number of seeds, of runs if more, of other runs by status, and of runs with warnings."""
        runs, seeds = len(self.runs), len(self.seeds)
        text = str(runs) if runs == seeds else f"{runs} runs of {seeds} seed{'s' * (seeds > 1)}"
        if self.lacking:
            ends = (f"{number} {status}" for status, number in Counter(self.lacking).items())
            text = f"{runs} of {runs + len(self.lacking)}: {', '.join(ends)}"
        warned = sum(bool(run.warnings) for run in self.runs)
        return f"{text}, {'!' if warned == runs else f'{warned} !'}" if warned else text

    def finals(self, key: str) -> list[float]:
        """Return the final value of a metric, one per seed."""
        return self._by_seed([run.final(key) for run in self.runs])

    def scores(self, key: str, time: float | None = None) -> list[float]:
        """Return a metric at a time, or its final value where that is None; one value per seed."""
        return self.finals(key) if time is None else self.values_at("time", time, key)

    def values_at(self, axis: str, place: float, key: str) -> list[float]:
        """Return a metric at a place on one of `AXES`, one value per seed."""
        return self._by_seed([run.at(axis, place, key) for run in self.runs])

    def text(self, key: str, time: float | None = None) -> str:
        """Write a metric at a time, or its final value, mean ± standard deviation."""
        return spread_text(self.scores(key, time))

    def text_at(self, axis: str, place: float, key: str) -> str:
        """Write a metric at a place on one of `AXES`, mean ± standard deviation."""
        return spread_text(self.values_at(axis, place, key))

    def band(self, key: str, axis: str) -> tuple[Array, Array, Array]:
        """Return places on one of `AXES`, and a metric's mean and standard deviation there, each (points,)."""
        grid, values = on_one_grid(
            [run.along(axis) for run in self.runs], [run.column(key) for run in self.runs]
        )
        values = np.array(self._by_seed(values))
        return (
            grid,
            values.mean(axis=0),
            values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(grid),
        )

    def _by_seed(self, values: Iterable[T]) -> list[T]:
        """Return the mean of the values of each seed's runs; a seed's only run counts as it is."""
        groups: dict[Hashable, list[T]] = {seed: [] for seed in self.seeds}
        for run, value in zip(self.runs, values, strict=True):
            groups[seed_of(run)].append(value)
        return [each[0] if len(each) == 1 else np.mean(each, axis=0) for each in groups.values()]


def warnings_of(cell: Cell) -> list[str]:
    """Return a line for each warning of a cell's runs and how many of them have it, the most frequent first.

    Warnings that differ in numbers alone are one.
    """
    texts: dict[str, str] = {}
    number: Counter[str] = Counter()
    for run in cell.runs:
        kinds = {_NUMBER.sub("#", text): text for text in run.warnings}
        texts = kinds | texts
        number.update(kinds.keys())
    runs = len(cell.runs)
    lines = [
        f"{cell.name}{f', {count} of {runs} runs' if count < runs else ''}: warning: {texts[kind]}"
        for kind, count in number.most_common(MOST_WARNINGS)
    ]
    more = len(number) - MOST_WARNINGS
    return [*lines, f"{cell.name}: {more} more warnings in log.txt of its runs"] if more > 0 else lines


def seed_of(run: RecordedRun) -> Hashable:
    """Return the seed of a run; its path where its config names none."""
    seed: Hashable = run.config.get("seed", run.path)
    return seed


def cells_of(runs: Iterable[RecordedRun], tuning: Tuning = UNTUNED) -> list[Cell]:
    """Group runs that differ in nothing but their seed; name each group by what tells it from the others.

    A sweep's plan says what its settings are called. Otherwise the groups' labels don't have tuned keys, unless two
    would be called alike.
    """
    every = list(runs)
    keys = [key for key in differing([run.config for run in every]) if key != "seed"]
    groups: dict[Hashable, list[RecordedRun]] = {}
    for run in every:
        same = values_of(run.config, keys) if run.config else run.path  # unreadable: nothing says what it is
        groups.setdefault(same, []).append(run)
    settings = list(groups.values())
    configs = [members[0].config for members in settings]
    names = descriptions(configs, keys)
    labels = descriptions(configs, [key for key in keys if key not in tuning.keys])
    if len(set(labels)) < len(labels) or not all(labels):
        labels = names
    named = [
        tuning.names.get(members[0].path.name, usual)
        for members, usual in zip(settings, zip(names, labels, strict=True), strict=True)
    ]
    return [_cell(name, members, label) for (name, label), members in zip(named, settings, strict=True)]


def _cell(name: str, runs: Sequence[RecordedRun], label: str) -> Cell:
    shown = [run for run in runs if run.evaluations and run.status in SHOWN]
    lacking = [run.standing for run in runs if run not in shown]
    own = name or described(runs[0].config, ["strategy"]) or runs[0].path.name
    return Cell(own, shown, lacking, label=label or own)


def common_end(cells: Iterable[Cell], axis: str) -> float:
    """Return how far on one of `AXES` all runs came; NaN without runs, or if a run has no place there beyond 0."""
    ends = [run.reach(axis) for cell in cells for run in cell.runs]
    return min(ends) if ends and all(math.isfinite(end) and end > 0 for end in ends) else math.nan


def axis_label(axis: str, cells: Iterable[Cell]) -> str:
    """Return what an axis is called, where time may be virtual or real."""
    clocks = {run.clock for cell in cells for run in cell.runs}
    return "seconds" if axis == "time" and clocks == {"wall"} else AXES[axis][0]


def axes_of(cells: Sequence[Cell]) -> dict[str, float]:
    """Return the axes on which all runs can be compared, and how far all of them came there.

    Times of two clocks can't be compared, nor can aggregations where a method without rounds takes part: its
    aggregation has the work of one or a few clients, a round that of all.
    """
    clocks = {run.clock for cell in cells for run in cell.runs}
    compared = {"time": len(clocks) == 1, "aggregation": not any_without_rounds(cells)}
    ends = {axis: common_end(cells, axis) for axis in AXES if compared.get(axis, True)}
    return {axis: end for axis, end in ends.items() if math.isfinite(end)}


def any_without_rounds(cells: Iterable[Cell]) -> bool:
    """Return True if a run is of a method without rounds, which reports contributions."""
    return any("contributions" in run.columns for cell in cells for run in cell.runs)


def clients_text(cells: Iterable[Cell]) -> str:
    """Return how many clients runs have and how their speeds differ in virtual time, where all are alike in that."""
    runs = [run for cell in cells for run in cell.runs]
    numbers = {run.config.get("num-clients") for run in runs}
    parts = [f"{number} clients" for number in numbers if len(numbers) == 1 and number]
    scenarios = {str(run.config.get("time-scenario", "")) for run in runs}
    if len(scenarios) == 1 and {run.clock for run in runs} == {"virtual"} and (scenario := scenarios.pop()):
        parts.append(_speeds_text(scenario))
    return ", ".join(parts)


def _speeds_text(scenario: str) -> str:
    spaced = re.fullmatch(r"F(\d\d?)", scenario)
    if spaced is None:
        return f"task times {scenario}"
    if not int(spaced[1]):
        return "all equally fast"
    return f"the fastest {1 / (1 - int(spaced[1]) / 100):.3g} times as fast as the slowest"


def equal_time(cells: Sequence[Cell]) -> float | None:
    """Return the time up to which all runs came, if that is where runs are compared; None if it is their ends.

    Runs are compared at equal time if a method without rounds is among them and the times that they reached differ
    by more than a hundredth: as many aggregations take such a method less time than rounds. A common time budget is
    reached by all.
    """
    end = axes_of(cells).get("time")
    if end is None or not any_without_rounds(cells):
        return None
    return end if max(run.reach("time") for cell in cells for run in cell.runs) > 1.01 * end else None


def direction_of(cells: Sequence[Cell], key: str, stated: Mapping[str, bool] | None = None) -> bool | None:
    """Return whether a higher value of a metric is better: as ``stated``, by the runs' configs, or by its name."""
    of_runs = directions_of([run for cell in cells for run in cell.runs])
    return higher_is_better(key, {**of_runs, **(stated or {})})


def why_unlike(cells: Sequence[Cell], key: str) -> str:
    """Return why a metric of some settings can't be compared, as `unlike_runs` does; "" if it can."""
    return unlike_runs([cell.runs for cell in cells if cell.runs], key)


def end_text(cells: Iterable[Cell]) -> str:
    """Return what final metrics are of: a run leaves its last model, or with ``keep = "best"`` its best one."""
    keeps = {run.keeps_best for cell in cells for run in cell.runs}
    return "kept model" if keeps == {True} else "at the end" + ", or kept" * (True in keeps)


def best_of(
    cells: Sequence[Cell],
    key: str,
    time: float | None = None,
    stated: Mapping[str, bool] | None = None,
) -> Cell | None:
    """Return the cell with the best mean of a metric at a time, or at the end.

    None if no cell has one, if it isn't known which values are better, or if the cells can't be compared. A cell with
    a run that failed or diverged comes after all others: its mean is over the runs that went well.
    """
    higher = direction_of(cells, key, stated)
    if higher is None or why_unlike(cells, key):
        return None
    sign = -1.0 if higher else 1.0
    scored = [
        (not LOST.isdisjoint(cell.lacking), sign * float(np.mean(cell.scores(key, time))), number)
        for number, cell in enumerate(cells)
        if cell.runs
    ]
    scored = [each for each in scored if math.isfinite(each[1])]
    return cells[min(scored)[2]] if scored else None
