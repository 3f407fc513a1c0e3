"""Mean-square behaviour of FedAvg with unequal local work (004, chapter 5).

Round i: L of K agents, drawn without replacement, take E_k local steps of size μ_k = μ/E_k (eq. 5.26), and their
models are averaged with equal weights. Agent k's loss J_k is ν_k-convex and δ_k-smooth with minimiser w_k°, and its
gradient noise has E‖s_k(w)‖² ≤ β_k² ‖w_k° − w‖² + σ_k² (eq. 5.28). J = (1/K) Σ J_k is ν-convex and δ-smooth with
minimiser w°.

E_k may be drawn anew every round, from S equally likely numbers: an array (K, S). Steps μ/E_k keep the gradient
unbiased for every drawn E_k, and the theorem holds with the mean of 1/E_k in place of 1/E_k, since (5.30) holds given
E_k.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from studies.theory.constants import Array, StepSizeError, as_rounds, check


def sample_mean_variance(means: ArrayLike, variances: ArrayLike, sample_size: int) -> float:
    """E‖â − ā‖² of the mean â of L of K independent variables, drawn without replacement (lemma 5.1, eq. 5.33).

    (1/KL) Σ σ_k² + (1/KL) ((K−L)/(K−1)) Σ ‖ā − ā_k‖²

    Parameters
    ----------
    means : array (K,) or (K, D)
        ā_k.
    variances : array (K,)
        σ_k² = E‖a_k − ā_k‖² ≥ 0.
    sample_size : int
        L in 1..K.
    """
    a, v = np.asarray(means, dtype=np.float64), np.asarray(variances, dtype=np.float64)
    K, L = len(a), sample_size
    check("004 lemma 5.1", 1 <= L <= K, f"the sample must be of 1 to {K}, is of {L}")
    check("004 lemma 5.1", v.shape == (K,) and bool((v >= 0).all()), f"needs {K} variances of 0 or more")
    spread = float(np.sum((a - a.mean(axis=0)) ** 2))
    return (float(v.sum()) + _left_out(K, L) * spread) / (K * L)


@dataclass(frozen=True)
class Agents:
    """The constants of the K agents in theorem 5.1; arrays have shape (K,).

    Parameters
    ----------
    beta2, sigma2 : array
        β_k², σ_k² ≥ 0 of the gradient noise.
    smoothness : array
        δ_k > 0.
    offsets2 : array
        ‖w_k° − w°‖² ≥ 0.
    local_steps : array (K,) or (K, S)
        E_k ≥ 1; S equally likely numbers if E_k is drawn anew every round.
    nu, delta : float
        0 < ν ≤ δ of the consensus objective J.
    sample_size : int
        L, agents in a round.
    """

    beta2: Array
    sigma2: Array
    smoothness: Array
    offsets2: Array
    local_steps: Array
    nu: float
    delta: float
    sample_size: int

    def __post_init__(self) -> None:
        shapes = {np.shape(a) for a in (self.beta2, self.sigma2, self.smoothness, self.offsets2)}
        shapes.add(np.shape(self.local_steps)[:1])
        check("004 theorem 5.1", len(shapes) == 1, f"the agents' arrays have shapes {sorted(shapes)}")
        check(
            "004 theorem 5.1", 1 <= self.sample_size <= len(self.beta2), "the sample must be of 1 to K agents"
        )
        check(
            "004 theorem 5.1", 0 < self.nu <= self.delta, f"nu {self.nu} must be in (0, delta {self.delta}]"
        )
        check("004 theorem 5.1", bool((np.asarray(self.local_steps) >= 1).all()), "E_k must be 1 or more")

    @property
    def beta_fed2(self) -> float:
        """β²_fed = (1/KL) Σ 2β_k²/E_k + (1/KL)((K−L)/(K−1)) Σ (2δ² + 4δ_k²) (eq. 5.39)."""
        K, L = len(self.beta2), self.sample_size
        noise = np.sum(2 * self.beta2 * inverse_steps(self.local_steps))
        drawn = _left_out(K, L) * np.sum(2 * self.delta**2 + 4 * self.smoothness**2)
        return float(noise + drawn) / (K * L)

    @property
    def sigma_fed2(self) -> float:
        """σ²_fed = (1/KL) Σ (2β_k²‖w_k°−w°‖² + σ_k²)/E_k + (1/KL)((K−L)/(K−1)) Σ 4δ_k²‖w_k°−w°‖² (eq. 5.40)."""
        K, L = len(self.beta2), self.sample_size
        noise = np.sum((2 * self.beta2 * self.offsets2 + self.sigma2) * inverse_steps(self.local_steps))
        drawn = _left_out(K, L) * np.sum(4 * self.smoothness**2 * self.offsets2)
        return float(noise + drawn) / (K * L)


def inverse_steps(local_steps: ArrayLike) -> Array:
    """Mean of 1/E_k, (K,), of E_k (K,) or of S equally likely numbers each (K, S)."""
    inverse = 1 / np.asarray(local_steps, dtype=np.float64)
    mean: Array = inverse.reshape(len(inverse), -1).mean(axis=1)
    return mean


def mean_square_bound(rounds: ArrayLike, agents: Agents, *, step: float, distance2: float) -> Array:
    """Bound E‖w° − w_i‖² up to O(μ²) (theorem 5.1, eq. 5.57).

    (√λ)^i ‖w̃_0‖² + 4μσ²_fed/ν,  λ = 1 − 2μν + μ²(δ² + β²_fed)

    The theorem adds terms O(μ³) to √λ and O(μ²) to the bound, without constants: it is a statement about small μ, and
    this function leaves them out.

    Parameters
    ----------
    rounds : array
        i ≥ 0.
    agents : Agents
    step : float
        μ > 0, the same for all; agent k's own is μ/E_k. The proof needs λ < 1 with 1 − √λ ≥ μν/2, for which
        μ ≤ ν/(δ² + β²_fed) suffices, and √λ ≥ 1/2 (eq. 5.65; its "μ ≤ ν/2" has the wrong unit).
    distance2 : float
        ‖w̃_0‖².
    """
    theorem = "004 theorem 5.1"
    i = as_rounds(theorem, rounds)
    curvature = agents.delta**2 + agents.beta_fed2
    largest = agents.nu / curvature
    if agents.nu * largest > 0.75:  # λ would reach 1/4 before
        largest = (1 - np.sqrt(1 - 0.75 * curvature / agents.nu**2)) * largest
    if not 0 < step <= largest * (1 + 1e-9):
        raise StepSizeError(
            f"{theorem}: step size {step:.6g} is outside (0, {largest:.6g}], where μ ≤ ν/(δ²+β²_fed) and λ ≥ 1/4"
        )
    contraction = np.sqrt(1 - 2 * step * agents.nu + step**2 * curvature)
    bound: Array = contraction**i * distance2 + steady_state(agents, step)
    return bound


def steady_state(agents: Agents, step: float) -> float:
    """4μσ²_fed/ν, the theorem's level after many rounds, without its O(μ²)."""
    return 4 * step * agents.sigma_fed2 / agents.nu


def limit_point(
    curvatures: ArrayLike, centres: ArrayLike, local_steps: ArrayLike, *, normalised: bool
) -> Array:
    """Where FedAvg on J_k = ½ a_k ‖w − w_k°‖² ends up as μ → 0 (problem 5.1; eq. 5.26).

    Σ E_k a_k w_k° / Σ E_k a_k with a common step; Σ a_k w_k° / Σ a_k with steps μ/E_k.

    Parameters
    ----------
    curvatures, local_steps : array (K,)
        a_k > 0 and E_k ≥ 1.
    centres : array (K, D)
        w_k°.
    """
    pull = np.asarray(curvatures, dtype=np.float64) * (1 if normalised else np.asarray(local_steps))
    point: Array = pull @ np.asarray(centres, dtype=np.float64) / pull.sum()
    return point


@dataclass(frozen=True)
class LeastMeanSquares:
    """The least-mean-squares example: γ = hᵀ w_k° + v with white Gaussian h (eqs. 5.44-5.46, problem 5.3).

    Agent k draws h ~ N(0, r_k I) and v ~ N(0, s_k), and steps along −h(γ − hᵀw), averaged over B_k draws. That is the
    gradient of ½E(γ − hᵀw)² (the paper's J_k lacks the ½), so ν_k = δ_k = r_k.

    Parameters
    ----------
    minimisers : array (K, D)
        w_k°.
    powers, noises : array (K,)
        r_k > 0, s_k ≥ 0.
    local_steps : array (K,) or (K, S)
        E_k ≥ 1; S equally likely numbers if E_k is drawn anew every round.
    batch_sizes : array (K,)
        B_k ≥ 1.
    sample_size : int
        L in 1..K, agents in a round. Another L, or an E_k below 1, raises AssumptionError.
    """

    minimisers: Array
    powers: Array
    noises: Array
    local_steps: Array
    batch_sizes: Array
    sample_size: int

    def __post_init__(self) -> None:
        self.agents()  # checks L and E_k

    @property
    def minimiser(self) -> Array:
        """w° = Σ r_k w_k° / Σ r_k."""
        return limit_point(self.powers, self.minimisers, np.ones(len(self.powers)), normalised=True)

    @property
    def mean_square_smoothness(self) -> Array:
        """δ̂_k² of condition 5.1, (K,): E‖ĝ(w) − ĝ(v)‖² = r_k²(1 + (D+1)/B_k) ‖w − v‖², with equality.

        Eq. 5.46 has E‖hhᵀ‖² = r_k²D(D+2) for one draw, where E‖hhᵀu‖² = r_k²(D+2)‖u‖².
        """
        D = self.minimisers.shape[1]
        smoothness: Array = self.powers**2 * (1 + (D + 1) / self.batch_sizes)
        return smoothness

    def agents(self) -> Agents:
        """Return the theorem's constants: β_k² = r_k²(D+1)/B_k and σ_k² = s_k r_k D/B_k, by Isserlis' theorem."""
        D = self.minimisers.shape[1]
        return Agents(
            beta2=self.powers**2 * (D + 1) / self.batch_sizes,
            sigma2=self.noises * self.powers * D / self.batch_sizes,
            smoothness=self.powers,
            offsets2=np.sum((self.minimisers - self.minimiser) ** 2, axis=1),
            local_steps=self.local_steps,
            nu=float(self.powers.mean()),
            delta=float(self.powers.mean()),
            sample_size=self.sample_size,
        )

    def small_step_floor(self, step: float) -> float:
        """lim E‖w̃_i‖² = μ tr(R_s) / (2r) + O(μ²): r the mean of r_k, R_s the covariance of the gradient noise at w°.

        tr(R_s) is lemma 5.1's with ā_k = r_k(w° − w_k°) and variances (β_k²‖w_k°−w°‖² + σ_k²)/E_k.
        """
        agents = self.agents()
        means = self.powers[:, None] * (self.minimiser - self.minimisers)
        variances = (agents.beta2 * agents.offsets2 + agents.sigma2) * inverse_steps(self.local_steps)
        return step * sample_mean_variance(means, variances, self.sample_size) / (2 * agents.nu)

    def floor(self, step: float) -> float:
        """Return lim E‖w° − w_i‖² exactly, whatever the step μ (problem 5.3).

        Given w_{i−1} = w, agent k's model ψ_k has mean w_k° + ρ_k(w − w_k°), and E‖ψ_k − w_k°‖² = c_k‖w − w_k°‖² +
        n_k. With m = μ/E_k and q = 1 − 2m r_k + m² r_k²(1 + (D+1)/B_k): ρ_k = (1 − m r_k)^{E_k}, c_k = q^{E_k}, and
        n_k = (m² s_k r_k D/B_k) Σ_{e<E_k} q^e; means over E_k if it is drawn. By lemma 5.1 the mean and the mean
        square of w_i obey linear recursions.

        Raises
        ------
        StepSizeError
            If the mean square doesn't converge at this step.
        """
        K, D = self.minimisers.shape
        L, E = self.sample_size, np.reshape(self.local_steps, (K, -1))  # a column for every number E_k may be
        powers, noises, batches = (a[:, None] for a in (self.powers, self.noises, self.batch_sizes))
        m = step / E
        keep = ((1 - m * powers) ** E).mean(axis=1)
        one = 1 - 2 * m * powers + (m * powers) ** 2 * (1 + (D + 1) / batches)
        square = (one**E).mean(axis=1)
        series = [np.sum(a ** np.arange(e)) for a, e in zip(one.flat, E.astype(int).flat, strict=True)]
        noise = (m**2 * noises * powers * D / batches * np.reshape(series, E.shape)).mean(axis=1)
        # w̃ = w − w°, c_k = w_k° − w°: agent k's mean is w° + ρ_k w̃ + (1−ρ_k) c_k.
        centres = self.minimisers - self.minimiser
        shift = (1 - keep)[:, None] * centres
        drawn = _left_out(K, L)
        # E‖w̃⁺‖² = ‖mean of means‖² + (1/KL)[Σ variances + drawn Σ ‖mean_k − mean of means‖²], a quadratic in w̃.
        quadratic = keep.mean() ** 2
        quadratic += (np.sum(square - keep**2) + drawn * np.sum((keep - keep.mean()) ** 2)) / (K * L)
        if not abs(quadratic) < 1 or not abs(keep.mean()) < 1:
            raise StepSizeError(
                f"004 problem 5.3: with step size {step:.6g} the mean square error grows without end"
            )
        mean = shift.mean(axis=0) / (1 - keep.mean())
        spread = (keep - keep.mean())[:, None] * (shift - shift.mean(axis=0))
        linear = 2 * keep.mean() * shift.mean(axis=0)
        linear += (
            2 * (drawn * spread.sum(axis=0) - ((square - keep**2)[:, None] * centres).sum(axis=0)) / (K * L)
        )
        offsets2 = np.sum(centres**2, axis=1)
        constant = np.sum(shift.mean(axis=0) ** 2)
        constant += (np.sum((square - keep**2) * offsets2 + noise)) / (K * L)
        constant += drawn * np.sum((shift - shift.mean(axis=0)) ** 2) / (K * L)
        return float((constant + linear @ mean) / (1 - quadratic))

    def simulate(
        self,
        step: float,
        num_rounds: int,
        rng: np.random.Generator,
        *,
        repeats: int = 1,
        start: Array | None = None,
    ) -> Array:
        """Run eqs. 5.66-5.68 and return ‖w° − w_i‖², shape (num_rounds + 1, repeats); from w = 0 unless told."""
        K, D = self.minimisers.shape
        w = np.broadcast_to(np.zeros(D) if start is None else start, (repeats, D)).copy()
        errors = [np.sum((w - self.minimiser) ** 2, axis=1)]
        for _ in range(num_rounds):
            # Each repeat draws its own L agents.
            drawn = rng.permuted(np.broadcast_to(np.arange(K), (repeats, K)), axis=1)[:, : self.sample_size]
            total = np.zeros_like(w)
            for k in range(K):
                chosen = np.flatnonzero((drawn == k).any(axis=1))
                for number, some in self._numbers_of_steps(k, chosen, rng):
                    total[some] += self._local_steps(k, w[some], number, step, rng)
            w = total / self.sample_size
            errors.append(np.sum((w - self.minimiser) ** 2, axis=1))
        return np.array(errors)

    def _numbers_of_steps(
        self, k: int, chosen: NDArray[np.intp], rng: np.random.Generator
    ) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield each E_k of this round, and which of the chosen repeats have it."""
        if self.local_steps.ndim == 1:
            yield int(self.local_steps[k]), chosen
            return
        drawn = rng.choice(self.local_steps[k], len(chosen))
        for number in np.unique(drawn):
            yield int(number), chosen[drawn == number]

    def _local_steps(self, k: int, w: Array, E: int, step: float, rng: np.random.Generator) -> Array:
        B = int(self.batch_sizes[k])
        for _ in range(E):
            h = rng.normal(0, np.sqrt(self.powers[k]), (len(w), B, w.shape[1]))
            v = rng.normal(0, np.sqrt(self.noises[k]), (len(w), B))
            error = np.einsum("rbd,rd->rb", h, self.minimisers[k] - w) + v
            w = w + step / E * np.einsum("rbd,rb->rd", h, error) / B
        return w


def _left_out(K: int, L: int) -> float:
    return (K - L) / (K - 1) if K > 1 else 0.0
