"""A parameter of a strategy is declared once, in its Config: the app's schema and pyproject.toml follow from it."""

from dataclasses import replace

import pytest

from fedapp.config import RunConfig, defaults
from fedapp.config.run_config import key_of
from fedapp.config.strategy_keys import OTHER_DEFAULTS, READ_BY, READ_BY_CLIENTS, parameters_of_strategies
from strategies import REGISTRY, StrategyConfig
from strategies.core.parameters import parameters_of

EVERY = [(method, name) for method, kind in REGISTRY.items() for name in parameters_of(kind.Config)]


def test_pyproject_has_every_key_with_its_declared_default() -> None:
    declared = {name: parameter.default for name, parameter in parameters_of_strategies().items()}
    assert {name: defaults()[name.replace("_", "-")] for name in declared} == declared
    assert sorted(defaults()) == sorted(RunConfig.key_names())


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_a_name_means_the_same_for_every_method(method: str, name: str) -> None:
    here, first = parameters_of(REGISTRY[method].Config)[name], parameters_of_strategies()[name]
    if name in OTHER_DEFAULTS:
        first = replace(first, default=here.default, range=here.range)
    if name in parameters_of(StrategyConfig):  # of which a method may demand another value
        first = replace(first, default=here.default)
    assert replace(here, meaning="") == replace(first, meaning="")


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_every_parameter_says_what_it_means(method: str, name: str) -> None:
    assert parameters_of(REGISTRY[method].Config)[name].meaning
    assert key_of(RunConfig, name.replace("_", "-")).meaning


def test_what_the_app_adds_is_of_parameters_that_there_are() -> None:
    assert {*OTHER_DEFAULTS, *READ_BY, *READ_BY_CLIENTS} <= parameters_of_strategies().keys()
