"""Weights of clients: those of some among all, and statistics that are weighted by them."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]


def among(importances: Sequence[float], counting: NDArray[np.bool_]) -> Weights:
    """Return p_i (n,) of the clients that are ``counting`` (n,), with sum 1, and 0 for the others."""
    shares = np.where(counting, importances, 0.0)
    return np.asarray(shares / (shares.sum() or 1.0))


def mean_and_spread(name: str, weights: Mapping[int, float], values: Mapping[int, float]) -> dict[str, float]:
    """Return the weighted mean and standard deviation over clients; ``weights`` and ``values`` by client index."""
    known = {index: weight for index, weight in weights.items() if index in values}
    total = sum(known.values())
    if total <= 0:
        return {}
    mean = sum(weight * values[index] for index, weight in known.items()) / total
    variance = sum(weight * (values[index] - mean) ** 2 for index, weight in known.items()) / total
    return {name: mean, f"{name}-std": variance**0.5}
