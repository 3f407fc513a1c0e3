"""What Flower's users write around a strategy: each pattern gives with our FedAvg what it gives with Flower's.

Clients reply with the model + 1, so that after n rounds every weight is n. A pattern is given a room, Flower's module
of strategies or this library, and returns what is compared.
"""

import copy
import functools
import json
import logging
import pickle
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result

import strategies
from strategies.testing import MemoryGrid

CLIENTS = 4
Pattern = Callable[[Any], Any]
PATTERNS: dict[str, Pattern] = {}


def pattern(function: Pattern) -> Pattern:
    PATTERNS[function.__name__] = function
    return function


# ---- The app, and what is compared ---------------------------------------------------------------------------------


def adds_one(message: Message, context: Context) -> Message:
    """Reply with the model + ``step``, of one example more than the partition's number."""
    if message.metadata.message_type.startswith("query"):
        raise ValueError("No query function registered")
    config = message.content.config_records["config"]
    number = int(context.node_config["partition-id"])
    if config.get("fail") == number:
        raise RuntimeError("CUDA out of memory")
    metrics = MetricRecord({"num-examples": number + 1, "loss": float(number), "accuracy": 0.5})
    content = RecordDict({"metrics": metrics})
    if message.metadata.message_type == MessageType.TRAIN:
        step = np.float32(config.get("step", 1.0))
        sent = message.content.array_records["arrays"]
        content["arrays"] = ArrayRecord({name: Array(a.numpy() + step) for name, a in sent.items()})
    return Message(content, reply_to=message)


def grid() -> MemoryGrid:
    return MemoryGrid(adds_one, [{"partition-id": i, "num-partitions": CLIENTS} for i in range(CLIENTS)])


def model(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(2, value, np.float32)), "b": Array(np.full(1, value, np.float32))})


def values(arrays: ArrayRecord) -> list[float]:
    return [round(float(x), 5) for array in arrays.values() for x in array.numpy().ravel()]


def told(result: Result, *names: str) -> list[Any]:
    """Return a run's model, and the numbers and chosen values of its metrics."""
    records = (
        result.train_metrics_clientapp,
        result.evaluate_metrics_clientapp,
        result.evaluate_metrics_serverapp,
    )
    metrics = [
        {
            number: {name: round(float(each[name]), 5) for name in names if name in each}
            for number, each in record.items()
        }
        for record in records
    ]
    return [values(result.arrays), *metrics]


def run(strategy: Any, rounds: int = 3, nodes: MemoryGrid | None = None, **options: Any) -> Result:
    return strategy.start(nodes or grid(), model(), num_rounds=rounds, timeout=10, **options)


# ---- Attributes of a subclass's own --------------------------------------------------------------------------------


class FakeRun:
    """What a tracker such as wandb returns."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append({**values, "step": step})


@pattern
def a_tracker_made_in_the_constructor(room: Any) -> Any:
    class Tracked(room.FedAvg):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.run = FakeRun()

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
            metrics = super().aggregate_evaluate(server_round, replies)
            self.run.log({"loss": round(metrics["loss"], 5)}, step=server_round)
            return metrics

    strategy = Tracked(fraction_train=1.0)
    run(strategy)
    return strategy.run.logged


@pattern
def attributes_set_before_the_constructor(room: Any) -> Any:
    class Early(room.FedAvg):
        def __init__(self, folder: str, **kwargs: Any) -> None:
            self.folder, self.history, self.model = folder, [], None
            self.best_loss = float("inf")
            super().__init__(**kwargs)

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            self.model = arrays
            self.history.append(values(arrays))
            return arrays, metrics

    strategy = Early("somewhere")
    return [told(run(strategy), "loss"), strategy.history, values(strategy.model)]


@pattern
def attributes_named_as_ours(room: Any) -> Any:
    class Busy(room.FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.clients, self.memory, self.graph, self.optimizer = [], {}, None, "adam"
            self.pending, self.evaluator, self.reporter, self.population = 1, 2, 3, 4
            self.clock_time, self.scheduler, self.server_step, self.task_table = 5, 6, 7, 8

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            self.clients.append(len(replies))
            return super().aggregate_train(server_round, replies)

    strategy = Busy()
    return [told(run(strategy), "loss"), strategy.clients, strategy.graph, strategy.pending]


@pattern
def a_dataclass_subclass(room: Any) -> Any:
    @dataclass
    class Data(room.FedAvg):
        folder: str = "out"
        history: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            super().__init__(fraction_evaluate=0.0)

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            self.history.append(server_round)
            return super().aggregate_train(server_round, replies)

    strategy = Data(folder="there")
    return [told(run(strategy), "loss"), strategy.history, strategy.folder]


@pattern
def keywords_set_after_the_constructor(room: Any) -> Any:
    strategy = room.FedAvg()
    strategy.fraction_evaluate = 0.0
    strategy.train_metrics_aggr_fn = lambda contents, key: MetricRecord({"replies": len(contents)})
    return told(run(strategy), "replies")


@pattern
def a_class_attribute_as_a_default(room: Any) -> Any:
    class Patient(room.FedAvg):
        patience_left = 5
        names: tuple[str, ...] = ("a", "b")

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            self.patience_left -= 1
            return super().aggregate_train(server_round, replies)

    strategy = Patient()
    return [told(run(strategy), "loss"), strategy.patience_left, strategy.names]


@pattern
def a_property_of_ones_own(room: Any) -> Any:
    class Counted(room.FedAvg):
        _seen = 0

        @property
        def seen(self) -> int:
            return self._seen

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            self._seen += len(replies)
            return super().aggregate_evaluate(server_round, replies)

    strategy = Counted()
    return [told(run(strategy), "loss"), strategy.seen]


# ---- configure_train -----------------------------------------------------------------------------------------------


@pattern
def a_config_that_changes_per_round(room: Any) -> Any:
    class Decaying(room.FedAvg):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            if server_round % 2 == 0:
                config["step"] = float(config["step"]) * 0.5
            return super().configure_train(server_round, arrays, config, grid)

    return told(run(Decaying(), 5, train_config=ConfigRecord({"step": 1.0})), "loss")


@pattern
def a_config_for_each_client(room: Any) -> Any:
    class PerClient(room.FedAvg):
        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            messages = list(super().configure_train(server_round, arrays, config, grid))
            for place, message in enumerate(sorted(messages, key=lambda m: m.metadata.dst_node_id)):
                own = ConfigRecord({**message.content["config"], "step": float(place)})
                message.content = RecordDict(
                    {"arrays": arrays, "config": own}
                )  # Flower's messages share theirs
            return messages

    return values(run(PerClient(weighted_by_key="accuracy")).arrays)


@pattern
def a_dynamic_choice_of_clients(room: Any) -> Any:
    class FirstHalf(room.FedAvg):
        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            chosen = sorted(grid.get_node_ids())[: 2 + server_round % 2]
            messages = super().configure_train(server_round, arrays, config, grid)
            return [message for message in messages if message.metadata.dst_node_id in chosen]

    nodes = grid()
    result = run(FirstHalf(), nodes=nodes)
    return [values(result.arrays), len(nodes.requests("train"))]


@pattern
def messages_made_by_hand(room: Any) -> Any:
    class ByHand(room.FedAvg):
        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            config["server-round"] = server_round
            record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
            return [
                Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node_id)
                for node_id in grid.get_node_ids()
            ]

    return told(run(ByHand()), "loss", "accuracy")


@pattern
def messages_made_by_flowers_helper(room: Any) -> Any:
    class Sampled(room.FedAvg):
        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            config["server-round"] = server_round
            record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
            nodes = random.Random(server_round).sample(sorted(grid.get_node_ids()), 2)
            return self._construct_messages(record, nodes, MessageType.TRAIN)

    return values(run(Sampled()).arrays)


@pattern
def a_custom_message_type(room: Any) -> Any:
    class Named(room.FedAvg):
        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            for message in super().configure_train(server_round, arrays, config, grid):
                yield Message(message.content, message.metadata.dst_node_id, "train")

    return told(run(Named()), "loss")


@pattern
def rounds_that_are_skipped(room: Any) -> Any:
    class EverySecond(room.FedAvg):
        def configure_evaluate(self, server_round: int, *rest: Any) -> Iterable[Message]:
            return super().configure_evaluate(server_round, *rest) if server_round % 2 == 0 else []

    return told(run(EverySecond(), 4), "loss")


@pattern
def a_fraction_that_grows(room: Any) -> Any:
    class Growing(room.FedAvg):
        def configure_train(self, server_round: int, *rest: Any) -> Iterable[Message]:
            self.fraction_train = min(1.0, 0.5 * server_round)
            return super().configure_train(server_round, *rest)

    nodes = grid()
    result = run(Growing(fraction_train=0.5), nodes=nodes)
    return [values(result.arrays), [len(nodes.requests("train", number)) for number in (1, 2, 3)]]


@pattern
def arrays_that_are_changed_before_they_are_sent(room: Any) -> Any:
    class Scaled(room.FedAvg):
        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            doubled = ArrayRecord({name: Array(2 * array.numpy()) for name, array in arrays.items()})
            return super().configure_train(server_round, doubled, config, grid)

    return values(run(Scaled()).arrays)


# ---- aggregate_train -----------------------------------------------------------------------------------------------


@pattern
def models_saved_each_round(room: Any) -> Any:
    saved: dict[int, list[float]] = {}

    class Saving(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            if arrays is not None:
                layers = arrays.to_numpy_ndarrays()
                saved[server_round] = [round(float(layer.sum()), 5) for layer in layers]
            return arrays, metrics

    return [told(run(Saving()), "loss"), saved]


@pattern
def a_mean_in_numpy(room: Any) -> Any:
    class Plain(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            layers = [reply.content["arrays"].to_numpy_ndarrays() for reply in replies if reply.has_content()]
            mean = [np.mean(each, axis=0) for each in zip(*layers, strict=True)]
            return ArrayRecord(mean), MetricRecord({"replies": len(layers)})

    result = run(Plain())
    return [values(result.arrays), told(result, "replies")[1:]]


@pattern
def a_weighted_mean_of_ones_own(room: Any) -> Any:
    class Weighted(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            valid = [reply for reply in replies if not reply.has_error()]
            sizes = [reply.content["metrics"]["num-examples"] for reply in valid]
            total: dict[str, Any] = {}
            for size, reply in zip(sizes, valid, strict=True):
                for name, array in reply.content["arrays"].items():
                    total[name] = total.get(name, 0) + size / sum(sizes) * array.numpy()
            return ArrayRecord({name: Array(np.asarray(each)) for name, each in total.items()}), None

    return values(run(Weighted()).arrays)


@pattern
def flowers_check_of_replies(room: Any) -> Any:
    class Checked(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            valid, errors = self._check_and_log_replies(replies, is_train=True)
            last = valid[-1].content["arrays"]
            return last, MetricRecord({"valid": len(valid), "errors": len(errors)})

    return told(run(Checked()), "valid", "errors")


@pattern
def errors_filtered_out(room: Any) -> Any:
    class Filtering(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            valid = [reply for reply in replies if not reply.has_error()]
            return super().aggregate_train(server_round, valid)

    return told(run(Filtering(fraction_evaluate=0.0), train_config=ConfigRecord({"fail": 1})), "loss")


@pattern
def replies_filtered_by_a_metric(room: Any) -> Any:
    class OnlyGood(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            good = [reply for reply in replies if reply.content["metrics"]["loss"] < 2.5]
            return super().aggregate_train(server_round, good)

    return told(run(OnlyGood()), "loss")


@pattern
def metrics_added_to_a_rounds(room: Any) -> Any:
    class Adding(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            metrics["mine"] = float(server_round)
            return arrays, metrics

    return told(run(Adding()), "loss", "mine")


@pattern
def replies_looked_at_before(room: Any) -> Any:
    seen: list[list[int]] = []

    class Looking(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            seen.append(sorted(reply.content["metrics"]["num-examples"] for reply in replies))
            return super().aggregate_train(server_round, replies)

    return [told(run(Looking()), "loss"), seen]


@pattern
def a_moving_average_of_models(room: Any) -> Any:
    class Smoothed(room.FedAvg):
        average: ArrayRecord | None = None

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            if self.average is not None:
                before = self.average
                arrays = ArrayRecord(
                    {
                        name: Array(0.5 * before[name].numpy() + 0.5 * array.numpy())
                        for name, array in arrays.items()
                    }
                )
            self.average = arrays
            return arrays, metrics

    return values(run(Smoothed()).arrays)


@pattern
def clipped_updates(room: Any) -> Any:
    class Clipping(room.FedAvg):
        sent: ArrayRecord

        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            self.sent = arrays
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            for reply in replies:
                for name, array in reply.content["arrays"].items():
                    base = self.sent[name].numpy()
                    reply.content["arrays"][name] = Array(base + np.clip(array.numpy() - base, -0.5, 0.5))
            return super().aggregate_train(server_round, replies)

    return values(run(Clipping()).arrays)


@pattern
def a_round_that_makes_no_model(room: Any) -> Any:
    class Gated(room.FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            return (None, None) if server_round == 2 else (arrays, metrics)

    return values(run(Gated()).arrays)


# ---- Evaluation ----------------------------------------------------------------------------------------------------


@pattern
def an_evaluation_on_the_server(room: Any) -> Any:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": float(arrays["w"].numpy()[0]), "round": server_round})

    return told(run(room.FedAvg(fraction_evaluate=0.0), evaluate_fn=evaluate), "accuracy", "round")


@pattern
def an_evaluation_that_saves_the_best(room: Any) -> Any:
    best: dict[str, Any] = {"accuracy": -1.0}

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        # Flower's sums are in float32, in an order of the replies that is random.
        accuracy = -abs(round(float(arrays["w"].numpy()[0]), 5) - 2.0)
        if accuracy > best["accuracy"]:
            best.update(accuracy=accuracy, round=server_round, model=values(arrays))
        return None if server_round == 0 else MetricRecord({"accuracy": accuracy})

    return [told(run(room.FedAvg(), 4, evaluate_fn=evaluate), "accuracy"), best]


@pattern
def metrics_functions(room: Any) -> Any:
    def weighted(contents: list[RecordDict], key: str) -> MetricRecord:
        metrics = [next(iter(content.metric_records.values())) for content in contents]
        sizes = [each[key] for each in metrics]
        mean = sum(n * each["loss"] for n, each in zip(sizes, metrics, strict=True)) / sum(sizes)
        return MetricRecord({"mine": mean, "clients": len(metrics)})

    return told(run(room.FedAvg(train_metrics_aggr_fn=weighted, evaluate_metrics_aggr_fn=weighted)), "mine")


@pattern
def a_metrics_function_that_is_partial(room: Any) -> Any:
    def most(name: str, contents: list[RecordDict], key: str) -> MetricRecord:
        return MetricRecord({f"max_{name}": max(content["metrics"][name] for content in contents)})

    function = functools.partial(most, "loss")
    return told(run(room.FedAvg(evaluate_metrics_aggr_fn=function)), "max_loss")


@pattern
def a_fairness_metric_in_aggregate_evaluate(room: Any) -> Any:
    class Fair(room.FedAvg):
        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
            replies = list(replies)
            losses = [reply.content["metrics"]["loss"] for reply in replies if reply.has_content()]
            metrics = super().aggregate_evaluate(server_round, replies)
            metrics["spread"] = float(np.std(losses))
            return metrics

    return told(run(Fair()), "loss", "spread")


@pattern
def an_evaluation_config(room: Any) -> Any:
    nodes = grid()
    config = ConfigRecord({"threshold": 0.25})
    run(room.FedAvg(), nodes=nodes, evaluate_config=config, train_config=ConfigRecord({"lr": 0.5}))
    asked = {kind: nodes.requests(kind)[0].content.config_records["config"] for kind in ("train", "evaluate")}
    return [asked["evaluate"]["threshold"], "lr" in asked["evaluate"], asked["train"]["lr"]]


@pattern
def no_evaluation_at_all(room: Any) -> Any:
    nodes = grid()
    result = run(room.FedAvg(fraction_evaluate=0.0), nodes=nodes)
    return [told(result, "loss"), len(nodes.requests("evaluate"))]


@pattern
def results_kept_in_a_json_file(room: Any) -> Any:
    class Reporting(room.FedAvg):
        def __init__(self, path: Path) -> None:
            super().__init__()
            self.path, self.results = path, {}

        def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> Any:
            metrics = super().aggregate_evaluate(server_round, replies)
            self.results[server_round] = {"loss": round(metrics["loss"], 5)}
            self.path.write_text(json.dumps(self.results))
            return metrics

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(Reporting(Path(folder) / "results.json"))
        return json.loads((Path(folder) / "results.json").read_text())


# ---- start ---------------------------------------------------------------------------------------------------------


@pattern
def an_early_stop_by_an_exception(room: Any) -> Any:
    class StopError(Exception):
        pass

    class Stopping(room.FedAvg):
        last: list[float]

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            self.last = values(arrays)
            if server_round == 2:
                raise StopError
            return arrays, metrics

    strategy = Stopping()
    with pytest.raises(StopError):
        run(strategy, 5)
    return strategy.last


@pattern
def a_start_that_calls_its_parents(room: Any) -> Any:
    class Announced(room.FedAvg):
        began = 0

        def start(self, *args: Any, **kwargs: Any) -> Result:
            self.began += 1
            kwargs["num_rounds"] = 2 * kwargs["num_rounds"]
            result = super().start(*args, **kwargs)
            result.arrays = ArrayRecord({name: Array(-a.numpy()) for name, a in result.arrays.items()})
            return result

    strategy = Announced()
    return [told(run(strategy, 2), "loss"), strategy.began]


@pattern
def a_start_of_ones_own(room: Any) -> Any:
    class OwnStart(room.FedAvg):
        def start(
            self, grid: Grid, initial_arrays: Any, num_rounds: int = 3, timeout: float = 10, **more: Any
        ) -> Any:
            result, arrays = Result(), initial_arrays
            for number in range(1, num_rounds + 1):
                asked = list(self.configure_train(number, arrays, ConfigRecord(), grid))
                made, metrics = self.aggregate_train(number, grid.send_and_receive(asked, timeout=timeout))
                arrays = made
                result.train_metrics_clientapp[number] = metrics
                asked = list(self.configure_evaluate(number, arrays, ConfigRecord(), grid))
                found = self.aggregate_evaluate(number, grid.send_and_receive(asked, timeout=timeout))
                result.evaluate_metrics_clientapp[number] = found
            result.arrays = arrays
            return result

    return told(run(OwnStart()), "loss")


@pattern
def flowers_start_on_a_strategy(room: Any) -> Any:
    return told(flower.Strategy.start(room.FedAvg(), grid(), model(), num_rounds=3, timeout=10), "loss")


@pattern
def a_loop_of_single_rounds(room: Any) -> Any:
    strategy, arrays, losses = room.FedAvg(), model(), []
    for _ in range(3):
        result = strategy.start(grid(), arrays, num_rounds=1, timeout=10)
        arrays = result.arrays
        losses.append(round(result.evaluate_metrics_clientapp[1]["loss"], 5))
    return [values(arrays), losses]


@pattern
def two_strategies_in_sequence(room: Any) -> Any:
    warm = run(room.FedAvg(fraction_evaluate=0.0), 2).arrays
    last = room.FedAvgM(server_momentum=0.5).start(grid(), warm, num_rounds=2, timeout=10)
    return told(last, "loss")


@pattern
def a_second_run_of_one_object_on_another_model(room: Any) -> Any:
    strategy = room.FedAvg()
    first = told(run(strategy), "loss")
    return [first, told(run(strategy), "loss")]


# ---- Classes -------------------------------------------------------------------------------------------------------


@pattern
def a_mixin_before_the_strategy(room: Any) -> Any:
    class Logging:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.lines: list[str] = []

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)  # type: ignore[misc]
            self.lines.append(f"{server_round}: {metrics['loss']:.3f}")
            return arrays, metrics

    class Both(Logging, room.FedAvg):
        pass

    strategy = Both(fraction_evaluate=0.0)
    return [told(run(strategy), "loss"), strategy.lines]


@pattern
def two_mixins_with_keywords_of_their_own(room: Any) -> Any:
    class Naming:
        def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
            self.name = name
            super().__init__(*args, **kwargs)

    class Saving:
        def __init__(self, *args: Any, every: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.every, self.saved = every, []

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)  # type: ignore[misc]
            if server_round % self.every == 0:
                self.saved.append(server_round)
            return arrays, metrics

    class Both(Naming, Saving, room.FedAvg):
        pass

    strategy = Both(name="mine", every=2)
    return [told(run(strategy, 4), "loss"), strategy.name, strategy.saved]


@pattern
def an_abstract_base_of_ones_own(room: Any) -> Any:
    class Base(room.FedAvg, ABC):
        @abstractmethod
        def scale(self, server_round: int) -> float: ...

        def configure_train(
            self, server_round: int, arrays: Any, config: Any, grid: Grid
        ) -> Iterable[Message]:
            config["step"] = self.scale(server_round)
            return super().configure_train(server_round, arrays, config, grid)

    class Halving(Base):
        def scale(self, server_round: int) -> float:
            return 0.5**server_round

    with pytest.raises(TypeError):
        Base()
    return values(run(Halving()).arrays)


@pattern
def a_chain_of_subclasses(room: Any) -> Any:
    class First(room.FedAvg):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[str] = []

        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            self.order.append("first")
            return super().aggregate_train(server_round, replies)

    class Second(First):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            self.order.append("second")
            return super().aggregate_train(server_round, replies)

    strategy = Second()
    return [told(run(strategy, 2), "loss"), strategy.order]


@pattern
def a_strategy_that_delegates_to_another(room: Any) -> Any:
    class Around(flower.Strategy):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def configure_train(self, *args: Any) -> Any:
            return self.inner.configure_train(*args)

        def aggregate_train(self, *args: Any) -> Any:
            return self.inner.aggregate_train(*args)

        def configure_evaluate(self, *args: Any) -> Any:
            return self.inner.configure_evaluate(*args)

        def aggregate_evaluate(self, *args: Any) -> Any:
            return self.inner.aggregate_evaluate(*args)

        def summary(self) -> None:
            self.inner.summary()

    return told(run(Around(room.FedAvg())), "loss")


@pattern
def a_method_replaced_on_the_object(room: Any) -> Any:
    strategy, seen = room.FedAvg(), []
    former = strategy.aggregate_train

    def noted(server_round: int, replies: Iterable[Message]) -> Any:
        seen.append(server_round)
        return former(server_round, replies)

    strategy.aggregate_train = noted
    return [told(run(strategy), "loss"), seen]


@pattern
def isinstance_and_the_class_of_a_strategy(room: Any) -> Any:
    class Mine(room.FedAvg):
        pass

    strategy = Mine()
    return [
        isinstance(strategy, flower.FedAvg),
        isinstance(strategy, flower.Strategy),
        issubclass(Mine, flower.FedAvg),
        type(strategy).__name__,
    ]


@pattern
def a_summary_of_ones_own(room: Any) -> Any:
    lines: list[str] = []

    class Said(room.FedAvg):
        def summary(self) -> None:
            lines.append("mine")
            super().summary()

    return [told(run(Said()), "loss"), lines]


# ---- Objects -------------------------------------------------------------------------------------------------------


@pattern
def a_deep_copy(room: Any) -> Any:
    strategy = room.FedAvg(fraction_evaluate=0.0)
    made = copy.deepcopy(strategy)
    made.fraction_evaluate = 1.0
    return [told(run(strategy), "loss"), told(run(made), "loss"), told(run(copy.deepcopy(made)), "loss")]


@pattern
def a_pickle(room: Any) -> Any:
    strategy = pickle.loads(pickle.dumps(room.FedAvg(fraction_evaluate=0.0)))
    return told(run(strategy), "loss")


@pattern
def a_pickle_after_a_run(room: Any) -> Any:
    strategy = room.FedAvg()
    run(strategy)
    return told(run(pickle.loads(pickle.dumps(strategy))), "loss")


@pattern
def a_factory_by_name(room: Any) -> Any:
    found = {name: getattr(room, name) for name in ("FedAvg", "FedAvgM", "FedMedian")}
    options: dict[str, dict[str, Any]] = {"FedAvgM": {"server_momentum": 0.9}}
    return [told(run(kind(**options.get(name, {}))), "loss") for name, kind in found.items()]


@pattern
def positional_arguments(room: Any) -> Any:
    return told(run(room.FedAvg(1.0, 0.0, 2, 2, 4)), "loss")


@pattern
def a_timeout_and_a_config_by_keyword(room: Any) -> Any:
    result = room.FedAvg().start(
        grid=grid(),
        initial_arrays=model(),
        num_rounds=2,
        timeout=5.0,
        train_config=ConfigRecord({"step": 2.0}),
    )
    return told(result, "loss")


@pattern
def the_result_printed_and_read(room: Any) -> Any:
    result = run(room.FedAvg())
    state = {name: array.numpy() for name, array in result.arrays.items()}
    layers = result.arrays.to_numpy_ndarrays()
    return [
        sorted(state),
        [np.round(layer, 5).tolist() for layer in layers],
        bool(repr(result)),
        isinstance(result, Result),
    ]


# ---- The comparison ------------------------------------------------------------------------------------------------


def test_there_are_enough_patterns():
    assert len(PATTERNS) >= 43


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_gives_what_it_gives_with_flower(name, caplog):
    caplog.set_level(logging.CRITICAL)
    assert PATTERNS[name](strategies) == PATTERNS[name](flower)
