"""Methods side by side on a problem or several, by the accuracy that each has reached at a given time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student

from fedapp.report.figures import STEPS, new_figure, save, style_axes
from fedapp.report.method_styles import MethodStyle, styles_of
from fedapp.report.overlay import MOST, set_view
from fedapp.report.series import Array
from fedapp.report.verdict.judging import judge
from strategies import REGISTRY
from studies.reproduce.experiment import Results
from studies.reproduce.plan import Plan
from studies.reproduce.report import Report, Row
from studies.reproduce.runs import Run, Runs, mean

PROBLEM = "problem"  # the axis of the grid, if there are several
METHODS = "Methods"  # the heading of the table, if there is one


@dataclass(frozen=True)
class _Method:
    """A method's runs at its best step size, and whether it is the smallest or largest step size that was tried."""

    runs: Runs
    at_end: bool

    @property
    def rate(self) -> str:
        """The step size as the table shows it; † marks the smallest or largest one tried."""
        return f"{self.runs[0].config.lr:g}{' †' * self.at_end}"


def comparison(results: Results, plan: Plan, folder: Path) -> Report:
    """Test accuracy against virtual time, each method at its best step size, with bands over seeds, by problem."""
    report = Report()
    problems = dict.fromkeys(run.planned.labels.get(PROBLEM) for run in results.runs)
    for number, problem in enumerate(problems):
        runs = Runs(run for run in results.runs if run.planned.labels.get(PROBLEM) == problem)
        names = dict.fromkeys(map(_name, runs))
        best = {name: _best_rate(Runs(run for run in runs if _name(run) == name)) for name in names}
        drawn = {name: best[name].runs for name in _shown(best)}
        file = folder / ("comparison.png" if not number else f"comparison-{number + 1}.png")
        of = f"{len(drawn)} of {len(best)} methods, " * (len(drawn) < len(best))
        title = f"{of}{problem or runs[0].config.dataset}"
        report.figures.append(_draw(file, title, drawn, plan.setting("confidence-from")))
        tuned = len({run.config.lr for run in runs}) > 1
        _tell(report, problem, best, plan.setting("share"), tuned=tuned)
    return report


def _tell(report: Report, problem: object, best: Mapping[str, _Method], share: float, *, tuned: bool) -> None:
    """Add a problem's numbers as rows, and as a table with the best method first; without tuning also a verdict."""
    ends = [mean(each.runs.tails("accuracy")) for each in best.values()]
    target = share * max((end for end in ends if math.isfinite(end)), default=math.nan)
    columns: dict[str, Callable[[Run], float]] = {
        "averaged over time, %": lambda run: 100 * _average(run),
        "accuracy, %": lambda run: 100 * float(run.tail("accuracy").mean()),
        f"time to {target:.1%}": lambda run: run.at_accuracy(target, run.column("time")),
        "MB to the server": lambda run: run.facts["bytes-up"] / 1e6,
    }
    lines = [f"| method | step size | {' | '.join(columns)} |", "|---|--:" + "|--:" * len(columns) + "|"]
    for name in sorted(best, key=lambda name: -_score(best[name].runs)):
        rows = [
            Row(
                f"{f'{problem}, ' if problem else ''}{name}: {column}",
                [measure(run) for run in best[name].runs],
            )
            for column, measure in columns.items()
        ]
        report.rows += rows
        lines.append(f"| {name} | {best[name].rate} | {' | '.join(row.text(3) for row in rows)} |")
    if not tuned:  # a step size that was chosen on the seeds that are judged would flatter its method
        lines += ["", *_verdict(best)]
    report.extra.append("\n".join([f"## {problem or METHODS}", "", *lines]))


def _verdict(best: Mapping[str, _Method]) -> tuple[str, ...]:
    """Return the verdict on the methods by their accuracy over the last 5 % of the runs, seed by seed."""
    rows = [
        (_as_written(name), run["seed"], float(run.tail("accuracy").mean()))
        for name, method in best.items()
        for run in method.runs
    ]
    return judge(rows, "accuracy", higher=True).sentences


def _name(run: Run) -> str:
    """Return the name of a run's line: its labels but for seed, step size and problem; without any, its strategy."""
    labels = {axis: each for axis, each in run.planned.labels.items() if axis not in ("seed", "lr", PROBLEM)}
    shown = [each if isinstance(each, str) else f"{axis} = {each}" for axis, each in labels.items()]
    return ", ".join(shown) or run.config.strategy


def _best_rate(runs: Runs) -> _Method:
    """Keep the runs of the step size with the highest accuracy averaged over time, if there were several."""
    rates = sorted({run.config.lr for run in runs})
    cells = {rate: Runs(run for run in runs if run.config.lr == rate) for rate in rates}
    best = max(rates, key=lambda rate: _score(cells[rate]))
    return _Method(cells[best], len(rates) > 1 and best in (rates[0], rates[-1]))


def _score(cell: Runs) -> float:
    return _known([_average(run) for run in cell])


def _known(values: Sequence[float]) -> float:
    """Return the mean; −∞ if a value isn't finite, below every other mean."""
    value = mean(values)
    return value if math.isfinite(value) else -math.inf


def _shown(best: Mapping[str, _Method]) -> list[str]:
    """Return the methods that are drawn, at most as many as there are colours: the first one, and the best others."""
    first, *others = best
    others.sort(key=lambda name: -_score(best[name].runs))
    return [first, *others[: MOST - 1]]


def _average(run: Run) -> float:
    """Accuracy averaged over virtual time."""
    times, accuracy = run.column("time"), run.column("accuracy")
    return float(np.sum(accuracy[:-1] * np.diff(times)) / (times[-1] - times[0]))


def _draw(file: Path, problem: str, best: dict[str, Runs], enough: int) -> Path:
    """Draw the curves; bands are confidence intervals with ``enough`` seeds or more, else lowest to highest."""
    first = next(iter(best.values()))[0]
    config = first.config
    seeds = min(map(len, best.values()))
    facts = f"{problem}, {first.planned.num_clients} clients, {config.time_scenario}"
    kind = "95 % confidence" if seeds >= enough else "lowest to highest"
    banded = _banded(best)
    shown = " and ".join(map(_as_written, banded))
    bands = f"\nmean of {seeds} seeds; bands, of {shown}: {kind}" * (seeds > 1)
    figure = new_figure(4.2, f"Clients unlike in data and in speed: {facts}{bands}")
    whole, half = figure.subplots(1, 2, width_ratios=(1, 1.25))
    drawn: dict[str, tuple[Array, Array]] = {}
    looks = dict(zip(best, styles_of(cell[0].config.strategy for cell in best.values()), strict=True))
    for name, cell in best.items():
        grid, curves = cell.curves("accuracy")
        middle, n = curves.mean(axis=0), len(cell)
        drawn[name] = grid, middle
        low, high = curves.min(axis=0), curves.max(axis=0)
        if n >= enough:
            width = student.ppf(0.975, n - 1) * curves.std(axis=0, ddof=1) / math.sqrt(n)
            low, high = middle - width, middle + width
        for axes in (whole, half):
            axes.plot(grid, middle, lw=1.6, **looks[name].line(middle))
            if n > 1 and name in banded:
                axes.fill_between(grid, low, high, color=looks[name].color, alpha=0.12, lw=0)
    end = max(grid[-1] for grid, _ in drawn.values())
    for axes, start, title in ((whole, 0.0, "the whole run"), (half, end / 2, "its second half")):
        style_axes(axes)
        axes.set(xlabel="virtual time", ylabel="test accuracy", xlim=(start, end), title=title)
        axes.title.set_fontsize(10)
        set_view(axes, [(grid[grid >= start], middle[grid >= start]) for grid, middle in drawn.values()])
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    _label(half, drawn, looks)
    return save(figure, file)


def _as_written(name: str) -> str:
    """Return a method's name as its paper writes it."""
    return REGISTRY[name].__name__ if name in REGISTRY else name


def _banded(best: dict[str, Runs]) -> list[str]:
    """Return the methods drawn with a band, the first one and the best: more bands would hide each other."""
    return list(
        dict.fromkeys([next(iter(best)), max(best, key=lambda name: _known(best[name].tails("accuracy")))])
    )


def _label(axes: Axes, drawn: dict[str, tuple[Array, Array]], looks: Mapping[str, MethodStyle]) -> None:
    """Write each line's name beside its end, apart from the others."""
    low, high = axes.get_ylim()
    apart = 0.06 * (high - low)
    ends = sorted(((line[1][-1], name) for name, line in drawn.items()), reverse=True)
    place = math.inf
    for number, (value, name) in enumerate(ends):
        room = low + apart * (len(ends) - number - 1)  # for the names below
        place = min(max(min(value, high), room), place - apart)
        axes.annotate(
            _as_written(name),
            (1.0, place),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=looks[name].color,
            fontsize=9,
            annotation_clip=False,
        )
