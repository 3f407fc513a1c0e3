"""The map as a picture: for each cell and measure a strip of the best methods, compared with the baseline.

The baseline is the plan's first method. A strip has each method's advantage over it, paired over the seeds: how many
times as fast it reaches the target, or by how much its mean is better.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedapp.report.figures import INK, STEPS, add_legend_below, new_figure, save, style_axes
from fedapp.report.method_styles import MethodStyle, styles_of
from fedapp.report.style import current_style
from fedapp.report.verdict.paired import interval
from studies.maps.plan import MapPlan, Spot
from studies.maps.rule import CLOSE, MEASURES, WON, Measure, Win, Wins, merit, standing
from studies.maps.scores import MapScore

MOST = 6  # methods of a strip, beside the baseline
_ROW, _AROUND = 0.15, 0.75  # inches of a method's row, and of a cell's title and axis
_CELL_TITLE = 54  # characters of a line
_COLUMN, _NARROWEST = 4.0, 3.0  # inches of a strip, and of one in a paper


@dataclass(frozen=True)
class StripRow:
    """A method in a strip.

    Attributes
    ----------
    advantage, low, high : float
        Over the baseline, with Student's interval; times as fast, or units of the metric. The interval of one seed is
        NaN.
    is_best : bool
        Whether the method wins the cell, or isn't told apart from the best.
    """

    method: str
    advantage: float
    low: float
    high: float
    is_best: bool


def strip(plan: MapPlan, scores: Sequence[MapScore], found: Win, measure: Measure) -> list[StripRow]:
    """Return the rows of a strip, the best first: the first `MOST` methods, the best ones' rivals, and the baseline.

    By time those methods are shown that reach the target on every seed. The result is empty if the baseline's runs
    are missing or diverged, or if no method can win.
    """
    known = {each.method: each for each in scores if each.can_win}
    base = known.get(next(iter(plan.methods)))
    if base is None or not found.best:
        return []
    shown = [each for each in standing(plan, scores) if each.method in known]
    if measure == "time":
        shown = [each for each in shown if each.reached == len(each.times)]
    shown.sort(key=lambda each: -float(merit(plan, each, measure).mean()))
    rivals = found.best[:MOST]
    kept = [each for place, each in enumerate(shown) if place < MOST or each.method in rivals]
    if base not in kept:
        kept.append(base)
    return [_row(plan, each, base, found, measure) for each in kept]


def _row(plan: MapPlan, each: MapScore, base: MapScore, found: Win, measure: Measure) -> StripRow:
    ahead = merit(plan, each, measure) - merit(plan, base, measure)
    low, high = interval(ahead, plan.rule.level)
    scale = math.exp if measure == "time" else float
    return StripRow(
        each.method, scale(float(ahead.mean())), scale(low), scale(high), each.method in found.best
    )


def draw_map(path: Path, plan: MapPlan, scores: Mapping[Spot, Sequence[MapScore]], wins: Wins) -> Path:
    """Draw the map; return its path."""
    strategies = {name: str(own["strategy"]) for name, own in plan.methods.items()}
    # A method under its own name has the method's own look, and its variations have others.
    names = sorted(strategies, key=lambda name: name != strategies[name])
    looks = dict(zip(names, styles_of(strategies[name] for name in names), strict=True))
    spots = [spots_of_row for problem in plan.problems for spots_of_row in _rows(plan, problem)]
    strips = {
        (spot, measure): strip(plan, scores[spot], wins[spot, measure], measure)
        for spot in scores
        for measure in MEASURES
    }
    columns, style = len(MEASURES) * max(map(len, spots)), current_style()
    if style.width:
        columns = min(columns, int(style.inches / _NARROWEST))
    pairs = [[(spot, measure) for spot in row for measure in MEASURES] for row in spots]
    lines = [row[at : at + columns] for row in pairs for at in range(0, len(row), columns)]
    heights = [_AROUND + _ROW * max(1, *(len(strips[pair]) for pair in line)) for line in lines]
    figure = new_figure(0.9 + sum(heights), plan.title)
    if not style.width:
        figure.set_figwidth(_COLUMN * columns)
    grid = figure.subplots(len(lines), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    for line, panels in zip(lines, grid, strict=True):
        for axes in panels[len(line) :]:
            axes.set_axis_off()
        for (spot, measure), axes in zip(line, panels, strict=False):
            axes.set_title(_cell_title(plan, spot, measure), fontsize=8, color=INK, loc="left")
            _draw_strip(axes, plan, strips[spot, measure], wins[spot, measure], measure, looks)
    add_legend_below(
        figure,
        [
            Line2D([], [], marker="o", color=INK, lw=0, label="wins, or isn't told apart from the best"),
            Line2D([], [], marker="o", color=INK, mfc="white", lw=0, label="behind the best"),
            Line2D([], [], color="#999999", ls="--", label=f"the baseline, {next(iter(plan.methods))}"),
        ],
        f"the best methods of each cell, and {100 * (1 - plan.rule.level):g} % intervals of their paired "
        f"advantage over the baseline; {len(plan.seeds)} seeds",
    )
    return save(figure, path)


def _draw_strip(
    axes: Axes,
    plan: MapPlan,
    rows: Sequence[StripRow],
    found: Win,
    measure: Measure,
    looks: dict[str, MethodStyle],
) -> None:
    """Draw a cell's strip, or in words what came of the cell."""
    style_axes(axes)
    if not rows:
        axes.set_axis_off()
        axes.text(0.5, 0.5, result_text(found), transform=axes.transAxes, ha="center", fontsize=8, color=INK)
        return
    axes.axvline(1.0 if measure == "time" else 0.0, color="#999999", ls="--", lw=1, zorder=1)
    for place, row in enumerate(rows):
        look = looks[row.method]
        axes.plot([row.low, row.high], [place, place], color=look.color, lw=1.6, zorder=2)
        fill = look.color if row.is_best else "white"
        axes.plot(row.advantage, place, look.mark, color=look.color, mfc=fill, ms=5, zorder=3)
    names = [row.method for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(labelsize=7, length=2)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.is_best and found.outcome == WON else "normal")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.set_xlabel(_advantage_text(plan, found, measure), fontsize=7, color=INK)


def result_text(found: Win) -> str:
    """Return what came of a cell that has no strip."""
    return "no method reaches it on every seed" if found.outcome not in (WON, CLOSE) else found.outcome


def _advantage_text(plan: MapPlan, found: Win, measure: Measure) -> str:
    """Return what a strip's axis is, and what came of its cell."""
    base = next(iter(plan.methods))
    what = f"times as fast as {base}" if measure == "time" else f"better than {base} by"
    came = f"{found.best[0]} wins" if found.outcome == WON else f"{len(found.best)} aren't told apart"
    return f"{what}; {came}"


def _cell_title(plan: MapPlan, spot: Spot, measure: Measure) -> str:
    """Return what a cell is about."""
    across, upwards = plan.sides(spot.problem)
    if measure == "time":
        what = f"time to {plan.metric} {plan.problems[spot.problem].target:g}"
    else:
        what = f"{plan.metric}, mean over {plan.budget:g} s"
    sides = [f"{plan.across.name}: {spot.across}"] * bool(across) + [
        f"{plan.upwards.name}: {spot.upwards}"
    ] * bool(upwards)
    return "\n".join([f"{spot.problem}: {what}", *wrap("; ".join(sides), _CELL_TITLE)])


def _rows(plan: MapPlan, problem: str) -> list[list[Spot]]:
    """Return a problem's cells, row by row from the top; labels that are numbers rise upwards and to the right."""
    across, upwards = (_rising(labels) for labels in plan.sides(problem))
    return [[Spot(problem, each, upward) for each in across] for upward in reversed(upwards)]


def _rising(labels: list[str]) -> list[str]:
    try:
        return sorted(labels, key=lambda label: float(label))
    except ValueError:
        return labels
