"""The mean limit of the spectral method on quadratics where clients take part in some rounds, or in none.

A result of this project: Buttaci 2024 has full participation alone. Client i has f_i(w) = ½ (w − c_i)ᵀ H_i (w − c_i),
takes E steps of size γ, and takes part in a round with any probability above 0, or never; the draw S doesn't depend
on the models. q_i is the mean of client i's weight d_i, 0 if it is never drawn, and P_ij = p_ij / p_i. w_i is client
i's last local model, and x_i = w_i − w̄. A round of the method (algorithm 2) gives a participant

    x_i = B_i (c_i − w̄ − (1−β) Σ_j P_ij x_j),        B_i = γ Σ_{k<E} (I − γβH_i)^k H_i                            (1)

and moves w̄ by Σ_S d_i x_i. Both are affine in w̄ and the last models, so that the means over draws follow the same
equations. A fixed point of the means has (1) for all who ever take part, however often they do, and

    Σ_i q_i x_i = 0                                                                                               (2)

A client j that never takes part keeps the initial model w_0: x_j = w_0 − w̄. With r_i the sum of P_ij over all such j,
(1) is

    x_i = B_i (c_i − w̄ − (1−β) Σ_j P_ij x_j − (1−β) r_i (w_0 − w̄)),     j over the clients that take part         (1')

Let H_i = a_i I, so that B_i = s_i = (1 − (1 − γβa_i)^E)/β, and ωᵀ = qᵀ (I + (1−β) diag(s) P)⁻¹ diag(s). The
method minimises

    Σ_i (ω_i/a_i) f_i(w) − ½ κ ‖w − w_0‖²,        κ = (1−β) Σ_i ω_i r_i                                           (3)

Where all a_i are equal and nobody is absent, ω is in proportion to q = p for every β, γ and E, because pᵀP = pᵀ: the
method minimises the federated objective. As γ → 0 the x_i of the clients that take part vanish, and the method ends
where

    Σ_i q_i ∇f_i((1 − b_i) w + b_i w_0) = 0,        b_i = (1−β) r_i                                               (4)

Without absent neighbours (4) is the minimum of the federated objective. With absent neighbours it isn't, however
small the steps are, because they stay in the averages with the initial model.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array


@dataclass(frozen=True)
class Perturbed:
    """The spectral method on quadratics of C clients and D parameters.

    Parameters
    ----------
    hessians, minima : array (C, D, D), (C, D)
        H_i and c_i.
    neighbours : array (C, C)
        P_ij, rows summing to 1.
    weights : array (C,)
        q_i = E d_i, the mean weight of a client in a round; 0 for a client that never takes part.
    initial : array (D,)
        w_0, the initial model.
    beta, lr : float
        β in [0, 1] and γ.
    local_steps : int
        E.
    """

    hessians: Array
    minima: Array
    neighbours: Array
    weights: Array
    initial: Array
    beta: float
    lr: float
    local_steps: int

    def pulls(self) -> Array:
        """Return B_i (C, D, D) of eq. 1."""
        total, power = (
            np.zeros_like(self.hessians),
            np.broadcast_to(np.eye(len(self.initial)), self.hessians.shape),
        )
        for _ in range(self.local_steps):
            total = total + self.lr * power @ self.hessians
            power = power - self.lr * self.beta * power @ self.hessians
        return total

    def limit(self) -> tuple[Array, Array]:
        """Return the fixed point of the means: w̄ (D,), and the clients' last models (C, D).

        The solution of eqs. 1' and 2; the means converge to it where the step is short enough.
        """
        (C, D), B = self.minima.shape, self.pulls()
        there = self.weights > 0
        # Unknowns: w̄, then x_i; a row of blocks for each client, and a last one for the sum.
        A, b = np.zeros((C + 1, C + 1, D, D)), np.zeros((C + 1, D))
        for i in range(C):
            A[i, 1 + i] = np.eye(D)
            if not there[i]:  # x_i + w̄ = w_0
                A[i, 0], b[i] = np.eye(D), self.initial
                continue
            A[i, 0], b[i] = B[i], B[i] @ self.minima[i]
            for j in range(C):
                A[i, 1 + j] += (1 - self.beta) * self.neighbours[i, j] * B[i]
        A[C, 1:] = self.weights[:, None, None] * np.eye(D)
        flat = A.transpose(0, 2, 1, 3).reshape((C + 1) * D, (C + 1) * D)
        found = np.linalg.solve(flat, b.ravel()).reshape(C + 1, D)
        return found[0], found[0] + found[1:]


def surrogate(
    curvatures: ArrayLike,
    neighbours: ArrayLike,
    weights: ArrayLike,
    *,
    beta: float,
    lr: float,
    local_steps: int,
) -> tuple[Array, float]:
    """Return ω_i / a_i (C,) and κ: the method minimises Σ (ω_i/a_i) f_i − ½ κ ‖w − w_0‖² (eq. 3).

    Parameters
    ----------
    curvatures, weights : array (C,)
        a_i > 0, of H_i = a_i I; q_i.
    neighbours : array (C, C)
        P_ij.
    """
    a, q, P = (np.asarray(each, dtype=np.float64) for each in (curvatures, weights, neighbours))
    there = q > 0
    s = (1 - (1 - lr * beta * a) ** local_steps) / beta if beta else lr * local_steps * a
    among, factor = P[np.ix_(there, there)], 1 - beta
    within = np.eye(int(there.sum())) + factor * s[there, None] * among
    omega = np.zeros(len(a))
    omega[there] = np.linalg.solve(within.T, q[there]) * s[there]
    return omega / a, factor * float(omega @ P[:, ~there].sum(axis=1))
