"""FedBuff against rounds, to the same accuracy with as many clients at work: Nguyen et al. 2022."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedapp.report.figures import new_figure, save, style_axes
from fedapp.report.overlay import COLORS
from research.reproduce.experiment import Results
from research.reproduce.plan import Plan
from research.reproduce.report import Report, Row, Verdict, judge, not_run
from research.reproduce.runs import Run, Runs, decide, geometric_mean
from strategies.weights import Participation

BUFFERED = "FedBuff"

METHODS = ("FedAvg", "FedProx", BUFFERED)

Cost = Callable[[Run], np.ndarray]


def updates(run: Run) -> np.ndarray:
    """Return the client updates that went into the model, by evaluation."""
    config = run.config
    each = config.buffer_size
    if config.strategy != "fedbuff":
        scheme = Participation.parse(config.participation, config.fraction_train)
        each = scheme.sample_size(run.planned.num_clients)
    return run.column("aggregation") * each


def seconds(run: Run) -> np.ndarray:
    """Return virtual time, by evaluation."""
    return run.column("time")


def cost_to(run: Run, target: float, cost: Cost) -> float:
    """Return what a run had spent when its accuracy first exceeded the target; NaN if it never did."""
    reached = np.flatnonzero(run.column("accuracy") > target)
    return float(cost(run)[reached[0]]) if reached.size else math.nan


def case_of(concurrency: str, method: str) -> str:
    """Return the label of a case: how many clients are at work, and the method."""
    return f"{concurrency} at work, {method}"


def speed_up(results: Results, plan: Plan, folder: Path) -> Report:
    """Client updates and time to the target by method and concurrency, and how many times fewer FedBuff takes."""
    report, runs = Report(), results.runs
    target = plan.threshold("fedbuff-1-updates", "target")
    report.figures.append(_draw(folder / "speed-up.png", runs))
    for case in runs.labels("case"):
        for name, cost in (("client updates", updates), ("virtual time", seconds)):
            spent = [cost_to(run, target, cost) for run in runs.where(case=case)]
            report.rows.append(Row(f"{case}: {name} to {target:.0%}", spent))
    report.verdicts = [
        _cheaper("fedbuff-1-updates", updates, results, plan),
        _magnitude(results, plan),
        _grows(results, plan),
        _cheaper("fedbuff-1-time", seconds, results, plan),
    ]
    return report


def _draw(path: Path, runs: Runs) -> Path:
    """Draw accuracy against client updates, and against time, a column for each concurrency."""
    figure = new_figure(5.4, "MNIST, 1000 clients unlike in data, half-normal task times")
    columns = list(dict.fromkeys(case.partition(" ")[0] for case in runs.labels("case")))
    grid = figure.subplots(2, len(columns), squeeze=False)
    for row, (label, cost) in zip(
        grid, (("client updates", updates), ("virtual time", seconds)), strict=True
    ):
        for axes, concurrency in zip(row, columns, strict=True):
            style_axes(axes)
            for method, color in zip(METHODS, COLORS, strict=False):
                for number, run in enumerate(runs.where(case=case_of(concurrency, method))):
                    name = "_" if number else method
                    axes.plot(cost(run), run.column("accuracy"), color=color, lw=1, alpha=0.8, label=name)
            axes.set(xlabel=label, ylabel="test accuracy", ylim=(0, 1), title=f"{concurrency} at work")
            axes.title.set_fontsize(9)
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=len(names) or 1, frameon=False, fontsize=9
    )
    return save(figure, path)


def _ratios(
    claim: str, concurrency: str, cost: Cost, other: str, results: Results, plan: Plan
) -> list[float]:
    """Return by seed how many times more the other method spends; one that never gets there, at least all it had.

    NaN where FedBuff itself doesn't get there.
    """
    target, cells = plan.threshold(claim, "target"), []
    for method in (other, BUFFERED):
        cell = results.runs.where(case=case_of(concurrency, method))
        spent = [cost_to(run, target, cost) for run in cell]
        if method == other:
            spent = [
                s if math.isfinite(s) else float(cost(run)[-1]) for s, run in zip(spent, cell, strict=True)
            ]
        cells.append(spent)
    return [theirs / ours for theirs, ours in zip(*cells, strict=True)]


def _cases(concurrency: list[str], others: list[str]) -> list[str]:
    return [case_of(at, method) for at in concurrency for method in (*others, BUFFERED)]


def _shown(cells: dict[str, list[float]]) -> str:
    return "; ".join(
        f"{name}: {geometric_mean(cell):.2f} ({', '.join(f'{ratio:.2f}' for ratio in cell)})"
        for name, cell in cells.items()
    )


def _cheaper(claim: str, cost: Cost, results: Results, plan: Plan) -> Verdict:
    """Judge whether FedBuff spends less than each other method, at each concurrency."""
    concurrency, others = plan.threshold(claim, "concurrency"), plan.threshold(claim, "methods")
    if missing := results.missing(case=_cases(concurrency, others)):
        return not_run(claim, missing)
    cells = {
        f"{at}, {other}": _ratios(claim, at, cost, other, results, plan)
        for at in concurrency
        for other in others
    }
    holds = decide(cells.values(), lambda ratio: ratio > 1, lambda ratio: not ratio >= 1)
    return judge(claim, holds, f"the other's over FedBuff's, by seed in brackets, {_shown(cells)}")


def _magnitude(results: Results, plan: Plan) -> Verdict:
    """fedbuff-1-magnitude: how many times fewer updates than FedAvg."""
    claim = "fedbuff-1-magnitude"
    (at,), (other,) = plan.threshold(claim, "concurrency"), plan.threshold(claim, "methods")
    low, high = plan.threshold(claim, "low"), plan.threshold(claim, "high")
    if missing := results.missing(case=_cases([at], [other])):
        return not_run(claim, missing)
    ratios = _ratios(claim, at, updates, other, results, plan)
    inside = [low <= ratio <= high for ratio in ratios]
    if low <= geometric_mean(ratios) <= high:
        holds: bool | None = True
    else:
        holds = None if any(inside) else False
    return judge(claim, holds, _shown({f"{at}, {other}": ratios}))


def _grows(results: Results, plan: Plan) -> Verdict:
    """fedbuff-1-scales: the speed-up with many at work over that with few."""
    claim = "fedbuff-1-scales"
    few, many = plan.threshold(claim, "concurrency")
    (other,) = plan.threshold(claim, "methods")
    if missing := results.missing(case=_cases([few, many], [other])):
        return not_run(claim, missing)
    least, most = (_ratios(claim, at, updates, other, results, plan) for at in (few, many))
    growth = [b / a for a, b in zip(least, most, strict=True)]
    holds = decide([growth], lambda ratio: ratio > 1, lambda ratio: not ratio >= 1)
    return judge(claim, holds, _shown({few: least, many: most, "growth": growth}))
