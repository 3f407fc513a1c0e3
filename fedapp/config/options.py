"""Options of a command line in the syntax of ``flwr run``: texts of ``key=value`` pairs, and TOML files.

What goes beyond ``flwr run``: files and pairs may stand beside each other, and one word as a text needs no quotes.
"""

import re
import tomllib
from collections.abc import Collection, Iterable
from contextlib import suppress

import click

from fedapp.config.values import ConfigError, Value, path_of
from strategies.flower.internals import flatten_dict, read_pairs

# Flower's own, which drops what doesn't match.
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")

# A value that can only be meant as a text: a word, or a path. Flower's own parser wants quotes around it.
WORD = re.compile(r"(?!(?:true|false|inf|nan)$)[A-Za-z_~/.][\w~/.:-]*")

NUM_CLIENTS, VERSIONS = "num-clients", "versions."


def read_options(name: str, texts: list[str] | None) -> dict[str, Value]:
    """Read an option's texts as ``flwr run`` does, but for a key that is given twice, which Flower lets pass.

    A value in a later text takes the place of what a file has. Of ``--run-config``, what a run's config.toml holds
    beside the run config, and its run's name, are left out: see ``read_run_options``.

    Parameters
    ----------
    name : str
        The option, for messages; ``--run-config`` takes the config.toml of a run as it is.
    texts : list of str
        What it was given, once for each time it was used.

    Raises
    ------
    ConfigError
        If a text is neither pairs nor a TOML file, a key is given more than once in pairs or in a file, or in pairs
        before a file that has it too.
    """
    return read_run_options(name, texts)[0]


def read_run_options(
    name: str, texts: list[str] | None, but: Collection[str] = ()
) -> tuple[dict[str, Value], int | None]:
    """Return what ``read_options`` does, and the number of clients, if one of the files is a run's config.toml.

    ``but`` are keys that aren't taken from such a file either.
    """
    texts = texts or []
    for text in texts:
        _check_form(name, text)
    pairs = [text for text in texts if not text.endswith(".toml")]
    if repeated := repeated_key(
        f"{key} = {_quoted(value)}" for text in pairs for key, value in PAIR.findall(text)
    ):
        raise ConfigError(f"{name} {' '.join(pairs)!r}: {repeated}")
    values: dict[str, Value] = {}
    in_pairs: set[str] = set()
    num_clients: int | None = None
    for text in texts:
        own = _read(name, text)
        if text.endswith(".toml"):
            if name == "--run-config" and any(key.startswith(VERSIONS) for key in own):
                num_clients, own = _of_a_run(name, text, own)
                own = {key: value for key, value in own.items() if key not in but}
            if again := [key for key in own if key in in_pairs]:
                raise ConfigError(
                    f"{name} {text!r}: has {again[0]}, which is given before it; the file comes first, then what "
                    "differs from it"
                )
        else:
            in_pairs |= own.keys()
        values |= own
    return values, num_clients


def stated_options(name: str, texts: list[str] | None) -> dict[str, Value]:
    """Return what somebody wrote: what ``read_options`` does, less what stands in a run's config.toml alone."""
    of_runs = [
        text
        for text in texts or []
        if text.endswith(".toml") and read_run_options(name, [text])[1] is not None
    ]
    return read_options(name, [text for text in texts or [] if text not in of_runs])


def _check_form(name: str, text: str) -> None:
    if text.endswith(".toml"):
        if not path_of(name, text).is_file():
            raise ConfigError(f"{name} {text!r}: no such file")
    elif rest := PAIR.sub("", text).strip():
        raise ConfigError(f"{name} {text!r}: {rest!r} is not of the form key=value")


def _read(name: str, text: str) -> dict[str, Value]:
    """Read one text: pairs, or a file."""
    is_file = text.endswith(".toml")
    if is_file and (repeated := _repeated_in(text)):
        raise ConfigError(f"{name} {text!r}: {repeated}")
    given = text if is_file else PAIR.sub(lambda pair: f"{pair[1]}={_quoted(pair[2])}", text)
    try:
        values: dict[str, Value] = read_pairs([given])
    except (click.ClickException, ValueError) as error:
        message = error.message if isinstance(error, click.ClickException) else str(error)
        raise ConfigError(f"{name} {text!r}: {message}") from None
    return values


def _quoted(value: str) -> str:
    return f'"{value}"' if WORD.fullmatch(value) else value


def _of_a_run(name: str, text: str, values: dict[str, Value]) -> tuple[int, dict[str, Value]]:
    """Return a run's number of clients, and its run config without its name, which is taken."""
    number = values.get(NUM_CLIENTS)
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigError(f"{name} {text!r}: {NUM_CLIENTS} = {number!r}: must be a whole number")
    beside = (NUM_CLIENTS, "run-name")
    return number, {k: v for k, v in values.items() if k not in beside and not k.startswith(VERSIONS)}


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
