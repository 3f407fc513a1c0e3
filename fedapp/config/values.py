"""What a key accepts, and the base of all schemas: flat, strict, one clear line for each error."""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from strategies.flower.messages import LARGEST

Value = str | int | float | bool

# What nobody reads who wants one of them, if there are more.
_FEW = 20

# What the number of clients is called: in plans and from Python, and of a federation.
_CLIENTS = ("num-clients", "num-supernodes")
CLIENTS_BY = "--federation-config num-supernodes=N"


class ConfigError(ValueError):
    """The run config, or what it asks for, isn't possible; the text is the message for the user."""


def pattern(allowed: str, regex: str) -> Any:
    """Return what makes a text match a regular expression; ``allowed`` says it in words."""
    return Field(description=allowed, pattern=regex)


def choice(names: Any) -> Any:
    """Return what makes a text one of some names."""
    return pattern(f"one of {', '.join(names)}", f"^({'|'.join(names)})$")


def _not_tiny(value: float) -> float:
    if 0 < value < 1e-6:
        raise ValueError("below 1e-6")
    return value


# The description of a type is what an error says is allowed.
Positive = Annotated[float, Field(description="a number > 0", gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(description="a number >= 0", ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(description="a number in (0, 1]", gt=0, le=1)]
UnitInterval = Annotated[float, Field(description="a number in [0, 1]", ge=0, le=1)]
BelowOne = Annotated[float, Field(description="a number in [0, 1)", ge=0, lt=1)]
Inside = Annotated[float, Field(description="a number in (0, 1)", gt=0, lt=1)]
Count = Annotated[int, Field(description="a whole number >= 0", ge=0, le=LARGEST)]
Counting = Annotated[int, Field(description="a whole number >= 1", ge=1, le=LARGEST)]
# Beyond what any machine does in a task or a run: a slip, not a wish.
Thousands = Annotated[int, Field(description="a whole number from 0 to 1000000", ge=0, le=10**6)]
Port = Annotated[int, Field(description="a whole number from 0 to 65535", ge=0, le=65535)]
Threads = Annotated[int, Field(description="a whole number from 0 to 1024", ge=0, le=1024)]
Moderate = Annotated[float, Field(description="a number from 1e-6 to 1e6", ge=1e-6, le=1e6)]
ZeroOrModerate = Annotated[
    float, Field(description="0, or a number from 1e-6 to 1e6", ge=0, le=1e6), AfterValidator(_not_tiny)
]
UpToAHundred = Annotated[float, Field(description="a number from 0 to 100", ge=0, le=100)]
UpToAMillion = Annotated[float, Field(description="a number from 0 to 1e6", ge=0, le=1e6)]
Flag = Annotated[bool, Field(description="true or false")]
Text = Annotated[str, Field(description="a text", pattern=r"^[^\x00]*$")]


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
        return f"{key} = {value!r}: must be {cls.allowed(key)}{most}"


def unknown_key(key: str, keys: Sequence[str]) -> str:
    """Say that there is no such key, and what may have been meant."""
    close = difflib.get_close_matches(key, keys, n=1)
    if key in _CLIENTS:  # which looks like other keys
        hint = (
            f"did you mean {_CLIENTS[1]!r}?"
            if _CLIENTS[1] in keys
            else f"clients are counted by {CLIENTS_BY}"
        )
    elif close:
        hint = f"did you mean {close[0]!r}?"
    elif len(keys) > _FEW:
        near = difflib.get_close_matches(key, keys, n=3, cutoff=0.4)
        hint = "; ".join([*([f"near are {', '.join(near)}"] if near else []), "`fedapp keys` lists all"])
    else:
        hint = f"allowed are {', '.join(keys)}"
    return f"unknown key {key!r}: {hint}"
