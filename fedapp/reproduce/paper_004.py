"""Limits of FedAvg with different amounts of local work (papers/004_feb04975bfa13f8d.txt, section 5.1)."""

from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedapp.data import load_dataset
from fedapp.report.figures import TEST, TRAIN, new_figure, save, style_axes
from fedapp.reproduce.report import Report, Row, judge
from fedapp.reproduce.runs import Run, Runs, mean
from fedapp.theory.problems import ClientData, Logistic
from fedapp.theory.steady_state import LeastMeanSquares
from fedapp.training.work import local_work
from strategies import streams

Array = NDArray[np.float64]

STEPS = (0.2, 0.1, 0.05, 0.025)  # μ of the least-mean-squares example


def limits(runs: Runs, folder: Path) -> Report:
    """Distance of the final models to the minimisers of Σ E_k J_k and of Σ J_k; the floor of problem 5.3."""
    report = Report()
    objectives: dict[object, tuple[Array, Array]] = {}
    distances: dict[tuple[bool, float], list[tuple[float, float]]] = {}
    for run in runs:
        if run["seed"] not in objectives:
            objectives[run["seed"]] = _minimisers(run)
        biased, unbiased = objectives[run["seed"]]
        apart, w = float(np.linalg.norm(biased - unbiased)), _model(run)
        point = (bool(run["normalize-steps"]), float(run["lr"]))
        # In units of the distance between the two minimisers.
        pair = (float(np.linalg.norm(w - biased)) / apart, float(np.linalg.norm(w - unbiased)) / apart)
        distances.setdefault(point, []).append(pair)
    for (normalised, lr), pairs in sorted(distances.items(), reverse=True):
        name = f"{'μ/E_k' if normalised else 'common μ'}, μ = {lr:g}"
        report.rows.append(
            Row(f"{name}: distance to the minimiser of Σ E_k J_k", [pair[0] for pair in pairs])
        )
        report.rows.append(Row(f"{name}: distance to the minimiser of Σ J_k", [pair[1] for pair in pairs]))
    report.figures.append(_draw(folder, distances))
    smallest = min(lr for _, lr in distances)
    common, normal = (np.mean(distances[normalised, smallest], axis=0) for normalised in (False, True))
    falling = all(_shrinks(distances, normalised) for normalised in (False, True))
    holds = bool(common[0] < 0.1 < common[1] and normal[1] < 0.1 < normal[0]) and falling
    report.verdicts.append(
        judge(
            "004-1",
            holds,
            f"in units of the distance between the two minimisers, at μ = {smallest:g}: with a common step "
            f"{common[0]:.4f} "
            f"from that of Σ E_k J_k and {common[1]:.3f} from that of Σ J_k; with μ/E_k {normal[0]:.3f} and "
            f"{normal[1]:.4f}; both smaller distances {'shrink' if falling else 'do not shrink'} with μ",
        )
    )
    report.rows += _least_mean_squares()
    report.notes.append(
        "J_k is the regularised logistic loss of client k on the embedded digits, E_k goes from 1 to 8. The "
        "minimisers are found by Newton's method on the same rows, in float64, and share no code with training."
    )
    return report


def _minimisers(run: Run) -> tuple[Array, Array]:
    """Minimisers of Σ E_k J_k and of Σ J_k, as the app orders parameters."""
    config = run.config
    dataset = load_dataset(config["dataset"])
    with np.load(run.path / "partition.npz") as stored:
        rows = np.split(stored["client_indices"], stored["client_offsets"][1:-1])
    clients = [
        ClientData(dataset.inputs(own).reshape(len(own), -1).astype(np.float64), np.asarray(dataset.y[own]))
        for own in rows
    ]
    work = local_work(config["step-heterogeneity"], 1, np.ones(len(clients)), int(config["seed"]))
    weights = np.array(work) / sum(work)
    return tuple(Logistic(clients, dataset.num_classes, config["l2"], p).minimiser() for p in (weights, None))  # type: ignore[return-value]


def _model(run: Run) -> Array:
    state = safetensors.numpy.load_file(run.path / "model.safetensors")
    return np.concatenate([state["1.weight"].ravel(), state["1.bias"]]).astype(np.float64)


def _shrinks(distances: dict[tuple[bool, float], list[tuple[float, float]]], normalised: bool) -> bool:
    by_step = [
        np.mean(pairs, axis=0)[int(normalised)]
        for (kind, _), pairs in sorted(distances.items())
        if kind == normalised
    ]
    return bool(np.all(np.diff(by_step) > 0))


def _draw(folder: Path, distances: dict[tuple[bool, float], list[tuple[float, float]]]) -> Path:
    figure = new_figure(
        3.6, "FedAvg with 1 to 8 local steps per client: distance of its limit to two minimisers"
    )
    for axes, normalised in zip(figure.subplots(1, 2, sharey=True), (False, True), strict=True):
        style_axes(axes)
        points = sorted(
            (lr, np.mean(pairs, axis=0)) for (kind, lr), pairs in distances.items() if kind == normalised
        )
        rates = [lr for lr, _ in points]
        for at, (name, color) in enumerate((("of Σ E_k J_k", TRAIN), ("of Σ J_k", TEST))):
            axes.plot(rates, [pair[at] for _, pair in points], "o-", color=color, label=f"minimiser {name}")
        axes.set(xscale="log", yscale="log", xlabel="step size μ")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set_title("steps μ/E_k" if normalised else "common step μ", fontsize=10)
        if not normalised:
            axes.set_ylabel("distance / distance between both")
        axes.legend(frameon=False, fontsize=9)
    return save(figure, folder / "limits.png")


def _least_mean_squares() -> list[Row]:
    """Problem 5.3: the level of E‖w̃‖² simulated, beside the exact one in the column for published numbers."""
    rng = streams.generator(0, "least-mean-squares")
    agents = 10
    problem = LeastMeanSquares(
        minimisers=1 + 0.1 * rng.normal(size=(agents, 4)),
        powers=rng.uniform(0.5, 1.5, agents),
        noises=rng.uniform(0.01, 0.1, agents),
        local_steps=rng.integers(1, 6, agents).astype(np.float64),
        batch_sizes=np.full(agents, 2),
        sample_size=5,
    )
    rows = []
    for step in STEPS:
        rounds = int(40 / step)
        errors = problem.simulate(step, rounds, rng, repeats=100, start=problem.minimiser)
        level = mean([float(error.mean()) for error in errors[rounds // 4 :]])
        rows.append(
            Row(
                f"least mean squares, μ = {step:g}: E‖w̃‖² simulated; published: in closed form",
                [level],
                problem.floor(step),
            )
        )
    return rows
