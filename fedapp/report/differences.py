"""The keys in which the configs of runs differ, and names of runs made of these keys."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fedapp.report.files import without_digest

DATA_PATH = "data-path"

# Keys that say where and how a run is recorded or computed, not what it computes.
PLACES = (
    DATA_PATH,
    "results-dir",
    "run-name",
    "engine",
    "server-device",
    "client-device",
    "client-threads",
    "tracker",
    "checkpoint-every",
    "resume",
    "log-format",
    "metrics-port",
    "metrics-host",
    "figures",
)

_BARE = ("strategy", "dataset", "model")  # shown as a value alone, without the key

Config = Mapping[str, Any]


def has_own_data(dataset: str) -> bool:
    """Tell whether data are the user's own: then their path says which data they are, not the value of `dataset`."""
    return dataset in ("npz", "files") or ":" in dataset


def differing(configs: Sequence[Config]) -> list[str]:
    """Return the keys in which what configs compute differs; the strategy first, the seed last.

    `PLACES` don't count, but for the path of data of one's own. A config without keys, which couldn't be read, is
    skipped.
    """
    counted = [_comparable(config) for config in configs if config]
    keys = dict.fromkeys(key for config in counted for key in config)
    found = [key for key in keys if len({_identity(config.get(key)) for config in counted}) > 1]
    return sorted(found, key=lambda key: (key == "seed") - (key == "strategy"))


def values_of(config: Config, keys: Sequence[str]) -> Hashable:
    """Return a hashable value that is equal exactly for configs with equal values of some keys."""
    counted = _comparable(config)
    return tuple(_identity(counted.get(key)) for key in keys)


def described(config: Config, keys: Sequence[str]) -> str:
    """Return a config's values of some keys in words: ``fedprox lr=0.1``."""
    return " ".join(_shown(key, config[key]) for key in keys if key in config)


def descriptions(configs: Sequence[Config], keys: Sequence[str]) -> list[str]:
    """Return each config's values of some keys in words; paths and numbers as short as they still differ."""
    counted = [_comparable(config) for config in configs]
    texts = {key: _told_apart(key, [config[key] for config in counted if key in config]) for key in keys}
    return [
        described({key: texts[key][_identity(config[key])] for key in keys if key in config}, keys)
        for config in counted
    ]


def _told_apart(key: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return how each value of a key is shown, by its `_identity`."""
    each = {_identity(value): value for value in values}
    parts = {same: without_digest(value) for same, value in each.items() if isinstance(value, str)}
    if len(set(parts.values())) < len(parts):  # two parts of one name
        return {same: value.replace("python:", "", 1) for same, value in each.items()}
    if key == DATA_PATH:
        return dict(zip(each, ends_of(list(each.values())), strict=True))
    floats = {same: value for same, value in each.items() if isinstance(value, float)}
    texts: dict[str, str] = {}
    for digits in range(6, 18):  # 17 tell any two apart
        texts = {same: f"{value:.{digits}g}" for same, value in floats.items()}
        if len(set(texts.values())) == len(texts):
            break
    return each | texts


def ends_of(paths: Sequence[str]) -> list[str]:
    """Return the last parts of each path, as few as tell it from the others that aren't the same."""
    parts = {path: PurePath(path).parts for path in paths}
    return [str(PurePath(*_end(own, set(parts.values()) - {own}))) for own in map(parts.__getitem__, paths)]


def _end(own: tuple[str, ...], others: set[tuple[str, ...]]) -> tuple[str, ...]:
    for number in range(1, len(own)):
        if all(other[-number:] != own[-number:] for other in others):
            return own[-number:]
    return own


def _comparable(config: Config) -> Config:
    """Return the keys that decide a run's result: all but `PLACES`, and the path of data of one's own."""
    counted = {key: value for key, value in config.items() if key not in PLACES}
    if config.get(DATA_PATH) and has_own_data(str(config.get("dataset", ""))):
        counted[DATA_PATH] = config[DATA_PATH]
    return counted


def _identity(value: object) -> str:
    """Return a text that is equal exactly for equal values; 1 and 1.0 are equal."""
    return repr(int(value)) if isinstance(value, float) and value.is_integer() else repr(value)


def _shown(key: str, value: Any) -> str:
    if isinstance(value, str):
        value = without_digest(value)
    elif isinstance(value, float):
        value = f"{value:g}"
    elif isinstance(value, bool):
        value = str(value).lower()
    return str(value) if key in _BARE else f"{key}={value}"
