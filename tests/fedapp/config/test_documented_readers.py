"""Of each strategy docs/config.md names exactly those keys that the strategy can be made with another value of."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from fedapp.config.document import GOES_WITH
from fedapp.config.strategy_keys import READ_BY_CLIENTS, parameters_of_strategies
from strategies import REGISTRY, StrategyConfig
from strategies.core.parameters import Parameter, parameters_of

ROOT = Path(__file__).parents[3]
LOOPS = {"strategies with rounds": True, "strategies without rounds": False}
# Clients read those of differential privacy, whatever the strategy.
OWN = sorted(parameters_of_strategies().keys() - parameters_of(StrategyConfig).keys() - {*READ_BY_CLIENTS})
# Values to try where a type, its bounds or its choices don't say any, and what else a key goes with.
TEXTS = ("uniform", "polynomial:0.5")
EQUAL = {"client_weights": "uniform", "aggregation_weights": "identical", "buffer_size": 9}
BESIDE: tuple[dict[str, Any], ...] = ({}, {"participation": "uniform"}, EQUAL)
# Without a rule the number is read by nobody, nor are the others of secure sums without the sums.
OF_SUMS = "secure_neighbours", "secure_threshold", "secure_clipping", "secure_metrics"
SECURE = {key: {"secure_sums": True} for key in OF_SUMS}
ALWAYS_BESIDE = {"faulty_clients": {"aggregation_rule": "median"}, **SECURE}


def documented(key: str) -> set[str]:
    """Return the strategies that docs/config.md names as readers of a key, or of the one that it goes with."""
    key = GOES_WITH.get(key.replace("_", "-"), key)
    lines = (ROOT / "docs" / "config.md").read_text("utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith(f"| `{key.replace('_', '-')}` |"))
    said = row.rstrip(" |").rsplit(" | ", 1)[-1].split(";")[0].strip()
    if said in LOOPS:
        return {name for name, kind in REGISTRY.items() if kind.has_rounds is LOOPS[said]}
    return set(said.split(", "))


def others(parameter: Parameter) -> list[Any]:
    """Return values that a parameter allows beside its default."""
    choices = get_args(parameter.kind) if get_origin(parameter.kind) is Literal else parameter.range.choices
    numbers = [True, False] if parameter.kind is bool else [1, 2, 3, 100, 0.5, 0.05, 1.5]
    found = []
    for value in choices or (TEXTS if parameter.kind is str else numbers):
        try:
            parameter.check(value)
        except ValueError:
            continue
        found.append(value)
    return [value for value in found if value != parameter.default]


def can_be_made(name: str, key: str, values: list[Any]) -> bool:
    """Return True if the strategy takes one of these values of the key, with whatever goes with it."""
    own = REGISTRY[name].Config.__dataclass_fields__.keys()
    for value in values:
        for beside in BESIDE:
            beside = beside | ALWAYS_BESIDE.get(key, {})
            try:
                REGISTRY[name](
                    REGISTRY[name].Config(**{k: beside[k] for k in own & beside.keys()}, **{key: value})
                )
            except (TypeError, ValueError):
                continue
            return True
    return False


@pytest.mark.parametrize("key", OWN)
def test_the_page_names_the_strategies_that_a_key_can_be_set_for(key: str) -> None:
    values = others(parameters_of_strategies()[key])
    assert documented(key) == {name for name in REGISTRY if can_be_made(name, key, values)} != set()
