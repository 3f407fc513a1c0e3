"""The spectral-graph perturbed method on clients of bare numpy: every u by hand, and who is sent what."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies import Spectral
from strategies.flower import messages
from tests.strategies.methods.spectral_requests import MANY, sent

Directions = list[list[float]]


CENTRES = [4.0, 6.0, 0.0]  # of the hand calculations below


def neighbours_of(grid: Any, server_round: int) -> list[float]:
    """Return u of every participant, where the model is one number."""
    return [float(sent(request, "neighbours")[0]) for request in grid.requests("train", server_round)]


# ---- By hand ----------------------------------------------------------------------------------------------------


def test_three_rounds_by_hand(federation, model, values_of, train_config, tied):
    # p = (3, 4, 5) / 12; p_ij / p_i = (0, 1/3, 2/3), (1/4, 0, 3/4), (2/5, 3/5, 0); c = (4, 6, 0), c̄ = 1 + 2 + 0 = 3.
    # One step of .5 at ½ w̄ + ½ u: w_i = w̄ − .5 (½ w̄ + ½ u_i − c_i), and w̄ ← w̄ − .5 (w̄ − 3), by lemma 4.3.
    #
    # Round 1. u = w̄ = 0:                           w = 2, 3, 0
    # Round 2. w̄ = 2/4 + 3/3 + 0 = 1.5
    #   u = 3/3 + 0 = 1,  2/4 + 0 = .5,  2·2/5 + 3·3/5 = 2.6
    #   at ½ (1.5 + u) = 1.25, 1, 2.05:              w = 1.5 + 1.375, 1.5 + 2.5, 1.5 − 1.025 = 2.875, 4, .475
    # Round 3. w̄ = 2.875/4 + 4/3 + .475·5/12 = .71875 + 1.33333 + .19792 = 2.25
    #   u = 4/3 + .95/3 = 1.65,  .71875 + .35625 = 1.075,  1.15 + 2.4 = 3.55
    # The end: 2.25 + .375
    grid = federation(CENTRES, directions=tied)
    seen = []
    strategy = Spectral(
        Spectral.Config(perturbation_beta=0.5), observer=lambda p: seen.append(values_of(p.arrays)[0])
    )
    strategy.start(grid, model(0.0), num_rounds=3, train_config=train_config())
    assert seen == pytest.approx([0.0, 1.5, 2.25, 2.625], rel=1e-7)
    assert neighbours_of(grid, 1) == [0.0, 0.0, 0.0]
    assert neighbours_of(grid, 2) == pytest.approx([1.0, 0.5, 2.6], rel=1e-7)
    assert neighbours_of(grid, 3) == pytest.approx([1.65, 1.075, 3.55], rel=1e-7)


def test_the_most_similar_neighbours_by_hand(federation, model, values_of, train_config, tied):
    # With k = 1 the edge 0–1 goes: A = ln 2 · (2 for 02, 3 for 12), degrees 2, 3, 5, p = .2, .3, .5;
    # p_ij / p_i = (0, 0, 1), (0, 0, 1), (2/5, 3/5, 0). Round 1 as above: w = 2, 3, 0, and w̄ = .4 + .9 = 1.3.
    grid = federation(CENTRES, directions=tied)
    strategy = Spectral(Spectral.Config(perturbation_beta=0.5, neighbours=1))
    result = strategy.start(grid, model(0.0), num_rounds=1, train_config=train_config())
    assert values_of(result.arrays) == pytest.approx([1.3], rel=1e-14)
    strategy = Spectral(Spectral.Config(perturbation_beta=0.5, neighbours=1))
    strategy.start(grid, model(0.0), num_rounds=2, train_config=train_config())
    assert neighbours_of(grid, 2) == pytest.approx([0.0, 0.0, 0.8 + 1.8], rel=1e-7)


def test_an_absent_client_counts_with_the_initial_model_until_its_first_own(
    federation, model, train_config, tied
):
    # Clients 0 and 1 from w_0 = 8, one step to 8 − .5 (8 − c): w = 6, 7; client 2 stays at 8.
    # u_0 = 7/3 + 8·2/3 = 23/3, u_1 = 6/4 + 8·3/4 = 7.5
    grid = federation(CENTRES, directions=tied)
    strategy = Spectral(Spectral.Config(participation="fixed:0,1"))
    strategy.start(grid, model(8.0), num_rounds=2, train_config=train_config())
    assert grid.asked("train", 2) == [0, 1]
    assert neighbours_of(grid, 1) == [8.0, 8.0]
    assert neighbours_of(grid, 2) == pytest.approx([23 / 3, 7.5], rel=1e-7)


def test_a_failing_client_keeps_its_last_local_model(federation, model, train_config, tied):
    # Client 1 fails in round 1 only: w = 2, (0: the initial model), 0, so
    # u = 0, 2/4 + 0 = .5, 2·2/5 = .8 in round 2
    grid = federation(CENTRES, directions=tied)
    grid.spoil(1, "nan")
    strategy = Spectral(observer=lambda p: grid.spoil(1, None) if p.aggregation == 1 else None)
    result = strategy.start(grid, model(0.0), num_rounds=2, train_config=train_config())
    assert [result.train_metrics_clientapp[t]["failures"] for t in (1, 2)] == [1, 0]
    assert neighbours_of(grid, 2) == pytest.approx([0.0, 0.5, 0.8], rel=1e-7)


# ---- Who is sent what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999])
def test_below_one_every_request_has_beta_and_a_second_model_of_the_same_layout(
    federation, train_config, beta
):
    initial = ArrayRecord(
        {"a": Array(np.full((2, 3), 0.1, np.float32)), "b": Array(np.array(2.0)), "n": Array(np.array([7]))}
    )
    grid = federation(MANY, [1] * 6)
    Spectral(Spectral.Config(perturbation_beta=beta)).start(
        grid, initial, num_rounds=2, train_config=train_config()
    )
    requests = grid.requests("train")
    assert len(requests) == 12
    for request in requests:
        assert request.content.config_records["config"][messages.BETA] == beta
        assert list(request.content.array_records) == ["arrays", "neighbours"]
        u = request.content.array_records["neighbours"]
        assert [(k, a.dtype, tuple(a.shape)) for k, a in u.items()] == [
            ("a", "float32", (2, 3)),
            ("b", "float64", ()),
            ("n", "int64", (1,)),
        ]


def test_at_one_nothing_of_it_is_sent(federation, model, train_config):
    grid = federation()
    Spectral(Spectral.Config(perturbation_beta=1.0)).start(
        grid, model(1.0), num_rounds=2, train_config=train_config()
    )
    requests = grid.requests("train")
    assert len(requests) == 6
    for request in requests:
        assert messages.BETA not in request.content.config_records["config"]
        assert list(request.content.array_records) == ["arrays"]


@pytest.mark.parametrize(("beta", "models"), [(0.5, 2), (1.0, 1)])
def test_the_second_model_counts_as_traffic_down(federation, model, train_config, beta, models):
    initial = model(1.0, 2.0)
    size = len(initial["w"].data)
    strategy = Spectral(Spectral.Config(perturbation_beta=beta))
    result = strategy.start(federation(), initial, num_rounds=2, train_config=train_config())
    for metrics in result.train_metrics_clientapp.values():
        assert (metrics["bytes-down"], metrics["bytes-up"]) == (3 * models * size, 3 * size)
