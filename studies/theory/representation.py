"""The federated objective's gradient in asynchronous runs (Fraboni et al. 2023, theorems 2 and 3, corollary 2).

Theorem 1 (``asynchronous.explicit_bound``) is about the objectives L^n = Σ_i q_i(n) L_i that aggregations minimise.
Here clients are put into J types of equal data. Type j has the loss F_j, the importance r_j = Σ p_i and the expected
weight s_j(n) = Σ q_i(n), both sums over its clients, and s̃_j = s_j / Σ s_j. Aggregation n represents type j if
s_j(n) > 0. If all clients have different data, J = M, r = p and s = q.

The paper's O(·) hides L and all numbers; the functions have the numbers of its proofs, with these corrections:

* eq. 105 has 1/q²(n) before L^n(θ) − L^n(θ̄^n); L^n is q(n)L-smooth, so it is 1/q(n). For q(n) > 2 the print is false.
* eq. 105 drops a factor 2 of Jensen's inequality, but holds: ‖Σ r_j x_j‖² ≤ 2‖Σ s̃_j x_j‖² + 2χ² Σ s̃_j ‖x_j‖² +
  2 Σ_{unrepresented} r_j ‖x_j‖² for all vectors x_j, by Cauchy and Schwarz in one step.
* eq. 25 drops q(n) of eq. 23, the weight with which a model moves, and has L̄ for L_i.
* eq. 27 has ε, which is a loss, as a bound on a squared gradient: it is O(ε), as in eq. 17. It also needs every type
  to be represented; otherwise U of theorem 2 stays.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, AssumptionError, Constants, as_float, check

# Weights may differ by this share of the largest, by rounding.
_ROUNDING = 1e-9

# ---- Who is represented ----------------------------------------------------------------------------------------


def by_type(weights: ArrayLike, types: ArrayLike) -> Array:
    """Sum clients' weights (..., M) over their types (M,), whole numbers 0..J−1: (..., J) (eq. 12)."""
    w, kinds = np.asarray(weights, dtype=np.float64), np.asarray(types)
    is_whole = np.issubdtype(kinds.dtype, np.integer)
    if not is_whole or kinds.shape != w.shape[-1:] or kinds.size == 0 or kinds.min() < 0:
        raise AssumptionError(f"types: must be {w.shape[-1:]} whole numbers from 0, are {kinds}")
    sums: Array = w @ (kinds[:, None] == np.arange(kinds.max() + 1)).astype(np.float64)
    return sums


def chi2(importances: ArrayLike, expected: ArrayLike) -> Array:
    """χ² = Σ (r_j − s̃_j)²/s̃_j over the represented types (theorems 2 and 3); 0 if no type is represented.

    Parameters
    ----------
    importances : array (J,)
        r_j ≥ 0 with sum 1.
    expected : array (..., J)
        s_j ≥ 0, of aggregations or of their mean.
    """
    r, _, shares = _shares(importances, expected)
    terms = np.divide((r - shares) ** 2, shares, out=np.zeros_like(shares), where=shares > 0)
    total: Array = terms.sum(axis=-1)
    return total


def difference_bound(
    importances: ArrayLike, expected: ArrayLike, gaps: ArrayLike, constants: Constants
) -> Array:
    """Bound ‖∇L(θ) − ∇L^n(θ)/q(n)‖² at one model (lemma 7, eq. 99).

    4Lχ² Σ_{represented} s̃_j [F_j(θ) − F_j*] + 4L Σ_{unrepresented} r_j [F_j(θ) − F_j*]

    Parameters
    ----------
    importances, expected : array (J,), (..., J)
        As in ``chi2``.
    gaps : array (..., J)
        F_j(θ) − F_j* ≥ 0.
    constants : Constants
        L is used.
    """
    r, s, shares = _shares(importances, expected)
    g = _gaps("lemma 7", gaps)
    own = np.sum(shares * g, axis=-1)
    bound: Array = 4 * constants.L * (chi2(r, s) * own + np.sum(np.where(s > 0, 0.0, r) * g, axis=-1))
    return bound


def gradient_bound(
    importances: ArrayLike, expected: ArrayLike, gaps: ArrayLike, least: ArrayLike, constants: Constants
) -> Array:
    """Bound ‖∇L(θ)‖² at one model (eq. 105, corrected).

    4L(1+χ²)/q(n) [L^n(θ) − L^n(θ̄^n)] + 4Lχ² Σ s̃_j [F_j(θ̄^n) − F_j*] + 4L Σ_{unrepresented} r_j [F_j(θ) − F_j*]

    Parameters
    ----------
    importances, expected, gaps, constants
        As in ``difference_bound``.
    least : array (..., J)
        F_j(θ̄^n) − F_j*, at the minimiser of L^n.
    """
    r, s, shares = _shares(importances, expected)
    g, lowest, chi = _gaps("eq. 105", gaps), _gaps("eq. 105", least), chi2(r, s)
    bound: Array = (1 + chi) * np.sum(shares * (g - lowest), axis=-1) + chi * np.sum(shares * lowest, axis=-1)
    bound += np.sum(np.where(s > 0, 0.0, r) * g, axis=-1)
    return 4 * constants.L * bound


# ---- Theorem 2 -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Representation:
    """How a run's aggregations represent the types of data.

    Attributes
    ----------
    chi2, weight : array (N,)
        χ_n² and q(n) = Σ s_j(n) of every aggregation.
    misrepresented : float
        The argument of P in eq. 18: the mean over n of χ_n² Σ s̃_j(n) [F_j(θ̄^n) − F_j*].
    unrepresented : float
        The argument of U in eq. 19: the mean over n and k of Σ_{unrepresented by n} r_j [E F_j(θ^{n,k}) − F_j*].
    """

    chi2: Array
    weight: Array
    misrepresented: float
    unrepresented: float


def representation(
    importances: ArrayLike, expected: ArrayLike, least: ArrayLike, along: ArrayLike
) -> Representation:
    """Work out P and U of theorem 2.

    Parameters
    ----------
    importances, expected : array (J,), (N, J)
        r_j and s_j(n).
    least : array (N, J)
        F_j(θ̄^n) − F_j*, at the minimiser of L^n; anything ≥ 0 where aggregation n represents none.
    along : array (N, J)
        E F_j(θ^{n,k}) − F_j*, the mean over k < K.
    """
    r, s, shares = _shares(importances, expected)
    check(
        "Fraboni et al. 2023, theorem 2", s.ndim == 2, f"weights must be (aggregations, types), are {s.shape}"
    )
    lowest, gaps, chi = _gaps("eq. 18", least), _gaps("eq. 19", along), chi2(r, s)
    return Representation(
        chi2=chi,
        weight=s.sum(axis=1),
        misrepresented=float(np.mean(chi * np.sum(shares * lowest, axis=1))),
        unrepresented=float(np.mean(np.sum(np.where(s > 0, 0.0, r) * gaps, axis=1))),
    )


def squared_gradient_bound(found: Representation, constants: Constants, *, suboptimality: float) -> float:
    """Bound the mean over n and k of E‖∇L(θ^{n,k})‖² (theorem 2, eq. 17, with numbers).

    4L { max_n (1+χ_n²)/q(n) · (R + ε) + P + U }

    Parameters
    ----------
    found : Representation
    constants : Constants
        L is used.
    suboptimality : float
        R + ε ≥ 0, a bound on the mean of E L^n(θ^{n,k}) − L^n(θ̄^n): ε is the value of
        ``asynchronous.explicit_bound``, and R its argument ``residual``.
    """
    check(
        "Fraboni et al. 2023, theorem 2",
        suboptimality >= 0,
        f"R + ε must be 0 or more, is {suboptimality:.6g}",
    )
    used = found.weight > 0
    slope = float(np.max((1 + found.chi2[used]) / found.weight[used], initial=0.0))
    return 4 * constants.L * (slope * suboptimality + found.misrepresented + found.unrepresented)


# ---- Theorem 3: windows ----------------------------------------------------------------------------------------


def window_mean(expected: ArrayLike, window: int) -> Array:
    """Return the mean weights q_i or s_j, (J,), if every window of W aggregations has the same (assumption 6).

    Parameters
    ----------
    expected : array (N, J)
        Weights by aggregation.
    window : int
        W ≥ 1, which divides N.

    Raises
    ------
    AssumptionError
        If windows differ.
    """
    weights = np.asarray(expected, dtype=np.float64)
    theorem, N = "Fraboni et al. 2023, assumption 6", len(weights)
    check(
        theorem,
        window >= 1 and N > 0 and N % window == 0,
        f"a window of {window} must divide {N} aggregations",
    )
    means = weights.reshape(N // window, window, -1).mean(axis=1)
    off = float(np.abs(means - means[0]).max())
    check(
        theorem, off <= _ROUNDING * means.max(), f"windows of {window} aggregations differ by up to {off:.3g}"
    )
    mean: Array = means[0]
    return mean


def window_term(
    *,
    lr: float,
    local_steps: int,
    window: int,
    gradient: float,
    mean_weight: float,
    largest_weight: float,
    server_lr: float = 1.0,
) -> float:
    """Return ε_W of theorem 3 with its numbers: η_gη_l K (W−1) B² q q_max / 2 (eqs. 23 to 25, corrected).

    An aggregation moves a model by at most η_gη_l q(n) K B, and the models of a window are on average at most (W−1)/2
    aggregations apart. The printed term, η_gη_l K (W−1) B² q, lacks q_max and the half: it is too small for q_max >
    2.

    Parameters
    ----------
    lr, local_steps, window : float, int, int
        η_l > 0; K, W ≥ 1.
    gradient : float
        B: ‖∇L_i‖ ≤ B wherever the iterates go, and E‖g_i‖ ≤ B.
    mean_weight, largest_weight : float
        q = Σ_i q_i of the mean weights of a window, and the largest q(n).
    server_lr : float
        η_g.
    """
    theorem = "Fraboni et al. 2023, theorem 3"
    check(theorem, local_steps >= 1 and window >= 1, "local steps and window must be 1 or more")
    check(theorem, lr > 0 and server_lr > 0 and gradient >= 0, "step sizes must be above 0, B 0 or more")
    check(
        theorem,
        0 < mean_weight <= largest_weight * (1 + _ROUNDING),
        "the mean weight must be in (0, the largest]",
    )
    apart = as_float(window - 1) if gradient else 0.0  # without a gradient all models are equal: inf · 0 is 0
    return server_lr * lr * local_steps * apart * gradient**2 * mean_weight * largest_weight / 2


def federated_gradient_bound(
    importances: ArrayLike,
    expected: ArrayLike,
    least: ArrayLike,
    constants: Constants,
    *,
    suboptimality: float,
) -> float:
    """Bound the mean over n and k of E‖∇L(θ^{n,k})‖² by the mean objective L̄ (theorem 3, eq. 27, with numbers).

    4L [(1+χ²)/q · ε + χ² Σ s̃_j (F_j(θ̄) − F_j*)],  q = Σ s_j

    Eq. 27 has ε without a factor: a loss as bound on a squared gradient.

    Parameters
    ----------
    importances, expected : array (J,)
        r_j, and the mean weights s_j > 0 of a window (``window_mean``).
    least : array (J,)
        F_j(θ̄) − F_j*, at the minimiser of L̄.
    constants : Constants
        L is used.
    suboptimality : float
        ε ≥ 0, a bound on the mean of E L̄(θ^{n,k}) − L̄(θ̄) (eq. 26): ``asynchronous.explicit_bound`` plus
        ``window_term``.
    """
    s = np.atleast_2d(np.asarray(expected, dtype=np.float64))
    missing = np.flatnonzero(~(s[0] > 0))
    check(
        "Fraboni et al. 2023, eq. 27", not missing.size, f"no aggregation represents type {missing.tolist()}"
    )
    found = representation(importances, s, np.atleast_2d(least), np.zeros_like(s))
    return squared_gradient_bound(found, constants, suboptimality=suboptimality)


# ---- Corollary 2 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exponents:
    """Powers of N with which the terms of theorem 3 go, for W = O(N^a), τ = O(N^b) and η_l ∝ N^(−c) (corollary 2).

    Attributes
    ----------
    initial, step, staleness, window : float
        c − 1 of 1/(η_l N), −c of η_l, 2(b − c) of (η_l τ)², a − c of η_l W.
    """

    initial: float
    step: float
    staleness: float
    window: float

    @property
    def slowest(self) -> float:
        """The largest of the four: the bound goes with this power."""
        return max(self.initial, self.step, self.staleness, self.window)

    @property
    def converges(self) -> bool:
        """Whether the bound goes to 0: max(a, b) < c < 1, c > 0 (eq. 31)."""
        return self.slowest < 0


def exponents(*, window: float, delay: float, decay: float) -> Exponents:
    """Return the powers for W = O(N^a), τ = O(N^b), η_l ∝ N^(−c): ``window`` a ≥ 0, ``delay`` b ≥ 0, ``decay`` c."""
    _growth(window, delay)
    return Exponents(initial=decay - 1, step=-decay, staleness=2 * (delay - decay), window=window - decay)


def fastest_decay(*, window: float, delay: float) -> float:
    """Return the c for which the slowest term falls fastest, max((1+a)/2, (1+2b)/3); not in the paper.

    Raises
    ------
    AssumptionError
        If a ≥ 1 or b ≥ 1: then no c makes the bound go to 0 (corollary 2).
    """
    _growth(window, delay)
    check(_COROLLARY, window < 1 and delay < 1, f"no step size converges for a = {window:g}, b = {delay:g}")
    return max((1 + window) / 2, (1 + 2 * delay) / 3)


# ---- Shared parts ----------------------------------------------------------------------------------------------

_COROLLARY = "Fraboni et al. 2023, corollary 2"


def _growth(window: float, delay: float) -> None:
    check(_COROLLARY, window >= 0 and delay >= 0, f"a = {window:g} and b = {delay:g} must be 0 or more")


def _shares(importances: ArrayLike, expected: ArrayLike) -> tuple[Array, Array, Array]:
    """Return r_j, s_j and s̃_j, checked."""
    r, s = np.asarray(importances, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    theorem = "Fraboni et al. 2023, section 2.6"
    check(
        theorem, r.ndim == 1 and s.shape[-1:] == r.shape, f"{r.shape} importances, {s.shape} expected weights"
    )
    check(
        theorem,
        bool((r >= 0).all()) and abs(float(r.sum()) - 1) <= _ROUNDING,
        f"importances must sum to 1: {r}",
    )
    check(theorem, bool((s >= 0).all()), "expected weights must be 0 or more")
    total = s.sum(axis=-1, keepdims=True)
    return r, s, np.divide(s, total, out=np.zeros_like(s), where=total > 0)


def _gaps(equation: str, gaps: ArrayLike) -> Array:
    g = np.asarray(gaps, dtype=np.float64)
    check(
        f"Fraboni et al. 2023, {equation}",
        bool((g >= 0).all()),
        "losses above their minima must be 0 or more",
    )
    return g
