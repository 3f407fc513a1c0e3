"""Fraboni et al., theorems 2 and 3 and corollary 2: by hand, at single models, and on asynchronous runs."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.theory import asynchronous, representation
from studies.theory.constants import AssumptionError, Constants
from studies.theory.problems import Quadratics, quadratics

BY_HAND = Constants(num_clients=3, L=2.0)
R = np.array([0.5, 0.25, 0.25])


def test_shares_by_hand() -> None:
    assert representation.by_type([0.1, 0.2, 0.3, 0.4], [1, 0, 1, 1]) == pytest.approx([0.2, 0.8])
    # s̃ = (¾, ¼, 0): (¼)²/¾ + 0; s̃ = r: 0; none: 0
    assert representation.chi2(R, [[3.0, 1.0, 0.0], [2.0, 1.0, 1.0], [0.0, 0.0, 0.0]]) == pytest.approx(
        [1 / 12, 0, 0]
    )
    with pytest.raises(AssumptionError, match=r"section 2\.6: importances must sum to 1"):
        representation.chi2([0.5, 0.6], [1.0, 1.0])
    with pytest.raises(AssumptionError, match=r"section 2\.6: expected weights must be 0 or more"):
        representation.chi2(R, [1.0, -1.0, 1.0])
    with pytest.raises(AssumptionError, match=r"types: must be \(3,\) whole numbers from 0"):
        representation.by_type([1.0, 1.0, 1.0], [0, 1])
    with pytest.raises(AssumptionError, match=r"types: must be \(2,\) whole numbers from 0, are \[0\.5 1"):
        representation.by_type([0.5, 0.5], [0.5, 1.0])  # else half of the weight would be in no type


def test_bounds_at_a_model_by_hand() -> None:
    # s̃ = (¾, ¼, 0), χ² = 1/12, L = 2, gaps (4, 8, 2): Σ s̃ g = 5; unrepresented ¼·2
    s, gaps = [3.0, 1.0, 0.0], [4.0, 8.0, 2.0]
    assert representation.difference_bound(R, s, gaps, BY_HAND) == pytest.approx(8 * (5 / 12 + 0.5))
    # least (1, 5, 9): Σ s̃ least = 2: (13/12)·3 + (1/12)·2 + ½
    assert representation.gradient_bound(R, s, gaps, [1.0, 5.0, 9.0], BY_HAND) == pytest.approx(
        8 * (39 / 12 + 2 / 12 + 0.5)
    )
    with pytest.raises(AssumptionError, match=r"lemma 7: losses above their minima must be 0 or more"):
        representation.difference_bound(R, s, [1.0, -1.0, 0.0], BY_HAND)


def test_theorems_by_hand() -> None:
    s = [[3.0, 1.0, 0.0], [0.0, 0.0, 2.0]]  # χ²: 1/12; (¼ − 1)²/1 = 9/16
    found = representation.representation(
        R, s, [[4.0, 8.0, 0.0], [0.0, 0.0, 1.0]], [[1.0, 1.0, 2.0], [4.0, 8.0, 0.0]]
    )
    assert found.chi2 == pytest.approx([1 / 12, 9 / 16])
    assert found.misrepresented == pytest.approx((5 / 12 + 9 / 16) / 2)
    assert found.unrepresented == pytest.approx((0.5 + 4.0) / 2)
    # max{(13/12)/4, (25/16)/2} = 25/32, R + ε = ½, L = 2
    bound = representation.squared_gradient_bound(found, BY_HAND, suboptimality=0.5)
    assert bound == pytest.approx(8 * (25 / 64 + (5 / 12 + 9 / 16) / 2 + 2.25))
    # s̃ = (½, ¼, ¼)·…: s = (1, 2, 1): s̃ = (¼, ½, ¼), χ² = ¼²/¼ + ¼²/½ = 3/8, q = 4: 8·((11/8)/4·½ + (3/8)·(¼ + 1 + 0))
    bound = representation.federated_gradient_bound(
        R, [1.0, 2.0, 1.0], [1.0, 2.0, 0.0], BY_HAND, suboptimality=0.5
    )
    assert bound == pytest.approx(8 * (11 / 64 + 3 / 8 * 1.25))
    with pytest.raises(AssumptionError, match=r"eq\. 27: no aggregation represents type \[1\]"):
        representation.federated_gradient_bound(
            R, [1.0, 0.0, 1.0], [1.0, 2.0, 0.0], BY_HAND, suboptimality=0.5
        )
    # ½·(0.5·0.1)·4·(3−1)·2²·1.5·3
    term = representation.window_term(
        lr=0.1, server_lr=0.5, local_steps=4, window=3, gradient=2.0, mean_weight=1.5, largest_weight=3.0
    )
    assert term == pytest.approx(3.6)
    assert representation.window_mean([[1, 0], [0, 3], [1, 0], [0, 3]], 2) == pytest.approx([0.5, 1.5])
    with pytest.raises(
        AssumptionError, match=r"assumption 6: windows of 2 aggregations differ by up to 0\.5"
    ):
        representation.window_mean([[1, 0], [0, 3], [2, 0], [0, 3]], 2)
    with pytest.raises(AssumptionError, match=r"assumption 6: a window of 3 must divide 4 aggregations"):
        representation.window_mean([[1, 0], [0, 3], [1, 0], [0, 3]], 3)


# ---- At single models -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    types=st.integers(1, 5), left_out=st.integers(0, 4), scale=st.floats(0.1, 10), seed=st.integers(0, 10**6)
)
def test_lemma_7_and_eq_105_hold_at_any_model(types: int, left_out: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    L, r = 2.0, rng.dirichlet(np.full(types, 0.5))
    s = scale * rng.dirichlet(np.full(types, 0.5))
    s[: min(left_out, types - 1)] = 0
    # One curvature, L: then 2L(F_j − F_j*) is ‖∇F_j‖², and nothing is lost in that step.
    problem = Quadratics(np.full((types, 2), L), rng.normal(size=(types, 2)), r)
    w = 3 * rng.normal(size=2)
    own = s @ problem.centres / s.sum()
    gradients, gaps, least = problem.gradients(w), problem.values(w), problem.values(own)
    mine = r @ gradients
    c = Constants(num_clients=types, L=L)
    difference = np.sum((mine - s @ gradients / s.sum()) ** 2)
    assert difference <= representation.difference_bound(r, s, gaps, c) * (1 + 1e-9) + 1e-12
    assert np.sum(mine**2) <= representation.gradient_bound(r, s, gaps, least, c) * (1 + 1e-9) + 1e-12


def test_eq_105_as_printed_is_false_for_large_weights() -> None:
    # One client, F = θ², L = 2, weight q = 4: ‖∇L‖² = 4θ²; printed 4L/q²·[L^n(θ) − L^n(0)] = 8/16·4θ² = 2θ².
    theta, q = 3.0, 4.0
    measured, gap = (2 * theta) ** 2, theta**2
    printed = 4 * 2.0 / q**2 * (q * gap)
    assert printed < measured <= representation.gradient_bound([1.0], [q], [gap], [0.0], BY_HAND)


@pytest.mark.parametrize("case", ["wrong weights", "left out"])
def test_what_is_badly_represented_is_needed(case: str) -> None:
    # At the minimiser of L^n: what is left of ∇L is due to the weights alone.
    problem = Quadratics(np.full((2, 1), 2.0), [[0.0], [1.0]], [0.5, 0.5])
    s = np.array([0.9, 0.1]) if case == "wrong weights" else np.array([1.0, 0.0])
    own = s @ problem.centres
    measured = float(np.sum(problem.gradient(own) ** 2))
    gaps = problem.values(own)
    found = representation.representation(problem.weights, [s], [gaps], [gaps])
    assert 0 < measured <= representation.squared_gradient_bound(found, BY_HAND, suboptimality=0.0)
    if case == "wrong weights":
        assert found.unrepresented == 0
        assert measured > 8 * found.unrepresented  # without P
    else:
        assert found.misrepresented == 0
        assert measured > 8 * found.misrepresented  # without U


# ---- Windows ----------------------------------------------------------------------------------------------------


def test_eq_25_as_printed_is_false_for_large_weights() -> None:
    # Two clients in turn, d = q each, K = 1; both losses have slope B = 1 but for |x| < δ around 0, where L_1 turns.
    # Client 2 pulls left throughout. Client 1's second update is stale: computed right of 0, applied left of it.
    q, lr, delta = 5.0, 0.01, 1e-3
    step = lr * q  # of one aggregation

    def first(x: float) -> float:
        return abs(x) - delta / 2 if abs(x) > delta else x**2 / (2 * delta)

    def second(x: float) -> float:
        return x + 10.0

    slopes = {0: lambda x: float(np.clip(x / delta, -1, 1)), 1: lambda x: 1.0}
    theta, sent, models = 1.5 * step, [1.5 * step] * 2, []
    for n in range(4):
        models.append(theta)
        client = n % 2
        theta -= step * slopes[client](sent[client])
        sent[client] = theta
    # By hand: 1.5, 0.5, −0.5, −1.5 steps
    assert np.array(models) / step == pytest.approx([1.5, 0.5, -0.5, -1.5])
    mean = np.mean([q / 2 * (first(x) + second(x)) for x in models])
    own = np.mean([q * (first, second)[n % 2](x) for n, x in enumerate(models)])
    excess = mean - own
    term = representation.window_term(
        lr=lr, local_steps=1, window=2, gradient=1.0, mean_weight=q, largest_weight=q
    )
    printed = lr * 1 * (2 - 1) * 1.0**2 * q
    assert excess == pytest.approx(lr * q**2 / 4)
    assert printed < excess <= term
    # The second window alone reaches the term.
    mean = np.mean([q / 2 * (first(x) + second(x)) for x in models[2:]])
    assert mean - np.mean([q * first(models[2]), q * second(models[3])]) == pytest.approx(term)


@settings(deadline=None, max_examples=60)
@given(W=st.integers(1, 6), windows=st.integers(1, 3), clients=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_models_of_a_window_are_near_each_other(W: int, windows: int, clients: int, seed: int) -> None:
    # Any models that move by lr·q(n)·B at most, any losses of slope B at most: L̄ exceeds the L^n by the term at most.
    rng, lr, B = np.random.default_rng(seed), 0.1, 2.0
    block = rng.uniform(0, 2, (W, clients)) * rng.integers(0, 2, (W, clients))
    block[0, 0] += 0.5
    expected = np.tile(block, (windows, 1))
    moves = lr * B * expected.sum(axis=1) * rng.choice([-1, 1], len(expected))
    models = np.concatenate([[0.0], np.cumsum(moves)[:-1]])
    losses = B * np.abs(models[:, None] - rng.normal(size=clients))
    mean = representation.window_mean(expected, W)
    excess = np.mean(losses @ mean) - np.mean(np.sum(expected * losses, axis=1))
    term = representation.window_term(
        lr=lr,
        local_steps=1,
        window=W,
        gradient=B,
        mean_weight=mean.sum(),
        largest_weight=expected.sum(axis=1).max(),
    )
    assert excess <= term + 1e-12


# ---- Runs -------------------------------------------------------------------------------------------------------


def best(a: np.ndarray, c: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return (weights @ (a * c)) / (weights @ a)


@settings(deadline=None, max_examples=20)
@given(
    K=st.integers(1, 4),
    cycle=st.sampled_from(
        [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2], [0, 3]], [[0, 1, 2, 3]], [[0], [1]]]
    ),
    fair=st.booleans(),
    share=st.floats(0.2, 1.0),
    heterogeneity=st.floats(0.1, 3.0),
    seed=st.integers(0, 10**6),
)
def test_gradients_of_a_run_stay_below(
    aggregate: Callable,
    K: int,
    cycle: list[list[int]],
    fair: bool,
    share: float,
    heterogeneity: float,
    seed: int,
) -> None:
    rng, L, W = np.random.default_rng(seed), 2.0, len(cycle)
    problem = quadratics(rng, num_clients=4, num_parameters=2, L=L, mu=0.3, heterogeneity=heterogeneity)
    a, c, p = problem.curvatures, problem.centres, problem.weights
    who = cycle * (24 // W)
    times = np.array([sum(i in clients for clients in cycle) for i in range(4)])
    d = W / np.maximum(times, 1) * p if fair else rng.uniform(0.2, 2.0, 4)
    expected = np.array([[d[i] * (i in clients) for i in range(4)] for clients in who])
    N, weight, start = len(who), float(expected.sum(axis=1).max()), np.array([3.0, -3.0])
    _, delay = aggregate(problem, start, who, d, 1e-9, K, rng)
    lr = share * min(1, 1 / (3 * max(1, weight) ** 2 * (delay + 1))) / (48 * K * L)
    inner, _ = aggregate(problem, start, who, d, lr, K, rng)
    models = inner[:, :, 0]  # (N, K, D)
    values = np.sum(a * (models[..., None, :] - c) ** 2, axis=-1) / 2  # (N, K, M)
    gradients = np.sum((p @ (a * (models[..., None, :] - c))) ** 2, axis=-1)
    measured = float(gradients.mean())

    mean = representation.window_mean(expected, W)
    surrogate = best(a, c, mean)
    own = np.array([best(a, c, q) for q in expected])
    least = np.sum(a * (own[:, None] - c) ** 2, axis=-1) / 2
    at_surrogate = np.sum(a * (surrogate - c) ** 2, axis=-1) / 2
    residual = max(0.0, float(np.mean(np.sum(expected * (at_surrogate - least), axis=1))))
    shares = expected / expected.sum(axis=1, keepdims=True)
    squares = np.sum((a * (own[:, None] - c)) ** 2, axis=-1)
    constants = Constants(num_clients=4, L=L, distance2=float(np.sum((start - surrogate) ** 2)))
    bound = asynchronous.explicit_bound(
        N,
        constants,
        lr=lr,
        local_steps=K,
        delay=delay,
        residual=residual,
        weight=weight,
        noise=float(np.mean(np.sum(shares * squares, axis=1))),
        squared_noise=float(np.mean(np.sum(shares**2 * squares, axis=1))),
    )
    found = representation.representation(p, expected, least, values.mean(axis=1))
    assert measured <= representation.squared_gradient_bound(
        found, constants, suboptimality=residual + float(bound)
    )
    # Theorem 3: L̄ itself, and ∇L by it.
    slope = float(np.sqrt(np.sum((a * (models[..., None, :] - c)) ** 2, axis=-1).max()))
    slope = max(slope, float(np.sqrt(np.sum((a * (start - c)) ** 2, axis=-1).max())))
    extra = representation.window_term(
        lr=lr, local_steps=K, window=W, gradient=slope, mean_weight=mean.sum(), largest_weight=weight
    )
    gap = float(np.mean(values @ mean) - mean @ at_surrogate)
    assert gap <= bound + extra
    if (mean > 0).all():
        assert measured <= representation.federated_gradient_bound(
            p, mean, at_surrogate, constants, suboptimality=float(bound) + extra
        )
        if fair:
            assert representation.chi2(p, mean) == pytest.approx(0, abs=1e-12)
    else:
        with pytest.raises(AssumptionError, match=r"no aggregation represents type \[2, 3\]"):
            representation.federated_gradient_bound(p, mean, at_surrogate, constants, suboptimality=1.0)


def test_eq_27_as_printed_has_the_wrong_unit() -> None:
    # One client, GD, one step: its ε is ‖θ⁰‖²/(η_l K N) alone (Σ = R = 0); with L = 1000, η_l at its limit, it is too
    # small for a squared gradient.
    L = 1000.0
    c, lr, start = Constants(num_clients=1, L=L, distance2=1.0), 1 / (144 * L), 1.0
    epsilon = float(
        asynchronous.explicit_bound(
            1, c, lr=lr, local_steps=1, delay=0, residual=0.0, noise=0.0, squared_noise=0.0
        )
    )
    measured = (L * start) ** 2
    bound = representation.federated_gradient_bound([1.0], [1.0], [0.0], c, suboptimality=epsilon)
    assert epsilon < measured <= bound


# ---- Corollary 2 ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(a=st.floats(0, 1.5), b=st.floats(0, 1.5), c=st.floats(-0.5, 1.5))
def test_what_converges(a: float, b: float, c: float) -> None:
    found = representation.exponents(window=a, delay=b, decay=c)
    assert found.converges == (max(a, b) < c < 1 and c > 0)
    if a < 1 and b < 1:
        best_c = representation.fastest_decay(window=a, delay=b)
        fastest = representation.exponents(window=a, delay=b, decay=best_c)
        assert fastest.converges
        assert fastest.slowest <= found.slowest + 1e-12
    else:
        assert not found.converges
        with pytest.raises(AssumptionError, match=r"corollary 2: no step size converges for a = "):
            representation.fastest_decay(window=a, delay=b)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [(0.0, 0.0, 0.5), (0.5, 0.2, 0.7), (0.2, 0.6, 0.65), (0.6, 0.0, 0.9), (1.0, 0.0, 0.8), (0.3, 0.0, 1.0)],
)
def test_the_bound_goes_with_the_slowest_term(a: float, b: float, c: float) -> None:
    # Theorem 3 with its numbers, at N and 100 N, for W = N^a, τ = N^b, η_l = N^(−c)/1000.
    constants = Constants(num_clients=4, L=1.0, distance2=1e-6)

    def bound(N: float) -> float:
        lr, delay, window = 1e-3 * N**-c, math.ceil(N**b), math.ceil(N**a)
        explicit = asynchronous.explicit_bound(
            N, constants, lr=lr, local_steps=1, delay=delay, residual=1.0, noise=1.0, squared_noise=1.0
        )
        return float(explicit) + representation.window_term(
            lr=lr, local_steps=1, window=window, gradient=1.0, mean_weight=1.0, largest_weight=1.0
        )

    found = representation.exponents(window=a, delay=b, decay=c)
    # So far out that what falls faster is gone; two terms of nearly the same power need longest.
    slope = math.log(bound(1e62) / bound(1e60)) / math.log(100)
    assert slope == pytest.approx(found.slowest, abs=1e-3)
    assert found.converges == (slope < -5e-3)
