"""Buttaci 2024: lemmas 4.1, 4.2, 4.4 and 4.5 by hand and on every iterate of runs, and rounds to an accuracy."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.theory import perturbed, perturbed_rounds
from studies.theory.constants import AssumptionError, Constants, StepSizeError
from studies.theory.problems import Quadratics, quadratics

BY_HAND = Constants(num_clients=2, L=2.0, mu=1.0, S=0.5, sigma2=4.0, G2=3.0, Gamma=0.25, Delta=5.0)
START = np.array([5.0, -5.0])


def test_distances_by_hand() -> None:
    # γ = .1, E = 4: γ²G² = .03
    deviation = perturbed_rounds.fedprox_deviation_bound(
        [0, 1, 4], BY_HAND, lr=0.1, local_steps=4, alpha=10.0
    )
    assert deviation == pytest.approx([0, 0.03, 0.48])
    assert perturbed_rounds.fedprox_drift_bound(BY_HAND, lr=0.1, local_steps=4) == pytest.approx(1.92)
    assert perturbed_rounds.neighbours_bound(BY_HAND, previous_lr=0.1, local_steps=4) == pytest.approx(1.92)
    assert perturbed_rounds.neighbours_bound(BY_HAND, previous_lr=0.0, local_steps=4) == 0
    # β = ½: 4·.48·(4 + ¼ + 8·4·1) with γ_{t−1} = 2γ_t, 4·.48·4.25 in the first round
    drift = {"lr": 0.1, "local_steps": 4, "beta": 0.5}
    assert perturbed_rounds.spectral_drift_bound(BY_HAND, previous_lr=0.2, **drift) == pytest.approx(
        1.92 * 36.25
    )
    assert perturbed_rounds.spectral_drift_bound(BY_HAND, previous_lr=0.0, **drift) == pytest.approx(
        1.92 * 4.25
    )
    # 16·3·(1.5·.1 + 2·½·.2)²
    sharper = perturbed_rounds.spectral_drift_minkowski_bound(BY_HAND, previous_lr=0.2, **drift)
    assert sharper == pytest.approx(48 * 0.35**2)


@pytest.mark.parametrize("beta", [0.01, 0.3, 0.99])
def test_the_bound_without_one_over_beta_is_the_smaller(beta: float) -> None:
    case = {"lr": 0.1, "previous_lr": 0.1, "local_steps": 3, "beta": beta}
    sharper = perturbed_rounds.spectral_drift_minkowski_bound(BY_HAND, **case)
    assert sharper == pytest.approx((3 - beta) ** 2 * 0.01 * 9 * 3)
    assert sharper < 9 / 16 * perturbed_rounds.spectral_drift_bound(BY_HAND, **case)


def ring(num_clients: int) -> np.ndarray:
    one = np.roll(np.eye(num_clients), 1, axis=1)
    return (one + one.T) / 2


def neighbour_averages(run, neighbours: np.ndarray) -> np.ndarray:
    """u_t^i of every round, (R, T, C, D), from the last local models of the round before."""
    first = np.broadcast_to(run.models[:, :1, None], run.locals[:, :1, -1].shape)
    return np.concatenate([first, np.einsum("ij,rtjd->rtid", neighbours, run.locals[:, :-1, -1])], axis=1)


def squared(vectors: np.ndarray) -> np.ndarray:
    """Squared norms, their mean over the repetitions."""
    return np.sum(vectors**2, axis=-1).mean(axis=0)


CASES = {
    "num_clients": st.integers(3, 6),
    "E": st.integers(1, 6),
    "heterogeneity": st.floats(0.0, 3.0),
    "sigma2": st.sampled_from([0.0, 1.0]),
    "seed": st.integers(0, 10**6),
}


def draw_problem(num_clients: int, heterogeneity: float, seed: int) -> Quadratics:
    rng = np.random.default_rng(seed)
    return quadratics(
        rng, num_clients=num_clients, num_parameters=2, L=2.0, mu=0.5, heterogeneity=heterogeneity
    )


@settings(deadline=None, max_examples=25)
@given(alpha=st.sampled_from([0.0, 1.0, 10.0]), share=st.floats(0.05, 1.0), **CASES)
def test_fedprox_stays_within_lemmas_41_and_42(
    drive: Callable,
    alpha: float,
    share: float,
    num_clients: int,
    E: int,
    heterogeneity: float,
    sigma2: float,
    seed: int,
) -> None:
    problem = draw_problem(num_clients, heterogeneity, seed)
    lr = share * (min(0.5, 1 / alpha) if alpha else 0.5)
    run = drive(
        problem, START, 10, E, lr, alpha=alpha, sigma2=sigma2, seed=seed, repeats=300 if sigma2 else 1
    )
    c = Constants(num_clients=num_clients, L=2.0, G2=run.gradient_bound(problem, sigma2))
    moved = squared(run.locals - run.models[:, :-1, None, None])  # (T, E + 1, C)
    steps = np.arange(E + 1)
    bound = perturbed_rounds.fedprox_deviation_bound(steps, c, lr=lr, local_steps=E, alpha=alpha)
    # G² is of exact gradients with σ² added, which sampled ones miss by a few percent.
    assert (moved.max(axis=(0, 2)) <= bound * (1.1 if sigma2 else 1) + 1e-12).all()
    apart = squared(run.locals - run.locals.mean(axis=3, keepdims=True))
    assert apart.max() <= perturbed_rounds.fedprox_drift_bound(c, lr=lr, local_steps=E, alpha=alpha)


@settings(deadline=None, max_examples=25)
@given(
    beta=st.sampled_from([0.02, 0.1, 0.5, 0.9]), falling=st.booleans(), share=st.floats(0.05, 1.0), **CASES
)
def test_the_spectral_method_stays_within_lemmas_44_and_45(
    drive: Callable,
    beta: float,
    falling: bool,
    share: float,
    num_clients: int,
    E: int,
    heterogeneity: float,
    sigma2: float,
    seed: int,
) -> None:
    problem, neighbours, T = draw_problem(num_clients, heterogeneity, seed), ring(num_clients), 8
    steps = share / (2 * 2 * E) / (1 + np.arange(T) * falling)
    run = drive(
        problem,
        START,
        T,
        E,
        steps,
        beta=beta,
        neighbours=neighbours,
        sigma2=sigma2,
        seed=seed,
        repeats=300 if sigma2 else 1,
    )
    c = Constants(num_clients=num_clients, L=2.0, G2=run.gradient_bound(problem, sigma2))
    u = neighbour_averages(run, neighbours)
    np.testing.assert_allclose(run.points[:, :, 0], beta * run.locals[:, :, 0] + (1 - beta) * u, atol=1e-9)
    between = squared(u[:, :, :, None] - u[:, :, None]).max(axis=(1, 2))
    distances = squared(run.locals[:, :, :-1].mean(axis=3, keepdims=True) - run.points).max(axis=(1, 2))
    previous = np.array([0.0, *steps[:-1]])
    for t in range(T):
        assert (
            between[t] <= perturbed_rounds.neighbours_bound(c, previous_lr=previous[t], local_steps=E) + 1e-12
        )
        case = {"lr": steps[t], "previous_lr": previous[t], "local_steps": E, "beta": beta}
        sharper = perturbed_rounds.spectral_drift_minkowski_bound(c, **case)
        assert distances[t] <= sharper + 1e-12
        assert distances[t] <= perturbed_rounds.spectral_drift_bound(c, **case) + 1e-12


def test_the_lemmas_fail_with_smaller_numbers(drive: Callable) -> None:
    # Far from its minimum a client's gradient hardly changes: it goes γEG far, two opposite ones 2γEG apart.
    flat = Quadratics(np.full((2, 1), 1e-3), [[1000.0], [-1000.0]])
    run = drive(flat, [0.0], 1, 5, 0.1)
    c = Constants(num_clients=2, L=1e-3, G2=run.gradient_bound(flat, 0.0))
    case = {"lr": 0.1, "local_steps": 5}
    moved = squared(run.locals - run.models[:, :-1, None, None]).max(axis=(0, 2))
    bound = perturbed_rounds.fedprox_deviation_bound(range(6), c, **case)
    assert (moved <= bound).all()
    assert moved[-1] > 0.99 * bound[-1]  # γ²E²G² is reached
    assert (moved[1:] > 0.99 * bound[1:]).all()
    apart = squared(run.locals - run.locals.mean(axis=3, keepdims=True)).max()
    assert 0.24 < apart / perturbed_rounds.fedprox_drift_bound(c, **case) < 0.26  # p = ½ each: half as far
    # Two clients, each the other's only neighbour: u's are 2γEG apart, lemma 4.4 with equality.
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    run = drive(flat, [0.0], 2, 5, 0.1, beta=0.5, neighbours=swap)
    u = neighbour_averages(run, swap)[:, 1]
    between = squared(u[:, 0] - u[:, 1])
    bound = perturbed_rounds.neighbours_bound(
        replace(c, G2=run.gradient_bound(flat, 0.0)), previous_lr=0.1, local_steps=5
    )
    assert 0.99 * bound < between <= bound


# ---- Rounds to an accuracy --------------------------------------------------------------------------------------


def test_round_terms_by_hand() -> None:
    # E = 4, α = 2, L_α = 4, ε = ½: 64·16·25/(4·¼); (2·.5·4/4)²/(4·¼); 4·64·9/(4·½)²; 2·4·4·3/(16·½);
    # (4·2·2·3/(2·½))^(2/3)/16
    terms = perturbed_rounds.fedprox_round_terms(0.5, BY_HAND, local_steps=4, alpha=2.0)
    values = [float(value) for value in vars(terms).values()]
    assert values == pytest.approx([25_600, 1, 576, 12, 48 ** (2 / 3) / 16])
    # β = ½: 16·4·25/1; (.5·4)²/(4·4·¼); (4·3/½)·12.25
    terms = perturbed_rounds.spectral_round_terms([0.5, 0.25], BY_HAND, local_steps=4, beta=0.5)
    values = [float(value[0]) for value in vars(terms).values()]
    assert values == pytest.approx([1600, 1, 0, 294, 0])
    assert terms.start[1] == pytest.approx(4 * 1600)  # ∝ 1/ε²
    assert terms.drift[1] == pytest.approx(2 * 294)  # ∝ 1/ε


@settings(deadline=None, max_examples=40)
@given(
    accuracy=st.floats(1e-4, 1e3),
    E=st.integers(1, 50),
    alpha=st.sampled_from([0.0, 0.1, 5.0]),
    beta=st.sampled_from([0.05, 0.5, 0.95]),
)
def test_the_fewest_rounds_are_the_fewest(accuracy: float, E: int, alpha: float, beta: float) -> None:
    for bound, rounds, terms in (
        (
            lambda T: perturbed.fedprox_nonconvex_fixed_bound(T, BY_HAND, local_steps=E, alpha=alpha),
            perturbed_rounds.fedprox_rounds(accuracy, BY_HAND, local_steps=E, alpha=alpha),
            perturbed_rounds.fedprox_round_terms(accuracy, BY_HAND, local_steps=E, alpha=alpha),
        ),
        (
            lambda T: perturbed.spectral_nonconvex_fixed_bound(T, BY_HAND, local_steps=E, beta=beta),
            perturbed_rounds.spectral_rounds(accuracy, BY_HAND, local_steps=E, beta=beta),
            perturbed_rounds.spectral_round_terms(accuracy, BY_HAND, local_steps=E, beta=beta),
        ),
    ):
        assert bound(rounds) <= accuracy
        assert rounds == 1 or bound(rounds - 1) > accuracy
        # The thesis's terms: none alone suffices, and together they are right but for a number.
        largest = float(max(vars(terms).values()))
        assert largest * (1 - 1e-9) <= rounds <= max(1, 25 * largest + 1)
    planned = perturbed_rounds.fedprox_round_terms(accuracy, BY_HAND, local_steps=E, alpha=alpha)
    most = max(1, round(float(max(vars(planned).values()))))
    if most > 100:  # planned by the largest term alone, a run isn't promised ε
        assert perturbed.fedprox_nonconvex_fixed_bound(most, BY_HAND, local_steps=E, alpha=alpha) > accuracy


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 1.0), (0.2, 1.0), (0.0, 0.6)])
def test_a_run_planned_by_the_rounds_reaches_the_accuracy(drive: Callable, alpha: float, beta: float) -> None:
    problem, E, accuracy = draw_problem(4, 1.0, 3), 2, 25.0
    a, c = problem.curvatures, problem.centres
    best = problem.minimiser()
    delta = problem.value(START) - problem.value(best)
    G2 = float(np.max(np.sum(problem.gradients(START) ** 2, axis=1)))  # from far away a run goes downhill
    constants = Constants(num_clients=4, L=2.0, S=0.25, G2=G2, Delta=delta)
    if beta == 1:
        T = perturbed_rounds.fedprox_rounds(accuracy, constants, local_steps=E, alpha=alpha)
    else:
        T = perturbed_rounds.spectral_rounds(accuracy, constants, local_steps=E, beta=beta)
    lr = float(perturbed.nonconvex_fixed_step(T, constants, E, alpha))
    run = drive(problem, START, T, E, lr, alpha=alpha, beta=beta, neighbours=ring(4))
    assert run.gradient_bound(problem, 0.0) <= G2
    means = run.locals[0, :, :-1].mean(axis=2)  # w̄_{t,k}
    gradients = np.mean(a * (means[..., None, :] - c), axis=-2)
    measured = float(np.mean(np.sum(gradients**2, axis=-1)))
    assert float(np.sum(problem.gradient(START) ** 2)) > 2 * accuracy  # it has to be reached
    assert measured <= accuracy
    assert T < 50_000


@settings(deadline=None, max_examples=15)
@given(
    E=st.integers(1, 6),
    beta=st.sampled_from([0.02, 0.2, 0.8]),
    T=st.integers(2, 25),
    seed=st.integers(0, 10**6),
)
def test_theorems_44_and_46_hold_without_one_over_beta(
    drive: Callable, E: int, beta: float, T: int, seed: int
) -> None:
    problem = draw_problem(4, 2.0, seed)
    a, c, best = problem.curvatures, problem.centres, problem.minimiser()
    delta, bracket = problem.value(START) - problem.value(best), (3 - beta) ** 2 / 4
    run = drive(problem, START, T, E, 1 / (4 * np.sqrt(T * E)), beta=beta, neighbours=ring(4))
    means = run.locals[0, :, :-1].mean(axis=2)
    measured = np.mean(np.sum(np.mean(a * (means[..., None, :] - c), axis=-2) ** 2, axis=-1))
    G2 = run.gradient_bound(problem, 0.0)
    assert measured <= 4 * 2 * delta / np.sqrt(T * E) + E * G2 / T * bracket  # theorem 4.6 I
    run = drive(problem, START, T, E, 1 / (4 * E), beta=beta, neighbours=ring(4))
    G2, mu = run.gradient_bound(problem, 0.0), 0.5
    transient = 2 * delta / mu * (1 - mu / ((beta + 2) * 2)) ** np.arange(T + 1)
    gamma = problem.value(best)  # all f_i* are 0
    floor = 3 * 2 * gamma / (2 * mu) + 2 * bracket * E**2 * G2 / mu + beta * (1 - beta) * E * G2 / 16
    assert (run.gaps(problem) <= transient + floor).all()  # theorem 4.4 I


def test_values_out_of_range() -> None:
    with pytest.raises(StepSizeError, match=r"lemma 4\.1: step size 0\.2 is outside \(0, 1/α = 0\.1\]"):
        perturbed_rounds.fedprox_deviation_bound(1, BY_HAND, lr=0.2, local_steps=2, alpha=10.0)
    with pytest.raises(AssumptionError, match=r"lemma 4\.1: steps must be in 0\.\.2, are 3"):
        perturbed_rounds.fedprox_deviation_bound(3, BY_HAND, lr=0.1, local_steps=2)
    with pytest.raises(StepSizeError, match=r"lemma 4\.2: step size 0 must be above 0"):
        perturbed_rounds.fedprox_drift_bound(BY_HAND, lr=0.0, local_steps=2)
    with pytest.raises(
        StepSizeError, match=r"lemma 4\.4: the previous round's step size -1 must be 0 or more"
    ):
        perturbed_rounds.neighbours_bound(BY_HAND, previous_lr=-1.0, local_steps=2)
    with pytest.raises(AssumptionError, match=r"lemma 4\.5: beta must be in \(0, 1\), is 1"):
        perturbed_rounds.spectral_drift_bound(BY_HAND, lr=0.1, previous_lr=0.1, local_steps=2, beta=1.0)
    with pytest.raises(AssumptionError, match=r"T_ε: the accuracy must be above 0, is 0"):
        perturbed_rounds.fedprox_rounds(0.0, BY_HAND, local_steps=2)
    with pytest.raises(AssumptionError, match=r"T_ε: a constant is missing: the bound is nan"):
        perturbed_rounds.spectral_rounds(1.0, Constants(num_clients=2, L=1.0), local_steps=2, beta=0.5)
