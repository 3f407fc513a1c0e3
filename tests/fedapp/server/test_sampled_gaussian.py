"""The account of sampled Gaussian releases: published values, brute force on one dimension, and its limits."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import norm

from fedapp.gaussian_mechanism import gaussian_epsilon
from fedapp.server.sampled_gaussian import (
    Sampling,
    poisson_loss_epsilon,
    poisson_renyi_epsilon,
    sampled_epsilon,
    without_replacement_epsilon,
)

DELTA = 1e-5


@pytest.mark.parametrize(
    ("noise", "releases", "renyi", "loss", "unsampled"),
    [(1.0, 3000, 3.51, 3.19, 1733), (0.8, 1000, 3.70, 3.14, 949)],
)
def test_published_values_of_one_percent(
    noise: float, releases: int, renyi: float, loss: float, unsampled: float
) -> None:
    assert poisson_renyi_epsilon(noise, 0.01, DELTA, releases) == pytest.approx(renyi, abs=0.01)
    spent = sampled_epsilon(noise, DELTA, releases, Sampling(0.01))
    assert spent == poisson_loss_epsilon(noise, 0.01, DELTA, releases) == pytest.approx(loss, abs=0.01)
    assert gaussian_epsilon(noise, DELTA, releases) == pytest.approx(unsampled, rel=1e-3)


def hockey_stick(p: np.ndarray, q: np.ndarray, epsilon: float, cell: float) -> float:
    """Return the larger of the two ∫ max(0, p − e^ε q), by sums over a grid of cells."""
    return float(max(np.maximum(a - np.exp(epsilon) * b, 0).sum() * cell for a, b in ((p, q), (q, p))))


@pytest.mark.parametrize(
    ("noise", "probability", "releases", "delta"),
    [(1.0, 0.1, 1, 1e-3), (0.7, 0.5, 2, 1e-2), (2.0, 0.2, 2, 1e-4)],
)
def test_poisson_sampling_by_brute_force(
    noise: float, probability: float, releases: int, delta: float
) -> None:
    x, step = np.linspace(-10 * noise, 10 * noise + 1, 2001, retstep=True)
    without = norm.pdf(x, 0, noise)
    with_ = (1 - probability) * without + probability * norm.pdf(x, 1, noise)
    if releases == 2:
        with_, without = np.multiply.outer(with_, with_), np.multiply.outer(without, without)
    spent, cell = sampled_epsilon(noise, delta, releases, Sampling(probability)), step**releases
    assert hockey_stick(with_, without, spent, cell) <= delta * (1 + 1e-4)  # the error of the sum at the kink
    assert hockey_stick(with_, without, 0.99 * spent, cell) > delta


def mean_of_some(values: tuple[float, ...], drawn: int, noise: float, x: np.ndarray) -> np.ndarray:
    """Return the density at x of the mean of so many of the values, drawn without replacement, with its noise."""
    means = [sum(some) / drawn for some in combinations(values, drawn)]
    return np.asarray(np.mean([norm.pdf(x, mean, noise / drawn) for mean in means], axis=0))


@pytest.mark.parametrize(("clients", "drawn"), [(4, 1), (6, 2), (8, 3)])
@pytest.mark.parametrize("noise", [2.0, 4.0])
def test_without_replacement_by_brute_force(clients: int, drawn: int, noise: float) -> None:
    # Of updates ±1, one is replaced by zero, or by the opposite: for all that the others may be.
    sampling, delta = Sampling(drawn=drawn, clients=clients), 1e-2
    spent = without_replacement_epsilon(noise, sampling, delta, 1)
    x, step = np.linspace(-1 - 10 * noise / drawn, 1 + 10 * noise / drawn, 4001, retstep=True)
    worst = 0.0
    for positive in range(clients):
        others = (1.0,) * positive + (-1.0,) * (clients - 1 - positive)
        densities = [mean_of_some((*others, own), drawn, noise, x) for own in (1.0, 0.0, -1.0)]
        worst = max(worst, *(hockey_stick(p, q, spent, step) for p, q in combinations(densities, 2)))
    assert 0 < worst <= delta


def test_samples_without_replacement_are_told_by_the_smaller_of_what_holds() -> None:
    few, half = Sampling(drawn=10, clients=1000), Sampling(drawn=50, clients=100)
    assert sampled_epsilon(1.0, DELTA, 3000, few) == pytest.approx(42.7, abs=0.1)
    assert sampled_epsilon(1.0, DELTA, 3000, half) == gaussian_epsilon(1.0, DELTA, 3000)


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (2.0, 100), (0.2, 10)])
def test_with_probability_one_it_is_the_exact_gaussian(noise: float, releases: int) -> None:
    exact = gaussian_epsilon(noise, DELTA, releases)
    assert sampled_epsilon(noise, DELTA, releases, Sampling(1.0)) == exact
    assert exact <= poisson_loss_epsilon(noise, 1.0, DELTA, releases) <= exact * 1.002
    assert sampled_epsilon(noise, DELTA, releases, Sampling(0.999)) <= exact


def test_a_delta_below_the_truncation_has_the_renyi_account() -> None:
    spent = sampled_epsilon(1.0, 1e-16, 100, Sampling(0.01))
    assert spent == poisson_renyi_epsilon(1.0, 0.01, 1e-16, 100) < gaussian_epsilon(1.0, 1e-16, 100)
