"""Finished runs, read back from their folders."""

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp.config import Value
from fedapp.report import as_number, read_metrics
from fedapp.reproduce.plan import PlannedRun

Array = NDArray[np.float64]

# The last part of a run over which a noisy curve is averaged, as 002 does (section 5.2.2).
TAIL = 0.05

POINTS = 300  # of a curve over all runs


@dataclass(frozen=True)
class Run:
    """A run of the plan and its folder."""

    planned: PlannedRun
    path: Path

    def __getitem__(self, axis: str) -> Value:
        """Return the run's label on an axis of the grid."""
        return self.planned.labels[axis]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Content of summary.json; empty where there is none that can be read."""
        try:
            content: dict[str, Any] = json.loads((self.path / "summary.json").read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return content

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary.get("status") == "finished"

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Every evaluation, oldest first."""
        return read_metrics(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.toml: the resolved config, the number of clients, versions."""
        return tomllib.loads((self.path / "config.toml").read_text("utf-8"))

    def column(self, key: str) -> Array:
        """Return one metric of every evaluation; NaN where it is missing or not finite.

        ``objective`` is the federated loss, however the strategy's evaluation calls it. ``hardware-loss`` is 002's
        surrogate objective for identical weights, Σ q_i f_i with q_i ∝ 1/τ_i, whatever weights the run has; both
        have their ``-std`` over clients.
        """
        if key.startswith("hardware-loss"):
            means, spreads = zip(
                *(_by_hardware(record.get("clients", {})) for record in self.metrics), strict=True
            )
            return np.array(spreads if key.endswith("-std") else means)
        if key == "objective":
            federated = self.column("federated-loss")
            return np.where(np.isnan(federated), self.column("client-loss"), federated)
        return np.array([as_number(record.get(key)) for record in self.metrics])

    def final(self, key: str) -> float:
        """Return a metric of the last evaluation."""
        return float(self.column(key)[-1])

    def tail(self, key: str, share: float = TAIL) -> Array:
        """Return a metric over the last part of the run's evaluations, at least one."""
        values = self.column(key)
        return values[-max(1, math.ceil(share * len(values))) :]

    def rounds_to(self, threshold: float, key: str = "accuracy") -> float:
        """Return the first aggregation after which ``key`` exceeds ``threshold``; NaN if none does."""
        reached = np.flatnonzero(self.column(key) > threshold)
        return float(self.column("aggregation")[reached[0]]) if reached.size else float("nan")


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

    def where(self, **labels: Value) -> "Runs":
        """Return the runs with these labels; an axis ``local-steps`` is written ``local_steps``."""
        wanted = {axis.replace("_", "-"): label for axis, label in labels.items()}
        return Runs(
            run
            for run in self
            if all(run.planned.labels.get(axis) == label for axis, label in wanted.items())
        )

    def labels(self, axis: str) -> list[Any]:
        """Return the labels that occur on an axis, in the order of the grid."""
        return list(dict.fromkeys(run[axis] for run in self))

    def values(self, key: str) -> list[float]:
        """Return the final value of a metric, one per run."""
        return [run.final(key) for run in self]

    def tails(self, key: str) -> list[float]:
        """Return the mean over the last part of each run of a metric, one per run."""
        return [float(run.tail(key).mean()) for run in self]

    def band(self, key: str, x: str = "time") -> tuple[Array, Array, Array]:
        """Return x, and mean and standard deviation over runs of ``key`` as a step function of x, each (points,)."""
        grid, curves = self.curves(key, x)
        return grid, curves.mean(axis=0), curves.std(axis=0)

    def curves(self, key: str, x: str = "time", points: int = POINTS) -> tuple[Array, Array]:
        """Return x (points,), up to where the first run ends, and ``key`` of every run there, (runs, points)."""
        ends = [float(np.nanmax(run.column(x))) for run in self]
        grid = np.linspace(0, min(ends), points)
        return grid, np.stack([_steps(grid, run.column(x), run.column(key)) for run in self])


def _by_hardware(clients: dict[str, list[float]]) -> tuple[float, float]:
    """Mean and standard deviation of the clients' losses, weighted by how often each answers."""
    if not {"loss", "task-time"} <= clients.keys():  # the start has no times
        return math.nan, math.nan
    losses, share = np.array(clients["loss"], dtype=np.float64), 1 / np.array(clients["task-time"])
    share /= share.sum()
    average = float(share @ losses)
    return average, float(share @ (losses - average) ** 2) ** 0.5


def _steps(grid: Array, x: Array, y: Array) -> Array:
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        return np.full(len(grid), np.nan)
    x, y = x[known], y[known]
    return np.asarray(y[np.clip(np.searchsorted(x, grid, side="right") - 1, 0, None)])


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing, without a warning."""
    return float(np.mean(values)) if len(values) else float("nan")
