"""Poisson sampling: each client by its own coin, empty rounds, and central noise that doesn't depend on who came."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from strategies import FedAvg, Scaffold
from strategies.core.conflicts import ConflictError

Make, Model, Values = Callable[..., Any], Callable[..., ArrayRecord], Callable[[ArrayRecord], list[float]]
PRIVATE = {"client_weights": "uniform", "dp": "central", "dp_clipping_norm": 0.5, "dp_noise_multiplier": 3.0}


def poisson(q: float, *, repeatable: bool = True, **options: Any) -> FedAvg:
    strategy = FedAvg(participation="poisson", fraction_train=q, **options)
    strategy.run_options.deterministic_noise = repeatable
    return strategy


def test_a_sum_is_divided_by_the_expected_size(federation, model, values_of, train_config):
    # Δ_i = 1, .5, −1 and p_i = 1/8, 2/8, 5/8, as in test_round.py: 1 + Σ p_i Δ_i / .5 over those that were drawn
    grid, seen = federation(), set()
    parts = {0: 1 / 8, 1: 1 / 8, 2: -5 / 8}
    for seed in range(8):
        before = len(grid.asked())
        result = poisson(0.5, seed=seed).start(grid, model(1.0), num_rounds=1, train_config=train_config())
        drawn = tuple(sorted(grid.asked()[before:]))
        assert values_of(result.arrays) == pytest.approx([1 + sum(parts[i] for i in drawn) / 0.5], rel=1e-6)
        seen.add(drawn)
    assert len(seen) > 3


def test_an_empty_round_keeps_the_model_and_says_so(federation, model, values_of, train_config, caplog):
    grid = federation()
    with caplog.at_level(logging.INFO, "flwr.strategies"):
        result = poisson(1e-9).start(grid, model(1.0), num_rounds=2, train_config=train_config())
    assert values_of(result.arrays) == [1.0]
    said = [record for record in caplog.records if "no client was drawn, the model stays" in record.message]
    assert [record.levelname for record in said] == ["INFO", "INFO"]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert (
        warning
        == "after 2 aggregations the model is the initial one: no client took part, or every update was 0"
    )
    assert not grid.asked()


def noise_of(q: float, grid: Any, model: Model, config: Any, seed: int = 1) -> np.ndarray:
    """Return the noise of a round of a large model that nobody trains away from where it is."""
    strategy = poisson(q, seed=seed, **PRIVATE)
    result = strategy.start(grid, model(*[1.0] * 20_000), num_rounds=1, timeout=10.0, train_config=config)
    return np.asarray(result.arrays["w"].numpy(), dtype=np.float64) - 1


def test_noise_is_of_the_expected_size_whoever_comes(federation, model, train_config):
    # z S / (q C) = 3 · .5 / (q · 3), with four standard errors; also where nobody, or not everybody drawn, answers.
    assert noise_of(1.0, federation(), model, train_config()).std() == pytest.approx(0.5, rel=0.02)
    failing = federation()
    failing.spoil(1, "raise")
    assert noise_of(1.0, failing, model, train_config()).std() == pytest.approx(0.5, rel=0.02)
    empty = federation()
    assert noise_of(0.01, empty, model, train_config()).std() == pytest.approx(50, rel=0.02)
    assert not empty.asked()


def test_one_client_moves_the_sum_by_its_clipped_update_over_the_expected_size(
    federation, model, train_config
):
    # The same noise with and without client 1, of which .5 / 3 is left: its update is longer than S.
    whole, without = (federation(), federation())
    without.spoil(1, "raise")
    far = [model(*[100.0] * 9) for _ in range(2)]
    ends = []
    for grid, start in zip((whole, without), far, strict=True):
        result = poisson(1.0, seed=4, **PRIVATE).start(
            grid, start, num_rounds=1, timeout=10.0, train_config=train_config()
        )
        ends.append(np.asarray(result.arrays["w"].numpy(), dtype=np.float64))
    assert np.linalg.norm(ends[0] - ends[1]) == pytest.approx(0.5 / 3, rel=1e-4)


def test_coins_that_privacy_counts_on_come_from_the_seed_in_a_simulation_alone(
    federation, model, train_config
):
    def drawn(*, repeatable: bool) -> list[int]:
        grid = federation()
        poisson(0.5, repeatable=repeatable, **PRIVATE).start(
            grid, model(1.0), num_rounds=30, train_config=train_config()
        )
        return list(grid.asked())

    assert drawn(repeatable=True) == drawn(repeatable=True)
    assert drawn(repeatable=False) != drawn(repeatable=False)


class Choosing(FedAvg):
    def select(self, clients: Any, rng: Any) -> Any:
        return list(clients), None


@pytest.mark.parametrize(
    ("kind", "options", "keys"),
    [
        (FedAvg, {"round_deadline": 1.0}, {"dp", "participation", "round_deadline"}),
        (FedAvg, {"stragglers": 0.5, "drop_stragglers": True}, {"dp", "participation", "stragglers"}),
        (FedAvg, {"stragglers": 0.5}, {"dp", "participation", "stragglers"}),
        (FedAvg, {"over_select": 0.5, "dp": "none"}, {"over_select", "participation"}),
        (Choosing, {}, {"dp", "participation", "strategy"}),
        (Scaffold, {}, {"dp", "strategy"}),
        (FedAvg, {"dp": "none", "aggregation_rule": "median"}, {"aggregation_rule", "participation"}),
    ],
)
def test_what_would_tell_a_coin_is_refused(kind, options, keys):
    with pytest.raises(ConflictError) as raised:
        kind(participation="poisson", fraction_train=0.5, **{**PRIVATE, **options})
    assert set(raised.value.keys) == keys
