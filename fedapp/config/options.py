"""Options of a command line in the syntax of ``flwr run``: texts of ``key=value`` pairs, or one TOML file."""

import re
import tomllib
from collections.abc import Iterable
from contextlib import suppress

import click

from fedapp.config.values import ConfigError, Value, path_of
from strategies.flower_internals import flatten_dict, read_pairs

# Flower's own, which drops what doesn't match.
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")


def read_options(name: str, texts: list[str] | None) -> dict[str, Value]:
    """Read an option's texts as ``flwr run`` does, but for a key that is given twice, which Flower lets pass.

    Parameters
    ----------
    name : str
        The option, for messages; ``--run-config`` takes the config.toml of a run as it is.
    texts : list of str
        What it was given, once for each time it was used.

    Raises
    ------
    ConfigError
        If a text is neither pairs nor a TOML file, or a key is given more than once.
    """
    texts = texts or []
    given = f"{name} {' '.join(texts)!r}"
    for text in texts:
        if text.endswith(".toml"):
            if not path_of(name, text).is_file():
                raise ConfigError(f"{name} {text!r}: no such file")
        elif rest := PAIR.sub("", text).strip():
            raise ConfigError(f"{name} {text!r}: {rest!r} is not of the form key=value")
    pairs = (f"{key} = {value}" for text in texts for key, value in PAIR.findall(text))
    is_file = bool(texts) and texts[0].endswith(".toml")
    if not is_file and (repeated := repeated_key(pairs)):
        raise ConfigError(f"{given}: {repeated}")
    try:
        values: dict[str, Value] = read_pairs(texts)
    except (click.ClickException, ValueError) as error:
        message = error.message if isinstance(error, click.ClickException) else str(error)
        raise ConfigError(f"{given}: {(is_file and _repeated_in(texts[0])) or message}") from None
    if name == "--run-config" and is_file:
        # The config.toml of a run directory holds these beside the run config.
        return {k: v for k, v in values.items() if k != "num-clients" and not k.startswith("versions.")}
    return values


def repeated_key(lines: Iterable[str]) -> str:
    """Return a message with the first key that lines of TOML give twice, and both values; "" if there is none."""
    given: dict[str, Value] = {}
    for line in lines:
        if line.lstrip().startswith("["):
            given = {}  # another table, with keys of its own
        with suppress(ValueError):  # no line of its own, or what Flower refuses with a message of its own
            for key, value in flatten_dict(tomllib.loads(line)).items():
                if key in given:
                    return f"{key} is given twice, as {given[key]!r} and {value!r}"
                given[key] = value
    return ""


def _repeated_in(path: str) -> str:
    try:
        return repeated_key(path_of("--run-config", path).read_text("utf-8").splitlines())
    except UnicodeDecodeError:
        return ""
