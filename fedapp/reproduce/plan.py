"""An experiment's file: which runs, for which claims, and who reports on them."""

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedapp.config import ConfigError, RunConfig, Value, defaults
from fedapp.config.options import repeated_key

# Datasets that are read from --data-path; the others come with the app.
STORED = ("mnist", "cifar10", "cifar100", "femnist", "femnist-digits", "shakespeare")

# Keys that say where and how a run is recorded or computed, not what it computes.
PLACES = (
    "data-path", "results-dir", "run-name", "server-device", "client-device", "client-threads", "tracker",
    "checkpoint-every", "resume",
)  # fmt: skip

# Most runs are too short to be worth a checkpoint; an experiment with long ones says otherwise.
NO_CHECKPOINTS: dict[str, Value] = {"checkpoint-every": 0}

NUM_CLIENTS = "num-clients"
LABEL = "label"

Axis = list[Value | dict[str, Value]]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quick(_Strict):
    """What ``--quick`` changes: ``base`` wins over all else, an axis of ``grid`` takes the place of its namesake."""

    note: str
    base: dict[str, Value] = Field(default_factory=dict)
    grid: dict[str, Axis] = Field(default_factory=dict)


class Plan(_Strict):
    """The content of an experiment's TOML file.

    Attributes
    ----------
    title, source : str
        What it reproduces, and where that is published.
    report : str
        ``module:function`` of `fedapp.reproduce` that reports on the runs; or, for a study, ``module``.
    claims : dict
        Id and text of the published claims that are checked.
    base : dict
        Keys of the run config, and ``num-clients``, of all runs.
    grid : dict
        Axes; a run for each combination, the last axis fastest. A value of an axis is a value of the run-config key
        of that name, or a table with a ``label`` that sets several keys.
    """

    title: str
    source: str
    report: str
    quick: Quick
    claims: dict[str, str] = Field(default_factory=dict)
    base: dict[str, Value] = Field(default_factory=dict)
    grid: dict[str, Axis] = Field(default_factory=dict)

    @property
    def is_study(self) -> bool:
        """Whether the report needs no runs."""
        return ":" not in self.report

    def runs(self, *, quick: bool = False, data_path: str = "") -> "list[PlannedRun]":
        """Return every run, checked.

        Raises
        ------
        ConfigError
            If a run's keys or values aren't those of the run config.
        """
        grid = {**self.grid, **(self.quick.grid if quick else {})}
        planned = []
        for point in itertools.product(*grid.values()):
            values, labels = {**NO_CHECKPOINTS, **self.base}, {}
            for axis, choice in zip(grid, point, strict=True):
                settings = dict(choice) if isinstance(choice, dict) else {axis: choice}
                labels[axis] = settings.pop(LABEL) if isinstance(choice, dict) else choice
                values |= settings
            values |= self.quick.base if quick else {}
            num_clients = values.pop(NUM_CLIENTS, 0)
            if not isinstance(num_clients, int) or num_clients < 1:
                raise ConfigError(f"{NUM_CLIENTS} = {num_clients!r}: must be a whole number >= 1")
            if values.get("dataset", defaults()["dataset"]) in STORED:
                values["data-path"] = data_path
            planned.append(PlannedRun(labels, RunConfig.load(values), num_clients))
        return planned


@dataclass(frozen=True)
class PlannedRun:
    """One point of the grid: its value on each axis, its config, its number of clients."""

    labels: Mapping[str, Value]
    config: RunConfig
    num_clients: int

    @property
    def name(self) -> str:
        """Name of the run's folder: readable, and a hash of all that makes its result.

        Keys at their default don't enter, so that a run is found again when the app has learnt new keys.
        """
        content = {
            key: value
            for key, value in self.config.flat().items()
            if key not in PLACES and value != defaults()[key]
        }
        text = json.dumps({**content, NUM_CLIENTS: self.num_clients}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        parts = [
            f"{axis}-{label}" if not isinstance(label, str) else label for axis, label in self.labels.items()
        ]
        return re.sub(r"[^A-Za-z0-9.-]+", "-", "_".join(parts)).strip(".-")[:100] + "-" + digest


def folder_of_plans() -> Path:
    """Return the folder with the experiments' files, beside the package."""
    return Path(__file__).parents[2] / "experiments"


def plan_names() -> Iterator[str]:
    """Yield the names of all experiments, in order."""
    return (path.stem for path in sorted(folder_of_plans().glob("*.toml")))


def read_plan(name: str) -> Plan:
    """Read an experiment by its name, or from a TOML file.

    Raises
    ------
    ConfigError
        If there is none, or it isn't as it should be.
    """
    path = Path(name).expanduser() if name.endswith(".toml") else folder_of_plans() / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"NAME = {name!r}: allowed are {', '.join(plan_names())}, or a TOML file")
    text = ""
    try:
        text = path.read_text("utf-8")
        return Plan.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {repeated_key(text.splitlines()) or f'not TOML ({error})'}") from None
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"{path}: " + "; ".join(lines)) from None


def values_of(plan: Plan, axis: str, *, quick: bool) -> list[Any]:
    """Return the labels along an axis, in the order of the file."""
    choices = (plan.quick.grid if quick else {}).get(axis, plan.grid.get(axis, []))
    return [choice[LABEL] if isinstance(choice, dict) else choice for choice in choices]
