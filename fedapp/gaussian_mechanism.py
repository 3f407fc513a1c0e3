"""Differential privacy's accounting for Gaussian noise: the least noise for an ε, and the least ε for a noise."""

import math
from collections.abc import Callable

import numpy as np


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the least standard deviation of Gaussian noise that is (ε, δ)-differentially private.

    The analytic Gaussian mechanism (Balle and Wang, ICML 2018, theorem 8), for every ε > 0: with s = σ / sensitivity,
    Φ(1/(2s) − εs) − e^ε Φ(−1/(2s) − εs) = δ. The sensitivity is the largest Euclidean distance between the
    vectors of two neighbouring inputs. ValueError unless ε > 0, 0 < δ < 1 and sensitivity > 0.
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1 and 0 < sensitivity < math.inf):
        given = f"has {epsilon}, {delta} and {sensitivity}"
        raise ValueError(f"needs epsilon > 0, 0 < delta < 1, sensitivity (2 clip) > 0; {given}")
    return _least(lambda s: _gaussian_delta(epsilon, s) / delta - 1) * sensitivity


def gaussian_epsilon(noise_multiplier: float, delta: float, releases: int = 1) -> float:
    """Return the least ε for which ``releases`` Gaussian releases together are (ε, δ)-differentially private.

    Each has noise of deviation z times its sensitivity, z = ``noise_multiplier``; T of them, however each depends on
    those before, are as one with z / √T (Dong, Roth and Su, JRSS B 2022, corollary 3.3). 0 if δ alone covers it.
    """
    s = noise_multiplier / releases**0.5
    if _gaussian_delta(0.0, s) <= delta:
        return 0.0
    return _least(lambda epsilon: _gaussian_delta(epsilon, s) / delta - 1)


def _gaussian_delta(epsilon: float, s: float) -> float:
    """Return δ of Gaussian noise with s = σ / sensitivity (Balle and Wang, ICML 2018, theorem 8)."""
    from scipy.special import log_ndtr

    first, second = log_ndtr(0.5 / s - epsilon * s), epsilon + log_ndtr(-0.5 / s - epsilon * s)
    return float(-np.exp(first) * np.expm1(second - first))


def _least(excess: Callable[[float], float]) -> float:
    """Return where a falling function of x > 0 gets to 0, rounded up."""
    from scipy.optimize import brentq

    low = high = 1.0
    while excess(low) <= 0:
        low /= 2
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, low, high, xtol=1e-300, rtol=1e-12) * (1 + 1e-9))
