"""Values that are given and that a run doesn't read, so that they can be named.

A value counts as given if it isn't the default: with ``flwr run`` nothing else is known, and the config.toml of an
earlier run holds every key.
"""

from fedapp.config.key import Setting
from fedapp.config.run_config import key_of
from fedapp.config.values import Value


def unread_keys(setting: Setting) -> dict[str, Value]:
    """Return the keys that are given and that the run doesn't read, with their values, in the schema's order."""
    config = setting.config
    defaults = type(config).defaults()
    return {
        key: value
        for key, value in config.flat().items()
        if value != defaults[key] and not key_of(type(config), key).readers.holds(setting, key)
    }
