"""What the servers of FedBuff and FedAvg keep of models, in bytes a value: the numbers of docs/scale.md."""

import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from strategies import FedAvg, FedBuff
from strategies.flower import messages
from strategies.testing import LocalGrid, be_the_server

CLIENTS, AGGREGATIONS = 8, 6


class Answers(LocalGrid):
    """Clients that answer with copies of one model, which is there beforehand; requests aren't kept."""

    def __init__(self, model: ArrayRecord, strategy: FedAvg | FedBuff) -> None:
        self._model, self._strategy, self._replies = model, strategy, dict[str, Message]()
        self.versions = 0  # most models at once with which the tasks under way and the buffer's updates began

    def get_node_ids(self) -> Iterable[int]:
        return range(1, CLIENTS + 1)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(f"{message.metadata.dst_node_id}-{len(self._replies)}-{message.metadata.created_at}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._replies[ids[-1]] = self._answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if isinstance(self._strategy, FedBuff):
            table = self._strategy.session.task_table
            begun = [*table.tasks.values(), *table.buffer]
            self.versions = max(self.versions, len({id(each.base) for each in begun}))
        return [self._as_new(self._replies.pop(name)) for name in message_ids if name in self._replies]

    def _as_new(self, reply: Message) -> Message:
        """Give a reply arrays of its own, as each is read anew from a connection."""
        if (record := messages.arrays_of(reply)) is not None:
            copies = {
                name: Array(array.dtype, array.shape, array.stype, bytes(bytearray(array.data)))
                for name, array in record.items()
            }
            reply.content[messages.ARRAYS] = ArrayRecord(copies)
        return reply

    def _answer(self, message: Message) -> Message:
        metrics: dict[str, Any] = {messages.NUM_EXAMPLES: 10}
        if message.metadata.message_type == messages.TRAIN:
            content = {messages.ARRAYS: self._model, messages.METRICS: MetricRecord(metrics)}
        else:
            metrics |= {"partition-id": message.metadata.dst_node_id - 1, "num-partitions": CLIENTS}
            content = {messages.METRICS: MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]


def most_memory(strategy: FedAvg | FedBuff, size: int) -> tuple[float, int]:
    """Return the most bytes that a run allocates at once, a value of the model, and ``versions``."""
    be_the_server()
    initial, trained = (
        ArrayRecord({f"{i}": Array(part) for i, part in enumerate(np.array_split(values, 10))})
        for values in (np.zeros(size, np.float32), np.ones(size, np.float32))
    )
    grid = Answers(trained, strategy)
    tracemalloc.start()
    try:
        strategy.start(grid, initial, num_rounds=AGGREGATIONS, timeout=600)
        return tracemalloc.get_traced_memory()[1] / size, grid.versions
    finally:
        tracemalloc.stop()


SIZES = pytest.mark.parametrize("size", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.thorough)])


@SIZES
@pytest.mark.parametrize("m", [2, 4, 8])
def test_fedbuff_keeps_its_buffer_and_the_models_under_way(m, size):
    most, versions = most_memory(FedBuff(buffer_size=m), size)
    fixed = 8 + 8 + 8 + 4  # the model, the next one and its rounded values, or the sums; the model's record
    assert most <= 4 * m + 4 * versions + fixed + 1  # 1: all other objects


@SIZES
def test_fedavg_keeps_two_models_and_a_record_beside_the_replies(size):
    most, _ = most_memory(FedAvg(fraction_evaluate=0.0), size)
    assert most <= 4 * CLIENTS + 29
