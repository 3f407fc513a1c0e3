"""A tiny exact problem of one method: rows, settings, participants or arrivals, and the models after each step."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

FOLDER = Path(__file__).parent / "problems"
ROWS = "rows.json"


class Arrival(NamedTuple):
    """A client whose work arrives, and the work's staleness: new models since the client was sent its own."""

    client: int
    staleness: int


@dataclass(frozen=True, eq=False)
class Client:
    """A client's rows: inputs x (n, d) and classes y (n,).

    Its objective is f_i(w), the mean cross-entropy of softmax(A x + b) over all of its rows, where w (D,) is the
    matrix A (K, d), row by row, and then b (K,).
    """

    x: Vector
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)

    def loss(self, w: Vector) -> float:
        """Return f_i(w)."""
        scores = self._scores(w)
        highest = scores.max(axis=1, keepdims=True)
        logs = scores - highest - np.log(np.exp(scores - highest).sum(axis=1, keepdims=True))
        return -float(np.mean(logs[np.arange(len(self)), self.y]))

    def gradient(self, w: Vector) -> Vector:
        """Return ∇f_i(w), (D,)."""
        scores = self._scores(w)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        residual = odds / odds.sum(axis=1, keepdims=True)
        residual[np.arange(len(self)), self.y] -= 1
        residual /= len(self)
        return np.concatenate([(residual.T @ self.x).ravel(), residual.sum(axis=0)])

    def _scores(self, w: Vector) -> Vector:
        inputs = self.x.shape[1]
        classes = len(w) // (inputs + 1)
        matrix, bias = w[: classes * inputs].reshape(classes, inputs), w[classes * inputs :]
        scores: Vector = self.x @ matrix.T + bias
        return scores


def total(vectors: Iterable[Vector]) -> Vector:
    """Return the sum of vectors (D,), one after the other."""
    return reduce(np.add, vectors)


def descend(
    start: Vector, direction: Callable[[Vector], Vector], lr: float, momentum: float, steps: int
) -> Vector:
    """Return the model (D,) after local steps v ← ρ v + direction(w), w ← w − γ v, from ``start`` and v = 0."""
    w, velocity = start.copy(), np.zeros_like(start)
    for _ in range(steps):
        velocity = momentum * velocity + direction(w)
        w = w - lr * velocity
    return w


@dataclass(frozen=True, eq=False)
class Problem:
    """A problem, and the trajectory that the method's formula gives.

    Attributes
    ----------
    method : str
        Its name.
    source, formula, reading : str
        Author, year and equation; the rule; and the choices made here where the paper leaves something open.
    clients : sequence of Client
        The C clients.
    initial : array (D,)
        The first global model.
    lr, momentum : float
        γ and ρ of the local steps.
    local_steps : sequence of int
        Local steps K_i of each client, every one on all of its rows.
    importance : array (C,)
        p_i, with sum 1.
    parameters : mapping
        The method's own parameters, under the names in ``formula``.
    steps : sequence
        In rounds: the participants of each. Without rounds: the arrivals between one model and the next.
    task_seconds : sequence of float
        Without rounds: the seconds that each client's tasks take; the arrivals follow from them. In rounds: empty.
    task_steps : sequence of sequence of int
        If the server sets local steps: the steps of each arrival's task, which replace K_i; else empty.
    returns : str
        ``global``, or ``global and personal``: the global model and below it the personal model of each client.
    models : array (T, D) or (T, 1 + C, D)
        The models after each step.
    tolerance : float
        The largest absolute difference of an entry with which an implementation in float64 passes.
    """

    method: str
    source: str
    formula: str
    reading: str
    clients: Sequence[Client]
    initial: Vector
    lr: float
    momentum: float
    local_steps: Sequence[int]
    importance: Vector
    parameters: Mapping[str, float]
    steps: Sequence[Sequence[Any]]
    task_seconds: Sequence[float]
    task_steps: Sequence[Sequence[int]]
    returns: str
    models: Vector
    tolerance: float

    def weights(self, participants: Sequence[int]) -> Vector:
        """Return d_i of a round's participants: their p_i, over the sum of these."""
        p = self.importance[list(participants)]
        d: Vector = p / p.sum()
        return d

    def train(
        self,
        client: int,
        start: Vector,
        direction: Callable[[Vector], Vector] | None = None,
        steps: int | None = None,
    ) -> Vector:
        """Return a client's local model (D,), from ``start`` along ``direction``; by default K_i steps along ∇f_i."""
        direction = self.clients[client].gradient if direction is None else direction
        steps = self.local_steps[client] if steps is None else steps
        return descend(start, direction, self.lr, self.momentum, steps)


def names() -> list[str]:
    """Return the names of all problems, in the order of their files' numbers."""
    found = [json.loads(path.read_text("utf-8")) for path in FOLDER.glob("*.json") if path.name != ROWS]
    return [each["method"] for each in sorted(found, key=lambda each: int(each["number"]))]


def load(method: str) -> Problem:
    """Read a problem.

    Raises
    ------
    ValueError
        If there is no problem of this name.
    """
    path = FOLDER / f"{method}.json"
    if not path.is_file() or path.name == ROWS:
        raise ValueError(f"no problem is called {method!r}: allowed are {', '.join(names())}")
    return built(json.loads(path.read_text("utf-8")), json.loads((FOLDER / ROWS).read_text("utf-8")))


def built(told: Mapping[str, Any], rows: Mapping[str, Any]) -> Problem:
    """Return the problem that a method's file (``told``) and the file of rows describe."""
    clients = [Client(np.array(each["x"]) / rows["divisor"], np.array(each["y"])) for each in rows["clients"]]
    asynchronous = "arrivals" in told
    steps: list[list[Any]] = told["participants"] if not asynchronous else []
    if asynchronous:
        steps = [[Arrival(*pair) for pair in each] for each in told["arrivals"]]
    return Problem(
        told["method"],
        told["source"],
        "\n".join(told["formula"]),
        told["reading"],
        clients,
        np.array(rows["initial"]),
        told["lr"],
        told["momentum"],
        told["local-steps"],
        np.array(told["importance"]),
        told["parameters"],
        steps,
        told.get("task-seconds", []),
        told.get("task-steps", []),
        told["returns"],
        np.array(told["models"]),
        told["tolerance"],
    )
