"""Axes on a command line: ``lr=0.03,0.1 strategy=fedavg,fedprox seed=0-4``."""

import re
from collections.abc import Sequence

from fedapp.config import ConfigError, RunConfig, Value
from fedapp.config.words import is_text, value_of
from fedapp.sweeps.point import NUM_CLIENTS, Axis

_VALUE = re.compile(r"""("[^"]*"|'[^']*'|[^,"']+)(?:,|$)""")
_RANGE = re.compile(r"(\d+)-(\d+)")
MOST = 10_000  # values of a range: beyond, a slip


def read_axes(texts: Sequence[str]) -> dict[str, Axis]:
    """Return the axes that texts of the form ``KEY=VALUE,VALUE`` give.

    A value is one of TOML, or a bare word; ``A-B`` are all whole numbers from A to B, unless the key is a text; what
    has a comma is quoted. A key of texts may have nothing, an empty text.

    Raises
    ------
    ConfigError
        If a text is of another form, or a key is given twice.
    """
    grid: dict[str, Axis] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.replace("_", "-")
        if not (equals and key and (values or is_text(key))):
            raise ConfigError(f"{text!r}: is not of the form KEY=VALUE,VALUE, and no .toml file")
        if key in grid:
            raise ConfigError(f"{text!r}: the axis {key} is given twice")
        grid[key] = _values(key, values, text)
    return grid


def completed_axis(incomplete: str) -> list[str]:
    """Return completions of an axis on a command line: keys, and the values of keys with a list of values."""
    key, equals, values = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in (*RunConfig.key_names(), NUM_CLIENTS) if name.startswith(key)]
    *before, last = values.split(",")
    names = [name for name in _choices(key) if name.startswith(last) and name not in before]
    return [f"{key}={','.join([*before, name])}" for name in names]


def _choices(key: str) -> list[str]:
    """Return the values of a key that has a list of them."""
    if key not in RunConfig.key_names():
        return []
    return [name for name in re.findall(r"[\w-]+", RunConfig.allowed(key)) if _is_allowed(key, name)]


def _is_allowed(key: str, value: str) -> bool:
    try:
        RunConfig.load({key: value})
    except ValueError:
        return False
    return True


def _values(key: str, values: str, text: str) -> Axis:
    if not values:
        return [value_of(key, "")]
    found: Axis = []
    at = 0
    while at < len(values):
        match = _VALUE.match(values, at)
        if match is None:
            raise ConfigError(f"{text!r}: {values[at:]!r} is no list of values with commas between them")
        found += _expanded(key, match[1], text)
        at = match.end()
    if values.endswith(","):
        raise ConfigError(f"{text!r}: ends in a comma")
    return found


def _expanded(key: str, value: str, text: str) -> list[Value]:
    """Return the values of one part of an axis: one value, or those of a range."""
    between = _RANGE.fullmatch(value)
    if between is None or is_text(key):
        return [value_of(key, value)]
    first, last = int(between[1]), int(between[2])
    if not first <= last < first + MOST:
        raise ConfigError(f"{text!r}: {value} must go up, and by fewer than {MOST}")
    return list(range(first, last + 1))
