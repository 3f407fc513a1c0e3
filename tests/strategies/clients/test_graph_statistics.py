"""The lognormal model of misalignments: its fit, and the test whether it holds."""

import math

import numpy as np
import pytest

from strategies.clients.graph import fit_lognormal, normality

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
