"""FedAvg under a Łojasiewicz condition (001, appendix F).

Assumed: every f_c L-smooth (FL-1); ‖∇f_c‖² ≥ μ (f_c − f_c*)^α with α in [1, 2] (FL-2); (1/C) Σ ‖∇f_c − ∇F‖² ≤ ζ²
(FL-3); unbiased gradients of variance at most σ² (FL-4); all C clients in every round with p_c = 1/C and H local
steps.

Two definitions differ from other papers. The bounds are on F − F* with F* = (1/C) Σ f_c*, which lies Γ below min F:
F(θ_0) − F* is Δ + Γ. And μ is the constant of FL-2: an m-strongly convex loss has α = 1 and μ = 2m.

On all of space FL-1 and FL-2 with α > 1 hold for constants alone: smoothness bounds f_c − f_c* (``largest_gap``),
while uphill f_c grows without end, by μ(f_c − f_c*)^α a unit of time along its gradient. The bounds for α > 1 are
about a region that no model leaves, and L, μ and ζ² are those of this region; on a bounded one, strongly convex
losses have every α in (1, 2].

The proofs of lemma F.3 and theorem F.4 slip twice, without harm. Lemma F.3 takes eq. 35, which gives η/2 only for
η ≤ 1/(2L); without its Young's inequality it does for η ≤ 1/L. Theorem F.4 drops 3η³H(H−1)L²σ² of eq. 39, at most a
24th of the noise that it keeps; the factor 2 before its noise term has room for it.
"""

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, Constants, as_rounds, check, check_step


def pl_bound(rounds: ArrayLike, constants: Constants, *, mu: float, lr: float, local_steps: int) -> Array:
    """Bound E F(θ_R) − F* where α = 1 (theorem F.2).

    H = 1:  (1 − ημ/2)^R (F_0 − F*) + ζ²/μ + 2Lησ²/(Cμ)
    H > 1:  (1 − ηHμ/4)^R (F_0 − F*) + 8ζ²/μ + 16ηLσ²/(Cμ) + 12η²(H−1)L²σ²/μ

    The theorem is printed without 1/μ in its two σ² terms; unrolling its recursion (39) gives it, as in theorem F.4.
    For H = 1 its proof has the tighter line: no client drifts, as in lemma F.3.

    Parameters
    ----------
    rounds : array
        R ≥ 0.
    constants : Constants
        C, L, sigma2, mean_zeta2, Delta and Gamma are used.
    mu : float
        FL-2's μ in (0, 2L]: twice the strong convexity.
    lr, local_steps : float, int
        η ≤ 1/(2L) for H = 1, η ≤ 1/(18LH) for H > 1.
    """
    theorem, c, H = "001 theorem F.2", constants, local_steps
    R = as_rounds(theorem, rounds)
    check(theorem, 0 < mu <= 2 * c.L, f"mu must be in (0, 2L = {2 * c.L:.6g}], is {mu:.6g}")
    check(theorem, H >= 1, f"local steps must be 1 or more, are {H}")
    bound: Array
    if H == 1:
        check_step(theorem, lr, 1 / (2 * c.L), "1/(2L)")
        bound = (1 - lr * mu / 2) ** R * (c.Delta + c.Gamma)
        bound += (c.mean_zeta2 + 2 * c.L * lr * c.sigma2 / c.num_clients) / mu
        return bound
    check_step(theorem, lr, 1 / (18 * c.L * H), "1/(18LH)")
    noise = 16 * lr * c.L * c.sigma2 / c.num_clients + 12 * lr**2 * (H - 1) * c.L**2 * c.sigma2
    bound = (1 - lr * H * mu / 4) ** R * (c.Delta + c.Gamma) + (8 * c.mean_zeta2 + noise) / mu
    return bound


def largest_gap(constants: Constants, *, mu: float, exponent: float) -> float:
    """Return the largest f_c − f_c* that FL-1 and FL-2 allow together, (2L/μ)^(1/(α−1)): not in 001.

    μ(f_c − f_c*)^α ≤ ‖∇f_c‖² ≤ 2L(f_c − f_c*).

    Parameters
    ----------
    constants : Constants
        L is used.
    mu, exponent : float
        FL-2's μ > 0 and α in (1, 2].
    """
    _check_exponent("001, FL-2", mu, exponent)
    # As a logarithm: near α = 1 the power leaves float64.
    return float(np.exp(min(np.log(2 * constants.L / mu) / (exponent - 1), 700.0)))


def lojasiewicz_bound(
    rounds: ArrayLike, constants: Constants, *, mu: float, exponent: float, lr: float, local_steps: int
) -> Array:
    """Bound E F(θ_R) − F* where 1 < α ≤ 2 (lemma F.3 for H = 1, theorem F.4 for more local steps).

    With s = F_0 − F*:

        H = 1:  s / (ημR(α−1)s^(α−1)/4 + 1)^(1/(α−1)) + 2(ζ²/μ)^(1/α) + 2(2Lησ²/(Cμ))^(1/α)
        H > 1:  s / (1 + R^(1/(α−1)) s (ηHμ(α−1)/4)^(1/(α−1))) + 2(8ζ²/μ)^(1/α) + 2(16Lησ²/(Cμ))^(1/α)

    Parameters
    ----------
    rounds, constants
        As in ``pl_bound``.
    mu, exponent : float
        FL-2's μ > 0 and α in (1, 2].
    lr, local_steps : float, int
        η ≤ 1/L for H = 1, η ≤ 1/(18CLH) for H > 1.

    Raises
    ------
    AssumptionError
        Also if s is above ``largest_gap``: no losses have such constants.
    """
    theorem = "001 lemma F.3" if local_steps == 1 else "001 theorem F.4"
    c, a = constants, exponent
    R = as_rounds(theorem, rounds)
    _check_exponent(theorem, mu, a)
    check(theorem, local_steps >= 1, f"local steps must be 1 or more, are {local_steps}")
    s, power = c.Delta + c.Gamma, 1 / (a - 1)
    bound: Array
    if local_steps == 1:
        check_step(theorem, lr, 1 / c.L, "1/L")
        with np.errstate(over="ignore"):  # the power may be inf, and the term is then 0
            transient = s / (lr * mu * R * (a - 1) * s ** (a - 1) / 4 + 1) ** power
        drift, noise = c.mean_zeta2, 2 * c.L * lr * c.sigma2 / c.num_clients
    else:
        check_step(theorem, lr, 1 / (18 * c.num_clients * c.L * local_steps), "1/(18CLH)")
        with np.errstate(over="ignore"):
            # One power of the product: near α = 1 powers of its factors would be inf and 0.
            grown = (R * lr * local_steps * mu * (a - 1) / 4) ** power
            transient = s / (1 + grown * s) if s else np.zeros_like(R)
        drift, noise = 8 * c.mean_zeta2, 16 * c.L * lr * c.sigma2 / c.num_clients
    most = largest_gap(c, mu=mu, exponent=a)
    check(
        theorem,
        not s > most * (1 + 1e-9),
        f"with L, mu and the exponent F − F* is {most:.6g} at most, not {s:.6g}",
    )
    bound = transient + 2 * (drift / mu) ** (1 / a) + 2 * (noise / mu) ** (1 / a)
    return bound


def drift_bound(gradient2: ArrayLike, constants: Constants, *, lr: float, local_steps: int) -> Array:
    """Bound (1/CH) Σ_c Σ_{h=1}^{H−1} E‖θ_r − θ_{r,h}^c‖² within a round (lemma F.1, eq. 34).

    4η²(H−1)²‖∇F(θ_r)‖² + 4η²(H−1)²ζ² + 4η²(H−1)σ²

    The lemma prints η ≤ 1/(LH); its proof uses ηHL ≤ 1/2, and so does this function.

    Parameters
    ----------
    gradient2 : array
        ‖∇F(θ_r)‖² ≥ 0.
    constants : Constants
        L, sigma2 and mean_zeta2 are used.
    lr, local_steps : float, int
        η ≤ 1/(2LH); H ≥ 1.
    """
    theorem, c, H = "001 lemma F.1", constants, local_steps
    squares = np.asarray(gradient2, dtype=np.float64)
    check(theorem, bool((squares >= 0).all()), f"squared norms must be 0 or more, are {squares}")
    check(theorem, H >= 1, f"local steps must be 1 or more, are {H}")
    check_step(theorem, lr, 1 / (2 * c.L * H), "1/(2LH)")
    bound: Array = 4 * lr**2 * (H - 1) * ((H - 1) * (squares + c.mean_zeta2) + c.sigma2)
    return bound


def _check_exponent(theorem: str, mu: float, exponent: float) -> None:
    check(theorem, 1 < exponent <= 2, f"the exponent must be in (1, 2], is {exponent:.6g}")
    check(theorem, mu > 0, f"mu must be above 0, is {mu:.6g}")
