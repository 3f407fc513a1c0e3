"""The run config: one typed, validated schema for every key, and how users give it.

`RunConfig` is composed from the sections in ``*_keys.py``, where each key stands with its type, what it accepts, its
meaning and who reads it; `docs/config.md` is made from them. An error is one line that names the key, the value and
what is allowed.
"""

from fedapp.config.key import ConfigError, Keys, Setting, Value
from fedapp.config.resume import read_run
from fedapp.config.run_config import RunConfig, as_config_error, defaults, in_keys, own_keys, unread_keys
from fedapp.config.strategy_keys import strategy_class

__all__ = [
    "ConfigError",
    "Keys",
    "RunConfig",
    "Setting",
    "Value",
    "as_config_error",
    "defaults",
    "in_keys",
    "own_keys",
    "read_run",
    "strategy_class",
    "unread_keys",
]
