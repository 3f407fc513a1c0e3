"""The importance p_i of each client in the federated objective f(w) = Σ p_i f_i(w)."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]

# Beside these there is `adjacency`, which needs a graph: strategies/clients/client_graph.py.
IMPORTANCES = ("samples", "uniform")


def importances(kind: str, num_examples: Sequence[float]) -> Weights:
    """Return the importances p_i, shape (C,), summing to 1.

    Parameters
    ----------
    kind : str
        ``samples`` (n_i / Σ n) or ``uniform`` (1 / C).
    num_examples : sequence of int
        n_i, number of samples of each client.
    """
    if kind == "uniform":
        return np.full(len(num_examples), 1 / len(num_examples))
    if kind == "samples":
        sizes = np.asarray(num_examples, dtype=np.float64)
        if not sizes.sum() > 0:
            raise ValueError("client_weights = 'samples': no client has any samples")
        return np.asarray(sizes / sizes.sum(), dtype=np.float64)
    raise ValueError(f"client_weights = {kind!r}: allowed are {', '.join(IMPORTANCES)}")


def among(importances: Sequence[float], counting: NDArray[np.bool_]) -> Weights:
    """Return p_i (n,) of the clients that are ``counting`` (n,), with sum 1, and 0 for the others."""
    shares = np.where(counting, importances, 0.0)
    return np.asarray(shares / (shares.sum() or 1.0))


def mean_and_spread(name: str, weights: Mapping[int, float], values: list[float]) -> dict[str, float]:
    """Return the weighted mean and standard deviation over clients; ``weights`` and ``values`` by client index."""
    known = {index: weight for index, weight in weights.items() if index < len(values)}
    total = sum(known.values())
    if total <= 0:
        return {}
    mean = sum(weight * values[index] for index, weight in known.items()) / total
    variance = sum(weight * (values[index] - mean) ** 2 for index, weight in known.items()) / total
    return {name: mean, f"{name}-std": variance**0.5}
