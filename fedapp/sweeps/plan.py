"""The plan of a sweep, from a TOML file or a command line: which runs are to be made."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedapp.config import ConfigError, Value, defaults
from fedapp.config.options import repeated_key
from fedapp.report.differences import DATA_PATH, PLACES, has_own_data
from fedapp.report.files import AUTO, may_be_measured, measured_by
from fedapp.sweeps.point import LABEL, SYNTHETIC, Axis, PlannedRun, labels_along, name_of, points
from strategies.flower.higher_is_better import measured_name, split_direction

SEED, METRICS, DATASET = "seed", "metrics", "dataset"
FEW = 3  # most tuning seeds, if the plan gives no number: otherwise as many as are reported

# Keys that the sweep sets for every run.
TAKEN = ("results-dir", "run-name", "resume")

# Columns of tables beside the axes and the metrics; no axis may have such a name.
COLUMNS = ("run", "status", "reason", "aggregation", "time", "runs", "lacking", "picked")


class Strict(BaseModel):
    """A table of a plan, in which unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Grid(Strict):
    """The fields of every plan.

    Attributes
    ----------
    title : str
        Title of the report.
    base : dict
        Keys of the run config, and ``num-clients``, of all runs.
    grid : dict
        Axes; a run for each combination, the last axis fastest. A value of an axis is a value of the run-config key
        of that name, or a table with a ``label`` that sets several keys.
    """

    title: str = ""
    base: dict[str, Value] = Field(default_factory=dict)
    grid: dict[str, Axis] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _axes_have_labelled_values(self) -> Self:
        for axis, choices in self.grid.items():
            if not choices:
                raise ValueError(f"grid.{axis}: has no value")
            for choice in choices:
                if isinstance(choice, dict) and LABEL not in choice:
                    raise ValueError(f"grid.{axis}: {choice} has no {LABEL!r}")
            labels = labels_along(choices)
            if twice := [each for each in labels if labels.count(each) > 1]:
                raise ValueError(f"grid.{axis}: {twice[0]!r} is there twice")
        return self

    def labels(self, axis: str) -> list[Any]:
        """Return the labels along an axis, in the order of the file."""
        return labels_along(self.grid.get(axis, []))


class SweepPlan(Grid):
    """The plan of ``fedapp sweep``.

    Attributes
    ----------
    tune : list of str
        Axes of which each cell gets its best value, found on other seeds than those that are reported.
    by : str
        The metric that says what is best, at a run's end, also as ``min:NAME`` or ``max:NAME``; empty: the first of
        the runs' metrics, or loss where there is none.
    tuning_seeds : int
        Number of seeds for tuning, which follow the largest reported seed; 0: as many as are reported, and three at
        most. ``tuning-seeds`` in a file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    tune: list[str] = Field(default_factory=list)
    by: str = ""
    tuning_seeds: int = Field(0, ge=0, alias="tuning-seeds")

    @model_validator(mode="after")
    def _is_sensible(self) -> Self:
        for place, keys in (
            ("base", self.base),
            *((f"grid.{axis}", key) for axis, key in self._set_by_axes()),
        ):
            if taken := [key for key in keys if key in TAKEN]:
                raise ValueError(f"{place}: {taken[0]} is the sweep's own: its folder has every run's (-o)")
        if not self.grid:
            raise ValueError("grid: has no axis, such as seed = [0, 1, 2]")
        set_by_axes = {key for _, keys in self._set_by_axes() for key in keys}
        if both := sorted(set_by_axes & self.base.keys()):
            are = "is" if len(both) == 1 else "are"
            raise ValueError(f"{', '.join(both)}: {are} given both for all runs and as an axis")
        if self.metric and not may_be_measured(self.metric, named := self._values(METRICS, AUTO)):
            raise ValueError(f"by: {unmeasured(self.metric, named)}")
        return self

    @model_validator(mode="after")
    def _tuning_is_possible(self) -> Self:
        for axis in self.tune:
            if axis not in self.grid:
                raise ValueError(f"tune: {axis!r} is no axis; there are {', '.join(self.grid)}")
            if axis == SEED:
                raise ValueError("tune: the seed isn't tuned")
        if self.tuning_seeds and not self.tune:
            raise ValueError(
                f"tuning-seeds = {self.tuning_seeds}: nothing is tuned; tune names the axes to tune"
            )
        if self.tune and any(not isinstance(seed, int) for seed in self.seeds):
            raise ValueError("tune: seeds must be whole numbers, without labels")
        return self

    @model_validator(mode="after")
    def _axes_are_apart(self) -> Self:
        """Refuse axes that would show one run as several, tune on a seed that is reported, or hide a column."""
        set_by: dict[str, str] = {}
        for axis, keys in self._set_by_axes():
            if axis in COLUMNS:
                raise ValueError(f"grid.{axis}: tables have another column of that name")
            for key in keys:
                if key in set_by:
                    raise ValueError(f"grid.{axis}: {key} is set by the axis {set_by[key]}, too")
                set_by[key] = axis
            if self.tune and SEED in keys and axis != SEED:
                raise ValueError(f"grid.{axis}: sets the seed, on which tune may not be")
            if keys and len(self.grid[axis]) > 1 and not any(map(self._is_computed, keys)):
                raise ValueError(
                    f"grid.{axis}: {', '.join(keys)} doesn't change what a run computes, so all values are one run"
                )
        return self

    def _is_computed(self, key: str) -> bool:
        """Tell whether a key changes what a run computes: the path of data does that of one's own data."""
        if key != DATA_PATH:
            return key not in PLACES
        datasets = self._values(DATASET, defaults()[DATASET])
        return any(has_own_data(str(each)) or str(each) == SYNTHETIC for each in datasets)

    @property
    def metric(self) -> str:
        """The metric of ``by``, without its direction; empty: the first of the runs' metrics."""
        return split_direction(self.by)[1]

    @property
    def stated(self) -> dict[str, bool]:
        """Whether a higher value of the metric of ``by`` is better, if ``by`` states it."""
        higher = split_direction(self.by)[0]
        return {} if higher is None else {measured_name(self.metric): higher}

    @property
    def seeds(self) -> list[Any]:
        """The seeds that are reported."""
        return self.labels(SEED) or [self.base.get(SEED, 0)]

    @property
    def seeds_to_tune_on(self) -> list[int]:
        """The seeds that values are picked on."""
        first = max(self.seeds) + 1
        return list(range(first, first + (self.tuning_seeds or min(FEW, len(self.seeds)))))

    @property
    def cell_axes(self) -> list[str]:
        """The axes that tell cells from each other: all but the seed and those that are tuned."""
        return [axis for axis in self.grid if axis != SEED and axis not in self.tune]

    @property
    def shown_axes(self) -> list[str]:
        """The axes in names and tables: those with several values, or all if there is none; tuned ones last."""
        axes = [*self.cell_axes, *self.tune]
        return [axis for axis in axes if len(self.grid[axis]) > 1] or axes

    def name_of(self, labels: Mapping[str, object]) -> str:
        """Return a setting's name: its labels on axes with several values, or on all axes if there is none."""
        own = {axis: label for axis, label in labels.items() if axis != SEED}
        return name_of({axis: each for axis, each in own.items() if len(self.grid[axis]) > 1} or own)

    def runs(self, seeds: Sequence[int] | None = None) -> list[PlannedRun]:
        """Return every run, checked; with ``seeds``, on these in place of the plan's.

        Raises
        ------
        ConfigError
            If a run's keys or values aren't those of the run config.
        """
        grid: dict[str, Axis] = self.grid if seeds is None else {**self.grid, SEED: list(seeds)}
        return [PlannedRun.of(labels, {**self.base, **settings}) for labels, settings in points(grid)]

    def _values(self, key: str, default: Value) -> list[Value]:
        """Return the values that runs have for a key."""
        choices = [each for axis in self.grid.values() for each in axis if isinstance(each, dict)]
        given = [*self.grid.get(key, ()), *(each[key] for each in choices if key in each)]
        return [each for each in given if not isinstance(each, dict)] or [self.base.get(key, default)]

    def _set_by_axes(self) -> list[tuple[str, list[str]]]:
        """Return the keys that each axis sets."""
        return [(axis, keys_of(axis, choices)) for axis, choices in self.grid.items()]


def unmeasured(metric: str, named: Iterable[object]) -> str:
    """Say that no run has a metric, and which ones runs have with some values of ``metrics``."""
    allowed = dict.fromkeys(name for each in named for name in measured_by(each))
    return f"{metric!r} is measured in no run; allowed are {', '.join(allowed)}"


def keys_of(axis: str, choices: Axis) -> list[str]:
    """Return the keys that an axis sets."""
    keys = [key for each in choices for key in (each if isinstance(each, dict) else (axis,))]
    return [key for key in dict.fromkeys(keys) if key != LABEL]


AnyPlan = TypeVar("AnyPlan", bound=Strict)


def read_file(path: Path, kind: type[AnyPlan]) -> AnyPlan:
    """Read a plan from a TOML file.

    Raises
    ------
    ConfigError
        If it isn't as it should be.
    """
    text = ""
    try:
        text = path.read_text("utf-8")
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {repeated_key(text.splitlines()) or f'not TOML ({error})'}") from None
    return checked(str(path), content, kind)


def checked(source: str, content: Mapping[str, Any], kind: type[AnyPlan]) -> AnyPlan:
    """Check the content of a plan; ``source`` is what it is called in an error."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        lines = [_line(details) for details in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(lines)) from None


def _line(details: Any) -> str:
    place = ".".join(map(str, details["loc"]))
    return (f"{place}: " if place else "") + str(details["msg"]).removeprefix("Value error, ")
