"""A parameter of a strategy is declared once, in its Config: the app's schema and pyproject.toml follow from it."""

from dataclasses import replace

import pytest

from fedapp.config import RunConfig, defaults
from fedapp.config.run_config import key_of
from fedapp.config.strategy_keys import OTHER_DEFAULTS, READ_BY, READ_BY_CLIENTS, parameters_of_strategies
from strategies import REGISTRY, StrategyConfig
from strategies.core.parameters import parameters_of


def test_pyproject_has_every_key_with_its_declared_default():
    declared = {name: parameter.default for name, parameter in parameters_of_strategies().items()}
    assert {name: defaults()[name.replace("_", "-")] for name in declared} == declared
    assert sorted(defaults()) == sorted(RunConfig.key_names())


@pytest.mark.parametrize("method", REGISTRY)
def test_a_name_means_the_same_for_every_method(method):
    in_the_app, of_all = parameters_of_strategies(), parameters_of(StrategyConfig)
    for name, here in parameters_of(REGISTRY[method].Config).items():
        first = in_the_app[name]
        if name in OTHER_DEFAULTS:
            first = replace(first, default=here.default, range=here.range)
        if name in of_all:  # of which a method may demand another value
            first = replace(first, default=here.default)
        assert replace(here, meaning="") == replace(first, meaning="")
        assert here.meaning
        assert key_of(RunConfig, name.replace("_", "-")).meaning


def test_what_the_app_adds_is_of_parameters_that_there_are():
    assert {*OTHER_DEFAULTS, *READ_BY, *READ_BY_CLIENTS} <= parameters_of_strategies().keys()
