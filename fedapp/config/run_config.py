"""The run config: every key of a run, composed from what declares them.

The defaults stand in ``pyproject.toml``, section ``[tool.flwr.app.config]``, where Flower reads them. A strategy of
the user's own brings keys of its own (`fedapp.config.own_keys`): the fields of its ``Config`` that no other has.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import create_model

from fedapp.config import resume
from fedapp.config.conflicts import check_conflicts
from fedapp.config.data_keys import DataKeys
from fedapp.config.key import ConfigError, Key, KeyConflictError, Keys, Setting, Value, if_
from fedapp.config.own_keys import STRATEGY_CONFIG, own_fields, unfolded
from fedapp.config.run_keys import OF_REGIONS, RunKeys
from fedapp.config.strategy_keys import (
    ProtectionKeys,
    StrategyKeys,
    declared,
    is_of_the_library,
    strategy_class,
)
from fedapp.config.training_keys import LR_SCHEDULES, TrainingKeys
from fedapp.data.errors import DataError
from fedapp.own import OwnPartError
from strategies import FederatedStrategy
from strategies.clients.registered import NodeRecord, addressed_nodes
from strategies.core.conflicts import ConflictError
from strategies.core.parameters import Parameter, Range
from strategies.rounds.participation import Participation

# The sections of `docs/config.md`, in order.
SECTIONS: tuple[type[Keys], ...] = (StrategyKeys, DataKeys, TrainingKeys, ProtectionKeys, RunKeys)


class RunConfig(RunKeys, ProtectionKeys, TrainingKeys, DataKeys, StrategyKeys):
    """Every key of a run."""

    @classmethod
    def load(cls, overrides: Mapping[str, Value] | None = None) -> "RunConfig":
        """Return the defaults with ``overrides`` (kebab-case keys) in their place.

        With ``resume``, the config of that run takes the place of the defaults, and overrides must be as there.

        Raises
        ------
        ConfigError
            Unknown key, wrong type, value out of range, a combination that makes no sense, or one that isn't
            that of the run to resume.
        """
        given = _with_own_keys(overrides or {})
        config = _read({**defaults(), **given})
        if config.resume:
            config = _read({**defaults(), **resume.resumed(given, defaults())})
        config._check()
        return config

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Return the config in a message, which the server has checked and which may hold more than its keys."""
        known = {key: value for key, value in defaults().items() if key in cls.key_names()}
        return cls.read({**known, **{key: values[key] for key in cls.key_names() if key in values}})

    @classmethod
    def recorded(cls, values: Mapping[str, Value]) -> "RunConfig":
        """Return the config in a run's config.toml, as it is."""
        return _read({**defaults(), **values})

    @classmethod
    def defaults(cls) -> dict[str, Value]:
        """Return the default of every key, those of the user's own strategy too."""
        own = {
            key: cls.field_of(key).default for key in cls.key_names() if not cls.field_of(key).is_required()
        }
        return {**own, **defaults()}

    def flat(self) -> dict[str, Value]:
        """Return the config as Flower has it: one level, kebab-case keys."""
        return self.model_dump(by_alias=True)

    def __reduce__(self) -> tuple[Any, ...]:
        # No module holds the schema of a strategy with keys of its own: another process makes it again.
        return _again, (self.strategy, self.__getstate__())

    def _check(self) -> None:
        """Raise ConfigError for a text that says nothing, and for keys that exclude each other."""
        if not _is_schedule(self.lr_schedule):
            raise ConfigError(f"lr-schedule = {self.lr_schedule!r}: must be {LR_SCHEDULES}")
        if self.relay:
            self._check_region()
        try:
            Participation.parse(self.participation, self.fraction_train)
            check_conflicts(self)
            if self.registered_nodes or ":" in self.participation:
                addressed_nodes(self.participation, NodeRecord(self.registered_nodes), self.min_clients)
        except ValueError as error:
            raise as_config_error(error, type(self)) from None

    def _check_region(self) -> None:
        """Raise ConfigError for a key that the run of a region doesn't read."""
        usual = type(self).defaults()
        for key, value in self.flat().items():
            drawn = key == "participation" and ":" not in str(value)
            if value != usual[key] and (key not in OF_REGIONS or drawn):
                raise ConfigError(
                    f"{key} = {value!r}: the run of a region (relay) doesn't read it, as the run of the server above "
                    f"decides what its devices do; allowed are {', '.join(OF_REGIONS)}, with participation = tag:TAG "
                    "and name:NAME"
                )
        if self.tiers.startswith("regions"):
            raise ConfigError(
                f"tiers = {self.tiers!r}: the clients of a region (relay) are SuperNodes; allowed are none, and "
                "relays where they are relays of smaller regions"
            )


def _is_schedule(schedule: str) -> bool:
    """Return True if a schedule of the learning rate has a rate in (0, 1], or has none."""
    name, _, rate = schedule.partition(":")
    try:
        return name != "exponential" or 0 < float(rate) <= 1
    except ValueError:
        return False


def in_keys(error: Exception, schema: type[RunConfig] = RunConfig) -> str:
    """Return an error's text; that of the strategies, which name Python fields, with the keys of the run config."""
    # The texts of these errors have keys already, and names of the user's own.
    if isinstance(error, ConfigError | DataError | OwnPartError):
        return str(error)
    fields = "|".join(name for name in schema.model_fields if "_" in name)
    # Not in a path that is called like a field.
    return re.sub(rf"(?<![\w./-])({fields})(?![\w./-])", lambda field: field[1].replace("_", "-"), str(error))


def as_config_error(error: ValueError, schema: type[RunConfig] = RunConfig) -> ConfigError:
    """Return an error of the config, with the keys of the run config."""
    if isinstance(error, ConfigError):
        return error
    text = in_keys(error, schema)
    if not isinstance(error, ConflictError):
        return ConfigError(text)
    keys = tuple(key.replace("_", "-") for key in error.keys)
    return KeyConflictError(text, keys, in_keys(ValueError(error.allowed), schema))


def key_of(schema: type[Keys], key: str) -> Key:
    """Return a key's meaning and readers."""
    return next(item for item in schema.field_of(key).metadata if isinstance(item, Key))


def _read(values: Mapping[str, Value]) -> RunConfig:
    """Check keys and values by the schema that goes with the strategy among them."""
    name = values["strategy"]
    if not isinstance(name, str) or not name:
        return RunConfig.read(values)  # says what a strategy must be
    return schema_with(strategy_class(name)).read(values)


@cache
def schema_with(strategy: type[FederatedStrategy]) -> type[RunConfig]:
    """Return the schema with the keys that a strategy's Config adds, and with what pyproject.toml has for others.

    Raises
    ------
    ConfigError
        If a field of its Config is no number, text or flag with a default.
    """
    known = RunConfig.model_fields.keys()
    added = {} if is_of_the_library(strategy.Config) else own_fields(strategy, known)
    for key, value in defaults().items():
        if (name := key.replace("-", "_")) not in known and name not in added:
            unread = Parameter(name, type(value), value, Range(), "of a strategy of your own")
            added[name] = declared(unread, _OF_ANOTHER)
    if not added:
        return RunConfig
    return create_model("RunConfig", __base__=RunConfig, **added)  # type: ignore[call-overload, no-any-return]


def _again(strategy: str, state: dict[Any, Any]) -> RunConfig:
    """Return the config that was pickled."""
    config = schema_with(strategy_class(strategy)).model_construct()
    config.__setstate__(state)
    return config


_OF_ANOTHER = if_("another strategy", lambda _: False)


@cache
def own_keys(strategy: type[FederatedStrategy]) -> type[Keys]:
    """Return the keys that a strategy's Config adds to those of every run, as a section of their own.

    Raises
    ------
    ConfigError
        If a field of its Config is no number, text or flag with a default.
    """
    added = own_fields(strategy, RunConfig.model_fields.keys())
    return create_model(  # type: ignore[call-overload, no-any-return]
        f"{strategy.__name__}Keys", __base__=Keys, __doc__=f"Keys of {strategy.__name__} alone.", **added
    )


def _with_own_keys(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the given values with the keys of ``strategy-config`` as keys of their own, if the strategy has any.

    A resumed run has the strategy of the earlier run.
    """
    values, earlier = dict(given), given.get("resume")
    if isinstance(earlier, str) and earlier and "strategy" in (before := resume.read_run(earlier)[0]):
        values.setdefault("strategy", before["strategy"])
    name = values.get("strategy", defaults()["strategy"])
    text = values.get(STRATEGY_CONFIG, "" if earlier else defaults()[STRATEGY_CONFIG])
    if not (isinstance(name, str) and name and isinstance(text, str) and text):
        return values
    own = own_keys(strategy_class(name))
    if not own.key_names():
        return values
    asked = {key: value for key, value in values.items() if value != defaults().get(key)}
    return {**values, **unfolded(asked, text, own, RunConfig.key_names())}


@cache
def defaults() -> dict[str, Value]:
    """Read ``[tool.flwr.app.config]`` from the app's pyproject.toml: beside the package, or inside a wheel's."""
    package = Path(__file__).parents[1]
    for path in (package.parent / "pyproject.toml", package / "pyproject.toml"):
        if path.is_file():
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
            if (app := settings.get("tool", {}).get("flwr", {}).get("app")) is not None:
                values: dict[str, Value] = app["config"]
                return values
    raise ConfigError(f"no pyproject.toml with [tool.flwr.app.config] beside {package}")


def unread_keys(setting: Setting) -> dict[str, Value]:
    """Return the keys that are given and that the run doesn't read, with their values, in the schema's order."""
    config = setting.config
    defaults = type(config).defaults()
    return {
        key: value
        for key, value in config.flat().items()
        if value != defaults[key] and not key_of(type(config), key).readers.holds(setting, key)
    }
