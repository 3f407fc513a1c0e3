"""004: lemma 5.1, theorem 5.1 and the least-mean-squares problem, by hand and by Monte-Carlo."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.theory.constants import AssumptionError, StepSizeError
from studies.theory.steady_state import (
    Agents,
    LeastMeanSquares,
    inverse_steps,
    limit_point,
    mean_square_bound,
    sample_mean_variance,
    steady_state,
)

# ---- Lemma 5.1 --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 6), data=st.data(), seed=st.integers(0, 10**6))
def test_lemma_is_the_mean_over_every_subset(size: int, data: st.DataObject, seed: int) -> None:
    # By enumeration: given the subset, â has mean (1/L) Σ ā_l and variance (1/L²) Σ σ_l².
    L = data.draw(st.integers(1, size))
    rng = np.random.default_rng(seed)
    means, variances = rng.normal(size=(size, 2)), rng.uniform(0, 2, size)
    errors = [
        np.sum((means[list(s)].mean(axis=0) - means.mean(axis=0)) ** 2) + variances[list(s)].sum() / L**2
        for s in itertools.combinations(range(size), L)
    ]
    assert sample_mean_variance(means, variances, L) == pytest.approx(np.mean(errors))


def test_lemma_within_monte_carlo_error() -> None:
    rng = np.random.default_rng(1)
    means, deviations, L, repeats = rng.normal(size=(8, 3)), rng.uniform(0.1, 2, 8), 3, 40_000
    drawn = np.argsort(rng.random((repeats, 8)), axis=1)[:, :L]
    values = means[drawn] + deviations[drawn][..., None] * rng.normal(size=(repeats, L, 3)) / np.sqrt(3)
    errors = np.sum((values.mean(axis=1) - means.mean(axis=0)) ** 2, axis=1)
    expected = sample_mean_variance(means, deviations**2, L)
    assert abs(errors.mean() - expected) < 4 * errors.std() / np.sqrt(repeats)


def test_lemma_by_hand_and_its_range() -> None:
    # K = 3, L = 2: (1/6)(1 + 2 + 3) + (1/6)(½)(4 + 0 + 4)
    assert sample_mean_variance([1.0, 3.0, 5.0], [1.0, 2.0, 3.0], 2) == pytest.approx(1 + 2 / 3)
    assert sample_mean_variance([1.0, 3.0, 5.0], [1.0, 2.0, 3.0], 3) == pytest.approx(6 / 9)  # all: σ̄²/K
    with pytest.raises(AssumptionError, match=r"004 lemma 5\.1: the sample must be of 1 to 3, is of 4"):
        sample_mean_variance([1.0, 3.0, 5.0], [1.0, 2.0, 3.0], 4)
    with pytest.raises(AssumptionError, match="needs 3 variances"):
        sample_mean_variance([1.0, 3.0, 5.0], [1.0, -2.0, 3.0], 1)


# ---- Theorem 5.1 ------------------------------------------------------------------------------------------------

AGENTS = Agents(
    beta2=np.array([1.0, 2.0]),
    sigma2=np.array([3.0, 5.0]),
    smoothness=np.array([1.0, 2.0]),
    offsets2=np.array([4.0, 1.0]),
    local_steps=np.array([1.0, 2.0]),
    nu=1.0,
    delta=2.0,
    sample_size=1,
)


def test_constants_by_hand() -> None:
    # K = 2, L = 1, 1/(KL) = ½: β² = ½(2·1/1 + 2·2/2) + ½·1·(8 + 4 + 8 + 16) = 2 + 18
    assert AGENTS.beta_fed2 == pytest.approx(20.0)
    # σ² = ½[(2·1·4 + 3)/1 + (2·2·1 + 5)/2] + ½(4·1·4 + 4·4·1) = ½(11 + 4.5) + 16
    assert AGENTS.sigma_fed2 == pytest.approx(23.75)
    both = replace(AGENTS, sample_size=2)  # L = K: only the noise, at a quarter
    assert both.beta_fed2 == pytest.approx(1.0)
    assert both.sigma_fed2 == pytest.approx(15.5 / 4)


def test_bound_by_hand_and_its_range() -> None:
    # μ = .01: λ = 1 − .02 + 1e-4·24 = .9824; 4·.01·23.75 = .95. Its range: ν/(δ²+β²) = 1/24
    bound = mean_square_bound([0, 2], AGENTS, step=0.01, distance2=9.0)
    assert bound == pytest.approx([9.95, 9 * 0.9824 + 0.95])
    assert steady_state(AGENTS, 0.01) == pytest.approx(0.95)
    with pytest.raises(
        StepSizeError, match=r"004 theorem 5\.1: step size 0\.042 is outside \(0, 0\.0416667\]"
    ):
        mean_square_bound(1, AGENTS, step=0.042, distance2=9.0)
    # ν = δ = 1, β = 0: λ = (1 − μ)², and λ ≥ ¼ for μ ≤ ½.
    quiet = Agents(
        *(np.zeros(1), np.ones(1), np.ones(1), np.zeros(1), np.ones(1)), nu=1.0, delta=1.0, sample_size=1
    )
    assert np.isfinite(mean_square_bound(1, quiet, step=0.5, distance2=1.0))
    with pytest.raises(StepSizeError, match=r"\(0, 0\.5\]"):
        mean_square_bound(1, quiet, step=0.51, distance2=1.0)
    with pytest.raises(AssumptionError, match=r"nu 3\.0 must be in \(0, delta 2\.0\]"):
        replace(AGENTS, nu=3.0)


def test_limit_points_by_hand() -> None:
    # a = (1, 3), w° = (0, 4), E = (2, 1): (0 + 12)/(2 + 3) and (0 + 12)/(1 + 3)
    curvatures, centres, steps = [1.0, 3.0], [[0.0], [4.0]], [2.0, 1.0]
    assert limit_point(curvatures, centres, steps, normalised=False) == pytest.approx([2.4])
    assert limit_point(curvatures, centres, steps, normalised=True) == pytest.approx([3.0])


@pytest.mark.parametrize("normalised", [False, True])
def test_fedavg_goes_to_its_limit_point(normalised: bool) -> None:
    a, c, E, step = np.array([1.0, 3.0, 0.5]), np.array([[0.0], [4.0], [-2.0]]), np.array([5, 1, 2]), 1e-4
    w = np.zeros(1)
    for _ in range(80_000):
        own = step / E if normalised else np.full(3, step)
        keep = ((1 - own * a) ** E)[:, None]
        w = np.mean(c + keep * (w - c), axis=0)  # E_k exact gradient steps
    assert w == pytest.approx(limit_point(a, c, E, normalised=normalised), abs=2e-3)


# ---- Least mean squares -----------------------------------------------------------------------------------------


def example(sample_size: int = 2) -> LeastMeanSquares:
    rng = np.random.default_rng(3)
    return LeastMeanSquares(
        minimisers=rng.normal(size=(4, 3)),
        powers=np.array([1.0, 0.5, 2.0, 1.5]),
        noises=np.array([0.1, 0.2, 0.3, 0.5]),
        local_steps=np.array([1, 2, 3, 2]),
        batch_sizes=np.array([1, 2, 1, 4]),
        sample_size=sample_size,
    )


def test_a_sample_of_no_or_too_many_agents_is_refused() -> None:
    for sample_size in (0, 5):
        with pytest.raises(AssumptionError, match=r"theorem 5\.1: the sample must be of 1 to K agents"):
            example(sample_size)


def test_a_single_agent_by_hand() -> None:
    # K = L = E = B = 1, D = 2, r = 1, s = ½: c = 1 − 2μ + μ²·4, noise μ²·½·2; μ = .1: .01/(1 − .84) = 1/16
    one = LeastMeanSquares(np.zeros((1, 2)), np.ones(1), np.array([0.5]), np.array([1]), np.array([1]), 1)
    assert one.floor(0.1) == pytest.approx(1 / 16)
    assert one.small_step_floor(0.1) == pytest.approx(0.05)  # μ/2 · tr(s r I) / r
    with pytest.raises(
        StepSizeError, match=r"004 problem 5\.3: with step size 0\.6 the mean square error grows"
    ):
        one.floor(0.6)  # 1 − 1.2 + 4·.36 = 1.24


def test_gradient_noise_of_the_example_by_sampling() -> None:
    # The Gaussian moments: E‖h(hᵀ(w−w°) − v) − r(w−w°)‖² at one point, 200,000 draws.
    rng, w = np.random.default_rng(0), np.array([1.0, -2.0, 0.5])
    problem = example()
    k, offset = 2, w - problem.minimisers[2]
    h = rng.normal(0, np.sqrt(2.0), (200_000, 3))
    v = rng.normal(0, np.sqrt(0.3), 200_000)
    errors = np.sum((h * (h @ offset - v)[:, None] - 2.0 * offset) ** 2, axis=1)
    agents = problem.agents()
    expected = agents.beta2[k] * np.sum(offset**2) + agents.sigma2[k]
    assert abs(errors.mean() - expected) < 4 * errors.std() / np.sqrt(len(errors))


@pytest.mark.parametrize("sample_size", [2, 4])
def test_the_measured_floor_is_the_predicted_one_and_below_the_theorem(sample_size: int) -> None:
    problem, step, repeats = example(sample_size), 0.1, 1500
    errors = problem.simulate(step, 90, np.random.default_rng(5), repeats=repeats)
    # Repetitions are independent, rounds aren't: the standard error is that of the repetitions' means.
    means = errors[-20:].mean(axis=0)
    assert abs(means.mean() - problem.floor(step)) < 4 * means.std() / np.sqrt(repeats)
    agents = problem.agents()
    small = agents.nu / (agents.delta**2 + agents.beta_fed2)
    start = float(np.sum(problem.minimiser**2))
    errors = problem.simulate(small, 60, np.random.default_rng(6), repeats=400).mean(axis=1)
    assert (errors <= mean_square_bound(np.arange(61), agents, step=small, distance2=start)).all()


def test_the_exact_floor_tends_to_the_small_step_floor() -> None:
    for sample_size in (1, 3, 4):
        problem = example(sample_size)
        ratios = [problem.floor(step) / problem.small_step_floor(step) for step in (0.04, 0.02, 1e-4)]
        assert ratios[-1] == pytest.approx(1, abs=2e-3)
        # The difference is of higher order: half the step, half the relative difference.
        assert (ratios[0] - 1) == pytest.approx(2 * (ratios[1] - 1), rel=0.3)
        # Theorem 5.1's level is above, by a factor of 8 and more for white data.
        assert steady_state(problem.agents(), 1e-4) > 7.9 * problem.floor(1e-4)


# ---- E_k drawn anew every round ---------------------------------------------------------------------------------


def drawn(sample_size: int = 2) -> LeastMeanSquares:
    return replace(example(sample_size), local_steps=np.array([[1, 4], [2, 3], [5, 1], [2, 2]]))


def test_a_drawn_number_of_steps_by_hand() -> None:
    # One agent, D = 1, r = 1, B = 1, s = ½, μ = .2, E in {1, 2}. E = 1: m = .2: c = 1 − .4 + .04·3 = .72, n = .04·½;
    # E = 2: m = .1: 1 − .2 + .01·3 = .83, c = .6889, n = .01·½·(1 + .83); floor = mean n / (1 − mean c)
    one = LeastMeanSquares(
        np.zeros((1, 1)), np.ones(1), np.array([0.5]), np.array([[1, 2]]), np.array([1]), 1
    )
    assert one.floor(0.2) == pytest.approx((0.02 + 0.00915) / 2 / (1 - (0.72 + 0.6889) / 2))
    # What is drawn from equal numbers is fixed.
    same = replace(example(), local_steps=np.repeat(example().local_steps[:, None], 3, axis=1))
    for step in (0.01, 0.2):
        assert same.floor(step) == pytest.approx(example().floor(step), rel=1e-12)
        assert same.small_step_floor(step) == pytest.approx(example().small_step_floor(step), rel=1e-12)
    # β_fed² and σ_fed² take the mean of 1/E_k: (1 + ¼)/2.
    assert inverse_steps([[1, 4], [2, 2]]) == pytest.approx([0.625, 0.5])
    both = replace(AGENTS, local_steps=np.array([[1.0, 4.0], [2.0, 2.0]]), sample_size=2)
    assert both.beta_fed2 == pytest.approx((2 * 0.625 + 4 * 0.5) / 4)


@pytest.mark.parametrize("sample_size", [1, 3])
def test_with_drawn_steps_the_measured_floor_is_the_predicted_one(sample_size: int) -> None:
    problem, step, repeats = drawn(sample_size), 0.1, 1500
    means = problem.simulate(step, 90, np.random.default_rng(8), repeats=repeats)[-20:].mean(axis=0)
    error = means.std() / np.sqrt(repeats)
    assert abs(means.mean() - problem.floor(step)) < 4 * error
    # Fixed numbers with the same mean, or with the same mean inverse, have another floor.
    for steps in (problem.local_steps.mean(axis=1).astype(int), np.array([2, 2, 2, 2])):
        assert abs(means.mean() - replace(problem, local_steps=steps).floor(step)) > 4 * error


def test_with_drawn_steps_the_small_step_floor_is_the_limit() -> None:
    for sample_size in (1, 4):
        ratios = [
            drawn(sample_size).floor(mu) / drawn(sample_size).small_step_floor(mu) for mu in (0.02, 1e-4)
        ]
        assert ratios[1] == pytest.approx(1, abs=2e-3)
        assert abs(ratios[0] - 1) > abs(ratios[1] - 1)
