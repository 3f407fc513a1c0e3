"""The contract of every strategy: a new one joins these tests by being in ``strategies.REGISTRY``."""

import dataclasses
import logging
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Result, Strategy

from strategies import REGISTRY, AsynchronousStrategy, Progress

Make = Callable[..., Any]

# q of the methods that don't go by p, or not quite. Where all arrivals count alike, at task times (.2, .6, 1), by
# 1/τ = (15, 5, 3)/23; Ringmaster with R = 10 throws none away. Two pieces of work on one model come from the fastest.
# FADAS has FedBuff's schedule, by hand in test_schemes.py. Delay-adaptive steps begin with p, and τ_c = 3:
# between two arrivals of client 0 are two others at most; client 1 has δ = 4 in three of five, else 3, and client 2
# has 6, 7 and 7: p times (1, .85, (3/6 + 3/7 + 3/7)/3).
DELAYED = np.array([1, 2 * 0.85, 5 * (3 / 6 + 3 / 7 + 3 / 7) / 3])
IDENTICAL = {
    "fedasync": [15 / 23, 5 / 23, 3 / 23],
    "ringmaster": [15 / 23, 5 / 23, 3 / 23],
    "rennala": [1.0, 0.0, 0.0],
    "fadas": [1 / 2, 1 / 3, 1 / 6],
    "delay-adaptive": (DELAYED / DELAYED.sum()).tolist(),
}

pytestmark = pytest.mark.parametrize("name", REGISTRY)


def small_config(name: str, **values: Any) -> Any:
    """The strategy's defaults, but for a buffer that fits a few clients."""
    config = REGISTRY[name].Config
    fields = {field.name for field in dataclasses.fields(config)}
    return config(
        **{
            key: value
            for key, value in {"buffer_size": 2, "feddyn_alpha": 1.0, **values}.items()
            if key in fields
        }
    )


def initial_model() -> ArrayRecord:
    return ArrayRecord(
        {"layer.weight": Array(np.full((2, 3), 0.1, np.float32)), "layer.bias": Array(np.array([1.0, -1.0]))}
    )


def content(record: ArrayRecord) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [(name, array.dtype, tuple(array.shape), array.data) for name, array in record.items()]


@pytest.fixture
def run(federation, train_config):
    """Run three rounds on six clients."""

    def start(name: str, *, seed: int = 0, arrays: ArrayRecord | None = None, **kwargs: Any) -> Result:
        grid = federation([0.0, 1.0, -2.0, 3.0, 0.5, 2.0], [1, 2, 3, 4, 5, 6], seed=seed)
        strategy = REGISTRY[name](small_config(name), **kwargs)
        return strategy.start(
            grid, arrays or initial_model(), num_rounds=3, timeout=10.0, train_config=train_config(2, 0.1)
        )

    return start


def test_is_a_flower_strategy_with_a_frozen_config_of_defaults(name):
    assert issubclass(REGISTRY[name], Strategy)
    config = REGISTRY[name].Config()  # every field has a default
    assert dataclasses.is_dataclass(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert REGISTRY[name]().config == config


def test_is_named_in_kebab_case(name):
    assert name == name.lower()
    assert name.replace("-", "").isalnum()


def test_says_where_it_comes_from(name):
    assert re.search(r"[A-Z]\w+.* (19|20)\d\d, (eq|section|algorithm)", REGISTRY[name].__doc__ or "")


def test_three_rounds_move_a_model_of_the_same_layout(name, run):
    before, after = initial_model(), run(name).arrays
    assert [entry[:3] for entry in content(after)] == [entry[:3] for entry in content(before)]
    assert content(after) != content(before)
    assert all(np.isfinite(array.numpy()).all() for array in after.values())


def test_approaches_the_minimum_of_the_federated_objective(name, federation, train_config):
    # Σ p_i (w − c_i) = 0 at c̄ = Σ p_i c_i, for the p_i that the strategy weighs by; equal curvatures, so no method is
    # led astray. By samples it is (1·3 + 2·2 − 5·1) / 8 = .25. By the graph of directions (1, 3), (1, 2), (1, −1):
    # m_iᵀ m_j = 7/√50, −2/√20, −1/√10; A = 5.293, .323, .418; p = (.465, .473, .062), and c̄ = 2.28095.
    # An asynchronous strategy takes small steps to it, and circles it as closely as they are small. One whose paper
    # has no such weights goes to Σ q_i c_i, for the q that it says it minimises.
    asynchronous = issubclass(REGISTRY[name], AsynchronousStrategy)
    # An adaptive step doesn't shrink with the update.
    lr = {"fadas": 0.01}.get(name, 0.04) if asynchronous else 1.0
    rounds = (500 if name in IDENTICAL else 250) if asynchronous else 40
    # FedAMP's model is the mean of the clients' own: where each trains alone, that of their minima.
    strategy = REGISTRY[name](small_config(name, server_lr=lr, fedamp_alpha=0.0, eval_every=rounds))
    result = strategy.start(
        federation(),
        ArrayRecord({"w": Array(np.array([1.0]))}),
        num_rounds=rounds,
        train_config=train_config(),
    )
    if strategy.session.graph is None:
        expected, p = 0.25, np.array([1, 2, 5]) / 8
    else:
        expected, p = 2.28095, strategy.session.graph.weights(strategy.session.clients)
    assert p @ [3.0, 2.0, -1.0] == pytest.approx(expected, abs=1e-5)
    if name in IDENTICAL:
        p = np.array(strategy.session.client_columns()["expected-share"])
        assert p == pytest.approx(IDENTICAL[name], abs=2e-3)
    assert result.arrays["w"].numpy() == pytest.approx(
        [p @ [3.0, 2.0, -1.0]], abs=0.1 if asynchronous else 1e-6
    )


def test_is_deterministic_whatever_the_node_ids_and_the_order_of_replies(name, run):
    one, other = run(name, seed=1), run(name, seed=2)
    assert content(one.arrays) == content(other.arrays)
    assert one.train_metrics_clientapp == other.train_metrics_clientapp


def test_leaves_the_callers_arrays_unchanged(name, run):
    given = initial_model()
    result = run(name, arrays=given)
    assert content(given) == content(initial_model())
    assert result.arrays is not given


def test_reports_every_aggregation_in_ascending_time(name, run):
    seen: list[Progress] = []
    run(name, observer=seen.append)
    assert [p.aggregation for p in seen] == [0, 1, 2, 3]
    assert seen[0].time == 0.0
    assert all(one.time < other.time for one, other in pairwise(seen))
    assert all(isinstance(v, int | float) for p in seen for v in p.metrics.values())


def test_summary_logs_its_name_and_what_is_unusual(name, caplog):
    for options, said in (
        ({}, "default settings"),
        ({"seed": 7, "update_norm_bound": 2.5}, "update_norm_bound = 2.5, seed = 7"),
    ):
        strategy = REGISTRY[name](**options)
        caplog.clear()
        with caplog.at_level(logging.INFO, "flwr.strategies"):
            strategy.summary()
        assert f"{type(strategy).__name__}: {said}" in caplog.text
        assert "server_lr" not in caplog.text
