"""A map's TOML file: its two sides, its problems, its methods, and the rule by which a method wins."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, Self

from pydantic import Field, PrivateAttr, model_validator

from fedapp.config import ConfigError, Value
from fedapp.report.files import AUTO, may_be_measured
from fedapp.sweeps.plan import METRICS, SEED, Strict, unmeasured
from fedapp.sweeps.point import LABEL, Axis, PlannedRun
from strategies import REGISTRY, AsynchronousStrategy

# What a method's table has beside keys of the run config.
WHY, SAME_UPWARDS, TUNED, TRIED = "why", "same-upwards", "tuned", "tried"
NOT_KEYS = (WHY, SAME_UPWARDS, TUNED, TRIED)


class Spot(NamedTuple):
    """A cell of the map of one problem: labels."""

    problem: str
    across: str
    upwards: str


class Side(Strict):
    """One side of the map.

    Attributes
    ----------
    name : str
        What it is called in the picture.
    values : list
        Tables with a ``label`` and keys of the run config.
    """

    name: str
    values: Axis = Field(min_length=1)

    @model_validator(mode="after")
    def _values_are_labelled(self) -> Self:
        for each in self.values:
            if not isinstance(each, dict) or not isinstance(each.get(LABEL), str):
                raise ValueError(f"values: {each!r} must be a table with a {LABEL!r} that is a text")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"values: labels are there twice: {', '.join(self.labels)}")
        return self

    @property
    def labels(self) -> list[str]:
        """The labels, in the order of the file."""
        return [str(each[LABEL]) for each in self.values if isinstance(each, dict)]

    def keys_of(self, label: str) -> dict[str, Value]:
        """Return the keys that a value sets."""
        own = self.values[self.labels.index(label)]
        return {key: value for key, value in own.items() if key != LABEL} if isinstance(own, dict) else {}


class Tuned(Strict):
    """The key whose value each method gets its best of in each cell, found on seeds of their own."""

    key: str = "lr"
    seeds: list[int] = Field(min_length=1)


class MapProblem(Strict):
    """What is trained, the value of the metric that methods run for, and the values that are tried in tuning."""

    target: float
    tried: list[int | float] = Field(min_length=1)
    keys: dict[str, Value]


class MapRule(Strict):
    """When a method wins; fixed before the runs.

    Attributes
    ----------
    text : str
        The rule in words.
    level : float
        Of the two-sided paired t-test over the judged seeds.
    alike_time : float
        Methods whose times to the target differ by no more than this part on every seed are one.
    alike_mean : float
        The same for the mean of the metric, absolute.
    """

    text: str
    level: float = Field(0.05, gt=0, lt=1)
    alike_time: float = Field(0.0, ge=0, alias="alike-time")
    alike_mean: float = Field(0.0, ge=0, alias="alike-mean")


class Smaller(Strict):
    """What ``--quick`` leaves: labels, problems, methods, values to try, seeds; ``base`` wins over the plan's."""

    note: str
    base: dict[str, Value] = Field(default_factory=dict)
    across: list[str] = Field(default_factory=list)
    upwards: list[str] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    methods: list[str] = Field(default_factory=list)
    tried: list[int | float] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=list)


class MapPlan(Strict):
    """The content of a map's file.

    Attributes
    ----------
    metric : str
        What runs are judged by.
    base : dict
        Keys of the run config, and ``num-clients``, of all runs.
    across, upwards : Side
        The sides of the map.
    problems : dict
        A panel of the picture each.
    methods : dict
        Keys of the run config by name, ``strategy`` among them. A list has a value for each label upwards. ``why``
        says where the values are from; ``same-upwards = true``, of a method whose runs are the same for all labels
        upwards, and which so has no list of several values, has them made once; ``tuned`` and ``tried`` are a key of
        its own to tune, and values of its own, as many as the problems'.
    seeds : list of int
        Those that are judged.
    """

    title: str
    metric: str = "accuracy"
    base: dict[str, Value]
    across: Side
    upwards: Side
    problems: dict[str, MapProblem] = Field(min_length=1)
    methods: dict[str, dict[str, Value | list[Value]]] = Field(min_length=2)
    tuning: Tuned
    seeds: list[int] = Field(min_length=1)
    rule: MapRule
    quick: Smaller | None = None
    _runs: dict[tuple[Spot, str, float, int], PlannedRun] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _is_sensible(self) -> Self:
        if both := sorted(set(self.seeds) & set(self.tuning.seeds)):
            raise ValueError(f"tuning.seeds: {both[0]} is judged, too")
        if not float(self.base.get("time-budget", 0)) > 0:
            raise ValueError("base.time-budget: must be above 0; every method gets the same")
        for place, seeds in (("seeds", self.seeds), ("tuning.seeds", self.tuning.seeds)):
            if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
                raise ValueError(f"{place}: {twice[0]} is there twice")
        for name, own in self.methods.items():
            _check_method(name, own, len(self.upwards.labels))
            for problem, each in self.problems.items():
                if len(self.tried(problem, name)) != len(each.tried):
                    raise ValueError(
                        f"methods.{name}.{TRIED}: every method tries as many, {len(each.tried)} values"
                    )
        named: dict[Value, None] = {}  # values of the key metrics, in the order of the file
        for spot, method in product(self.spots, self.methods):
            seen: dict[str, str] = {}
            sources = self._sources(spot, method)
            for place, keys in sources.items():
                for key in keys:
                    if key in seen and seen[key] != "base":
                        raise ValueError(f"{place}: {key} is set by {seen[key]}, too")
                    seen[key] = place
            named[sources[seen[METRICS]][METRICS] if METRICS in seen else AUTO] = None
        if not may_be_measured(self.metric, named):
            raise ValueError(f"metric: {unmeasured(self.metric, named)}")
        return self

    @property
    def budget(self) -> float:
        """Virtual seconds of each run."""
        return float(self.base["time-budget"])

    @property
    def spots(self) -> list[Spot]:
        """All cells: problem by problem, row by row."""
        return [
            Spot(problem, across, upwards)
            for problem, upwards, across in product(self.problems, self.upwards.labels, self.across.labels)
        ]

    def run(self, spot: Spot, method: str, value: float, seed: int) -> PlannedRun:
        """Return the run of a method in a cell, with a value of the tuned key, on a seed.

        Raises
        ------
        ConfigError
            If its keys or values aren't those of the run config.
        """
        if self.methods[method].get(SAME_UPWARDS):
            spot = spot._replace(upwards=self.upwards.labels[0])
        if (place := (spot, method, value, seed)) not in self._runs:
            self._runs[place] = self._checked_run(*place)
        return self._runs[place]

    def _checked_run(self, spot: Spot, method: str, value: float, seed: int) -> PlannedRun:
        values: dict[str, Value] = {}
        for keys in self._sources(spot, method).values():
            values |= keys
        values |= {self.tuned(method): value, SEED: seed}
        labels: dict[str, Value] = {**spot._asdict(), "method": method, "tuned": value, SEED: seed}
        return PlannedRun.of(labels, values)

    def tuned(self, method: str) -> str:
        """Return the key of which a method gets its best value."""
        return str(self.methods[method].get(TUNED, self.tuning.key))

    def tried(self, problem: str, method: str) -> list[float]:
        """Return the values that are tried of it, the lowest first."""
        own: Any = self.methods[method].get(TRIED, self.problems[problem].tried)
        return sorted(own)

    def tuning_runs(self, spots: Sequence[Spot]) -> list[PlannedRun]:
        """Return the runs on tuning seeds in some cells."""
        return [
            self.run(spot, method, value, seed)
            for spot in spots
            for method in self.methods
            for value in self.tried(spot.problem, method)
            for seed in self.tuning.seeds
        ]

    def number_judged(self) -> int:
        """Return how many different runs are judged."""
        upwards = sum(
            1 if own.get(SAME_UPWARDS) else len(self.upwards.labels) for own in self.methods.values()
        )
        return len(self.problems) * len(self.across.labels) * len(self.seeds) * upwards

    def quick_content(self) -> dict[str, Any]:
        """Return the content of the plan that ``--quick`` leaves.

        Raises
        ------
        ConfigError
            If the file doesn't say what that is, or names what isn't there.
        """
        if self.quick is None:
            raise ConfigError("--quick: the file has no [quick] that says what it leaves")
        quick = self.quick
        upwards = _kept(self.upwards.labels, quick.upwards, "upwards")
        kept = [self.upwards.labels.index(label) for label in upwards]
        methods = {
            name: {
                key: [value[at] for at in kept] if isinstance(value, list) and key != TRIED else value
                for key, value in self.methods[name].items()
            }
            for name in _kept(self.methods, quick.methods, "methods")
        }
        problems = {
            name: self.problems[name].model_dump() | ({"tried": quick.tried} if quick.tried else {})
            for name in _kept(self.problems, quick.problems, "problems")
        }
        return {
            **self.model_dump(by_alias=True, exclude={"quick"}),
            "title": f"{self.title} ({quick.note})",
            "base": {**self.base, **quick.base},
            "across": _side(self.across, _kept(self.across.labels, quick.across, "across")),
            "upwards": _side(self.upwards, upwards),
            "problems": problems,
            "methods": methods,
            "seeds": quick.seeds or self.seeds,
        }

    def _sources(self, spot: Spot, method: str) -> dict[str, Mapping[str, Value]]:
        """Return the keys that make a run, by the place that has them; later ones win over ``base``."""
        at = self.upwards.labels.index(spot.upwards)
        own = {
            key: value[at] if isinstance(value, list) else value
            for key, value in self.methods[method].items()
            if key not in NOT_KEYS
        }
        return {
            "base": self.base,
            "across": self.across.keys_of(spot.across),
            "upwards": self.upwards.keys_of(spot.upwards),
            f"problems.{spot.problem}": self.problems[spot.problem].keys,
            f"methods.{method}": own,
            "tuning": {self.tuned(method): self.tried(spot.problem, method)[0]},
            "seeds": {SEED: self.seeds[0]},
        }


def _check_method(name: str, own: Mapping[str, Any], rows: int) -> None:
    """Refuse a method's table that can't be meant."""
    strategy = own.get("strategy")
    if not isinstance(strategy, str):
        raise ValueError(f"methods.{name}: has no strategy")
    for key, value in own.items():
        if key != TRIED and isinstance(value, list) and len(value) != rows:
            raise ValueError(f"methods.{name}.{key}: has {len(value)} values, for {rows} labels upwards")
    if own.get(SAME_UPWARDS):
        for key, value in own.items():
            if key != TRIED and isinstance(value, list) and any(each != value[0] for each in value):
                raise ValueError(f"methods.{name}.{key}: has several values, beside {SAME_UPWARDS} = true")
    known = REGISTRY.get(strategy)
    if own.get(SAME_UPWARDS) and known is not None and issubclass(known, AsynchronousStrategy):
        raise ValueError(f"methods.{name}.{SAME_UPWARDS}: {strategy} doesn't wait for the slowest")


def _kept(there: Sequence[str] | Mapping[str, Any], named: Sequence[str], place: str) -> list[str]:
    """Return which of some names are kept: those that are named, or all."""
    if unknown := [name for name in named if name not in there]:
        raise ConfigError(f"quick.{place}: {unknown[0]!r} isn't there; allowed are {', '.join(there)}")
    return [name for name in there if not named or name in named]


def _side(side: Side, labels: Sequence[str]) -> dict[str, Any]:
    return {"name": side.name, "values": [{LABEL: label, **side.keys_of(label)} for label in labels]}
