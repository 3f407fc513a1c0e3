"""Draws of the discrete Gaussian against its exact probabilities, and how near sums of them are to one Gaussian."""

import math

import numpy as np
import pytest
from scipy import stats

from strategies import streams
from strategies.secure.discrete_gaussian import ROUNDING, discrete_gaussian, divergence

DRAWS = 200_000
LEAST = 1e-4  # p-value, at fixed seeds


def exact(sigma: float, most: int) -> np.ndarray:
    """Return P(x) for x = −most … most."""
    x = np.arange(-most, most + 1)
    weights = np.exp(-(x**2) / (2 * sigma**2))
    return weights / weights.sum()


@pytest.mark.parametrize("sigma", [1, 2, 7, 40])
def test_draws_have_the_exact_probabilities(sigma: int) -> None:
    drawn = discrete_gaussian(sigma, DRAWS, streams.generator(sigma, "test"))
    p = exact(sigma, 8 * sigma)
    most = next(k for k in range(8 * sigma) if p[8 * sigma + k] * DRAWS < 20)
    bins = p[8 * sigma - most : 8 * sigma + most + 1].copy()
    bins[[0, -1]] += p[: 8 * sigma - most].sum()  # and all beyond
    found = np.bincount(np.clip(drawn, -most, most) + most, minlength=len(bins))
    assert stats.chisquare(found, bins * DRAWS).pvalue > LEAST


def test_of_a_large_deviation_draws_are_as_gaussian_ones_on_a_fine_grid() -> None:
    sigma = 2**30 - 35
    drawn = discrete_gaussian(sigma, DRAWS, streams.generator(3, "test"))
    assert stats.kstest(drawn / sigma, "norm").pvalue > LEAST
    assert stats.chisquare(np.bincount(drawn & 255, minlength=256)).pvalue > LEAST  # in all bits
    assert len(discrete_gaussian(sigma, 0, streams.generator(0, "test"))) == 0


@pytest.mark.parametrize(("sigma", "number"), [(0.5, 2), (0.6, 5), (0.8, 20), (1.0, 3)])
def test_a_sum_is_as_near_to_a_rounded_gaussian_as_the_bound_says(sigma: float, number: int) -> None:
    most, r = 30, 0.7
    one = exact(sigma, most)
    total = one
    for _ in range(number - 1):
        total = np.convolve(total, one)
    middle = len(total) // 2
    near = int(4 * sigma * number**0.5)
    k = np.arange(-near, near + 1)
    # N(0, n σ² − r²), of which x is rounded to k with probability φ_r(k − x) / Σ_j φ_r(j − x).
    s = math.sqrt(number * sigma**2 - r**2)
    x, step = np.linspace(-12 * s, 12 * s, 8_001, retstep=True)
    kernel = stats.norm.pdf(np.arange(-80, 81)[:, None] - x, scale=r)
    rounded = (stats.norm.pdf(x, scale=s) * kernel / kernel.sum(0)).sum(1) * step
    away = np.abs(np.log(total[middle + k] / rounded[80 + k])).max()
    bound = divergence(sigma, number, r)
    assert 1e-3 * bound < away <= bound


def test_the_bound_is_below_the_papers() -> None:
    """Kairouz, Liu and Steinke 2021, theorem 1: τ = 10 Σ_k exp(−2π²σ² k/(k + 1)), for σ of ½ or more."""
    for sigma, number in [(0.5, 2), (0.5, 100), (1.0, 1000), (3.0, 10)]:
        tau = 10 * sum(math.exp(-2 * (math.pi * sigma) ** 2 * k / (k + 1)) for k in range(1, number))
        assert divergence(sigma, number) <= tau
    assert divergence(8, 10_000) < 1e-200
    assert divergence(0.1, 2) == math.inf


@pytest.mark.parametrize("shift", [(30, 0), (21, 21), (18, -24)])
def test_a_sum_with_noise_of_clients_is_as_private_as_one_with_gaussian_noise(shift: tuple[int, int]) -> None:
    """δ by the exact probabilities of two values, for two sums that differ by ``shift``."""
    sigma, number, most = 9, 6, 200
    one = exact(sigma, 10 * sigma)
    total = one
    for _ in range(number - 1):
        total = np.convolve(total, one)
    total = total[len(total) // 2 - most : len(total) // 2 + most + 1]
    p = np.outer(total, total)
    q = np.roll(p, shift, axis=(0, 1))
    z = math.sqrt(number * sigma**2 - ROUNDING**2) / math.hypot(*shift)
    for epsilon in (0.0, 1.0, 3.0, 5.0):
        delta = np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
        one_less = math.exp(epsilon) * stats.norm.cdf(-0.5 / z - epsilon * z)
        gaussian = stats.norm.cdf(0.5 / z - epsilon * z) - one_less  # Balle and Wang 2018, theorem 8
        assert 0.5 * gaussian < delta <= gaussian
