"""Theorem 5.1 of 004 with numbers for its O(·): a bound that holds for every step size in its range.

Round i is w_i = w_{i−1} − μ [ĝ_i + d_i]. ĝ_i is the mean over the drawn agents of their gradients at w_{i−1}; d_i is
the mean over the same agents of d_k = (1/E_k) Σ_e [ĝ_k(φ_{k,e−1}) − ĝ_k(w_{i−1})], the effect of local steps. With
E‖d_i‖² ≤ μ²(a‖w̃_{i−1}‖² + b), the proof's eq. 5.61 and its √λ give

    E‖w̃_i‖² ≤ κ E‖w̃_{i−1}‖² + μ²σ²_fed/√λ + μ⁴b/(1−√λ),  κ = √λ + μ⁴a/(1−√λ).

Errors in the chapter's way to a and b, and the correction of each:

* eq. 5.20 has the factor μ in d_i, and eq. 5.21 multiplies by μ once more; here d_i is without μ.
* eq. 5.41 puts 1/K for 1/L into the mean over the drawn agents, and so L/K² for 1/K into eq. 5.54.
* eq. 5.53 bounds ‖φ_{k,e−1} − w_{i−1}‖² of eq. 5.47 by the bound that eq. 5.52 gives for ‖w_k° − φ_{k,e}‖², which
  doesn't fall with μ. Here E‖φ_{k,e} − w_{i−1}‖² ≤ m²e Σ_{j<e} E‖ĝ_k(φ_{k,j})‖², m = μ/E_k, whose summands eq. 5.52
  bounds.
* eq. 5.50 has μ_k²/E_k² for μ²/E_k²; eq. 5.55 has the same round on both sides.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, StepSizeError, as_rounds, check
from studies.theory.steady_state import Agents


@dataclass(frozen=True)
class LocalSmoothness:
    """The constants that the numbers need beside ``Agents``; arrays have shape (K,).

    Parameters
    ----------
    mean_square : array
        δ̂_k² of condition 5.1: E‖ĝ_k(w) − ĝ_k(v)‖² ≤ δ̂_k² ‖w − v‖².
    convexity : array
        ν_k > 0 of agent k's own loss.
    """

    mean_square: Array
    convexity: Array

    def __post_init__(self) -> None:
        check(
            _THEOREM,
            np.shape(self.mean_square) == np.shape(self.convexity),
            "δ̂_k² and ν_k must be of one shape",
        )
        check(_THEOREM, bool((np.asarray(self.mean_square) >= 0).all()), "δ̂_k² must be 0 or more")
        check(_THEOREM, bool((np.asarray(self.convexity) > 0).all()), "ν_k must be above 0")


def perturbation(agents: Agents, smoothness: LocalSmoothness, *, step: float) -> tuple[float, float]:
    """Return a and b of E‖d_i‖² ≤ μ²(a‖w̃_{i−1}‖² + b) (eq. 5.54 with numbers).

    With c_k the mean of (E_k−1)(2E_k−1)/(6E_k²), which is below 1/3, and 0 where E_k = 1:

        a = (1/K) Σ 2c_k δ̂_k²(δ_k²+β_k²)
        b = (1/K) Σ c_k δ̂_k² [(δ_k²+β_k²)(2‖w_k°−w°‖² + μ²σ_k²/(2E_k)) + σ_k²]

    Parameters
    ----------
    agents : Agents
    smoothness : LocalSmoothness
    step : float
        μ > 0 with λ_k ≤ 1 (eq. 5.50): μ ≤ 2E_kν_k/(δ_k²+β_k²) for every agent and every E_k that is drawn.
    """
    K = len(agents.beta2)
    check(
        _THEOREM,
        len(smoothness.mean_square) == K,
        f"{len(smoothness.mean_square)} smoothnesses for {K} agents",
    )
    E = np.reshape(np.asarray(agents.local_steps, dtype=np.float64), (K, -1))
    curvature = agents.smoothness**2 + agents.beta2
    largest = float(np.min(2 * E.min(axis=1) * smoothness.convexity / curvature))
    if not 0 < step <= largest * (1 + 1e-9):
        raise StepSizeError(
            f"{_THEOREM}: step size {step:.6g} is outside (0, {largest:.6g}], where local steps contract (λ_k ≤ 1)"
        )
    share = (E - 1) * (2 * E - 1) / (6 * E**2)
    within = step**2 * agents.sigma2 * (share / (2 * E)).mean(axis=1)
    c = share.mean(axis=1)
    a = float(np.mean(2 * c * smoothness.mean_square * curvature))
    each = c * (2 * curvature * agents.offsets2 + agents.sigma2) + curvature * within
    return a, float(np.mean(smoothness.mean_square * each))


def explicit_mean_square_bound(
    rounds: ArrayLike, agents: Agents, smoothness: LocalSmoothness, *, step: float, distance2: float
) -> Array:
    """Bound E‖w° − w_i‖² (theorem 5.1, with numbers).

    κ^i ‖w̃_0‖² + (1 − κ^i) ℓ,  ℓ = [μ²σ²_fed/√λ + μ⁴b/(1−√λ)] / (1−κ)

    Parameters
    ----------
    rounds : array
        i ≥ 0.
    agents, smoothness, step
        As in ``perturbation``; μ also so small that κ < 1.
    distance2 : float
        ‖w̃_0‖² ≥ 0.
    """
    i = as_rounds(_THEOREM, rounds)
    check(_THEOREM, distance2 >= 0, f"the squared distance must be 0 or more, is {distance2:.6g}")
    contraction, level = _recursion(agents, smoothness, step)
    left = contraction**i
    bound: Array = left * distance2 + (1 - left) * level
    return bound


def explicit_steady_state(agents: Agents, smoothness: LocalSmoothness, step: float) -> float:
    """Return ℓ, the level of ``explicit_mean_square_bound`` after many rounds."""
    return _recursion(agents, smoothness, step)[1]


_THEOREM = "004 theorem 5.1 with numbers"


def _recursion(agents: Agents, smoothness: LocalSmoothness, step: float) -> tuple[float, float]:
    """Return κ and ℓ."""
    a, b = perturbation(agents, smoothness, step=step)
    square = 1 - 2 * step * agents.nu + step**2 * (agents.delta**2 + agents.beta_fed2)
    root = float(np.sqrt(square)) if square > 0 else 0.0
    contraction = root + step**4 * a / (1 - root) if root < 1 else np.inf
    if not (square > 0 and contraction < 1):
        raise StepSizeError(
            f"{_THEOREM}: step size {step:.6g} is too large: λ = {square:.6g} must be in (0, 1), and κ = "
            f"{contraction:.6g} below 1"
        )
    level = (step**2 * agents.sigma_fed2 / root + step**4 * b / (1 - root)) / (1 - contraction)
    return contraction, level
