"""The graph of the clients that are there: who is in it, and the weights that follow."""

import logging
import math

import numpy as np
import pytest

from strategies import FedAvg, FedProx
from strategies.clients import graph
from strategies.flower import messages
from tests.strategies.clients.handshake import Handshake, indices, warnings

LOGGER = "flwr.strategies"


# ---- The graph --------------------------------------------------------------------------------------------------


def test_three_clients_by_hand(federation, tied):
    handshake = Handshake(federation(directions=tied))
    clients = handshake()
    assert indices(clients) == [0, 1, 2]
    np.testing.assert_allclose(handshake.graph.directions, tied, rtol=1e-15)
    # mis = ½ (1 − (0, 1/2, 3/4)) = 1/2, 1/4, 1/8; −ln of it = ln 2 · (1, 2, 3)
    A = math.log(2) * np.array([[0, 1, 2], [1, 0, 3], [2, 3, 0]])
    np.testing.assert_allclose(handshake.graph.adjacency, A, rtol=1e-14)
    # p_i = (1 + 2, 1 + 3, 2 + 3) / 12
    weights = handshake.graph.weights(clients)
    np.testing.assert_allclose(weights, [3 / 12, 4 / 12, 5 / 12], rtol=1e-14)
    assert weights.sum() == pytest.approx(1, abs=1e-15)


def test_weights_of_some_clients_sum_to_one(federation, tied):
    handshake = Handshake(federation(directions=tied))
    clients = handshake()
    # p = (3, 4, 5) / 12, whatever the order: (5, 3) / 8
    np.testing.assert_allclose(handshake.graph.weights([clients[2], clients[0]]), [5 / 8, 3 / 8], rtol=1e-14)


def test_the_snapshot_has_every_array(federation, tied):
    handshake = Handshake(federation(directions=tied))
    handshake()
    arrays = handshake.graph.snapshot()
    assert set(arrays) == {"clients", "messages", "misalignment", "adjacency", "eigenvalues"}
    assert arrays["clients"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(arrays["messages"], tied, rtol=1e-15)
    np.testing.assert_allclose(
        arrays["misalignment"], [[0, 1 / 2, 1 / 4], [1 / 2, 0, 1 / 8], [1 / 4, 1 / 8, 0]], rtol=1e-14
    )
    # L = ln 2 · [[3, −1, −2], [−1, 4, −3], [−2, −3, 5]]: trace 12, sum of principal 2-minors
    # (12 − 1) + (15 − 4) + (20 − 9) = 33, so λ² − 12 λ + 33 = 0: λ = 6 ± √3
    expected = math.log(2) * np.array([0, 6 - math.sqrt(3), 6 + math.sqrt(3)])
    np.testing.assert_allclose(arrays["eigenvalues"], expected, atol=1e-14)


def test_neighbours_and_floor_reach_the_graph(federation, tied):
    handshake = Handshake(federation(directions=tied), neighbours=1)
    clients = handshake()
    # Most similar: 0 → 2, 1 → 2, 2 → 1; the edge 0–1 goes: degrees 2, 3, 5
    np.testing.assert_allclose(handshake.graph.weights(clients), [0.2, 0.3, 0.5], rtol=1e-14)
    twins = Handshake(federation(directions=[[1.0, 0.0], [0.0, 2.0], [0.0, 1.0]]), floor=1 / 16)
    clients = twins()
    # mis = 1/2, 1/2 and 0, floored at 1/16: A = ln 2 · (1, 1, 4), degrees 2, 5, 5
    np.testing.assert_allclose(twins.graph.weights(clients), [2 / 12, 5 / 12, 5 / 12], rtol=1e-14)


def test_a_direction_is_scaled_to_a_unit_vector(federation, tied):
    grid = federation(directions=tied)
    grid.spoil(1, "long", "direction")
    handshake = Handshake(grid)
    assert indices(handshake()) == [0, 1, 2]
    np.testing.assert_allclose(handshake.graph.directions, tied, rtol=1e-15)


def test_one_client_is_its_own_graph(federation):
    handshake = Handshake(federation([3.0], [1]))
    assert handshake.graph.weights(handshake()).tolist() == [1.0]
    assert handshake.graph.snapshot()["eigenvalues"].tolist() == [0.0]


# ---- Clients that come and go -----------------------------------------------------------------------------------


def test_a_late_joiner_is_asked_and_the_graph_built_anew(federation, add_node, tied):
    grid = federation(directions=tied)
    handshake = Handshake(grid)
    handshake()
    # like client 0 to all others, and its twin: mis(0, 3) = 0, floored at 1e-12
    add_node(grid, like=0, partition=3, node_id=99)
    clients = handshake()
    assert indices(clients) == [0, 1, 2, 3]
    assert grid.asked(messages.ASK_DIRECTION) == [0, 1, 2, 3]
    assert handshake.graph.clients == (0, 1, 2, 3)
    assert handshake.graph.adjacency.shape == (4, 4)
    # degrees in ln 2: x = 12 ln 10 / ln 2 = 39.863: 3 + x, 1 + 3 + 1, 2 + 3 + 2, 3 + x
    x = 12 * math.log(10) / math.log(2)
    expected = np.array([3 + x, 5, 7, 3 + x]) / (18 + 2 * x)
    np.testing.assert_allclose(handshake.graph.weights(clients), expected, rtol=1e-13)


def test_a_late_joiner_with_a_bad_direction_leaves_the_graph_as_it_is(federation, add_node, tied, caplog):
    grid = federation(directions=tied)
    handshake = Handshake(grid)
    handshake()
    add_node(grid, like=0, partition=3, node_id=99, direction=[1.0, 2.0])
    with caplog.at_level(logging.WARNING, LOGGER):
        clients = handshake()
    assert indices(clients) == [0, 1, 2]
    np.testing.assert_allclose(handshake.graph.weights(clients), [3 / 12, 4 / 12, 5 / 12], rtol=1e-14)
    (warning,) = warnings(caplog)
    assert "client 3 (node 99) takes no part" in warning
    assert "shape (3,), not zero; it has shape (2,)" in warning


def test_a_node_that_leaves_drops_out_of_the_graph_until_it_is_back(federation, tied):
    grid = federation(directions=tied)
    handshake = Handshake(grid)
    handshake()
    grid.node(0).present = False
    clients = handshake()
    assert indices(clients) == [1, 2]
    assert handshake.graph.snapshot()["clients"].tolist() == [1, 2]
    assert handshake.graph.weights(clients).tolist() == [0.5, 0.5]
    grid.node(0).present = True
    np.testing.assert_allclose(handshake.graph.weights(handshake()), [3 / 12, 4 / 12, 5 / 12], rtol=1e-14)
    assert grid.asked(messages.ASK_DIRECTION) == [0, 1, 2]


def test_a_node_in_anothers_place_has_its_own_message(federation, add_node, tied):
    # Node 99 takes over partition 1 with other data and leaves again, when node 20 is back: each counts by its own.
    grid = federation(directions=tied, node_ids=[10, 20, 30])
    handshake = Handshake(grid)
    handshake()
    grid.nodes[20].present = False
    new = add_node(grid, like=1, partition=1, node_id=99, direction=[0.0, 0.0, 1.0])
    assert indices(handshake()) == [0, 1, 2]
    np.testing.assert_allclose(handshake.graph.directions[1], [0, 0, 1])
    new.present, grid.nodes[20].present = False, True
    assert [client.node_id for client in handshake()] == [10, 20, 30]
    np.testing.assert_allclose(handshake.graph.directions[1], [0, 1, 0])


# ---- Adjacency weights of the baselines -------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FedAvg, FedProx])
def test_the_baselines_aggregate_by_adjacency_weights(
    federation, model, values_of, train_config, tied, strategy
):
    # Δ_i = −.5 (1 − c_i) = 1, .5, −1 for c = (3, 2, −1); p = (3, 4, 5) / 12: Σ p_i Δ_i = (3 + 2 − 5) / 12 = 0, while
    # samples would give −3/8 and equal weights 1/6. From w = 1 stay there; from w = 2, Δ = .5, 0, −1.5: −6/12.
    run = strategy(strategy.Config(client_weights="adjacency"))
    result = run.start(
        federation(directions=tied), model(1.0, 2.0), num_rounds=1, train_config=train_config()
    )
    assert values_of(result.arrays) == pytest.approx([1.0, 1.5], abs=1e-14)
    # f_i(1, 2) = ½ ((1 − c)² + (2 − c)²) = 2.5, .5, 6.5: (7.5 + 2 + 32.5) / 12
    assert result.train_metrics_clientapp[1]["train-loss"] == pytest.approx(3.5)


def test_uniform_participation_scales_adjacency_weights(federation, model, values_of, train_config, tied):
    grid = federation(directions=tied)
    config = FedAvg.Config(client_weights="adjacency", participation="uniform", fraction_train=1 / 3)
    result = FedAvg(config).start(grid, model(1.0), num_rounds=1, train_config=train_config())
    (drawn,) = grid.asked()
    # L = 1 of C = 3: d_i = 3 p_i = 3/4, 1, 5/4, so w = 1 + (3/4 · 1, 1 · .5, −5/4)
    assert values_of(result.arrays) == pytest.approx([[1.75], [1.5], [-0.25]][drawn], abs=1e-14)


def test_a_failing_clients_weight_is_shared_over_the_others(federation, model, values_of, train_config, tied):
    grid = federation(directions=tied)
    grid.spoil(1, "raise")
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    result = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    # it stays in the graph, so p_0 : p_2 = 3 : 5: (3 · 1 − 5 · 1) / 8 = −1/4
    assert values_of(result.arrays) == pytest.approx([0.75], abs=1e-14)


def test_the_federated_loss_of_the_clients_has_adjacency_weights(federation, model, train_config, tied):
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    result = strategy.start(
        federation(directions=tied), model(1.0), num_rounds=1, train_config=train_config()
    )
    # the model stays 1 (above): f_i(1) = ½ (1 − c_i)² = 2, .5, 2: (6 + 2 + 10) / 12
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(1.5)


# ---- Config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"message_floor": 0.0}, "message_floor = 0.0"),
        ({"message_floor": 1.0}, "message_floor = 1.0"),
        ({"neighbours": -1}, "neighbours = -1"),
        ({"client_weights": "adjacent"}, "'adjacent': .*adjacency"),
    ],
)
def test_a_wrong_option_is_refused_before_any_client_is_asked(federation, model, options, text):
    grid = federation()
    with pytest.raises(ValueError, match=text):
        FedAvg(FedAvg.Config(**{"client_weights": "adjacency", **options})).start(grid, model(1.0), 1)
    assert grid.sent == []


def test_the_graph_is_that_of_strategies_graph(federation):
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(9, 5)).tolist()
    handshake = Handshake(federation(range(9), [1] * 9, directions=directions), floor=1e-3, neighbours=3)
    clients = handshake()
    unit = np.array(directions) / np.linalg.norm(directions, axis=1, keepdims=True)
    A = graph.sparsify(graph.adjacency(graph.misalignment(unit), 1e-3), 3)
    np.testing.assert_allclose(handshake.graph.adjacency, A, rtol=1e-12)
    np.testing.assert_allclose(handshake.graph.weights(clients), A.sum(1) / A.sum(), rtol=1e-12)
