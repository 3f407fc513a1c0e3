"""The model, the data and the training: nothing of it knows Flower."""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

Params = dict[str, jax.Array]


def init_params() -> Params:
    """Return a small network for images of 8 × 8."""
    first, second = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(first, (64, 32)) / 8,
        "out": jax.random.normal(second, (32, 10)) / 32**0.5,
    }


def load_data(partition_id: int, num_partitions: int) -> tuple[np.ndarray, ...]:
    """Return one client's digits, of which a fifth are for testing."""
    x, y = load_digits(return_X_y=True)
    own = np.arange(partition_id, len(y), num_partitions)
    test = np.arange(len(own)) % 5 == 0
    return x[own[~test]] / 16, y[own[~test]], x[own[test]] / 16, y[own[test]]


def scores(params: Params, x: jax.Array) -> jax.Array:
    """Return the scores of the ten digits."""
    return jax.nn.relu(x @ params["hidden"]) @ params["out"]


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(params, x)), y[:, None], axis=1).mean()


step = jax.jit(jax.value_and_grad(loss_of))


def train(params: Params, x: np.ndarray, y: np.ndarray, steps: int, lr: float) -> tuple[Params, float]:
    """Return the parameters after some steps, and the last loss."""
    for _ in range(steps):
        loss, gradient = step(params, x, y)
        params = jax.tree.map(lambda w, g: w - lr * g, params, gradient)
    return params, float(loss)
