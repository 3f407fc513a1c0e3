"""The model, the data and the training: nothing of it knows Flower."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

CLASSES, BATCH = np.arange(10), 16


def load_data(partition_id: int, num_partitions: int) -> tuple[np.ndarray, ...]:
    """Return one client's digits: mostly those of its own kinds; a fifth are for testing."""
    x, y = load_digits(return_X_y=True)
    order = np.argsort(y, kind="stable")  # a client has few of the ten digits
    own = np.array_split(order, num_partitions)[partition_id]
    own = np.random.default_rng(partition_id).permutation(own)
    cut = len(own) // 5
    return x[own[cut:]] / 16, y[own[cut:]], x[own[:cut]] / 16, y[own[:cut]]


def make_model(lr: float) -> SGDClassifier:
    """Return logistic regression with all weights at zero."""
    model = SGDClassifier(loss="log_loss", alpha=0.0, learning_rate="constant", eta0=lr, random_state=0)
    model.partial_fit(np.zeros((10, 64)), CLASSES, classes=CLASSES)  # makes the arrays
    set_model_params(model, [np.zeros((10, 64)), np.zeros(10)])
    return model


def get_model_params(model: SGDClassifier) -> list[np.ndarray]:
    """Return the weights."""
    return [model.coef_, model.intercept_]


def set_model_params(model: SGDClassifier, params: list[np.ndarray]) -> None:
    """Put weights in."""
    model.coef_, model.intercept_ = (np.array(values, dtype=np.float64, order="C") for values in params)


def train(model: SGDClassifier, x: np.ndarray, y: np.ndarray, epochs: int, mu: float) -> None:
    """Train in place; each batch is followed by the pull μ (w − w̄) of its steps towards the model that came."""
    start = [values.copy() for values in get_model_params(model)]
    for _ in range(epochs):
        for first in range(0, len(x), BATCH):
            before = [values.copy() for values in get_model_params(model)]
            batch = slice(first, first + BATCH)
            model.partial_fit(x[batch], y[batch])
            rate = model.eta0 * len(y[batch]) * mu
            pulled = zip(get_model_params(model), before, start, strict=True)
            set_model_params(model, [w - rate * (b - s) for w, b, s in pulled])
