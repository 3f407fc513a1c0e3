"""Losses of C clients with curvatures of their own, on which the floors of 001 are measured.

Every class has the losses and gradients at the clients' *own* models, for FedAvg's local steps, and the constants of
the paper's assumptions: L (FL-1), α and μ with ‖∇f_c‖² ≥ μ (f_c − f_c*)^α (FL-2). All clients have the same weight,
as in the paper.
"""

from abc import ABC, abstractmethod

import numpy as np

from studies.theory.constants import Array
from studies.theory.newton import Linear, newton


class Losses(ABC):
    """The losses of C clients with D parameters.

    Attributes
    ----------
    shape : tuple
        (C, D).
    L, mu, exponent : float
        FL-1's L, FL-2's μ and α.
    """

    shape: tuple[int, int]
    L: float
    mu: float
    exponent: float = 1.0

    @abstractmethod
    def values(self, w: Array) -> Array:
        """f_c at each client's own model, (..., C, D) → (..., C)."""

    @abstractmethod
    def gradients(self, w: Array) -> Array:
        """∇f_c at each client's own model, (..., C, D) → (..., C, D)."""

    @abstractmethod
    def hessians(self, w: Array) -> Array:
        """∇²f_c at each client's own model, (C, D) → (C, D, D)."""

    def lowest(self) -> Array:
        """f_c*, (C,): 0 unless a class says otherwise."""
        return np.zeros(self.shape[0])

    def at(self, w: Array) -> Array:
        """Repeat one model for all clients, (..., D) → (..., C, D)."""
        return np.broadcast_to(w[..., None, :], (*w.shape[:-1], *self.shape))

    def gradient(self, w: Array) -> Array:
        """∇F, (..., D) → (..., D)."""
        gradient: Array = self.gradients(self.at(w)).mean(axis=-2)
        return gradient

    def minimiser(self) -> Array:
        """The minimiser of F, (D,), from the origin."""

        def product(w: Array) -> Array:
            matrix: Array = self.hessians(self.at(w)).mean(axis=0)
            return matrix

        return newton(
            lambda w: float(self.values(self.at(w)).mean()),
            self.gradient,
            lambda w: product(w).__matmul__,
            np.zeros(self.shape[1]),
        )

    def zeta2(self, w: Array) -> float:
        """Mean over clients of ‖∇f_c(w) − ∇F(w)‖², w: (D,) (FL-3)."""
        gradients = self.gradients(self.at(w))
        return float(np.mean(np.sum((gradients - gradients.mean(axis=0)) ** 2, axis=1)))


class QuadraticLosses(Losses):
    """f_c(w) = ½ (w − c_c)ᵀ A_c (w − c_c): α = 1 and μ = 2 λ_min.

    Parameters
    ----------
    hessians : array (C, D, D)
        A_c, symmetric and positive definite.
    optima : array (C, D)
        c_c.
    """

    def __init__(self, hessians: Array, optima: Array) -> None:
        eigenvalues = np.linalg.eigvalsh(hessians)
        self.matrices, self.optima, self.shape = hessians, optima, optima.shape
        self.L, self.mu = float(eigenvalues.max()), 2 * float(eigenvalues.min())

    def values(self, w: Array) -> Array:
        """f_c."""
        away = w - self.optima
        values: Array = np.sum(away * self.gradients(w), axis=-1) / 2
        return values

    def gradients(self, w: Array) -> Array:
        """∇f_c = A_c (w − c_c)."""
        gradients: Array = np.einsum("cij,...cj->...ci", self.matrices, w - self.optima)
        return gradients

    def hessians(self, w: Array) -> Array:
        """A_c."""
        return self.matrices


class LogisticLosses(Losses):
    """f_c(w) = mean ln(1 + e^{−z·w}) + ½λ‖w‖² over a client's rows z = ±x: α = 1 and μ = 2λ.

    Parameters
    ----------
    signed : array (C, n, D)
        z = x for rows of class 1 and −x for those of class 0.
    l2 : float
        λ > 0.
    """

    def __init__(self, signed: Array, l2: float) -> None:
        self.signed, self.l2 = signed, l2
        self.shape = signed.shape[0], signed.shape[2]
        gram = np.einsum("cnd,cne->cde", signed, signed) / signed.shape[1]
        self.L, self.mu = l2 + float(np.linalg.eigvalsh(gram).max()) / 4, 2 * l2

    def values(self, w: Array) -> Array:
        """f_c."""
        values: Array = np.logaddexp(0, -self._margins(w)).mean(axis=-1) + self.l2 / 2 * np.sum(w**2, axis=-1)
        return values

    def gradients(self, w: Array) -> Array:
        """∇f_c."""
        wrong = sigmoid(-self._margins(w)) / self.signed.shape[1]
        gradients: Array = self.l2 * w - (wrong[..., None, :] @ self.signed)[..., 0, :]
        return gradients

    def hessians(self, w: Array) -> Array:
        """∇²f_c."""
        p = sigmoid(self._margins(w))
        weighted = self.signed * (p * (1 - p) / self.signed.shape[1])[..., None]
        hessians: Array = weighted.swapaxes(-1, -2) @ self.signed + self.l2 * np.eye(self.shape[1])
        return hessians

    def row_variance(self, w: Array) -> float:
        """σ² of one row drawn at random, E‖∇ℓ − ∇f_c‖² at a model (D,), the largest over clients (FL-4)."""
        margins = self._margins(self.at(w))
        squares = sigmoid(-margins) ** 2 * np.sum(self.signed**2, axis=2)
        mean = self.gradients(self.at(w)) - self.l2 * w
        return float((squares.mean(axis=1) - np.sum(mean**2, axis=1)).max())

    def _margins(self, w: Array) -> Array:
        margins: Array = (self.signed @ w[..., None])[..., 0]
        return margins

    def lowest(self) -> Array:
        """f_c*, by Newton's method."""

        # The clients' problems side by side are one, with a Hessian in C blocks.
        def products(flat: Array) -> Linear:
            blocks = self.hessians(flat.reshape(self.shape))
            return lambda v: (blocks @ v.reshape(*self.shape, 1)).ravel()

        own = newton(
            lambda flat: float(self.values(flat.reshape(self.shape)).sum()),
            lambda flat: self.gradients(flat.reshape(self.shape)).ravel(),
            products,
            np.zeros(self.shape[0] * self.shape[1]),
        )
        return self.values(own.reshape(self.shape))


class PowerLosses(Losses):
    """f_c(w) = a_c ‖w − c_c‖^p / p with p > 2.

    With r = ‖w − c_c‖, ‖∇f_c‖² = a_c² r^(2p−2), and r^p = p f_c / a_c: so ‖∇f_c‖² = a_c^(2/p) p^α f_c^α with
    α = (2p − 2)/p = 2 − 2/p, from 1 for p = 2 to 2 for p → ∞; μ is the smallest a_c^(2/p) p^α. Its largest curvature
    is a_c (p − 1) r^(p−2), and L is the largest over clients at r = ``reach``.

    Parameters
    ----------
    power : float
        p.
    scales : array (C,)
        a_c > 0.
    optima : array (C, D)
        c_c.
    reach : float
        The largest r of any model at which a loss is evaluated.
    """

    def __init__(self, power: float, scales: Array, optima: Array, reach: float) -> None:
        self.power, self.scales, self.optima, self.shape = power, scales, optima, optima.shape
        self.exponent = 2 - 2 / power
        self.L = float(scales.max()) * (power - 1) * reach ** (power - 2)
        self.mu = float(scales.min()) ** (2 / power) * power**self.exponent

    def values(self, w: Array) -> Array:
        """f_c."""
        values: Array = self.scales * np.linalg.norm(w - self.optima, axis=-1) ** self.power / self.power
        return values

    def gradients(self, w: Array) -> Array:
        """∇f_c = a_c r^(p−2) (w − c_c)."""
        away = w - self.optima
        distances = np.linalg.norm(away, axis=-1, keepdims=True)
        gradients: Array = self.scales[:, None] * distances ** (self.power - 2) * away
        return gradients

    def hessians(self, w: Array) -> Array:
        """∇²f_c = a_c r^(p−2) (1 + (p − 2) u uᵀ), u the direction of w − c_c."""
        away = w - self.optima
        distances = np.linalg.norm(away, axis=-1, keepdims=True)
        u = away / np.maximum(distances, np.finfo(float).tiny)
        inner = np.eye(self.shape[1]) + (self.power - 2) * u[:, :, None] * u[:, None, :]
        hessians: Array = (self.scales[:, None] * distances ** (self.power - 2))[..., None] * inner
        return hessians


# ---- Drawn problems --------------------------------------------------------------------------------------------


def curvatures(
    rng: np.random.Generator, num_clients: int, num_parameters: int, condition: float, own: float
) -> Array:
    """Draw (1 − own) A + own A_c, (C, D, D): eigenvalues log-uniform in [1/condition, 1], axes at random."""
    drawn = np.empty((num_clients + 1, num_parameters, num_parameters))
    for matrix in drawn:
        axes, _ = np.linalg.qr(rng.normal(size=matrix.shape))
        matrix[:] = axes * condition ** -rng.uniform(size=num_parameters) @ axes.T
    mixed: Array = (1 - own) * drawn[0] + own * drawn[1:]
    return mixed


def optima(
    rng: np.random.Generator, shape: tuple[int, int], *, spread: float = 0.0, deviating: int = 0
) -> Array:
    """Draw c_c, (C, D): normal, E‖c_c‖² = spread²; the first ``deviating`` are moved by 1 in one common direction."""
    points: Array = spread / shape[1] ** 0.5 * rng.normal(size=shape)
    away = rng.normal(size=shape[1])
    points[:deviating] += away / np.linalg.norm(away)
    return points


def labelled_rows(rng: np.random.Generator, covariances: Array, directions: Array, num_rows: int) -> Array:
    """Draw rows x ~ N(0, covariance of the client) of class 1 with probability σ(x·θ_c), signed.

    Parameters
    ----------
    covariances, directions : array (C, D, D), array (C, D)
        θ_c are the directions.

    Returns
    -------
    array (C, n, D)
    """
    roots = np.linalg.cholesky(covariances)
    x = rng.normal(size=(len(directions), num_rows, directions.shape[1])) @ roots.swapaxes(1, 2)
    ones = rng.uniform(size=x.shape[:2]) < sigmoid((x @ directions[..., None])[..., 0])
    return np.where(ones[..., None], x, -x)


def sigmoid(z: Array) -> Array:
    """1 / (1 + e^{−z})."""
    from scipy.special import expit

    value: Array = expit(z)
    return value
