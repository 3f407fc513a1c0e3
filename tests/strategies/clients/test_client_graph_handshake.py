"""The handshake that makes the graph of clients: who is asked, and what becomes of those that don't answer well."""

import logging
import time
from typing import Any

import numpy as np
import pytest

from strategies import FedAvg
from strategies.flower import messages
from tests.strategies.clients.handshake import Handshake, indices, warnings

LOGGER = "flwr.strategies"


# ---- The handshake ----------------------------------------------------------------------------------------------


def test_a_node_is_asked_once_in_a_run(federation, model, train_config):
    grid = federation()
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    strategy.start(grid, model(1.0), num_rounds=3, train_config=train_config())
    assert grid.asked(messages.ASK_DIRECTION) == [0, 1, 2]
    assert grid.asked("train", 3) == [0, 1, 2]


def test_how_often_a_client_was_asked_is_counted_and_saved(federation, add_node):
    grid = federation()
    handshake = Handshake(grid)
    assert handshake.graph.most_asked() == 0
    handshake()
    handshake()
    assert handshake.graph.most_asked() == 1
    grid.node(1).present = False
    add_node(grid, 1, 1, 77)  # the same client by another key
    assert indices(handshake()) == [0, 1, 2]
    assert grid.asked(messages.ASK_DIRECTION) == [0, 1, 2, 1]
    assert handshake.graph.most_asked() == 2
    resumed = Handshake(grid)
    resumed.graph.restore(handshake.graph.state())
    assert resumed.graph.most_asked() == 2


def test_nobody_is_asked_where_no_graph_is_needed(federation, model, train_config):
    grid, strategy = federation(), FedAvg()
    strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    assert strategy.session.graph is None
    assert grid.asked(messages.ASK_DIRECTION) == []


def test_the_question_carries_the_config_and_who_is_asked(federation):
    grid = federation(node_ids=[30, 10, 20])
    Handshake(grid)(dataset="digits", lr=0.5)
    asked = [
        (m.metadata.dst_node_id, dict(m.content.config_records["config"]), list(m.content))
        for m in grid.requests(messages.ASK_DIRECTION)
    ]
    assert asked == [
        (node_id, {"dataset": "digits", "lr": 0.5, messages.CLIENT: index}, ["config"])
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
    federation, model, train_config, tied, caplog, broken, fault
):
    grid = federation(directions=tied)
    break_direction(grid, broken, fault)
    strategy = FedAvg(FedAvg.Config(client_weights="adjacency"))
    with caplog.at_level(logging.WARNING, LOGGER):
        result = strategy.start(grid, model(3.0), num_rounds=2, timeout=0.1, train_config=train_config())
    others = [i for i in range(3) if i != broken]
    assert [grid.asked("train", r) for r in (1, 2)] == [others, others]
    assert grid.asked(messages.ASK_DIRECTION).count(broken) <= 1  # and isn't asked again
    assert strategy.session.graph.clients == tuple(others)
    assert strategy.session.graph.weights(strategy.session.clients).tolist() == [
        0.5,
        0.5,
    ]  # two clients have one edge
    metrics = result.train_metrics_clientapp[2]
    assert (metrics["participants"], metrics["failures"]) == (2, 0)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"client {broken} (node {grid.node(broken).node_id}) takes no part: ")
    assert REASONS[fault] in warning
    assert "\n" not in warning


@pytest.mark.parametrize("broken", [0, 1])
def test_a_direction_too_small_to_be_squared_does_not_stop_the_server(federation, tied, broken):
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
    federation, model, train_config, caplog, fault
):
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


def test_a_stop_ends_the_handshake_at_once(federation, model, train_config, same_bytes, caplog):
    grid, initial = federation(), model(1.0)
    grid.lose(1, "drop", messages.ASK_DIRECTION)
    strategy = FedAvg(
        FedAvg.Config(client_weights="adjacency"),
        should_stop=lambda: bool(grid.asked(messages.ASK_DIRECTION)),
    )
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, LOGGER):
        result = strategy.start(grid, initial, num_rounds=3, timeout=60, train_config=train_config())
    assert time.monotonic() - start < 10
    assert same_bytes(result.arrays, initial)
    assert grid.asked("train") == []
    assert strategy.session.graph.clients == ()
    assert warnings(caplog) == []  # nobody is blamed for not having answered


def test_after_a_stop_those_that_had_no_time_to_answer_are_asked_again(federation, tied):
    grid = federation(directions=tied)
    handshake = Handshake(grid)
    assert handshake(should_stop=lambda: True) == []
    assert indices(handshake()) == [0, 1, 2]
    assert grid.asked(messages.ASK_DIRECTION) == [0, 1, 2] * 2
