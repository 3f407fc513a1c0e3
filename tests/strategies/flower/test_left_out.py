"""Overrides of ``aggregate_train`` that leave replies out: whose, and why, is said."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

from strategies import FedAvg, RunError
from strategies.testing import MemoryGrid


def grid(*failing: int, clients: int = 3) -> MemoryGrid:
    """Return a grid of clients that reply with the model + their index + 1; some raise an exception."""

    def work(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        if i in failing and message.metadata.message_type == "train":
            raise RuntimeError("CUDA out of memory")
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1, "loss": 1.0})})
        if message.metadata.message_type == "train":
            w = message.content.array_records["arrays"]["w"].numpy()
            content["arrays"] = ArrayRecord({"w": Array(w + np.float32(i + 1))})
        return Message(content, reply_to=message)

    return MemoryGrid(work, [{"partition-id": i, "num-partitions": clients} for i in range(clients)])


def run(kind: Any, nodes: MemoryGrid, rounds: int = 1) -> Any:
    initial = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    return kind(fraction_evaluate=0.0).start(nodes, initial, num_rounds=rounds, timeout=10)


class WithoutErrors(FedAvg):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        return super().aggregate_train(server_round, [reply for reply in replies if not reply.has_error()])


class WithoutTheLargest(FedAvg):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        def size(reply: Message) -> float:
            return float(reply.content.array_records["arrays"]["w"].numpy()[0])

        return super().aggregate_train(server_round, sorted(replies, key=size)[:-1])


class ByItself(FedAvg):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        valid = [
            reply.content.array_records["arrays"]["w"].numpy() for reply in replies if reply.has_content()
        ]
        if not valid:
            return None, None
        return ArrayRecord({"w": Array(np.mean(valid, axis=0))}), MetricRecord({"mine": len(valid)})


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "left out client" in text]


@pytest.mark.parametrize("kind", [FedAvg, WithoutErrors, ByItself])
def test_clients_that_fail_are_named_with_their_errors(kind, caplog):
    nodes = grid(1)
    result = run(kind, nodes)
    assert result.arrays["w"].numpy()[0] == 2.0  # the mean of 1 and 3
    (line,) = left_out(caplog)
    assert f"(node {nodes.node(1).node_id})" in line
    assert "CUDA out of memory" in line
    with pytest.raises(RunError, match="CUDA out of memory"):
        run(kind, grid(0, 1, 2))


def test_a_reply_that_an_override_leaves_out_is_counted_as_that(caplog):
    nodes = grid()
    result = run(WithoutTheLargest, nodes)
    assert result.arrays["w"].numpy()[0] == 1.5
    assert result.train_metrics_clientapp[1]["failures"] == 1
    (line,) = left_out(caplog)
    assert f"(node {nodes.node(2).node_id})" in line
    assert line.endswith("WithoutTheLargest.aggregate_train left its reply out")


def test_a_client_that_does_not_answer_is_late(caplog):
    for kind in (WithoutErrors, ByItself):
        caplog.clear()
        nodes = grid()
        nodes.lose(1)
        initial = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
        kind(fraction_evaluate=0.0).start(nodes, initial, num_rounds=1, timeout=0.1)
        (line,) = left_out(caplog)
        assert line.endswith("no reply before the deadline")


def test_who_took_part_is_known_of_an_override_that_aggregates_by_itself():
    seen: list[Any] = []
    strategy = ByItself(fraction_evaluate=0.0, observer=seen.append)
    strategy.start(grid(1), ArrayRecord({"w": Array(np.zeros(2, np.float32))}), num_rounds=2, timeout=10)
    assert sorted(seen[-1].clients["participation"]) == [0, 2, 2]
