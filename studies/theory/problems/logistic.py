"""Logistic regression on rows of data, and how near a model is to its least loss, which may lie at infinity."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, AssumptionError
from studies.theory.newton import Linear, conjugate_gradients, newton
from studies.theory.problems.base import ClientData, Problem, client_weights

# Ridges λ by which `Logistic.least` comes near the loss itself.
_FIRST_RIDGE, _RIDGE_RATIO, _LAST_RIDGE = 1e-2, 6.0, 1e-18
# Newton's estimate of λ²/2 rests on the preconditioner of its start and may be too small. If λ²/2 at its result is
# above the wanted one, Newton's method starts again from there, with a new preconditioner, up to this many times.
_LAST_TRIES = 5
# A ridge's minimum is found to this share of ½λ‖w‖².
_RIDGE_SHARE = 0.2
# The preconditioner leaves out rows whose curvature is below the first share of the largest. If the minimum lies at
# infinity, only rows of small curvature bound some directions: with 1e-3, conjugate gradients on MNIST take seven
# times as long. The second share of the diagonal is added to it, for float32.
_LEAST_CURVATURE, _ON_THE_DIAGONAL = 1e-8, 1e-6


class Logistic(Problem):
    """Regularised logistic regression, f_i(w) = mean cross-entropy over client i's rows + ½λ‖w‖².

    A model is the weights (K, d) and then the biases (K,), one after the other, as in the app's model ``logistic``.

    Parameters
    ----------
    clients : sequence of ClientData
    num_classes : int
        K ≥ 2.
    l2 : float
        λ ≥ 0, on all parameters; μ = λ. With λ = 0 there is no unique minimum, and ``minimiser`` and ``minimisers``
        raise AssumptionError.
    weights : array (C,), optional
        p_i; by default 1/C.
    """

    def __init__(
        self, clients: Sequence[ClientData], num_classes: int, l2: float, weights: ArrayLike | None = None
    ) -> None:
        self.clients = clients
        self.num_classes = num_classes
        self.l2 = self.mu = l2
        self.weights = client_weights(weights, len(clients))
        self._rows = [np.column_stack([c.x, np.ones(len(c.x))]).astype(np.float64) for c in clients]
        self.num_parameters = num_classes * self._rows[0].shape[1]
        # diag(p) − ppᵀ has no eigenvalue above ½.
        self.L = l2 + max(float(np.linalg.norm(rows, 2)) ** 2 / len(rows) for rows in self._rows) / 2

    def values(self, w: Array) -> Array:
        """f_i(w), shape (C,)."""
        return np.array([self.client_value(i, w) for i in range(self.num_clients)])

    def gradients(self, w: Array) -> Array:
        """∇f_i(w), shape (C, D)."""
        return np.stack([self.client_gradient(i, w) for i in range(self.num_clients)])

    def hessian_product(self, w: Array) -> Linear:
        """Return v ↦ ∇²f(w) v."""
        parts = [self._client_hessian(i, w) for i in range(self.num_clients)]
        return lambda v: sum(
            (p * part(v) for p, part in zip(self.weights, parts, strict=True)), start=np.zeros_like(v)
        )

    def preconditioner(self, w: Array, ridge: float = 0.0) -> Linear:
        """Return v ↦ M⁻¹ v, M being the blocks of ∇²f(w) + ridge that belong to one class.

        It is approximate, for conjugate gradients alone: from float32, without the rows of least curvature, and with
        a small share added to the diagonal.
        """
        from scipy.linalg import cho_factor, cho_solve

        probabilities = [self._probabilities(i, w).astype(np.float32) for i in range(self.num_clients)]
        factors = []
        for k in range(self.num_classes):
            curvatures = [p[:, k] * (1 - p[:, k]) for p in probabilities]
            least = _LEAST_CURVATURE * max(float(h.max()) for h in curvatures)
            block = np.zeros((self._rows[0].shape[1],) * 2)
            for p, rows, h in zip(self.weights, self._rows, curvatures, strict=True):
                kept = np.flatnonzero(h > least)
                scaled = rows[kept].astype(np.float32) * np.sqrt(h[kept])[:, None]
                block += p / len(rows) * (scaled.T @ scaled)
            diagonal = np.diagonal(block)
            block[np.diag_indices(len(block))] += (
                _ON_THE_DIAGONAL * (diagonal + 1e-8 * diagonal.max()) + self.l2 + ridge
            )
            factors.append(cho_factor(block, overwrite_a=True))

        def solve(v: Array) -> Array:
            return self._flat(
                np.stack([cho_solve(f, r) for f, r in zip(factors, self._matrix(v), strict=True)])
            )

        return solve

    def minimisers(self) -> Array:
        """w_i* of every client, shape (C, D)."""
        return self._client_minimisers

    def minimiser(self) -> Array:
        """w* of f, shape (D,)."""
        return self._minimiser

    def least(self, decrement: float) -> Array:
        """Return a model whose `half_decrement` is at most ``decrement``, (D,); f need not have a minimum.

        Where classes can be told apart along some direction, inf f lies at infinity. The minimisers of f + ½λ‖w‖²
        lead there as λ falls, each a good start for the next.

        Raises
        ------
        AssumptionError
            If the model found has a larger `half_decrement`.
        """
        w, ridge = np.zeros(self.num_parameters), _FIRST_RIDGE
        while ridge > _LAST_RIDGE:
            w = self._ridged_minimiser(w, ridge, _RIDGE_SHARE * ridge / 2 * float(w @ w) or decrement)
            if ridge / 2 * float(w @ w) <= decrement:
                break
            ridge /= _RIDGE_RATIO
        for _ in range(_LAST_TRIES):
            w = self._ridged_minimiser(w, 0.0, decrement)
            if (found := self.half_decrement(w)) <= decrement:
                return w
        raise AssumptionError(f"λ²/2 = {found:.3g} of the loss is left, must be at most {decrement:.3g}")

    def half_decrement(self, w: Array) -> float:
        """λ²/2 = ½ ∇fᵀ (∇²f)⁻¹ ∇f at w, by conjugate gradients, to about one part in a hundred.

        Near a minimum it is f(w) − inf f; along a direction in which the loss falls as e^{−t} to a minimum at
        infinity it is half of that.
        """
        solution = conjugate_gradients(
            self.hessian_product(w), -self.gradient(w), 1e-3, precondition=self.preconditioner(w)
        )
        return solution.energy / 2

    def _ridged_minimiser(self, start: Array, ridge: float, decrement: float) -> Array:
        def product(w: Array) -> Linear:
            plain = self.hessian_product(w)
            return lambda v: plain(v) + ridge * v

        return newton(
            lambda w: self.value(w) + ridge / 2 * float(w @ w),
            lambda w: self.gradient(w) + ridge * w,
            product,
            start,
            decrement=decrement,
            preconditioner=lambda w: self.preconditioner(w, ridge),
        )

    def sampling_variances(self, w: Array, batch_size: int) -> Array:
        """E‖g_i(w) − ∇f_i(w)‖² of the mean gradient of B of n_i rows, drawn without replacement; shape (C,).

        (mean_j ‖∇ℓ_j‖² − ‖∇f_i‖²) (n_i − B) / (B (n_i − 1)), ℓ_j without the regulariser, which has no noise.
        """
        variances = np.zeros(self.num_clients)
        for i, rows in enumerate(self._rows):
            n = len(rows)
            if batch_size == 0 or batch_size >= n:
                continue
            residual = self._residual(i, w)
            squares = np.sum(residual**2, axis=1) * np.sum(rows**2, axis=1)
            mean = residual.T @ rows / n
            variances[i] = (squares.mean() - np.sum(mean**2)) * (n - batch_size) / (batch_size * (n - 1))
        return variances

    @cached_property
    def _minimiser(self) -> Array:
        self._check_minimum()
        return newton(self.value, self.gradient, self.hessian_product, np.zeros(self.num_parameters))

    @cached_property
    def _client_minimisers(self) -> Array:
        self._check_minimum()
        found = [
            newton(
                partial(self.client_value, i),
                partial(self.client_gradient, i),
                partial(self._client_hessian, i),
                np.zeros(self.num_parameters),
            )
            for i in range(self.num_clients)
        ]
        return np.stack(found)

    def _check_minimum(self) -> None:
        if self.l2 == 0:
            raise AssumptionError("l2 = 0: without a regulariser the losses have no unique minimum, or none")

    def client_value(self, i: int, w: Array) -> float:
        """f_i(w) of one client."""
        logits = self._logits(i, w)
        top = logits.max(axis=1)
        labels = self.clients[i].y
        losses = (
            top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(len(labels)), labels]
        )
        return float(losses.mean() + self.l2 / 2 * (w @ w))

    def client_gradient(self, i: int, w: Array) -> Array:
        """∇f_i(w) of one client, shape (D,)."""
        rows = self._rows[i]
        return self._flat(self._residual(i, w).T @ rows / len(rows)) + self.l2 * w

    def _client_hessian(self, i: int, w: Array) -> Callable[[Array], Array]:
        rows, p = self._rows[i], self._probabilities(i, w)

        def product(v: Array) -> Array:
            change = rows @ self._matrix(v).T
            change = p * (change - np.sum(p * change, axis=1, keepdims=True))
            return self._flat(change.T @ rows / len(rows)) + self.l2 * v

        return product

    def _residual(self, i: int, w: Array) -> Array:
        """Gradient of each row's loss with respect to its logits, (n, K)."""
        residual = self._probabilities(i, w)
        residual[np.arange(len(residual)), self.clients[i].y] -= 1
        return residual

    def _probabilities(self, i: int, w: Array) -> Array:
        logits = self._logits(i, w)
        p: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        return p

    def _logits(self, i: int, w: Array) -> Array:
        logits: Array = self._rows[i] @ self._matrix(w).T
        return logits

    def _matrix(self, w: Array) -> Array:
        """(D,) → (K, d + 1), the bias last."""
        split = w.size - self.num_classes
        return np.column_stack([w[:split].reshape(self.num_classes, -1), w[split:]])

    def _flat(self, matrix: Array) -> Array:
        return np.concatenate([matrix[:, :-1].ravel(), matrix[:, -1]])
