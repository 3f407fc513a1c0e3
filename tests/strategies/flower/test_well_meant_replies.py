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
