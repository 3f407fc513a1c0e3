"""What declares a key: the values that it accepts, its meaning, and which runs read it.

A schema of keys is flat and strict, and every error is one clear line. One config swaps the strategy, so keys of
other methods are allowed in it; a value that nothing in a run reads is named
(`fedapp.config.run_config.unread_keys`).
"""

import codecs
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from fedapp.meant import unknown_key, value_meant
from strategies import REGISTRY, FederatedStrategy
from strategies.core.conflicts import may_set
from strategies.flower.messages import LARGEST

Value = str | int | float | bool


class ConfigError(ValueError):
    """The run config, or a run that it asks for, isn't possible; the text is the message for the user."""


class KeyConflictError(ConfigError):
    """Keys of the run config have values that exclude each other.

    Attributes
    ----------
    keys : tuple of str
        The keys that exclude each other.
    allowed : str
        What is allowed instead.
    """

    def __init__(self, text: str, keys: tuple[str, ...] = (), allowed: str = "") -> None:
        super().__init__(text)
        self.keys, self.allowed = keys, allowed


def pattern(allowed: str, regex: str) -> Any:
    """Return the annotation of a text that must match a regular expression; ``allowed`` describes it in words."""
    return Field(description=allowed, pattern=regex)


def choice(names: Any) -> Any:
    """Return the annotation of a text that must be one of some names."""
    return pattern(f"one of {', '.join(names)}", f"^({'|'.join(names)})$")


def _not_tiny(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError("below 1e-6")
    return value


def _known_encoding(name: str) -> str:
    if name != "auto":
        try:
            codecs.lookup(name)
        except LookupError:
            raise ValueError("unknown") from None
    return name


# The description of a type is what an error says is allowed.
Positive = Annotated[float, Field(description="a number > 0", gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(description="a number >= 0", ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(description="a number in [0, 1]", ge=0, le=1)]
BelowOne = Annotated[float, Field(description="a number in [0, 1)", ge=0, lt=1)]
Inside = Annotated[float, Field(description="a number in (0, 1)", gt=0, lt=1)]
Count = Annotated[int, Field(description="a whole number >= 0", ge=0, le=LARGEST)]
Counting = Annotated[int, Field(description="a whole number >= 1", ge=1, le=LARGEST)]
# Beyond what any machine does in a task or a run: a slip, not a wish.
Thousands = Annotated[int, Field(description="a whole number from 0 to 1000000", ge=0, le=10**6)]
Port = Annotated[int, Field(description="a whole number from 0 to 65535", ge=0, le=65535)]
Threads = Annotated[int, Field(description="a whole number from 0 to 1024", ge=0, le=1024)]
ZeroOrModerate = Annotated[
    float, Field(description="0, or a number in [1e-06, 1e+06]", ge=0, le=1e6), AfterValidator(_not_tiny)
]
Flag = Annotated[bool, Field(description="true or false")]
Text = Annotated[str, Field(description="a text", pattern=r"^[^\x00]*$")]
Encoding = Annotated[
    str,
    pattern("auto, or a name that Python knows, such as cp1252", r"^[A-Za-z0-9_-]+$"),
    AfterValidator(_known_encoding),
]


def path_of(key: str, text: str) -> Path:
    """Return the absolute path that a key names, with a home folder in place of ~.

    Raises
    ------
    ConfigError
        If there can't be such a path.
    """
    if "\0" in text:
        raise ConfigError(f"{key} = {text[:200]!r}: must be a text")
    try:
        path = Path(text).expanduser().absolute()
        path.exists()  # a name may be too long
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key} = {text[:200]!r}: can't be found ({reason})") from None
    return path


class Keys(BaseModel):
    """A flat config with kebab-case keys: key ``num-server-rounds`` is attribute ``num_server_rounds``."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        defer_build=True,  # of validators, to the first use: the sections of the run config are never used alone
        alias_generator=lambda name: name.replace("_", "-"),
    )

    @classmethod
    @cache
    def key_names(cls) -> tuple[str, ...]:
        """Return every key."""
        return tuple(name.replace("_", "-") for name in cls.model_fields)

    @classmethod
    def field_of(cls, key: str) -> FieldInfo:
        """Return a key's declaration."""
        return cls.model_fields[key.replace("-", "_")]

    @classmethod
    def allowed(cls, key: str) -> str:
        """Say in words what a key accepts."""
        field = cls.field_of(key)
        if get_origin(field.annotation) is Literal:
            return "one of " + ", ".join(get_args(field.annotation))
        return field.description or "a value"

    @classmethod
    def read(cls, values: Mapping[str, Value]) -> Self:
        """Check keys and values.

        Raises
        ------
        ConfigError
            One line for each unknown key, wrong type and value out of range.
        """
        if unknown := [key for key in values if key not in cls.key_names()]:
            raise ConfigError("\n".join(unknown_key(key, cls.key_names()) for key in unknown))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            keys = dict.fromkeys(str(details["loc"][0]) for details in error.errors())
            raise ConfigError("\n".join(cls._invalid(key, values) for key in keys)) from None

    @classmethod
    def _invalid(cls, key: str, values: Mapping[str, Value]) -> str:
        if key not in values:
            return f"{key}: must be set"
        value = values[key]
        # The descriptions of whole numbers leave out what hardly anybody comes near.
        too_large = isinstance(value, int) and value > LARGEST and "whole number >=" in cls.allowed(key)
        most = f" and at most {LARGEST}" if too_large else ""
        allowed = cls.allowed(key)
        return f"{key} = {value!r}: must be {allowed}{most}{value_meant(key, value, allowed)}"


if TYPE_CHECKING:
    from fedapp.data import Dataset


@dataclass(frozen=True)
class Setting:
    """What decides which keys are read.

    Attributes
    ----------
    config : RunConfig
        As given. It is made of the keys that this file is for, so that its type can't be named here.
    strategy : FederatedStrategy
        Made from it.
    dataset : Dataset
    gpus : bool
        Whether a client, or the server, may have a GPU.
    on_devices : bool
        Whether the clients are devices rather than simulated.
    """

    config: Any
    strategy: FederatedStrategy
    dataset: "Dataset"
    gpus: bool
    on_devices: bool = False


@dataclass(frozen=True)
class Readers:
    """Which runs read a key.

    Attributes
    ----------
    text : callable
        Says so of a key.
    holds : callable
        Tells whether the run of a setting reads a key.
    """

    text: Callable[[str], str]
    holds: Callable[[Setting, str], bool]

    def __and__(self, other: "Readers") -> "Readers":
        """Return those that are both."""
        return Readers(
            lambda key: f"{self.text(key)}; {other.text(key)}",
            lambda setting, key: self.holds(setting, key) and other.holds(setting, key),
        )


@dataclass(frozen=True)
class Key:
    """Meaning and readers of a key, and the unit of its number."""

    meaning: str
    readers: Readers
    unit: str = ""


def _strategies_with(key: str) -> str:
    own = key.replace("-", "_")
    found = {name: kind for name, kind in REGISTRY.items() if may_set(kind.Config, kind.capabilities, own)}
    for has_rounds, said in ((True, "strategies with rounds"), (False, "strategies without rounds")):
        if [*found] == [name for name, kind in REGISTRY.items() if kind.has_rounds is has_rounds]:
            return said
    return ", ".join(found)


def where(key: str, *values: Value) -> Readers:
    """Return the runs in which another key has one of these values."""
    attribute = key.replace("-", "_")
    said = key if values == (True,) else f"{key} = {' or '.join(map(str, values))}"
    return Readers(lambda _: said, lambda setting, _: getattr(setting.config, attribute) in values)


def if_(text: str, holds: Callable[[Setting], bool]) -> Readers:
    """Return the runs of which ``holds`` is true; ``text`` describes the condition."""
    return Readers(lambda _: text, lambda setting, _: holds(setting))


SIMULATED = if_("a simulation", lambda setting: not setting.on_devices)


EVERY_RUN = if_("every run", lambda _: True)

# The strategies whose Config has a field of the key's name. Those that refuse all but its default aren't named.
OWN = Readers(_strategies_with, lambda setting, key: hasattr(setting.strategy.config, key.replace("-", "_")))

WITH_GRAPH = if_("a graph of clients", lambda setting: setting.strategy.session.graph is not None)
WITH_DIRECTIONS = if_(
    "a graph of clients by data",
    lambda setting: setting.strategy.session.graph is not None and setting.strategy.session.graph.by_data,
)


def key(meaning: str, readers: Readers = EVERY_RUN) -> Key:
    """Declare a key, in the ``Annotated`` of its type."""
    return Key(meaning, readers)
