"""FedAvg on convex losses (Dhasade, Kremer & Renard, section 2 and appendix 2).

Assumed: every f_i convex and L-smooth, unbiased gradients of variance at most σ², ‖∇f_i − ∇f‖ ≤ ζ everywhere, all C
clients in every round with p_i = 1/C, and τ local steps of the same size η. The *shadow sequence* x̄^(t,k) is the mean
of the clients' models after k local steps of round t.
"""

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, Constants, as_rounds, check, check_step


def convex_bound(rounds: ArrayLike, constants: Constants, *, lr: float, local_steps: int) -> Array:
    """Bound the mean of f(x̄^(t,k)) − f* over rounds t < T and steps k = 1..τ (eq. 1, theorem 2.1).

    D²/(2ητT) + ησ²/C + 4τη²Lσ² + 18τ²η²Lζ²

    Parameters
    ----------
    rounds : array
        T ≥ 1.
    constants : Constants
        C, L, sigma2, zeta2 and distance2 are used.
    lr, local_steps : float, int
        η ≤ 1/(4L); τ ≥ 1.
    """
    _check("Dhasade et al., theorem 2.1", constants, lr, local_steps)
    T = as_rounds("Dhasade et al., theorem 2.1", rounds, first=1)
    noise = lr * constants.sigma2 / constants.num_clients
    floor = constants.L * drift_bound(constants, lr=lr, local_steps=local_steps)
    bound: Array = constants.distance2 / (2 * lr * local_steps * T) + noise + floor
    return bound


def convex_floor(constants: Constants, *, lr: float, local_steps: int) -> float:
    """Return the limit of ``convex_bound`` for many rounds without gradient noise: 18τ²η²Lζ² (eq. 2).

    Section 4.1 once prints it as "18τ² + η²Lζ²", which is a slip. Ranges as in ``convex_bound``.
    """
    _check("Dhasade et al., eq. 2", constants, lr, local_steps)
    return 18 * local_steps**2 * lr**2 * constants.L * constants.zeta2


def drift_bound(constants: Constants, *, lr: float, local_steps: int) -> float:
    """Bound E‖x_i^(t,k) − x̄^(t,k)‖² within a round by 18τ²η²ζ² + 4τη²σ² (lemma 2.3).

    Arguments and their ranges as in ``convex_bound``.
    """
    _check("Dhasade et al., lemma 2.3", constants, lr, local_steps)
    return lr**2 * (18 * local_steps**2 * constants.zeta2 + 4 * local_steps * constants.sigma2)


def progress_bound(
    before: ArrayLike,
    after: ArrayLike,
    drift: ArrayLike,
    constants: Constants,
    *,
    lr: float,
    local_steps: int,
) -> Array:
    """Bound the mean of E f(x̄^(t,k)) − f* over the steps k = 1..τ of one round t (lemma 2.2, eq. 5, corrected).

    (‖x̄^(t,0) − x*‖² − E‖x̄^(t,τ) − x*‖²)/(2ητ) + ησ²/C + (L/(Cτ)) Σ_i Σ_{k<τ} E‖x_i^(t,k) − x̄^(t,k)‖²

    Eq. 5 is printed without L before the drift; its proof has it, and so does theorem 2.1. Without it the two sides
    have different units, and where L is large the lemma is false.

    Parameters
    ----------
    before, after : array
        Squared distances to x* of the global model at the start of this round and of the next one, in expectation.
    drift : array
        (1/C) Σ_i E‖x_i^(t,k) − x̄^(t,k)‖², the mean over k = 0..τ−1, of which k = 0 adds 0. ``drift_bound`` bounds it.
    constants : Constants
        C, L and sigma2 are used.
    lr, local_steps : float, int
        η ≤ 1/(4L); τ ≥ 1.
    """
    theorem = "Dhasade et al., lemma 2.2"
    _check(theorem, constants, lr, local_steps)
    start, end, apart = (np.asarray(each, dtype=np.float64) for each in (before, after, drift))
    least = min(float(each.min(initial=0.0)) for each in (start, end, apart))
    check(theorem, least >= 0, f"squared distances must be 0 or more, one is {least:.6g}")
    noise = lr * constants.sigma2 / constants.num_clients
    bound: Array = (start - end) / (2 * lr * local_steps) + noise + constants.L * apart
    return bound


def _check(theorem: str, constants: Constants, lr: float, local_steps: int) -> None:
    check_step(theorem, lr, 1 / (4 * constants.L), "1/(4L)")
    check(theorem, local_steps >= 1, f"local steps must be 1 or more, are {local_steps}")
