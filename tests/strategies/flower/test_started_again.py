"""A strategy object that is started again: it goes on from the model that it returned, and else begins anew."""

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from strategies import REGISTRY, FedAvg, FedBuff, RunError, Scaffold
from strategies.flower import messages
from strategies.testing import MemoryGrid
from strategies.updates.server_optimizer import OPTIMIZERS

CENTRES, SIZES, ROUNDS = (3.0, 2.0, -1.0, 0.7, 1.6), (1, 2, 5, 3, 2), 4
# Clients with a local step of 0.2 to 1 s, which aren't always there.
FLEET = {"time_scenario": "lognormal:0.5,10", "availability": "diurnal:0.6,4"}


def model(value: float = 1.0, size: int = 2) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(size, value, np.float32))})


def work(message: Message, context: Any) -> Message:
    """Train towards the client's centre, by steps that depend on the task's number, as random batches do."""
    number = int(context.node_config["partition-id"])
    if message.metadata.message_type == messages.DESCRIBE:
        content = RecordDict(
            {"metrics": MetricRecord({"partition-id": number, "num-examples": SIZES[number]})}
        )
        return Message(content, reply_to=message)
    if message.metadata.message_type == messages.ASK_DIRECTION:
        direction = ArrayRecord({"d": Array(np.eye(len(CENTRES), dtype=np.float32)[number])})
        return Message(RecordDict({"direction": direction}), reply_to=message)
    config = message.content.config_records["config"]
    w = message.content.array_records["arrays"]["w"].numpy()
    metrics = MetricRecord({"num-examples": SIZES[number], "loss": float(w[0])})
    content = RecordDict({"metrics": metrics})
    if message.metadata.message_type == messages.TRAIN:
        task = int(config.get(messages.TASK, 0))  # type: ignore[call-overload]
        at = w - np.float32(0.1 + 0.01 * task) * (w - np.float32(CENTRES[number]))
        content["arrays"] = ArrayRecord({"w": Array(at.astype(w.dtype))})
        if messages.PATH in config:
            content[messages.APPLIED] = ConfigRecord(
                {messages.PATH: 1.0, messages.RECORDS: list(message.content.array_records)}
            )
    return Message(content, reply_to=message)


def grid() -> MemoryGrid:
    return MemoryGrid(work, [{"partition-id": i, "num-partitions": 5} for i in range(5)])


def start(
    strategy: Any, arrays: ArrayRecord, rounds: int = 1, nodes: MemoryGrid | None = None, **more: Any
) -> Result:
    return strategy.start(nodes or grid(), arrays, num_rounds=rounds, timeout=10, **more)


def made(name: str, **options: Any) -> Any:
    own = {"fedfix_interval": 1.0} if name == "fedfix" else {}
    return REGISTRY[name](**{"fraction_evaluate": 0.0, **own, **options})


# Weights that don't follow from the number of aggregations that are asked for, as those of fedbuff do.
OF_ANY_LENGTH = {"fedbuff", "async-spectral"}


@pytest.mark.parametrize("options", [{}, FLEET], ids=["always", "fleet"])
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_four_starts_of_a_round_are_one_of_four(name, options):
    own = {"aggregation_weights": "identical"} if name in OF_ANY_LENGTH else {}
    whole, nodes = start(made(name, **own, **options), model(), ROUNDS), grid()
    strategy, arrays = made(name, **own, **options), model()
    for _ in range(ROUNDS):
        arrays = start(strategy, arrays, nodes=nodes).arrays
    assert dict(arrays) == dict(whole.arrays)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_the_server_optimizers_memory_stays(optimizer):
    whole = start(FedAvg(server_optimizer=optimizer, fraction_evaluate=0.0), model(), ROUNDS)
    strategy, arrays = FedAvg(server_optimizer=optimizer, fraction_evaluate=0.0), model()
    for _ in range(ROUNDS):
        arrays = start(strategy, arrays).arrays
    assert dict(arrays) == dict(whole.arrays)


def test_no_cohort_and_no_seed_comes_twice():
    nodes, strategy, arrays = grid(), FedAvg(fraction_train=0.4, fraction_evaluate=0.0), model()
    whole = grid()
    start(FedAvg(fraction_train=0.4, fraction_evaluate=0.0), model(), ROUNDS, whole)
    for _ in range(ROUNDS):
        arrays = start(strategy, arrays, nodes=nodes).arrays
    cohorts = [nodes.asked(server_round=number) for number in range(1, ROUNDS + 1)]
    assert cohorts == [whole.asked(server_round=number) for number in range(1, ROUNDS + 1)]
    assert len({tuple(cohort) for cohort in cohorts}) > 1


def test_each_start_counts_from_one_and_messages_count_on():
    asked: list[int] = []
    stops: list[tuple[int, list[int]]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        asked.append(number)
        return MetricRecord({"accuracy": float(arrays["w"].numpy()[0])})

    def stop(number: int, result: Result) -> bool:
        stops.append((number, sorted(result.evaluate_metrics_serverapp)))
        return False

    for kind in (FedAvg, FedBuff):
        nodes, strategy = grid(), kind(time_scenario="F0", eval_every=1)
        asked.clear()
        stops.clear()
        first = start(strategy, model(), 2, nodes, evaluate_fn=evaluate, should_stop=stop)
        second = start(strategy, first.arrays, 2, nodes, evaluate_fn=evaluate, should_stop=stop)
        for result in (first, second):
            assert (
                sorted(result.train_metrics_clientapp) == sorted(result.evaluate_metrics_clientapp) == [1, 2]
            )
            assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2]
        assert asked == [0, 1, 2] * 2
        assert stops == [(1, [0, 1]), (2, [0, 1, 2])] * 2
        assert second.evaluate_metrics_serverapp[0] == first.evaluate_metrics_serverapp[2]
        rounds = {m.content.config_records["config"]["server-round"] for m in nodes.requests()}
        assert {1, 2, 3, 4} <= rounds


@pytest.mark.parametrize("kind", [FedAvg, FedBuff, Scaffold])
def test_another_model_begins_anew_in_one_line(kind, caplog):
    caplog.set_level(logging.INFO)
    strategy = kind(fraction_evaluate=0.0)
    start(strategy, model(), 3)
    assert not any("begins anew" in text or "goes on" in text for text in caplog.messages)
    again = start(strategy, model(), 3)
    assert [text for text in caplog.messages if "begins anew" in text] == [
        f"{kind.__name__} begins anew: it goes on only from the model that its last start() returned"
    ]
    assert dict(again.arrays) == dict(start(kind(fraction_evaluate=0.0), model(), 3).arrays)
    caplog.clear()
    start(strategy, again.arrays, 3)
    assert [text for text in caplog.messages if "goes on" in text] == [
        f"{kind.__name__} goes on after aggregation 3 of its last run"
    ]


def test_arrays_that_the_caller_changes_in_place_are_another_model(caplog):
    caplog.set_level(logging.INFO)
    strategy = FedAvg(fraction_evaluate=0.0)
    result = start(strategy, model())
    result.arrays["w"] = Array(np.zeros(2, np.float32))
    start(strategy, result.arrays)
    assert sum("begins anew" in text for text in caplog.messages) == 1


def test_a_run_that_failed_begins_anew():
    def fails(message: Message, context: Any) -> Message:
        raise RuntimeError("CUDA out of memory")

    strategy, expected = FedAvg(fraction_evaluate=0.0), start(FedAvg(fraction_evaluate=0.0), model())
    with pytest.raises(RunError):
        start(strategy, model(), nodes=MemoryGrid(fails, [{}]))
    assert dict(start(strategy, model()).arrays) == dict(expected.arrays)


def test_a_run_that_met_its_stop_condition_says_that_nothing_is_left(caplog):
    strategy = FedAvg(fraction_evaluate=0.0, stop_at="accuracy>=0.5")

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": 0.6 if number else 0.4})

    result = start(strategy, model(), 3, evaluate_fn=evaluate)
    again = start(strategy, result.arrays, 3, evaluate_fn=evaluate)
    assert dict(again.arrays) == dict(result.arrays)
    assert sum("there was nothing to do" in text for text in caplog.messages) == 1
