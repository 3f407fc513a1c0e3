"""The config of an earlier run: read from its folder, and what may change when it goes on."""

import logging
import tomllib
from collections.abc import Mapping
from typing import Any

from fedapp.config.key import ConfigError, Value, path_of
from fedapp.config.run_keys import scaled
from fedapp.config.strategy_keys import strategy_class
from fedapp.data.errors import PREFIX
from fedapp.data.loading import folder_of
from fedapp.own.metrics import with_directions

log = logging.getLogger("flwr.fedapp")

# A resumed run may differ in these from what it was: they change nothing of an aggregation. The data under another
# data-path must be the same, which the journal checks.
FREE = (
    "engine",
    "data-path",
    "client-device",
    "server-device",
    "client-threads",
    "checkpoint-every",
    "min-clients",
    "round-timeout",
    "log-format",
    "figures",
    "metrics-port",
    "metrics-host",
    "registered-nodes",
    "stop-at",
    "patience",
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
    before = {**defaults, **earlier}
    wanted = _as_recorded(given, before)
    changed = [
        f"{key} = {value!r} (it has {before.get(key)!r})"
        for key, value in wanted.items()
        if value != before.get(key) and not _may_become(key, before.get(key), value)
    ]
    if changed:
        raise ConfigError(
            f"resume = {path!r}: that run has another config than {', '.join(changed)}; num-server-rounds and "
            f"time-budget may be raised, {', '.join(FREE)} may change"
        )
    rounds, former = wanted.get("num-server-rounds"), before["num-server-rounds"]
    if rounds not in (None, former) and before["lr-schedule"] == "cosine":
        raise ConfigError(
            f"resume = {path!r}: num-server-rounds = {rounds} (it has {former}): lr-schedule = 'cosine' is for so "
            f"many rounds, and for more another from the first on; a new run: -c {path}/config.toml with "
            "the larger number"
        )
    return {**earlier, **wanted, "resume": path}


def _as_recorded(given: Mapping[str, Value], before: Mapping[str, Value]) -> dict[str, Value]:
    """Return the given values as the run's config.toml has them, without values that leave the choice to the run."""
    values = {
        key: value
        for key, value in given.items()
        if (key, value) not in (("clock", "auto"), ("num-server-rounds", 0))
    }
    if "metrics" in values:
        values["metrics"] = with_directions(str(values["metrics"]))
    if path := values.get("data-path"):
        values["data-path"] = str(path_of("data-path", str(path)))
    if (name := str(values.get("dataset", ""))).startswith(PREFIX) and folder_of(name) is not None:
        values["dataset"] = PREFIX + str(path_of("dataset", name.removeprefix(PREFIX)))
    if "eval-every" in values and "num-server-rounds" not in values:
        has_rounds = strategy_class(str(before["strategy"])).has_rounds
        every, has = int(values["eval-every"]), int(before["eval-every"])
        if not has_rounds and scaled(every, int(before["num-server-rounds"])) == has:
            if every != has:
                log.info(
                    "eval-every = %d: taken for what the run was given with num-server-rounds = 0, which is "
                    "%d aggregations; it goes on with these",
                    every,
                    has,
                )
            del values["eval-every"]
    return values


def _may_become(key: str, before: Any, value: Any) -> bool:
    if key == "num-server-rounds":
        return bool(value > before)
    if key == "time-budget":
        return bool(value == 0 or 0 < before < value)
    return key in ("resume", *FREE)
