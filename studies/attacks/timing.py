"""Devices that lie about their times, on a clock that jumps: ``python -m studies.attacks.timing [DATA-PATH]``.

A perceptron learns the pictures of the other attacks, IID over five devices, for 20 seconds of real time on a clock
that jumps to the end of every wait. Honest tasks take 0.6 to 1.4 s. Safeguards are on. A line has the final accuracy
in percent, the aggregations, and the device's share of all weights that were given.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from strategies import REGISTRY, AsynchronousStrategy, clock, messages, streams
from strategies.clock import WallClock
from strategies.testing import MemoryGrid
from studies.attacks.problem import Arrays, pictures

CLIENTS, SECONDS, HIDDEN, FOREVER = 5, 20.0, 32, 1e6
STEPS, BATCH, LR = 10, 16, 0.3

Model = list[NDArray[np.float32]]
Times = Callable[[int, float], float]  # of the hostile device, by its task and its honest time

#: Times of the hostile device's tasks in seconds, from task 1.
LIES: dict[str, Times] = {
    "honest": lambda task, usual: usual,
    "late, then a burst": lambda task, usual: 8.0 if task == 1 else 0.01,
    "usual, then a burst": lambda task, usual: usual if task < 25 else 0.01,
    "20 times as fast": lambda task, usual: 0.05,
    "ever later": lambda task, usual: min(2.4 ** (task - 1), FOREVER),
    "silent": lambda task, usual: FOREVER,
}

METHODS = (
    "async-fedavg",
    "fedbuff",
    "fedfix",
    "fedasync",
    "delay-adaptive",
    "ringmaster",
    "rennala",
    "fadas",
    "fedcompass",
    "ca2fl",
    "ace",
    "aced",
    "ringleader",
    "area",
)


@contextmanager
def jumping() -> Iterator[None]:
    """Let the machine's clock jump to the end of every wait, in this process."""
    module: Any = clock
    now, real = [0.0], module.time

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 1e-3)

    module.time = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    try:
        yield
    finally:
        module.time = real


class LyingGrid(MemoryGrid):
    """A Grid in memory whose device 0 takes the time of a lie for each task."""

    def __init__(self, app: Callable[[Message, Context], Message], times: Times, seed: int) -> None:
        nodes = [{"partition-id": index, "num-partitions": CLIENTS} for index in range(CLIENTS)]
        super().__init__(app, nodes, seed=seed)
        self._times, self._tasks = times, [0] * CLIENTS
        self._rng = streams.generator(seed, "attacks-times")

    def push_messages(self, messages_: Iterable[Message]) -> Iterable[str]:
        """Push messages, each with the time that its device takes."""
        ids: list[str] = []
        for message in messages_:
            node = self.nodes[message.metadata.dst_node_id]
            if message.metadata.message_type == messages.TRAIN:
                index = int(node.context.node_config["partition-id"])
                usual = (0.6 + 0.2 * index) * self._rng.uniform(0.9, 1.1)
                self._tasks[index] += 1
                node.delay = usual if index else self._times(self._tasks[index], usual)
            ids += super().push_messages([message])
        return ids


def perceptron(size: int, seed: int) -> Model:
    """Return the initial model of pictures with so many points: two layers, of float32."""
    rng = streams.generator(seed, "attacks-perceptron")
    return [
        rng.uniform(-1, 1, (size, HIDDEN)).astype(np.float32) / np.float32(size**0.5),
        np.zeros(HIDDEN, np.float32),
        rng.uniform(-1, 1, (HIDDEN, 10)).astype(np.float32) / np.float32(HIDDEN**0.5),
        np.zeros(10, np.float32),
    ]


def outputs(model: Model, x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the hidden values (B, H) and the outputs (B, 10) of pictures (B, P)."""
    hidden = np.maximum(x @ model[0] + model[1], 0)
    return hidden, hidden @ model[2] + model[3]


def trained(model: Model, x: NDArray[np.float32], y: NDArray[np.int64], rng: np.random.Generator) -> Model:
    """Return a model after local steps on random batches."""
    model = [array.copy() for array in model]
    for _ in range(STEPS):
        rows = rng.integers(len(x), size=BATCH)
        hidden, values = outputs(model, x[rows])
        slope = np.exp(values - values.max(axis=1, keepdims=True))
        slope /= slope.sum(axis=1, keepdims=True)
        slope[np.arange(BATCH), y[rows]] -= 1
        slope /= BATCH
        below = (slope @ model[2].T) * (hidden > 0)
        for array, change in zip(
            model, (x[rows].T @ below, below.sum(axis=0), hidden.T @ slope, slope.sum(axis=0)), strict=True
        ):
            array -= LR * change
    return model


def result(method: str, lie: str, data: Arrays, *, reverses: bool, seed: int = 0) -> tuple[float, int, float]:
    """Return the final accuracy in percent, the number of aggregations, and the share of device 0."""
    x = {
        part: data[f"x_{part}"].reshape(len(data[f"x_{part}"]), -1).astype(np.float32)
        for part in ("train", "test")
    }
    y = {part: data[f"y_{part}"].astype(np.int64) for part in ("train", "test")}
    rng = streams.generator(seed, "attacks-devices")
    rows = np.array_split(rng.permutation(len(y["train"])), CLIENTS)

    def app(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        size = MetricRecord({messages.NUM_EXAMPLES: len(rows[index])})
        if message.metadata.message_type != messages.TRAIN:
            size.update({messages.PARTITION_ID: index, messages.NUM_PARTITIONS: CLIENTS})
            return Message(RecordDict({messages.METRICS: size}), reply_to=message)
        sent = message.content.array_records[messages.ARRAYS]
        base = [array.numpy() for array in sent.values()]
        made = trained(base, x["train"][rows[index]], y["train"][rows[index]], rng)
        if reverses and index == 0:
            made = [2 * before - after for before, after in zip(base, made, strict=True)]
        arrays = ArrayRecord({name: Array(array) for name, array in zip(sent, made, strict=True)})
        return Message(RecordDict({messages.ARRAYS: arrays, messages.METRICS: size}), reply_to=message)

    with jumping():
        grid = LyingGrid(app, LIES[lie], seed)
        strategy = REGISTRY[method](
            clock=WallClock(), time_budget=SECONDS, fraction_evaluate=0.0, eval_every=10**6, seed=seed
        )
        assert isinstance(strategy, AsynchronousStrategy)
        initial = perceptron(x["train"].shape[1], seed)
        arrays = ArrayRecord({str(place): Array(array) for place, array in enumerate(initial)})
        ended = strategy.start(grid, arrays, num_rounds=10**6, timeout=3600.0, train_config=ConfigRecord())
    model = [array.numpy() for array in ended.arrays.values()]
    weights = {index: member.weight for index, member in strategy.session.task_table.members.items()}
    right = outputs(model, x["test"])[1].argmax(axis=1) == y["test"]
    return (
        100 * float(right.mean()),
        strategy.session.aggregations,
        weights.get(0, 0.0) / (sum(weights.values()) or 1.0),
    )


def main() -> None:
    """Print a line for each method and lie; an honest model first, then a reversed update."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    data = pictures(sys.argv[1] if len(sys.argv) > 1 else "")
    for method in METHODS:
        for lie in LIES:
            for reverses in (False, True):
                accuracy, aggregations, share = result(method, lie, data, reverses=reverses)
                sends = "reversed" if reverses else "as others"
                print(
                    f"{method:15} {lie:19} {sends:9} {accuracy:5.1f} % {aggregations:5} {share:6.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
