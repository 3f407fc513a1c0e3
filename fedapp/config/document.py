"""The keys' declarations to read: `docs/config.md`, and texts for the terminal."""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

from fedapp.config import conflicts
from fedapp.config.data_keys import DataKeys
from fedapp.config.key import EVERY_RUN, Keys
from fedapp.config.run_config import SECTIONS, RunConfig, defaults, in_keys, key_of, own_keys
from fedapp.config.run_keys import RunKeys
from fedapp.config.strategy_keys import OTHER_DEFAULTS, ProtectionKeys, StrategyKeys, strategy_class
from fedapp.config.training_keys import TrainingKeys
from fedapp.meant import OTHER_NAMES
from strategies import REGISTRY, AsynchronousStrategy, StrategyConfig
from strategies.core import conflicts as of_strategies
from strategies.core.conflicts import BY_ROUNDS, STRATEGY, Conflict, keys_of
from strategies.core.parameters import parameters_of

_INTRODUCTION = """# Keys of the run config

`fedapp keys NAME` prints one key. Unless the column "read by" says otherwise, a key applies to every run. Keys
without effect are listed before the first round. A key with an integer as default takes integers alone.
[methods.md](methods.md) says which strategies have rounds.

A strategy's key and the keyword of its class have the same name (`fedfix-interval`, `FedFix(fedfix_interval=…)`),
range and default. These defaults differ:

| key | default in the app | default in the library |
|---|---|---|
{other_defaults}"""


def document() -> str:
    """Return every key with its meaning, default, what it accepts and who reads it, as Markdown."""
    introduction = _INTRODUCTION.format(other_defaults="\n".join(_other_defaults()))
    sections = [_section(section) for section in SECTIONS]
    return "\n\n".join([introduction, *sections, _conflicts(), *_other_names()]) + "\n"


_CONFLICTS = """## Values that exclude each other

A run in which all values of a row come together is refused before it starts. Python's error has `keys` and `allowed`.
What also depends on the data, the model, the number of clients or the engine is checked, too, and isn't listed here.

| not together | because | allowed |
|---|---|---|
"""


def _conflicts() -> str:
    """Return the table of values that exclude each other, in the app and in the strategies."""
    known = {*RunConfig.key_names(), STRATEGY}
    rows = [
        (", ".join(_excluded(conflict)), conflict.reason, conflict.allowed)
        for conflict in (*conflicts.CONFLICTS, *of_strategies.CONFLICTS)
        if known.issuperset(key.replace("_", "-") for key in conflict.keys)
    ]
    return _CONFLICTS + "\n".join(f"| {in_keys(ValueError(' | '.join(row)))} |" for row in rows)


def _excluded(conflict: Conflict) -> Iterator[str]:
    """Yield the values that exclude each other in words, and the names of such strategies."""
    for key, values in conflict.values.items():
        if key != STRATEGY:
            yield f"`{key}` {values.words}"
            continue
        listed = "" if values in BY_ROUNDS else ", ".join(_with(conflict))
        yield f"{values.words}: {listed}" if listed else values.words


def _with(conflict: Conflict) -> Iterator[str]:
    """Yield the names of the strategies that a conflict is about, if their class alone tells."""
    own = conflict in of_strategies.CONFLICTS  # by the keys of a strategy's own config
    others = {key for key in conflict.keys if key != STRATEGY} if own else set[str]()
    for name, kind in REGISTRY.items():
        method = conflicts.Method(name, kind.capabilities, keys_of(kind.Config))
        if conflict.values[STRATEGY].hold(method) and others <= method.keys:
            yield name


def _other_names() -> Iterator[str]:
    """Yield a heading for each other name of a key, by which the site's search finds the key."""
    yield "## Other names of keys"
    for name, key in OTHER_NAMES.items():
        yield f"### {name.replace('-', ' ')}: {key}"


def _other_defaults() -> Iterator[str]:
    """Yield a row for each default that differs between the app and the library's strategies, or one of them."""
    usual = {name: parameter.default for name, parameter in parameters_of(StrategyConfig).items()}
    for name, other in OTHER_DEFAULTS.items():
        yield f"| `{name.replace('_', '-')}` | `{_toml(other.value)}` | `{_toml(usual[name])}`: {other.why} |"
    others: dict[tuple[str, object], list[str]] = {}
    for method, kind in REGISTRY.items():
        for name, parameter in parameters_of(kind.Config).items():
            if name in usual and parameter.default != usual[name]:
                others.setdefault((name, parameter.default), []).append(method)
    for (name, default), methods in others.items():
        yield (
            f"| `{name.replace('_', '-')}` | `{_toml(usual[name])}` | `{_toml(default)}` for {', '.join(methods)} |"
        )


# What the default of a key shows.
_PLAIN = ("true or false", "a text")
# Words that the default makes clear: it is a whole number, or another one.
_NUMBER = re.compile(r"\ba (whole )?number (?=>|in |from )")

# What another page lists, or an error explains.
_ELSEWHERE = {
    "strategy": "a name in [methods.md](methods.md#all-methods), or module:Class of your own",
    "run-name": "a folder name",
}

# Keys that go with another one, whose row names the strategies of both.
GOES_WITH = {
    "drop-stragglers": "stragglers",
    "neighbour-memory": "graph-source",
    "secure-neighbours": "secure-sums",
    "secure-threshold": "secure-sums",
    "secure-clipping": "secure-sums",
    "secure-metrics": "secure-sums",
    "faulty-clients": "aggregation-rule",
    "dp-restart": "dp-mechanism",
}

# What most runs set.
EVERYDAY = (
    "strategy",
    "num-server-rounds",
    "dataset",
    "data-path",
    "partitioner",
    "class-imbalance",
    "model",
    "loss",
    "lr",
    "batch-size",
    "local-epochs",
    "participation",
    "fraction-train",
    "time-scenario",
    "seed",
    "engine",
)


def _without_rounds() -> list[str]:
    """Return the keys that are parameters of asynchronous strategies alone."""
    usual = parameters_of(StrategyConfig)
    kinds = [kind for kind in REGISTRY.values() if issubclass(kind, AsynchronousStrategy)]
    names = dict.fromkeys(name for kind in kinds for name in parameters_of(kind.Config) if name not in usual)
    return ["time-scenario", "time-budget", "eval-every", *(name.replace("_", "-") for name in names)]


TOPICS: Mapping[str, Callable[[], Sequence[str]]] = {
    "methods": StrategyKeys.key_names,
    "async": _without_rounds,
    "data": DataKeys.key_names,
    "training": TrainingKeys.key_names,
    "privacy": ProtectionKeys.key_names,
    "devices": lambda: (
        "min-clients",
        "round-timeout",
        "clock",
        "safeguards",
        "registered-nodes",
        "metrics-port",
    ),
    "runs": RunKeys.key_names,
}


def words_of_keys() -> dict[str, str]:
    """Return each key's meaning, default, what it accepts and who reads it, as text of 80 columns, by key."""
    return {key: _words(key) for section in SECTIONS for key in section.key_names()}


def _words(key: str) -> str:
    declared = key_of(RunConfig, key)
    lines = (
        declared.meaning,
        f"default: {_toml(defaults()[key])} {declared.unit}".rstrip(),
        f"allowed: {RunConfig.allowed(key)}",
        f"read by: {declared.readers.text(key)}",
    )
    wrapped = (textwrap.wrap(line, 76, subsequent_indent="  ", break_on_hyphens=False) for line in lines)
    return "\n".join([key, *(f"    {line}" for part in wrapped for line in part)]) + "\n"


def document_of(strategy: str) -> str:
    """Return the keys that a strategy of the user's own adds, as Markdown, and which others it shares.

    Raises
    ------
    ConfigError
        If there is no such strategy, or a field of its Config can be no key.
    """
    kind = strategy_class(strategy)
    own, known = own_keys(kind), RunConfig.model_fields
    shared = [f"`{field.name.replace('_', '-')}`" for field in fields(kind.Config) if field.name in known]
    end = f"Of the others, its Config has {', '.join(shared)}: see `fedapp keys`.\n"
    return "\n\n".join([_section(own) if own.key_names() else f"`{strategy}` has no keys of its own.", end])


def _section(section: type[Keys]) -> str:
    lines = [
        f"## {(section.__doc__ or '').strip().rstrip('.')}",
        "",
        "| key | meaning | default; allowed | read by |",
        "|---|---|---|---|",
    ]
    for key in section.key_names():
        declared = key_of(section, key)
        default = defaults()[key] if section.field_of(key).is_required() else section.field_of(key).default
        stated = f"`{_toml(default)}` {declared.unit}".rstrip()
        allowed = _ELSEWHERE.get(key) or _NUMBER.sub("", section.allowed(key).removeprefix("one of "))
        read_by = "" if declared.readers is EVERY_RUN else declared.readers.text(key)
        cells = (
            f"`{key}`",
            declared.meaning,
            stated if allowed in _PLAIN else f"{stated}; {allowed}",
            read_by.partition("; ")[2] if key in GOES_WITH else read_by,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _toml(value: object) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else f"{value}"
    )
