"""The lognormal model of misalignments: its fit, and the test whether it holds."""

import math

import numpy as np
import pytest

from strategies.clients.graph import adjacency, homogeneity, misalignment
from studies.graphs.lognormal import fit_lognormal, normality

Array = np.ndarray


def symmetric_normal(rng: np.random.Generator, networks: int, C: int, mean: float, deviation: float) -> Array:
    """Adjacency matrices (networks, C, C) with C(C−1)/2 independent normal entries each."""
    upper = np.triu(rng.normal(mean, deviation, (networks, C, C)), 1)
    return upper + upper.transpose(0, 2, 1)


def test_lognormal_parameters_are_found_again():
    logs = symmetric_normal(np.random.default_rng(4), 1, 300, -3.0, 0.4)[0]
    fit = fit_lognormal(np.exp(np.minimum(logs, 0)) * (1 - np.eye(300)))
    assert fit.theta == pytest.approx(3.0, abs=4 * 0.4 / math.sqrt(fit.pairs))
    assert fit.phi == pytest.approx(0.4, rel=0.02)


def test_normality_accepts_a_lognormal_and_rejects_two_clusters():
    rng = np.random.default_rng(5)
    for C in (40, 41):
        logs = symmetric_normal(rng, 1, C, -3.0, 0.4)[0]
        result = normality(np.exp(logs) * (1 - np.eye(C)))
        assert result.p_value > 0.5
        assert abs(result.skewness) < 0.5
        assert abs(result.excess_kurtosis) < 1
        ends = rng.choice([-6.0, -1.0], (C, C))
        clusters = np.triu(ends, 1) + np.triu(ends, 1).T + 0.1 * logs
        assert normality(np.exp(clusters - 1) * (1 - np.eye(C))).p_value < 1e-3


def test_normality_does_not_count_dependent_pairs_as_evidence():
    # −ln mis = a_i + a_j: normal, but only C of the C(C−1)/2 values are free. Taken as independent they reject.
    from scipy.stats import shapiro

    rng = np.random.default_rng(6)
    naive, ours = [], []
    for _ in range(40):
        a = rng.normal(3, 0.3, 40)
        mis = np.exp(-np.add.outer(a, a)) * (1 - np.eye(40))
        naive.append(shapiro(np.log(mis[np.triu_indices(40, 1)])).pvalue < 0.05)
        ours.append(normality(mis).p_value < 0.05)
    assert np.mean(naive) > 0.2
    assert np.mean(ours) <= 0.05


def test_three_clients_by_hand():
    mis = np.array([[0, 0.5, 0.2], [0.5, 0, 0.1], [0.2, 0.1, 0]])
    logs = np.log([0.5, 0.2, 0.1])
    fit = fit_lognormal(mis)
    assert fit.theta == pytest.approx(-logs.mean(), rel=1e-14)
    assert fit.phi**2 == pytest.approx(((logs - logs.mean()) ** 2).sum() / 3, rel=1e-12)
    assert (fit.pairs, fit.floored) == (3, 0)


def test_equal_clients_are_at_the_floor():
    mis = misalignment(np.tile([0.6, 0.8], (6, 1)))
    assert fit_lognormal(mis).floored == 15
    assert all(math.isnan(value) for value in normality(mis))


def test_theta_is_twice_the_homogeneity_in_any_order_of_clients():
    rng = np.random.default_rng(7)
    m = np.abs(rng.normal(size=(6, 4)))
    mis = misalignment(m / np.linalg.norm(m, axis=1, keepdims=True))
    order = rng.permutation(6)
    theta = fit_lognormal(mis[np.ix_(order, order)]).theta
    assert theta == pytest.approx(2 * homogeneity(adjacency(mis)), rel=1e-12)


@pytest.mark.parametrize(("function", "least"), [(fit_lognormal, 2), (normality, 6)])
def test_too_few_clients(function, least):
    with pytest.raises(ValueError, match=f"needs {least} clients"):
        function(np.zeros((least - 1, least - 1)))
