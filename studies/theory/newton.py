"""Newton's method for smooth convex functions of many parameters; its steps by conjugate gradients.

The Newton decrement λ of f at w is given by λ² = gᵀH⁻¹g: the quadratic model of f falls by λ²/2 from w to its
minimum. λ²/2 measures how far f(w) is above inf f, and doesn't depend on how the parameters are scaled.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from studies.theory.constants import Array, AssumptionError

# A gradient of this norm or less counts as zero: rounding alone leaves about 1e-15 of a gradient of norm 1.
GRADIENT_TOLERANCE = 1e-12

# w ↦ (v ↦ product of a matrix at w with v)
Linear = Callable[[Array], Array]
LinearAt = Callable[[Array], Linear]

_NEWTON_STEPS = 100
_BACKTRACKS = 40
# Relative differences of function values below this are rounding.
_ROUNDING = 1e-14
# Conjugate gradients have converged when this many iterations in a row add next to nothing.
_LOOK_BACK = 3
# The largest share of the energy that counts as next to nothing in a Newton step.
_SHARE = 0.01


@dataclass(frozen=True)
class Solution:
    """x with A x ≈ b.

    Attributes
    ----------
    x : array (D,)
    energy : float
        xᵀb, which bᵀA⁻¹b approaches from below.
    """

    x: Array
    energy: float


def conjugate_gradients(
    product: Linear, b: Array, share: float, *, precondition: Linear | None = None
) -> Solution:
    """Solve A x = b for a symmetric positive semidefinite A with b in its range.

    Parameters
    ----------
    product, precondition : callable
        v ↦ A v, and v ↦ M⁻¹ v with M positive definite and close to A.
    b : array (D,)
    share : float
        The iteration ends when each of the last three steps added at most this share of ``energy``, or after
        10 D + 100 steps.
    """
    x, residual, energy, quiet = np.zeros_like(b), b, 0.0, 0
    direction, size = np.zeros_like(b), 1.0
    for _ in range(10 * b.size + 100):
        z = residual if precondition is None else precondition(residual)
        before, size = size, float(residual @ z)
        if not size > 0:
            break
        direction = z + (size / before if direction.any() else 0.0) * direction
        image = product(direction)
        curvature = float(direction @ image)
        if not curvature > 0:
            break
        x = x + size / curvature * direction
        residual = residual - size / curvature * image
        energy += size**2 / curvature
        quiet = quiet + 1 if size**2 / curvature <= share * energy else 0
        if quiet == _LOOK_BACK:
            break
    return Solution(x, energy)


def newton(
    value: Callable[[Array], float],
    gradient: Linear,
    hessian: LinearAt,
    start: Array,
    *,
    decrement: float = 0.0,
    preconditioner: LinearAt | None = None,
) -> Array:
    """Minimise a smooth convex function by Newton's method.

    Parameters
    ----------
    value, gradient, hessian : callables
        f(w), ∇f(w), and w ↦ (v ↦ ∇²f(w) v).
    start : array (D,)
    decrement : float
        λ²/2 at which to stop, after one more step; 0: stop where ‖∇f‖ is at most `GRADIENT_TOLERANCE`.
    preconditioner : callable
        w ↦ (v ↦ M⁻¹ v), M close to ∇²f(w). It is called at ``start`` alone, and its result is used in all steps.

    Raises
    ------
    AssumptionError
        If 100 steps don't reach a minimum: the function has none, or one too flat for float64.
    """
    w = np.array(start, dtype=np.float64)
    precondition = None if preconditioner is None else preconditioner(w)
    for _ in range(_NEWTON_STEPS):
        g = gradient(w)
        norm = float(np.linalg.norm(g))
        if norm <= GRADIENT_TOLERANCE:
            return w
        # Solving each step more precisely than the last converges faster, but isn't worth it for a given decrement.
        share = _SHARE if decrement else min(_SHARE, max(norm, 1e-8) ** 2)
        step = conjugate_gradients(hessian(w), -g, share, precondition=precondition)
        size, before = 1.0, value(w)
        for _ in range(_BACKTRACKS):
            target = before - 1e-4 * size * step.energy + _ROUNDING * max(1.0, abs(before))
            if value(w + size * step.x) <= target:
                break
            size /= 2
        w = w + size * step.x
        if size == 1 and step.energy / 2 <= decrement:
            return w
    raise AssumptionError(
        f"no minimum found: the gradient's norm is still {norm:.3g} after {_NEWTON_STEPS} Newton steps"
    )
