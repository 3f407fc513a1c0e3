"""Quadratics: random ones with a given L, μ and heterogeneity, and those of the lower bounds."""

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array
from studies.theory.problems.base import Problem, client_weights


class Quadratics(Problem):
    """f_i(w) = ½ Σ_d a_id (w_d − c_id)², so that f_i* = 0.

    Parameters
    ----------
    curvatures, centres : array (C, D)
        a_id > 0 and c_id.
    weights : array (C,), optional
        p_i with sum 1; by default 1/C.
    """

    def __init__(self, curvatures: ArrayLike, centres: ArrayLike, weights: ArrayLike | None = None) -> None:
        self.curvatures = np.asarray(curvatures, dtype=np.float64)
        self.centres = np.asarray(centres, dtype=np.float64)
        if self.curvatures.ndim != 2 or self.curvatures.shape != self.centres.shape:
            raise ValueError(
                f"curvatures {self.curvatures.shape}, centres {self.centres.shape}: must be (clients, parameters)"
            )
        if not (self.curvatures > 0).all():
            raise ValueError(f"curvatures: must be above 0, the smallest is {self.curvatures.min()}")
        self.weights = client_weights(weights, len(self.centres))
        self.num_parameters = self.centres.shape[1]
        self.L, self.mu = float(self.curvatures.max()), float(self.curvatures.min())

    def values(self, w: Array) -> Array:
        """f_i(w), shape (C,)."""
        values: Array = np.sum(self.curvatures * (w - self.centres) ** 2, axis=-1) / 2
        return values

    def gradients(self, w: Array) -> Array:
        """∇f_i, shape (..., C, D), at one model (D,), or at one model for each client (..., C, D)."""
        return self.curvatures * (w - self.centres)

    def minimisers(self) -> Array:
        """w_i* = c_i."""
        return self.centres

    def minimiser(self) -> Array:
        """w* = Σ p_i a_i c_i / Σ p_i a_i, by coordinate."""
        point: Array = self.weights @ (self.curvatures * self.centres) / (self.weights @ self.curvatures)
        return point

    @property
    def zeta2(self) -> float:
        """max_i sup_w ‖∇f_i − ∇f‖²: infinite unless all clients have the same curvatures."""
        if (self.curvatures != self.curvatures[0]).any():
            return float("inf")
        pulls = self.curvatures * self.centres
        return float(np.sum((pulls - self.weights @ pulls) ** 2, axis=1).max())


def quadratics(
    rng: np.random.Generator,
    *,
    num_clients: int,
    num_parameters: int,
    L: float,
    mu: float,
    heterogeneity: float,
    shared: bool = False,
    weights: ArrayLike | None = None,
) -> Quadratics:
    """Draw quadratics with the given L and μ; centres are normal around 1 with deviation ``heterogeneity``.

    ``shared`` gives all clients the same curvatures, so that ζ is finite.

    Raises
    ------
    ValueError
        If L isn't μ and there is one curvature alone: one parameter, with shared curvatures or one client.
    """
    rows = 1 if shared else num_clients
    if rows * num_parameters == 1 and mu != L:
        raise ValueError(f"L = {L}, mu = {mu}: a single curvature can't be both")
    curvatures = rng.uniform(mu, L, (rows, num_parameters))
    curvatures.flat[0], curvatures.flat[-1] = L, mu
    centres = 1 + heterogeneity * rng.normal(size=(num_clients, num_parameters))
    return Quadratics(np.broadcast_to(curvatures, centres.shape), centres, weights)


def lower_bound_problem(mu: float, pull: float, num_clients: int, start: float) -> Quadratics:
    """Return the problem on which theorems 4.2 and 4.5 of Buttaci 2024 hold (appendix B.4).

    f_i(w) = ½Hw² + sGw for the first half of the clients and ½hw² − sGw for the others, with H = μ and h = μ/2; s is
    1 where the start isn't negative, else −1, which keeps the sign of the mean iterate. Its minimiser is 0.

    Parameters
    ----------
    mu, pull : float
        μ > 0 and G.
    num_clients : int
        C, even.
    start : float
        w̄_0.
    """
    if num_clients < 2 or num_clients % 2:
        raise ValueError(f"num_clients = {num_clients}: must be even and 2 or more")
    slope = pull if start >= 0 else -pull
    first = np.arange(num_clients) < num_clients // 2
    curvatures = np.where(first, mu, mu / 2)
    return Quadratics(curvatures[:, None], (np.where(first, -slope, slope) / curvatures)[:, None])
