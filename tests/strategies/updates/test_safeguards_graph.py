"""Copies of one device in the graph of clients: what they weigh together, by enumeration and at worst."""

import numpy as np
import pytest
from flwr.app import MetricRecord
from hypothesis import given
from hypothesis import strategies as st

from strategies import FedAvg
from strategies.clients.client_graph import DirectionGraph
from strategies.clients.roster import Client


def shares(copies: int, honest: int, *, guarded: bool, seed: int = 0, direction: str = "own") -> float:
    """Return what copies of one device weigh together, beside devices with directions of non-negative data."""
    rng = np.random.default_rng(seed)
    others = np.abs(rng.normal(1.0, 0.5, (honest, 20)))
    own = others.mean(axis=0) if direction == "centre" else np.abs(rng.normal(1.0, 0.5, 20))
    vectors = np.vstack([np.tile(own, (copies, 1)), others])
    graph = DirectionGraph(guarded=guarded)
    graph.build(range(copies + honest), vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    clients = [Client(i, i, None, MetricRecord()) for i in range(copies + honest)]
    return float(graph.weights(clients)[:copies].sum())


def test_the_two_cases_of_the_review():
    assert shares(2, 1, guarded=False) > 0.85
    assert shares(2, 1, guarded=True) == pytest.approx(2 / 3)
    assert shares(5, 20, guarded=False) > 0.35
    assert shares(5, 20, guarded=True) == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("direction", ["own", "centre"])
def test_copies_gain_no_more_than_their_number(direction):
    # By enumeration. What is proved is 2k/C; with directions of their own, copies stay within a tenth of k/C.
    for clients in range(3, 16):
        for copies in range(1, clients):
            for seed in range(3):
                share = shares(copies, clients - copies, guarded=True, seed=seed, direction=direction)
                assert share <= min(1.0, 2 * copies / clients) + 1e-12
                if direction == "own" and copies <= clients // 2:
                    assert share <= copies / clients + 0.1


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(2, 8))
def test_no_client_weighs_more_than_twice_its_share(seed, clients, dimensions):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(clients, dimensions)) ** 3
    graph = DirectionGraph(guarded=True)
    graph.build(range(clients), vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    weights = graph.weights([Client(i, i, None, MetricRecord()) for i in range(clients)])
    assert weights.max() <= 2 / clients + 1e-12
    assert weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("against", [2, 3])
def test_the_bound_holds_where_most_pairs_point_opposite_ways(against):
    # Two copies, and accomplices opposite to all: most pairs, so the median one, have misalignment 1.
    up, down = np.array([1.0, 0.0]), np.array([-1.0, 0.0])
    graph = DirectionGraph(guarded=True)
    graph.build(range(2 + against), np.array([up, up] + [down] * against))
    clients = [Client(i, i, None, MetricRecord()) for i in range(2 + against)]
    assert graph.weights(clients).max() <= 2 / len(clients) + 1e-12


def test_in_a_simulation_the_formula_is_the_papers(tied, federation, model, train_config):
    def importances(safeguards: str) -> list[float]:
        strategy = FedAvg(FedAvg.Config(client_weights="adjacency", safeguards=safeguards))
        grid = federation(sizes=(1, 1, 1), directions=tied)
        strategy.start(grid, model(1.0), num_rounds=1, timeout=5.0, train_config=train_config())
        return list(strategy.session.client_weights().values())

    assert importances("off") == importances("auto") == pytest.approx([3 / 12, 4 / 12, 5 / 12])
    # The median pair's misalignment is 1/4: A = ln 2 · (1, 2, 2) for the pairs 01, 02, 12.
    assert importances("on") == pytest.approx([3 / 10, 3 / 10, 4 / 10])
