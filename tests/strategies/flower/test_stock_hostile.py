"""What honest and hostile clients come to in an app after Flower's documentation, with the library alone.

Clients learn scikit-learn's digits, IID, by softmax regression with momentum. They have no handler of ours, and say
their sizes with their replies. Task times are those of F80, in which the hostile clients are the fastest.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

from strategies import AsyncFedAvg, FedAvg, FedAvgM, FedBuff, FedFix, streams
from strategies.testing import MemoryGrid

ROUNDS, STEPS, BATCH, LR, MOMENTUM = 20, 5, 16, 0.1, 0.9
LOST = 0.15  # of accuracy, at most
Vector = np.ndarray


@cache
def digits() -> tuple[Vector, Vector, Vector, Vector]:
    """Return rows and labels to train on, divided evenly by their order, and to test on."""
    x, y = load_digits(return_X_y=True)
    order = streams.generator(0, "digits").permutation(len(x))
    x = np.hstack([x / 16, np.ones((len(x), 1))])[order]
    return x[:1400], y[order][:1400], x[1400:], y[order][1400:]


def trained(w: Vector, rows: Vector, labels: Vector, rng: np.random.Generator) -> Vector:
    """Return the weights (65, 10) after STEPS steps of SGD with momentum on the cross-entropy."""
    velocity = np.zeros_like(w)
    for _ in range(STEPS):
        batch = rng.integers(len(rows), size=BATCH)
        outputs = rows[batch] @ w
        p = np.exp(outputs - outputs.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(BATCH), labels[batch]] -= 1
        velocity = MOMENTUM * velocity + rows[batch].T @ p / BATCH
        w = w - LR * velocity
    return w


# What a hostile client sends for the model that it was sent, its own trained one, and its first update.
Attack = Callable[[Vector, Vector, Vector], Vector]
ATTACKS: dict[str, Attack] = {
    **{f"reversed {k}": lambda base, own, first, k=k: base - k * (own - base) for k in (1, 5, 10)},
    "random": lambda base, own, first: base + streams.generator(0, "lie").normal(size=base.shape),
    "constant": lambda base, own, first: np.ones_like(base),
    "labels": lambda base, own, first: own,
    "sizes": lambda base, own, first: base - 10 * (own - base),
    "drift": lambda base, own, first: base - 2 * np.linalg.norm(own - base) / np.linalg.norm(first) * first,
}


def app_of(attack: str, hostile: int, clients: int) -> ClientApp:
    """Return the app of a federation whose first clients are hostile."""
    app, tasks, first = ClientApp(), dict[int, int](), dict[int, Vector]()
    x, y, *_ = digits()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        tasks[i] = tasks.get(i, 0) + 1
        labels = 9 - y[i::clients] if attack == "labels" and i < hostile else y[i::clients]
        base = message.content.array_records["arrays"]["w"].numpy().astype(np.float64)
        own = trained(base, x[i::clients], labels, streams.generator(0, "batches", i, tasks[i]))
        size = len(labels)
        if i < hostile:
            own = ATTACKS[attack](base, own, first.setdefault(i, own - base))
            size = 10**12 if attack == "sizes" else size
        content = {
            "arrays": ArrayRecord({"w": Array(own.astype(np.float32))}),
            "metrics": MetricRecord({"num-examples": size}),
        }
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    return app


# The strategy, its keywords, and contributions per client and aggregation.
KINDS: dict[str, tuple[Any, dict[str, Any], Callable[[int], float]]] = {
    "fedavg": (FedAvg, {}, lambda c: 1),
    "fedavgm": (FedAvgM, {"server_learning_rate": 0.3, "server_momentum": 0.9}, lambda c: 1),
    "async-fedavg": (AsyncFedAvg, {}, lambda c: 1 / c),
    "fedfix": (FedFix, {}, lambda c: 0.7),
    "fedbuff": (FedBuff, {}, lambda c: 2 / c),
    "fedbuff of 3": (FedBuff, {"buffer_size": 3}, lambda c: 3 / c),
}


@cache
def accuracy(
    kind: str, attack: str = "", hostile: int = 0, clients: int = 5, safeguards: str = "on"
) -> float:
    """Return the accuracy of the final model on the test rows."""
    make, keywords, share = KINDS[kind]
    grid = MemoryGrid(app_of(attack, hostile, clients), [{"partition-id": i} for i in range(clients)])
    strategy = make(fraction_evaluate=0.0, safeguards=safeguards, **keywords)
    number = round(ROUNDS / share(clients))
    initial = ArrayRecord({"w": Array(np.zeros((65, 10), np.float32))})
    result = strategy.start(grid, initial, num_rounds=number, timeout=60.0)
    *_, x, y = digits()
    return float((np.argmax(x @ result.arrays["w"].numpy(), 1) == y).mean())


@pytest.mark.parametrize("kind", ["async-fedavg", "fedfix", "fedbuff", "fedbuff of 3"])
def test_honest_clients_learn_at_the_defaults_without_rounds_as_in_rounds(kind, caplog):
    caplog.set_level(logging.WARNING, "flwr.strategies")
    assert (
        accuracy(kind, clients=10, safeguards="off")
        > accuracy("fedavg", clients=10, safeguards="off") - 0.04
        > 0.85
    )
    assert not [record for record in caplog.records if "server_lr" in record.getMessage()]


@pytest.mark.parametrize(
    ("attack", "hostile", "clients"),
    [*((attack, 1, 5) for attack in ATTACKS), ("reversed 10", 2, 10), ("sizes", 2, 10)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_of_five_and_two_of_ten_cost_at_most_15_points(kind, attack, hostile, clients):
    honest = accuracy(kind, clients=clients, safeguards="off")
    assert accuracy(kind, clients=clients) > honest - 0.02
    assert accuracy(kind, attack, hostile, clients) > honest - LOST


@pytest.mark.parametrize("kind", ["fedavg", "async-fedavg", "fedfix", "fedbuff"])
def test_without_safeguards_they_ruin_a_run(kind):
    assert accuracy(kind, "reversed 10", 1, 5, safeguards="off") < 0.5
