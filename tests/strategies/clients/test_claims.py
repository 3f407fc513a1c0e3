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
from strategies.clients.registered import NodeRecord, Registry
from strategies.clients.roster import Client, Roster
from strategies.clock import WallClock
from strategies.events.event_stream import RefreshClients
from strategies.events.pump import EventPump
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout
from strategies.flower.grids import DEPLOYMENT
from strategies.testing import MemoryGrid

LOGGER = "flwr.strategies"
Make = Callable[..., Any]


@pytest.fixture
def devices(federation):
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
def test_a_partition_that_cannot_be_is_refused(claim, devices, caplog):
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    grid.nodes[20].context.node_config["partition-id"] = claim
    with caplog.at_level(logging.WARNING, LOGGER):
        assert look(Roster(), grid) == {0: 10, 2: 30}
    assert f"node 20 can't take part: partition-id = {claim}: must be 0 to 2" in caplog.text


def test_a_larger_number_of_partitions_makes_no_room(devices):
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    grid.nodes[20].context.node_config.update({"partition-id": 10**9, "num-partitions": 10**9 + 1})
    assert look(Roster(), grid) == {0: 10, 2: 30}
    alone = devices(centres=(1.0,), sizes=(1,), num_partitions=10**9)
    alone.node(0).context.node_config["partition-id"] = 10**8
    with pytest.raises(RuntimeError, match="no client can take part"):
        look(Roster(), alone)


def test_nobody_is_waited_for_on_a_devices_word(devices):
    # Three of four devices are on, and one says that there are a billion.
    grid = devices(node_ids=[10, 20, 30], num_partitions=4)
    grid.nodes[20].context.node_config["num-partitions"] = 10**9
    roster = Roster(min_clients=3, timeout=60.0)
    assert look(roster, grid) == {0: 10, 1: 20, 2: 30}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def rival(node_id: int, partition: int = 1) -> str:
    """Return the end of the line about a node whose partition this other node claims."""
    return (
        f"can't take part: node {node_id} also says partition-id = {partition}, and nothing tells whose it is: end "
        "the SuperNode that is wrong, or start the run with registered_nodes"
    )


@pytest.mark.parametrize("first", [[10, 20, 30], [10, 30], [10, 20, 30, 99]], ids=["honest", "liar", "both"])
def test_of_two_that_say_the_same_partition_both_are_refused_until_one_is_gone(
    first, devices, add_node, caplog
):
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), Roster()
    add_node(grid, like=1, partition=1, node_id=99)
    if 20 not in first:
        first = [*first, 99]
    for node in grid.nodes.values():
        node.present = node.node_id in first
    look(roster, grid)
    for node in grid.nodes.values():
        node.present = True
    with caplog.at_level(logging.WARNING, LOGGER):
        assert look(roster, grid) == {0: 10, 2: 30}
        assert look(roster, grid) == {0: 10, 2: 30}
    if len(first) < 4:
        assert warned(caplog) == [f"node 20 {rival(99)}", f"node 99 {rival(20)}"]
    grid.nodes[99].present = False
    assert look(roster, grid) == {0: 10, 1: 20, 2: 30}
    grid.nodes[99].present = True
    assert look(roster, grid) == {0: 10, 2: 30}
    grid.nodes[20].present = False
    assert look(roster, grid) == {0: 10, 1: 99, 2: 30}
    grid.nodes[20].present = True  # it is a client no more, and both say so again
    assert look(roster, grid) == {0: 10, 2: 30}


def test_who_took_the_place_of_a_device_that_was_away_does_not_keep_it(devices, add_node):
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), Roster()
    look(roster, grid)
    grid.nodes[20].present = False
    add_node(grid, like=1, partition=1, node_id=99)
    assert look(roster, grid) == {0: 10, 1: 99, 2: 30}
    grid.nodes[20].present = True  # the same node, which is known and isn't asked again
    assert look(roster, grid) == {0: 10, 2: 30}


RECORD = "oslo:10:0, bern:20:1, lima:30:2"


def recorded(text: str = RECORD) -> Roster:
    return Roster(registry=Registry(NodeRecord(text)))


@pytest.mark.parametrize("liar", [99, 30], ids=["not on record", "on record for another"])
def test_a_device_is_not_believed_over_the_record(liar, devices, add_node, caplog):
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), recorded()
    grid.nodes[20].present = False  # the liar is there first
    add_node(grid, like=1, partition=1, node_id=99)
    grid.nodes[99 if liar == 30 else 30].present = False
    grid.nodes[liar].context.node_config["partition-id"] = 1
    with caplog.at_level(logging.WARNING, LOGGER):
        assert look(roster, grid) == {0: 10}
        grid.nodes[20].present = True
        assert look(roster, grid) == {0: 10, 1: 20}
    (line,) = warned(caplog)
    name = " (lima)" if liar == 30 else ""
    assert line.startswith(f"node {liar}{name} can't take part: it says partition-id = 1, ")
    if liar == 99:
        assert line.endswith(
            "which is that of bern, node 20, by registered_nodes: give its SuperNode a partition-id of its own, or "
            "put the node on the record"
        )
    else:
        assert "and lima holds partition 2 by registered_nodes" in line
    assert roster.refused.keys() == {liar}


def test_a_node_that_is_not_on_record_may_hold_a_partition_that_nobody_on_record_has(devices, add_node):
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    assert look(recorded("oslo:10:0, bern:20:1"), grid) == {0: 10, 1: 20, 2: 30}
    add_node(grid, like=2, partition=2, node_id=99)
    assert look(recorded("oslo:10:0, bern:20:1"), grid) == {0: 10, 1: 20}


def test_most_devices_do_not_outvote_the_record(devices):
    # Two of three say that there is one partition only; the record knows better.
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    for liar in (10, 30):
        grid.nodes[liar].context.node_config["num-partitions"] = 1
    assert look(Roster(), grid) == {0: 10}
    assert look(recorded(), grid) == {0: 10, 1: 20, 2: 30}


def test_a_device_with_data_of_its_own_claims_no_partition_of_the_record(devices):
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    del grid.nodes[30].context.node_config["num-partitions"]
    record = "oslo:10:0, bern:20:1, lima:30"
    assert look(recorded(record), grid) == {0: 10, 1: 20, 3: 30}
    grid.nodes[30].context.node_config["num-partitions"] = 3
    assert look(recorded(record), grid) == {0: 10, 1: 20}


def test_a_place_on_record_is_kept_for_its_device(devices):
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), recorded("oslo:10:0, bern:20:1")
    del grid.nodes[30].context.node_config["partition-id"]
    grid.nodes[20].present = False
    assert look(roster, grid) == {0: 10, 3: 30}  # partition 2 is somebody's, too
    grid.nodes[20].present = True
    assert look(roster, grid) == {0: 10, 1: 20, 3: 30}


def test_without_a_description_the_record_says_who_a_node_is(devices):
    grid = devices(node_ids=[10, 20, 30], describes=False)
    roster = recorded("lima:10:2, bern:20, oslo:30:0")
    assert look(roster, grid) == {0: 30, 2: 10, 3: 20}
    assert [client.name for client in roster.clients] == ["oslo", "lima", "bern"]


def test_names_are_those_of_the_record(devices, caplog):
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), recorded("oslo:10:0, bern:20:1")
    grid.nodes[10].context.node_config["name"] = "bern"
    grid.nodes[30].context.node_config["name"] = "oslo"
    with caplog.at_level(logging.WARNING, LOGGER):
        look(roster, grid)
    assert [client.name for client in roster.clients] == ["oslo", "bern", ""]
    assert warned(caplog) == [
        "node 30 claims the name oslo, which registered_nodes assigns to another node: its id is shown"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "oslo",
        "oslo:x:1",
        "oslo:1:2:3",
        "a b:1:2",
        "oslo:1:100000",
        "oslo:0:1",
        "oslo:18446744073709551616",
        ",",
    ],
)
def test_a_record_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r"^registered_nodes = "):
        FedAvg(registered_nodes=text)


@pytest.mark.parametrize("text", ["a:1:0, b:1:1", "a:1:0,b:2:0", "a:1:0, a:2:1", "a:1:0, a:1:0"])
def test_a_record_that_names_something_twice_is_refused(text):
    with pytest.raises(
        ValueError, match=r"^registered_nodes: 'a:1:0' and '.*': names, node ids and partitions must"
    ):
        AsyncFedAvg(registered_nodes=text)


@pytest.mark.parametrize("record", ["", RECORD])
@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_a_run_ends_with_a_line_for_each_device_that_never_counted(
    kind, record, devices, add_node, model, train_config, caplog
):
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    add_node(grid, like=0, partition=0, node_id=5)
    grid.spoil(2, "nan")
    with caplog.at_level(logging.WARNING, LOGGER):
        strategy = kind(fraction_evaluate=0.0, registered_nodes=record)
        strategy.start(grid, model(1.0), num_rounds=4, timeout=5.0, train_config=train_config(1, 0.1))
    last = [line for line in warned(caplog) if "never counted" in line]
    assert last == warned(caplog)[-len(last) :]
    lost = dict(strategy.session.client_stats.items())[2]
    name = "lima, " if record else ""
    assert (
        last[0]
        == f"client 2 ({name}node 30) never counted in this run: {lost.tasks} tasks, {lost.refused} refused"
    )
    if record:
        (line,) = last[1:]
        assert line.startswith(
            "node 5 never counted in this run: it says partition-id = 0, which is that of oslo"
        )
    else:
        assert [line.partition(":")[0] for line in last[1:]] == [
            "node 5 never counted in this run",
            "node 10 never counted in this run",
        ]
    assert {index for index, account in strategy.session.client_stats.items() if account.accepted} == (
        {0, 1} if record else {1}
    )


def test_registered_devices_that_were_never_connected_are_named(devices, model, caplog):
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    with caplog.at_level(logging.INFO, LOGGER):
        strategy = FedAvg(
            registered_nodes=f"{RECORD}, riga:40:3", participation="fixed:0,1", fraction_evaluate=0.0
        )
        strategy.start(grid, model(1.0), num_rounds=1, timeout=5.0)
    said = [record.getMessage() for record in caplog.records][-2:]
    assert said == [
        "node 40 (riga) never counted in this run: it was never connected",
        "1 devices ended no task in this run, as they weren't asked or were cut off: client 2 (lima)",
    ]


def test_an_asynchronous_run_gives_up_the_work_of_a_device_that_turns_out_to_have_a_rival(
    devices, add_node, model, train_config, caplog
):
    # Nodes 20 and 99 say the same partition; 99 comes when 20 has counted, and from then on neither counts.
    grid, counted = devices(node_ids=[10, 20, 30], num_partitions=3), list[int]()
    strategy = AsyncFedAvg(clock=WallClock(), fraction_evaluate=0.0)

    def observe(progress: Any) -> None:
        client_stats = dict(strategy.session.client_stats.items())
        counted.append(client_stats[1].accepted)
        if progress.aggregation == 6:
            add_node(grid, like=1, partition=1, node_id=99)
            EventPump(strategy.session).handle(RefreshClients())

    strategy.run_options.observer = observe
    strategy.start(grid, model(1.0), num_rounds=30, timeout=5.0, train_config=train_config(1, 0.1))
    assert counted[6] == counted[-1] > 0
    assert sorted(strategy.session.task_table.members) == [0, 2]
    # What it did until then is in the model, and stays in the numbers, also in a run that goes on.
    assert (
        sum(strategy.session.contribution_weights.of_clients(strategy.session.reporter)["participation"])
        == 30
    )
    ((index, contributions, tasks),) = strategy.session.task_table.state()["parted"]
    assert (index, contributions) == (1, counted[-1])
    assert tasks >= contributions
    # When it is back, its tasks have other numbers, and so other draws; what it has sent is still counted.
    strategy.session.task_table.members.clear()
    assert strategy.session.task_table.max_tasks_per_client() == tasks
    assert strategy.session.task_table.join(Client(20, 1, 5, MetricRecord()), 7).tasks == tasks
    assert strategy.session.task_table.max_tasks_per_client() == tasks
    assert [line for line in warned(caplog) if "never counted" in line] == [
        "node 99 never counted in this run: " + rival(20).removeprefix("can't take part: ")
    ]


def test_a_device_with_data_of_its_own_is_its_node_whatever_it_claims(devices):
    # Without num-partitions a partition id is no part of common data.
    grid = devices(node_ids=[30, 10, 20])
    for node in grid.nodes.values():
        node.context.node_config["partition-id"] = 10**9
    assert look(Roster(), grid) == {0: 10, 1: 20, 2: 30}


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_a_resumed_run_knows_its_devices_again(kind, devices, model, train_config):
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
    assert {client.index: client.node_id for client in again.session.clients} == {1: 20, 2: 30}


def test_in_a_simulation_descriptions_are_believed(federation):
    grid = federation(node_ids=[10, 20, 30])
    assert look(Roster(), grid) == {0: 10, 1: 20, 2: 30}


# What is written ----------------------------------------------------------------------------------------------------


def test_what_a_client_says_steers_no_terminal_and_fills_no_disk():
    assert messages.clean("a\x1b[31mred\x07\u202e\nb\tc") == "a\ufffd[31mred\ufffd\ufffd\ufffdb\ufffdc"
    assert len(messages.clean("x" * 20_000_000)) == messages.LONGEST_TEXT
    assert messages.clean("höher, 東京 ✓") == "höher, 東京 ✓"
    asked = messages.request(messages.TRAIN, 5, ConfigRecord(), ttl=60.0)
    reply = Message(
        Error(code=2, reason="Traceback\nValueError: \x1b]0;owned\x07" + "y" * 10**6), reply_to=asked
    )
    assert messages.reason_of(reply).startswith("ValueError: \ufffd]0;owned\ufffdyyy")
    assert len(messages.reason_of(reply)) == messages.LONGEST_TEXT


def test_names_of_arrays_are_short_and_clean_in_a_refusal():
    layout = Layout.of(ArrayRecord({"w": Array(np.zeros(2))}))
    record = ArrayRecord({"\x1b[2J" + "n" * 20_000_000: Array(np.zeros(2))})
    with pytest.raises(ArraysMismatchError) as caught:
        layout.to_vector(record)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_arrays_that_are_too_large_are_not_unpacked(monkeypatch):
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


def test_metrics_by_the_hundred_thousand_do_not_fill_the_record(model):
    seen: list[dict[str, float]] = []
    strategy = FedAvg(min_available_nodes=1, observer=lambda progress: seen.append(dict(progress.metrics)))
    strategy.start(MemoryGrid(talkative(100_000), [{}]), model(1.0), num_rounds=1, timeout=30.0)
    names = [key for key in seen[-1] if key.startswith("client-")]
    assert "client-loss" in names
    spreads = [name for name in names if name.endswith(("-mean", "-worst-tenth", "-best", "-std", "-jain"))]
    # A loss has no index of Jain; of a metric whose direction isn't known there are the mean and the deviation.
    assert len(spreads) == 4 + 2 * (MOST_BY_CLIENT - 1)
    assert len(names) - len(spreads) == messages.MOST_METRICS - 2
    assert all(name.isprintable() and len(name) < 80 for name in names)


# A description that fails -----------------------------------------------------------------------------------------


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


@pytest.mark.parametrize("look_again", ["refresh", "poll"])
@pytest.mark.parametrize("fault", ["drop", "unavailable"])
def test_a_device_without_a_description_is_asked_again_ever_later(fault, look_again, devices, caplog):
    """A ClientApp that is killed in its first message says nothing, and would be there the next time."""
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), Roster(timeout=0.05)
    roster._clock = Hand()  # type: ignore[assignment]
    grid.node(1).transport["query"] = fault

    def look_at(time: float) -> list[int]:
        roster._clock.time = time  # type: ignore[attr-defined]
        for _ in range(2):  # without waiting, the answer is there at the next look
            clients = getattr(roster, look_again)(grid, ConfigRecord())
        return [client.index for client in clients]

    assert list(look(roster, grid)) == [0, 2]
    assert grid.asked(messages.DESCRIBE).count(1) == 1
    assert look_at(9.9) == [0, 2]
    assert grid.asked(messages.DESCRIBE).count(1) == 1
    look_at(10.0)  # fails again: then after 20 s
    look_at(10.1)  # the question is given up
    assert grid.asked(messages.DESCRIBE).count(1) == 2
    grid.node(1).transport.clear()
    assert look_at(29.9) == [0, 2]
    assert look_at(30.2) == [0, 1, 2]
    assert 20 not in roster.refused
    assert grid.asked(messages.DESCRIBE).count(1) == 3
    lines = [line for line in warned(caplog) if "node 20 can't take part" in line]
    assert [line.partition("; ")[2] for line in lines] == [
        "it is asked again in 10 s",
        "it is asked again in 20 s",
    ]


def test_no_round_waits_for_a_device_that_has_failed_to_describe_itself(devices, monkeypatch):
    """Each time that it is asked again it would cost the round the whole timeout."""
    grid, roster = devices(node_ids=[10, 20, 30], num_partitions=3), Roster(timeout=0.05)
    roster._clock = Hand()  # type: ignore[assignment]
    grid.node(1).transport["query"] = "drop"
    assert list(look(roster, grid)) == [0, 2]
    roster._clock.time = 10.0  # type: ignore[attr-defined]
    monkeypatch.setattr("strategies.clients.roster.exchange", lambda *_: pytest.fail("waited"))
    assert list(look(roster, grid)) == [0, 2]
    assert grid.asked(messages.DESCRIBE).count(1) == 2


def test_a_run_waits_for_the_first_device_that_describes_itself(devices, monkeypatch):
    """All ClientApps of a run were killed in their first message: the run ended with 'no client can take part'."""
    monkeypatch.setattr("strategies.clients.roster.PAUSE", 0.01)
    grid = devices(node_ids=[10, 20, 30], num_partitions=3)
    for partition in range(3):
        grid.node(partition).transport["query"] = "unavailable"
    looks = iter(range(1000))

    def should_stop() -> bool:
        if next(looks, 0) == 20:
            for partition in range(3):
                grid.node(partition).transport.clear()
        return False

    roster = Roster(timeout=60.0, should_stop=should_stop)
    found = look(roster, grid)  # with the first that answers; the others come in as they answer
    assert found
    for _ in range(10_000):
        found = look(roster, grid)
        if len(found) == 3:
            break
    assert found == {0: 10, 1: 20, 2: 30}


def test_a_run_that_no_device_describes_itself_to_ends_after_the_timeout(devices, monkeypatch):
    monkeypatch.setattr("strategies.clients.roster.PAUSE", 0.01)
    grid = devices(node_ids=[10], centres=(1.0,), sizes=(1,), num_partitions=1)
    grid.node(0).transport["query"] = "unavailable"
    with pytest.raises(RuntimeError, match="no client can take part"):
        look(Roster(timeout=0.5), grid)
    assert grid.asked(messages.DESCRIBE).count(0) > 1
