"""004, theorem 5.1 with numbers: by hand, above simulated least mean squares and exact runs, and beside its print."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.theory.constants import AssumptionError, StepSizeError
from studies.theory.mean_square import (
    LocalSmoothness,
    explicit_mean_square_bound,
    explicit_steady_state,
    perturbation,
)
from studies.theory.steady_state import Agents, LeastMeanSquares, mean_square_bound, steady_state

AGENTS = Agents(
    beta2=np.array([1.0, 0.0]),
    sigma2=np.array([3.0, 6.0]),
    smoothness=np.array([1.0, 2.0]),
    offsets2=np.array([4.0, 1.0]),
    local_steps=np.array([1.0, 2.0]),
    nu=1.0,
    delta=2.0,
    sample_size=2,
)
SMOOTHNESS = LocalSmoothness(mean_square=np.array([5.0, 8.0]), convexity=np.array([1.0, 0.5]))


def test_numbers_by_hand() -> None:
    # E = (1, 2): c = (0, 1·3/24 = 1/8); δ² + β² = 4: a = ½·2·⅛·8·4 = 4; b = ½·⅛·8·[4(2·1 + μ²·6/4) + 6] with μ = .1
    a, b = perturbation(AGENTS, SMOOTHNESS, step=0.1)
    assert (a, b) == pytest.approx((4, 0.5 * (4 * 2.015 + 6)))
    # E_2 in {1, 2}: c half as large, its 1/E too
    both = replace(AGENTS, local_steps=np.array([[1.0, 1.0], [1.0, 2.0]]))
    a, b = perturbation(both, SMOOTHNESS, step=0.1)
    assert (a, b) == pytest.approx((2, 0.25 * (4 * 2.015 + 6)))
    # β²_fed = (2·1/1)/4 = ½, σ²_fed = (2·4 + 3 + 6/2)/4 = 3.5: λ = 1 − .2 + .01·4.5 = .845
    root = 0.845**0.5
    kappa = root + 1e-4 * 4 / (1 - root)
    level = (0.01 * 3.5 / root + 1e-4 * 7.03 / (1 - root)) / (1 - kappa)
    bound = explicit_mean_square_bound([0, 3], AGENTS, SMOOTHNESS, step=0.1, distance2=9.0)
    assert bound == pytest.approx([9, kappa**3 * 9 + (1 - kappa**3) * level])
    assert explicit_steady_state(AGENTS, SMOOTHNESS, 0.1) == pytest.approx(level)


def test_ranges() -> None:
    # λ_2 ≤ 1: 2·2·.5/4 = ½, λ_1: 2·1·1/2 = 1
    with pytest.raises(
        StepSizeError, match=r"with numbers: step size 0\.51 is outside \(0, 0\.5\], where local steps"
    ):
        perturbation(AGENTS, SMOOTHNESS, step=0.51)
    with pytest.raises(
        StepSizeError, match=r"with numbers: step size 0\.4 is too large: λ = 0\.92 .*κ = 3\.4669"
    ):
        explicit_steady_state(AGENTS, SMOOTHNESS, 0.4)
    with pytest.raises(AssumptionError, match=r"with numbers: 1 smoothnesses for 2 agents"):
        perturbation(AGENTS, LocalSmoothness(np.ones(1), np.ones(1)), step=0.1)
    with pytest.raises(AssumptionError, match=r"ν_k must be above 0"):
        LocalSmoothness(np.ones(2), np.zeros(2))


def test_without_local_steps_it_is_the_printed_theorem() -> None:
    # E_k = 1: d_i = 0, and what is left is within 4μσ²/ν, since √λ ≥ ½ and 1 − √λ ≥ μν/2.
    one = replace(AGENTS, local_steps=np.ones(2))
    assert perturbation(one, SMOOTHNESS, step=0.1) == (0.0, 0.0)
    rounds = np.arange(200)
    explicit = explicit_mean_square_bound(rounds, one, SMOOTHNESS, step=0.1, distance2=9.0)
    assert (explicit <= mean_square_bound(rounds, one, step=0.1, distance2=9.0)).all()
    assert explicit[-1] < steady_state(one, 0.1)


# ---- Least mean squares -----------------------------------------------------------------------------------------


def example(sample_size: int, *, draw: bool) -> LeastMeanSquares:
    rng = np.random.default_rng(3)
    return LeastMeanSquares(
        minimisers=rng.normal(size=(5, 3)),
        powers=np.array([1.0, 0.5, 1.2, 0.8, 1.0]),
        noises=np.array([0.1, 0.2, 0.3, 0.5, 0.0]),
        local_steps=rng.integers(1, 6, (5, 4)) if draw else np.array([1, 3, 5, 2, 4]),
        batch_sizes=np.array([1, 2, 1, 4, 2]),
        sample_size=sample_size,
    )


def smoothness_of(problem: LeastMeanSquares) -> LocalSmoothness:
    return LocalSmoothness(problem.mean_square_smoothness, problem.powers)


def test_mean_square_smoothness_by_sampling() -> None:
    problem, rng = example(2, draw=False), np.random.default_rng(0)
    k, u = 1, np.array([1.0, -2.0, 0.5])
    h = rng.normal(0, np.sqrt(problem.powers[k]), (100_000, problem.batch_sizes[k], 3))
    values = np.sum(np.mean(h * (h @ u)[..., None], axis=1) ** 2, axis=1)
    expected = problem.mean_square_smoothness[k] * (u @ u)
    assert abs(values.mean() - expected) < 4 * values.std() / np.sqrt(len(values))


@pytest.mark.parametrize("draw", [False, True])
@pytest.mark.parametrize(("sample_size", "step"), [(1, 0.08), (3, 0.04), (5, 0.08)])
def test_simulated_least_mean_squares_stay_below_both(draw: bool, sample_size: int, step: float) -> None:
    problem = example(sample_size, draw=draw)
    start = problem.minimiser + np.array([2.0, -1.0, 2.0])
    errors = problem.simulate(step, 250, np.random.default_rng(6), repeats=300, start=start).mean(axis=1)
    rounds, agents = np.arange(251), problem.agents()
    printed = mean_square_bound(rounds, agents, step=step, distance2=9.0)  # eq. 5.57, without its O(μ²)
    numbers = explicit_mean_square_bound(rounds, agents, smoothness_of(problem), step=step, distance2=9.0)
    assert errors[0] == pytest.approx(9)
    assert (errors <= printed).all()
    assert (errors <= numbers * (1 + 1e-12)).all()
    # The floor is known in closed form, and is below.
    level = explicit_steady_state(agents, smoothness_of(problem), step)
    assert problem.floor(step) <= level
    assert errors[-50:].mean() == pytest.approx(problem.floor(step), rel=0.15)
    # 1 − √λ ≈ μν four times as large is too fast: errors go with (1 − 2μν)^i.
    slow = errors - errors[-50:].mean()
    assert slow[40] > (numbers[0] * (1 - 2 * step * agents.nu * 2) ** 40)


def test_both_levels_tend_to_each_other() -> None:
    # ℓ/(4μσ²/ν) → ¼ as μ → 0: √λ → 1 and 1 − √λ → μν, where the chapter takes ½ and μν/2. The rest is O(μ²).
    problem = example(3, draw=True)
    agents, smoothness = problem.agents(), smoothness_of(problem)
    shares = [
        explicit_steady_state(agents, smoothness, mu) / steady_state(agents, mu) for mu in (2e-3, 1e-3, 1e-6)
    ]
    assert shares[-1] == pytest.approx(0.25, rel=1e-3)
    assert (shares[0] - 0.25) == pytest.approx(2 * (shares[1] - 0.25), rel=0.1)


# ---- Exact runs -------------------------------------------------------------------------------------------------


def exact_run(
    a: np.ndarray, c: np.ndarray, E: np.ndarray, step: float, start: float, rounds: int
) -> np.ndarray:
    """‖w° − w_i‖² of all agents with exact gradients on ½a_k(w − c_k)², (rounds + 1,)."""
    keep, best, w, errors = (1 - step / E * a) ** E, (a @ c) / a.sum(), start, []
    for _ in range(rounds + 1):
        errors.append((w - best) ** 2)
        w = float(np.mean(c + keep * (w - c)))
    return np.array(errors)


def agents_of(a: np.ndarray, c: np.ndarray, E: np.ndarray) -> tuple[Agents, LocalSmoothness]:
    best = (a @ c) / a.sum()
    agents = Agents(
        beta2=np.zeros(len(a)),
        sigma2=np.zeros(len(a)),
        smoothness=a,
        offsets2=(c - best) ** 2,
        local_steps=E,
        nu=float(a.mean()),
        delta=float(a.mean()),
        sample_size=len(a),
    )
    return agents, LocalSmoothness(mean_square=a**2, convexity=a)


@settings(deadline=None, max_examples=60)
@given(
    agents=st.integers(1, 5),
    share=st.floats(0.01, 0.3),
    start=st.floats(-5, 5),
    spread=st.floats(0, 4),
    seed=st.integers(0, 10**6),
)
def test_exact_runs_stay_below_the_numbers(
    agents: int, share: float, start: float, spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a, c, E = (
        rng.uniform(0.2, 1, agents),
        spread * rng.normal(size=agents),
        rng.integers(1, 7, agents).astype(float),
    )
    known, smoothness = agents_of(a, c, E)
    errors = exact_run(a, c, E, share, start, 100)
    bound = explicit_mean_square_bound(
        np.arange(101), known, smoothness, step=share, distance2=float(errors[0])
    )
    assert (errors <= bound + 1e-12).all()


def test_what_eq_557_leaves_out_is_needed() -> None:
    # No noise, all agents: σ²_fed = 0, but local steps lead off w° by O(μ). The printed level without its O(μ²) is 0.
    a, c, E = np.array([1.0, 0.2]), np.array([3.0, -3.0]), np.array([1.0, 5.0])
    known, smoothness = agents_of(a, c, E)
    assert known.sigma_fed2 == 0
    for step in (0.2, 0.1):
        errors = exact_run(a, c, E, step, 0.0, 2000)
        assert errors[-1] > mean_square_bound(2000, known, step=step, distance2=float(errors[0]))
        assert errors[-1] <= explicit_steady_state(known, smoothness, step)
        without = explicit_steady_state(replace(known, local_steps=np.ones(2)), smoothness, step)
        assert errors[-1] > without
    # It is of the order that the theorem says: E‖w̃‖² = O(μ²).
    ends = [exact_run(a, c, E, step, 0.0, 20_000)[-1] for step in (0.02, 0.01)]
    assert ends[0] / ends[1] == pytest.approx(4, rel=0.05)


def test_eq_554_as_printed_is_too_small_with_part_of_the_agents() -> None:
    # Two alike agents, one drawn: d_i is the d_k of either, E‖d_i‖² = (1/K) Σ ‖d_k‖². The print has L/K² for 1/K.
    a, c, E, mu, w = 1.0, 0.0, 2, 0.1, 3.0
    phi = w - mu / E * a * (w - c)
    d = (a * (w - c) + a * (phi - c)) / E - a * (w - c)
    mean_square = (d**2 + d**2) / 2
    printed = 1 / 2**2 * (d**2 + d**2)
    assert printed < mean_square
    known, smoothness = agents_of(np.ones(2), np.zeros(2), np.full(2, 2.0))
    found_a, found_b = perturbation(replace(known, sample_size=1), smoothness, step=mu)
    assert mean_square <= mu**2 * (found_a * w**2 + found_b)
    assert d == pytest.approx(-mu * w / 4)  # by hand: half of φ − w = −μw/2
