"""FedAvg with different amounts of local work: its limits and its mean-square error (004, chapter 5)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from fedapp.report.figures import TEST, TRAIN, new_figure, save, style_axes
from fedapp.sweeps.point import PlannedRun
from fedapp.training.work import local_work
from strategies import streams
from studies.reproduce.experiment import Numbers, Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row, Verdict, judge, not_run
from studies.reproduce.runs import Runs, mean
from studies.reproduce.surrogate_optima import logistic_problem
from studies.theory.mean_square import LocalSmoothness, explicit_mean_square_bound, explicit_steady_state
from studies.theory.steady_state import LeastMeanSquares, mean_square_bound, steady_state

Array = NDArray[np.float64]

LMS = "least mean squares"
DRAWN = "least mean squares, E_k drawn anew"

# Distances to the minimisers of Σ E_k J_k and of Σ J_k, one pair per seed, by (steps normalised?, μ).
Distances = dict[tuple[bool, float], list[tuple[float, float]]]


def measure_limits(plan: Plan, runs: Runs, known: Numbers, data_path: str) -> Numbers:
    """Measure runs' distances to both minimisers, in units of the distance between these; simulate problem 5.3."""
    numbers: Numbers = {}
    minimisers: dict[int, tuple[Array, Array]] = {}
    for run in runs:
        key, seed = run.planned.key, run.config.seed
        path = run.folder / "model.safetensors" if run.folder else None
        if key in known or path is None or not path.exists():
            numbers |= {key: known[key]} if key in known else {}
            continue
        if seed not in minimisers:
            minimisers[seed] = _minimisers(run.planned)
        biased, unbiased = minimisers[seed]
        apart, w = np.linalg.norm(biased - unbiased), _model(path)
        numbers[key] = [float(np.linalg.norm(w - each) / apart) for each in (biased, unbiased)]
    steps = plan.setting("lms-steps")
    for name, simulate in ((LMS, _least_mean_squares), (DRAWN, _drawn_least_mean_squares)):
        levels = known.get(name, [])
        numbers[name] = levels if [at for at, *_ in levels] == steps else simulate(steps)
    return numbers


def _minimisers(planned: PlannedRun) -> tuple[Array, Array]:
    """Return the minimisers of Σ E_k J_k and of Σ J_k, with the parameters in the app's order."""
    config, number = planned.config, planned.num_clients
    work = np.array(local_work(config.step_heterogeneity, 1, np.ones(number), config.seed))
    biased, unbiased = (
        logistic_problem(config, number, weights / weights.sum()).minimiser()
        for weights in (work, np.ones(number))
    )
    return biased, unbiased


def _model(path: Path) -> Array:
    state = safetensors.numpy.load_file(path)
    return np.concatenate([state["1.weight"].ravel(), state["1.bias"]]).astype(np.float64)


def limits(results: Results, plan: Plan, folder: Path) -> Report:
    """Distance of the final models to the minimisers of Σ E_k J_k and of Σ J_k; the floor of problem 5.3."""
    report = Report()
    distances: Distances = {}
    for run in results.runs:
        if run.planned.key in results.numbers:
            point = (run.config.normalize_steps, run.config.lr)
            distances.setdefault(point, []).append(tuple(results.numbers[run.planned.key]))
    for (normalised, lr), pairs in sorted(distances.items(), reverse=True):
        name = f"{'μ/E_k' if normalised else 'common μ'}, μ = {lr:g}"
        for at, sum_of in enumerate(("Σ E_k J_k", "Σ J_k")):
            report.rows.append(
                Row(f"{name}: distance to the minimiser of {sum_of}", [pair[at] for pair in pairs])
            )
    if distances:
        report.figures.append(_draw(folder, distances))
    report.verdicts += [
        _limit(results, plan, distances, "biased"),
        _limit(results, plan, distances, "unbiased"),
        _mean_square(results, plan),
    ]
    report.rows += [
        Row(f"{LMS}, μ = {step:g}: E‖w̃‖² simulated; published: in closed form", [level], floor)
        for step, level, floor in results.numbers.get(LMS, [])
    ]
    for step, level, floor, printed, numbers, *_ in results.numbers.get(DRAWN, []):
        name = f"{DRAWN}, μ = {step:g}"
        report.rows += [
            Row(f"{name}: E‖w̃‖² simulated; published: in closed form", [level], floor),
            Row(
                f"{name}: level of theorem 5.1 with numbers for its O(·); published: 4μσ²_fed/ν",
                [numbers],
                printed,
            ),
        ]
    report.notes.append(
        "J_k is the regularised logistic loss of client k on the embedded digits, E_k goes from 1 to 8. The "
        "minimisers are found by Newton's method on the same rows, in float64, and share no code with training. "
        "Distances are in units of that between both."
    )
    return report


def _limit(results: Results, plan: Plan, distances: Distances, kind: str) -> Verdict:
    """Judge whether one kind of step ends at its minimiser, nearer for a smaller μ, and far from the other one."""
    claim, normalised = f"004-1-{kind}", kind == "unbiased"
    own: Mapping[float, Array] = {
        lr: np.mean(pairs, axis=0) for (of, lr), pairs in sorted(distances.items()) if of == normalised
    }
    if missing := results.missing(normalize_steps=normalised):
        return not_run(claim, missing)
    if any(run.planned.key not in results.numbers for run in results.runs):
        return not_run(claim, "final models are gone")
    near, far, smallest = plan.threshold(claim, "near"), plan.threshold(claim, "far"), min(own)
    to_own, to_other = (own[smallest][at] for at in ((1, 0) if normalised else (0, 1)))
    falling = bool(np.all(np.diff([pair[int(normalised)] for pair in own.values()]) > 0))
    names = ("Σ J_k", "Σ E_k J_k") if normalised else ("Σ E_k J_k", "Σ J_k")
    evidence = (
        f"at μ = {smallest:g}: {to_own:.4f} from the minimiser of {names[0]}, {to_other:.4f} from that of "
        f"{names[1]}; the first {'falls' if falling else 'does not fall'} with every smaller μ"
    )
    return judge(claim, bool(to_own <= near and to_other >= far) and falling, evidence)


def _mean_square(results: Results, plan: Plan) -> Verdict:
    """Judge theorem 5.1 where E_k is drawn anew every round and half of the agents take part."""
    claim = "004-2-mean-square"
    found = results.numbers.get(DRAWN)
    if not found:
        return not_run(claim, "nothing was simulated")
    near, band = plan.threshold(claim, "near"), plan.threshold(claim, "band")
    steps, levels, floors, _, _, printed, numbers = np.array(found, dtype=np.float64).T
    off = float(np.abs(levels / floors - 1).max())
    slope = float(np.polyfit(np.log(steps), np.log(levels), 1)[0])
    evidence = (
        f"E‖w̃_i‖² is at most {printed.max():.3f} of eq. 5.57 in any round and {numbers.max():.3f} of the bound with "
        f"numbers; its level goes as μ to the power {slope:.3f}, and is within {off:.1%} of the closed form"
    )
    below = bool(printed.max() <= 1 and numbers.max() <= 1)
    return judge(claim, below and abs(slope - 1) <= band and off <= near, evidence)


def _draw(folder: Path, distances: Distances) -> Path:
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
        axes.set(xscale="log", yscale="log", xlabel="step size μ", ylabel="distance / distance between both")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_title("steps μ/E_k" if normalised else "common step μ", fontsize=10)
        axes.legend(frameon=False, fontsize=9)
    return save(figure, folder / "limits.png")


def _least_mean_squares(steps: list[float]) -> list[tuple[float, float, float]]:
    """Problem 5.3: by μ, the level of E‖w̃‖² simulated and the exact one."""
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
    levels = []
    for step in steps:
        rounds = int(40 / step)
        errors = problem.simulate(step, rounds, rng, repeats=100, start=problem.minimiser)
        level = mean([float(error.mean()) for error in errors[rounds // 4 :]])
        levels.append((step, level, float(problem.floor(step))))
    return levels


def _drawn_least_mean_squares(steps: list[float]) -> list[tuple[float, ...]]:
    """Problem 5.3 with E_k drawn anew from three numbers every round, from w = 0, beside theorem 5.1.

    By μ: the level of E‖w̃‖², simulated and exact; the level of eq. 5.57 without its O(μ²), and that of the bound with
    numbers; and for each of these two bounds the largest E‖w̃_i‖² / bound of any round.
    """
    rng = streams.generator(0, "least-mean-squares-drawn")
    agents = 10
    problem = LeastMeanSquares(
        minimisers=1 + 0.1 * rng.normal(size=(agents, 4)),
        powers=rng.uniform(0.5, 1.5, agents),
        noises=rng.uniform(0.01, 0.1, agents),
        local_steps=rng.integers(1, 6, (agents, 3)).astype(np.float64),
        batch_sizes=np.full(agents, 2),
        sample_size=5,
    )
    known, smoothness = problem.agents(), LocalSmoothness(problem.mean_square_smoothness, problem.powers)
    found = []
    for step in steps:
        rounds = int(40 / step)
        errors = problem.simulate(step, rounds, rng, repeats=100).mean(axis=1)
        case = {"step": step, "distance2": float(errors[0])}
        printed = mean_square_bound(np.arange(rounds + 1), known, **case)
        numbers = explicit_mean_square_bound(np.arange(rounds + 1), known, smoothness, **case)
        # Round 0 is left out: there the bound with numbers is ‖w̃_0‖² by definition.
        shares = [float((errors[1:] / bound[1:]).max()) for bound in (printed, numbers)]
        levels = (steady_state(known, step), explicit_steady_state(known, smoothness, step))
        found.append((step, mean(errors[rounds // 4 :].tolist()), problem.floor(step), *levels, *shares))
    return found
