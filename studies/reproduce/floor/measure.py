"""Floors of FedAvg, measured: its limits without noise, and its level with noise (001, theorems F.2 and F.4).

`measure` makes plain numbers of the settings of studies/experiments/001-floor.toml and knows nothing of claims. An
axis of seeds is always the last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from strategies import streams
from studies.reproduce.floor.losses import (
    LogisticLosses,
    Losses,
    PowerLosses,
    QuadraticLosses,
    curvatures,
    labelled_rows,
    optima,
    sigmoid,
)
from studies.theory.constants import Array, AssumptionError, Constants
from studies.theory.lojasiewicz import lojasiewicz_bound, pl_bound

Settings = Mapping[str, Any]

KINDS = ("quadratics", "logistic")
STEPS = ("theorem", "fixed")
PARTS = ("floors", "noise", "power-floors", "power-noise")

# A limit is found when Newton's next step is no longer than this.
_TOLERANCE = 1e-10
_NEWTON_STEPS = 100
# The level of noise is the mean of F over this many rounds, evenly spaced.
_MOMENTS = 16


def measure(settings: Settings) -> dict[str, Any]:
    """Measure every floor.

    Returns
    -------
    dict
        Nested lists. ``floors``: by kind of loss and step rule ``zeta2``, ``gap`` (F_∞ − F*), ``drift``
        (F_∞ − min F) and ``bound``, each (H, own curvature, problem, seed); the problems are all spreads and then all
        numbers of deviating clients. ``noise``: by kind and step rule ``level`` and ``bound``, each (H, C, seed).
        ``power-floors``: as ``floors``, but by power, each (H, problem, seed). ``power-noise``: by power ``level``
        and ``bound``, each (C, seed).
    """
    return {
        "floors": {kind: _floors(settings, kind) for kind in KINDS},
        "noise": {
            kind: _noise(settings, levels)
            for kind, levels in zip(KINDS, (_exact_levels, _sampled_levels), strict=True)
        },
        "power-floors": {f"{p:g}": _power_floors(settings, p) for p in settings["powers"]},
        "power-noise": {f"{p:g}": _power_noise(settings, p) for p in settings["powers"]},
    }


def step_size(settings: Settings, step: str, L: float, local_steps: int) -> float:
    """η = 1/(18LH): by the rule ``theorem`` with each H, by ``fixed`` with the largest H for all."""
    return 1 / (18 * L * (local_steps if step == "theorem" else max(settings["local-steps"])))


def local_work(losses: Losses, w: Array, lr: float, local_steps: int) -> Array:
    """Return how far each client's model moves in H full-gradient steps from w: (D,) → (C, D)."""
    # The change is summed by itself: added to a much longer w, it would lose digits.
    start, moved = losses.at(w), np.zeros(losses.shape)
    for _ in range(local_steps):
        moved = moved - lr * losses.gradients(start + moved)
    return moved


def limit(losses: Losses, lr: float, local_steps: int, start: Array) -> Array:
    """Return θ_∞, the fixed point of a round, (D,).

    By Newton's method with the derivative of the round at ``start``, the minimiser of F, which is near θ_∞.

    Raises
    ------
    AssumptionError
        If 100 steps don't reach a fixed point.
    """
    one_step = np.eye(losses.shape[1]) - lr * losses.hessians(losses.at(start))
    slope = np.eye(losses.shape[1]) - np.linalg.matrix_power(one_step, local_steps).mean(axis=0)
    w = start
    for _ in range(_NEWTON_STEPS):
        change = np.linalg.solve(slope, local_work(losses, w, lr, local_steps).mean(axis=0))
        w = w + change
        if float(np.linalg.norm(change)) <= _TOLERANCE:
            return w
    raise AssumptionError(f"no fixed point of a round found in {_NEWTON_STEPS} steps: lr = {lr:.3g}")


def rise(losses: Losses, low: Array, w: Array) -> float:
    """F(w) − F(low), (D,) both, as the integral of ∇F between them: a difference of values would lose its digits."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    slopes = losses.gradient(low + (nodes[:, None] + 1) / 2 * (w - low)) @ (w - low)
    return float(weights @ slopes) / 2


# ---- Without noise ---------------------------------------------------------------------------------------------


def _ways(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``optima`` for both ways in which clients differ."""
    yield from ({"spread": spread} for spread in settings["spreads"])
    yield from ({"deviating": number} for number in settings["deviating"])


def problem(settings: Settings, kind: str, seed: int, num_clients: int, own: float, **way: Any) -> Losses:
    """Draw quadratics or logistic losses; problems of one seed differ in their optima's spread or deviation alone."""
    rng = streams.generator(seed, "floor-problem", KINDS.index(kind), num_clients)
    shape = num_clients, int(settings["parameters"])
    matrices = curvatures(rng, *shape, settings["condition"], own)
    points = optima(rng, shape, **way)
    if kind == "quadratics":
        return QuadraticLosses(matrices, points)
    common = rng.normal(size=shape[1]) / shape[1] ** 0.5
    rows = labelled_rows(rng, 4 * matrices, common + points, settings["rows"])
    return LogisticLosses(rows, settings["l2"])


def _floors(settings: Settings, kind: str) -> dict[str, Any]:
    def cell(own: float, seed: int, way: Mapping[str, Any]) -> dict[str, list[dict[str, float]]]:
        losses = problem(settings, kind, seed, settings["clients"], own, **way)
        best = losses.minimiser()
        return {
            step: [
                floor(losses, best, step_size(settings, step, losses.L, H), H)
                for H in settings["local-steps"]
            ]
            for step in STEPS
        }

    cells = [
        [[cell(own, seed, way) for seed in settings["seeds"]] for way in _ways(settings)]
        for own in settings["own-curvature"]
    ]
    by_step = {step: [[[one[step] for one in row] for row in rows] for rows in cells] for step in STEPS}
    return {step: _columns(table, from_axis=3, to_axis=0) for step, table in by_step.items()}


def floor(losses: Losses, best: Array, lr: float, local_steps: int) -> dict[str, float]:
    """ζ², F − F*, F − min F and the bound's constant part at the limit; ``best`` is the minimiser of F."""
    end = limit(losses, lr, local_steps, best)
    zeta2, drift = losses.zeta2(end), rise(losses, best, end)
    gap = float(np.mean(losses.values(losses.at(best)) - losses.lowest())) + drift
    known = Constants(losses.shape[0], losses.L, mean_zeta2=zeta2, Delta=0.0, Gamma=0.0)
    return {"zeta2": zeta2, "gap": gap, "drift": drift, "bound": _bound(losses, known, lr, local_steps)}


def _bound(losses: Losses, known: Constants, lr: float, local_steps: int) -> float:
    """Return the constant part of the bound of the theorem that covers the losses; the start's part is 0 here."""
    if losses.exponent == 1:
        return float(pl_bound(0, known, mu=losses.mu, lr=lr, local_steps=local_steps))
    return float(
        lojasiewicz_bound(0, known, mu=losses.mu, exponent=losses.exponent, lr=lr, local_steps=local_steps)
    )


def _power_floors(settings: Settings, power: float) -> dict[str, Any]:
    def cell(seed: int, way: Mapping[str, Any]) -> list[dict[str, float]]:
        rng = streams.generator(seed, "power-floor-problem")
        shape = settings["clients"], int(settings["power-parameters"])
        scales = settings["condition"] ** -rng.uniform(size=shape[0])
        points = optima(rng, shape, **way)
        # FedAvg starts at the minimiser of F and doesn't leave the hull of the clients' optima.
        reach = float(np.linalg.norm(points[:, None] - points, axis=2).max())
        losses = PowerLosses(power, scales, points, reach)
        best = losses.minimiser()
        return [
            floor(losses, best, 1 / (18 * losses.L * H * (shape[0] if H > 1 else 1)), H)
            for H in settings["local-steps"]
        ]

    cells = [[cell(seed, way) for seed in settings["seeds"]] for way in _ways(settings)]
    return _columns(cells, from_axis=2, to_axis=0)


def _columns(cells: Any, *, from_axis: int, to_axis: int) -> dict[str, Any]:
    """Turn nested lists of dicts with equal keys into a nested list for each key, with one axis moved."""
    first = cells
    while isinstance(first, list):
        first = first[0]

    def pick(part: Any, name: str) -> Any:
        return [pick(one, name) for one in part] if isinstance(part, list) else part[name]

    tables = {name: np.moveaxis(np.array(pick(cells, name)), from_axis, to_axis) for name in first}
    return {name: _rounded(table) for name, table in tables.items()}


def _rounded(table: Array) -> Any:
    """Return nested lists of the numbers with seven digits, which halves a file's length."""
    shape = table.shape
    return np.array([float(f"{value:.6e}") for value in table.ravel()]).reshape(shape).tolist()


# ---- With noise ------------------------------------------------------------------------------------------------

# (settings, seed) ↦ for each step rule a list by H of {"level": by number of clients, "bound": the same}
Levels = Callable[[Settings, int], dict[str, list[dict[str, list[float]]]]]


def _noise(settings: Settings, levels: Levels) -> dict[str, Any]:
    by_seed = [levels(settings, seed) for seed in settings["seeds"]]
    return {step: _columns([one[step] for one in by_seed], from_axis=0, to_axis=2) for step in STEPS}


def _exact_levels(settings: Settings, seed: int) -> dict[str, list[dict[str, list[float]]]]:
    """Return levels and bounds on quadratics, by `quadratic_level`."""
    groups = [_noisy_problem(settings, "quadratics", seed, number) for number in settings["noise-clients"]]
    sigma2 = settings["sigma2"]

    def cell(step: str, H: int) -> dict[str, list[float]]:
        rates = [step_size(settings, step, losses.L, H) for losses in groups]
        pairs = list(zip(groups, rates, strict=True))
        return {
            "level": [quadratic_level(losses, lr, H, sigma2) for losses, lr in pairs],
            "bound": [_noise_bound(losses, sigma2, lr, H) for losses, lr in pairs],
        }

    return {step: [cell(step, H) for H in settings["local-steps"]] for step in STEPS}


def _noisy_problem(settings: Settings, kind: str, seed: int, num_clients: int) -> Any:
    own = settings["own-curvature"][-1]
    return problem(settings, kind, seed, num_clients, own, spread=settings["noise-spread"])


def _noise_bound(losses: Losses, sigma2: float, lr: float, local_steps: int) -> float:
    known = Constants(losses.shape[0], losses.L, sigma2=sigma2, mean_zeta2=0.0, Delta=0.0, Gamma=0.0)
    return _bound(losses, known, lr, local_steps)


def quadratic_level(losses: QuadraticLosses, lr: float, local_steps: int, sigma2: float) -> float:
    """E F(θ_R) − F(θ_∞) on quadratics with Gaussian noise of variance σ²/D in each coordinate, in closed form.

    A round is linear, θ ↦ M θ + …, M = mean (1 − ηA_c)^H, with a noise of covariance
    (η² σ² / (C² D)) Σ_c Σ_{h<H} (1 − ηA_c)^{2h}; the stationary covariance S = M S Mᵀ + noise gives
    ½ tr(mean A_c · S). The mean of θ_R is θ_∞, so the linear term of F adds nothing.
    """
    from scipy.linalg import solve_discrete_lyapunov

    num_clients, num_parameters = losses.shape
    once = np.eye(num_parameters) - lr * losses.matrices
    noise = sum(np.linalg.matrix_power(once, 2 * h).sum(axis=0) for h in range(local_steps))
    noise *= lr**2 * sigma2 / (num_clients**2 * num_parameters)
    covariance = solve_discrete_lyapunov(np.linalg.matrix_power(once, local_steps).mean(axis=0), noise)
    return float(np.trace(losses.matrices.mean(axis=0) @ covariance)) / 2


def _sampled_levels(settings: Settings, seed: int) -> dict[str, list[dict[str, list[float]]]]:
    """Return levels and bounds on logistic losses, by FedAvg with one row a step (`sampled_level`)."""
    groups = [_noisy_problem(settings, "logistic", seed, number) for number in settings["noise-clients"]]
    best = [losses.minimiser() for losses in groups]
    L = max(losses.L for losses in groups)

    def cell(step: str, H: int) -> dict[str, list[float]]:
        lr = step_size(settings, step, L, H)
        ends = [limit(losses, lr, H, start) for losses, start in zip(groups, best, strict=True)]
        pairs = list(zip(groups, ends, strict=True))
        curvature = min(
            np.linalg.eigvalsh(losses.hessians(losses.at(w)).mean(axis=0)).min() for losses, w in pairs
        )
        rounds = [settings[name] / (lr * H * curvature) for name in ("burn-in", "measured")]
        rng = streams.generator(seed, "floor-noise", H, STEPS.index(step))
        return {
            "level": sampled_level(groups, ends, lr, H, rounds, settings["chains"], rng),
            "bound": [_noise_bound(losses, losses.row_variance(w), lr, H) for losses, w in pairs],
        }

    return {step: [cell(step, H) for H in settings["local-steps"]] for step in STEPS}


def sampled_level(
    groups: Sequence[LogisticLosses],
    limits: Sequence[Array],
    lr: float,
    local_steps: int,
    rounds: Sequence[float],
    chains: int,
    rng: np.random.Generator,
) -> list[float]:
    """E F(θ_R) − F(θ_∞) by FedAvg with one row a step, drawn with replacement; one number per federation.

    Parameters
    ----------
    groups : sequence of LogisticLosses
        Federations with any numbers of clients, but equal numbers of rows and parameters.
    limits : sequence of array (D,)
        θ_∞ of each federation, its initial model.
    rounds : two floats
        Rounds of burn-in, and rounds after it over which F is averaged.
    chains : int
        Independent repetitions.
    """
    signed = np.concatenate([losses.signed for losses in groups])
    clients, rows, parameters = signed.shape
    flat, offsets = signed.reshape(-1, parameters), rows * np.arange(clients)
    sizes = np.array([losses.shape[0] for losses in groups])
    starts, l2 = np.cumsum(sizes) - sizes, groups[0].l2
    lowest = [float(losses.values(losses.at(end)).mean()) for losses, end in zip(groups, limits, strict=True)]
    w = np.broadcast_to(np.stack(limits), (chains, len(groups), parameters))
    every = max(1, round(rounds[1] / _MOMENTS))
    totals = np.zeros(len(groups))
    for now in range(-max(1, round(rounds[0])), every * _MOMENTS):
        local = np.repeat(w, sizes, axis=1)
        for _ in range(local_steps):
            z = flat.take(offsets + rng.integers(rows, size=(chains, clients)), axis=0)
            wrong = sigmoid(-np.einsum("rcd,rcd->rc", z, local))
            local = (1 - lr * l2) * local + lr * wrong[..., None] * z
        w = np.add.reduceat(local, starts, axis=1) / sizes[:, None]
        if now >= 0 and now % every == 0:
            totals += [_mean_value(losses, w[:, g]) for g, losses in enumerate(groups)]
    return [float(level) for level in totals / _MOMENTS - lowest]


def _mean_value(losses: LogisticLosses, w: Array) -> float:
    """Mean of F over models (R, D)."""
    margins = losses.signed.reshape(-1, losses.shape[1]) @ w.T
    return float(np.logaddexp(0, -margins).mean() + losses.l2 / 2 * np.sum(w**2, axis=1).mean())


def _power_noise(settings: Settings, power: float) -> dict[str, Any]:
    """Levels of E F − min F for f_c = ‖w‖^p / p with H = 1, each (C, seed)."""
    counts = np.array(settings["noise-clients"])
    levels = np.stack([power_level(settings, power, seed) for seed in settings["seeds"]], axis=1)
    losses = [_unit_powers(settings, power, int(number)) for number in counts]
    bound = [_noise_bound(each, settings["sigma2"], 1 / (18 * each.L), 1) for each in losses]
    spread = np.broadcast_to(np.array(bound)[:, None], levels.shape)
    return {"level": _rounded(levels), "bound": _rounded(spread)}


def _unit_powers(settings: Settings, power: float, num_clients: int) -> PowerLosses:
    return PowerLosses(
        power, np.ones(num_clients), np.zeros((num_clients, int(settings["power-parameters"]))), 1.0
    )


def power_level(settings: Settings, power: float, seed: int) -> Array:
    """E F(θ_R) by number of clients, (len(noise-clients),), with Gaussian noise of variance σ²/D in each coordinate.

    With H = 1 a round is a step along ∇F with the mean of C noises, which is one Gaussian of variance σ²/(CD).

    Raises
    ------
    AssumptionError
        If a model leaves the unit ball, outside of which L doesn't hold.
    """
    losses = _unit_powers(settings, power, 1)
    lr, parameters = 1 / (18 * losses.L), losses.shape[1]
    rng = streams.generator(seed, "power-floor-noise", round(1000 * power))
    counts = np.array(settings["noise-clients"], dtype=np.float64)
    sizes = lr * (settings["sigma2"] / parameters / counts) ** 0.5
    w = np.zeros((settings["power-chains"], len(counts), parameters))
    total, furthest = np.zeros(len(counts)), 0.0
    for now in range(settings["power-steps"]):
        squares = np.einsum("rcd,rcd->rc", w, w)
        if now >= settings["power-burn-in"]:
            total += (squares ** (power / 2)).mean(axis=0) / power
        furthest = max(furthest, float(squares.max()))
        w = w - lr * squares[..., None] ** (power / 2 - 1) * w + sizes[:, None] * rng.normal(size=w.shape)
    if furthest > 1:
        raise AssumptionError(f"p = {power:g}: a model came to ‖w‖ = {furthest**0.5:.3g}, L is that up to 1")
    level: Array = total / (settings["power-steps"] - settings["power-burn-in"])
    return level
