"""The interface of a problem, the rows of a client, and the check of the clients' weights."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array


class Problem(ABC):
    """The losses of C clients.

    Attributes
    ----------
    weights : array (C,)
        p_i.
    num_parameters : int
        D.
    L, mu : float
        Every f_i is L-smooth and μ-strongly convex, everywhere.
    """

    weights: Array
    num_parameters: int
    L: float
    mu: float

    @abstractmethod
    def values(self, w: Array) -> Array:
        """f_i(w), shape (C,)."""

    @abstractmethod
    def gradients(self, w: Array) -> Array:
        """∇f_i(w), shape (C, D)."""

    @abstractmethod
    def minimisers(self) -> Array:
        """w_i* of every client, shape (C, D)."""

    @abstractmethod
    def minimiser(self) -> Array:
        """w* of f, shape (D,)."""

    @property
    def num_clients(self) -> int:
        """C."""
        return len(self.weights)

    def client_value(self, i: int, w: Array) -> float:
        """f_i(w) of one client."""
        return float(self.values(w)[i])

    def client_gradient(self, i: int, w: Array) -> Array:
        """∇f_i(w) of one client, shape (D,)."""
        gradient: Array = self.gradients(w)[i]
        return gradient

    def value(self, w: Array) -> float:
        """f(w) = Σ p_i f_i(w)."""
        return float(self.weights @ self.values(w))

    def gradient(self, w: Array) -> Array:
        """∇f(w), shape (D,)."""
        gradient: Array = self.weights @ self.gradients(w)
        return gradient


@dataclass(frozen=True)
class ClientData:
    """Rows of one client: features (n, d) and labels (n,), whole numbers from 0."""

    x: Array
    y: np.ndarray


def client_weights(weights: ArrayLike | None, num_clients: int) -> Array:
    """Return p_i (C,), checked; by default 1/C.

    Raises
    ------
    ValueError
        If the weights aren't C numbers of 0 or more with sum 1.
    """
    if weights is None:
        return np.full(num_clients, 1 / num_clients)
    p = np.asarray(weights, dtype=np.float64)
    if p.shape != (num_clients,) or not (p >= 0).all() or abs(p.sum() - 1) > 1e-9:
        raise ValueError(f"weights: must be {num_clients} numbers of 0 or more with sum 1, are {weights}")
    return p
