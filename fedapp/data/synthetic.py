"""Synthetic(α, β) of FedProx: devices whose labels follow laws of their own, and inputs too.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar & V. Smith, "Federated optimization in heterogeneous networks",
MLSys 2020, section 5.1; where the text leaves something open, as its authors' generator has it:

    y = argmax softmax(W_k x + b_k),   x ∈ R^60, 10 classes
    W_k, b_k ~ N(u_k, 1),  u_k ~ N(0, α)         how unlike the devices' models are
    x ~ N(v_k, Σ),  Σ_jj = j^−1.2,  v_k ~ N(B_k, 1),  B_k ~ N(0, β)          how unlike their inputs are

α and β are deviations, as in that generator; n_k = ⌊lognormal(4, 2)⌋ + 50 samples, of which the first nine tenths are
for training. IID: one W, b ~ N(0, 1) for all, and v_k = 0.
"""

import re

import numpy as np

from fedapp.data.arrays import join_rows
from fedapp.data.dataset import Array, RawData, Split
from fedapp.data.errors import DataError
from strategies import streams

CLIENTS = 30
"""Devices of the paper."""

IID = "synthetic-iid"
"""The dataset in which all devices are alike."""

ALLOWED = "synthetic:A,B with numbers A, B >= 0"
_NUMBER = r"(?:\d{1,6}(?:\.\d*)?|\.\d+)"
PATTERN = rf"synthetic:({_NUMBER}),({_NUMBER})"
"""What synthetic:α,β looks like."""

_DIMENSION, _CLASSES, _TRAINING = 60, 10, 0.9


def is_unlike(name: str) -> bool:
    """Tell whether a value of `dataset` is synthetic:α,β, or its IID relative."""
    return name == IID or re.fullmatch(PATTERN, name) is not None


def unlike_data(name: str, num_clients: int, seed: int) -> RawData:
    """Generate Synthetic(α, β), or its IID relative.

    Parameters
    ----------
    name : str
        ``synthetic:α,β`` or ``synthetic-iid``.
    num_clients : int
        Devices, the `groups`.
    seed : int

    Raises
    ------
    DataError
        If the name is neither.
    """
    match = re.fullmatch(PATTERN, name)
    if match is None and name != IID:
        raise DataError(f"dataset = {name!r}: must be {ALLOWED}, or {IID}")
    alpha, beta = (float(match[1]), float(match[2])) if match else (0.0, 0.0)
    splits: tuple[list[Split], list[Split]] = ([], [])
    common = _model(0.0, streams.generator(seed, "synthetic-model"))
    for client in range(num_clients):
        rng = streams.generator(seed, "synthetic-device", client)
        size = int(rng.lognormal(4, 2)) + 50
        own = _model(alpha * rng.standard_normal(), rng)
        centre = beta * rng.standard_normal() + rng.standard_normal(_DIMENSION)
        if match is None:
            own, centre = common, np.zeros(_DIMENSION)
        x = centre + _deviations() * rng.standard_normal((size, _DIMENSION))
        y = np.argmax(x @ own[:-1] + own[-1], axis=1)
        cut = int(_TRAINING * size)
        for part, rows in zip(splits, (slice(cut), slice(cut, size)), strict=True):
            part.append(Split(x[rows], y[rows], np.full(len(y[rows]), client)))
    return _raw([_joined(part) for part in splits])


def _model(mean: float, rng: np.random.Generator) -> Array:
    """Return W and, in the last row, b: (61, 10) with entries N(mean, 1)."""
    return mean + rng.standard_normal((_DIMENSION + 1, _CLASSES))


def _deviations() -> Array:
    """Return √Σ_jj, (60,)."""
    return np.asarray(np.arange(1, _DIMENSION + 1) ** -0.6)


def _joined(parts: list[Split]) -> Split:
    x, y, groups = (np.concatenate(each) for each in zip(*(part[:3] for part in parts), strict=True))
    return Split(x, y, groups)


def _raw(splits: list[Split]) -> RawData:
    y, groups, num_train = join_rows(splits)
    return RawData([split.x for split in splits], y, groups, num_train, _CLASSES, "vector", 1.0)
