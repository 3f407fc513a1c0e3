"""Asynchronous federated learning (Fraboni et al. 2023, sections 3 and 4, appendix A).

Assumed: every L_i convex and L-smooth, unbiased gradients, K local steps of size η_l, aggregations n = 0..N−1
with θ^{n+1} = θ^n + η_g Σ_{i∈S_n} d_i Δ_i, and E[ω_i ω_j] = α q_i q_j for the random weights ω_i(n) of mean q_i(n).
Aggregation n minimises L^n = Σ q_i(n) L_i; θ̄ is the minimiser of their mean. The bounds are on

    (1/N) Σ_n (1/K) Σ_k [L^n(θ^{n,k}) − L^n(θ̄)],    θ^{n,k+1} = θ^{n,k} − η_g η_l Σ_i ω_i(n) g_i(θ_i^{ρ_i(n),k}).

The paper states the bounds with O(·), which hides L and all numbers. So ``synchronous_terms``, ``asynchronous_terms``
and ``fedfix_terms`` return the arguments of the O(·) as terms: they can be compared between runs, but aren't bounds.
``explicit_bound`` is theorem 1 with the numbers of its proof, and is a bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from studies.theory.constants import Array, Constants, as_float, as_rounds, check, check_step

# Ratios of task times are rounded to fractions with denominators up to this: finer ones make a cycle of aggregations
# longer than any run.
_LARGEST_DENOMINATOR = 10_000


@dataclass(frozen=True)
class Terms:
    """The terms of a bound, by N.

    Attributes
    ----------
    initial : array
        ε_F, exact: the distance of the initial model.
    local, noise, staleness, window : array
        Arguments of O(·), in this order for local work (ε_K), gradient noise, stale gradients (ε_α and ε_β), and the
        window (ε_W): the W aggregations after which every client has had its share.
    """

    initial: Array
    local: Array
    noise: Array
    staleness: Array
    window: Array


def synchronous_terms(
    aggregations: ArrayLike, constants: Constants, *, local_steps: int, noise: float
) -> Terms:
    """Return the terms of eq. 33, for η_l ∝ 1/√(KN).

    D²/√(KN);  (K−1)Σ/N;  Σ/(√(KN) M)

    Parameters
    ----------
    aggregations : array
        N ≥ 1.
    constants : Constants
        C and distance2 are used.
    local_steps : int
        K ≥ 1.
    noise : float
        Σ = (1/M) Σ_i E‖∇L_i(θ*, ξ_i)‖² (eq. 32).
    """
    N, root = _counts("Fraboni et al. 2023, eq. 33", aggregations, local_steps, noise, 0.0)
    zero = np.zeros_like(N)
    return Terms(
        initial=constants.distance2 / root,
        local=(local_steps - 1) / N * noise,
        noise=noise / (root * constants.num_clients),
        staleness=zero,
        window=zero,
    )


def asynchronous_terms(
    aggregations: ArrayLike,
    constants: Constants,
    *,
    local_steps: int,
    noise: float,
    residual: float,
    spread: float,
    window: int,
) -> Terms:
    """Return the terms of eq. 38, for η_l ∝ 1/√(KN).

    D²/√(KN);  (K−1)Σ/N;  (τ_M/τ_0)(R+Σ)/√(KN);  (τ_M/τ_0)³(K/N)M²(R+Σ);  (W−1)/√(KN)

    Parameters
    ----------
    residual : float
        R = (1/M) Σ_i [L_i(θ*) − L_i(θ_i*)] (eq. 37), which is `Constants.Gamma` if the weights are uniform.
    spread : float
        τ_M/τ_0 ≥ 1, the slowest client's task time over the fastest client's.
    window : int
        W: see ``asynchronous_window``. A term that float64 can't hold is inf.
    """
    theorem = "Fraboni et al. 2023, eq. 38"
    N, root = _counts(theorem, aggregations, local_steps, noise, residual)
    check(theorem, spread >= 1 and window >= 1, f"spread {spread} and window {window} must be 1 or more")
    level = residual + noise
    return Terms(
        initial=constants.distance2 / root,
        local=(local_steps - 1) / N * noise,
        noise=spread * level / root,
        staleness=spread**3 * local_steps / N * constants.num_clients**2 * level,
        window=as_float(window - 1) / root,
    )


def fedfix_terms(
    aggregations: ArrayLike,
    constants: Constants,
    *,
    local_steps: int,
    noise: float,
    residual: float,
    periods: int,
    window: int,
) -> Terms:
    """Return the terms of eq. 42, for η_l ∝ 1/√(KN); with P = ⌈τ_M/Δt⌉:

    D²/√(KN);  (K−1)(R+Σ)/N;  (R+PΣ/M)/√(KN);  (K/N)P²(R+PΣ/M);  (W−1)/√(KN)

    Parameters
    ----------
    periods, window : int
        P ≥ 1; W: see ``fedfix_window``. A term that float64 can't hold is inf.
    """
    theorem = "Fraboni et al. 2023, eq. 42"
    N, root = _counts(theorem, aggregations, local_steps, noise, residual)
    check(theorem, periods >= 1 and window >= 1, f"periods {periods} and window {window} must be 1 or more")
    level = residual + periods * noise / constants.num_clients
    return Terms(
        initial=constants.distance2 / root,
        local=(local_steps - 1) / N * (residual + noise),
        noise=level / root,
        staleness=local_steps / N * periods**2 * level,
        window=as_float(window - 1) / root,
    )


def asynchronous_window(times: Sequence[float]) -> int:
    """W = Σ_i ν/τ_i with ν = lcm(τ_i): aggregations of a full cycle of asynchronous FedAvg (eq. 35).

    Only ratios matter: times are taken in units of the smallest, as the nearest fractions with denominators up to
    10,000. AssumptionError without a time, or for a time that isn't above 0.
    """
    equation = "Fraboni et al. 2023, eq. 35"
    check(equation, len(times) > 0, "there must be a task time")
    for time in times:
        check(equation, math.isfinite(time) and time > 0, f"task times must be above 0, one is {time}")
    smallest = Fraction(min(times))
    exact = [(Fraction(time) / smallest).limit_denominator(_LARGEST_DENOMINATOR) for time in times]
    common = math.lcm(*(time.denominator for time in exact))
    whole = [int(time * common) for time in exact]
    cycle = math.lcm(*whole)
    return sum(cycle // time for time in whole)


def fedfix_window(periods: Sequence[int]) -> int:
    """W = lcm(⌈τ_i/Δt⌉): aggregations of a full cycle of FedFix (section 4.4).

    AssumptionError without a number of periods, or for one below 1.
    """
    check(
        "Fraboni et al. 2023, section 4.4",
        len(periods) > 0 and min(periods) >= 1,
        f"there must be numbers of periods of 1 or more, are {list(periods)}",
    )
    return math.lcm(*(int(count) for count in periods))


def explicit_bound(
    aggregations: ArrayLike,
    constants: Constants,
    *,
    lr: float,
    local_steps: int,
    delay: int,
    residual: float,
    noise: float,
    squared_noise: float,
    server_lr: float = 1.0,
    weight: float = 1.0,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Array:
    """Bound the mean of L^n(θ^{n,k}) − L^n(θ̄): theorem 1 with the numbers of its proof (eq. 93).

    With η̃ = η_g η_l, D = 6η_l²(K−1)²L² and X = η̃ + 16ρL η̃²K²τ²:

        ‖θ⁰−θ̄‖²/(η̃KN) + 4DR + 6ρη_l²(K−1)²LΣ₁ + 12ρ(2α+β)XLR + 3ρ²(αD+2β)XΣ₁ + 6ρ²αXΣ₂

    Parameters
    ----------
    aggregations : array
        N ≥ 1.
    constants : Constants
        L, and distance2 = ‖θ⁰ − θ̄‖², are used.
    lr, local_steps : float, int
        η_l ≤ min(1, 1/(3ρ²η_g(τ+1))) / (48KL); K ≥ 1.
    delay : int
        τ ≥ 0, the largest staleness of a contribution.
    residual : float
        R = mean over n of L^n(θ̄) − L^n(θ̄^n), with θ̄^n the minimiser of L^n (eq. 14).
    noise, squared_noise : float
        Σ₁ and Σ₂: means over n of Σ_i q̃_i E‖g_i(θ̄^n)‖² and of Σ_i q̃_i² E‖g_i(θ̄^n)‖², q̃_i = q_i/Σ_j q_j (eqs. 49, 50).
    server_lr : float
        η_g.
    weight : float
        The largest Σ_i q_i(n) over n; ρ = max(1, ``weight``).
    alpha, beta : float
        α in [0, 1] of assumption 5, and β = max(d_i − α q_i) in [0, 1]. With fixed task times the weights aren't
        random, and α = 1, β = 0 for every scheme.
    """
    theorem, L, K = "Fraboni et al. 2023, theorem 1", constants.L, local_steps
    N, _ = _counts(theorem, aggregations, K, noise, residual)
    check(theorem, 0 <= alpha <= 1 and 0 <= beta <= 1, f"alpha {alpha} and beta {beta} must be in [0, 1]")
    check(theorem, delay >= 0 and server_lr > 0, "the delay must be 0 or more and server-lr above 0")
    rho = max(1.0, weight)
    largest = min(1.0, 1 / (3 * rho**2 * server_lr * (delay + 1))) / (48 * K * L)
    check_step(theorem, lr, largest, "min(1, 1/(3ρ²η_g(τ+1)))/(48KL)")
    step = server_lr * lr
    D = 6 * lr**2 * (K - 1) ** 2 * L**2
    X = step + 16 * rho * L * (step * K * delay) ** 2
    floor = 4 * D * residual + 6 * rho * lr**2 * (K - 1) ** 2 * L * noise
    floor += 12 * rho * (2 * alpha + beta) * X * L * residual
    floor += 3 * rho**2 * (alpha * D + 2 * beta) * X * noise + 6 * rho**2 * alpha * X * squared_noise
    bound: Array = constants.distance2 / (step * K * N) + floor
    return bound


def _counts(
    theorem: str, aggregations: ArrayLike, local_steps: int, noise: float, residual: float
) -> tuple[Array, Array]:
    """Return N and √(KN)."""
    N = as_rounds(theorem, aggregations, first=1)
    check(theorem, local_steps >= 1, f"local steps must be 1 or more, are {local_steps}")
    check(theorem, noise >= 0 and residual >= 0, "noise and residual must be 0 or more")
    return N, np.sqrt(local_steps * N)
