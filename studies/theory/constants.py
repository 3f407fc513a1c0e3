"""The constants that bounds are functions of, and the errors of a bound that doesn't apply."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# A step size that is a theorem's limit but for rounding is within its range.
_ROUNDING = 1e-9


class AssumptionError(ValueError):
    """A theorem doesn't cover the case; the text names the theorem, the value and what is allowed."""


class StepSizeError(AssumptionError):
    """A step size is outside the range of a theorem."""


@dataclass(frozen=True)
class Constants:
    """The constants of a problem and of a run's start that bounds are functions of.

    NaN stands for a constant that isn't known; a bound that needs an unknown constant is NaN.

    Parameters
    ----------
    num_clients : int
        C ≥ 1.
    L : float
        Smoothness: every ∇f_i is L-Lipschitz. Above 0.
    mu : float
        μ ≥ 0: every f_i is μ-strongly convex; 0: merely convex.
    S : float
        Σ p_i², in [1/C, 1].
    sigma2 : float
        σ² ≥ E‖g_i − ∇f_i‖², for every client.
    zeta2 : float
        ζ² ≥ max_i ‖∇f_i − ∇f‖², wherever the iterates go (Dhasade et al., assumption 7).
    mean_zeta2 : float
        ζ² ≥ Σ p_i ‖∇f_i − ∇f‖² (001, FL-3); never above ``zeta2``.
    G2 : float
        G² ≥ E‖g_i‖² at every local iterate (Buttaci 2024, assumption 4.3).
    Gamma : float
        Γ = f* − Σ p_i f_i* ≥ 0, how far the clients' minima are apart (Buttaci 2024, eq. 4.2).
    Delta : float
        Δ = f(w̄_0) − f*.
    distance2 : float
        D² = ‖w̄_0 − w*‖².
    """

    num_clients: int
    L: float
    mu: float = 0.0
    S: float = float("nan")
    sigma2: float = 0.0
    zeta2: float = float("nan")
    mean_zeta2: float = float("nan")
    G2: float = float("nan")
    Gamma: float = float("nan")
    Delta: float = float("nan")
    distance2: float = float("nan")

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise AssumptionError(f"num_clients = {self.num_clients}: must be 1 or more")
        if not self.L > 0:
            raise AssumptionError(f"L = {self.L}: must be above 0")
        # Rounding can lift an estimate of μ a little above one of L.
        if not 0 <= self.mu <= self.L * (1 + _ROUNDING):
            raise AssumptionError(f"mu = {self.mu}: must be in [0, L = {self.L:g}]")
        for name in ("S", "sigma2", "zeta2", "mean_zeta2", "G2", "Gamma", "Delta", "distance2"):
            if getattr(self, name) < 0:
                raise AssumptionError(f"{name} = {getattr(self, name)}: must be 0 or more")


def check_step(theorem: str, lr: float, largest: float, formula: str) -> None:
    """Raise StepSizeError unless 0 < ``lr`` ≤ ``largest``, which ``formula`` spells out."""
    if not 0 < lr <= largest * (1 + _ROUNDING):
        raise StepSizeError(f"{theorem}: step size {lr:.6g} is outside (0, {formula} = {largest:.6g}]")


def check_exact_step(theorem: str, lr: float, step: float, formula: str) -> None:
    """Raise StepSizeError unless ``lr`` is ``step``, the only step size that the theorem covers."""
    if not abs(lr - step) <= step * _ROUNDING:
        raise StepSizeError(f"{theorem}: step size {lr:.6g} must be {formula} = {step:.6g}")


def check(theorem: str, holds: bool, demand: str) -> None:
    """Raise AssumptionError with the theorem's ``demand`` unless it ``holds``."""
    if not holds:
        raise AssumptionError(f"{theorem}: {demand}")


def as_float(count: int) -> float:
    """Return a whole number as a float, inf above the largest float: a cycle's length can have hundreds of digits."""
    try:
        return float(count)
    except OverflowError:
        return math.inf


def as_rounds(theorem: str, rounds: ArrayLike, first: int = 0) -> Array:
    """Return numbers of rounds as floats; raise AssumptionError for one below ``first``."""
    numbers = np.asarray(rounds, dtype=np.float64)
    check(theorem, bool((numbers >= first).all()), f"rounds must be {first} or more, are {numbers}")
    return numbers
