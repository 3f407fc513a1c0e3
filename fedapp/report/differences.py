"""What tells runs from each other: the keys in which their configs differ, and names made of these."""

from collections.abc import Mapping, Sequence
from typing import Any

# Keys that say where and how a run is recorded or computed, not what it computes.
PLACES = (
    "data-path", "results-dir", "run-name", "server-device", "client-device", "client-threads", "tracker",
    "checkpoint-every", "resume", "log-format", "metrics-port", "metrics-host", "figures",
)  # fmt: skip

_BARE = ("strategy", "dataset", "model")  # their values say what they are


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configs differ, less those of `PLACES`; the strategy first, the seed last."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in PLACES)
    found = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    return sorted(found, key=lambda key: (key == "seed") - (key == "strategy"))


def described(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return what a config has for some keys, in words: ``fedprox lr=0.1``."""
    return " ".join(_shown(key, config[key]) for key in keys if key in config)


def names(configs: Mapping[str, Mapping[str, Any]], keys: Sequence[str]) -> dict[str, str]:
    """Return a name for each config, by what it was called: what differs, and that only where nothing does."""
    shown = {call: described(config, keys) for call, config in configs.items()}
    alike = list(shown.values())
    return {
        call: name if name and alike.count(name) == 1 else f"{name} ({call})" if name else call
        for call, name in shown.items()
    }


def _shown(key: str, value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:g}"
    elif isinstance(value, bool):
        value = str(value).lower()
    return str(value) if key in _BARE else f"{key}={value}"
