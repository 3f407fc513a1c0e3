"""Central differential privacy without rounds: noise by the largest weight, and a bound on contributions."""

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from strategies import FedAvg, FedBuff, FedFix, VirtualClock

PRIVATE = {"client_weights": "uniform", "dp": "central", "dp_clipping_norm": 0.5, "dp_noise_multiplier": 3.0}
FIXED = {"fedfix_interval": 0.3, "server_lr": 1.0, "time_scenario": "F80"}


def private(kind: Any, **options: Any) -> Any:
    strategy = kind(**{**PRIVATE, "fraction_evaluate": 0.0, "seed": 1, **options}, clock=VirtualClock())
    strategy.run_options.deterministic_noise = True
    return strategy


def end_of(strategy: Any, grid: Any, start: ArrayRecord, rounds: int, config: Any) -> np.ndarray:
    result = strategy.start(grid, start, num_rounds=rounds, train_config=config)
    return np.asarray(result.arrays["w"].numpy(), dtype=np.float64)


def test_a_buffer_of_all_clients_is_a_private_round_bit_for_bit(federation, model, train_config):
    ends = [
        end_of(private(kind, **options), federation(), model(1.0, 2.0), 3, train_config())
        for kind, options in ((FedAvg, {}), (FedBuff, {"buffer_size": 3, "aggregation_weights": "identical"}))
    ]
    assert np.array_equal(*ends)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(FedBuff, {"buffer_size": 2, "aggregation_weights": "identical", "server_lr": 1.0}), (FedFix, FIXED)],
)
def test_noise_is_by_the_largest_weight_that_a_client_can_have(
    kind, options, federation, model, train_config
):
    strategy = private(kind, **options)
    noise = end_of(strategy, federation(), model(*[1.0] * 20_000), 1, train_config()) - 1
    weights = strategy.session.contribution_weights.current.weight
    if kind is FedBuff:
        assert set(weights.values()) == {0.5}
    else:  # the slowest needs several intervals, and isn't in the first model
        assert max(weights.values()) >= 2 * min(weights.values())
    assert noise.std() == pytest.approx(3 * 0.5 * max(weights.values()), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(FedBuff, {"buffer_size": 2}), (FedBuff, {"buffer_size": 1, "concurrency": 2}), (FedFix, FIXED)],
)
def test_a_client_is_asked_as_often_as_it_may_and_the_run_ends_when_all_were(
    kind, options, federation, model, train_config, caplog
):
    grid = federation()
    strategy = private(kind, dp_max_contributions=2, **options)
    with caplog.at_level(logging.WARNING, "flwr.strategies"):
        end_of(strategy, grid, model(1.0), 100, train_config())
    assert sorted(grid.asked()) == [0, 0, 1, 1, 2, 2]
    assert strategy.session.task_table.max_contributions_per_client() == 2
    assert strategy.session.aggregations < 7
    assert caplog.text.count("has contributed dp_max_contributions = 2 times: it isn't asked any more") == 1
    assert "every client has contributed as often as it may: the run ends" in caplog.text


def test_a_client_that_comes_back_as_another_node_has_what_it_had(federation, model, train_config):
    strategy = private(FedBuff, dp_max_contributions=1, buffer_size=1)
    end_of(strategy, federation(), model(1.0), 100, train_config())
    task_table = strategy.session.task_table
    member = task_table.members[0]
    task_table.forget(member)
    assert task_table.reached_contribution_limit(type(member)(member.client))
    assert task_table.max_contributions_per_client() == 1


@pytest.mark.parametrize(("dp", "often"), [("local", 4), ("central", 1)])
def test_nobody_is_bounded_without_central_privacy(federation, model, train_config, dp, often):
    strategy = private(FedBuff, dp=dp, dp_max_contributions=1, buffer_size=3)
    config = ConfigRecord({**train_config(), "dp": dp})
    end_of(strategy, federation(), model(1.0), 4, config)
    assert strategy.session.task_table.max_contributions_per_client() == often
