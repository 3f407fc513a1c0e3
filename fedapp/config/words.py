"""Keys and values as words of a command line: ``lr=0.1 strategy=fedfix``, without quotes."""

import tomllib
from collections.abc import Sequence

from fedapp.config.key import ConfigError, Value
from fedapp.config.run_config import RunConfig
from fedapp.meant import NUM_CLIENTS


def read_words(texts: Sequence[str]) -> dict[str, Value]:
    """Return the values that texts of the form ``KEY=VALUE`` give; ``KEY=`` gives an empty text.

    Raises
    ------
    ConfigError
        If a text is of another form, or a key is given twice.
    """
    values: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name):
            raise ConfigError(f"{text!r}: is not of the form KEY=VALUE, and no .toml file")
        key = name.replace("_", "-")
        read = value_of(key, value)
        if key in values:
            raise ConfigError(f"{text!r}: {key} is given twice, as {values[key]!r} and {read!r}")
        values[key] = read
    return values


def value_of(key: str, text: str) -> Value:
    """Return a value of TOML, or a bare word, or nothing, as the text that it is."""
    if is_text(key) and not text.startswith(('"', "'")):
        return text
    try:
        read = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return read if isinstance(read, str | int | float | bool) else text


def is_text(key: str) -> bool:
    """Tell whether a key's values are texts."""
    field = RunConfig.model_fields.get(key.replace("-", "_"))
    return key != NUM_CLIENTS and field is not None and field.annotation is str
