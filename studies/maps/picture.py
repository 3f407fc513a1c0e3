"""The map as a picture: a panel for each problem (rows) and measure (columns), a cell for each pair of labels."""

import math
from collections.abc import Collection, Mapping
from itertools import cycle
from pathlib import Path
from textwrap import wrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch, Rectangle

from fedapp.report.figures import INK, new_figure, save
from strategies import REGISTRY, AsynchronousStrategy
from studies.maps.plan import MapPlan
from studies.maps.rule import CLOSE, MEASURES, WON, Measure, Win, Wins

# Methods that wait for the slowest are warm, the others cool: told apart in most forms of colour blindness.
_WARM = ("#CC3311", "#EE7733", "#DDAA33", "#AA4499", "#882255", "#EE99AA", "#993404")
_COOL = (
    "#0077BB",
    "#33BBEE",
    "#009988",
    "#117733",
    "#44AA99",
    "#332288",
    "#88CCEE",
    "#999933",
    "#66CCAA",
    "#004488",
)
_GREY, _WHITE = "#D9D9D9", "#FFFFFF"

# What is ahead by so much has its colour in full: times the time, and part of the metric's range.
FULL: dict[Measure, float] = {"time": 2.0, "mean": 0.05}
_PALEST, _NAMED = 0.3, 3
_LINE, _LONG, _TITLE = (
    10,
    15,
    95,
)  # points from line to line of a cell; characters of a line there, and of the title
_DARK = 0.5  # luminance below which letters are white


def draw_map(path: Path, plan: MapPlan, wins: Wins) -> Path:
    """Draw the map, 1200 pixels wide; return its path."""
    rows = sum(len(plan.sides(problem)[1]) for problem in plan.problems)
    figure = new_figure(1.5 + 0.85 * len(plan.problems) + 0.66 * rows, "\n".join(wrap(plan.title, _TITLE)))
    heights = [0.85 + 0.66 * len(plan.sides(problem)[1]) for problem in plan.problems]
    grid = figure.subplots(
        len(plan.problems), len(MEASURES), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    winners = {found.best[0] for found in wins.values() if found.outcome == WON}
    colors = colors_of(plan, winners)
    for problem, panels in zip(plan.problems, grid, strict=True):
        for measure, axes in zip(MEASURES, panels, strict=True):
            across, upwards = _sides(plan, problem)
            _frame(axes, plan, problem, panel_title(plan, problem, measure), is_left=measure == MEASURES[0])
            for spot in (each for each in plan.spots if each.problem == problem):
                found = wins[spot, measure]
                place = (across.index(spot.across), upwards.index(spot.upwards))
                _cell(axes, place, found, measure, colors)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    handles.append(Patch(color=_GREY, label=CLOSE))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=8,
        title=f"the winner, the stronger the further it is ahead of the next (in full: {FULL['time']:g}×, "
        f"{FULL['mean']:g}); {len(plan.seeds)} seeds",
        title_fontsize=8,
    )
    return save(figure, path)


def panel_title(plan: MapPlan, problem: str, measure: Measure) -> str:
    """Return what a panel is about."""
    if measure == "time":
        return f"{problem}: time to {plan.metric} {plan.problems[problem].target:g}"
    return f"{problem}: {plan.metric}, mean over {plan.budget:g} s"


def colors_of(plan: MapPlan, winners: Collection[str]) -> dict[str, str]:
    """Return the colours of methods that win somewhere, in the order of the plan."""
    palettes = {True: cycle(_WARM), False: cycle(_COOL)}
    waits = {name: _waits(str(own["strategy"])) for name, own in plan.methods.items() if name in winners}
    return {name: next(palettes[each]) for name, each in waits.items()}


def _waits(strategy: str) -> bool:
    """Tell whether a method has rounds; one of a user's own counts as one that has."""
    known = REGISTRY.get(strategy)
    return known is None or not issubclass(known, AsynchronousStrategy)


def strength(found: Win, measure: Measure) -> float:
    """Return how strong a winner's colour is, 0 to 1."""
    if not math.isfinite(found.by):
        return 1.0
    part = (
        math.log(max(found.by, 1.0)) / math.log(FULL[measure])
        if measure == "time"
        else found.by / FULL[measure]
    )
    return float(np.clip(part, 0, 1))


def text_of(found: Win, measure: Measure) -> list[str]:
    """Return the lines of a cell: who, by how much, before whom."""
    if found.outcome == CLOSE:
        more = len(found.best) - _NAMED
        return [*found.best[:_NAMED], *([f"and {more} more"] if more > 0 else [])]
    if found.outcome != WON:
        return [found.outcome]
    (who,) = found.best
    if not found.runner_up:
        return [who, "all others", "diverged"]
    bound = "≥ " * found.at_least
    by = f"{bound}{found.by:.2f}×" if measure == "time" else f"+{abs(found.by):.3f}"
    return [who, by, f"vs {found.runner_up}"]


def _sides(plan: MapPlan, problem: str) -> tuple[list[str], list[str]]:
    """Return a panel's labels across and upwards: those that are numbers rise, others have the file's order."""
    across, upwards = plan.sides(problem)
    return _rising(across), _rising(upwards)


def _rising(labels: list[str]) -> list[str]:
    try:
        return sorted(labels, key=float)
    except ValueError:
        return labels


def _frame(axes: Axes, plan: MapPlan, problem: str, title: str, *, is_left: bool) -> None:
    across, upwards = _sides(plan, problem)
    axes.set(xlim=(0, len(across)), ylim=(0, len(upwards)))
    axes.set_xticks(np.arange(len(across)) + 0.5, across)
    axes.set_yticks(np.arange(len(upwards)) + 0.5, upwards if is_left else [""] * len(upwards))
    axes.tick_params(length=0, labelsize=9, colors=INK)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=9, color=INK)
    axes.set_xlabel(plan.across.name, fontsize=8, color=INK)
    if is_left:
        axes.set_ylabel(plan.upwards.name, fontsize=8, color=INK)


def _cell(
    axes: Axes, place: tuple[int, int], found: Win, measure: Measure, colors: Mapping[str, str]
) -> None:
    """Draw one cell."""
    fill = _WHITE
    if found.outcome == WON:
        fill = _blend(colors[found.best[0]], _PALEST + (1 - _PALEST) * strength(found, measure))
    elif found.outcome == CLOSE:
        fill = _GREY
    axes.add_patch(Rectangle(place, 1, 1, facecolor=fill, edgecolor="white", lw=1.5))
    lines, ink = text_of(found, measure), "white" if _luminance(fill) < _DARK else "black"
    for at, line in enumerate(lines):
        axes.annotate(
            line,
            (place[0] + 0.5, place[1] + 0.5),
            (0, _LINE * ((len(lines) - 1) / 2 - at)),
            ha="center",
            va="center",
            textcoords="offset points",
            color=ink,
            fontsize=7 if len(line) <= _LONG else 6.3,
            fontweight="bold" if at == 0 and found.outcome == WON else "normal",
        )


def _blend(color: str, part: float) -> str:
    """Return a colour over white."""
    return str(to_hex([part * value + 1 - part for value in to_rgb(color)]))


def _luminance(color: str) -> float:
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))
