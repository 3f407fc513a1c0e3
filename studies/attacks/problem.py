"""The small problem of the attacks: pictures of digits, over clients that are alike or not."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

from strategies import streams

Arrays = Mapping[str, NDArray[np.generic]]

NUM_TRAIN, NUM_TEST = 4000, 2000
HIDDEN = 32

#: How the rows are divided over clients.
IID, NON_IID, RARE = "iid", "non-iid", "rare-writer"
WORDS = {
    IID: "IID",
    NON_IID: "non-IID, κ⁻¹ = 10",
    RARE: "one rare writer",
}


@lru_cache(maxsize=2)
def pictures(data_path: str) -> Arrays:
    """Return pictures of 14x14 from MNIST, an .npz file in this folder; "": scikit-learn's digits, of 8x8.

    Raises
    ------
    FileNotFoundError
        If the folder has no mnist.npz.
    """
    rng = streams.generator(0, "attacks-rows")
    if not data_path:
        x, y = load_digits(return_X_y=True)
        order = rng.permutation(len(x))
        x, y = (x.reshape(-1, 8, 8)[order] / 16).astype(np.float32), y[order]
        return {"x_train": x[:-500], "y_train": y[:-500], "x_test": x[-500:], "y_test": y[-500:]}
    with np.load(Path(data_path) / "mnist.npz") as file:
        found: dict[str, NDArray[np.generic]] = {}
        for part, number in (("train", NUM_TRAIN), ("test", NUM_TEST)):
            labels = file[f"y_{part}"]
            rows = rng.permutation(len(labels))[:number]
            large = file[f"x_{part}"][rows].reshape(number, 14, 2, 14, 2)
            found[f"x_{part}"] = (large.mean(axis=(2, 4)) / 255).astype(np.float32)
            found[f"y_{part}"] = labels[rows]
    return found


def divided(arrays: Arrays, division: str, num_clients: int) -> Arrays:
    """Return the arrays, for one rare writer with the clients' rows and their share of pictures on their side.

    The last client's pictures are transposed, and so is the same share of the test rows.
    """
    if division != RARE:
        return arrays
    found = dict(arrays)
    for part in ("train", "test"):
        x = arrays[f"x_{part}"].copy()
        writer = np.arange(len(x)) % num_clients
        rare = writer == num_clients - 1
        x[rare] = x[rare].transpose(0, 2, 1)
        found[f"x_{part}"], found[f"group_{part}"] = x, writer
    return found


def keys_of(division: str) -> dict[str, object]:
    """Return the keys of the run config that divide the rows."""
    if division == NON_IID:
        return {"partitioner": "label-quantity-skew", "class_imbalance": 10.0, "data_imbalance": 0.0}
    return {"partitioner": "natural" if division == RARE else "iid"}


def normalised(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a perceptron with a hidden layer under batch normalisation, whose statistics are buffers."""
    features = int(np.prod(input_shape))
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(features, HIDDEN),
        nn.BatchNorm1d(HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, num_classes),
    )


def plain(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the same perceptron without normalisation."""
    features = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_classes))
