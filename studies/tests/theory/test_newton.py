"""Newton's method and its conjugate gradients, against dense algebra and scipy."""

import numpy as np
import pytest
from scipy.optimize import minimize

from studies.theory.constants import AssumptionError
from studies.theory.newton import conjugate_gradients, newton
from studies.theory.problems import ClientData, Logistic, logistic


@pytest.fixture(scope="module")
def unregularised() -> Logistic:
    """Classes that overlap, features of very different sizes, and one that is always 0."""
    rng = np.random.default_rng(0)
    clients = []
    for shift in (0.0, 0.5, 1.0):
        x = rng.normal(shift, 1, (200, 4)) * [1, 0.01, 10, 0]
        clients.append(ClientData(x, rng.integers(0, 3, 200)))
    return Logistic(clients, 3, l2=0.0, weights=[0.5, 0.3, 0.2])


def dense_hessian(problem: Logistic, w: np.ndarray) -> np.ndarray:
    product = problem.hessian_product(w)
    return np.stack([product(v) for v in np.eye(len(w))])


def test_conjugate_gradients_solve_and_know_the_energy() -> None:
    rng = np.random.default_rng(1)
    root = rng.normal(size=(8, 8))
    matrix, b = root @ root.T + 0.1 * np.eye(8), rng.normal(size=8)
    for inverse in (None, np.linalg.inv(np.diag(np.diag(matrix)))):
        precondition = None if inverse is None else inverse.__matmul__
        found = conjugate_gradients(matrix.__matmul__, b, 1e-14, precondition=precondition)
        np.testing.assert_allclose(matrix @ found.x, b, atol=1e-6)
        assert found.energy == pytest.approx(b @ np.linalg.solve(matrix, b))
        early = conjugate_gradients(matrix.__matmul__, b, 0.9, precondition=precondition)
        assert early.energy < found.energy  # from below
        assert early.energy == pytest.approx(early.x @ b)


def test_conjugate_gradients_take_a_singular_matrix_and_a_zero() -> None:
    matrix = np.diag([2.0, 0.5, 0.0])
    found = conjugate_gradients(matrix.__matmul__, np.array([2.0, 1.0, 0.0]), 1e-12)
    np.testing.assert_allclose(found.x, [1, 2, 0])
    assert found.energy == pytest.approx(4)
    assert conjugate_gradients(matrix.__matmul__, np.zeros(3), 1e-12).energy == 0


def test_newton_stops_at_a_gradient_or_at_a_decrement() -> None:
    # f = Σ cosh(a_d w_d): minimum 0; λ²/2 of one coordinate is sinh²/(2 cosh).
    a = np.array([1.0, 3.0])
    steps = []

    def gradient(w: np.ndarray) -> np.ndarray:
        steps.append(w)
        return a * np.sinh(a * w)

    arguments = (
        lambda w: float(np.cosh(a * w).sum()),
        gradient,
        lambda w: (a**2 * np.cosh(a * w)).__mul__,
        np.full(2, 2.0),
    )
    assert np.linalg.norm(newton(*arguments)) <= 1e-12
    taken = len(steps)
    steps.clear()
    rough = newton(*arguments, decrement=1e-3)
    assert len(steps) < taken
    assert np.cosh(a * rough).sum() - 2 < 1e-3


def test_no_minimum_says_so() -> None:
    with pytest.raises(AssumptionError, match="no minimum found: the gradient's norm is still 1 after 100"):
        newton(lambda w: float(w[0]), lambda w: np.ones(1), lambda w: lambda v: v, np.zeros(1))  # f(w) = w


def test_a_preconditioner_is_like_the_hessians_diagonal_blocks(unregularised: Logistic) -> None:
    w = np.random.default_rng(2).normal(size=15)
    apply = unregularised.preconditioner(w, ridge=0.01)
    hessian = dense_hessian(unregularised, w) + 0.01 * np.eye(15)
    for k in range(3):
        own = [*range(4 * k, 4 * k + 4), 12 + k]
        v = np.zeros(15)
        v[own] = [0.3, -0.2, 0.5, 1.0, -0.4]
        expected = np.zeros(15)
        expected[own] = np.linalg.solve(hessian[np.ix_(own, own)], v[own])
        np.testing.assert_allclose(apply(v), expected, rtol=0.02, atol=1e-3)


def test_least_without_a_regulariser_is_scipys(unregularised: Logistic) -> None:
    found = unregularised.least(1e-8)
    reference = minimize(
        unregularised.value, np.zeros(15), jac=unregularised.gradient, method="BFGS", options={"gtol": 1e-9}
    )
    assert unregularised.value(found) == pytest.approx(reference.fun, abs=2e-8)
    assert unregularised.half_decrement(found) <= 1e-8
    # Away from the minimum it is what dense algebra says.
    w = found + 0.01 * np.random.default_rng(3).normal(size=15)
    g, hessian = unregularised.gradient(w), dense_hessian(unregularised, w)
    exact = g @ np.linalg.pinv(hessian, rcond=1e-13) @ g / 2
    assert unregularised.half_decrement(w) == pytest.approx(exact, rel=0.01)
    assert unregularised.value(w) - unregularised.value(found) == pytest.approx(exact, rel=0.1)


def test_least_goes_on_where_newtons_own_measure_was_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(836)
    scale = 10 ** rng.uniform(-3, 1, 38)
    x = (rng.random((489, 38)) < 0.3) * rng.normal(size=(489, 38)) * scale
    scores = x @ (2 * rng.normal(size=(4, 38)) / scale).T + rng.gumbel(size=(489, 4))
    y = scores.argmax(axis=1)
    problem = Logistic([ClientData(x[i::2], y[i::2]) for i in range(2)], 4, l2=0.0)
    assert problem.half_decrement(problem.least(1e-8)) <= 1e-8
    monkeypatch.setattr(logistic, "_LAST_TRIES", 1)  # it's then 2e-6
    with pytest.raises(AssumptionError, match="is left, must be at most 1e-08"):
        problem.least(1e-8)


def test_least_with_a_regulariser_is_the_minimiser() -> None:
    rng = np.random.default_rng(4)
    clients = [ClientData(rng.normal(i, 1, (40, 3)), rng.integers(0, 2, 40)) for i in range(3)]
    problem = Logistic(clients, 2, l2=0.1)
    found = problem.least(1e-10)
    np.testing.assert_allclose(found, problem.minimiser(), atol=1e-4)
    assert problem.value(found) == pytest.approx(problem.value(problem.minimiser()), abs=2e-10)


def test_least_of_separable_classes_goes_towards_infinity_and_says_when_it_cannot() -> None:
    separable = Logistic([ClientData(np.array([[-1.0], [1.0]]), np.array([0, 1]))], 2, l2=0.0)
    found = separable.least(1e-6)
    assert separable.value(found) <= 4e-6  # inf f = 0, and the decrement is half of it
    with pytest.raises(AssumptionError, match=r"λ²/2 = .* is left, must be at most 1e-40"):
        separable.least(1e-40)
