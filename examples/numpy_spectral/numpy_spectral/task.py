"""The model, the data and the training: nothing of it knows Flower."""

import numpy as np

FEATURES = 5
TRUTH = np.linspace(-2.0, 2.0, FEATURES)


def load_data(partition_id: int) -> tuple[np.ndarray, ...]:
    """Return one client's points of two classes; even and odd clients see different features."""
    rng = np.random.default_rng(partition_id)
    x = rng.normal(size=(100 + 50 * partition_id, FEATURES))
    x[:, partition_id % 2] *= 4.0  # along this one a client's data spread most
    y = (x @ TRUTH > 0).astype(np.float64)
    cut = len(y) // 5
    return x[cut:], y[cut:], x[:cut], y[:cut]


def predict(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the probability of class 1."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x @ w, -30, 30))))


def loss_of(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean log loss."""
    p = np.clip(predict(w, x), 1e-9, 1 - 1e-9)
    return float(-np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)))


def train(
    w: np.ndarray, u: np.ndarray, beta: float, x: np.ndarray, y: np.ndarray, steps: int, lr: float
) -> np.ndarray:
    """Return w after some steps: the gradient is taken at β w + (1 − β) u, the step at w."""
    for _ in range(steps):
        at = beta * w + (1 - beta) * u
        w = w - lr * x.T @ (predict(at, x) - y) / len(y)
    return w


def direction(x: np.ndarray) -> np.ndarray:
    """Return the direction along which the data spread most: it tells which clients are alike."""
    return np.asarray(np.linalg.svd(x, full_matrices=False)[2][0])
