"""The floors of FedAvg on quadratics: theorem F.2 of papers/001_ac80ece2e288b8ec.txt.

F_R − F* doesn't go to 0: 8ζ²/μ is left over because clients differ, and 16ηLσ²/(Cμ) + 12η²(H−1)L²σ²/μ because
gradients are noisy. Where all is known in closed form each can be seen apart from the other.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedapp.report.figures import TEST, TRAIN, new_figure, save, style_axes
from fedapp.reproduce.experiment import Numbers, Results
from fedapp.reproduce.plan import Plan
from fedapp.reproduce.report import Report, Row, judge
from fedapp.reproduce.runs import Runs
from fedapp.theory.estimates import constants
from fedapp.theory.lojasiewicz import pl_bound
from fedapp.theory.problems import Quadratics, quadratics
from strategies import streams

L, MU, PARAMETERS = 1.0, 0.2, 10
LOCAL_STEPS = 8
LR = 1 / (18 * L * LOCAL_STEPS)  # the largest that the theorem allows
SIGMA2 = 1.0
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
HETEROGENEITIES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
SEEDS = 3

Array = NDArray[np.float64]


def measure(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Measure both floors by FedAvg itself: each table is (seeds, abscissae). No data are read."""
    zeta2, gaps, drifts, bounds = _heterogeneity()
    levels, exact, noise_bounds = _noise(plan.setting("repeats"))
    tables = {
        "zeta2": zeta2, "gaps": gaps, "drifts": drifts, "bounds": bounds, "levels": levels, "exact": exact,
        "noise-bounds": noise_bounds,
    }  # fmt: skip
    return {name: table.tolist() for name, table in tables.items()}


def report(results: Results, plan: Plan, folder: Path) -> Report:
    """Compare the slopes of both floors with the theorem's."""
    found = {name: np.array(table) for name, table in results.numbers.items()}
    zeta2, gaps, drifts, levels = (found[name] for name in ("zeta2", "gaps", "drifts", "levels"))
    zeta_slope, drift_slope, client_slope = (
        _slope(zeta2, gaps),
        _slope(zeta2, drifts),
        _slope(CLIENTS, levels),
    )
    report = Report()
    tables = ("zeta2", "gaps", "drifts", "bounds", "levels", "exact", "noise-bounds")
    report.figures.append(_draw(folder, *(found[name] for name in tables)))
    report.rows += [
        Row("slope of ln(F − F*) against ln ζ²", list(zeta_slope), 1.0),
        Row("slope of ln(F − min F) against ln ζ²", list(drift_slope), 1.0),
        Row("slope of ln(noise floor) against ln C", list(client_slope), -1.0),
        Row("bound / measured, heterogeneity", list((found["bounds"] / gaps).mean(axis=1))),
        Row("bound / measured, noise, C = 1", list(found["noise-bounds"][:, 0] / levels[:, 0])),
        Row("bound / measured, noise, C = 64", list(found["noise-bounds"][:, -1] / levels[:, -1])),
    ]
    close = plan.threshold("001-1", "close")
    slopes = [zeta_slope, drift_slope, -client_slope]
    evidence = (
        f"H = {LOCAL_STEPS}: the floor goes as ζ² to the power {zeta_slope.mean():.3f} (from F* = mean of the "
        f"clients' minima) and {drift_slope.mean():.3f} (from min F); the noise floor as C to the power "
        f"{client_slope.mean():.3f}"
    )
    holds = all(abs(float(slope.mean()) - 1) <= close for slope in slopes)
    report.verdicts.append(judge("001-1", holds, evidence))
    report.notes += [
        "F* of the theorem is the mean of the clients' own minima and lies below min F when clients differ: most of "
        "the floor is that difference, which is no error of FedAvg. From min F the drift of local steps is left, "
        f"{(drifts / gaps).mean():.1e} of it here.",
        "The third term of the bound, 12η²(H−1)L²σ²/μ, doesn't fall with C. On quadratics with equal curvatures "
        "there is no such floor: the measured one is "
        " the closed form ησ²/C times a factor of the curvatures, at every C.",
    ]
    return report


def federated_averaging(
    problem: Quadratics, w: Array, rounds: int, *, sigma2: float = 0.0, rng: np.random.Generator
) -> Array:
    """Run FedAvg with H local steps from models w (repeats, D), all repetitions at once; return the last models."""
    share = (sigma2 / w.shape[1]) ** 0.5
    for _ in range(rounds):
        local = np.repeat(w[:, None, :], problem.num_clients, axis=1)
        for _ in range(LOCAL_STEPS):
            gradients = problem.gradients(local)
            if share:
                gradients = gradients + share * rng.normal(size=local.shape)
            local = local - LR * gradients
        w = np.einsum("c,rcd->rd", problem.weights, local)
    return w


def _heterogeneity() -> tuple[Array, Array, Array, Array]:
    """ζ² where FedAvg ends, F − F*, F − min F and the bound, each (seeds, heterogeneities)."""
    rows = []
    for seed in range(SEEDS):
        for heterogeneity in HETEROGENEITIES:
            problem = quadratics(
                streams.generator(seed, "floor-problem"), num_clients=10, num_parameters=PARAMETERS, L=L, mu=MU,
                heterogeneity=heterogeneity,
            )  # fmt: skip
            start = np.zeros((1, PARAMETERS))
            end = federated_averaging(problem, start, 3000, rng=streams.generator(seed, "floor-drift"))[0]
            known = constants(problem, end[None])
            drift = problem.value(end) - problem.value(problem.minimiser())
            bound = pl_bound([10_000], known, mu=2 * MU, lr=LR, local_steps=LOCAL_STEPS)[0]
            rows.append((known.mean_zeta2, drift + known.Gamma, drift, bound))
    table = np.array(rows).reshape(SEEDS, len(HETEROGENEITIES), 4)
    return table[..., 0], table[..., 1], table[..., 2], table[..., 3]


def _noise(repeats: int) -> tuple[Array, Array, Array]:
    """E F − min F by number of clients: measured, in closed form, and the bound, each (seeds, clients)."""
    rows = []
    for seed in range(SEEDS):
        for clients in CLIENTS:
            rng = streams.generator(seed, "floor-noise", clients)
            problem = quadratics(
                streams.generator(seed, "shared-floor-problem"), num_clients=clients, num_parameters=PARAMETERS,
                L=L, mu=MU, heterogeneity=0.0, shared=True,
            )  # fmt: skip
            best = problem.minimiser()
            ends = federated_averaging(problem, np.tile(best, (repeats, 1)), 400, sigma2=SIGMA2, rng=rng)
            measured = float(np.mean([problem.value(end) for end in ends]))
            a = problem.curvatures[0]
            # The mean of C independent AR(1) models with factor 1 − ηa has 1/C of the variance of one.
            variance = LR**2 * SIGMA2 / PARAMETERS / (1 - (1 - LR * a) ** 2) / clients
            known = constants(problem, best[None], sigma2=SIGMA2)
            bound = pl_bound([10_000], known, mu=2 * MU, lr=LR, local_steps=LOCAL_STEPS)[0]
            rows.append((measured, float(a @ variance) / 2, bound))
    table = np.array(rows).reshape(SEEDS, len(CLIENTS), 3)
    return table[..., 0], table[..., 1], table[..., 2]


def _slope(x: "Array | tuple[int, ...]", y: Array) -> Array:
    """Slope of ln y against ln x, one per seed."""
    xs = np.broadcast_to(np.asarray(x, dtype=np.float64), y.shape)
    return np.array([np.polyfit(np.log(a), np.log(b), 1)[0] for a, b in zip(xs, y, strict=True)])


def _draw(
    out: Path,
    zeta2: Array,
    gaps: Array,
    drifts: Array,
    bounds: Array,
    levels: Array,
    exact: Array,
    noise: Array,
) -> Path:
    figure = new_figure(3.8, f"what FedAvg leaves over, H = {LOCAL_STEPS}, quadratics")
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        style_axes(axes)
        axes.set(xscale="log", yscale="log")
    left.plot(zeta2.ravel(), bounds.ravel(), "x", color="#999999", ms=5, label="bound 8ζ²/μ")
    left.plot(zeta2.ravel(), gaps.ravel(), "o", color=TEST, ms=4, label="F − F*")
    left.plot(zeta2.ravel(), drifts.ravel(), "s", color=TRAIN, ms=4, label="F − min F")
    left.set(xlabel="ζ²", ylabel="after 3000 rounds")
    right.plot(CLIENTS, noise.mean(axis=0), "x", color="#999999", ms=5, label="bound")
    right.plot(CLIENTS, exact.mean(axis=0), color=TEST, lw=1.2, label="closed form")
    right.plot(CLIENTS, levels.mean(axis=0), "o", color=TEST, ms=4, label="measured")
    right.set(xlabel="clients C", ylabel="E F − min F", xticks=CLIENTS)
    right.set_xticklabels([str(clients) for clients in CLIENTS])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=9)
    return save(figure, out / "floors.png")
