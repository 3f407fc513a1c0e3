"""Options of a command line in the syntax of ``flwr run``: texts of ``key=value`` pairs, and TOML files.

What goes beyond ``flwr run``: files and pairs may stand beside each other, and one word as a text needs no quotes.
"""

import logging
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Self

import click
from pydantic import Field

from fedapp.config.key import ConfigError, Counting, Flag, Keys, NonNegative, Text, Value, path_of
from fedapp.meant import NUM_CLIENTS
from strategies.flower.internals import flatten_dict, read_pairs

log = logging.getLogger("flwr.fedapp")

# Flower's own, which drops what doesn't match.
PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")

# A value that can only be meant as a text: a word, or a path. Flower's own parser wants quotes around it.
WORD = re.compile(r"(?!(?:true|false|inf|nan)$)[A-Za-z_~/.][\w~/.:,-]*")

VERSIONS = "versions."


# What the engines in this process read of the federation config; Ray reads all of it.
READ_BY = {
    "sequential": ("num-supernodes",),
    "vectorized": ("num-supernodes", "init-args-num-cpus", "workers"),
}


class SimulationConfig(Keys):
    """Flower's federation config of a simulation.

    Attributes
    ----------
    num_supernodes : int
        Number of clients.
    client_resources_num_cpus, client_resources_num_gpus : int, float
        What one client gets: 0.1 GPUs packs ten clients on a GPU.
    init_args_num_cpus, init_args_num_gpus : int, optional
        What Ray believes the machine has; default: what it has.
    init_args_logging_level, init_args_log_to_driver, verbose : str, bool, bool
        Ray's and Flower's own logs.
    workers : int
        Processes on Ray that train for the vectorized engine, each with the client resources; 0: it trains in this
        process.
    """

    num_supernodes: Annotated[int, Field(description="a whole number from 1 to 1000000", ge=1, le=10**6)] = 20
    client_resources_num_cpus: Counting = 1
    client_resources_num_gpus: NonNegative = 0.0
    init_args_num_cpus: Annotated[int | None, Field(description="a whole number >= 1", ge=1)] = None
    init_args_num_gpus: Annotated[int | None, Field(description="a whole number >= 0", ge=0)] = None
    init_args_logging_level: Text = "error"
    init_args_log_to_driver: Flag = False
    verbose: Flag = False
    workers: Annotated[int, Field(description="a whole number >= 0", ge=0)] = 0

    @classmethod
    def read(cls, values: Mapping[str, Value]) -> Self:
        """Check keys and values; the number of clients may be called ``num-clients``, as everywhere else.

        Raises
        ------
        ConfigError
            One line for each unknown key, wrong type and value out of range; or if the number is given by both names.
        """
        if NUM_CLIENTS not in values:
            return super().read(values)
        if "num-supernodes" in values:
            raise ConfigError(f"{NUM_CLIENTS} and num-supernodes are one: give one of them")
        of_flower = {"num-supernodes" if key == NUM_CLIENTS else key: value for key, value in values.items()}
        try:
            return super().read(of_flower)
        except ConfigError as error:
            raise ConfigError(str(error).replace("num-supernodes", NUM_CLIENTS)) from None

    def backend(self) -> dict[str, Any]:
        """Return the config of Flower's Ray backend."""
        init_args = {
            "num_cpus": self.init_args_num_cpus,
            "num_gpus": self.init_args_num_gpus,
            "logging_level": self.init_args_logging_level,
            "log_to_driver": self.init_args_log_to_driver or self.verbose,
        }
        return {
            "client_resources": {
                "num_cpus": self.client_resources_num_cpus,
                "num_gpus": self.client_resources_num_gpus,
            },
            "init_args": {key: value for key, value in init_args.items() if value is not None},
        }

    def say_unread(self, engine: str) -> None:
        """Name the values, other than the defaults, that only another engine reads."""
        all_keys = tuple(key for key in self.key_names() if key != "workers")
        read = READ_BY.get(engine, all_keys)
        if engine == "vectorized" and self.workers:
            read = tuple(key for key in self.key_names() if key != "verbose")
        given = {key: value for key, value in self.model_dump(by_alias=True).items() if key not in read}
        defaults = type(self)().model_dump(by_alias=True)
        if unread := [f"{key} = {value!r}" for key, value in given.items() if value != defaults[key]]:
            log.warning("not read by the %s engine: %s", engine, ", ".join(unread))


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
    """Return the values of ``read_options``, and the number of clients if one of the files is a run's config.toml.

    ``but`` are keys that aren't taken from a run's config.toml.
    """
    texts = texts or []
    for text in texts:
        _check_form(name, text)
    _check_pairs(name, [text for text in texts if not is_file(text)])
    values: dict[str, Value] = {}
    in_pairs: set[str] = set()
    num_clients: int | None = None
    for text in texts:
        own = _read(name, text)
        if not is_file(text):
            in_pairs |= own.keys()
        elif name == "--run-config" and any(key.startswith(VERSIONS) for key in own):
            num_clients, own = _of_a_run(name, text, own, but)
        if is_file(text) and (again := [key for key in own if key in in_pairs]):
            raise ConfigError(
                f"{name} {text!r}: has {again[0]}, which is given before it; the file comes first, then what "
                "differs from it"
            )
        values |= own
    return values, num_clients


def stated_options(name: str, texts: list[str] | None) -> dict[str, Value]:
    """Return the values of ``read_options`` without those of a run's config.toml: what the user wrote."""
    of_runs = [
        text for text in texts or [] if is_file(text) and read_run_options(name, [text])[1] is not None
    ]
    return read_options(name, [text for text in texts or [] if text not in of_runs])


def is_file(text: str) -> bool:
    """Return True if an option's text names a TOML file, False for pairs."""
    return text.endswith(".toml")


def _check_pairs(name: str, texts: list[str]) -> None:
    """Refuse a key that is given twice in pairs."""
    pairs = (pair for text in texts for pair in PAIR.findall(text))
    if repeated := repeated_key(f"{_key(key)} = {_quoted(value)}" for key, value in pairs):
        raise ConfigError(f"{name} {' '.join(texts)!r}: {repeated}")


def _check_form(name: str, text: str) -> None:
    if is_file(text):
        if not path_of(name, text).is_file():
            raise ConfigError(f"{name} {text!r}: no such file")
    elif rest := PAIR.sub("", text).strip():
        raise ConfigError(f"{name} {text!r}: {rest!r} is not of the form key=value")


def _read(name: str, text: str) -> dict[str, Value]:
    """Read one text: pairs, or a file."""
    named_file = is_file(text)
    if named_file and (repeated := _repeated_in(text)):
        raise ConfigError(f"{name} {text!r}: {repeated}")
    given = text if named_file else PAIR.sub(lambda pair: f"{_key(pair[1])}={_quoted(pair[2])}", text)
    try:
        values: dict[str, Value] = read_pairs([given])
    except (click.ClickException, ValueError) as error:
        message = error.message if isinstance(error, click.ClickException) else str(error)
        raise ConfigError(f"{name} {text!r}: {message}") from None
    return {_key(key): value for key, value in values.items()}


def _key(name: str) -> str:
    """Return a key with hyphens in place of the underscores of Python."""
    return name.replace("_", "-")


def _quoted(value: str) -> str:
    return f'"{value}"' if WORD.fullmatch(value) else value


def _of_a_run(
    name: str, text: str, values: dict[str, Value], but: Collection[str]
) -> tuple[int, dict[str, Value]]:
    """Return a run's number of clients, and its run config without ``but``, and ``run-name``, which is taken."""
    number = values.get(NUM_CLIENTS)
    if not isinstance(number, int) or isinstance(number, bool):
        raise ConfigError(f"{name} {text!r}: {NUM_CLIENTS} = {number!r}: must be a whole number")
    beside = (NUM_CLIENTS, "run-name", *but)
    return number, {k: v for k, v in values.items() if k not in beside and not k.startswith(VERSIONS)}


def repeated_key(lines: Iterable[str]) -> str:
    """Return a message with the first key that lines of TOML give twice, and both values; "" if there is none."""
    given: dict[str, Value] = {}
    for line in lines:
        if line.lstrip().startswith("["):
            given = {}  # another table, with keys of its own
        with suppress(ValueError):  # no line of its own, or what Flower refuses with a message of its own
            for written, value in flatten_dict(tomllib.loads(line)).items():
                key = _key(written)
                if key in given:
                    return f"{key} is given twice, as {given[key]!r} and {value!r}"
                given[key] = value
    return ""


def _repeated_in(path: str) -> str:
    try:
        return repeated_key(path_of("--run-config", path).read_text("utf-8").splitlines())
    except UnicodeDecodeError:
        return ""
