"""The perceptron of the synthetic problem of Dhasade et al.: one parameter, so that minima are roots."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from research.theory.constants import Array, AssumptionError
from research.theory.problems.base import ClientData, Problem, client_weights


class FrozenSlope(Problem):
    """The perceptron: logit v·x + b, v frozen, b to be learned; the app's ``perceptron``.

    Parameters
    ----------
    clients : sequence of ClientData
        Labels are 0 and 1.
    slope : array (d,)
        v.
    l2, weights
        As in ``Logistic``; without λ a minimum needs both classes on every client.
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
        logits = [offset + w[0] for offset in self.offsets]
        losses = [np.mean(np.logaddexp(0, z) - y * z) for z, y in zip(logits, self.labels, strict=True)]
        values: Array = np.array(losses) + self.l2 / 2 * w[0] ** 2
        return values

    def gradients(self, w: Array) -> Array:
        """f_i'(b), shape (C, 1)."""
        slopes = [np.mean(_sigmoid(o + w[0]) - y) for o, y in zip(self.offsets, self.labels, strict=True)]
        gradients: Array = np.array(slopes)[:, None] + self.l2 * w[0]
        return gradients

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
        return np.array([[self._root(np.eye(self.num_clients)[i])] for i in range(self.num_clients)])

    def minimiser(self) -> Array:
        """b*, shape (1,)."""
        return np.array([self._root(self.weights)])

    def _root(self, weights: Array) -> float:
        from scipy.optimize import brentq

        def slope(b: float) -> float:
            return float(weights @ self.gradients(np.array([b]))[:, 0])

        held = np.concatenate([y for p, y in zip(weights, self.labels, strict=True) if p > 0])
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
