"""The perceptron of the synthetic problem of Dhasade et al.: one parameter, so that minima are roots."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, AssumptionError
from studies.theory.problems.base import ClientData, Problem, client_weights


class FrozenSlope(Problem):
    """The perceptron: logit v·x + b, v frozen, b to be learned; the app's ``perceptron``.

    Parameters
    ----------
    clients : sequence of ClientData
        Labels are 0 and 1.
    slope : array (d,)
        v.
    l2, weights
        As in ``Logistic``; with λ = 0 a client's loss has a minimum only if it has rows of both classes.
    """

    def __init__(
        self,
        clients: Sequence[ClientData],
        slope: ArrayLike,
        l2: float = 0.0,
        weights: ArrayLike | None = None,
    ) -> None:
        v = np.asarray(slope, dtype=np.float64)
        self.offsets = [np.asarray(c.x, dtype=np.float64) @ v for c in clients]
        self.labels = [np.asarray(c.y) for c in clients]
        self.weights = client_weights(weights, len(clients))
        self.num_parameters = 1
        self.l2 = self.mu = l2
        self.L = 0.25 + l2

    def values(self, w: Array) -> Array:
        """f_i(b), shape (C,)."""
        return np.array([self.client_value(i, w) for i in range(self.num_clients)])

    def gradients(self, w: Array) -> Array:
        """f_i'(b), shape (C, 1)."""
        return np.stack([self.client_gradient(i, w) for i in range(self.num_clients)])

    def client_value(self, i: int, w: Array) -> float:
        """f_i(b)."""
        z, y = self.offsets[i] + w[0], self.labels[i]
        return float(np.mean(np.logaddexp(0, z) - y * z) + self.l2 / 2 * w[0] ** 2)

    def client_gradient(self, i: int, w: Array) -> Array:
        """f_i'(b), shape (1,)."""
        slope = np.mean(_sigmoid(self.offsets[i] + w[0]) - self.labels[i])
        return np.array([slope + self.l2 * w[0]])

    def sampling_variances(self, w: Array, batch_size: int) -> Array:
        """E‖g_i − ∇f_i‖² for batches without replacement, shape (C,); see ``Logistic.sampling_variances``."""
        variances = np.zeros(self.num_clients)
        for i, (offset, y) in enumerate(zip(self.offsets, self.labels, strict=True)):
            n = len(y)
            if 0 < batch_size < n:
                spread = np.var(_sigmoid(offset + w[0]) - y)
                variances[i] = spread * (n - batch_size) / (batch_size * (n - 1))
        return variances

    def minimisers(self) -> Array:
        """b_i*, shape (C, 1)."""
        return np.array(
            [[self._root(partial(self._slope_of, i), held)] for i, held in enumerate(self.labels)]
        )

    def minimiser(self) -> Array:
        """b*, shape (1,)."""
        held = [y for p, y in zip(self.weights, self.labels, strict=True) if p > 0]
        return np.array([self._root(self._slope, np.concatenate(held))])

    def _slope(self, b: float) -> float:
        return float(self.weights @ self.gradients(np.array([b]))[:, 0])

    def _slope_of(self, i: int, b: float) -> float:
        return float(self.client_gradient(i, np.array([b]))[0])

    def _root(self, slope: Callable[[float], float], held: Array) -> float:
        """Return the minimiser of a loss with derivative ``slope`` on rows with the labels ``held``."""
        from scipy.optimize import brentq

        if self.l2 == 0 and len(np.unique(held)) < 2:
            raise AssumptionError("l2 = 0: without a regulariser, data of one class have no minimum")
        bound = 1.0
        while slope(-bound) > 0 or slope(bound) < 0:
            bound *= 2
        return float(brentq(slope, -bound, bound, xtol=1e-14, rtol=1e-14))


def _sigmoid(z: Array) -> Array:
    from scipy.special import expit

    probability: Array = expit(z)
    return probability
