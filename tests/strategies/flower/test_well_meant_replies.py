"""Replies and models that Flower takes although they aren't the model's: another precision, names, nothing at all."""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from strategies import FedAdam, FedAvg, FedBuff, FedMedian, RunError
from strategies.testing import MemoryGrid

SIZES, CENTRES = (1, 3), (2.0, 6.0)


def grid(dtype: str = "float32", *, listed: bool = False, part: bool = False) -> MemoryGrid:
    """Return a grid of clients that reply with two arrays half-way to their centres."""

    def work(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        content = RecordDict({"metrics": MetricRecord({"num-examples": SIZES[i], "loss": 1.0})})
        if message.metadata.message_type == "train":
            sent = next(iter(message.content.array_records.values()))
            values = [a.numpy() for a in sent.values()] or [np.zeros(2), np.zeros(())]
            made = [np.asarray(0.5 * (w + CENTRES[i]), dtype) for w in values]
            arrays = (
                ArrayRecord(made) if listed else ArrayRecord(dict(zip("wb", map(Array, made), strict=True)))
            )
            if part:
                del arrays["b"]
            content["arrays"] = arrays
        return Message(content, reply_to=message)

    return MemoryGrid(work, [{"partition-id": i, "num-partitions": 2} for i in range(2)])


def model(dtype: str = "float32", value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(2, value, dtype)), "b": Array(np.asarray(value, dtype))})


def values(arrays: ArrayRecord) -> list[float]:
    return [float(x) for array in arrays.values() for x in array.numpy().ravel()]


def run(strategy: Any, nodes: MemoryGrid, arrays: ArrayRecord | None = None, rounds: int = 2) -> ArrayRecord:
    return strategy.start(nodes, model() if arrays is None else arrays, num_rounds=rounds, timeout=10).arrays


@pytest.mark.parametrize(
    ("of_model", "of_replies"), [("float32", "float64"), ("float64", "float32"), ("float16", "float64")]
)
@pytest.mark.parametrize("kind", [FedAvg, FedMedian, FedBuff])
def test_the_models_precision_wins_and_one_line_says_so(kind, of_model, of_replies, caplog):
    got = run(kind(fraction_evaluate=0.0), grid(of_replies), model(of_model), 3)
    assert [array.dtype for array in got.values()] == [of_model] * 2
    same = run(kind(fraction_evaluate=0.0), grid(of_model), model(of_model), 3)
    assert values(got) == pytest.approx(values(same), rel=2e-3 if of_model == "float16" else 1e-6)
    (line,) = [text for text in caplog.messages if "replies with" in text]
    assert line.endswith(
        f"replies with {of_replies} arrays for a model of {of_model}, which keeps its own dtypes"
    )


def test_a_value_beyond_the_models_precision_is_refused(caplog):
    def beyond(message: Message, context: Context) -> Message:
        arrays = ArrayRecord({"w": Array(np.full(2, 1e200)), "b": Array(np.zeros(()))})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    with pytest.raises(RunError, match="overflows float32"):
        run(FedAvg(fraction_evaluate=0.0), MemoryGrid(beyond, [{}, {}]))


def test_arrays_named_by_position_take_the_models_names():
    expected = run(FedAvg(fraction_evaluate=0.0), grid())
    got = run(FedAvg(fraction_evaluate=0.0), grid(listed=True))
    assert list(got) == ["w", "b"]
    assert values(got) == values(expected) == pytest.approx([3.75] * 3)  # 0 → 2.5 → 3.75: half-way to 5


class OwnMean(FedAvg):
    """Returns a list of arrays, as users do who compute with NumPy."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        each = [reply.content.array_records["arrays"].to_numpy_ndarrays() for reply in replies]
        return ArrayRecord(
            [np.asarray(np.mean(layer, axis=0)) for layer in zip(*each, strict=True)]
        ), MetricRecord()


def test_an_override_may_return_a_list_of_arrays():
    got = run(OwnMean(fraction_evaluate=0.0), grid(), rounds=1)
    assert list(got) == ["w", "b"]
    assert values(got) == [2.0] * 3  # the mean of 1 and 3


def test_a_part_of_the_arrays_is_refused_with_a_line_that_names_trained():
    with pytest.raises(
        RunError, match=r"\['w'\], the model's are \['w', 'b'\]; trained names the arrays that"
    ):
        run(FedAvg(fraction_evaluate=0.0), grid(part=True))


@pytest.mark.parametrize("name", ["FedAvg", "FedMedian"])
def test_without_initial_arrays_the_first_replies_make_the_model(name):
    import strategies

    told: list[tuple[int, int]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        told.append((number, len(arrays)))
        return MetricRecord({"loss": float(number)})

    results = [
        getattr(room, name)(fraction_evaluate=1.0).start(
            grid("float64"), ArrayRecord(), num_rounds=3, timeout=10, evaluate_fn=evaluate
        )
        for room in (strategies, flower)
    ]
    ours, theirs = (values(result.arrays) for result in results)
    assert ours == pytest.approx(theirs, abs=1e-12)
    assert told == [(0, 0), (1, 2), (2, 2), (3, 2)] * 2
    if name == "FedAvg":  # 2.5, then half-way to 5 again and again
        assert ours == [4.375] * 3


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (FedAdam(), "the server's step begins from the present model"),
        (FedAvg(update_norm_bound=1.0), "updates are bounded"),
        (FedAvg(round_deadline=1.0), "round_deadline and over_select read the model"),
        (FedBuff(), "without rounds no replies make the first model"),
    ],
)
def test_a_method_that_needs_the_initial_model_says_so(strategy, reason):
    with pytest.raises(RunError, match=rf"initial_arrays has no arrays, and .*{reason}"):
        run(strategy, grid(), ArrayRecord())


def test_nobody_replies_to_an_empty_model(caplog):
    caplog.set_level(logging.INFO)

    def fails(message: Message, context: Context) -> Message:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RunError, match="CUDA out of memory"):
        run(FedAvg(fraction_evaluate=0.0), MemoryGrid(fails, [{}, {}]), ArrayRecord())


# ---- No examples ---------------------------------------------------------------------------------------------------


def sized(*sizes: int, value: float = 1.0) -> MemoryGrid:
    """Return a grid of clients that reply with the model + 1, + 2, … and these numbers of examples."""

    def work(message: Message, context: Context) -> Message:
        if message.metadata.message_type.startswith("query"):
            raise ValueError("No query function registered")
        i = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": sizes[i], "loss": float(i)})
        content = RecordDict({"metrics": metrics})
        if message.metadata.message_type == "train":
            sent = message.content.array_records["arrays"]
            content["arrays"] = ArrayRecord(
                {name: Array(np.asarray(array.numpy() + np.float32(i + 1))) for name, array in sent.items()}
            )
        return Message(content, reply_to=message)

    return MemoryGrid(work, [{"partition-id": i, "num-partitions": len(sizes)} for i in range(len(sizes))])


@pytest.mark.parametrize("kind", [FedAvg, FedBuff])
def test_a_client_without_examples_counts_nothing_and_reaches_the_metrics_function(kind):
    seen: list[list[Any]] = []

    def aggregate(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.append(sorted(content.metric_records["metrics"][key] for content in contents))
        return MetricRecord({"replies": len(contents)})

    own = {"buffer_size": 3, "server_lr": 3.0, "time_scenario": "F0"} if kind is FedBuff else {}
    strategy = kind(fraction_evaluate=0.0, train_metrics_aggr_fn=aggregate, **own)
    got = strategy.start(sized(0, 1, 3), model(), num_rounds=1, timeout=10)
    assert seen == [[0, 1, 3]]
    assert got.train_metrics_clientapp[1]["replies"] == 3
    if kind is FedAvg:
        assert values(got.arrays) == [2.75] * 3  # (1 · 2 + 3 · 3) / 4
        theirs = flower.FedAvg(fraction_evaluate=0.0).start(sized(0, 1, 3), model(), num_rounds=1, timeout=10)
        assert values(theirs.arrays) == values(got.arrays)


def test_metrics_of_a_client_without_examples_count_nothing():
    results = [
        kind(fraction_evaluate=1.0).start(sized(0, 1, 3), model(), num_rounds=1, timeout=10)
        for kind in (FedAvg, flower.FedAvg)
    ]
    for result in results:
        assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(1.75)  # (1 · 1 + 3 · 2) / 4
        assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(1.75)


def test_a_round_without_examples_leaves_the_model_as_it_is(caplog):
    with pytest.raises(RunError, match="no client's work was accepted"):
        run(FedAvg(fraction_evaluate=0.0), sized(0, 0), rounds=1)
    assert "2 valid replies without a weight above 0" in caplog.text
