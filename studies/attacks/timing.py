"""Devices that lie about their times, on a clock that jumps.

``python -m studies.attacks.timing [DATA-PATH [METHOD ...]]`` measures them; "" is scikit-learn's digits.

A perceptron learns the pictures of the other attacks, IID over the devices, for 20 seconds of real time on a clock
that jumps to the end of every wait. Honest tasks take 0.6 to 1.4 s. Safeguards are on. A line has three seeds' final
accuracies in percent; and in the mean the aggregations, the share of the devices that lie in all weights given, and
the number of contributions that were discarded, of all that came.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from strategies import REGISTRY, AsynchronousStrategy, clock, messages, streams
from strategies.clock import WallClock
from strategies.testing import MemoryGrid
from studies.attacks.problem import Arrays, pictures

CLIENTS, SECONDS, HIDDEN, FOREVER = 5, 20.0, 32, 1e6
STEPS, BATCH, LR = 10, 16, 0.3
SEEDS = (0, 1, 2)

Model = list[NDArray[np.float32]]


@dataclass(frozen=True)
class Turn:
    """A task of a device that lies.

    Attributes
    ----------
    device : int
        Its number among the devices that lie, from 0.
    task : int
        Its task, from 1.
    now, usual : float
        Seconds since the run began, and the seconds that an honest device would take.
    """

    device: int
    task: int
    now: float
    usual: float


#: The seconds that a device says a task took.
Times = Callable[[Turn], float]

#: The update that it sends: of its task, its honest update, and its update by labels that are each one too high.
Sends = Callable[[Turn, Model, Model], Model]


def length(update: Model) -> float:
    """Return the norm of an update."""
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in update)))


def across(honest: Model, aim: Model, part: float) -> Model:
    """Return an update three times as long as the honest one, at a right angle to it but for a small part of it."""
    along = sum(float(np.vdot(a, h)) for a, h in zip(aim, honest, strict=True)) / length(honest) ** 2
    rest = [a - h * np.float32(along) for a, h in zip(aim, honest, strict=True)]
    longer = np.float32(3 * length(honest) / length(rest))
    return [r * longer + h * np.float32(part) for r, h in zip(rest, honest, strict=True)]


def any_direction(honest: Model) -> Model:
    """Return a direction that is random, and the same for every task."""
    rng = streams.generator(0, "attacks-direction")
    return [rng.standard_normal(array.shape).astype(np.float32) for array in honest]


#: Times of the devices that lie.
LIES: dict[str, Times] = {
    "honest": lambda turn: turn.usual,
    "late, then a burst": lambda turn: 8.0 if turn.task == 1 else 0.01,
    "usual, then a burst": lambda turn: turn.usual if turn.task < 25 else 0.01,
    "20 times as fast": lambda turn: 0.05,
    "ever later": lambda turn: min(2.4 ** (turn.task - 1), FOREVER),
    "silent": lambda turn: FOREVER,
    "usual for 6 s, then a burst": lambda turn: turn.usual if turn.now < 6 else 0.01,
    "4 s away, 4 at once": lambda turn: 0.01 if turn.task % 5 else 4.0,
    # Of five devices, the fastest five times as fast as the slowest.
    "0.2 to 1 s": lambda turn: turn.usual / (0.6 + 0.2 * turn.device) * 0.2 * (1 + turn.device),
    "in turns": lambda turn: 0.02 if int(turn.now / 2) % 2 == turn.device % 2 else 2.0 - turn.now % 2,
}

#: What they send.
UPDATES: dict[str, Sends] = {
    "as others": lambda turn, honest, wrong: honest,
    "reversed": lambda turn, honest, wrong: [-array for array in honest],
    "reversed each other second": lambda turn, honest, wrong: [
        -array if int(turn.now) % 2 else array for array in honest
    ],
    "a million times as long": lambda turn, honest, wrong: [array * np.float32(-1e6) for array in honest],
    "across": lambda turn, honest, wrong: across(honest, any_direction(honest), 0.3),
    "across, wrong labels": lambda turn, honest, wrong: across(honest, wrong, 0.3),
}


@dataclass(frozen=True)
class Row:
    """What devices say their tasks took, what they send, and their number, of so many."""

    lie: str
    sends: str
    liars: int = 1
    clients: int = CLIENTS


ROWS = (
    *(
        Row(lie, sends)
        for lie in (
            "honest",
            "late, then a burst",
            "usual, then a burst",
            "20 times as fast",
            "ever later",
            "silent",
        )
        for sends in ("as others", "reversed")
    ),
    *(
        Row("20 times as fast", sends)
        for sends in (
            "a million times as long",
            "reversed each other second",
            "across",
            "across, wrong labels",
        )
    ),
    Row("usual for 6 s, then a burst", "reversed"),
    Row("4 s away, 4 at once", "reversed"),
    Row("0.2 to 1 s", "as others", 5),
    Row("honest", "as others", 2, 10),
    Row("honest", "reversed", 2, 10),
    Row("20 times as fast", "reversed", 2, 10),
    Row("in turns", "reversed", 2, 10),
    Row("honest", "reversed", 3, 10),
    Row("20 times as fast", "reversed", 3, 10),
)

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
    """A Grid in memory whose first devices take the time of a lie for each task."""

    def __init__(
        self, app: Callable[[Message, Context], Message], times: Times, seed: int, liars: int, clients: int
    ) -> None:
        nodes = [{"partition-id": index, "num-partitions": clients} for index in range(clients)]
        super().__init__(app, nodes, seed=seed)
        self._times, self._tasks, self._liars = times, [0] * clients, liars
        self.turns: dict[int, Turn] = {}
        self._rng = streams.generator(seed, "attacks-times")

    def push_messages(self, messages_: Iterable[Message]) -> Iterable[str]:
        """Push messages, each with the time that its device takes."""
        ids: list[str] = []
        for message in messages_:
            node = self.nodes[message.metadata.dst_node_id]
            if message.metadata.message_type == messages.TRAIN:
                index = int(node.context.node_config["partition-id"])
                usual = (0.6 + 0.8 * index / (len(self.nodes) - 1)) * self._rng.uniform(0.9, 1.1)
                self._tasks[index] += 1
                turn = self.turns[index] = Turn(index, self._tasks[index], self._clock.now(), usual)
                node.delay = self._times(turn) if index < self._liars else usual
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


class Result(NamedTuple):
    """What a run came to.

    Attributes
    ----------
    accuracy : float
        The final accuracy, in percent.
    aggregations : int
        The number of aggregations.
    share : float
        The share of the devices that lie in all weights that were given.
    discarded, arrived : int
        The contributions that were discarded, and all that came.
    """

    accuracy: float
    aggregations: int
    share: float
    discarded: int
    arrived: int


def result(
    method: str,
    lie: str,
    data: Arrays,
    *,
    sends: str = "reversed",
    liars: int = 1,
    clients: int = CLIENTS,
    seed: int = 0,
    safeguards: str = "on",
) -> Result:
    """Return what a method makes of devices that lie."""
    x = {
        part: data[f"x_{part}"].reshape(len(data[f"x_{part}"]), -1).astype(np.float32)
        for part in ("train", "test")
    }
    y = {part: data[f"y_{part}"].astype(np.int64) for part in ("train", "test")}
    rng = streams.generator(seed, "attacks-devices")
    rows = np.array_split(rng.permutation(len(y["train"])), clients)

    def app(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        size = MetricRecord({messages.NUM_EXAMPLES: len(rows[index])})
        if message.metadata.message_type != messages.TRAIN:
            size.update({messages.PARTITION_ID: index, messages.NUM_PARTITIONS: clients})
            return Message(RecordDict({messages.METRICS: size}), reply_to=message)
        sent = message.content.array_records[messages.ARRAYS]
        base = [array.numpy() for array in sent.values()]
        made = trained(base, x["train"][rows[index]], y["train"][rows[index]], rng)
        if index < liars and sends != "as others":
            wrong = trained(base, x["train"][rows[index]], (y["train"][rows[index]] + 1) % 10, rng)
            updates = [
                [after - before for before, after in zip(base, model, strict=True)] for model in (made, wrong)
            ]
            sent_update = UPDATES[sends](grid.turns[index], *updates)
            made = [before + change for before, change in zip(base, sent_update, strict=True)]
        arrays = ArrayRecord({name: Array(array) for name, array in zip(sent, made, strict=True)})
        return Message(RecordDict({messages.ARRAYS: arrays, messages.METRICS: size}), reply_to=message)

    with jumping():
        grid = LyingGrid(app, LIES[lie], seed, liars, clients)
        strategy = REGISTRY[method](
            clock=WallClock(),
            time_budget=SECONDS,
            fraction_evaluate=0.0,
            eval_every=10**6,
            seed=seed,
            safeguards=safeguards,
        )
        assert isinstance(strategy, AsynchronousStrategy)
        initial = perceptron(x["train"].shape[1], seed)
        arrays = ArrayRecord({str(place): Array(array) for place, array in enumerate(initial)})
        ended = strategy.start(grid, arrays, num_rounds=10**6, timeout=3600.0, train_config=ConfigRecord())
    model = [array.numpy() for array in ended.arrays.values()]
    weights = {index: member.weight for index, member in strategy.session.task_table.members.items()}
    right = outputs(model, x["test"])[1].argmax(axis=1) == y["test"]
    discarded = sum(record.discarded for _, record in strategy.session.client_stats.items())
    return Result(
        100 * float(right.mean()),
        strategy.session.aggregations,
        sum(weights.get(index, 0.0) for index in range(liars)) / (sum(weights.values()) or 1.0),
        discarded,
        discarded + sum(member.contributions for member in strategy.session.task_table.members.values()),
    )


def main() -> None:
    """Print a line for each method and row; of the honest times an honest device first."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    data = pictures(sys.argv[1] if len(sys.argv) > 1 else "")
    for method in sys.argv[2:] or METHODS:
        for row in ROWS:
            found = [
                result(
                    method, row.lie, data, sends=row.sends, liars=row.liars, clients=row.clients, seed=seed
                )
                for seed in SEEDS
            ]
            mean = Result(*np.mean(found, axis=0))
            print(
                f"{method:15} {row.liars} of {row.clients:<3} {row.lie:28} {row.sends:27} "
                f"{' '.join(f'{each.accuracy:5.1f}' for each in found)} % {mean.aggregations:5.0f} {mean.share:6.3f} "
                f"{mean.discarded:4.0f} of {mean.arrived:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
