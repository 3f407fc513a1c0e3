"""All strategies on one problem, by the accuracy that each has reached at a given time."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student

from fedapp.report.figures import STEPS, new_figure, save, style_axes
from fedapp.reproduce.curves import COLORS
from fedapp.reproduce.report import Report, Row
from fedapp.reproduce.runs import Run, Runs, mean

# The table's target: this share of the best final accuracy of all.
SHARE = 0.95

# With fewer seeds a confidence interval says next to nothing.
ENOUGH = 5


def comparison(runs: Runs, folder: Path) -> Report:
    """Test accuracy against virtual time, each strategy at its best step size, with bands over seeds."""
    best = {name: _best_rate(runs.where(strategy=name)) for name in runs.labels("strategy")}
    target = SHARE * max(mean(cell.tails("accuracy")) for cell in best.values())
    columns: dict[str, Callable[[Run], float]] = {
        "accuracy, %": lambda run: 100 * float(run.tail("accuracy").mean()),
        "averaged over time, %": lambda run: 100 * _average(run),
        f"time to {target:.0%}": lambda run: _time_to(run, target),
        "MB to the server": lambda run: run.summary["bytes-up"] / 1e6,
    }
    report = Report(figures=[_draw(folder, best)])
    lines = [f"| strategy | step size | {' | '.join(columns)} |", "|---|--:" + "|--:" * len(columns) + "|"]
    for name, cell in best.items():
        rows = [
            Row(f"{name}: {column}", [measure(run) for run in cell]) for column, measure in columns.items()
        ]
        report.rows += rows
        lines.append(f"| {name} | {cell[0].config['lr']:g} | {' | '.join(row.text(3) for row in rows)} |")
    report.extra.append("\n".join(["## Strategies", "", *lines]))
    return report


def _best_rate(runs: Runs) -> Runs:
    """Keep the runs of the step size with the highest accuracy averaged over time, if there were several."""
    rates = list(dict.fromkeys(run.config["lr"] for run in runs))

    def cell(rate: float) -> Runs:
        return Runs(run for run in runs if run.config["lr"] == rate)

    def score(rate: float) -> float:
        value = mean([_average(run) for run in cell(rate)])
        return value if math.isfinite(value) else -math.inf

    return cell(max(rates, key=score))


def _average(run: Run) -> float:
    """Accuracy averaged over virtual time."""
    times, accuracy = run.column("time"), run.column("accuracy")
    return float(np.sum(accuracy[:-1] * np.diff(times)) / (times[-1] - times[0]))


def _time_to(run: Run, target: float) -> float:
    reached = np.flatnonzero(run.column("accuracy") >= target)
    return float(run.column("time")[reached[0]]) if reached.size else math.nan


def _draw(folder: Path, best: dict[str, Runs]) -> Path:
    first = next(iter(best.values()))[0]
    seeds = min(map(len, best.values()))
    facts = (
        f"{first.config['dataset']}, {first.config['num-clients']} clients, {first.config['time-scenario']}"
    )
    kind = "95 % confidence" if seeds >= ENOUGH else "lowest to highest"
    bands = f", {seeds} seeds, bands: {kind}" if seeds > 1 else ""
    figure = new_figure(4.4, f"Clients unlike in data and in speed: {facts}{bands}")
    axes = figure.subplots()
    style_axes(axes)
    for (name, cell), color in zip(best.items(), COLORS, strict=False):
        grid, curves = cell.curves("accuracy")
        middle, n = curves.mean(axis=0), len(cell)
        axes.plot(grid, middle, color=color, lw=1.6, label=name)
        low, high = curves.min(axis=0), curves.max(axis=0)
        if n >= ENOUGH:
            width = student.ppf(0.975, n - 1) * curves.std(axis=0, ddof=1) / math.sqrt(n)
            low, high = middle - width, middle + width
        if n > 1:
            axes.fill_between(grid, low, high, color=color, alpha=0.12, lw=0)
    axes.set(xlabel="virtual time", ylabel="test accuracy", ylim=(0, 1), xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return save(figure, folder / "comparison.png")
