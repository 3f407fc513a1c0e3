"""The config of an earlier run: read from its folder, and what may change when it goes on."""

import tomllib
from collections.abc import Mapping
from typing import Any

from fedapp.config.values import ConfigError, Value, path_of

# A resumed run may differ in these from what it was: they don't change what is computed.
FREE = (
    "checkpoint-every",
    "min-clients",
    "round-timeout",
    "log-format",
    "figures",
    "metrics-port",
    "metrics-host",
)


def read_run(path: str) -> tuple[dict[str, Value], int]:
    """Return the config of an earlier run from its folder, and its number of clients.

    Raises
    ------
    ConfigError
        If no run is there.
    """
    file = path_of("resume", path) / "config.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        num_clients = int(content.pop("num-clients"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"resume = {path!r}: no run is there, {file} can't be read ({error})") from None
    content.pop("versions", None)
    return content, num_clients


def resumed(given: Mapping[str, Value], defaults: Mapping[str, Value]) -> dict[str, Value]:
    """Return the config of the run that ``given`` names under ``resume``, with what may change as given."""
    path = str(path_of("resume", str(given["resume"])))
    earlier, _ = read_run(path)
    changed = []
    for key, value in given.items():
        before = earlier.get(key, defaults.get(key))
        if key == "data-path" and value:
            value = str(path_of(key, str(value)))  # as it is in a run's config.toml
        if value != before and not _may_become(key, before, value):
            changed.append(f"{key} = {value!r} (it has {before!r})")
    if changed:
        raise ConfigError(
            f"resume = {path!r}: that run has another config than {', '.join(changed)}; num-server-rounds and "
            f"time-budget may be raised, {', '.join(FREE)} may change"
        )
    return {**earlier, **given, "data-path": earlier.get("data-path", ""), "resume": path}


def _may_become(key: str, before: Any, value: Any) -> bool:
    if key == "num-server-rounds":
        return bool(value > before)
    if key == "time-budget":
        return bool(value == 0 or 0 < before < value)
    return key in ("resume", *FREE)
