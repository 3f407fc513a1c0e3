"""One point of a grid: a planned run, its name, and the folder that it has or will have."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fedapp.config import ConfigError, RunConfig, Value, defaults
from fedapp.config.options import SimulationConfig
from fedapp.data import DataError
from fedapp.data.loading import reads_files
from fedapp.federation import dataset_of, local_folders, natural_clients
from fedapp.own import OwnPartError, sources_of
from fedapp.report.differences import DATA_PATH, PLACES, described, has_own_data
from fedapp.report.files import read_summary

NUM_CLIENTS, LABEL = "num-clients", "label"
SYNTHETIC = "synthetic"  # generated, or with a data-path the authors' files

Axis = list[Value | dict[str, Value]]

# Values that a simulation puts into config.toml in place of a default.
_RESOLVED: Mapping[str, Value] = {"clock": "virtual"}
# Statuses of a run; one that finished or diverged would end alike if it were repeated.
FINISHED, DIVERGED, INTERRUPTED = "finished", "diverged", "interrupted"


@dataclass(frozen=True)
class PlannedRun:
    """One point of the grid.

    Attributes
    ----------
    labels : mapping
        Its value on each axis.
    made_as : str
        The key by which the run was made, if it is on record; empty: the key by the present sources.
    removed : mapping
        Keys that the run config no longer has: a run with such a key can be found, and not made.
    data_by_name : bool
        Whether the dataset's name says which data these are, wherever they lie, as of published data.
    """

    labels: Mapping[str, Value]
    config: RunConfig
    num_clients: int
    made_as: str = ""
    removed: Mapping[str, Value] = field(default_factory=dict)
    data_by_name: bool = False

    @classmethod
    def of(cls, labels: Mapping[str, Value], values: Mapping[str, Value]) -> "PlannedRun":
        """Check the values of a point, of which ``num-clients`` has the default of a single run.

        Raises
        ------
        ConfigError
            If they aren't those of the run config.
        """
        config = dict(values)
        num_clients = config.pop(NUM_CLIENTS, None)
        if num_clients is None:
            return cls(labels, checked := RunConfig.load(config), _usual_clients(checked))
        if not isinstance(num_clients, int) or num_clients < 1:
            raise ConfigError(f"{NUM_CLIENTS} = {num_clients!r}: must be a whole number >= 1")
        return cls(labels, RunConfig.load(config), num_clients)

    @cached_property
    def key(self) -> str:
        """A hash of all that decides the run's result: points of a grid with equal keys are one run.

        Keys at their default don't enter, so that a run is found again when the app has learnt new keys.
        """
        if self.made_as:
            return self.made_as
        content = {
            key: value
            for key, value in self.config.flat().items()
            if key not in PLACES and value not in (defaults().get(key), _RESOLVED.get(key))
        }
        content |= {**self._own_parts(), **self.removed}
        text = json.dumps({**content, NUM_CLIENTS: self.num_clients}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def _own_parts(self) -> dict[str, str]:
        """Return digests of the user's data and sources, and paths: what decides a result beside the config."""
        found: dict[str, str] = {}
        if has_own_data(self.config.dataset) and not self.data_by_name:
            places = local_folders(self.config)
            found = {key.replace("_", "-"): place for key, place in places.items() if place}
        if reads_files(self.config.dataset):
            with suppress(DataError, OwnPartError):  # the run itself says so
                found["data"] = dataset_of(self.config, self.num_clients).digest
        if self.config.dataset == SYNTHETIC and not self.config.data_path:
            found[DATA_PATH] = ""  # generated: other data than the authors' files
        sources = sources_of(self.config.flat())
        return {**found, **{f"source of {key}": digests for key, digests in sources.items()}}

    @property
    def title(self) -> str:
        """Name of the run in tables and messages: ``fedfix lr=0.03 seed=0``."""
        return name_of(self.labels)

    @property
    def name(self) -> str:
        """Name of the run's folder: readable, then its key."""
        parts = [
            f"{axis}-{label}" if not isinstance(label, str) else label for axis, label in self.labels.items()
        ]
        text = re.sub(r"[^A-Za-z0-9.-]+", "-", "_".join(parts)).strip(".-")[:100]
        return f"{text or 'run'}-{self.key}"


def _usual_clients(config: RunConfig) -> int:
    """Return the number of clients that a run has by default."""
    with suppress(DataError, OwnPartError):  # the run itself says so
        if number := natural_clients(config):
            return number
    return SimulationConfig().num_supernodes


def name_of(labels: Mapping[str, object]) -> str:
    """Return what a point or a cell is called: its labels, with the axis where a label is a number."""
    shown = [
        each if isinstance(each, str) else described({axis: each}, [axis]) for axis, each in labels.items()
    ]
    return " ".join(map(str, shown)) or "all runs"


def points(grid: Mapping[str, Axis]) -> Iterator[tuple[dict[str, Value], dict[str, Value]]]:
    """Yield the labels and the settings of every combination of a grid's axes, the last axis fastest."""
    for point in itertools.product(*grid.values()):
        labels: dict[str, Value] = {}
        settings: dict[str, Value] = {}
        for axis, choice in zip(grid, point, strict=True):
            own = dict(choice) if isinstance(choice, dict) else {axis: choice}
            labels[axis] = own.pop(LABEL) if isinstance(choice, dict) else choice
            settings |= own
        yield labels, settings


def labels_along(axis: Sequence[Value | dict[str, Value]]) -> list[Value]:
    """Return the labels along an axis, in the order of the file."""
    return [choice[LABEL] if isinstance(choice, dict) else choice for choice in axis]


def key_of(name: str) -> str:
    """Return the key at the end of a run's name."""
    return name.rpartition("-")[2]


def folder_of(planned: PlannedRun, runs: Path) -> Path:
    """Return a run's folder: one that ends in its key, whatever it was called by, or one with its name."""
    return next(iter(sorted(runs.glob(f"*-{planned.key}"))), runs / planned.name)


def is_finished(folder: Path) -> bool:
    """Tell whether the run in a folder came to its end, also one that diverged: it would do so again."""
    return read_summary(folder).get("status") in (FINISHED, DIVERGED)


def unfinished(planned: Sequence[PlannedRun], runs: Path) -> list[PlannedRun]:
    """Return the planned runs that didn't come to their end; runs with equal keys are one."""
    every = {each.key: each for each in planned}.values()
    return [each for each in every if not is_finished(folder_of(each, runs))]
