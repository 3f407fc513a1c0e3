"""The model, the data and the training: nothing of it knows Flower."""

import numpy as np

FEATURES = 5
TRUTH = np.linspace(-2.0, 2.0, FEATURES)


def load_data(partition_id: int) -> tuple[np.ndarray, ...]:
    """Return one client's points of two classes; a fifth are for testing."""
    rng = np.random.default_rng(partition_id)
    x = rng.normal(size=(100 + 50 * partition_id, FEATURES))
    y = (x @ TRUTH > 0).astype(np.float64)
    cut = len(y) // 5
    return x[cut:], y[cut:], x[:cut], y[:cut]


def predict(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the probability of class 1."""
    return np.asarray(1 / (1 + np.exp(-np.clip(x @ w, -30, 30))))


def train(w: np.ndarray, x: np.ndarray, y: np.ndarray, steps: int, lr: float) -> np.ndarray:
    """Return w after some steps."""
    for _ in range(steps):
        w = w - lr * x.T @ (predict(w, x) - y) / len(y)
    return w
