"""Dhasade et al.: the bound, its floor and the drift; by hand, and above what FedAvg does on convex quadratics."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.theory.constants import AssumptionError, Constants, StepSizeError
from studies.theory.convex import convex_bound, convex_floor, drift_bound, progress_bound
from studies.theory.problems import Quadratics, quadratics

BY_HAND = Constants(num_clients=5, L=2.0, sigma2=3.0, zeta2=0.5, distance2=4.0)


def test_the_bound_by_hand() -> None:
    # η = 1/10, τ = 2, T = 10: 4/(2·.1·2·10) = 1; .1·3/5 = .06; 4·2·.01·2·3 = .48; 18·4·.01·2·.5 = .72
    assert convex_bound(10, BY_HAND, lr=0.1, local_steps=2) == pytest.approx(1 + 0.06 + 0.48 + 0.72)
    assert convex_bound([10, 20], BY_HAND, lr=0.1, local_steps=2) == pytest.approx([2.26, 1.76])
    assert convex_floor(BY_HAND, lr=0.1, local_steps=2) == pytest.approx(0.72)
    assert drift_bound(BY_HAND, lr=0.1, local_steps=2) == pytest.approx(
        0.36 + 0.24
    )  # 18·4·.01·.5 + 4·2·.01·3


def test_the_floor_of_the_paper() -> None:
    # Section 4.1: η = 0.2, ζ = 0.407, L = 0.190; τ = 10: 18 · 100 · .04 · .19 · .165649 = 2.2661
    paper = Constants(num_clients=2, L=0.190, zeta2=0.407**2)
    assert convex_floor(paper, lr=0.2, local_steps=10) == pytest.approx(2.2661, abs=1e-4)


@pytest.mark.parametrize("lr", [0.0, -0.1, 0.126, float("nan")])
def test_a_step_outside_the_range_names_theorem_value_and_range(lr: float) -> None:
    with pytest.raises(
        StepSizeError, match=rf"Dhasade et al., theorem 2.1.*step size {lr:.6g}.*\(0, 1/\(4L\) = 0.125\]"
    ):
        convex_bound(1, replace(BY_HAND), lr=lr, local_steps=1)


def test_other_values_out_of_range() -> None:
    assert np.isfinite(convex_bound(1, BY_HAND, lr=0.125, local_steps=1))  # the limit itself is in
    with pytest.raises(AssumptionError, match="local steps must be 1 or more, are 0"):
        convex_bound(1, BY_HAND, lr=0.1, local_steps=0)
    with pytest.raises(AssumptionError, match="num_clients = 0: must be 1 or more"):
        Constants(num_clients=0, L=1.0)
    with pytest.raises(AssumptionError, match="rounds must be 1 or more"):
        convex_bound([1, 0], BY_HAND, lr=0.1, local_steps=1)


@settings(deadline=None, max_examples=40)
@given(
    num_clients=st.integers(2, 8),
    steps=st.integers(1, 12),
    share=st.floats(0.05, 1.0),
    heterogeneity=st.floats(0.0, 5.0),
    sigma2=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_fedavg_stays_below(
    drive: Callable,
    num_clients: int,
    steps: int,
    share: float,
    heterogeneity: float,
    sigma2: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    problem = quadratics(
        rng,
        num_clients=num_clients,
        num_parameters=3,
        L=2.0,
        mu=0.05,
        heterogeneity=heterogeneity,
        shared=True,
    )
    lr, start, repeats = share / 8, [0.0, -3.0, 2.0], 200 if sigma2 else 1
    run = drive(problem, start, 15, steps, lr, sigma2=sigma2, seed=seed, repeats=repeats)
    # ζ by hand: with one Hessian A, ∇f_i − ∇f = A (c̄ − c_i) everywhere.
    pulls = problem.curvatures[0] * (problem.centres.mean(axis=0) - problem.centres)
    zeta2 = float(np.sum(pulls**2, axis=1).max())
    assert problem.zeta2 == pytest.approx(zeta2)
    distance2 = float(np.sum((np.array(start) - problem.centres.mean(axis=0)) ** 2))
    constants = Constants(num_clients=num_clients, L=2.0, sigma2=sigma2, zeta2=zeta2, distance2=distance2)
    gaps = run.shadow_gaps(problem)
    rounds = np.arange(1, 16)
    means = np.cumsum(gaps.sum(axis=1)) / (rounds * steps)
    assert (means <= convex_bound(rounds, constants, lr=lr, local_steps=steps) + 1e-12).all()
    shadow = run.locals.mean(axis=3, keepdims=True)
    drift = np.sum((run.locals - shadow) ** 2, axis=-1).mean(axis=0).max()
    assert drift <= drift_bound(constants, lr=lr, local_steps=steps) + 1e-12


def test_the_bound_holds_where_it_is_nearly_reached(drive: Callable) -> None:
    # One flat direction, one client: GD from 1 at f = w²/2, L = 1, η = 1/4, τ = T = 1: the mean is ½(3/4)² = 0.281
    # and the bound D²/(2η) = 2. A bound without its first term would be 0.
    problem = quadratics(
        np.random.default_rng(0), num_clients=1, num_parameters=1, L=1, mu=1, heterogeneity=0
    )
    problem.centres[:] = 0
    gaps = drive(problem, [1.0], 1, 1, 0.25).shadow_gaps(problem)
    assert gaps == pytest.approx(np.array([[9 / 32]]))
    constants = Constants(num_clients=1, L=1.0, zeta2=0.0, distance2=1.0)
    assert convex_bound(1, constants, lr=0.25, local_steps=1) == pytest.approx(2.0)


# ---- Lemma 2.2: one round ---------------------------------------------------------------------------------------


def test_progress_by_hand() -> None:
    # η = .1, τ = 2: (3 − 1)/(2·.1·2) = 5; .1·3/5 = .06; 2·.25
    bound = progress_bound([3.0, 1.0], [1.0, 1.0], 0.25, BY_HAND, lr=0.1, local_steps=2)
    assert bound == pytest.approx([5.56, 0.56])
    with pytest.raises(StepSizeError, match=r"Dhasade et al\., lemma 2\.2: step size 0\.126"):
        progress_bound(1, 1, 0, BY_HAND, lr=0.126, local_steps=1)
    with pytest.raises(AssumptionError, match=r"lemma 2\.2: squared distances must be 0 or more, one is -1"):
        progress_bound(1, -1, 0, BY_HAND, lr=0.1, local_steps=1)


def one_round(
    problem: Quadratics, start: float, lr: float, steps: int, sigma: float
) -> tuple[float, float, float, float]:
    """All outcomes of a round whose gradients err by ±σ, each as likely: exact means, in one parameter.

    Returns the mean of f(x̄^(t,k)) − f* over k = 1..τ, ‖x̄ − x*‖² before and after, and the drift.
    """
    a, c = problem.curvatures[:, 0], problem.centres[:, 0]
    best, C = (a @ c) / a.sum(), len(a)
    signs = (
        np.array(list(itertools.product((-1, 1), repeat=C * steps))) if sigma else np.zeros((1, C * steps))
    )
    x = np.full((len(signs), C), start)
    gaps, drift = [], []
    for errors in np.split(sigma * signs, steps, axis=1):
        drift.append(np.mean((x - x.mean(axis=1, keepdims=True)) ** 2))
        x = x - lr * (a * (x - c) + errors)
        gaps.append(np.mean(a.mean() / 2 * (x.mean(axis=1) - best) ** 2))
    after = float(np.mean((x.mean(axis=1) - best) ** 2))
    return float(np.mean(gaps)), (start - best) ** 2, after, float(np.mean(drift))


@settings(deadline=None, max_examples=60)
@given(
    num_clients=st.integers(1, 3),
    steps=st.integers(1, 3),
    share=st.floats(0.05, 1.0),
    L=st.sampled_from([0.2, 1.0, 50.0]),
    sigma=st.sampled_from([0.0, 0.5, 5.0]),
    start=st.floats(-4, 4),
    seed=st.integers(0, 10**6),
)
def test_a_round_makes_the_progress_of_the_lemma(
    num_clients: int, steps: int, share: float, L: float, sigma: float, start: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    curvatures, centres = rng.uniform(0.01 * L, L, (num_clients, 1)), 3 * rng.normal(size=(num_clients, 1))
    lr = share / (4 * L)
    measured, before, after, drift = one_round(Quadratics(curvatures, centres), start, lr, steps, sigma)
    c = Constants(num_clients=num_clients, L=L, sigma2=sigma**2)
    assert measured <= progress_bound(before, after, drift, c, lr=lr, local_steps=steps) + 1e-9 * L


def test_every_term_of_the_lemma_is_needed() -> None:
    # From x* itself, unlike curvatures lead away from it: what is left of the bound is the drift term, times L = 200.
    problem = Quadratics([[200.0], [100.0]], [[1.0], [-2.0]])
    lr = 1 / 800
    measured, before, after, drift = one_round(problem, 0.0, lr, 2, 0.0)
    assert before == 0
    assert (after, drift) == pytest.approx((1 / 64**2, 1 / 32))  # by hand: ηL = ¼, x̄² = −1/64, x_i¹ = ±¼
    c = Constants(num_clients=2, L=200.0)
    assert measured <= progress_bound(before, after, drift, c, lr=lr, local_steps=2)
    printed = (before - after) / (2 * lr * 2) + drift
    assert measured > printed  # eq. 5 as it is printed
    # Noise alone: one client, from x*, one step: E f − f* = ½η²σ², and ‖x̄ − x*‖² grows by η²σ².
    measured, before, after, drift = one_round(Quadratics([[1.0]], [[0.0]]), 0.0, 0.25, 1, 2.0)
    assert (measured, after) == pytest.approx((1 / 8, 1 / 4))
    noisy = Constants(num_clients=1, L=1.0, sigma2=4.0)
    assert measured <= progress_bound(before, after, drift, noisy, lr=0.25, local_steps=1)
    assert measured > progress_bound(before, after, drift, replace(noisy, sigma2=0.0), lr=0.25, local_steps=1)
