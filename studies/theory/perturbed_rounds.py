"""Distances within a round of FedProx and the spectral method, and rounds to an accuracy (Buttaci 2024).

Lemmas 4.1, 4.2, 4.4 and 4.5 bound the distances between iterates by G alone. They assume, as ``perturbed`` does: all
clients in every round, E local steps, E‖g_i‖² ≤ G² wherever a client takes a gradient. T_ε (section 4.4) is the
number of rounds for which theorem 4.3 I or 4.6 I promises a mean squared gradient of ε.

Lemma 4.5 has a term in 1/β², and theorems 4.4 and 4.6 inherit it. The cause is the proof, which divides by β, and not
the method: ``spectral_drift_minkowski_bound`` bounds the same distance without the term. With (3−β)²/4 in place of
the bracket 4 + (1−β)² + 8(1−1/β)² both theorems hold at fixed steps, since the bracket comes from lemma 4.5 alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, Constants, StepSizeError, check, check_step
from studies.theory.perturbed import fedprox_nonconvex_fixed_bound, spectral_nonconvex_fixed_bound, spread

# ---- Distances within a round ----------------------------------------------------------------------------------


def fedprox_deviation_bound(
    steps: ArrayLike, constants: Constants, *, lr: float, local_steps: int, alpha: float = 0.0
) -> Array:
    """Bound E‖w_{t,k}^i − w̄_{t,0}‖² after k local steps (lemma 4.1 and the last but one step of its proof).

    γ²k²G² ≤ γ²E²G²

    Parameters
    ----------
    steps : array
        k in 0..E; k = E gives the lemma.
    constants : Constants
        G2 is used.
    lr : float
        γ ≤ 1/α; any γ > 0 where α = 0.
    local_steps, alpha : int, float
        E ≥ 1; α ≥ 0.
    """
    lemma = "Buttaci 2024, lemma 4.1"
    k = np.asarray(steps, dtype=np.float64)
    _check_step(lemma, lr, local_steps, alpha)
    check(lemma, bool(((k >= 0) & (k <= local_steps)).all()), f"steps must be in 0..{local_steps}, are {k}")
    bound: Array = lr**2 * k**2 * constants.G2
    return bound


def fedprox_drift_bound(constants: Constants, *, lr: float, local_steps: int, alpha: float = 0.0) -> float:
    """Bound E‖w̄_{t,k} − w_{t,k}^i‖², a client's distance to the mean iterate, by 4γ²E²G² (lemma 4.2).

    Arguments as in ``fedprox_deviation_bound``.
    """
    _check_step("Buttaci 2024, lemma 4.2", lr, local_steps, alpha)
    return 4 * lr**2 * local_steps**2 * constants.G2


def neighbours_bound(constants: Constants, *, previous_lr: float, local_steps: int) -> float:
    """Bound E‖u_t^i − u_t^j‖² of two clients' neighbour averages by 4γ_{t−1}²E²G² (lemma 4.4).

    Parameters
    ----------
    constants : Constants
        G2 is used.
    previous_lr : float
        γ_{t−1}, the step size of the round before, whose local models are averaged; 0 for the first round (u_0 =
        w̄_0).
    local_steps : int
        E ≥ 1.
    """
    _check_previous("Buttaci 2024, lemma 4.4", previous_lr, local_steps)
    return 4 * previous_lr**2 * local_steps**2 * constants.G2


def spectral_drift_bound(
    constants: Constants, *, lr: float, previous_lr: float, local_steps: int, beta: float
) -> float:
    """Bound E‖w̄_{t,k} − w̃_{t,k}^i‖², how far from the mean iterate a client takes its gradient (lemma 4.5).

    4γ_t²E²G² [4 + (1−β)² + 8(γ_{t−1}/γ_t)²(1 − 1/β)²]

    Parameters
    ----------
    constants : Constants
        G2 at the points w̃ is used.
    lr, previous_lr : float
        γ_t > 0; γ_{t−1}, 0 for the first round.
    local_steps, beta : int, float
        E ≥ 1; β in (0, 1). The lemma needs the weights of the graph, p_i ∝ the row sums of A (lemma 4.3).
    """
    lemma, E = "Buttaci 2024, lemma 4.5", local_steps
    _check_drift(lemma, lr, previous_lr, E, beta)
    return 4 * lr**2 * E**2 * constants.G2 * spread(beta, 8 * (previous_lr / lr) ** 2)


def spectral_drift_minkowski_bound(
    constants: Constants, *, lr: float, previous_lr: float, local_steps: int, beta: float
) -> float:
    """Bound the same distance as ``spectral_drift_bound`` without a division by β: not in the thesis.

    E²G² [(1+β)γ_t + 2(1−β)γ_{t−1}]²; at fixed steps (3−β)²γ²E²G² ≤ 9γ²E²G², where the thesis has 16 and more.

    w̄ − w̃^i = β(w̄ − w^i) + (1−β)(w̄ − w̄_{t,0}) + (1−β)(w̄_{t,0} − u^i). In root mean square a local task goes at most
    γEG far. So the first difference is at most 2γ_tEG, the second at most γ_tEG, and the third at most 2γ_{t−1}EG,
    because w̄_{t,0} and u^i are both means of models that started at w̄_{t−1,0}. Minkowski's inequality adds the three.
    Arguments as in ``spectral_drift_bound``.
    """
    E = local_steps
    _check_drift("the bound beside lemma 4.5 of Buttaci 2024", lr, previous_lr, E, beta)
    return E**2 * constants.G2 * ((1 + beta) * lr + 2 * (1 - beta) * previous_lr) ** 2


# ---- Rounds to an accuracy -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundTerms:
    """Rounds after which each term of a bound by itself is ε, by ε: the arguments of O(·) in T_ε (section 4.4).

    After the largest of these numbers of rounds the bound is between ε and 5ε. T_ε is at least the largest number,
    and at most 25 times it.

    Attributes
    ----------
    start, noise : array
        ∝ Δ²/ε² and S²σ⁴/ε².
    pull : array
        ∝ α²G⁴/ε²; 0 for the spectral method.
    drift : array
        ∝ G²/ε.
    pull_squared : array
        ∝ (α²G²/ε)^(2/3); 0 for the spectral method.
    """

    start: Array
    noise: Array
    pull: Array
    drift: Array
    pull_squared: Array


def fedprox_round_terms(
    accuracy: ArrayLike, constants: Constants, *, local_steps: int, alpha: float = 0.0
) -> RoundTerms:
    """Return the terms of T_ε of FedProx, by theorem 4.3 I.

    64L_α²Δ²/(Eε²);  L²S²σ⁴/(L_α²Eε²);  α²E³G⁴/(L_α²ε²);  2L²EG²/(L_α²ε);
    α^(4/3)L^(2/3)E^(1/3)G^(4/3)/(2^(2/3)L_α²ε^(2/3))

    Parameters
    ----------
    accuracy : array
        ε > 0.
    constants : Constants
        L, S, sigma2, G2 and Delta are used.
    local_steps, alpha : int, float
        E ≥ 1; α ≥ 0.
    """
    c, E, La = constants, local_steps, constants.L + alpha
    e = _accuracy(accuracy, E, alpha)
    return RoundTerms(
        start=64 * La**2 * c.Delta**2 / (E * e**2),
        noise=(c.L * c.S * c.sigma2 / La) ** 2 / (E * e**2),
        pull=alpha**2 * E**3 * c.G2**2 / (La * e) ** 2,
        drift=2 * c.L**2 * E * c.G2 / (La**2 * e),
        pull_squared=(alpha**2 * c.L * np.sqrt(E) * c.G2 / (2 * e)) ** (2 / 3) / La**2,
    )


def spectral_round_terms(
    accuracy: ArrayLike, constants: Constants, *, local_steps: int, beta: float
) -> RoundTerms:
    """Return the terms of T_ε of the spectral method, by theorem 4.6 I; the two terms of FedProx's pull are 0.

    16L²Δ²/(Eε²);  S²σ⁴/(4Eε²);  0;  (EG²/ε)[4 + (1−β)² + 8(1 − 1/β)²];  0

    The first term is a quarter of FedProx's at α = 0, though FedProx at α = 0 and the spectral method at β = 1 are
    both FedAvg: the proofs differ. Arguments as in ``fedprox_round_terms``; β in (0, 1).
    """
    c, E = constants, local_steps
    e = _accuracy(accuracy, E, 0.0)
    check(_TERMS, 0 < beta < 1, f"beta must be in (0, 1), is {beta:.6g}")
    return RoundTerms(
        start=16 * c.L**2 * c.Delta**2 / (E * e**2),
        noise=(c.S * c.sigma2) ** 2 / (4 * E * e**2),
        pull=np.zeros_like(e),
        drift=E * c.G2 / e * spread(beta, 8),
        pull_squared=np.zeros_like(e),
    )


def fedprox_rounds(accuracy: float, constants: Constants, *, local_steps: int, alpha: float = 0.0) -> int:
    """Return T_ε, the fewest rounds T for which theorem 4.3 I with T's ``nonconvex_fixed_step`` is at most ε."""
    _accuracy(accuracy, local_steps, alpha)
    return _fewest(
        lambda T: float(fedprox_nonconvex_fixed_bound(T, constants, local_steps=local_steps, alpha=alpha)),
        accuracy,
    )


def spectral_rounds(accuracy: float, constants: Constants, *, local_steps: int, beta: float) -> int:
    """Return T_ε, the fewest rounds T for which theorem 4.6 I with T's ``nonconvex_fixed_step`` is at most ε."""
    _accuracy(accuracy, local_steps, 0.0)
    return _fewest(
        lambda T: float(spectral_nonconvex_fixed_bound(T, constants, local_steps=local_steps, beta=beta)),
        accuracy,
    )


# ---- Shared parts ----------------------------------------------------------------------------------------------

_TERMS = "Buttaci 2024, T_ε"


def _fewest(bound: Callable[[int], float], accuracy: float) -> int:
    """Return the least T ≥ 1 at which a bound that falls with T is at most ``accuracy``: exact, by bisection."""
    check(_TERMS, np.isfinite(bound(1)), f"a constant is missing: the bound is {bound(1)}")
    enough = 1
    while bound(enough) > accuracy:
        enough *= 2
    few = enough // 2
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (middle, enough) if bound(middle) > accuracy else (few, middle)
    return enough


def _accuracy(accuracy: ArrayLike, local_steps: int, alpha: float) -> Array:
    e = np.asarray(accuracy, dtype=np.float64)
    check(_TERMS, bool((e > 0).all()), f"the accuracy must be above 0, is {e}")
    check(_TERMS, local_steps >= 1, f"local steps must be 1 or more, are {local_steps}")
    check(_TERMS, alpha >= 0, f"alpha must be 0 or more, is {alpha:.6g}")
    return e


def _check_step(lemma: str, lr: float, local_steps: int, alpha: float) -> None:
    check(lemma, local_steps >= 1, f"local steps must be 1 or more, are {local_steps}")
    check(lemma, alpha >= 0, f"alpha must be 0 or more, is {alpha:.6g}")
    if alpha > 0:
        check_step(lemma, lr, 1 / alpha, "1/α")
    elif not 0 < lr < np.inf:
        raise StepSizeError(f"{lemma}: step size {lr:.6g} must be above 0")


def _check_drift(lemma: str, lr: float, previous_lr: float, local_steps: int, beta: float) -> None:
    _check_step(lemma, lr, local_steps, 0.0)
    _check_previous(lemma, previous_lr, local_steps)
    check(lemma, 0 < beta < 1, f"beta must be in (0, 1), is {beta:.6g}")


def _check_previous(lemma: str, previous_lr: float, local_steps: int) -> None:
    check(lemma, local_steps >= 1, f"local steps must be 1 or more, are {local_steps}")
    if not 0 <= previous_lr < np.inf:
        raise StepSizeError(f"{lemma}: the previous round's step size {previous_lr:.6g} must be 0 or more")
