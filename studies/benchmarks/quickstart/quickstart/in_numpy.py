"""Softmax regression on numpy arrays alone, for Flower's quickstart-numpy, with its data from one .npz file."""

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

_parts: dict[str, tuple[NDArray, NDArray]] = {}  # loaded once in each of Ray's processes


def initial(config: dict) -> ArrayRecord:
    """Return the first model: weights (784, 10) and biases (10,), zeros."""
    return ArrayRecord([np.zeros((784, 10), np.float32), np.zeros(10, np.float32)])


def rows(path: str, part: str) -> tuple[NDArray, NDArray]:
    """Return images (N, 784) in [0, 1] and labels (N,) of ``train`` or ``test``."""
    if part not in _parts:
        with np.load(path) as arrays:
            x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        _parts[part] = x.reshape(-1, 784).astype(np.float32) / np.float32(255), y.astype(np.int64)
    return _parts[part]


def own_rows(path: str, partition_id: int, num_partitions: int) -> tuple[NDArray, NDArray]:
    """Return a client's part of the training rows."""
    x, y = rows(path, "train")
    first, last = (len(x) * number // num_partitions for number in (partition_id, partition_id + 1))
    return x[first:last], y[first:last]


def train(arrays: ArrayRecord, config: dict, node: dict) -> tuple[ArrayRecord, float, int]:
    """Train for one epoch; return the model, the mean loss of the batches, and the number of rows."""
    weight, bias = arrays.to_numpy_ndarrays()
    x, y = own_rows(config["data"], node["partition-id"], node["num-partitions"])
    order = np.random.default_rng().permutation(len(x))  # noqa: TID251 (an app of Flower's)
    losses = []
    for batch in np.split(order, range(config["batch-size"], len(x), config["batch-size"])):
        scores = x[batch] @ weight + bias
        scores -= scores.max(1, keepdims=True)
        p = np.exp(scores)
        p /= p.sum(1, keepdims=True)
        chosen = np.arange(len(batch)), y[batch]
        losses.append(-np.log(p[chosen]).mean())
        p[chosen] -= 1
        weight -= config["lr"] / len(batch) * (x[batch].T @ p)
        bias -= config["lr"] / len(batch) * p.sum(0)
    return ArrayRecord([weight, bias]), float(np.mean(losses)), len(x)


def accuracy(arrays: ArrayRecord, config: dict) -> float:
    """Return the share of test rows whose largest score is the label's."""
    weight, bias = arrays.to_numpy_ndarrays()
    x, y = rows(config["data"], "test")
    return float(((x @ weight + bias).argmax(1) == y).mean())
