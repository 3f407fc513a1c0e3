"""The forms of Flower's Grid from 1.43 on, which this library's Grids have, and its loops accept on any version."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedapp.engine.sequential import SequentialGrid
from strategies import FedAvg, FedBuff, RunError
from strategies.flower.frozen import FrozenGrid, FrozenParametersOfConfig
from strategies.flower.grids import AddressedGrid, GridAround
from strategies.flower.packing import PackingGrid
from strategies.simulation.grid import ProcessGrid
from strategies.testing import MemoryGrid
from tests.strategies.simulation import plain

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content.array_records["arrays"]
    trained = ArrayRecord({name: Array(array.numpy() + np.float32(1)) for name, array in arrays.items()})
    content = RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


def memory() -> MemoryGrid:
    return MemoryGrid(app, [{"partition-id": i, "num-partitions": 3} for i in range(3)])


def model() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, np.float32))})


def frozen() -> FrozenGrid:
    return FrozenGrid(memory(), FrozenParametersOfConfig("none", ArrayRecord))


GRIDS: dict[str, Callable[[], Grid]] = {
    "memory": memory,
    "sequential": lambda: SequentialGrid(app, 3),
    "packing": lambda: PackingGrid(memory()),
    "frozen": frozen,
    "addressed": lambda: AddressedGrid(made := memory(), list(made.get_node_ids())),
}


def requests(grid: Any, number: int = 2) -> list[Message]:
    content = RecordDict({"arrays": model(), "config": ConfigRecord({"server-round": 1})})
    nodes = sorted(grid.get_node_ids())[:number]
    return [Message(content.copy(), dst_node_id=node, message_type="train", ttl=60.0) for node in nodes]


def pull_all(pull: Callable[[], Iterable[Message]], number: int) -> list[str]:
    found: list[str] = []
    while len(found) < number:
        found += [reply.metadata.reply_to_message_id for reply in pull()]
    return sorted(found)


@pytest.mark.parametrize("name", GRIDS)
def test_replies_are_pulled_by_either_name_or_all_at_once(name):
    grid: Any = GRIDS[name]()
    for pull in (
        lambda ids: grid.pull_messages(ids),
        lambda ids: grid.pull_messages(reply_to_message_ids=ids),
        lambda ids: grid.pull_messages(message_ids=ids),
        lambda ids: grid.pull_messages(),
    ):
        ids = list(grid.push_messages(requests(grid)))
        assert list(grid.pull_messages([])) == []  # an empty list matches none
        assert pull_all(lambda pull=pull, ids=ids: pull(ids), 2) == sorted(ids)  # type: ignore[misc]
        assert list(grid.pull_messages()) == []
    with pytest.raises(ValueError, match="reply_to_message_ids or message_ids"):
        grid.pull_messages(["a"], reply_to_message_ids=["a"])


def test_processes_too():
    with ProcessGrid(plain.app, 2, workers=1) as grid:
        ids = list(grid.push_messages(requests(grid)))
        assert pull_all(grid.pull_messages, 2) == sorted(ids)


class Refusing(GridAround):
    """Refuses messages to a node, and says so as some version of Flower does."""

    def __init__(self, grid: MemoryGrid, partition: int, says: str | None) -> None:
        self.grid, self.partition, self.says = grid, partition, says

    def push_messages(self, messages: Iterable[Message]) -> list[Any]:
        given, inner = list(messages), self.grid
        assert isinstance(inner, MemoryGrid)
        refused = inner.node(self.partition).node_id
        return [
            self.says if each.metadata.dst_node_id == refused else next(iter(inner.push_messages([each])))
            for each in given
        ]

    def pull_messages(self, reply_to_message_ids: Any = None, *, message_ids: Any = None) -> Any:
        return self.grid.pull_messages(reply_to_message_ids)


@pytest.mark.parametrize("says", [None, ""])
@pytest.mark.parametrize("kind", [FedAvg, FedBuff])
def test_a_message_that_flower_refuses_is_no_silence(kind, says, caplog):
    own = {"server_lr": 1.0, "buffer_size": 2, "time_scenario": "F0"} if kind is FedBuff else {}
    grid = Refusing(memory(), 1, says)
    result = kind(fraction_evaluate=0.0, **own).start(grid, model(), num_rounds=2, timeout=1.0)
    assert result.arrays["w"].numpy().tolist() == [2.0, 2.0]
    assert "no reply before the deadline" in caplog.text


def test_every_message_refused_ends_the_run():
    grid = memory()
    for partition in range(3):
        grid.lose(partition, "unstorable")
    with pytest.raises(RunError, match="no reply before the deadline"):
        FedAvg(fraction_evaluate=0.0).start(grid, model(), num_rounds=1, timeout=1.0)
