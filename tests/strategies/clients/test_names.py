"""What a device is called: shown where a client is, cleaned, of the first that says it, and nothing rests on it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from strategies import AsyncFedAvg, FedAvg
from strategies.clients.roster import Client, Roster
from strategies.flower import messages
from strategies.flower.grids import DEPLOYMENT

LOGGER = "flwr.strategies"
Make = Callable[..., Any]


@pytest.fixture
def named(federation):
    """Make a grid of devices 10, 20, … with these names; None: says none."""

    def make(*names: Any) -> Any:
        size = len(names)
        grid = federation(
            [1.0] * size, [1] * size, node_ids=[10 * (i + 1) for i in range(size)], num_partitions=size
        )
        grid.engine = DEPLOYMENT
        for node, name in zip(grid.nodes.values(), names, strict=True):
            if name is not None:
                node.context.node_config["name"] = name
        return grid

    return make


def names(roster: Roster, grid: Any) -> list[str]:
    return [client.name for client in roster.refresh(grid, ConfigRecord())]


def test_a_client_is_shown_with_its_name_and_its_node():
    client = Client(5, 1, None, MetricRecord(), "oslo")
    assert (str(client), client.display_name) == ("client 1 (oslo)", "1 (oslo, node 5)")
    assert client.fields == {"client": 1, "device": "oslo", "node": "5"}
    nameless = Client(5, 1, None, MetricRecord())
    assert (str(nameless), nameless.display_name) == ("client 1", "1 (node 5)")


def test_a_roster_knows_the_names(named, caplog):
    roster = Roster()
    with caplog.at_level(logging.INFO, LOGGER):
        assert names(roster, named("oslo", None, "bern")) == ["oslo", "", "bern"]
    assert roster.names == {0: "oslo", 2: "bern"}
    said = [record.getMessage() for record in caplog.records]
    assert said == ["client 0 (oslo, node 10) takes part", "client 2 (bern, node 30) takes part"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("oslo-2.a_b", "oslo-2.a_b"),
        ("Zürich", "Zürich"),
        ("x, node 5) is fine (y", "x__node_5__is_fine__y"),
        ("\x1b[2Jred\n", "__2Jred_"),
        ("n" * 20_000_000, "n" * 63),
        ("", ""),
        (7, ""),
        ([1, 2], ""),
    ],
    ids=["plain", "letters", "parts of a line", "control", "long", "empty", "number", "list"],
)
def test_a_name_is_short_and_looks_like_nothing_else(said, shown):
    asked = messages.request(messages.DESCRIBE, 5, ConfigRecord(), ttl=60.0)
    reply = Message(RecordDict({"device": ConfigRecord({"name": said})}), reply_to=asked)
    assert messages.name_of(reply) == shown


def test_a_record_of_another_kind_is_no_name():
    asked = messages.request(messages.DESCRIBE, 5, ConfigRecord(), ttl=60.0)
    for record in (
        MetricRecord({"name": 1}),
        ConfigRecord({"other": "oslo"}),
        ConfigRecord({"name": b"oslo"}),
    ):
        assert messages.name_of(Message(RecordDict({"device": record}), reply_to=asked)) == ""


def test_a_name_belongs_to_the_first_that_says_it(named, add_node, caplog):
    grid, roster = named("oslo", "bern", None), Roster()
    names(roster, grid)
    grid.nodes[30].present = False
    with caplog.at_level(logging.WARNING, LOGGER):
        add_node(grid, like=0, partition=2, node_id=99)
        assert names(roster, grid) == ["oslo", "bern", ""]
        assert [client.node_id for client in roster.clients] == [10, 20, 99]  # it takes part, by its id
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["node 99 says that it is oslo, as client 0 did: its id is shown"]


def test_a_client_keeps_its_name_under_a_new_key(named, add_node):
    grid, roster = named("oslo", "bern"), Roster()
    names(roster, grid)
    grid.nodes[20].present = False
    add_node(grid, like=1, partition=1, node_id=99)
    assert names(roster, grid) == ["oslo", "bern"]


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_the_log_and_the_observer_name_devices(kind, named, model, train_config, caplog):
    grid, told = named("oslo", "bern", "lima"), []
    grid.spoil(1, "nan")
    strategy = kind(observer=told.append)
    with caplog.at_level(logging.WARNING, LOGGER):
        strategy.start(grid, model(1.0), num_rounds=4, timeout=5.0, train_config=train_config(1, 0.1))
    about = [record for record in caplog.records if "aren't finite" in record.getMessage()]
    assert about
    for record in about:
        assert "client 1 (bern, node 20)" in record.getMessage()
    (who,) = getattr(about[0], "clients", None) or [vars(about[0])]
    assert (who["client"], who["device"], who["node"]) == (1, "bern", "20")
    assert told[-1].names == {0: "oslo", 1: "bern", 2: "lima"}


def test_a_resumed_run_knows_whose_a_name_is(named):
    roster = Roster()
    names(roster, named("oslo", None))
    again = Roster()
    again.restore(roster.state())
    assert names(again, named(None, "oslo")) == ["", ""]


def test_without_names_nothing_is_kept(federation):
    roster = Roster()
    roster.refresh(federation(), ConfigRecord())
    assert "device-names" not in roster.state()
    roster.restore({"node-places": []})  # of a run made before there were names
    assert roster.names == {}
