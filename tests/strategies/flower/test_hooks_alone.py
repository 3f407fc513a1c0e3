"""Flower's hooks called alone, without a run, as Flower's own unit tests and loops of other people's making do."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result

import strategies
from strategies import AsyncFedAvg, FedAdam, FedAvg, FedAvgM, FedBuff, FedMedian, FedNova, RunError
from strategies.testing import MemoryGrid

NAMES = (
    "FedAvg",
    "FedProx",
    "FedMedian",
    "FedTrimmedAvg",
    "Krum",
    "QFedAvg",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "Bulyan",
)


def model(value: float) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(2, value, np.float32))})


def value_of(arrays: ArrayRecord | None) -> float:
    assert arrays is not None
    return float(arrays["w"].numpy()[0])


def reply(value: float, number: int) -> Message:
    metrics = MetricRecord({"num-examples": number, "loss": value})
    asked = Message(RecordDict(), dst_node_id=number, message_type="train")
    return Message(RecordDict({"arrays": model(value), "metrics": metrics}), reply_to=asked)


def adds_one(message: Message, context: Any) -> Message:
    """Reply with the model + 1, of partition-id + 1 examples."""
    number = int(context.node_config["partition-id"]) + 1
    content = RecordDict({"metrics": MetricRecord({"num-examples": number, "loss": float(number)})})
    if message.metadata.message_type == "train":
        content["arrays"] = model(value_of(message.content["arrays"]) + 1)  # type: ignore[arg-type]
    return Message(content, reply_to=message)


def grid(clients: int = 3) -> MemoryGrid:
    return MemoryGrid(adds_one, [{"partition-id": i, "num-partitions": clients} for i in range(clients)])


def test_replies_alone_make_flowers_mean():
    replies = [reply(2.0, 1), reply(4.0, 3)]
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    expected, told = flower.FedAvg().aggregate_train(1, replies)
    assert value_of(arrays) == value_of(expected) == 3.5  # (1 · 2 + 3 · 4) / 4
    assert metrics is not None
    assert told is not None
    assert metrics["loss"] == told["loss"] == 3.5
    arrays, _ = FedMedian().aggregate_train(1, [*replies, reply(9.0, 5)])
    assert value_of(arrays) == 4.0


def test_of_no_reply_nothing_is_made():
    assert FedAvg().aggregate_train(1, []) == (None, None)
    assert FedAvg().aggregate_evaluate(1, []) is None


@pytest.mark.parametrize("strategy", [FedAdam(), FedAvgM(), FedNova(), FedAvg(server_lr=0.5)])
def test_a_method_that_needs_the_model_that_was_sent_says_so(strategy):
    with pytest.raises(
        RunError, match=r"needs the model that clients were sent: super\(\).configure_train\(\)"
    ):
        strategy.aggregate_train(1, [reply(2.0, 1)])


def test_evaluations_alone_are_averaged_by_their_examples():
    found = FedAvg().aggregate_evaluate(1, [reply(2.0, 1), reply(4.0, 3)])
    assert found is not None
    assert found["loss"] == 3.5


def test_requests_are_made_without_a_run():
    strategy, nodes = FedAvg(fraction_evaluate=1.0), grid()
    for requests in (
        strategy.configure_train(1, model(0.0), ConfigRecord({"lr": 0.5}), nodes),
        strategy.configure_evaluate(1, model(0.0), ConfigRecord({"lr": 0.5}), nodes),
    ):
        asked = list(requests)
        assert sorted(each.metadata.dst_node_id for each in asked) == sorted(nodes.get_node_ids())
        assert {each.content["config"]["lr"] for each in asked} == {0.5}  # type: ignore[index]
    assert len(list(FedAvg().configure_evaluate(1, model(0.0), ConfigRecord(), grid()))) == 3


class OwnLoop(FedAvg):
    """Has a ``start`` of its own, which builds its own messages."""

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, **options: Any) -> Result:  # type: ignore[override]
        result = Result(arrays=initial_arrays)
        for server_round in range(1, num_rounds + 1):
            content = RecordDict(
                {"arrays": result.arrays, "config": ConfigRecord({"server-round": server_round})}
            )
            asked = [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
            arrays, _ = self.aggregate_train(server_round, grid.send_and_receive(asked, timeout=10))
            assert arrays is not None
            result.arrays = arrays
        return result


def test_a_loop_with_messages_of_its_own_works():
    assert value_of(OwnLoop().start(grid(), model(0.0), num_rounds=3).arrays) == pytest.approx(3.0, abs=1e-6)


# ---- Started again -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [("FedAvgM", {"server_momentum": 0.9}), ("FedAdam", {}), ("FedYogi", {}), ("FedAdagrad", {})],
)
def test_flowers_names_keep_the_optimizers_memory_from_run_to_run(name, options):
    def four_runs(kind: Any) -> list[float]:
        strategy, arrays, values = kind(fraction_evaluate=0.0, **options), model(0.0), []
        for _ in range(4):
            arrays = strategy.start(grid(), arrays, num_rounds=1, timeout=10).arrays
            values.append(value_of(arrays))
        return values

    ours = four_runs(getattr(strategies, name))
    assert ours == pytest.approx(four_runs(getattr(flower, name)), abs=1e-6)
    if name == "FedAvgM":  # v = 1, 1.9, 2.71, 3.439
        assert ours == pytest.approx([1.0, 2.9, 5.61, 9.049], abs=1e-5)


def test_a_model_of_another_size_begins_without_that_memory():
    strategy = FedAvgM(fraction_evaluate=0.0, server_momentum=0.9)
    strategy.start(grid(), model(0.0), num_rounds=1, timeout=10)
    other = ArrayRecord({"w": Array(np.zeros(3, np.float32))})

    def three(message: Message, context: Any) -> Message:
        content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
        content["arrays"] = ArrayRecord({"w": Array(message.content["arrays"]["w"].numpy() + 1)})  # type: ignore[index]
        return Message(content, reply_to=message)

    nodes = MemoryGrid(three, [{"partition-id": i, "num-partitions": 2} for i in range(2)])
    assert value_of(strategy.start(nodes, other, num_rounds=1, timeout=10).arrays) == 1.0


# ---- Names of a subclass's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["run", "model", "clients", "memory", "graph", "optimizer", "pending", "reporter", "population", "state"],
)
def test_a_subclass_may_set_attributes_of_any_other_name(name):
    class Mine(FedAvg):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            setattr(self, name, {})

    strategy = Mine(fraction_evaluate=0.0)
    assert value_of(strategy.start(grid(), model(0.0), num_rounds=2, timeout=10).arrays) == 2.0
    assert getattr(strategy, name) == {}


@pytest.mark.parametrize("name", ["config", "session", "run_options"])
def test_an_attribute_of_the_librarys_is_refused_at_once(name):
    with pytest.raises(AttributeError, match=rf"^FedAvg\.{name} = {{}}: the library's \w+ has this name"):
        setattr(FedAvg(), name, {})


def test_a_hook_with_another_signature_is_told_when_its_class_is_defined():
    with pytest.raises(TypeError, match=r"^Mine\.check\(self\).*: check is a hook .* check\(num_clients\)"):

        class Mine(FedAvg):
            def check(self) -> bool:  # type: ignore[override]
                return True

    class Fits(FedBuff):
        def weigh(self, *contributions: Any) -> Any:
            return super().weigh(*contributions)

        def configure_train(self, server_round: int, *others: Any) -> Iterable[Message]:
            return super().configure_train(server_round, *others)


@pytest.mark.parametrize("name", NAMES)
def test_isinstance_holds_for_the_classes_of_flowers_names(name):
    assert issubclass(getattr(strategies, name), getattr(flower, name))
    assert issubclass(getattr(strategies, name), flower.FedAvg)
    assert not issubclass(FedBuff, flower.FedAvg)


# ---- Stopped by the caller ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_should_stop_ends_a_run_with_the_result_so_far(kind):
    asked: list[tuple[int, float]] = []

    def stop(number: int, result: Result) -> bool:
        asked.append((number, value_of(result.arrays)))
        return number == 2

    options = {"fraction_evaluate": 0.0, "server_lr": 1.0, "time_scenario": "F0"}
    result = kind(**options).start(grid(), model(0.0), num_rounds=5, timeout=10, should_stop=stop)
    assert [number for number, _ in asked] == [1, 2]
    assert value_of(result.arrays) == asked[-1][1]
    whole = kind(**options).start(grid(), model(0.0), num_rounds=2, timeout=10)
    assert value_of(result.arrays) == value_of(whole.arrays)
