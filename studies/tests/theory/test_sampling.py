"""Fraboni et al., appendix C: draws by enumeration, terms by hand, exact expectations below the bounds."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.theory import asynchronous, representation, sampling
from studies.theory.constants import AssumptionError, Constants, StepSizeError
from studies.theory.problems import Quadratics

BY_HAND = Constants(num_clients=4, L=2.0, distance2=6.0)


def outcomes(kind: str, p: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Every outcome of a draw: its probability, and the weights ω of all clients, (outcomes, M)."""
    M = len(p)
    if kind == "uniform":
        subsets = [list(subset) for subset in itertools.combinations(range(M), size)]
        weights = np.array([[p[i] * M / size * (i in subset) for i in range(M)] for subset in subsets])
        return np.full(len(subsets), 1 / len(subsets)), weights
    sequences = [list(draws) for draws in itertools.product(range(M), repeat=size)]
    weights = np.array([np.bincount(draws, minlength=M) / size for draws in sequences])
    return np.array([np.prod(p[draws]) for draws in sequences]), weights


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["uniform", "multinomial"]),
    M=st.integers(1, 5),
    data=st.data(),
    seed=st.integers(0, 10**6),
)
def test_alpha_and_beta_are_those_of_all_outcomes(kind: str, M: int, data: st.DataObject, seed: int) -> None:
    size = data.draw(st.integers(1, M if kind == "uniform" else 4))
    p = np.random.default_rng(seed).dirichlet(np.ones(M)) * 0.9 + 0.1 / M
    draw = (sampling.uniform_draw if kind == "uniform" else sampling.multinomial_draw)(p, size)
    chance, weights = outcomes(kind, p, size)
    np.testing.assert_allclose(chance @ weights, p)  # unbiased: q = p
    moments = np.einsum("o,oi,oj->ij", chance, weights, weights)
    others = ~np.eye(M, dtype=bool)
    np.testing.assert_allclose(moments[others], (draw.alpha * np.outer(p, p))[others], atol=1e-12)
    gamma = np.diag(moments) - draw.alpha * p**2  # lemma 1
    assert (gamma >= -1e-12).all()
    assert np.max(gamma / p) == pytest.approx(draw.beta, abs=1e-12)  # and no smaller β would do


def test_draws_by_hand() -> None:
    # 2 of 4, p = ¼ each: α = 4·1/(2·3) = 2/3, β = ¼(2 − 2/3) = 1/3; the paper: "α is proportional to m"
    draw = sampling.uniform_draw([0.25] * 4, 2)
    assert (draw.alpha, draw.beta) == pytest.approx((2 / 3, 1 / 3))
    assert sampling.uniform_draw([0.25] * 4, 4) == sampling.ClientDraw(1.0, 0.0)
    assert sampling.uniform_draw([1.0], 1) == sampling.ClientDraw(1.0, 0.0)
    assert sampling.multinomial_draw([0.5, 0.5], 4) == sampling.ClientDraw(0.75, 0.25)
    with pytest.raises(AssumptionError, match=r"appendix C: the sample must be of 1 to 2, is of 3"):
        sampling.uniform_draw([0.5, 0.5], 3)
    with pytest.raises(AssumptionError, match=r"appendix C: weights must be above 0 with sum 1"):
        sampling.multinomial_draw([0.5, 0.6], 1)


def test_terms_by_hand() -> None:
    def values(terms: asynchronous.Terms) -> list[float]:
        return [float(t) for t in (terms.initial, terms.local, terms.noise, terms.staleness, terms.window)]

    # N = 10, K = 3, η_l = .1, Σ = 5: 6/(.1·30) = 2; .1·5
    case = {"lr": 0.1, "local_steps": 3, "noise": 5.0}
    assert values(sampling.centralised_terms(10, BY_HAND, **case)) == pytest.approx([2, 0, 0.5, 0, 0])
    # η_g = ½: 4; .01·4·5; .05·(⅔/4 + ⅓)·5
    draw = sampling.uniform_draw([0.25] * 4, 2)
    terms = sampling.sampled_terms(10, BY_HAND, draw, server_lr=0.5, **case)
    assert values(terms) == pytest.approx([4, 0.2, 0.125, 0, 0])
    # W = 4: .05·5/4 and .05·3·3
    terms = sampling.chosen_terms([10, 20], BY_HAND, window=4, server_lr=0.5, **case)
    assert terms.initial == pytest.approx([4, 2])
    assert [float(t[0]) for t in vars(terms).values()] == pytest.approx([4, 0.2, 0.0625, 0, 0.45])
    with pytest.raises(AssumptionError, match=r"appendix C: the window must be 1 or more, is 0"):
        sampling.chosen_terms(1, BY_HAND, window=0, **case)
    # 2 + 2·.5 with L = 2
    assert sampling.centralised_bound(10, BY_HAND, **case) == pytest.approx(3)
    with pytest.raises(StepSizeError, match=r"eq\. 106: step size 0\.2 is outside \(0, 1/\(4L\) = 0\.125\]"):
        sampling.centralised_bound(10, BY_HAND, lr=0.2, local_steps=3, noise=5.0)


def test_eq_33_is_eq_107_with_everybody() -> None:
    # For η_l = 1/√(KN), up to what O(·) hides: (K−1)²/K is K − 1 but for a factor in [½, 1].
    N, K, noise = 50, 4, 3.0
    sync = asynchronous.synchronous_terms(N, BY_HAND, local_steps=K, noise=noise)
    everybody = sampling.uniform_draw([0.25] * 4, 4)
    sampled = sampling.sampled_terms(N, BY_HAND, everybody, lr=1 / np.sqrt(K * N), local_steps=K, noise=noise)
    assert sampled.initial == pytest.approx(sync.initial)
    assert sampled.noise == pytest.approx(sync.noise)
    assert 0.5 <= sampled.local / sync.local <= 1


def second_moments(curvature: float, lr: float, start: float, noise: float, rounds: int) -> np.ndarray:
    """E‖θ^n − θ*‖² of θ ← θ − η(a(θ − θ*) + ξ), E ξ = 0, E ξ² = noise: exact, (rounds,)."""
    moments = [start**2]
    for _ in range(rounds - 1):
        moments.append((1 - lr * curvature) ** 2 * moments[-1] + lr**2 * noise)
    return np.array(moments)


@pytest.mark.parametrize("noise", [0.0, 4.0])
@pytest.mark.parametrize("share", [0.1, 1.0])
def test_centralised_learning_stays_below(noise: float, share: float) -> None:
    a, N = 2.0, 400
    lr = share / (4 * a)
    for start in (0.0, 3.0):
        gaps = a / 2 * second_moments(a, lr, start, noise, N)
        c = Constants(num_clients=1, L=a, distance2=start**2)
        bound = sampling.centralised_bound(N, c, lr=lr, local_steps=1, noise=noise)
        assert gaps.mean() <= bound
        if noise and not start:  # both terms are needed
            assert gaps.mean() > sampling.centralised_bound(N, c, lr=lr, local_steps=1, noise=0.0)
        if start and not noise:
            at_best = Constants(num_clients=1, L=a, distance2=0.0)
            assert gaps.mean() > sampling.centralised_bound(N, at_best, lr=lr, local_steps=1, noise=noise)


@pytest.mark.parametrize(
    ("kind", "size"), [("uniform", 1), ("uniform", 5), ("multinomial", 1), ("multinomial", 3)]
)
def test_a_sampled_round_stays_below_theorem_1(kind: str, size: int) -> None:
    # Equal curvatures and weights: Σ ω_i = 1, so that a drawn round is one of all clients plus noise of known size.
    M, a, N, start = 60, 2.0, 3000, 1.0
    centres = np.random.default_rng(2).normal(size=M)
    slopes = a * (centres.mean() - centres)  # ∇L_i(θ*)
    p = np.full(M, 1 / M)
    draw = (sampling.uniform_draw if kind == "uniform" else sampling.multinomial_draw)(p, size)
    spread = float(np.mean(slopes**2))
    # Var of a mean of m: of values without replacement, or of independent ones.
    noise = spread / size * ((M - size) / (M - 1) if kind == "uniform" else 1)
    assert noise == pytest.approx(draw.beta * spread)  # lemma 1, since Σ p_i ∇L_i(θ*) = 0
    lr = 1 / (48 * a * 3)
    case = {
        "lr": lr,
        "local_steps": 1,
        "delay": 0,
        "residual": 0.0,
        "noise": spread,
        "squared_noise": spread / M,
    }
    for at in (0.0, start):
        gap = a / 2 * float(second_moments(a, lr, at, noise, N).mean())
        c = Constants(num_clients=M, L=a, distance2=at**2)
        assert gap <= asynchronous.explicit_bound(N, c, alpha=draw.alpha, beta=draw.beta, **case)
        if not at and size == 1:  # as if all took part, it is too small
            assert gap > asynchronous.explicit_bound(N, c, alpha=1.0, beta=0.0, **case)


@pytest.mark.parametrize("K", [1, 3])
def test_chosen_clients_stay_below_with_the_window(aggregate: Callable, K: int) -> None:
    # Section C.3: clients 0 and 1 by a rule three times in four, the others to make up for it: q_i = p_i over W = 4.
    problem = Quadratics(np.full((4, 1), 2.0), [[0.0], [1.0], [3.0], [-2.0]])
    who, start = [[0, 1], [0, 1], [0, 1], [2, 3]] * 12, np.array([4.0])
    d = np.array([1 / 3, 1 / 3, 1.0, 1.0])
    expected = np.array([[d[i] * (i in clients) for i in range(4)] for clients in who])
    mean = representation.window_mean(expected, 4)
    assert mean == pytest.approx(problem.weights)
    rng = np.random.default_rng(0)
    _, delay = aggregate(problem, start, who, d, 1e-9, K, rng)
    assert delay == 3
    lr = 1 / (3 * 4 * 4) / (48 * K * 2.0)
    inner, _ = aggregate(problem, start, who, d, lr, K, rng)
    best = problem.minimiser()
    gap = float(np.mean((inner - best) ** 2))  # ½·2·(θ − θ*)²
    own = np.array([q @ problem.centres / q.sum() for q in expected])
    values = (own[:, None, 0] - problem.centres[:, 0]) ** 2
    residual = float(np.mean(np.sum(expected * ((best[0] - problem.centres[:, 0]) ** 2 - values), axis=1)))
    shares = expected / expected.sum(axis=1, keepdims=True)
    bound = asynchronous.explicit_bound(
        len(who),
        Constants(num_clients=4, L=2.0, distance2=float((start[0] - best[0]) ** 2)),
        lr=lr,
        local_steps=K,
        delay=delay,
        residual=residual,
        noise=float(np.mean(np.sum(shares * 4 * values, axis=1))),
        squared_noise=float(np.mean(np.sum(shares**2 * 4 * values, axis=1))),
        weight=2.0,
    )
    slope = float(np.abs(2 * (np.array([start[0], inner.min()])[:, None] - problem.centres[:, 0])).max())
    extra = representation.window_term(
        lr=lr, local_steps=K, window=4, gradient=slope, mean_weight=1.0, largest_weight=2.0
    )
    assert gap <= float(bound) + extra
