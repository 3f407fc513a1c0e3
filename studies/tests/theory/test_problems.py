"""Problems: minima, gradients and constants against independent means; and what estimators make of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from studies.theory import estimates
from studies.theory.constants import AssumptionError
from studies.theory.problems import ClientData, FrozenSlope, Logistic, Problem, Quadratics, quadratics


def some_clients(
    num_clients: int = 3, rows: int = 30, features: int = 4, classes: int = 3
) -> list[ClientData]:
    rng = np.random.default_rng(11)
    return [
        ClientData(rng.normal(i / 2, 1, (rows + i, features)), rng.integers(0, classes, rows + i))
        for i in range(num_clients)
    ]


@pytest.fixture(scope="module")
def logistic() -> Logistic:
    return Logistic(some_clients(), 3, l2=0.1, weights=[0.5, 0.3, 0.2])


def torch_losses(problem: Logistic, w: torch.Tensor) -> torch.Tensor:
    """The same losses by PyTorch, with the parameters of an nn.Linear: weight, then bias."""
    d = problem.clients[0].x.shape[1]
    weight, bias = w[: 3 * d].reshape(3, d), w[3 * d :]
    losses = [
        torch.nn.functional.cross_entropy(torch.tensor(c.x) @ weight.T + bias, torch.tensor(c.y))
        for c in problem.clients
    ]
    return torch.stack(losses) + problem.l2 / 2 * (w @ w)


# ---- Quadratics -------------------------------------------------------------------------------------------------


def test_quadratics_by_hand() -> None:
    # f_1 = ½(w−1)², f_2 = (w−4)², p = (¼, ¾): w* = (1·1 + 6·4)/7 = 25/7… in parts: (¼·1 + ¾·2·4)/(¼ + 1.5) = 25/7
    problem = Quadratics([[1.0], [2.0]], [[1.0], [4.0]], [0.25, 0.75])
    assert problem.minimiser() == pytest.approx([25 / 7])
    assert problem.values(np.array([3.0])) == pytest.approx([2.0, 1.0])
    assert problem.gradients(np.array([3.0])) == pytest.approx(np.array([[2.0], [-2.0]]))
    assert problem.value(np.array([3.0])) == pytest.approx(1.25)
    assert problem.gradient(np.array([3.0])) == pytest.approx([-1.0])
    assert (problem.L, problem.mu, problem.zeta2) == (2.0, 1.0, float("inf"))
    # Γ = f*: ¼·½·(18/7)² + ¾·(3/7)²
    assert estimates.gamma(problem) == pytest.approx((18 / 7) ** 2 / 8 + 0.75 * 9 / 49)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([[1.0]], [[1.0, 2.0]]), r"curvatures \(1, 1\), centres \(1, 2\): must be"),
        (([[0.0]], [[1.0]]), r"curvatures: must be above 0, the smallest is 0\.0"),
        (([[1.0]], [[1.0]], [0.5]), r"weights: must be 1 numbers of 0 or more with sum 1, are \[0\.5\]"),
    ],
)
def test_quadratics_refuse(arguments: tuple[list[list[float]], ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Quadratics(*arguments)


def test_drawn_quadratics_have_what_was_asked_for() -> None:
    rng = np.random.default_rng(0)
    problem = quadratics(rng, num_clients=5, num_parameters=3, L=4.0, mu=0.5, heterogeneity=0.0)
    assert pytest.approx(4.0) == problem.L
    assert problem.mu == pytest.approx(0.5)
    assert estimates.gamma(problem) == pytest.approx(0.0)  # all want w = 1
    assert problem.minimiser() == pytest.approx(np.ones(3))


# ---- Logistic regression ----------------------------------------------------------------------------------------


def test_values_and_gradients_are_pytorchs(logistic: Logistic) -> None:
    w = np.random.default_rng(0).normal(size=15)
    expected = torch_losses(logistic, torch.tensor(w))
    assert logistic.values(w) == pytest.approx(expected.numpy(), abs=1e-12)
    jacobian = torch.autograd.functional.jacobian(lambda v: torch_losses(logistic, v), torch.tensor(w))
    np.testing.assert_allclose(logistic.gradients(w), jacobian.numpy(), atol=1e-12)
    np.testing.assert_allclose(logistic.client_gradient(1, w), jacobian[1].numpy(), atol=1e-12)
    hessian = torch.autograd.functional.hessian(
        lambda v: torch_losses(logistic, v) @ torch.tensor(logistic.weights), torch.tensor(w)
    )
    v = np.random.default_rng(1).normal(size=15)
    np.testing.assert_allclose(logistic.hessian_product(w)(v), hessian.numpy() @ v, atol=1e-12)


def test_it_is_solved_to_1e_12(logistic: Logistic) -> None:
    best = logistic.minimiser()
    assert np.linalg.norm(logistic.gradient(best)) <= 1e-12
    reference = minimize(
        logistic.value, np.zeros(15), jac=logistic.gradient, method="BFGS", options={"gtol": 1e-9}
    )
    np.testing.assert_allclose(best, reference.x, atol=1e-7)
    for i, own in enumerate(logistic.minimisers()):
        assert np.linalg.norm(logistic.gradients(own)[i]) <= 1e-12
    # μ-convexity: a gradient of 1e-12 is at most 1e-11 from the minimum.
    assert logistic.mu == 0.1


def test_smoothness_bounds_every_curvature(logistic: Logistic) -> None:
    for seed in range(5):
        w = np.random.default_rng(seed).normal(0, seed, 15)
        smallest, largest = estimates.curvature_range(logistic, w)
        assert logistic.mu - 1e-6 <= smallest <= largest <= logistic.L + 1e-6


def test_a_problem_without_a_minimum_says_so() -> None:
    separable = ClientData(np.array([[-1.0], [1.0]]), np.array([0, 1]))
    for ask in (Logistic([separable], 2, l2=0.0).minimiser, Logistic([separable], 2, l2=0.0).minimisers):
        with pytest.raises(AssumptionError, match="l2 = 0: without a regulariser"):
            ask()
    with pytest.raises(AssumptionError, match="without a regulariser, data of one class have no minimum"):
        FrozenSlope([ClientData(np.ones((2, 1)), np.array([1, 1]))], [1.0]).minimiser()


def test_sampling_variance_is_that_of_every_batch(logistic: Logistic) -> None:
    # All pairs of rows of a small client: the mean squared distance of their mean gradient to the whole one.
    clients = some_clients(1, rows=6)
    problem, w = Logistic(clients, 3, l2=0.1), np.random.default_rng(2).normal(size=15)
    whole = problem.gradients(w)[0]
    pairs = [[i, j] for i in range(6) for j in range(i)]
    batches = [Logistic([ClientData(clients[0].x[pair], clients[0].y[pair])], 3, l2=0.1) for pair in pairs]
    distances = [np.sum((batch.gradients(w)[0] - whole) ** 2) for batch in batches]
    assert problem.sampling_variances(w, 2) == pytest.approx([np.mean(distances)])
    assert problem.sampling_variances(w, 6) == pytest.approx([0.0])
    assert problem.sampling_variances(w, 0) == pytest.approx([0.0])


def test_frozen_slope_by_hand() -> None:
    # v = 1, x = (0, 1), y = (0, 1), b = 0: f' = ½[σ(0) − 0 + σ(1) − 1] = ½(½ − 0.26894…)
    client = ClientData(np.array([[0.0], [1.0]]), np.array([0, 1]))
    problem = FrozenSlope([client, client], [1.0])
    assert problem.gradients(np.zeros(1))[:, 0] == pytest.approx([0.11552928931500244] * 2)
    assert problem.values(np.zeros(1)) == pytest.approx([(np.log(2) + np.log1p(np.exp(-1))) / 2] * 2)
    # σ(b) + σ(b + 1) = 1 at b = −½, by symmetry.
    assert problem.minimiser() == pytest.approx([-0.5], abs=1e-12)
    assert problem.minimisers() == pytest.approx(np.full((2, 1), -0.5), abs=1e-12)
    # Batches of one of two rows: the variance of the two gradients, (a − b)²/4.
    a, b = 0.5, 1 / (1 + np.exp(-1.0)) - 1
    assert problem.sampling_variances(np.zeros(1), 1) == pytest.approx([(a - b) ** 2 / 4] * 2)
    _, largest = estimates.curvature_range(problem, np.array([-0.5]))
    assert largest <= 0.25
    assert problem.L == 0.25


# ---- Estimators -------------------------------------------------------------------------------------------------


def test_constants_by_hand() -> None:
    # f_i = ½(w − c_i)², c = (0, 2): w* = 1, f* = ½; from w = 3: f = ½(4.5 + .5) = 2.5. ‖∇f_i − ∇f‖² = 1 everywhere.
    problem = Quadratics(np.ones((2, 1)), [[0.0], [2.0]])
    c = estimates.constants(problem, [[3.0], [2.0]], sigma2=0.25)
    assert (c.L, c.mu, c.num_clients, c.S) == (1.0, 1.0, 2, 0.5)
    assert (c.zeta2, c.mean_zeta2, c.Gamma) == pytest.approx((1.0, 1.0, 0.5))
    assert (c.Delta, c.distance2) == pytest.approx((2.0, 4.0))
    assert pytest.approx(9 + 0.25) == c.G2  # ∇f_1(3) = 3
    assert estimates.constants(problem, [[3.0]], G2=100.0).G2 == 100.0


def test_zeta_of_the_largest_and_the_mean_client() -> None:
    problem = Quadratics(np.ones((3, 1)), [[0.0], [0.0], [3.0]])  # pulls from the mean: −1, −1, 2
    c = estimates.constants(problem, [[5.0]])
    assert (c.zeta2, c.mean_zeta2) == pytest.approx((4.0, 2.0))


def test_gradient_noise_by_hand() -> None:
    # Client 0: squared errors 1 and 3; client 1: 4 and 0.
    draws = [[[1.0, 0.0], [2.0, 0.0]], [[1.0, 2**0.5], [0.0, 0.0]]]
    assert estimates.gradient_noise(draws, [[0.0, 0.0], [0.0, 0.0]]) == pytest.approx(2.0)


@settings(deadline=None, max_examples=20)
@given(power=st.floats(2.0, 6.0), scale=st.floats(0.1, 10.0))
def test_lojasiewicz_of_powers(power: float, scale: float) -> None:
    # f = s|w|^r: ‖∇f‖² = s²r²|w|^(2r−2) = s²r² (f/s)^(2−2/r): α = 2 − 2/r, μ = r² s^(2/r).
    w = np.linspace(0.1, 2, 50)
    found = estimates.lojasiewicz(scale * w**power, (scale * power * w ** (power - 1)) ** 2)
    assert found.exponent == pytest.approx(2 - 2 / power, abs=1e-9)
    assert found.mu == pytest.approx(power**2 * scale ** (2 / power))


def test_lojasiewicz_of_a_convex_problem_is_at_least_twice_its_convexity(logistic: Logistic) -> None:
    points = logistic.minimiser() + np.random.default_rng(3).normal(0, 1, (40, 15))
    own = logistic.minimisers()
    lowest = np.array([logistic.values(w)[i] for i, w in enumerate(own)])
    gaps = np.stack([logistic.values(w) for w in points]) - lowest
    squares = np.stack([np.sum(logistic.gradients(w) ** 2, axis=1) for w in points])
    found = estimates.lojasiewicz(gaps, squares, exponent=1.0)
    assert found.mu >= 2 * logistic.mu
    assert (squares >= found.mu * gaps - 1e-12).all()
    with pytest.raises(AssumptionError, match="needs gaps f − f\\* of two sizes or more"):
        estimates.lojasiewicz([1.0, 1.0], [1.0, 1.0])


def test_a_single_curvature_cannot_be_both_l_and_mu() -> None:
    rng = np.random.default_rng(0)
    for case in ({"num_clients": 3, "shared": True}, {"num_clients": 1}):
        with pytest.raises(ValueError, match=r"L = 2, mu = 1: a single curvature can't be both"):
            quadratics(rng, num_parameters=1, L=2, mu=1, heterogeneity=1, **case)
        assert quadratics(rng, num_parameters=1, L=2, mu=2, heterogeneity=1, **case).L == 2


def test_every_problem_has_the_same_face(logistic: Logistic) -> None:
    binary = FrozenSlope(some_clients(classes=2), np.ones(4), l2=0.1)
    drawn = quadratics(np.random.default_rng(0), num_clients=3, num_parameters=2, L=2, mu=1, heterogeneity=1)
    for problem in (logistic, binary, drawn):
        assert isinstance(problem, Problem)
        w = np.full(problem.num_parameters, 0.3)
        assert problem.gradients(w).shape == (3, problem.num_parameters)
        assert problem.client_gradient(2, w) == pytest.approx(problem.gradients(w)[2])
        step = 1e-6 * np.eye(problem.num_parameters)[0]
        slope = (problem.value(w + step) - problem.value(w - step)) / 2e-6
        assert problem.gradient(w)[0] == pytest.approx(slope, abs=1e-7)
        assert np.linalg.norm(problem.gradient(problem.minimiser())) <= 1e-12
        assert estimates.gamma(problem) >= 0
        w = problem.minimiser() + 0.1
        for i in range(problem.num_clients):
            assert problem.client_value(i, w) == problem.values(w)[i]
            assert (problem.client_gradient(i, w) == problem.gradients(w)[i]).all()
