"""Softmax regression on the digits in float64 numpy, on a run's division; it shares nothing but files with the app.

W is (10, 65); its last column is the bias.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from sklearn.datasets import load_digits

# The same problem for the app: full batches from zero, a number of steps.
KEYS: dict[str, Any] = {
    "dataset": "digits",
    "model": "logistic",
    "init": "zeros",
    "batch-size": 0,
    "local-epochs": 0,
    "lr": 0.5,
}
Array = np.ndarray


@cache
def digits() -> Any:
    """Return the dataset, which takes scikit-learn a tenth of a second to read."""
    return load_digits()


class Problem:
    """The clients' rows of a run, their shares p, and their local descent."""

    def __init__(self, path: Path) -> None:
        data, self.labels = digits().data, digits().target
        self.X, self.Y = np.c_[data / 16, np.ones(len(data))], np.eye(10)[self.labels]
        with np.load(path / "partition.npz") as partition:
            self.train = np.split(partition["client_indices"], partition["client_offsets"][1:-1])
            self.test = np.split(partition["test_indices"], partition.get("test_offsets", [0])[1:-1])
            assert not set(partition["client_indices"]) & set(partition["test_indices"])
        self.p = np.array([len(rows) for rows in self.train]) / sum(map(len, self.train))

    def log_probabilities(self, w: Array, rows: Any) -> Array:
        z = self.X[rows] @ w.T
        z = z - z.max(1, keepdims=True)
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    def gradient(self, i: int, w: Array) -> Array:
        rows = self.train[i]
        return (np.exp(self.log_probabilities(w, rows)) - self.Y[rows]).T @ self.X[rows] / len(rows)

    def descend(
        self,
        i: int,
        w: Array,
        steps: int,
        *,
        lr: float = KEYS["lr"],
        l2: float = 0.0,
        pull: float = 0.0,
        anchor: Array | None = None,
        momentum: float = 0.0,
        constant: Any = 0.0,
    ) -> Array:
        """Return a client's model after its steps; it is pulled to ``anchor``, or to what it begins with."""
        anchor, v = w if anchor is None else anchor, np.zeros_like(w)
        for _ in range(steps):
            v = momentum * v + self.gradient(i, w) + l2 * w + pull * (w - anchor) + constant
            w = w - lr * v
        return w


def model_of(path: Path) -> Array:
    """Return the app's final model."""
    model = safetensors.numpy.load_file(path / "model.safetensors")
    return np.c_[model["1.weight"], model["1.bias"]]


def assert_close(path: Path, expected: Array, rel: float = 1e-5) -> None:
    """Assert that the app's final model is this one, which isn't where it began."""
    assert np.linalg.norm(model_of(path) - expected) < rel * np.linalg.norm(expected)
    assert np.linalg.norm(expected) > 0.1
