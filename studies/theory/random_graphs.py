"""Propositions on graphs of clients with lognormal misalignments: homogeneity and spectrum (Buttaci 2024, chapter 3).

A network is (θ, φ)-heterogeneous if mis ~ lognormal(−θ, φ²) for each pair of its C clients (definition 3.3).
"""

import math

Bounds = tuple[float, float]


def homogeneity_model(theta: float, phi: float, C: int, *, corrected: bool) -> tuple[float, float]:
    """Return mean and deviation of hom in a (θ, φ)-heterogeneous network (proof of proposition 3.2).

    ``corrected=False``, the *printed* form: N(θ/2, φ²/(4 C (C−1))). It counts the C(C−1) ordered pairs as
    independent, but mis is symmetric. ``corrected=True``, the *corrected* form, with C(C−1)/2 independent pairs:
    N(θ/2, φ²/(2 C (C−1))), the printed form with φ√2 for φ; the propositions are corrected likewise. A Monte-Carlo
    test (studies/tests/theory/test_random_graphs.py) confirms the corrected form; the deviation of the printed form
    is too small.
    """
    phi = _phi("definition 3.3", theta, phi, C, corrected)
    return theta / 2, phi / math.sqrt(4 * C * (C - 1))


def proposition_3_2(theta: float, phi: float, C: int, eps: float, delta: float, *, corrected: bool) -> float:
    """Return P(hom(altered) < hom), altered being (θ(1−ε), φ√(1+δ))-heterogeneous (proposition 3.2).

    *Printed*: Φ((θε/φ) √(C(C−1)/(2+δ))). *Corrected* (see ``homogeneity_model``): the argument shrinks by √2;
    the Monte-Carlo test confirms the corrected form. The two networks are drawn independently.
    ValueError unless 0 < ε < 1, δ > −1, θ > 0, φ > 0 and C ≥ 2.
    """
    from scipy.special import ndtr

    phi = _phi("proposition 3.2", theta, phi, C, corrected, eps, delta)
    return float(ndtr(theta * eps / phi * math.sqrt(C * (C - 1) / (2 + delta))))


def proposition_3_3(theta: float, phi: float, C: int, eps: float, delta: float, *, corrected: bool) -> Bounds:
    """Bound the mean spectral deviation (1/(C−1)) Σ_{k≥2} E(λ̃_k − λ_k)² (proposition 3.3): lower, upper.

    *Printed*: A C² < · ≤ A C² (C−1) with A = (2+δ) φ² / (C(C−1)) + ε²θ²; networks as in ``proposition_3_2``.
    The proof uses tr(X²) ≤ (tr X)² for L̃ − L, which isn't semidefinite, and in simulation the upper bound fails
    (C = 3, ε = 0). *Corrected*: · ≤ E‖L̃ − L‖²/(C−1) = 2C(2+δ)φ² + C²ε²θ², by Hoffman–Wielandt. Where the mean
    changes, it is for large C the lower bound's C²ε²θ², too; C = 2 attains both.
    ValueError unless ε < 1, δ > −1, θ > 0, φ > 0 and C ≥ 2.
    """
    phi = _phi("proposition 3.3", theta, phi, C, corrected, eps, delta)
    A = (2 + delta) / (C * (C - 1)) * phi**2 + eps**2 * theta**2
    return A * C**2, C * (2 + delta) * phi**2 + (C * eps * theta) ** 2 if corrected else A * C**2 * (C - 1)


def proposition_3_4(theta: float, phi: float, C: int, eps: float, delta: float, *, corrected: bool) -> Bounds:
    """Bound the mean absolute deviation (1/(C−1)) Σ_{k≥2} E|λ̃_k − λ_k| (proposition 3.4): lower, upper.

    εθC (2Φ(A) − 1) + 2φ √(C(2+δ)/(C−1)) Φ'(A) ≤ · ≤ (2−ε) θ C with A = (εθ/φ) √(C(C−1)/(2+δ)); networks as
    in ``proposition_3_2``. The upper bound assumes that all eigenvalues are ≥ 0, which a normal A_ij makes likely,
    not certain. ValueError unless ε < 1, δ > −1, θ > 0, φ > 0 and C ≥ 2.
    """
    from scipy.special import ndtr

    phi = _phi("proposition 3.4", theta, phi, C, corrected, eps, delta)
    A = eps * theta / phi * math.sqrt(C * (C - 1) / (2 + delta))
    density = math.exp(-(A**2) / 2) / math.sqrt(2 * math.pi)
    spread = 2 * phi * math.sqrt(C * (2 + delta) / (C - 1))
    return eps * theta * C * (2 * float(ndtr(A)) - 1) + spread * density, (2 - eps) * theta * C


def _phi(of: str, theta: float, phi: float, C: int, fix: bool, eps: float = 0.5, delta: float = 0) -> float:
    """Check the assumptions of a proposition, and return the φ to insert into its printed form."""
    above = 0.0 if of == "proposition 3.2" else -math.inf
    fine = 0 < theta < math.inf and 0 < phi < math.inf and C >= 2
    if not (fine and above < eps < 1 and -1 < delta < math.inf):
        raise ValueError(
            f"{of}: needs theta > 0, phi > 0, C >= 2, {above:g} < eps < 1, delta > -1, all finite; "
            f"has theta = {theta}, phi = {phi}, C = {C}, eps = {eps}, delta = {delta}"
        )
    return phi * math.sqrt(2) if fix else phi
