"""Constants measured on a problem: exact where the problem knows them, else the largest over given models."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, AssumptionError, Constants
from studies.theory.problems import Problem

# Gaps below this share of the largest gap are left out: they are rounding, or the point is the minimum itself.
_SMALLEST_GAP = 1e-10


def constants(
    problem: Problem, models: ArrayLike, *, sigma2: float = 0.0, G2: float | None = None
) -> Constants:
    """Return the constants of a problem and a run on it.

    L and μ hold everywhere, Γ, Δ and D are exact. ζ² and G² are the largest over ``models``: on all of space they may
    be infinite.

    Parameters
    ----------
    problem : Problem
    models : array (T, D)
        Global models of a run, the first one its start.
    sigma2 : float
        σ², the variance of a stochastic gradient.
    G2 : float, optional
        G²; by default max over models and clients of ‖∇f_i‖² + σ². Local steps of a convex loss shorten its gradient.
    """
    points = np.atleast_2d(np.asarray(models, dtype=np.float64))
    best = problem.minimiser()
    lowest = problem.value(best)
    spreads = np.stack([dissimilarities(problem, w) for w in points])
    if G2 is None:
        G2 = sigma2 + max(float(np.sum(problem.gradients(w) ** 2, axis=1).max()) for w in points)
    return Constants(
        num_clients=problem.num_clients,
        L=problem.L,
        mu=problem.mu,
        S=float(problem.weights @ problem.weights),
        sigma2=sigma2,
        zeta2=float(spreads.max()),
        mean_zeta2=float((spreads @ problem.weights).max()),
        G2=G2,
        Gamma=max(0.0, gamma(problem)),
        Delta=max(0.0, problem.value(points[0]) - lowest),
        distance2=float(np.sum((points[0] - best) ** 2)),
    )


def gamma(problem: Problem) -> float:
    """Γ = f* − Σ p_i f_i* (Buttaci 2024, eq. 4.2)."""
    own = [problem.client_value(i, w) for i, w in enumerate(problem.minimisers())]
    return problem.value(problem.minimiser()) - float(problem.weights @ np.array(own))


def dissimilarities(problem: Problem, w: Array) -> Array:
    """‖∇f_i(w) − ∇f(w)‖² of every client, (C,); ζ² bounds them (Dhasade, Kremer & Renard, eq. 3)."""
    gradients = problem.gradients(w)
    squares: Array = np.sum((gradients - problem.weights @ gradients) ** 2, axis=1)
    return squares


def gradient_noise(draws: ArrayLike, exact: ArrayLike) -> float:
    """σ²: the largest over clients of the mean of ‖g_i − ∇f_i‖².

    Parameters
    ----------
    draws : array (R, C, D)
        Stochastic gradients.
    exact : array (C, D)
        ∇f_i at the same model.
    """
    errors = np.asarray(draws, dtype=np.float64) - np.asarray(exact, dtype=np.float64)
    return float(np.mean(np.sum(errors**2, axis=2), axis=0).max())


def curvature_range(problem: Problem, w: Array, step: float = 1e-4) -> tuple[float, float]:
    """Smallest and largest eigenvalue over clients of ∇²f_i(w), by central differences of the gradients.

    For few parameters: it takes 2D gradients. A shorter ``step`` has more rounding error, a longer one more error
    from a curvature that changes along it.
    """
    columns = [
        (problem.gradients(w + shift) - problem.gradients(w - shift)) / (2 * step)
        for shift in step * np.eye(problem.num_parameters)
    ]
    hessians = np.stack(columns, axis=2)
    eigenvalues = np.linalg.eigvalsh((hessians + hessians.transpose(0, 2, 1)) / 2)
    return float(eigenvalues.min()), float(eigenvalues.max())


class Lojasiewicz(NamedTuple):
    """‖∇f_c‖² ≥ μ (f_c − f_c*)^α at every point measured (001, FL-2)."""

    exponent: float
    mu: float


def lojasiewicz(gaps: ArrayLike, gradients2: ArrayLike, exponent: float | None = None) -> Lojasiewicz:
    """Fit α, the slope of ln ‖∇f‖² over ln(f − f*), and give the largest μ that holds with it at every point.

    Parameters
    ----------
    gaps, gradients2 : array
        f_c(w) − f_c* and ‖∇f_c(w)‖² at the same models, of all clients together; gaps near 0 are left out.
    exponent : float, optional
        α, where it is known; by default it is fitted.

    Raises
    ------
    AssumptionError
        If fewer than two different gaps are left.
    """
    gap, square = (
        np.ravel(np.asarray(gaps, dtype=np.float64)),
        np.ravel(np.asarray(gradients2, dtype=np.float64)),
    )
    used = (gap > _SMALLEST_GAP * gap.max(initial=0.0)) & (square > 0)
    x, y = np.log(gap[used]), np.log(square[used])
    if x.size < 2 or x.max() - x.min() < 1e-6:
        raise AssumptionError("the Łojasiewicz exponent needs gaps f − f* of two sizes or more")
    if exponent is None:
        exponent = float(np.polyfit(x, y, 1)[0])
    return Lojasiewicz(exponent, float(np.exp((y - exponent * x).min())))
