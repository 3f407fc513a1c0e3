"""The discrete Gaussian N_Z(0, σ²), P(x) ∝ exp(−x²/(2σ²)) on the whole numbers: exact draws, and sums of them.

The draws are those of C. Canonne, G. Kamath and T. Steinke ("The discrete Gaussian for differential privacy", NeurIPS
2020, algorithms 1 to 3), many at once, with whole numbers alone: the rounding of floating-point numbers could tell of
what the noise hides. σ is a whole number, so that no number needs more than 64 bits.

A sum of discrete Gaussians is none, but nearly (P. Kairouz, Z. Liu and T. Steinke, "The distributed discrete Gaussian
mechanism for federated learning with secure aggregation", ICML 2021). Let φ_s be the density of N(0, s²), and
θ(s) = 2 Σ_{j ≥ 1} exp(−2π²s²j²), so that Σ_{k ∈ Z} φ_s(k − x) is in [1 − θ(s), 1 + θ(s)] for each x (Poisson
summation). A product of two densities is one, φ_a(j) φ_b(k − j) = φ_c(k) φ_s(j − μ) with c² = a² + b² and
s = ab/c, so that each convolution below multiplies a density by a factor from such a sum:

    the sum of m draws of N_Z(0, σ²)   P(k) = φ_{√m σ}(k) times factors, for s = σ √(j/(j + 1)) with j = 1 … m − 1
    N(0, m σ² − r²), then rounded      Q(k) = φ_{√m σ}(k) times a factor, for s = r

where x is rounded to k with probability φ_r(k − x) / Σ_j φ_r(j − x). So |log P/Q| is at most the sum of
2 artanh θ(s) over these s, everywhere (``divergence``). It stays so if a whole number is added first, which rounding
passes on. So a sum of whole numbers with the noise of m clients is as private as with Gaussian noise of variance
m σ² − r², of which it is a function, but for e^± that bound per value.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
Event = Callable[[Integers], Booleans]  # of the draws at these places, which have happened

ROUNDING = 5.0  # r
_KEPT = 0.7  # of Laplace draws, about; a few less are drawn again


def discrete_gaussian(sigma: int, size: int, rng: np.random.Generator) -> Integers:
    """Return independent draws (size,) of N_Z(0, σ²), 1 ≤ σ < 2³¹: algorithm 3 with t = σ."""
    found = [np.empty(0, dtype=np.int64)]
    while (left := size - sum(map(len, found))) > 0:
        drawn = _laplace(sigma, int(left / (_KEPT * (1 - math.exp(-1)))) + 16, rng)
        found.append(drawn[_bell(drawn, sigma, rng)])
    return np.concatenate(found)[:size]


def _bell(drawn: Integers, sigma: int, rng: np.random.Generator) -> Booleans:
    """Return draws of Bernoulli(exp(−(|y| − σ)²/(2σ²))); with ||y| − σ| = b σ + c, of a product of three kinds.

    exp(−½) b² times, exp(−c/σ) b times, and exp(−½(c/σ)²).
    """
    whole, rest = np.divmod(np.abs(np.abs(drawn) - sigma), sigma)

    def half(at: Integers) -> Booleans:
        happens: Booleans = rng.integers(2, size=len(at)) == 0
        return happens

    def part(at: Integers) -> Booleans:
        happens: Booleans = rng.integers(sigma, size=len(at)) < rest[at]
        return happens

    def square(at: Integers) -> Booleans:
        return half(at) & part(at) & part(at)

    kept = _all(whole**2, half, rng)
    kept &= _all(whole, part, rng)
    return kept & _all(np.ones_like(whole), square, rng)


def _laplace(t: int, number: int, rng: np.random.Generator) -> Integers:
    """Return draws with P(x) ∝ exp(−|x|/t), of as many attempts: algorithm 2."""
    low = rng.integers(t, size=number)
    low = low[_exponential(np.arange(number), lambda at: rng.integers(t, size=len(at)) < low[at], rng)]
    high, going = np.zeros_like(low), np.arange(len(low))
    while len(going := going[_exponential(going, lambda at: np.ones(len(at), dtype=np.bool_), rng)]):
        high[going] += 1
    found, negative = low + t * high, rng.integers(2, size=len(low)) == 1
    drawn: Integers = np.where(negative, -found, found)[~negative | (found > 0)]
    return drawn


def _all(times: Integers, event: Event, rng: np.random.Generator) -> Booleans:
    """Return whether all of ``times`` (n,) draws of Bernoulli(exp(−γ)) have happened, by draws of Bernoulli(γ)."""
    happened, left = np.ones(len(times), dtype=np.bool_), times.copy()
    while len(going := np.flatnonzero(happened & (left > 0))):
        happened[going] = _exponential(going, event, rng)
        left[going] -= 1
    return happened


def _exponential(at: Integers, event: Event, rng: np.random.Generator) -> Booleans:
    """Return draws (n,) of Bernoulli(exp(−γ)), γ ≤ 1, at these places by draws of Bernoulli(γ): algorithm 1."""
    odd, going, k = np.empty(len(at), dtype=np.bool_), np.arange(len(at)), 1
    while len(going):
        goes_on = event(at[going]) & (rng.integers(k, size=len(going)) == 0)  # Bernoulli(γ/k)
        odd[going[~goes_on]] = k % 2 == 1
        going, k = going[goes_on], k + 1
    return odd


def divergence(sigma: float, number: int, rounding: float = ROUNDING) -> float:
    """Return the bound on |log P/Q| for each value of a sum of ``number`` clients' noise (see above)."""
    shares = np.arange(1, number) / np.arange(2, number + 1)
    factors = [_factor(sigma * share**0.5) for share in shares.tolist()]
    return math.fsum([*factors, _factor(rounding)])


def _factor(s: float) -> float:
    """Return 2 artanh θ(s); infinity for an s too small for that."""
    theta = 2 * math.fsum(math.exp(-2 * (math.pi * s * j) ** 2) for j in range(1, 8))
    return 2 * math.atanh(theta) if theta < 1 else math.inf
