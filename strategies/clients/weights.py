"""Weights of clients: those of some among all, and statistics that are weighted by them."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.flower.errors import RunError

Weights = NDArray[np.float64]


def of_each(hook: str, given: object, clients: Sequence[object], *, infinite: str = "") -> Weights:
    """Return what a hook gives for some clients, as numbers (n,).

    ``infinite`` says what infinity means, where it is allowed.

    Raises
    ------
    RunError
        Unless there is a number >= 0 for each client, in their order.
    """
    try:
        numbers = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise RunError(
            f"{hook} returns {given!r}: must be {len(clients)} numbers, one for each client"
        ) from None
    if numbers.shape != (len(clients),):
        raise RunError(
            f"{hook} returns an array {numbers.shape}: must be {(len(clients),)}, a number for each of the "
            f"{len(clients)} clients"
        )
    allowed = (numbers >= 0) & (np.isfinite(numbers) | bool(infinite))
    if not allowed.all():
        place = int(allowed.argmin())
        means = f"; infinity is {infinite}" if infinite else " and finite"
        raise RunError(f"{hook} returns {numbers[place]:g} for {clients[place]}: must be >= 0{means}")
    return numbers


def restricted_weights(importances: Sequence[float], active: NDArray[np.bool_]) -> Weights:
    """Return p_i (n,) of the clients that are ``active_clients`` (n,), with sum 1, and 0 for the others."""
    shares = np.where(active, importances, 0.0)
    return np.asarray(shares / (shares.sum() or 1.0))


def rescale(weights: Sequence[float], total: float) -> list[float]:
    """Return the weights d_i of the clients that count, scaled to the sum ``total``; unchanged if all are 0."""
    given = sum(weights)
    return [weight * (total / given) for weight in weights] if given > 0 else list(weights)


def mean_and_spread(name: str, weights: Mapping[int, float], values: Mapping[int, float]) -> dict[str, float]:
    """Return the weighted mean and standard deviation over clients; ``weights`` and ``values`` by client index."""
    known = {index: weight for index, weight in weights.items() if index in values}
    total = sum(known.values())
    if total <= 0:
        return {}
    mean = sum(weight * values[index] for index, weight in known.items()) / total
    variance = sum(weight * (values[index] - mean) ** 2 for index, weight in known.items()) / total
    return {name: mean, f"{name}-std": variance**0.5}
