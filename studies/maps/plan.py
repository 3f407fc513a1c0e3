"""A map's TOML file: its two sides, its problems, its methods, and the rule by which a method wins."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, Self

from pydantic import Field, PrivateAttr, model_validator

from fedapp.config import ConfigError, Value
from fedapp.report.files import AUTO, may_be_measured
from fedapp.sweeps.plan import METRICS, SEED, Strict, unmeasured
from fedapp.sweeps.point import LABEL, Axis, PlannedRun
from strategies import REGISTRY, AsynchronousStrategy
from strategies.flower.higher_is_better import higher_is_better, unknown_direction

# Fields of a method's table that aren't keys of the run config.
WHY, SAME_UPWARDS, ONLY_UPWARDS, SEARCH, OF = "why", "same-upwards", "only-upwards", "search", "of"
ADDED = "added"
NOT_KEYS = (WHY, SAME_UPWARDS, ONLY_UPWARDS, SEARCH, OF, ADDED)

# Keys that the run config no longer has: curves of runs with such a key are read, and no such run is made.
REMOVED = ("late",)

BUDGET = "time-budget"

Candidate = tuple[tuple[str, float], ...]
"""Values of the keys that a method tunes."""


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
        Title of the side in the picture.
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


class Search(Strict):
    """How each method's best values are searched for, in each cell, on seeds of their own (`studies.maps.search`).

    Attributes
    ----------
    key : str
        Key that every method tunes, beside the keys of its own ``search``.
    keys : dict
        Keys of the tuning runs alone, such as ``test-on``: they win over ``base``.
    tries : int
        Candidates of each method that the halving begins with.
    seed : int
        Seed of the draw of these candidates.
    steps : int
        Most steps of the walk from the best candidate.
    most : dict
        The largest value of a key that has none in the run config, such as a buffer's size.
    """

    key: str = "lr"
    seeds: list[int] = Field(min_length=1)
    keys: dict[str, Value] = Field(default_factory=dict)
    tries: int = Field(ge=2)
    seed: int = 0
    steps: int = Field(8, ge=1)
    most: dict[str, float] = Field(default_factory=dict)


class MapProblem(Strict):
    """A problem: its keys, the target value of the metric, and the values that are tried in tuning.

    Attributes
    ----------
    across, upwards : list of str
        The labels of the map's sides that the problem has cells for; empty: all.
    """

    target: float
    tried: list[int | float] = Field(min_length=1)
    keys: dict[str, Value]
    across: list[str] = Field(default_factory=list)
    upwards: list[str] = Field(default_factory=list)


class MapRule(Strict):
    """The rule by which a method wins, fixed before the runs.

    Attributes
    ----------
    text : str
        The rule in words.
    level : float
        Significance level of the two-sided paired t-tests over the judged seeds, for all cells and measures together.
    """

    text: str
    level: float = Field(0.05, gt=0, lt=1)


class Smaller(Strict):
    """The part of the plan that ``--quick`` keeps; values in ``base`` replace the plan's."""

    note: str
    base: dict[str, Value] = Field(default_factory=dict)
    across: list[str] = Field(default_factory=list)
    upwards: list[str] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    methods: list[str] = Field(default_factory=list)
    tried: list[int | float] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=list)
    tuning_seeds: list[int] = Field(default_factory=list, alias="tuning-seeds")
    tries: int = 0


class MapPlan(Strict):
    """The content of a map's file.

    Attributes
    ----------
    metric : str
        The metric by which runs are judged.
    base : dict
        Keys of the run config, and ``num-clients``, of all runs.
    across, upwards : Side
        The sides of the map.
    problems : dict
        A panel of the picture each.
    methods : dict
        Keys of the run config by name, ``strategy`` among them. A list has a value for each label upwards. ``why``
        says where the values are from; ``same-upwards = true``, of a method whose runs are the same for all labels
        upwards, and which so has no list of several values, has them made once; a list of labels across in its place
        says where they are. ``only-upwards`` lists the labels upwards of the cells that a method is in, if
        not in all. ``search`` has values of further keys, tuned together with the map's. ``of`` names the method
        that this one is, with another optimizer at the server: in each cell the one that tuning finds better stands
        for both. ``added = true``, of a method that was registered after the map's first runs, lets it take part in
        a cell once all its runs of that cell are there.
    seeds : list of int
        The seeds on which methods are judged.
    """

    title: str
    metric: str = "accuracy"
    base: dict[str, Value]
    across: Side
    upwards: Side
    problems: dict[str, MapProblem] = Field(min_length=1)
    methods: dict[str, dict[str, Value | list[Value] | dict[str, list[int | float]]]] = Field(min_length=2)
    tuning: Search
    seeds: list[int] = Field(min_length=1)
    rule: MapRule
    quick: Smaller | None = None
    _runs: dict[tuple[Spot, str, Candidate, int], PlannedRun] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _is_sensible(self) -> Self:
        if both := sorted(set(self.seeds) & set(self.tuning.seeds)):
            raise ValueError(f"tuning.seeds: {both[0]} is judged, too")
        budget = self.base.get(BUDGET, 0)
        if not (isinstance(budget, int | float) and budget > 0):
            raise ValueError(f"base.{BUDGET}: must be above 0, is {budget!r}; every method gets the same")
        for place, seeds in (("seeds", self.seeds), ("tuning.seeds", self.tuning.seeds)):
            if twice := [seed for seed in seeds if seeds.count(seed) > 1]:
                raise ValueError(f"{place}: {twice[0]} is there twice")
        for name, own in self.methods.items():
            _check_method(name, own, self.across.labels, self.upwards.labels)
            if not isinstance(own.get(ADDED, False), bool):
                raise ValueError(f"methods.{name}.{ADDED}: {own[ADDED]!r} must be true or false")
            of = own.get(OF)
            if of is not None and (of not in self.methods or OF in self.methods[str(of)]):
                allowed = ", ".join(each for each, keys in self.methods.items() if OF not in keys)
                raise ValueError(
                    f"methods.{name}.{OF}: {of!r} is no method of its own; allowed are {allowed}"
                )
        for name, each in self.problems.items():
            _kept(self.across.labels, each.across, f"problems.{name}.across")
            _kept(self.upwards.labels, each.upwards, f"problems.{name}.upwards")
        named: dict[Value, None] = {}  # values of the key metrics, in the order of the file
        for spot, method in self.places:
            seen: dict[str, str] = {}
            sources = self._sources(spot, method)
            for place, keys in sources.items():
                for key in keys:
                    if key in seen and (seen[key] != "base" or key in (BUDGET, SEED)):
                        raise ValueError(f"{place}: {key} is set by {seen[key]}, too")
                    seen[key] = place
            named[sources[seen[METRICS]][METRICS] if METRICS in seen else AUTO] = None
        if not may_be_measured(self.metric, named):
            raise ValueError(f"metric: {unmeasured(self.metric, named)}")
        if higher_is_better(self.metric) is None:
            raise ValueError(f"metric: {unknown_direction(self.metric)}; a name such as mean-error says it")
        return self

    @property
    def budget(self) -> float:
        """Virtual seconds of each run."""
        return float(self.base[BUDGET])

    @property
    def spots(self) -> list[Spot]:
        """All cells: problem by problem, row by row."""
        return [
            Spot(problem, across, upwards)
            for problem in self.problems
            for upwards, across in product(*self.sides(problem)[::-1])
        ]

    def methods_of(self, spot: Spot) -> list[str]:
        """Return the methods that are in a cell."""
        only: dict[str, Any] = {name: own.get(ONLY_UPWARDS) for name, own in self.methods.items()}
        return [name for name, labels in only.items() if labels is None or spot.upwards in labels]

    def family(self, method: str) -> str:
        """Return the method that this one is, whatever its optimizer at the server."""
        return str(self.methods[method].get(OF, method))

    def is_added(self, method: str) -> bool:
        """Tell whether a method was registered after the map's first runs."""
        return bool(self.methods[method].get(ADDED, False))

    @property
    def places(self) -> list[tuple[Spot, str]]:
        """All cells, each with every method that is in it."""
        return [(spot, method) for spot in self.spots for method in self.methods_of(spot)]

    def sides(self, problem: str) -> tuple[list[str], list[str]]:
        """Return the labels across and upwards that a problem has cells for, in the order of the map."""
        own = self.problems[problem]
        return (
            [label for label in self.across.labels if not own.across or label in own.across],
            [label for label in self.upwards.labels if not own.upwards or label in own.upwards],
        )

    def is_same_upwards(self, method: str, across: str) -> bool:
        """Tell whether a method's runs are the same for all labels upwards, with one across."""
        same: Any = self.methods[method].get(SAME_UPWARDS, False)
        return across in same if isinstance(same, list) else bool(same)

    def run(self, spot: Spot, method: str, candidate: Candidate, seed: int) -> PlannedRun:
        """Return the run of a method in a cell, with some values of what it tunes, on a seed.

        Raises
        ------
        ConfigError
            If its keys or values aren't those of the run config.
        """
        if self.is_same_upwards(method, spot.across):
            spot = spot._replace(upwards=self.sides(spot.problem)[1][0])
        if (place := (spot, method, candidate, seed)) not in self._runs:
            self._runs[place] = self._checked_run(*place)
        return self._runs[place]

    def _checked_run(self, spot: Spot, method: str, candidate: Candidate, seed: int) -> PlannedRun:
        values: dict[str, Value] = {}
        for keys in self._sources(spot, method).values():
            values |= keys
        if seed in self.tuning.seeds:
            values |= self.tuning.keys
        values |= {**dict(candidate), SEED: seed}
        labels: dict[str, Value] = {
            **spot._asdict(),
            "method": method,
            "tuned": candidate_text(candidate),
            SEED: seed,
        }
        removed = {key: values.pop(key) for key in REMOVED if key in values}
        return replace(PlannedRun.of(labels, values), removed=removed)

    def grid(self, problem: str, method: str) -> dict[str, list[float]]:
        """Return the values of each key that a method's search begins with, the lowest first."""
        own: Any = self.methods[method].get(SEARCH, {})
        values = {self.tuning.key: self.problems[problem].tried, **own}
        return {key: sorted(each) for key, each in values.items()}

    def number_judged(self) -> int:
        """Return how many different runs are judged."""
        places = {
            (*spot[:2], "" if self.is_same_upwards(method, spot.across) else spot.upwards, method)
            for spot, method in self.places
        }
        return len(places) * len(self.seeds)

    def quick_content(self) -> dict[str, Any]:
        """Return the content of the plan that ``--quick`` leaves.

        Raises
        ------
        ConfigError
            If the file has no table [quick], or the table names a label, problem or method that the plan lacks.
        """
        if self.quick is None:
            raise ConfigError(
                "--quick: the map's file has no [quick], the table that says which part of the map to keep"
            )
        quick = self.quick
        upwards = _kept(self.upwards.labels, quick.upwards, "quick.upwards")
        kept = [self.upwards.labels.index(label) for label in upwards]
        across = _kept(self.across.labels, quick.across, "quick.across")

        def of_rows(key: str, value: Any) -> Any:
            if key == SAME_UPWARDS and isinstance(value, list):
                return [label for label in value if label in across]
            if key == ONLY_UPWARDS:
                return [label for label in value if label in upwards]
            return [value[at] for at in kept] if isinstance(value, list) else value

        methods = {
            name: {key: of_rows(key, value) for key, value in self.methods[name].items()}
            for name in _kept(self.methods, quick.methods, "quick.methods")
            if set(self.methods[name].get(ONLY_UPWARDS, upwards)) & set(upwards)  # type: ignore[arg-type]
        }
        for own in methods.values():
            if own.get(OF) not in methods:
                own.pop(OF, None)  # it stands for itself, where the other is left out
        sides = {
            name: self._quick_sides(name) for name in _kept(self.problems, quick.problems, "quick.problems")
        }
        problems = {
            name: self.problems[name].model_dump() | ({"tried": quick.tried} if quick.tried else {}) | own
            for name, own in sides.items()
            if all(own.values())  # it has a cell left
        }
        return {
            **self.model_dump(by_alias=True, exclude={"quick"}),
            "title": f"{self.title} ({quick.note})",
            "base": {**self.base, **quick.base},
            "across": _side(self.across, across),
            "upwards": _side(self.upwards, upwards),
            "problems": problems,
            "methods": methods,
            "seeds": quick.seeds or self.seeds,
            "tuning": {
                **self.tuning.model_dump(),
                "seeds": quick.tuning_seeds or self.tuning.seeds,
                "tries": quick.tries or self.tuning.tries,
            },
        }

    def _quick_sides(self, problem: str) -> dict[str, list[str]]:
        """Return which of a problem's labels ``--quick`` keeps."""
        assert self.quick is not None
        own = dict(zip(("across", "upwards"), self.sides(problem), strict=True))
        kept = {"across": self.quick.across, "upwards": self.quick.upwards}
        return {
            side: [label for label in labels if not kept[side] or label in kept[side]]
            for side, labels in own.items()
        }

    def _sources(self, spot: Spot, method: str) -> dict[str, Mapping[str, Value]]:
        """Return the keys that make a run, by the place that has them; later ones win over ``base``."""
        at = self.upwards.labels.index(spot.upwards)
        own = {
            key: value[at] if isinstance(value, list) else value
            for key, value in self.methods[method].items()
            if key not in NOT_KEYS and not isinstance(value, dict)
        }
        return {
            "base": self.base,
            "across": self.across.keys_of(spot.across),
            "upwards": self.upwards.keys_of(spot.upwards),
            f"problems.{spot.problem}": self.problems[spot.problem].keys,
            f"methods.{method}": own,
            "tuning": {key: values[0] for key, values in self.grid(spot.problem, method).items()},
            "seeds": {SEED: self.seeds[0]},
        }


def candidate_text(candidate: Candidate | None) -> str:
    """Write each key of a candidate with its value."""
    return "-" if candidate is None else " ".join(f"{key}={value:g}" for key, value in candidate)


def _check_method(name: str, own: Mapping[str, Any], across: Sequence[str], upwards: Sequence[str]) -> None:
    """Refuse a method's table with values that contradict each other or the map."""
    strategy = own.get("strategy")
    if not isinstance(strategy, str):
        raise ValueError(f"methods.{name}: has no strategy")
    lists = {
        key: value
        for key, value in own.items()
        if isinstance(value, list) and key not in (SAME_UPWARDS, ONLY_UPWARDS)
    }
    for key, value in lists.items():
        if len(value) != len(upwards):
            raise ValueError(
                f"methods.{name}.{key}: has {len(value)} values, for {len(upwards)} labels upwards"
            )
    if tables := [key for key, value in own.items() if isinstance(value, dict) and key != SEARCH]:
        raise ValueError(f"methods.{name}.{tables[0]}: is a table; only {SEARCH} is one")
    only = own.get(ONLY_UPWARDS, upwards)
    if not (isinstance(only, list) and only and set(only) <= set(upwards)):
        raise ValueError(
            f"methods.{name}.{ONLY_UPWARDS}: {only!r} must be a list of labels upwards: {', '.join(upwards)}"
        )
    search = own.get(SEARCH, {})
    if not (isinstance(search, dict) and all(search.values())):
        raise ValueError(
            f"methods.{name}.{SEARCH}: {search!r} must be a table of keys, each with a list of numbers"
        )
    same = own.get(SAME_UPWARDS, False)
    if not isinstance(same, bool | list):
        raise ValueError(f"methods.{name}.{SAME_UPWARDS}: {same!r} must be true or a list of labels across")
    if same:
        for key, value in lists.items():
            if any(each != value[0] for each in value):
                raise ValueError(f"methods.{name}.{key}: has several values, beside {SAME_UPWARDS}")
    if isinstance(same, list) and (unknown := [label for label in same if label not in across]):
        raise ValueError(f"methods.{name}.{SAME_UPWARDS}: {unknown[0]!r} is no label across")
    known = REGISTRY.get(strategy)
    if same and known is not None and issubclass(known, AsynchronousStrategy):
        raise ValueError(f"methods.{name}.{SAME_UPWARDS}: {strategy} doesn't wait for the slowest")


def _kept(there: Sequence[str] | Mapping[str, Any], named: Sequence[str], place: str) -> list[str]:
    """Return which of some names are kept: those that are named, or all."""
    if unknown := [name for name in named if name not in there]:
        raise ConfigError(f"{place}: {unknown[0]!r} isn't there; allowed are {', '.join(there)}")
    return [name for name in there if not named or name in named]


def _side(side: Side, labels: Sequence[str]) -> dict[str, Any]:
    return {"name": side.name, "values": [{LABEL: label, **side.keys_of(label)} for label in labels]}
