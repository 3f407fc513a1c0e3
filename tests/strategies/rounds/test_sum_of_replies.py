"""A round's sum of blocks of replies has the bits of the sum reply by reply, which a witness asks for."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from strategies import FedAvg, messages, streams
from strategies.flower.arrays import CHUNK
from strategies.testing import MemoryGrid
from strategies.updates.aggregation import WeightedSum

CLIENTS, ROUNDS = 13, 2
Arrays = dict[str, Any]
Spoil = Callable[[Arrays, int], None]


def model() -> Arrays:
    """Return arrays of which one has more than a chunk, and chunks several arrays; the last three are buffers."""
    rng = streams.generator(0, "model")
    shapes = {"first": (3, 5000), "bias": (), "none": (0, 4), "second": (CHUNK + 5, 2), "half": (7,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return arrays | {
        "half": arrays["half"].astype(np.float16),
        "norm.running_mean": np.zeros(30, np.float32),
        "norm.running_var": np.ones(30, np.float32),
        "norm.num_batches_tracked": np.array(3, np.int64),
    }


def put(name: str, value: float, at: int = -1) -> Spoil:
    return lambda arrays, number: arrays[name].reshape(-1).__setitem__(at, value)


def longer(arrays: Arrays, number: int) -> None:
    arrays["second"] *= 40 * number


def other_bytes(arrays: Arrays, number: int) -> None:
    arrays["first"] = np.asfortranarray(arrays["first"])
    arrays["second"] = arrays["second"].astype(">f4")


SPOILS: dict[str, Spoil] = {
    "nobody": lambda arrays, number: None,
    "not a number": put("second", np.nan),
    "infinity": put("first", np.inf, 0),
    "minus infinity": put("bias", -np.inf),
    "too large": put("second", 1e30),
    "too large the other way": put("second", -1e30),
    "far too long": put("second", 1e17),
    "not a number in a buffer": put("norm.running_mean", np.nan),
    "negative variance": put("norm.running_var", -1.0),
    "longer": longer,
    "other bytes": other_bytes,
    "other shape": lambda arrays, number: arrays.update(bias=np.zeros(2, np.float32)),
    "other name": lambda arrays, number: arrays.update(more=np.zeros(2, np.float32)),
}


def trained(names: tuple[str, ...], **options: Any) -> Any:
    """Return what a run has found, whose clients send models that are spoilt as ``names`` says."""
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        content = MetricRecord({"partition-id": index, "num-examples": 10 + index})
        return Message(RecordDict({"metrics": content}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        number = int(message.content.config_records["config"][messages.SERVER_ROUND])  # type: ignore[arg-type]
        rng = streams.generator(0, "train", index, number)
        arrays: Arrays = {}
        for name, array in message.content.array_records["arrays"].items():
            values = array.numpy()
            step = np.abs(rng.normal(size=values.shape)) + 1
            arrays[name] = np.asarray(values + (0.01 * step if values.dtype.kind == "f" else 4), values.dtype)
        SPOILS[names[index]](arrays, number)
        content = RecordDict(
            {"metrics": MetricRecord({"num-examples": 10 + index, "train-loss": float(index)})}
        )
        content["arrays"] = ArrayRecord({name: Array(values) for name, values in arrays.items()})
        return Message(content, reply_to=message)

    grid = MemoryGrid(app, [{"partition-id": index} for index in range(CLIENTS)])
    grid.lose(5)
    strategy = FedAvg(fraction_evaluate=0.0, **options)
    initial = ArrayRecord({name: Array(values) for name, values in model().items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = strategy.start(grid, initial, num_rounds=ROUNDS, timeout=0.05)
    arrays = {name: array.data for name, array in result.arrays.items()}
    told = {number: dict(metrics) for number, metrics in result.train_metrics_clientapp.items()}
    client_stats = [
        strategy.session.client_stats.column(name, CLIENTS)
        for name in ("accepted", "refused", "clipped", "weight")
    ]
    return arrays, told, client_stats, strategy.session.safeguards.norms.state()


@pytest.mark.parametrize(
    ("safeguards", "spoils"),
    [
        ("off", ("nobody",)),
        ("off", tuple(SPOILS)),
        ("on", tuple(SPOILS)),
        ("on", ("nobody", "nobody", "longer")),
        ("on", ("nobody", "longer", "other bytes")),
    ],
)
def test_the_model_has_the_same_bits_as_reply_by_reply(safeguards, spoils, monkeypatch):
    names, blocks, seen = (spoils * CLIENTS)[:CLIENTS], list[int](), list[int]()
    together = list[int]()
    sum_blocks = WeightedSum.sum_blocks

    def counted(total: WeightedSum, given: Any) -> None:
        blocks.extend(map(len, given))
        together.append(len(given))
        sum_blocks(total, given)

    monkeypatch.setattr(WeightedSum, "sum_blocks", counted)
    expected = trained(names, safeguards=safeguards, on_client_model=lambda index, _: seen.append(index))
    assert seen
    assert not blocks
    assert trained(names, safeguards=safeguards) == expected
    assert max(blocks) == 2  # an eighth of the clients, rounded up
    assert max(together) == 4  # blocks of 8 clients, whose replies come in one pull
