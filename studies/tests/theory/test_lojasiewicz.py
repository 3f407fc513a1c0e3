"""001: the bounds by hand, the recursion behind the corrected theorem F.2, and FedAvg below them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from studies.reproduce.floor.losses import PowerLosses
from studies.theory.constants import AssumptionError, Constants, StepSizeError
from studies.theory.lojasiewicz import drift_bound, largest_gap, lojasiewicz_bound, pl_bound
from studies.theory.problems import quadratics

BY_HAND = Constants(num_clients=4, L=1.0, sigma2=2.0, mean_zeta2=0.5, Delta=6.0, Gamma=2.0)


def test_pl_by_hand() -> None:
    # η = .025, H = 2, μ = 1: contraction 1 − .0125; F_0 − F* = 8; 8ζ²/μ = 4; 16·.025·2/4 = .2; 12·.025²·1·2 = .015
    bound = pl_bound([0, 1], BY_HAND, mu=1.0, lr=0.025, local_steps=2)
    assert bound == pytest.approx([8 + 4.215, 8 * 0.9875 + 4.215])
    # Half the μ doubles all three constant terms: the printed theorem would double only the first.
    assert pl_bound(0, BY_HAND, mu=0.5, lr=0.025, local_steps=2) == pytest.approx(8 + 8.43)


@settings(deadline=None, max_examples=50)
@given(
    mu=st.floats(0.01, 2.0),
    share=st.floats(0.05, 1.0),
    H=st.integers(2, 10),
    zeta2=st.floats(0, 3),
    sigma2=st.floats(0, 3),
)
def test_pl_is_at_least_its_recursion(mu: float, share: float, H: int, zeta2: float, sigma2: float) -> None:
    # H > 1. Eq. 39 with eq. 19: s' = (1 − ηHμ/4) s + 2ηHζ² + 4η²HLσ²/C + 3η³H(H−1)L²σ², step by step.
    lr = share / (18 * H)
    c = Constants(num_clients=4, L=1.0, sigma2=sigma2, mean_zeta2=zeta2, Delta=3.0, Gamma=1.0)
    s, recursion = 4.0, [4.0]
    for _ in range(200):
        s += -lr * H * mu / 4 * s + 2 * lr * H * zeta2 + lr**2 * H * sigma2 + 3 * lr**3 * H * (H - 1) * sigma2
        recursion.append(s)
    assert (pl_bound(np.arange(201), c, mu=mu, lr=lr, local_steps=H) >= np.array(recursion) - 1e-12).all()
    # And it is what the recursion tends to: its fixed point is the constant part.
    fixed = (8 * zeta2 + 16 * lr * sigma2 / 4 + 12 * lr**2 * (H - 1) * sigma2) / mu
    assert pl_bound(10**9, c, mu=mu, lr=lr, local_steps=H) == pytest.approx(fixed)


@given(mu=st.floats(0.01, 2), share=st.floats(0.01, 1), zeta2=st.floats(0, 3), sigma2=st.floats(0, 3))
def test_pl_of_one_local_step_is_the_descent_of_one_step(
    mu: float, share: float, zeta2: float, sigma2: float
) -> None:
    # L = 1, η ≤ ½, s' ≤ s − (η/2)‖∇F‖² + η²Lσ²/C with ‖∇F‖² ≥ μ s − ζ²; its fixed point is ζ²/μ + 2Lησ²/(Cμ).
    lr = share / 2
    c = Constants(num_clients=4, L=1.0, sigma2=sigma2, mean_zeta2=zeta2, Delta=3.0, Gamma=1.0)
    s, recursion = 4.0, [4.0]
    for _ in range(200):
        s += -lr * mu / 2 * s + lr * zeta2 / 2 + lr**2 * sigma2 / 4
        recursion.append(s)
    assert (pl_bound(np.arange(201), c, mu=mu, lr=lr, local_steps=1) >= np.array(recursion) - 1e-9).all()
    limit = pl_bound(10**9, c, mu=mu, lr=lr, local_steps=1)
    assert limit == pytest.approx((zeta2 + 2 * lr * sigma2 / 4) / mu)
    with pytest.raises(StepSizeError):
        pl_bound(1, c, mu=mu, lr=0.6, local_steps=1)


def test_lojasiewicz_by_hand() -> None:
    # H = 1, α = 2, η = 1, μ = ¼: s = 8: 8/(¼·R·1·8/4 + 1) + 2(.5/¼)^½ + 2(2·1·2/(4·¼))^½ = 8/(R/2+1) + 2√2 + 4
    bound = lojasiewicz_bound([0, 6], BY_HAND, mu=0.25, exponent=2.0, lr=1.0, local_steps=1)
    assert bound == pytest.approx([12 + 2 * 2**0.5, 6 + 2 * 2**0.5])
    # H = 2, α = 2, η = 1/144: κ = 2·¼/(144·4) = 1/1152: 8/(1 + 8R/1152) + 2(16)^½ + 2(16·2/(144·4·¼))^½ = … + 2√2/3
    bound = lojasiewicz_bound(144, BY_HAND, mu=0.25, exponent=2.0, lr=1 / 144, local_steps=2)
    assert bound == pytest.approx(8 / 2 + 8 + 2 * 2**0.5 / 3)
    # α = 3/2, R^(1/(α−1)) = R²: η = 1/144, H = 2: 8/(1 + R²·8·(1/1152)²); σ = ζ = 0.
    c = Constants(num_clients=4, L=1.0, mean_zeta2=0.0, Delta=8.0, Gamma=0.0)
    bound = lojasiewicz_bound(1152, c, mu=0.5, exponent=1.5, lr=1 / 144, local_steps=2)
    assert bound == pytest.approx(8 / 9)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_lojasiewicz_near_an_exponent_of_1(local_steps: int) -> None:
    # α = 1.01: 1/(α−1) = 100, and RηHμ(α−1)/4 = R/72,000: 2 after 144,000 rounds.
    c = Constants(num_clients=10, L=1.0, mean_zeta2=0.0, Delta=1.0, Gamma=0.0)
    rounds = np.array([0, 1e4, 144_000, 1e12])
    terms = {"mu": 1.0, "exponent": 1.01, "lr": 1 / 180 / local_steps, "local_steps": local_steps}
    grown = rounds / 72_000
    small = np.minimum(grown, 1e3)  # beyond, nothing is left
    expected = (1 + small) ** -100 if local_steps == 1 else 1 / (1 + small**100)
    bound = lojasiewicz_bound(rounds, c, **terms)
    assert bound == pytest.approx(expected, rel=1e-9, abs=1e-299)
    none_left = replace(c, Delta=0.0)
    assert lojasiewicz_bound(rounds, none_left, **terms).tolist() == [0, 0, 0, 0]


def test_drift_by_hand() -> None:
    # η = .1, H = 3: 4·.01·4·(9 + .5) + 4·.01·2·2
    assert drift_bound(9.0, BY_HAND, lr=0.1, local_steps=3) == pytest.approx(1.52 + 0.16)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: pl_bound(1, BY_HAND, mu=1, lr=0.03, local_steps=2),
            r"001 theorem F.2: .*0.03 .*\(18LH\) = 0.027",
        ),
        (
            lambda: lojasiewicz_bound(1, BY_HAND, mu=1, exponent=2, lr=1.01, local_steps=1),
            r"001 lemma F.3: .*1/L = 1\]",
        ),
        (
            lambda: lojasiewicz_bound(1, BY_HAND, mu=1, exponent=2, lr=0.02, local_steps=2),
            r"001 theorem F.4: .*1/\(18CLH\) = 0.00694",
        ),
        (lambda: drift_bound(1, BY_HAND, lr=0.3, local_steps=2), r"001 lemma F.1: .*1/\(2LH\) = 0.25"),
    ],
)
def test_steps_out_of_range(call: Callable[[], object], text: str) -> None:
    with pytest.raises(StepSizeError, match=text):
        call()


@pytest.mark.parametrize("exponent", [1.0, 2.1])
def test_exponents_out_of_range(exponent: float) -> None:
    with pytest.raises(AssumptionError, match=rf"the exponent must be in \(1, 2\], is {exponent:g}"):
        lojasiewicz_bound(1, BY_HAND, mu=1, exponent=exponent, lr=0.001, local_steps=1)


@settings(deadline=None, max_examples=30)
@given(
    num_clients=st.integers(1, 6),
    H=st.integers(2, 8),
    share=st.floats(0.1, 1.0),
    heterogeneity=st.floats(0.0, 4.0),
    sigma2=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 10**6),
)
def test_fedavg_stays_below(
    drive: Callable, num_clients: int, H: int, share: float, heterogeneity: float, sigma2: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    problem = quadratics(
        rng,
        num_clients=num_clients,
        num_parameters=2,
        L=1.0,
        mu=0.2,
        heterogeneity=heterogeneity,
        shared=True,
    )
    lr, start = share / (18 * H), np.array([4.0, -4.0])
    run = drive(problem, start, 40, H, lr, sigma2=sigma2, seed=seed, repeats=200 if sigma2 else 1)
    pulls = problem.curvatures[0] * (problem.centres - problem.centres.mean(axis=0))
    mean_zeta2 = float(np.mean(np.sum(pulls**2, axis=1)))  # the same everywhere
    # f_c* = 0: F − F* is F itself, and F(θ_0) = Δ + Γ.
    values = 0.5 * np.mean(
        np.sum(problem.curvatures * (run.models[..., None, :] - problem.centres) ** 2, axis=-1), axis=(0, 2)
    )
    c = Constants(
        num_clients=num_clients, L=1.0, sigma2=sigma2, mean_zeta2=mean_zeta2, Delta=values[0], Gamma=0.0
    )
    rounds = np.arange(41)
    assert (values <= pl_bound(rounds, c, mu=0.4, lr=lr, local_steps=H) + 1e-12).all()
    # Lemma F.1 with the gradient at the start of every round.
    gradients = np.mean(problem.curvatures * (run.models[:, :-1, None] - problem.centres), axis=2)
    squares = np.sum(gradients**2, axis=-1)  # (R, T)
    moved = np.sum((run.locals[:, :, 1:H] - run.locals[:, :, :1]) ** 2, axis=(2, 4)).mean(axis=2) / H
    bound = drift_bound(squares, c, lr=lr, local_steps=H)
    assert (moved.mean(axis=0) <= bound.mean(axis=0) + 1e-12).all()


@settings(deadline=None, max_examples=20)
@given(H=st.integers(1, 6), share=st.floats(0.1, 1.0), seed=st.integers(0, 10**6))
def test_fedavg_on_quartics_stays_below(H: int, share: float, seed: int) -> None:
    # f_c(w) = w⁴/4 for all: ‖∇f‖² = w⁶ = 8 f^{3/2}: α = 3/2, μ = 8. It is 3-smooth on |w| ≤ 1, where FedAvg stays.
    C, w, values = 3, 1.0, [0.25]
    lr = share / (3 if H == 1 else 18 * C * 3 * H)
    for _ in range(300):
        for _ in range(H):
            w -= lr * w**3
        values.append(w**4 / 4)
    c = Constants(num_clients=C, L=3.0, mean_zeta2=0.0, Delta=0.25, Gamma=0.0)
    bound = lojasiewicz_bound(np.arange(301), c, mu=8.0, exponent=1.5, lr=lr, local_steps=H)
    assert (np.array(values) <= bound + 1e-12).all()


# ---- 1 < α ≤ 2 --------------------------------------------------------------------------------------------------


def test_the_largest_gap() -> None:
    # w⁴/4 on |w| ≤ r: L = 3r², μ = 8: (6r²/8)² = 9r⁴/16, and it is r⁴/4 there. For ½w² on |w| ≤ r with α = 2 and
    # μ = 2/(r²/2), the largest that holds there, the gap is reached: (2/μ) = r²/2.
    assert largest_gap(Constants(num_clients=1, L=12.0), mu=8.0, exponent=1.5) == pytest.approx(9.0)
    assert largest_gap(Constants(num_clients=1, L=1.0), mu=4 / 9, exponent=2.0) == pytest.approx(4.5)
    assert largest_gap(Constants(num_clients=1, L=1.0), mu=1e-3, exponent=1 + 1e-9) == pytest.approx(
        np.exp(700)
    )
    with pytest.raises(
        AssumptionError, match=r"001 lemma F\.3: with L, mu and the exponent F − F\* is 4 at most, not 8"
    ):
        lojasiewicz_bound(1, BY_HAND, mu=0.5, exponent=2.0, lr=1.0, local_steps=1)


@settings(deadline=None, max_examples=60)
@given(
    alpha=st.floats(1.05, 2.0),
    share=st.floats(0.05, 1.0),
    H=st.sampled_from([1, 2, 5]),
    start=st.floats(0.01, 1.0),
    zeta2=st.floats(0, 1),
    sigma2=st.floats(0, 3),
)
def test_closed_forms_are_at_least_their_recursions(
    alpha: float, share: float, H: int, start: float, zeta2: float, sigma2: float
) -> None:
    # Eq. 40: s' = s − (ημ/2) s^α + (η/2)ζ² + Lη²σ²/C; eqs. 39 and 19 for H > 1, with all of their noise.
    C, mu = 4, 2.0
    lr = share * (1.0 if H == 1 else 1 / (18 * C * H))
    c = Constants(num_clients=C, L=1.0, sigma2=sigma2, mean_zeta2=zeta2, Delta=start, Gamma=0.0)
    rate = lr * mu / 2 if H == 1 else lr * H * mu / 4
    more = lr / 2 * zeta2 + lr**2 * sigma2 / C
    if H > 1:
        more = 2 * lr * H * zeta2 + 4 * lr**2 * H * sigma2 / C + 3 * lr**3 * H * (H - 1) * sigma2
    s, recursion = start, [start]
    for _ in range(400):
        s = min(1.0, s - rate * s**alpha + more)  # 1 is the largest gap
        recursion.append(s)
    bound = lojasiewicz_bound(np.arange(401), c, mu=mu, exponent=alpha, lr=lr, local_steps=H)
    assert (bound >= np.array(recursion) - 1e-12).all()


def test_theorem_f4_is_sharp_for_its_recursion() -> None:
    # α = 2, no noise, alike clients: s' = s − κs² is s/(1 + κRs) as κ → 0. A tenth more μ in it is too much.
    c = Constants(num_clients=1, L=1.0, mean_zeta2=0.0, Delta=1.0, Gamma=0.0)
    lr, H, mu, R = 1e-3, 2, 1.0, 50_000
    s = 1.0
    for _ in range(R):
        s -= lr * H * mu / 4 * s**2
    bound = lojasiewicz_bound(R, c, mu=mu, exponent=2.0, lr=lr, local_steps=H)
    assert 0.99 * bound < s <= bound
    assert s > lojasiewicz_bound(R, c, mu=1.1 * mu, exponent=2.0, lr=lr, local_steps=H)


def fedavg(
    losses: PowerLosses,
    start: np.ndarray,
    rounds: int,
    H: int,
    lr: float,
    sigma: float,
    seed: int,
    repeats: int,
) -> tuple[np.ndarray, float]:
    """Global models, (R, T + 1, D), and the largest distance of any local model to any optimum.

    The noise has length σ and a random direction: models stay in a region.
    """
    rng, w = np.random.default_rng(seed), np.tile(start, (repeats, 1))
    models, reach = [w], 0.0
    for _ in range(rounds):
        local = losses.at(w)
        for _ in range(H):
            reach = max(reach, float(np.linalg.norm(local[..., None, :] - losses.optima, axis=-1).max()))
            noise = rng.normal(size=local.shape)
            noise *= sigma / np.linalg.norm(noise, axis=-1, keepdims=True)
            local = local - lr * (losses.gradients(local) + noise)
        w = local.mean(axis=1)
        models.append(w)
    return np.stack(models, axis=1), reach


def constants_of(losses: PowerLosses, models: np.ndarray, sigma: float) -> tuple[Constants, np.ndarray]:
    """Constants for a run's models, and E F − F* by round: the mean of the clients' minima, which are 0."""
    points = losses.at(models)
    gradients = losses.gradients(points)
    spread = np.mean(np.sum((gradients - gradients.mean(axis=-2, keepdims=True)) ** 2, axis=-1), axis=-1)
    values = losses.values(points).mean(axis=(0, 2))
    c = Constants(
        num_clients=losses.shape[0],
        L=losses.L,
        sigma2=sigma**2,
        mean_zeta2=float(spread.max()),
        Delta=values[0],
        Gamma=0.0,
    )
    return c, values


@settings(deadline=None, max_examples=25)
@given(
    power=st.sampled_from([2.2, 3.0, 4.0, 8.0]),
    num_clients=st.integers(1, 4),
    H=st.sampled_from([1, 2, 6]),
    share=st.floats(0.1, 1.0),
    spread=st.sampled_from([0.0, 0.3]),
    sigma=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_fedavg_on_powers_stays_below(
    power: float, num_clients: int, H: int, share: float, spread: float, sigma: float, seed: int
) -> None:
    # α = 2 − 2/p: 1.09, 1.33, 1.5, 1.75.
    rng = np.random.default_rng(seed)
    optima = spread * rng.uniform(-1, 1, (num_clients, 2))
    losses = PowerLosses(power, rng.uniform(0.3, 1.0, num_clients), optima, reach=2.0)
    lr = share / (losses.L * (1 if H == 1 else 18 * num_clients * H))
    models, reach = fedavg(losses, np.array([0.9, -0.9]), 150, H, lr, sigma, seed, 60 if sigma else 1)
    assert reach <= 2  # within the region of L
    c, values = constants_of(losses, models, sigma)
    bound = lojasiewicz_bound(np.arange(151), c, mu=losses.mu, exponent=losses.exponent, lr=lr, local_steps=H)
    assert (values <= bound).all()


@settings(deadline=None, max_examples=15)
@given(
    alpha=st.floats(1.01, 2.0),
    H=st.sampled_from([1, 4]),
    sigma=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_fedavg_on_quadratics_stays_below_for_every_exponent(
    drive: Callable, alpha: float, H: int, sigma: float, seed: int
) -> None:
    # On f_c ≤ B a quadratic of curvatures μ₀ to 1 has ‖∇f_c‖² ≥ 2μ₀ f_c ≥ 2μ₀ B^(1−α) f_c^α: every α, up to 2.
    rng = np.random.default_rng(seed)
    problem = quadratics(rng, num_clients=3, num_parameters=2, L=1.0, mu=0.3, heterogeneity=0.5, shared=True)
    lr, start = 1.0 if H == 1 else 1 / (18 * 3 * H), np.array([2.0, -2.0])
    run = drive(problem, start, 80, H, lr, sigma2=sigma**2, seed=seed, repeats=200 if sigma else 1)
    each = 0.5 * np.sum(problem.curvatures * (run.locals - problem.centres) ** 2, axis=-1)
    B = float(max(each.max(), np.max(problem.values(start))))
    values = 0.5 * np.mean(
        np.sum(problem.curvatures * (run.models[..., None, :] - problem.centres) ** 2, axis=-1), axis=(0, 2)
    )
    pulls = problem.curvatures[0] * (problem.centres - problem.centres.mean(axis=0))
    c = Constants(
        num_clients=3,
        L=1.0,
        sigma2=sigma**2,
        mean_zeta2=float(np.mean(np.sum(pulls**2, axis=1))),
        Delta=values[0],
        Gamma=0.0,
    )
    mu = 2 * 0.3 * B ** (1 - alpha)
    bound = lojasiewicz_bound(np.arange(81), c, mu=mu, exponent=alpha, lr=lr, local_steps=H)
    assert (values <= bound).all()


@pytest.mark.parametrize("H", [1, 5])
def test_every_term_is_needed(H: int) -> None:
    optima = np.array([[0.5, 0.0], [-0.5, 0.0]])
    alike = PowerLosses(4.0, np.ones(2), np.zeros((2, 2)), reach=1.0)
    unlike = PowerLosses(4.0, np.ones(2), optima, reach=2.0)

    def run(
        losses: PowerLosses, start: list[float], rounds: int, sigma: float, faster: int = 1, **wrong: float
    ) -> None:
        lr = 1 / (losses.L * (1 if H == 1 else 18 * 2 * H))
        models, reach = fedavg(losses, np.array(start), rounds, H, lr, sigma, 0, 200 if sigma else 1)
        assert reach <= (1 if losses is alike else 2)
        c, values = constants_of(losses, models, sigma)
        case = {"mu": losses.mu, "exponent": 1.5, "lr": lr, "local_steps": H}
        assert values[-1] <= lojasiewicz_bound(rounds, c, **case)
        assert values[-1] > lojasiewicz_bound(faster * rounds, replace(c, **wrong), **case)

    run(
        alike, [0.8, 0.0], 400 if H == 1 else 4000, 0.0, faster=10
    )  # ten times the rate is ten times the rounds
    run(unlike, [0.0, 0.0], 50, 0.0, mean_zeta2=0.0, Delta=0.0)  # at the minimiser of F, which isn't F*
    run(alike, [0.0, 0.0], 50, 0.3, sigma2=0.0)
