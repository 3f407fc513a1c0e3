"""A run read back from its folder."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.report import as_number, read_config, read_metrics
from fedapp.report.differences import descriptions, differing, ends_of
from fedapp.report.files import (
    is_of_model,
    keeps_best,
    metrics_among,
    read_summary,
    read_warnings,
    rows_of,
    stated_directions,
)
from fedapp.report.series import Array, steps

# Horizontal axes of a curve: the label, and the columns whose sum is the axis.
AXES = {
    "time": ("virtual time", ("time",)),
    "aggregation": ("aggregations", ("aggregation",)),
    "bytes": ("MB sent, up and down", ("bytes-up", "bytes-down")),
}

UNREADABLE = "unreadable"

# Runs end within this distance of their time budget (`strategies.clock.RESOLUTION`): sums of times are rounded.
_RESOLUTION = 1e-9


def rounded_up(place: float) -> float:
    """Return a place on one of `AXES` as far beyond as rounded sums may be."""
    return place * (1 + _RESOLUTION) + _RESOLUTION


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The content of a run's folder, read at the first access."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run config, and ``num-clients``; {} where config.toml can't be read."""
        content = read_config(self.path)
        content.pop("versions", None)
        return content

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json; {} where it can't be read."""
        return read_summary(self.path)

    @property
    def status(self) -> str:
        """The run's status in summary.json; ``?`` without one."""
        return str(self.summary.get("status", "?"))

    @property
    def reason(self) -> str:
        """Why the run failed or diverged, or can't be read; empty otherwise."""
        return str(self.summary.get("reason", "")) or self._read[1]

    @cached_property
    def warnings(self) -> Sequence[str]:
        """The distinct warnings of its log."""
        return read_warnings(self.path)

    @property
    def standing(self) -> str:
        """Its status; or ``unreadable`` where its evaluations can't be read, so that none is shown."""
        return UNREADABLE if self._read[1] else self.status

    @property
    def columns(self) -> Mapping[str, Array]:
        """Every scalar metric, (evaluations,); NaN where it is missing or not finite."""
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[Mapping[str, Array], str]:
        """The columns; or none, and why they can't be read."""
        try:
            records = read_metrics(self.path)
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError) as error:
            return {}, str(error)
        found = (key for record in records for key, value in record.items() if isinstance(value, Real))
        return {
            key: np.array([as_number(record.get(key)) for record in records], dtype=np.float64)
            for key in dict.fromkeys(found)
        }, ""

    @property
    def clock(self) -> str:
        """The clock of its times: ``virtual`` or ``wall``."""
        return str(self.config.get("clock", "virtual"))

    @property
    def evaluations(self) -> int:
        """Number of evaluations."""
        return max(map(len, self.columns.values()), default=0)

    def column(self, key: str) -> Array:
        """Return one metric of every evaluation, NaN where it is missing."""
        return self.columns.get(key, np.full(self.evaluations, np.nan))

    def along(self, axis: str) -> Array:
        """Return where on one of `AXES` each evaluation is; bytes in MB."""
        total: Array = np.sum([self.column(key) for key in AXES[axis][1]], axis=0)
        return total / 1e6 if axis == "bytes" else total

    @property
    def keeps_best(self) -> bool:
        """Whether the run leaves the model of its best evaluation in place of the last one."""
        return keeps_best(self.config)

    @property
    def rows(self) -> str:
        """The rows on which each client's metrics are measured: ``train`` or ``test``."""
        return rows_of(self.config)

    def final(self, key: str) -> float:
        """Return a metric of the model that the run leaves, or another number of the last evaluation; NaN if missing.

        That model is of the last evaluation; with ``keep = "best"``, of the best one.
        """
        column = self.column(key)
        if not len(column):
            return float("nan")
        kept = np.flatnonzero(self.column("aggregation") == self.summary.get("best-aggregation", -1))
        of_kept = self.keeps_best and kept.size and is_of_model(key, self.config.get("metrics", ""))
        return float(column[kept[0] if of_kept else -1])

    def at(self, axis: str, place: float, key: str) -> float:
        """Return a metric of the last evaluation that is not beyond a place on one of `AXES`, but for rounding."""
        return float(steps(np.array([rounded_up(place)]), self.along(axis), self.column(key))[0])

    def end(self, axis: str) -> float:
        """Return where on one of `AXES` the run's last evaluation is; NaN where none has that."""
        along = self.along(axis)
        finite = along[np.isfinite(along)]
        return float(finite.max()) if finite.size else float("nan")

    def reach(self, axis: str) -> float:
        """Return up to where on one of `AXES` the run's models are known.

        That is the last evaluation; in time, the time budget if it ended the run, as the last model counts until
        the next one, which would have come after the budget.
        """
        end = self.end(axis)
        return max(end, float(self.config["time-budget"])) if axis == "time" and self._spent_budget else end

    @property
    def _spent_budget(self) -> bool:
        """Whether the time budget ended the run, not the number of aggregations or a condition on a metric."""
        planned, made = self.config.get("num-server-rounds", 0), self.summary.get("aggregations", 0)
        has_budget = as_number(self.config.get("time-budget")) > 0
        is_shorter = not planned or made < planned
        return has_budget and self.status == "finished" and not self.summary.get("reason") and is_shorter


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return names of runs beside each other: the values in which they differ, ``fedfix lr=0.03 seed=0``.

    The name of a run whose config equals another's, such as a repetition, also has the end of its folder's path.
    """
    folders = ends_of([str(run.path.resolve()) for run in runs])
    configs = [run.config for run in runs]
    told = descriptions(configs, differing(configs))
    number = Counter(told)
    return [
        name if name and number[name] == 1 else f"{name} ({folder})" if name else folder
        for name, folder in zip(told, folders, strict=True)
    ]


def metrics_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics of the model that runs have: those that the configs name, the usual ones, loss."""
    there = (key for run in runs for key in (*run.columns, *run.summary))
    return metrics_among(there, *(run.config.get("metrics", "") for run in runs))


def directions_of(runs: Sequence[RecordedRun]) -> dict[str, bool]:
    """Return whether a higher value is better, of the metrics of which the runs' configs state it alike."""
    return stated_directions(*(run.config.get("metrics", "") for run in runs))
