"""What a device says of itself is a claim: it takes no other's place, no memory, no time, and no line of the log."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from strategies import AsyncFedAvg, FedAvg
from strategies.clients.client_metrics import MOST_BY_CLIENT
from strategies.clients.roster import Roster
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout
from strategies.flower.grids import DEPLOYMENT
from strategies.testing import MemoryGrid

LOGGER = "flwr.strategies"
Make = Callable[..., Any]


@pytest.fixture
def devices(federation: Make) -> Make:
    """Make a grid whose nodes are devices."""

    def make(**options: Any) -> Any:
        grid = federation(**options)
        grid.engine = DEPLOYMENT
        return grid

    return make


def look(roster: Roster, grid: Any) -> dict[int, int]:
    """Return the clients' nodes by index."""
    return {client.index: client.node_id for client in roster.refresh(grid, ConfigRecord())}


# Places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", [3, 10**9, 2**63 - 1])
def test_a_partition_that_cannot_be_is_refused(
    claim: int, devices: Make, caplog: pytest.LogCaptureFixture
) -> None:
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    grid.nodes[20].context.node_config["partition-id"] = claim
    with caplog.at_level(logging.WARNING, LOGGER):
        assert look(Roster(), grid) == {0: 10, 2: 30}
    assert f"node 20 can't take part: partition-id = {claim}: must be 0 to 2" in caplog.text


def test_a_larger_number_of_partitions_makes_no_room(devices: Make) -> None:
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    grid.nodes[20].context.node_config.update({"partition-id": 10**9, "num-partitions": 10**9 + 1})
    assert look(Roster(), grid) == {0: 10, 2: 30}
    alone = devices(centres=(1.0,), sizes=(1,), num_partitions=10**9)
    alone.node(0).context.node_config["partition-id"] = 10**8
    with pytest.raises(RuntimeError, match="no client can take part"):
        look(Roster(), alone)


def test_nobody_is_waited_for_on_a_devices_word(devices: Make) -> None:
    # Three of four devices are on, and one says that there are a billion.
    grid = devices(node_ids=[10, 20, 30], num_partitions=4)
    grid.nodes[20].context.node_config["num-partitions"] = 10**9
    roster = Roster(min_clients=3, timeout=60.0)
    assert look(roster, grid) == {0: 10, 1: 20, 2: 30}


def test_a_place_that_is_taken_is_refused_until_it_is_free(
    devices: Make, add_node: Make, caplog: pytest.LogCaptureFixture
) -> None:
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), Roster()
    look(roster, grid)
    add_node(grid, like=1, partition=1, node_id=99)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert look(roster, grid) == {0: 10, 1: 20, 2: 30}
        assert look(roster, grid) == {0: 10, 1: 20, 2: 30}
    assert [r.getMessage() for r in caplog.records] == [
        "node 99 can't take part: client 1 is node 20 already"
    ]
    grid.nodes[20].present = False
    assert look(roster, grid) == {0: 10, 1: 99, 2: 30}


def test_a_device_with_data_of_its_own_is_its_node_whatever_it_claims(devices: Make) -> None:
    # Without num-partitions a partition id is no part of common data.
    grid = devices(node_ids=[30, 10, 20])
    for node in grid.nodes.values():
        node.context.node_config["partition-id"] = 10**9
    assert look(Roster(), grid) == {0: 10, 1: 20, 2: 30}


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_a_resumed_run_knows_its_devices_again(
    kind: Any, devices: Make, model: Make, train_config: Make
) -> None:
    states: list[Any] = []

    def start(grid: Any, rounds: int, state: Any = None) -> Any:
        strategy = kind(observer=lambda progress: states.append(strategy.state()))
        if state is not None:
            strategy.restore(state)
        strategy.start(grid, model(1.0), num_rounds=rounds, timeout=5.0, train_config=train_config(1, 0.1))
        return strategy

    grid = devices(node_ids=[30, 10, 20])
    for node in grid.nodes.values():
        del node.context.node_config["partition-id"]
    start(grid, 2)
    grid.nodes[10].present = False  # the first of the three is off when the server is back
    again = start(grid, 4, states[-1])
    assert {client.index: client.node_id for client in again.clients} == {1: 20, 2: 30}


def test_in_a_simulation_descriptions_are_believed(federation: Make) -> None:
    grid = federation(node_ids=[10, 20, 30])
    assert look(Roster(), grid) == {0: 10, 1: 20, 2: 30}


# What is written ----------------------------------------------------------------------------------------------------


def test_what_a_client_says_steers_no_terminal_and_fills_no_disk() -> None:
    assert messages.clean("a\x1b[31mred\x07\u202e\nb\tc") == "a\ufffd[31mred\ufffd\ufffd\ufffdb\ufffdc"
    assert len(messages.clean("x" * 20_000_000)) == messages.LONGEST_TEXT
    assert messages.clean("höher, 東京 ✓") == "höher, 東京 ✓"
    asked = messages.request(messages.TRAIN, 5, ConfigRecord(), ttl=60.0)
    reply = Message(
        Error(code=2, reason="Traceback\nValueError: \x1b]0;owned\x07" + "y" * 10**6), reply_to=asked
    )
    assert messages.reason_of(reply).startswith("ValueError: \ufffd]0;owned\ufffdyyy")
    assert len(messages.reason_of(reply)) == messages.LONGEST_TEXT


def test_names_of_arrays_are_short_and_clean_in_a_refusal() -> None:
    layout = Layout.of(ArrayRecord({"w": Array(np.zeros(2))}))
    record = ArrayRecord({"\x1b[2J" + "n" * 20_000_000: Array(np.zeros(2))})
    with pytest.raises(ArraysMismatchError) as caught:
        layout.to_vector(record)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_arrays_that_are_too_large_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(ArrayRecord({"w": Array(np.zeros(2, np.float32))}))
    record = ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY" + bytes(10_000))})
    monkeypatch.setattr("strategies.flower.arrays.unpack", lambda array: pytest.fail("was unpacked"))
    with pytest.raises(
        ArraysMismatchError, match=r"^its arrays take 10006 bytes, those of the model at most 4112$"
    ):
        layout.to_vector(record)


def talkative(number: int) -> ClientApp:
    """Return a client that evaluates with very many metrics, some with names that nobody would choose."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        odd = {"\x1b[31m": 1.0, "n" * 1000: 1.0}
        metrics = MetricRecord({"loss": 0.5} | odd | {f"m{i}": 1.0 for i in range(number)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_metrics_by_the_hundred_thousand_do_not_fill_the_record(model: Make) -> None:
    seen: list[dict[str, float]] = []
    strategy = FedAvg(min_available_nodes=1, observer=lambda progress: seen.append(dict(progress.metrics)))
    strategy.start(MemoryGrid(talkative(100_000), [{}]), model(1.0), num_rounds=1, timeout=30.0)
    names = [key for key in seen[-1] if key.startswith("client-")]
    assert "client-loss" in names
    spreads = [name for name in names if name.endswith(("-mean", "-worst-tenth", "-best", "-std", "-jain"))]
    assert len(spreads) == 5 * MOST_BY_CLIENT - 1  # a loss has no index of Jain
    assert len(names) - len(spreads) == messages.MOST_METRICS - 2
    assert all(name.isprintable() and len(name) < 80 for name in names)
