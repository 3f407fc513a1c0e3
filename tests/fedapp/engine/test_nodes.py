"""What nodes say of themselves without messages is what they answer to one."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from flwr.app import ConfigRecord

from fedapp import client_app, server
from fedapp.config import RunConfig
from fedapp.engine.nodes import Nodes
from fedapp.engine.run import torch_as_it_was
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.vectorized import VectorizedGrid
from fedapp.engine.workers import WorkersGrid
from strategies.clients.roster import Client, Roster
from strategies.flower import messages
from strategies.flower.grids import DescribingGrid, Description

CLIENTS = 12


class Asking(VectorizedGrid):
    """Leaves it to its nodes, and counts them."""

    asked = 0

    def descriptions(self, node_ids: Sequence[int], config: ConfigRecord) -> Mapping[int, Description]:
        return {}

    def _work(self, message: Any) -> Any:
        self.asked += message.metadata.message_type == messages.DESCRIBE
        return super()._work(message)


class Telling(Asking):
    """Knows what they would say."""

    descriptions = SequentialGrid.descriptions


def described(grid: Asking, config: RunConfig) -> list[Client]:
    record = server.task_config(server.prepare(config, CLIENTS))
    return Roster().refresh(grid, record)


def said(clients: list[Client]) -> list[Any]:
    return [(c.node_id, c.index, c.num_examples, c.name, c.described, dict(c.description)) for c in clients]


@pytest.mark.parametrize("values", [{}, {"data_imbalance": 1.0, "min_samples": 1}, {"test_on": "own"}])
def test_it_is_what_they_answer(values, configure):
    config = configure(**values)
    telling, asking = Telling(client_app.app, CLIENTS), Asking(client_app.app, CLIENTS)
    found = described(telling, config)
    assert isinstance(telling, DescribingGrid)
    assert said(found) == said(described(asking, config))
    assert len(found) == CLIENTS
    assert (telling.asked, asking.asked) == (0, CLIENTS)
    assert not telling.contexts.known  # nor has any of them been made


def test_a_node_that_says_more_of_itself_is_asked(configure):
    grid = Telling(client_app.app, CLIENTS)
    grid.contexts[3].node_config["name"] = "kitchen"
    clients = described(grid, configure())
    assert [client.name for client in clients if client.name] == ["kitchen"]
    assert grid.asked == CLIENTS


@pytest.mark.parametrize("gpus", [False, True])
def test_clients_of_workers_have_a_gpu_where_these_have(gpus, configure, monkeypatch):
    record = server.task_config(server.prepare(configure(server_device="cpu"), CLIENTS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    grid = WorkersGrid(CLIENTS, cast(Any, None), gpus=gpus)
    with torch_as_it_was():
        assert grid.descriptions([3], record)[3]["gpu"] == gpus


def test_what_does_not_fit_is_for_the_nodes_to_say(configure):
    record = server.task_config(server.prepare(configure(), CLIENTS))
    grid = Telling(client_app.app, CLIENTS)
    assert len(grid.descriptions([1, 2], record)) == 2
    record["input-shape"] = [3]
    assert grid.descriptions([1, 2], record) == {}


def test_nodes_are_made_when_they_are_looked_at():
    nodes = Nodes(1000)
    assert (len(nodes), list(nodes)[-1], nodes.partition_of(1000), nodes.known) == (1000, 1000, 999, {})
    context = nodes[7]
    assert context is nodes[7]
    assert context.node_config == {"partition-id": 6, "num-partitions": 1000}
    assert nodes.untouched
    context.node_config["partition-id"] = 3
    assert (nodes.partition_of(7), nodes.untouched, list(nodes.known)) == (3, False, [7])
    for missing in (0, 1001):
        with pytest.raises(KeyError):
            nodes[missing]
    with pytest.raises(TypeError):
        del nodes[1]
