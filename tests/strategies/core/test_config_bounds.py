"""What a strategy's Config refuses where it is made, whichever app it is in."""

import math
from typing import Any

import pytest

from strategies import REGISTRY, FedAvg, Spectral
from strategies.core.conflicts import ConflictError
from strategies.core.parameters import Parameter, parameters_of
from strategies.flower.messages import LARGEST


def refused(parameter: Parameter) -> list[Any]:
    """Return values of a parameter's type that are just not what it declares."""
    allowed = parameter.range
    if parameter.kind is bool:
        return []
    if parameter.kind is str:
        return ["bog us", "a\0b"]
    if parameter.kind is int:
        return [int(allowed.ge or 0) - 1, LARGEST + 1]
    over = [bound for bound in (allowed.gt, allowed.lt) if bound is not None]
    over += [math.nextafter(allowed.ge, -math.inf)] if allowed.ge is not None else []
    over += [math.nextafter(allowed.le, math.inf)] if allowed.le is not None else []
    return [*(value for value in over if value not in allowed), math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("name", REGISTRY)
def test_no_value_out_of_range_is_taken(name):
    kind = REGISTRY[name]
    for parameter in parameters_of(kind.Config).values():
        for value in refused(parameter):
            with pytest.raises(ValueError, match=parameter.name):
                kind(**{parameter.name: value})
            with pytest.raises(ValueError, match=parameter.name):
                kind(kind.Config(**{parameter.name: value}))


def test_an_error_says_what_is_allowed():
    with pytest.raises(ValueError, match=r"^dp = 'Central': must be one of none, central, local$"):
        FedAvg(dp="Central")
    with pytest.raises(ValueError, match=r"^update_norm_bound = -1.0: must be a number >= 0$"):
        FedAvg(update_norm_bound=-1.0)
    with pytest.raises(ValueError, match=r"^min_available_nodes = -1: must be a whole number >= 0$"):
        FedAvg(min_available_nodes=-1)


@pytest.mark.parametrize("given", ["*bn*", ["*bn*"], ("*bn*",)])
def test_one_pattern_is_one_pattern(given):
    assert FedAvg(untrained=given).session.run.flower.untrained == ("*bn*",)


def test_weights_that_are_not_read_are_named(caplog):
    Spectral()
    Spectral(Spectral.Config(client_weights="samples"))
    assert not caplog.records
    Spectral(client_weights="uniform")
    Spectral(Spectral.Config(client_weights="uniform"))
    assert caplog.text.count("client_weights = 'uniform' isn't read: Spectral's are adjacency") == 2


@pytest.mark.parametrize("name", ["spectral", "fedamp"])
@pytest.mark.parametrize(("key", "value"), [("dp", "central"), ("aggregation_rule", "median")])
def test_nothing_protects_the_global_model_where_local_ones_go_past_it(name, key, value):
    with pytest.raises(ConflictError) as raised:
        REGISTRY[name](**{key: value})
    assert raised.value.keys == (key, "strategy")
