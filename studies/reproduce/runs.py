"""Finished runs: their curves, and the planned runs they belong to."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.config import ConfigError, RunConfig, Value
from fedapp.report.series import POINTS, Array, on_one_grid
from fedapp.sweeps.point import DIVERGED, PlannedRun

# The last part of a run over which a noisy curve is averaged, as Fraboni et al. 2023 do (section 5.2.2).
TAIL = 0.05
_SLACK = 1e-9  # tolerance for rounding of a share of evaluations

# Columns of a run beside its metrics, and columns that may hold the federated loss, the preferred one first.
KEPT = ("aggregation", "time")
OBJECTIVE = ("federated-loss", "client-loss")


@dataclass(frozen=True)
class Curves:
    """The curves and numbers that are kept of a run.

    Attributes
    ----------
    name : str
        `PlannedRun.name`.
    columns : mapping of str to array (evaluations,)
        Every scalar metric, ``aggregation`` and ``time`` among them; NaN where it is missing or not finite.
    facts : mapping
        The numbers of summary.json; ``engine``, ``versions``, ``date``, ``machine``; ``evaluations``, their
        number.
    """

    name: str
    columns: Mapping[str, Array]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A point of the grid and its run; ``folder`` is where the run's folder is, if it is still there."""

    planned: PlannedRun
    curves: Curves
    folder: Path | None = None

    def __getitem__(self, axis: str) -> Value:
        """Return the run's label on an axis of the grid.

        Raises
        ------
        ConfigError
            If there is no such axis.
        """
        if axis not in self.planned.labels:
            axes = ", ".join(self.planned.labels) or "none"
            raise ConfigError(f"grid.{axis}: this report needs an axis of that name; there are {axes}")
        return self.planned.labels[axis]

    @property
    def config(self) -> RunConfig:
        """The run config, as planned."""
        return self.planned.config

    @property
    def facts(self) -> Mapping[str, Any]:
        """`Curves.facts`."""
        return self.curves.facts

    @property
    def exploded(self) -> bool:
        """Whether it diverged before its end, and has no metrics (`studies.reproduce.store.read_folder`)."""
        return self.facts.get("status") == DIVERGED and not self.facts.get("complete", True)

    def column(self, key: str) -> Array:
        """Return one metric of every evaluation; NaN where it is missing or not finite.

        ``objective`` is the federated loss, however the strategy's evaluation calls it.
        """
        if key == "objective":
            federated, of_clients = map(self.column, OBJECTIVE)
            return np.where(np.isnan(federated), of_clients, federated)
        columns = self.curves.columns
        return columns[key] if key in columns else np.full(len(columns["time"]), np.nan)

    def final(self, key: str) -> float:
        """Return a metric of the last evaluation."""
        return float(self.column(key)[-1])

    def tail(self, key: str, share: float = TAIL) -> Array:
        """Return a metric over the last part of the evaluations after the start, at least one: 5 % of 200 are ten."""
        count = math.ceil(share * (self.facts["evaluations"] - 1) - _SLACK)
        return self.column(key)[-max(1, count) :]

    def rounds_within(self, threshold: float) -> float:
        """Return `rounds_to`; if accuracy never exceeds ``threshold``, one more than the run has, or was to have."""
        rounds = self.rounds_to(threshold)
        if math.isfinite(rounds):
            return rounds
        # A run that exploded ended early: its last round would make it look fast.
        return 1 + (self.config.num_server_rounds if self.exploded else self.final("aggregation"))

    def rounds_to(self, threshold: float) -> float:
        """Return the first aggregation after which the accuracy exceeds ``threshold``; NaN without one."""
        return self.at_accuracy(threshold, self.column("aggregation"))

    def at_accuracy(self, threshold: float, values: Array) -> float:
        """Return the value (evaluations,) at the first accuracy above ``threshold``; NaN without one."""
        reached = np.flatnonzero(self.column("accuracy") > threshold)
        return float(values[reached[0]]) if reached.size else math.nan


class Runs(Sequence[Run]):
    """Runs of a plan, in the order of its grid."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = list(runs)

    def __getitem__(self, index: Any) -> Any:
        """Return a run, or a slice of them."""
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self._runs)

    def where(self, **labels: Value | Sequence[Value]) -> "Runs":
        """Return the runs with these labels, or one of a list; an axis ``local-steps`` is written ``local_steps``."""
        return Runs(run for run in self if has_labels(run.planned, labels))

    def labels(self, axis: str) -> list[Any]:
        """Return the labels that occur on an axis, in the order of the grid."""
        return list(dict.fromkeys(run[axis] for run in self))

    def values(self, key: str) -> list[float]:
        """Return the final value of a metric, one per run."""
        return [run.final(key) for run in self]

    def tails(self, key: str) -> list[float]:
        """Return the mean of a metric over the last part of each run, one per run."""
        return [float(run.tail(key).mean()) for run in self]

    def band(self, key: str, x: str = "time") -> tuple[Array, Array, Array]:
        """Return x, and mean and deviation (n − 1) over runs of ``key`` as a step function of x, each (points,)."""
        grid, curves = self.curves(key, x)
        spread = curves.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros_like(grid)
        return grid, curves.mean(axis=0), spread

    def curves(self, key: str, x: str = "time", points: int = POINTS) -> tuple[Array, Array]:
        """Return x (points,), up to where the first run ends, and ``key`` of every run there, (runs, points).

        The points are those of the runs if all have the same, as over rounds; evenly spaced ones otherwise.
        """
        return on_one_grid([run.column(x) for run in self], [run.column(key) for run in self], points)


def has_labels(planned: PlannedRun, labels: Mapping[str, Value | Sequence[Value]]) -> bool:
    """Tell whether a point of the grid has these labels, as `Runs.where` takes them."""
    for axis, wanted in labels.items():
        label = planned.labels.get(axis.replace("_", "-"))
        if label not in wanted if isinstance(wanted, list | tuple) else label != wanted:
            return False
    return True


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(values))))


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values, and no warning."""
    return float(np.mean(values)) if len(values) else float("nan")


def is_lower(low: Sequence[float], high: Sequence[float]) -> bool | None:
    """Tell whether one value is below the other in every seed; ``None`` where seeds disagree.

    A value that isn't finite, of a loss that diverged or a threshold that wasn't reached, is above all others.
    """
    pairs = [
        [value if math.isfinite(value) else math.inf for value in pair]
        for pair in zip(low, high, strict=True)
    ]
    below = {one < other for one, other in pairs}
    return None if len(below) != 1 or [math.inf, math.inf] in pairs else below.pop()


def decide(
    cells: Iterable[Sequence[float]], holds: Callable[[float], bool], refuted: Callable[[float], bool]
) -> bool | None:
    """Tell whether something holds for every value of every cell, which has one per seed.

    False if in one cell every value refutes it; ``None`` if neither, and without values.
    """
    every = [list(cell) for cell in cells]
    if any(cell and all(map(refuted, cell)) for cell in every):
        return False
    return True if any(every) and all(holds(value) for cell in every for value in cell) else None


def in_all(facts: Iterable[bool | None]) -> bool | None:
    """Return False if a fact is False, True if all are True, None if a fact is None or there are none."""
    known = list(facts)
    return False if False in known else None if None in known or not known else True
