"""The handshake for directions: who is in the graph, who isn't and why, and the weights that follow."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from strategies import FedAvg, FedProx, graph, messages
from strategies.client_graph import ClientGraph
from strategies.roster import Client, Roster

LOGGER = "flwr.strategies"
Make = Callable[..., Any]
Directions = list[list[float]]


class Handshake:
    """A roster and a graph that look at a grid together, as a strategy does every round."""

    def __init__(self, grid: Any, timeout: float = 10.0, **options: Any) -> None:
        self.grid = grid
        self.timeout = timeout
        self.roster = Roster(timeout=timeout)
        self.graph = ClientGraph(**options)

    def __call__(self, stopped: Callable[[], bool] = lambda: False, **config: Any) -> list[Client]:
        record = ConfigRecord(config)
        clients = self.roster.refresh(self.grid, record)
        return self.graph.refresh(self.grid, clients, record, self.timeout, stopped)


def indices(clients: list[Client]) -> list[int]:
    return [client.index for client in clients]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# ---- The graph --------------------------------------------------------------------------------------------------


def test_three_clients_by_hand(federation: Make, tied: Directions) -> None:
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


def test_weights_of_some_clients_sum_to_one(federation: Make, tied: Directions) -> None:
    handshake = Handshake(federation(directions=tied))
    clients = handshake()
    # p = (3, 4, 5) / 12, whatever the order: (5, 3) / 8
    np.testing.assert_allclose(handshake.graph.weights([clients[2], clients[0]]), [5 / 8, 3 / 8], rtol=1e-14)


def test_the_snapshot_has_every_array(federation: Make, tied: Directions) -> None:
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


def test_neighbours_and_floor_reach_the_graph(federation: Make, tied: Directions) -> None:
    handshake = Handshake(federation(directions=tied), neighbours=1)
    clients = handshake()
    # Most similar: 0 → 2, 1 → 2, 2 → 1; the edge 0–1 goes: degrees 2, 3, 5
    np.testing.assert_allclose(handshake.graph.weights(clients), [0.2, 0.3, 0.5], rtol=1e-14)
    twins = Handshake(federation(directions=[[1.0, 0.0], [0.0, 2.0], [0.0, 1.0]]), floor=1 / 16)
    clients = twins()
    # mis = 1/2, 1/2 and 0, floored at 1/16: A = ln 2 · (1, 1, 4), degrees 2, 5, 5
    np.testing.assert_allclose(twins.graph.weights(clients), [2 / 12, 5 / 12, 5 / 12], rtol=1e-14)


def test_a_direction_is_scaled_to_a_unit_vector(federation: Make, tied: Directions) -> None:
    grid = federation(directions=tied)
    grid.spoil(1, "long", "direction")
    handshake = Handshake(grid)
    assert indices(handshake()) == [0, 1, 2]
    np.testing.assert_allclose(handshake.graph.directions, tied, rtol=1e-15)


def test_one_client_is_its_own_graph(federation: Make) -> None:
    handshake = Handshake(federation([3.0], [1]))
    assert handshake.graph.weights(handshake()).tolist() == [1.0]
    assert handshake.graph.snapshot()["eigenvalues"].tolist() == [0.0]


# ---- The handshake ----------------------------------------------------------------------------------------------


def test_a_node_is_asked_once_in_a_run(federation: Make, model: Make, train_config: Make) -> None:
    grid = federation()
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    strategy.start(grid, model(1.0), num_rounds=3, train_config=train_config())
    assert grid.asked(messages.ASK_DIRECTION) == [0, 1, 2]
    assert grid.asked("train", 3) == [0, 1, 2]


def test_nobody_is_asked_where_no_graph_is_needed(federation: Make, model: Make, train_config: Make) -> None:
    grid, strategy = federation(), FedAvg()
    strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert strategy.graph is None
    assert grid.asked(messages.ASK_DIRECTION) == []


def test_the_question_carries_the_config_and_who_is_asked(federation: Make) -> None:
    grid = federation(node_ids=[30, 10, 20])
    Handshake(grid)(dataset="digits", lr=0.5)
    asked = [(m.metadata.dst_node_id, dict(m.content.config_records["config"]), list(m.content))
             for m in grid.requests(messages.ASK_DIRECTION)]  # fmt: skip
    assert asked == [
        (node_id, {"dataset": "digits", "lr": 0.5, "client": index}, ["config"])
        for index, node_id in enumerate([30, 10, 20])
    ]


READ, VECTOR = "its direction can't be read: ", "its direction must be a finite vector"
REASONS = {
    "raise": "no data",
    "drop": "it didn't answer the request for its direction",
    "unstorable": "it didn't answer the request for its direction",
    "unavailable": "Node Unavailable",
    "shape": VECTOR + " of shape (3,), not zero; it has shape (4,)",
    "matrix": "it has shape (1, 3)",
    "scalar": "it has shape ()",
    "empty": "it has shape (0,)",
    "zeros": VECTOR,
    "nan": VECTOR,
    "inf": VECTOR,
    "no-record": "needs a record 'direction' of one array",
    "no-array": "needs a record 'direction' of one array",
    "two-arrays": "needs a record 'direction' of one array",
    "bytes": READ,
    "npz": READ,
    "stype": READ,
    "text": READ,
}


def break_direction(grid: Any, partition: int, fault: str) -> None:
    if fault in ("drop", "unstorable", "unavailable"):
        grid.lose(partition, fault, messages.ASK_DIRECTION)
    else:
        grid.spoil(partition, fault, "direction")


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize("broken", [0, 1])
def test_without_a_valid_direction_a_client_takes_no_part_and_the_others_go_on(
    federation: Make,
    model: Make,
    train_config: Make,
    tied: Directions,
    caplog: pytest.LogCaptureFixture,
    broken: int,
    fault: str,
) -> None:
    grid = federation(directions=tied)
    break_direction(grid, broken, fault)
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    with caplog.at_level(logging.WARNING, LOGGER):
        result = strategy.start(grid, model(1.0), num_rounds=2, timeout=0.1, train_config=train_config())
    others = [i for i in range(3) if i != broken]
    assert [grid.asked("train", r) for r in (1, 2)] == [others, others]
    assert grid.asked(messages.ASK_DIRECTION).count(broken) <= 1  # and isn't asked again
    assert strategy.graph.clients == tuple(others)
    assert strategy.graph.weights(strategy.clients).tolist() == [0.5, 0.5]  # two clients have one edge
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["participants"], metrics["failures"]) == (2, 0)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"client {broken} (node {grid.node(broken).node_id}) takes no part: ")
    assert REASONS[fault] in warning
    assert "\n" not in warning


@pytest.mark.parametrize("broken", [0, 1])
def test_a_direction_too_small_to_be_squared_does_not_stop_the_server(
    federation: Make, tied: Directions, broken: int
) -> None:
    # 1e-161² is below the least normal double: the norm of such a direction has two digits.
    grid = federation(directions=tied)
    grid.spoil(broken, "tiny", "direction")
    handshake = Handshake(grid)
    clients = handshake()
    assert {0, 1, 2} - {broken} <= set(indices(clients))
    norms = np.linalg.norm(handshake.graph.directions, axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-12)


@pytest.mark.parametrize("fault", ["raise", "drop"])
def test_if_nobody_sends_a_direction_the_run_ends_with_the_reason(
    federation: Make, model: Make, train_config: Make, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    grid = federation()
    for partition in range(3):
        break_direction(grid, partition, fault)
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    with (
        caplog.at_level(logging.WARNING, LOGGER),
        pytest.raises(RuntimeError, match=r"no client sent a direction .* the log names the reasons"),
    ):
        strategy.start(grid, model(1.0), num_rounds=1, timeout=0.1, train_config=train_config())
    assert grid.asked("train") == []
    assert len(warnings(caplog)) == 3
    for partition in range(3):
        assert f"client {partition} (node {grid.node(partition).node_id})" in caplog.text


def test_a_stop_ends_the_handshake_at_once(
    federation: Make, model: Make, train_config: Make, same_bytes: Make, caplog: pytest.LogCaptureFixture
) -> None:
    grid, initial = federation(), model(1.0)
    grid.lose(1, "drop", messages.ASK_DIRECTION)
    strategy = FedAvg(
        FedAvg.Config(client_weights="adjacency"), stopped=lambda: bool(grid.asked(messages.ASK_DIRECTION))
    )
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, LOGGER):
        result = strategy.start(grid, initial, num_rounds=3, timeout=60, train_config=train_config())
    assert time.monotonic() - start < 10
    assert same_bytes(result.arrays, initial)
    assert grid.asked("train") == []
    assert strategy.graph.clients == ()
    assert warnings(caplog) == []  # nobody is blamed for not having answered


def test_after_a_stop_those_that_had_no_time_to_answer_are_asked_again(
    federation: Make, tied: Directions
) -> None:
    grid = federation(directions=tied)
    handshake = Handshake(grid)
    assert handshake(stopped=lambda: True) == []
    assert indices(handshake()) == [0, 1, 2]
    assert grid.asked(messages.ASK_DIRECTION) == [0, 1, 2] * 2


# ---- Clients that come and go -----------------------------------------------------------------------------------


def test_a_late_joiner_is_asked_and_the_graph_built_anew(
    federation: Make, add_node: Make, tied: Directions
) -> None:
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


def test_a_late_joiner_with_a_bad_direction_leaves_the_graph_as_it_is(
    federation: Make, add_node: Make, tied: Directions, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_node_that_leaves_drops_out_of_the_graph_until_it_is_back(
    federation: Make, tied: Directions
) -> None:
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


def test_a_node_in_anothers_place_has_its_own_message(
    federation: Make, add_node: Make, tied: Directions
) -> None:
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
    federation: Make, model: Make, values_of: Make, train_config: Make, tied: Directions, strategy: Any
) -> None:
    # Δ_i = −.5 (1 − c_i) = 1, .5, −1 for c = (3, 2, −1); p = (3, 4, 5) / 12: Σ p_i Δ_i = (3 + 2 − 5) / 12 = 0, while
    # samples would give −3/8 and equal weights 1/6. From w = 1 stay there; from w = 2, Δ = .5, 0, −1.5: −6/12.
    run = strategy(strategy.Config(client_weights="adjacency"))
    result = run.start(
        federation(directions=tied), model(1.0, 2.0), num_rounds=1, train_config=train_config()
    )
    assert values_of(result.arrays) == pytest.approx([1.0, 1.5], abs=1e-14)
    # f_i(1, 2) = ½ ((1 − c)² + (2 − c)²) = 2.5, .5, 6.5: (7.5 + 2 + 32.5) / 12
    assert result.train_metrics_clientapp[1]["train-loss"] == pytest.approx(3.5)


def test_uniform_participation_scales_adjacency_weights(
    federation: Make, model: Make, values_of: Make, train_config: Make, tied: Directions
) -> None:
    grid = federation(directions=tied)
    config = FedAvg.Config(client_weights="adjacency", participation="uniform", fraction_train=1 / 3)
    result = FedAvg(config).start(grid, model(1.0), num_rounds=1, train_config=train_config())
    (drawn,) = grid.asked()
    # L = 1 of C = 3: d_i = 3 p_i = 3/4, 1, 5/4, so w = 1 + (3/4 · 1, 1 · .5, −5/4)
    assert values_of(result.arrays) == pytest.approx([[1.75], [1.5], [-0.25]][drawn], abs=1e-14)


def test_a_failing_clients_weight_is_shared_over_the_others(
    federation: Make, model: Make, values_of: Make, train_config: Make, tied: Directions
) -> None:
    grid = federation(directions=tied)
    grid.spoil(1, "raise")
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    result = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    # it stays in the graph, so p_0 : p_2 = 3 : 5: (3 · 1 − 5 · 1) / 8 = −1/4
    assert values_of(result.arrays) == pytest.approx([0.75], abs=1e-14)


def test_the_federated_loss_of_the_clients_has_adjacency_weights(
    federation: Make, model: Make, train_config: Make, tied: Directions
) -> None:
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency", client_evaluation=True))
    result = strategy.start(
        federation(directions=tied), model(1.0), num_rounds=1, train_config=train_config()
    )
    # the model stays 1 (above): f_i(1) = ½ (1 − c_i)² = 2, .5, 2: (6 + 2 + 10) / 12
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(1.5)


# ---- Config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [({"message_floor": 0.0}, "message_floor = 0.0"), ({"message_floor": 1.0}, "message_floor = 1.0"),
     ({"neighbours": -1}, "neighbours = -1"), ({"client_weights": "adjacent"}, "'adjacent': .*adjacency")],
)  # fmt: skip
def test_a_wrong_option_is_refused_before_any_client_is_asked(
    federation: Make, model: Make, options: dict[str, Any], text: str
) -> None:
    grid = federation()
    with pytest.raises(ValueError, match=text):
        FedAvg(FedAvg.Config(**{"client_weights": "adjacency", **options})).start(grid, model(1.0), 1)
    assert grid.sent == []


def test_the_graph_is_that_of_strategies_graph(federation: Make) -> None:
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(9, 5)).tolist()
    handshake = Handshake(federation(range(9), [1] * 9, directions=directions), floor=1e-3, neighbours=3)
    clients = handshake()
    unit = np.array(directions) / np.linalg.norm(directions, axis=1, keepdims=True)
    A = graph.sparsify(graph.adjacency(graph.misalignment(unit), 1e-3), 3)
    np.testing.assert_allclose(handshake.graph.adjacency, A, rtol=1e-12)
    np.testing.assert_allclose(handshake.graph.weights(clients), A.sum(1) / A.sum(), rtol=1e-12)
