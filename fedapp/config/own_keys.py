"""Keys of a strategy of the user's own: the fields of its Config that no other strategy has.

What a key accepts and means is what the field says (`strategies.core.parameters`). `flwr run` passes on only keys
that stand in pyproject.toml; others come in one text, everywhere alike:
``strategy-config = "half-life=2.0 tick=0.1"``.
"""

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from fedapp.config.key import OWN, ConfigError, Keys, Readers, Value
from fedapp.config.options import PAIR, repeated_key
from fedapp.config.strategy_keys import StrategyKeys, configs_of_the_library, declared, new_fields
from fedapp.meant import unknown_key
from strategies import FederatedStrategy
from strategies.core.parameters import KINDS, parameters_of
from strategies.flower.internals import flatten_dict

STRATEGY_CONFIG = "strategy-config"


def own_fields(strategy: type[FederatedStrategy], known: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Return the fields of a strategy's Config that aren't among the known, as those of a schema.

    Raises
    ------
    ConfigError
        If one is no number, text or flag with a default, its default isn't what it accepts, it is called like a
        key that isn't the strategies', or it declares a field of the library's anew.
    """
    for name in sorted(new_fields(strategy) & (set(known) - StrategyKeys.model_fields.keys())):
        raise ConfigError(
            f"{strategy.__name__}.Config.{name}: {name.replace('_', '-')} is a key of every run, and isn't the "
            "strategy's; the field must be called something else"
        )
    try:
        parameters = parameters_of(strategy.Config)
    except ValueError as error:
        raise ConfigError(f"{strategy.__name__}.Config.{error}") from None
    for kind in configs_of_the_library(strategy):
        for name, usual in parameters_of(kind).items():
            if replace(parameters[name], default=usual.default) != usual:
                key = name.replace("_", "-")
                raise ConfigError(
                    f"{strategy.__name__}.Config.{name}: {key} is a key of every such strategy ({usual.meaning}), "
                    "and the field declares another; it must be called something else, or only have another default"
                )
    readers, added = Readers(lambda _: strategy.__name__, OWN.holds), {}
    for name in (field.name for field in fields(strategy.Config) if field.name not in known):
        if name not in parameters or parameters[name].default is MISSING:
            raise ConfigError(
                f"{strategy.__name__}.Config.{name}: must be a {', '.join(kind.__name__ for kind in KINDS)} with a "
                "default, to be a key of the run config"
            )
        meaning = parameters[name].meaning or f"of {strategy.__name__}"
        added[name] = declared(replace(parameters[name], meaning=meaning), readers)
    return added


def unfolded(
    given: Mapping[str, Value], text: str, own: type[Keys], known: Collection[str]
) -> dict[str, Value]:
    """Return the given values with those of ``strategy-config`` as keys of their own.

    Parameters
    ----------
    given : mapping
        Values by key; a key that is in the text as well must have the same value there.
    text : str
        Value of ``strategy-config``.
    own : type of Keys
        Keys of the strategy alone, which the text may have.
    known : collection of str
        Keys of every run, which the text may not have.

    Raises
    ------
    ConfigError
        If the text isn't made of pairs of such keys, or gives a key another value.
    """
    values = _pairs(text)
    for key, value in values.items():
        if key in known:
            raise ConfigError(
                f"{STRATEGY_CONFIG} = {text!r}: {key} is no key of the strategy alone: give it by itself"
            )
        if key not in own.key_names():
            raise ConfigError(f"{STRATEGY_CONFIG} = {text!r}: {unknown_key(key, own.key_names())}")
        if given.get(key, value) != value:
            raise ConfigError(
                f"{STRATEGY_CONFIG} = {text!r}: {key} is given twice, as {given[key]!r} and {value!r}"
            )
    return {**given, **values, STRATEGY_CONFIG: ""}


def folded(given: Mapping[str, Value], own: Collection[str], known: Collection[str]) -> dict[str, Value]:
    """Return the given values with the strategy's own keys in ``strategy-config``, as `flwr run` passes them on.

    Parameters
    ----------
    given : mapping
        Values by key.
    own : collection of str
        Keys of the strategy alone.
    known : collection of str
        Keys that stand in pyproject.toml, which stay where they are.
    """
    alone = {key: value for key, value in given.items() if key in own and key not in known}
    if not alone:
        return dict(given)
    text = str(given.get(STRATEGY_CONFIG, ""))
    in_text = _pairs(text)
    texts = [text] if text else []
    texts += [f"{key}={_as_toml(value)}" for key, value in alone.items() if in_text.get(key) != value]
    rest = {key: value for key, value in given.items() if key not in alone}
    return {**rest, STRATEGY_CONFIG: " ".join(texts)}


def _as_toml(value: Value) -> str:
    if not isinstance(value, str):
        return str(value).lower()  # also of inf, nan and 1e-06
    # PAIR knows no quotation mark within a text, but TOML has another way to write one.
    return '"' + json.dumps(value, ensure_ascii=False)[1:-1].replace('\\"', "\\u0022") + '"'


def _pairs(text: str) -> dict[str, Value]:
    """Read ``key=value`` pairs as `flwr run` does."""
    lines = [f"{key} = {value}" for key, value in PAIR.findall(text)]
    if rest := PAIR.sub("", text).strip():
        raise ConfigError(f"{STRATEGY_CONFIG} = {text!r}: {rest!r} is not of the form key=value")
    if repeated := repeated_key(lines):
        raise ConfigError(f"{STRATEGY_CONFIG} = {text!r}: {repeated}")
    try:
        return dict(flatten_dict(tomllib.loads("\n".join(lines))))
    except ValueError as error:
        raise ConfigError(
            f"{STRATEGY_CONFIG} = {text!r}: {error}; allowed are pairs key=value with a number, true, false or a "
            "text in quotation marks"
        ) from None
