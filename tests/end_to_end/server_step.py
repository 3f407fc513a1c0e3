"""The server optimizers in a second way: float64 numpy from S. Reddi et al. 2021, algorithm 2, and nothing shared."""

from collections.abc import Callable

import numpy as np

Step = Callable[[np.ndarray, np.ndarray], np.ndarray]


def server_step(name: str, lr: float) -> Step:
    """Return a function of W and Δ that gives the next W, and remembers what it must."""
    m, v = np.array(0.0), np.array(1e-6)

    def step(W: np.ndarray, delta: np.ndarray) -> np.ndarray:
        nonlocal m, v
        if name == "sgd":
            return W + lr * delta
        if name == "momentum":
            m = 0.9 * m + delta
            return W + lr * m
        m = 0.9 * m + 0.1 * delta
        if name == "adagrad":
            v = v + delta**2
        if name == "adam":
            v = 0.99 * v + 0.01 * delta**2
        if name == "yogi":
            v = np.where(v > delta**2, v - 0.01 * delta**2, v + 0.01 * delta**2)
        return W + lr * m / (np.sqrt(v) + 1e-3)

    return step
