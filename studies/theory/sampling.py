"""Centralised learning and clients drawn or chosen by the server (Fraboni et al. 2023, appendix C).

Aggregation n takes the updates of drawn clients with random weights ω_i of mean q_i = p_i. Theorem 1 needs two
numbers of a draw: α with E[ω_i ω_j] = α p_i p_j for i ≠ j (assumption 5), and β with E ω_i² − α p_i² ≤ β p_i (lemma
1).

The terms are the arguments of the paper's O(·) for a given step size (``asynchronous.Terms``). Bounds with all their
numbers are ``centralised_bound``, and ``asynchronous.explicit_bound`` with a draw's α and β, delay 0 and residual 0.
The paper calls α proportional to m; α is 1 − 1/m with replacement, and (1 − 1/m) M/(M−1) without.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.asynchronous import Terms
from studies.theory.constants import Array, Constants, as_float, as_rounds, check, check_step


@dataclass(frozen=True)
class ClientDraw:
    """The numbers α and β of a random draw of clients, for theorem 1."""

    alpha: float
    beta: float


def uniform_draw(weights: ArrayLike, size: int) -> ClientDraw:
    """Return α and β of m of M clients without replacement, each with weight p_i M/m (section C.2).

    α = M(m−1)/(m(M−1)), β = max p_i (M/m − α); all clients: 1 and 0

    Parameters
    ----------
    weights : array (M,)
        p_i > 0 with sum 1.
    size : int
        m in 1..M.
    """
    p, M = _weights(weights, size), len(np.asarray(weights))
    check(_SAMPLING, size <= M, f"the sample must be of 1 to {M}, is of {size}")
    alpha = M * (size - 1) / (size * (M - 1)) if M > 1 else 1.0
    return ClientDraw(alpha, float(p.max()) * (M / size - alpha))


def multinomial_draw(weights: ArrayLike, size: int) -> ClientDraw:
    """Return α = 1 − 1/m and β = 1/m of m draws with replacement, client i with probability p_i, 1/m each."""
    _weights(weights, size)
    return ClientDraw(1 - 1 / size, 1 / size)


def centralised_terms(
    aggregations: ArrayLike, constants: Constants, *, lr: float, local_steps: int, noise: float
) -> Terms:
    """Return the terms of eq. 106, one client that has all data: D²/(η_l K N);  η_l E‖g(θ*)‖².

    Eq. 106 takes the gradient noise at "x"; as in eq. 32 it is at θ*.

    Parameters
    ----------
    aggregations : array
        N ≥ 1.
    constants : Constants
        distance2 is used.
    lr, local_steps : float, int
        η_l > 0; K ≥ 1.
    noise : float
        E‖g(θ*)‖² ≥ 0.
    """
    N = _counts(aggregations, lr, local_steps, noise)
    zero = np.zeros_like(N)
    initial = constants.distance2 / (lr * local_steps * N)
    return Terms(initial=initial, local=zero, noise=zero + lr * noise, staleness=zero, window=zero)


def centralised_bound(
    aggregations: ArrayLike, constants: Constants, *, lr: float, local_steps: int, noise: float
) -> Array:
    """Bound the mean of E L(θ^{n,k}) − L* of one client: eq. 106 with numbers, D²/(η_l K N) + 2η_l E‖g(θ*)‖².

    For η_l ≤ 1/(4L), from ‖θ⁺ − θ*‖² and E‖g(θ)‖² ≤ 4L[L(θ) − L*] + 2E‖g(θ*)‖². Arguments as in
    ``centralised_terms``, and L of the constants.
    """
    check_step("Fraboni et al. 2023, eq. 106", lr, 1 / (4 * constants.L), "1/(4L)")
    terms = centralised_terms(aggregations, constants, lr=lr, local_steps=local_steps, noise=noise)
    bound: Array = terms.initial + 2 * terms.noise
    return bound


def sampled_terms(
    aggregations: ArrayLike,
    constants: Constants,
    draw: ClientDraw,
    *,
    lr: float,
    local_steps: int,
    noise: float,
    server_lr: float = 1.0,
) -> Terms:
    """Return the terms of eq. 107, FedAvg with clients drawn so that q_i = p_i = 1/M.

    D²/(η_gη_l K N);  η_l²(K−1)²Σ;  η_gη_l(α/M + β)Σ. Eq. 107 has 1 for D².

    Parameters
    ----------
    aggregations, lr, local_steps
        As in ``centralised_terms``.
    constants : Constants
        C and distance2 are used.
    draw : ClientDraw
        α and β; 1 and 0 if all clients take part, and the terms are then eq. 33's for a given step size.
    noise : float
        Σ of eq. 32.
    server_lr : float
        η_g > 0.
    """
    N = _counts(aggregations, lr, local_steps, noise)
    check(_SAMPLING, server_lr > 0, f"server-lr must be above 0, is {server_lr:.6g}")
    step, zero = server_lr * lr, np.zeros_like(N)
    return Terms(
        initial=constants.distance2 / (step * local_steps * N),
        local=zero + lr**2 * (local_steps - 1) ** 2 * noise,
        noise=zero + step * (draw.alpha / constants.num_clients + draw.beta) * noise,
        staleness=zero,
        window=zero,
    )


def chosen_terms(
    aggregations: ArrayLike,
    constants: Constants,
    *,
    lr: float,
    local_steps: int,
    noise: float,
    window: int,
    server_lr: float = 1.0,
) -> Terms:
    """Return the terms of eq. 108: clients chosen by a fixed rule, whose weights are p_i over every W aggregations.

    The terms of eq. 33 for a given step size, and η_gη_l(W−1)K, which ``representation.window_term`` gives with its
    numbers. Arguments as in ``sampled_terms``; W ≥ 1.
    """
    check(_SAMPLING, window >= 1, f"the window must be 1 or more, is {window}")
    terms = sampled_terms(
        aggregations,
        constants,
        ClientDraw(1.0, 0.0),
        lr=lr,
        local_steps=local_steps,
        noise=noise,
        server_lr=server_lr,
    )
    extra = np.zeros_like(terms.initial) + server_lr * lr * as_float(window - 1) * local_steps
    return Terms(terms.initial, terms.local, terms.noise, terms.staleness, extra)


_SAMPLING = "Fraboni et al. 2023, appendix C"


def _counts(aggregations: ArrayLike, lr: float, local_steps: int, noise: float) -> Array:
    N = as_rounds(_SAMPLING, aggregations, first=1)
    check(_SAMPLING, local_steps >= 1, f"local steps must be 1 or more, are {local_steps}")
    check(
        _SAMPLING, lr > 0 and noise >= 0, f"step size {lr:.6g} must be above 0, noise {noise:.6g} 0 or more"
    )
    return N


def _weights(weights: ArrayLike, size: int) -> Array:
    p = np.asarray(weights, dtype=np.float64)
    check(
        _SAMPLING,
        p.ndim == 1 and bool((p > 0).all()) and abs(float(p.sum()) - 1) <= 1e-9,
        f"weights must be above 0 with sum 1, are {p}",
    )
    check(_SAMPLING, size >= 1, f"the sample must be of 1 or more, is of {size}")
    return p
