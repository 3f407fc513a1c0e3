"""001: the bounds by hand, the recursion behind the corrected theorem F.2, and FedAvg below them."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.theory.constants import AssumptionError, Constants, StepSizeError
from research.theory.lojasiewicz import drift_bound, lojasiewicz_bound, pl_bound
from research.theory.problems import quadratics

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
    H=st.integers(1, 10),
    zeta2=st.floats(0, 3),
    sigma2=st.floats(0, 3),
)
def test_pl_is_at_least_its_recursion(mu: float, share: float, H: int, zeta2: float, sigma2: float) -> None:
    # Eq. 39 with eq. 19: s' = (1 − ηHμ/4) s + 2ηHζ² + 4η²HLσ²/C + 3η³H(H−1)L²σ², step by step.
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


def test_lojasiewicz_by_hand() -> None:
    # H = 1, α = 2, η = 1, μ = ½: s = 8: 8/(½·R·1·8/4 + 1) + 2(.5/.5)^½ + 2(2·1·2/(4·½))^½ = 8/(R+1) + 2 + 2√2
    bound = lojasiewicz_bound([0, 3], BY_HAND, mu=0.5, exponent=2.0, lr=1.0, local_steps=1)
    assert bound == pytest.approx([10 + 2 * 2**0.5, 4 + 2 * 2**0.5])
    # H = 2, α = 2, η = 1/144: κ = 2·½/(144·4) = 1/576: 8/(1 + 8R/576) + 2(8)^½ + 2(16·2/(144·4·½))^½ = … + 2(1/9)^½
    bound = lojasiewicz_bound(72, BY_HAND, mu=0.5, exponent=2.0, lr=1 / 144, local_steps=2)
    assert bound == pytest.approx(8 / 2 + 2 * 8**0.5 + 2 / 3)
    # α = 3/2, R^(1/(α−1)) = R²: η = 1/144, H = 2: 8/(1 + R²·8·(1/1152)²); σ = ζ = 0.
    c = Constants(num_clients=4, L=1.0, mean_zeta2=0.0, Delta=8.0, Gamma=0.0)
    bound = lojasiewicz_bound(1152, c, mu=0.5, exponent=1.5, lr=1 / 144, local_steps=2)
    assert bound == pytest.approx(8 / 9)


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
    H=st.integers(1, 8),
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
        rng, num_clients=num_clients, num_parameters=2, L=1.0, mu=0.2, heterogeneity=heterogeneity, shared=True
    )  # fmt: skip
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
