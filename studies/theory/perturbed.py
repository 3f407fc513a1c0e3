"""FedProx and the spectral method: upper and lower bounds (Buttaci 2024, chapter 4).

Assumed (4.1 to 4.6): all clients in every round, E local steps each; unbiased gradients of variance at most σ², and
E‖g_i‖² ≤ G² at every local iterate; every f_i L-smooth; strongly convex cases: every f_i μ-strongly convex, μ > 0;
nonconvex cases: f bounded below (Δ is then f(w̄_0) − f_inf). Weights p_i are any, S = Σ p_i², L_α = L + α. FedAvg is
FedProx with α = 0, and the spectral method with β = 1; theorems 4.4 to 4.6 leave β = 1 out.

The upper bounds for any fixed step size are the appendix's lemmas B.2 and C.2; theorems 4.1 I and 4.4 I are the
lemmas at one step size, simplified and looser. Three misprints and one error of the thesis are corrected here:

* theorem 4.6 II has 3EG²/8 before its bracket; lemma C.6 with Σ γ_t³ ≤ 3/(16 L³ E^{3/2}) gives 3EG²/2.
* lemma C.5 has 4Δ/(γTE); lemma C.4 gives 2Δ/(γTE), and theorem 4.6 I has that.
* the main text's theorem 4.3 II has the step 1/(2L_α √(E(t+1))); the proof uses 1/(2L_α √E (t+1)).
* lemma B.4 bounds (L/2)‖αγx − γy‖² by (γ²L/2)‖y‖² + (γ²α²L/8)‖x‖², which fails for α = γ = 1, L = 2, x = 1, y = −1
  (4 > 1.25). Lγ²‖y‖² + Lγ²α²‖x‖² is right, and by γ ≤ 1/(2L) its first term is paid: −(γ/2)‖y‖² + Lγ²‖y‖² ≤ 0.
  The noise of y is independent of x and keeps its L/2. The lemma's last term is 4γ³α²LE²G² then (½ printed), and so
  theorem 4.3's last terms have ½ in place of 1/16, and 2/3 in place of 1/12.
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, Constants, as_rounds, check, check_exact_step, check_step

# ---- Step sizes ------------------------------------------------------------------------------------------------


def fixed_step(constants: Constants, local_steps: int, alpha: float = 0.0) -> float:
    """γ = 1/(2 L_α E), the step of theorems 4.1 I and, with α = 0, 4.4 I."""
    return 1 / (2 * (constants.L + alpha) * local_steps)


def diminishing_steps(rounds: ArrayLike, constants: Constants, local_steps: int, alpha: float = 0.0) -> Array:
    """γ_t = 4/(μE(8L_α/μ + t)), the steps of theorems 4.1 II and, with α = 0, 4.4 II; t ≥ 0."""
    check("Buttaci 2024, theorems 4.1 II and 4.4 II", constants.mu > 0, "mu must be above 0")
    t = as_rounds("Buttaci 2024, theorems 4.1 II and 4.4 II", rounds)
    steps: Array = 4 / (constants.mu * local_steps * (8 * (constants.L + alpha) / constants.mu + t))
    return steps


def nonconvex_fixed_step(
    num_rounds: ArrayLike, constants: Constants, local_steps: int, alpha: float = 0.0
) -> Array:
    """γ = 1/(2 L_α √(TE)), the step of theorems 4.3 I and, with α = 0, 4.6 I."""
    T = as_rounds("Buttaci 2024, theorems 4.3 I and 4.6 I", num_rounds, first=1)
    steps: Array = 1 / (2 * (constants.L + alpha) * np.sqrt(T * local_steps))
    return steps


def nonconvex_diminishing_steps(
    rounds: ArrayLike, constants: Constants, local_steps: int, alpha: float = 0.0
) -> Array:
    """γ_t = 1/(2 L_α √E (t+1)), the steps of theorems 4.3 II and, with α = 0, 4.6 II; t ≥ 0."""
    t = as_rounds("Buttaci 2024, theorems 4.3 II and 4.6 II", rounds)
    steps: Array = 1 / (2 * (constants.L + alpha) * np.sqrt(local_steps) * (t + 1))
    return steps


# ---- FedProx ---------------------------------------------------------------------------------------------------


def fedprox_bound(
    rounds: ArrayLike, constants: Constants, *, lr: float, local_steps: int, alpha: float = 0.0
) -> Array:
    """Bound E f(w̄_t) − f* for strongly convex losses and any fixed step (lemma B.2).

    (L/μ) κ^t (Δ − R) + LR/μ,  κ = (α + μ(1 − γ(α+μ))^E) / (α+μ),  R = γESσ²/2 + 3γLEΓ + 4γE³G²

    Parameters
    ----------
    rounds : array
        t ≥ 0.
    constants : Constants
        L, mu > 0, S, sigma2, Gamma, G2 and Delta are used.
    lr : float
        γ ≤ min(1/(2L), 1/(α+μ)).
    local_steps, alpha : int, float
        E ≥ 1; α ≥ 0.
    """
    lemma, c, E = "Buttaci 2024, lemma B.2", constants, local_steps
    t = as_rounds(lemma, rounds)
    _check_convex(lemma, c, E, alpha)
    check_step(lemma, lr, min(1 / (2 * c.L), 1 / (alpha + c.mu)), "min(1/(2L), 1/(α+μ))")
    contraction = (alpha + c.mu * (1 - lr * (alpha + c.mu)) ** E) / (alpha + c.mu)
    return _contract(t, c, contraction, _residual(c, lr, E, 4.0))


def fedprox_fixed_bound(
    rounds: ArrayLike, constants: Constants, *, lr: float, local_steps: int, alpha: float = 0.0
) -> Array:
    """Bound E f(w̄_t) − f* for strongly convex losses and γ = 1/(2L_αE) (theorem 4.1 I).

    (LΔ/μ)(1 − μ/(3L_α))^t + (L/L_α)[Sσ²/(4μ) + 3LΓ/(2μ) + 2E²G²/μ]; arguments as in ``fedprox_bound``.
    """
    theorem, c, E = "Buttaci 2024, theorem 4.1 I", constants, local_steps
    t = as_rounds(theorem, rounds)
    _check_convex(theorem, c, E, alpha)
    check_exact_step(theorem, lr, fixed_step(c, E, alpha), "1/(2(L+α)E)")
    floor = c.S * c.sigma2 / 4 + 3 * c.L * c.Gamma / 2 + 2 * E**2 * c.G2
    La = c.L + alpha
    bound: Array = c.L * c.Delta / c.mu * (1 - c.mu / (3 * La)) ** t + c.L / La * floor / c.mu
    return bound


def fedprox_diminishing_bound(
    rounds: ArrayLike, constants: Constants, *, local_steps: int, alpha: float = 0.0
) -> Array:
    """Bound E f(w̄_t) − f* for strongly convex losses and ``diminishing_steps`` (theorem 4.1 II).

    (L/μ) (8L_α/μ)/(8L_α/μ + t) [Δ + Sσ²/(L_αE) + 6LΓ/(L_αE) + 8EG²/L_α]
    """
    theorem, c, E = "Buttaci 2024, theorem 4.1 II", constants, local_steps
    t = as_rounds(theorem, rounds)
    _check_convex(theorem, c, E, alpha)
    La = c.L + alpha
    level = c.Delta + (c.S * c.sigma2 + 6 * c.L * c.Gamma) / (La * E) + 8 * E * c.G2 / La
    bound: Array = c.L / c.mu * (8 * La / c.mu) / (8 * La / c.mu + t) * level
    return bound


def fedprox_best_local_steps(constants: Constants) -> float:
    """Return the E with the least bound of theorem 4.1 II, for every t and α (section 4.4).

    E = √((Sσ² + 6LΓ)/8) / G, or 1 if that is less. S, L, sigma2, Gamma and G2 > 0 are used.
    """
    return _best_local_steps("Buttaci 2024, theorem 4.1 II", constants, 1.0)


def fedprox_nonconvex_fixed_bound(
    num_rounds: ArrayLike, constants: Constants, *, local_steps: int, alpha: float = 0.0
) -> Array:
    """Bound the mean of E‖∇f(w̄_{t,k})‖² over t < T, k < E, for ``nonconvex_fixed_step`` (theorem 4.3 I, corrected).

    T^(−1/2) [8L_αΔ/√E + LSσ²/(L_α√E) + αE^(3/2)G²/L_α] + 2L²EG²/(L_α²T) + α²L√E G²/(2 L_α³ T^(3/2))
    """
    theorem, c, E = "Buttaci 2024, theorem 4.3 I", constants, local_steps
    T = as_rounds(theorem, num_rounds, first=1)
    _check_local(theorem, E, alpha)
    La = c.L + alpha
    slow = (8 * La * c.Delta + c.L * c.S * c.sigma2 / La) / np.sqrt(E) + alpha * E**1.5 * c.G2 / La
    bound: Array = slow / np.sqrt(T) + 2 * c.L**2 * E * c.G2 / (La**2 * T)
    bound += alpha**2 * c.L * np.sqrt(E) * c.G2 / (2 * La**3 * T**1.5)
    return bound


def fedprox_nonconvex_diminishing_bound(
    num_rounds: ArrayLike, constants: Constants, *, local_steps: int, alpha: float = 0.0
) -> Array:
    """Bound the γ_t-weighted mean of E‖∇f(w̄_{t,k})‖² for ``nonconvex_diminishing_steps`` (theorem 4.3 II, corrected).

    (1/ln(T+1)) [8L_αΔ/√E + 2LSσ²/(L_α√E) + G²(2αE^(3/2)/L_α + 3L²E/L_α² + 2α²L√E/(3L_α³))]
    """
    theorem, c, E = "Buttaci 2024, theorem 4.3 II", constants, local_steps
    T = as_rounds(theorem, num_rounds, first=1)
    _check_local(theorem, E, alpha)
    La = c.L + alpha
    level = (8 * La * c.Delta + 2 * c.L * c.S * c.sigma2 / La) / np.sqrt(E)
    level += c.G2 * (2 * alpha * E**1.5 / La + 3 * c.L**2 * E / La**2)
    level += c.G2 * 2 * alpha**2 * c.L * np.sqrt(E) / (3 * La**3)
    bound: Array = level / np.log(T + 1)
    return bound


def fedprox_lower_bound(
    rounds: ArrayLike, constants: Constants, *, lr: float, local_steps: int, pull: float, alpha: float = 0.0
) -> Array:
    """Bound E f(w̄_t) − f* from below on ``problems.lower_bound_problem`` (theorem 4.2).

    min{ Δ [1 − 3μ/(4(α+μ))]^{2t}, (t+1)^(−2) [3μ³A²G²/(128E²(α+μ)⁴) + 3μSσ²/(64E(α+μ)²)] }

    The theorem leaves A open; by the proof of lemma B.7 it is 1 − (1 − γ(α+μ))^{E−1}.

    Parameters
    ----------
    rounds : array
        t ≥ 0.
    constants : Constants
        S, sigma2, Delta and L of the problem are used. L is the theorem's μ: half of the clients are μ-convex, half
        μ/2-convex.
    lr : float
        γ ≤ 1/(E(α+μ)), fixed.
    local_steps : int
        E ≥ 2.
    pull : float
        G, the slope by which the two halves of the clients pull apart (not a bound on gradients here).
    """
    theorem, c, E, mu = "Buttaci 2024, theorem 4.2", constants, local_steps, constants.L
    t = as_rounds(theorem, rounds)
    _check_local(theorem, E, alpha, least=2)
    check_step(theorem, lr, 1 / (E * (alpha + mu)), "1/(E(α+μ))")
    A = 1 - (1 - lr * (alpha + mu)) ** (E - 1)
    drift = 3 * mu**3 * A**2 * pull**2 / (128 * E**2 * (alpha + mu) ** 4)
    noise = 3 * mu * c.S * c.sigma2 / (64 * E * (alpha + mu) ** 2)
    bound: Array = np.minimum(
        c.Delta * (1 - 3 * mu / (4 * (alpha + mu))) ** (2 * t), (drift + noise) / (t + 1) ** 2
    )
    return bound


# ---- The spectral method ---------------------------------------------------------------------------------------


def spectral_bound(
    rounds: ArrayLike, constants: Constants, *, lr: float, local_steps: int, beta: float
) -> Array:
    """Bound E f(w̄_t) − f* for strongly convex losses and any fixed step (lemma C.2).

    (L/μ) κ^t (Δ − R) + LR/μ,  κ = 1 − 1/β + (1 − βμγ)^E/β,
    R = γESσ²/2 + 3γLEΓ + 4γE³G²[4 + (1−β)² + 8(1 − 1/β)²] + μγ²β(1−β)E³G²/2

    Parameters
    ----------
    rounds, constants, local_steps
        As in ``fedprox_bound``.
    lr : float
        γ ≤ min(1/(2L), 1/(βμ)), and γβμ ≤ 1 − (1−β)^(1/E): for a larger γ, κ is negative and the lemma says nothing.
    beta : float
        β in (0, 1).
    """
    lemma, c, E = "Buttaci 2024, lemma C.2", constants, local_steps
    t = as_rounds(lemma, rounds)
    _check_convex(lemma, c, E)
    _check_beta(lemma, beta)
    check_step(lemma, lr, min(1 / (2 * c.L), 1 / (beta * c.mu)), "min(1/(2L), 1/(βμ))")
    check_step(lemma, lr, (1 - (1 - beta) ** (1 / E)) / (beta * c.mu), "(1 − (1−β)^(1/E))/(βμ)")
    contraction = max(0.0, 1 - 1 / beta + (1 - beta * c.mu * lr) ** E / beta)
    residual = _residual(c, lr, E, 4 * spread(beta, 8))
    residual += c.mu * lr**2 * beta * (1 - beta) * E**3 * c.G2 / 2
    return _contract(t, c, contraction, residual)


def spectral_fixed_bound(
    rounds: ArrayLike, constants: Constants, *, lr: float, local_steps: int, beta: float
) -> Array:
    """Bound E f(w̄_t) − f* for strongly convex losses and γ = 1/(2LE) (theorem 4.4 I).

    (LΔ/μ)(1 − μ/((β+2)L))^t + Sσ²/(4μ) + 3LΓ/(2μ) + 2AE²G²/μ + β(1−β)EG²/(8L),  A = 4 + (1−β)² + 8(1 − 1/β)²
    """
    theorem, c, E = "Buttaci 2024, theorem 4.4 I", constants, local_steps
    t = as_rounds(theorem, rounds)
    _check_convex(theorem, c, E)
    _check_beta(theorem, beta)
    check_exact_step(theorem, lr, fixed_step(c, E), "1/(2LE)")
    floor = c.S * c.sigma2 / 4 + 3 * c.L * c.Gamma / 2 + 2 * spread(beta, 8) * E**2 * c.G2
    bound: Array = c.L * c.Delta / c.mu * (1 - c.mu / ((beta + 2) * c.L)) ** t + floor / c.mu
    bound += beta * (1 - beta) * E * c.G2 / (8 * c.L)
    return bound


def spectral_diminishing_bound(
    rounds: ArrayLike, constants: Constants, *, local_steps: int, beta: float
) -> Array:
    """Bound E f(w̄_t) − f* for strongly convex losses and ``diminishing_steps`` (theorem 4.4 II).

    (L/μ) (8L/μ)/(8L/μ + t) [Δ + Sσ²/(LE) + 6Γ/E + 8AEG²/L + μβ(1−β)G²/(2L²)],  A = 4 + (1−β)² + 32(1 − 1/β)²
    """
    theorem, c, E = "Buttaci 2024, theorem 4.4 II", constants, local_steps
    t = as_rounds(theorem, rounds)
    _check_convex(theorem, c, E)
    _check_beta(theorem, beta)
    level = c.Delta + c.S * c.sigma2 / (c.L * E) + 6 * c.Gamma / E
    level += 8 * spread(beta, 32) * E * c.G2 / c.L + c.mu * beta * (1 - beta) * c.G2 / (2 * c.L**2)
    bound: Array = c.L / c.mu * (8 * c.L / c.mu) / (8 * c.L / c.mu + t) * level
    return bound


def spectral_best_local_steps(constants: Constants, *, beta: float) -> float:
    """Return the E with the least bound of theorem 4.4 II, for every t (section 4.4).

    E = √((Sσ² + 6LΓ)/(8A)) / G with A as in ``spectral_diminishing_bound``, or 1 if that is less. S, L, sigma2, Gamma
    and G2 > 0 are used.
    """
    theorem = "Buttaci 2024, theorem 4.4 II"
    _check_beta(theorem, beta)
    return _best_local_steps(theorem, constants, spread(beta, 32))


def spectral_nonconvex_fixed_bound(
    num_rounds: ArrayLike, constants: Constants, *, local_steps: int, beta: float
) -> Array:
    """Bound the mean of E‖∇f(w̄_{t,k})‖² over t < T, k < E, for ``nonconvex_fixed_step`` (theorem 4.6 I).

    T^(−1/2) [4LΔ/√E + Sσ²/(2√E)] + (EG²/T) [4 + (1−β)² + 8(1 − 1/β)²]
    """
    theorem, E = "Buttaci 2024, theorem 4.6 I", local_steps
    T = as_rounds(theorem, num_rounds, first=1)
    _check_local(theorem, E)
    _check_beta(theorem, beta)
    slow, fast = _nonconvex_rates(constants, beta)
    bound: Array = slow / np.sqrt(T * E) + fast * E / T
    return bound


def spectral_nonconvex_diminishing_bound(
    num_rounds: ArrayLike, constants: Constants, *, local_steps: int, beta: float
) -> Array:
    """Bound the γ_t-weighted mean of E‖∇f(w̄_{t,k})‖² for ``nonconvex_diminishing_steps`` (theorem 4.6 II, corrected).

    (1/ln(T+1)) [4LΔ/√E + Sσ²/√E + (3EG²/2) [4 + (1−β)² + 32(1 − 1/β)²]]
    """
    theorem, c, E = "Buttaci 2024, theorem 4.6 II", constants, local_steps
    T = as_rounds(theorem, num_rounds, first=1)
    _check_local(theorem, E)
    _check_beta(theorem, beta)
    level = (4 * c.L * c.Delta + c.S * c.sigma2) / np.sqrt(E) + 1.5 * E * c.G2 * spread(beta, 32)
    bound: Array = level / np.log(T + 1)
    return bound


def optimal_local_steps(num_rounds: ArrayLike, constants: Constants, *, beta: float) -> Array:
    """Return the (real) E that minimises theorem 4.6 I for T rounds: (A/(2B))^(2/3) T^(1/3) (corollary 4.1).

    A = 4LΔ + Sσ²/2 and B = G²[4 + (1−β)² + 8(1 − 1/β)²]; the bound with this E is
    3 · 2^(−2/3) A^(2/3) B^(1/3) T^(−2/3). AssumptionError for G = 0, where the bound falls with every further step.
    """
    theorem = "Buttaci 2024, corollary 4.1"
    T = as_rounds(theorem, num_rounds, first=1)
    _check_beta(theorem, beta)
    check(theorem, constants.G2 != 0, "G² must be above 0: without it no E is the best")
    slow, fast = _nonconvex_rates(constants, beta)
    steps: Array = (slow / (2 * fast)) ** (2 / 3) * np.cbrt(T)
    return steps


def spectral_lower_bound(
    rounds: ArrayLike, constants: Constants, *, lr: float, local_steps: int, pull: float, beta: float
) -> Array:
    """Bound E f(w̄_t) − f* from below on ``problems.lower_bound_problem`` (theorem 4.5).

    min{ Δ (β/4)^{2t}, (t+1)^(−2) [3A²G²/(128E²μ) + 3Sσ²/(64Eμ)] },  A = 1 − (1 − γβμ)^{E−1}

    It holds where every client's neighbour average is the global model, u_t^i = w̄_{t,0}; γ ≤ 1/(μE). Other arguments
    as in ``fedprox_lower_bound``.
    """
    theorem, c, E, mu = "Buttaci 2024, theorem 4.5", constants, local_steps, constants.L
    t = as_rounds(theorem, rounds)
    _check_local(theorem, E, least=2)
    _check_beta(theorem, beta)
    check_step(theorem, lr, 1 / (E * mu), "1/(μE)")
    A = 1 - (1 - lr * beta * mu) ** (E - 1)
    floor = 3 * A**2 * pull**2 / (128 * E**2 * mu) + 3 * c.S * c.sigma2 / (64 * E * mu)
    bound: Array = np.minimum(c.Delta * (beta / 4) ** (2 * t), floor / (t + 1) ** 2)
    return bound


# ---- Shared parts ----------------------------------------------------------------------------------------------


def _contract(t: Array, c: Constants, contraction: float, residual: float) -> Array:
    left = contraction**t  # κ^t Δ + (1 − κ^t) R: with κ^t (Δ − R) + R a large R would swallow Δ
    bound: Array = c.L / c.mu * (left * c.Delta + (1 - left) * residual)
    return bound


def _residual(c: Constants, lr: float, E: int, spread: float) -> float:
    return lr * E * (c.S * c.sigma2 / 2 + 3 * c.L * c.Gamma + spread * E**2 * c.G2)


def _best_local_steps(theorem: str, c: Constants, growth: float) -> float:
    check(theorem, c.G2 > 0, "G2 must be above 0")
    return max(1.0, math.sqrt((c.S * c.sigma2 + 6 * c.L * c.Gamma) / (8 * growth * c.G2)))


def spread(beta: float, memory: float) -> float:
    """4 + (1−β)² + m(1 − 1/β)² with m = ``memory``: 8 for fixed steps, 32 for diminishing steps."""
    return 4 + (1 - beta) ** 2 + memory * (1 - 1 / beta) ** 2


def _nonconvex_rates(c: Constants, beta: float) -> tuple[float, float]:
    """A and B of theorem 4.6 I = A/√(TE) + BE/T."""
    return 4 * c.L * c.Delta + c.S * c.sigma2 / 2, c.G2 * spread(beta, 8)


def _check_convex(theorem: str, c: Constants, E: int, alpha: float = 0.0) -> None:
    check(theorem, c.mu > 0, f"losses must be strongly convex, mu is {c.mu:.6g}")
    _check_local(theorem, E, alpha)


def _check_local(theorem: str, E: int, alpha: float = 0.0, least: int = 1) -> None:
    check(theorem, least <= E, f"local steps must be {least} or more, are {E}")
    check(theorem, alpha >= 0, f"alpha must be 0 or more, is {alpha:.6g}")


def _check_beta(theorem: str, beta: float) -> None:
    check(theorem, 0 < beta < 1, f"beta must be in (0, 1), is {beta:.6g}")
