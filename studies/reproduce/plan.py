"""An experiment's file: which runs, for which claims, and who reports on them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from fedapp.config import ConfigError, Value, defaults
from fedapp.sweeps.plan import Grid, Strict, read_file
from fedapp.sweeps.point import Axis, PlannedRun, points
from studies.reproduce.runs import Curves
from studies.reproduce.tuning import Tuning

# Datasets that are read from --data-path; the others come with the app.
STORED = ("mnist", "cifar10", "cifar100", "femnist", "femnist-digits", "shakespeare")

DATA_PATH = "data-path"

# Keys of all runs, which ``base`` may override. Most runs are too short for a checkpoint, and the figures of a run,
# which aren't used, take as long as a short run.
OF_ALL: dict[str, Value] = {"checkpoint-every": 0, "figures": False}


class Quick(Strict):
    """The changes of ``--quick``.

    ``base`` wins over all else; an axis of ``grid`` and a number of ``settings`` take the place of their namesakes.
    """

    note: str
    base: dict[str, Value] = Field(default_factory=dict)
    grid: dict[str, Axis] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)


class Reading(Strict):
    """This project's choice where the paper leaves something open, and when the choice was made."""

    text: str
    chosen: str


class Scale(Strict):
    """How much of the source's training a claim needs before a verdict on it means anything.

    Attributes
    ----------
    key : str
        Run-config key that says how long a run trains, as ``time-budget``.
    published : float
        The source's value of the key.
    least : float
        The least share of ``published`` with which a run decides the claim.
    """

    key: str
    published: float = Field(gt=0)
    least: float = Field(0.2, gt=0, le=1)


class Claim(Strict):
    """A part of a published claim that gets a verdict of its own.

    Attributes
    ----------
    text : str
        The claim in words.
    rule : str
        The condition under which the claim holds; ``{name}`` stands for a threshold.
    thresholds : dict
        The numbers, and names of cells of the grid, that the rule rests on: reports have them from here alone.
    basis : str
        ``source``: the source says so; ``reading``: it is this project's reading of the source, which doesn't;
        ``memory``: the source wasn't at hand to be read.
    scale : Scale, optional
        Given where runs may be too short to decide the claim.
    here : str
        Where what was judged is less, or other, than what the source speaks of: stands beside the verdict.
    """

    text: str
    rule: str
    thresholds: dict[str, Any] = Field(default_factory=dict)
    basis: Literal["source", "reading", "memory"] = "source"
    scale: Scale | None = None
    here: str = ""

    @model_validator(mode="after")
    def _rule_can_be_filled_in(self) -> "Claim":
        try:
            self.filled_rule()
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"rule {self.rule!r}: {error!r} is no threshold") from None
        return self

    def filled_rule(self) -> str:
        """Return the rule with its thresholds filled in."""
        rule = self.rule.format(**{name: _shown(value) for name, value in self.thresholds.items()})
        if self.scale is None:
            return rule
        return (
            f"{rule}; not testable where {self.scale.key} is below {self.scale.least:.0%} of the source's "
            f"{self.scale.published:g}"
        )


def _shown(value: Any, between: str = "; ") -> Any:
    """Return a threshold as a rule shows it: a list of names, or of pairs of names, in words."""
    return between.join(str(_shown(each, " with ")) for each in value) if isinstance(value, list) else value


class Plan(Grid):
    """The content of an experiment's TOML file.

    Attributes
    ----------
    title, source : str
        Title of the experiment, and the publication that it reproduces.
    report : str
        ``module:function`` of `studies.reproduce` that reports on the runs; or, for a study, ``module``
        (`studies.reproduce.experiment`).
    readings : list of Reading
        Choices where the paper leaves something open.
    claims : dict
        The parts of the published claims that are judged, by id.
    settings : dict
        All numbers of a study, and those of a report that are no claim's threshold.
    base : dict
        Keys of the run config, and ``num-clients``, of all runs. A ``data-path`` is relative to that of the command.
    grid : dict
        Axes; a run for each combination, the last axis fastest. A value of an axis is a value of the run-config key
        of that name, or a table with a ``label`` that sets several keys.
    tuning : Tuning, optional
        The axis of which the runs to judge have one value only, the best one.
    """

    title: str
    source: str = ""
    report: str
    quick: Quick | None = None
    readings: list[Reading] = Field(default_factory=list)
    claims: dict[str, Claim] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    tuning: Tuning | None = None
    _is_quick: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _tuning_is_possible(self) -> "Plan":
        if self.tuning:
            self.tuning.check(self.grid)
        return self

    @property
    def is_quick(self) -> bool:
        """Whether `quick` has been applied."""
        return self._is_quick

    @property
    def is_study(self) -> bool:
        """Whether the report needs no runs."""
        return ":" not in self.report

    def reads_data(self, data_path: str) -> bool:
        """Tell whether anything is read from ``--data-path``; a study names its data sets in its settings."""
        if self.is_study:
            return any(name in STORED for name in self.settings.get("datasets", ()))
        return any(run.config.data_path for run in self.runs(data_path))

    def as_quick(self) -> "Plan":
        """Return the plan with what ``--quick`` changes.

        Raises
        ------
        ConfigError
            If the file has no table [quick].
        """
        if self.quick is None:
            raise ConfigError(
                f"--quick: the file of {self.title!r} has no [quick], the table of what it changes"
            )
        plan = self.model_copy(
            update={
                "base": {**self.base, **self.quick.base},
                "grid": {**self.grid, **self.quick.grid},
                "settings": {**self.settings, **self.quick.settings},
            }
        )
        plan._is_quick = True
        return plan

    def parts(self, prefix: str) -> list[str]:
        """Return the ids of the claims that begin like this, in the order of the file."""
        return [claim for claim in self.claims if claim == prefix or claim.startswith(f"{prefix}-")]

    def threshold(self, claim: str, name: str) -> Any:
        """Return a threshold of a claim.

        Raises
        ------
        ConfigError
            If the file doesn't have it.
        """
        if claim not in self.claims or name not in self.claims[claim].thresholds:
            raise ConfigError(f"claims.{claim}.thresholds.{name}: missing in the file of {self.title!r}")
        return self.claims[claim].thresholds[name]

    def too_short(self, claim: str) -> str:
        """Say how long the runs behind a claim train, if that is too little to decide it; empty otherwise.

        Only runs of the problems in the claim's thresholds (``problem``, ``problems``) count; all, if it names none.
        """
        scale, thresholds = self.claims[claim].scale, self.claims[claim].thresholds
        if scale is None:
            return ""
        named = {*thresholds.get("problems", ()), *filter(None, [thresholds.get("problem")])}
        lengths = [
            float({**self.base, **settings}[scale.key])
            for labels, settings in points(self.grid)
            if not named or labels.get("problem") in named
        ]
        share = min(lengths) / scale.published
        if share >= scale.least:
            return ""
        return (
            f"{scale.key} is {min(lengths):g}, {share:.0%} of the source's {scale.published:g}; "
            f"{scale.least:.0%} would decide"
        )

    def setting(self, name: str) -> Any:
        """Return a number of ``[settings]``.

        Raises
        ------
        ConfigError
            If the file doesn't have it.
        """
        if name not in self.settings:
            raise ConfigError(f"settings.{name}: missing in the file of {self.title!r}")
        return self.settings[name]

    def runs(self, data_path: str = "", curves: Mapping[str, Curves] | None = None) -> "list[PlannedRun]":
        """Return every run that there may be, checked.

        Parameters
        ----------
        curves : mapping of str to Curves, optional
            The finished runs, by key; if an axis is tuned, only runs that are known to be wanted are returned.

        Raises
        ------
        ConfigError
            If a run's keys or values aren't those of the run config.
        """
        if self.is_study:
            return []
        planned = []
        tried = points(self.tuning.tried(self.grid)) if self.tuning else ()
        for labels, settings in (*tried, *points(self.grid)):
            values = {
                **OF_ALL,
                **self.base,
                **settings,
                **(self.quick.base if self.quick and self.is_quick else {}),
            }
            inside = str(values.get(DATA_PATH, ""))
            if inside or values.get("dataset", defaults()["dataset"]) in STORED:
                values[DATA_PATH] = str(Path(data_path, inside)) if inside else data_path
            # A publication's data are the same wherever they lie.
            planned.append(replace(PlannedRun.of(labels, values), data_by_name=True))
        return self.tuning.wanted(planned, curves) if self.tuning and curves is not None else planned


def folder_of_plans() -> Path:
    """Return the folder with the experiments' files."""
    return Path(__file__).parents[1] / "experiments"


def plan_names() -> Iterator[str]:
    """Yield the names of all experiments, in order; a map (`studies.maps`) is none."""
    return (path.stem for path in sorted(folder_of_plans().glob("*.toml")) if not _is_map(path))


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
    if _is_map(path):
        raise ConfigError(f"NAME = {name!r}: is a map, for fedapp map; allowed are {', '.join(plan_names())}")
    return read_file(path, Plan)


def _is_map(path: Path) -> bool:
    """Tell whether a file has a map's table of methods, which no experiment has."""
    return "\n[methods." in path.read_text("utf-8", errors="replace")
