"""The propositions on graphs with lognormal misalignments, as printed and corrected, against simulated graphs."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from strategies.clients.graph import homogeneity
from studies.theory.random_graphs import homogeneity_model, proposition_3_2, proposition_3_3, proposition_3_4

Array = np.ndarray


def symmetric_normal(rng: np.random.Generator, networks: int, C: int, mean: float, deviation: float) -> Array:
    """Adjacency matrices (networks, C, C) with C(C−1)/2 independent normal entries each."""
    upper = np.triu(rng.normal(mean, deviation, (networks, C, C)), 1)
    return upper + upper.transpose(0, 2, 1)


C, THETA, PHI, EPS, DELTA = 6, 3.0, 0.8, 0.05, 0.3


def test_trap_simulation_finds_the_corrected_form_of_proposition_3_2():
    rng = np.random.default_rng(7)
    draws = 200_000
    half = C * (C - 1) // 2  # a symmetric A has so many independent entries; hom is half their mean
    before = rng.normal(THETA, PHI, (draws, half)).mean(axis=1) / 2
    after = rng.normal(THETA * (1 - EPS), PHI * math.sqrt(1 + DELTA), (draws, half)).mean(axis=1) / 2
    A = symmetric_normal(rng, 1, C, THETA, PHI)[0]
    assert homogeneity(np.abs(A)) == pytest.approx(np.abs(A)[np.triu_indices(C, 1)].mean() / 2)
    frequency = float((after < before).mean())
    error = math.sqrt(frequency * (1 - frequency) / draws)
    printed = proposition_3_2(THETA, PHI, C, EPS, DELTA, corrected=False)
    corrected = proposition_3_2(THETA, PHI, C, EPS, DELTA, corrected=True)
    assert abs(frequency - corrected) < 4 * error
    assert printed - frequency > 40 * error
    mean, deviation = homogeneity_model(THETA, PHI, C, corrected=True)
    assert before.mean() == pytest.approx(mean, rel=1e-3)
    assert before.std() == pytest.approx(deviation, rel=0.01)
    assert homogeneity_model(THETA, PHI, C, corrected=False) == (
        THETA / 2,
        pytest.approx(deviation / math.sqrt(2)),
    )


def test_propositions_as_printed():
    # θε/φ = 0.1875; √(30/2.3) = 3.6116; A = 0.67717.
    root = math.sqrt(30 / 2.3)
    cdf, density = NormalDist().cdf(0.1875 * root), NormalDist().pdf(0.1875 * root)
    assert proposition_3_2(THETA, PHI, C, EPS, DELTA, corrected=False) == pytest.approx(cdf, rel=1e-12)
    assert cdf == pytest.approx(0.75085, abs=1e-5)
    size = 2.3 / 30 * 0.64 + 0.0025 * 9
    assert proposition_3_3(THETA, PHI, C, EPS, DELTA, corrected=False) == pytest.approx(
        (36 * size, 180 * size)
    )
    lower = 0.05 * 3 * 6 * (2 * cdf - 1) + 1.6 * math.sqrt(6 * 2.3 / 5) * density
    bounds = proposition_3_4(THETA, PHI, C, EPS, DELTA, corrected=False)
    assert bounds == pytest.approx((lower, 1.95 * 3 * 6))
    # 2·6·2.3·.64 + 36·.0025·9, where the printed form has 5 times as much in ε.
    _, upper = proposition_3_3(THETA, PHI, C, EPS, DELTA, corrected=True)
    assert upper == pytest.approx(17.664 + 0.81)
    # Large C: the approximations below the propositions; corrected, proposition 3.3's bounds meet.
    assert proposition_3_3(3.0, 0.8, 2000, -0.5, 0, corrected=True) == pytest.approx((9e6, 9e6), rel=1e-3)
    assert proposition_3_4(3.0, 0.8, 2000, -0.5, 0, corrected=False) == pytest.approx((3000, 15000), rel=1e-3)


@pytest.mark.parametrize(
    ("clients", "eps", "delta"), [(2, 0.0, 0.0), (3, 0.0, 5.0), (8, 0.3, 0.0), (8, -0.4, 4.0), (12, 0.0, 1.0)]
)
def test_spectral_deviation_is_within_the_corrected_bounds(clients, eps, delta):
    rng = np.random.default_rng(8)
    theta, phi, draws = 6.0, 1.0, 20_000

    def spectra(mean: float, deviation: float) -> Array:
        A = symmetric_normal(rng, draws, clients, mean, deviation)
        L = A.sum(axis=2)[:, :, None] * np.eye(clients) - A
        return np.linalg.eigvalsh(L)[:, 1:]

    change = spectra(theta * (1 - eps), phi * math.sqrt(1 + delta)) - spectra(theta, phi)
    for values, proposition in ((change**2, proposition_3_3), (np.abs(change), proposition_3_4)):
        each = values.mean(axis=1)
        mean, slack = float(each.mean()), 4 * float(each.std()) / math.sqrt(draws)
        lower, upper = proposition(theta, phi, clients, eps, delta, corrected=True)
        assert lower - slack <= mean <= upper + slack
        printed_lower, printed_upper = proposition(theta, phi, clients, eps, delta, corrected=False)
        assert printed_lower <= lower
        if proposition is proposition_3_3 and clients <= 3:
            assert mean > printed_upper + slack  # it counts ordered pairs


@pytest.mark.parametrize("name", ["3.2", "3.3", "3.4"])
@pytest.mark.parametrize(
    "change",
    [
        {"eps": 1.0},
        {"delta": -1.0},
        {"theta": 0.0},
        {"phi": 0.0},
        {"C": 1},
        {"theta": math.nan},
        {"eps": -math.inf},
    ],
)
def test_a_proposition_names_itself_where_it_does_not_apply(name, change):
    proposition = {"3.2": proposition_3_2, "3.3": proposition_3_3, "3.4": proposition_3_4}[name]
    values = {"theta": 3.0, "phi": 0.8, "C": 5, "eps": 0.1, "delta": 0.0} | change
    with pytest.raises(ValueError, match=f"proposition {name}"):
        proposition(**values, corrected=True)


def test_proposition_3_2_needs_a_positive_epsilon():
    with pytest.raises(ValueError, match=r"proposition 3\.2.*0 < eps < 1"):
        proposition_3_2(3.0, 0.8, 5, -0.1, 0.0, corrected=True)
    with pytest.raises(ValueError, match=r"definition 3\.3"):
        homogeneity_model(3.0, -1.0, 5, corrected=True)
