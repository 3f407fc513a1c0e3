"""Curves of several settings over each other, with bands over seeds, and their names below."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedapp.report.cells import Cell, any_without_rounds, axis_label, best_of, clients_text, direction_of
from fedapp.report.figures import INK, STEPS, add_legend_below, new_figure, save, style_axes
from fedapp.report.files import with_rows
from fedapp.report.method_styles import MethodStyle, styles_of
from fedapp.report.series import Array
from fedapp.report.style import ONE_COLUMN, current_style

MOST = 8  # lines that can be told apart

_PAPER_HEIGHT, _LEGEND_LINE = 2.7, 0.06  # inches of a figure in a paper, and more of them for each name

# What the vertical axis has to hold: these percentiles of the curves, less the very beginning, where they fall from
# where any model starts. A lone spike would flatten all else, as would a curve that goes far above most others.
_SHOWN, _BEGINNING, _ABOVE = (1, 99), 0.03, 1.5


def draw_overlay(
    path: Path,
    cells: Sequence[Cell],
    metrics: Sequence[str],
    axes: Mapping[str, float],
    title: str = "",
) -> list[Path]:
    """Draw a panel for each metric (rows) and axis (columns); return the paths.

    One column of a paper has a panel of the first metric and axis, two have one of each axis. Beyond eight settings,
    those with the best first metric at the end are drawn, or the first ones where it isn't known which values are
    better; the title says so.

    Parameters
    ----------
    cells
        Settings; those without runs are left out.
    axes
        Axes of `fedapp.report.recorded.AXES`, each with the place that all runs reached, marked if some went further.
    title
        Empty: the metrics and axes in words.
    """
    style = current_style()
    shown, note = _few([cell for cell in cells if cell.runs], metrics)
    looks = styles_of(cell.method for cell in shown)
    metrics = metrics[:1] if style.width else metrics
    axes = dict(list(axes.items())[:1]) if style.width == ONE_COLUMN else axes
    names = _names(shown, in_paper=bool(style.width))
    height = (_PAPER_HEIGHT if style.width else 0.7 + 2.7 * len(metrics)) + _LEGEND_LINE * len(names)
    heading = title or question(shown, metrics, axes)
    figure = new_figure(height, "\n".join([heading + note, clients_text(shown)]) + _bands_text(shown))
    grid = figure.subplots(len(metrics), len(axes), squeeze=False, sharey="row")
    for row, key in zip(grid, metrics, strict=True):
        for panel, (axis, end) in zip(row, axes.items(), strict=True):
            style_axes(panel)
            drawn = {
                name: _draw_band(panel, cell, key, axis, look, opacity=min(0.15, 0.4 / len(shown)))
                for name, cell, look in zip(names, shown, looks, strict=True)
            }
            bands = [cell.band(key, axis) for cell in shown]
            set_view(panel, [(x, y + sign * spread) for x, y, spread in bands for sign in (-1, 1)])
            right = max(float(np.nanmax(x)) for x, _ in drawn.values())
            panel.set_xlim(0, right or 1)
            if end < 0.98 * right:
                panel.axvline(end, color="#BBBBBB", lw=1, zorder=0)
            panel.xaxis.set_major_locator(MaxNLocator(4, steps=STEPS, integer=axis == "aggregation"))
            panel.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
            panel.set_xlabel(axis_label(axis, shown), fontsize=9)
        row[0].set_ylabel(key, fontsize=9)
    handles = [
        Line2D([], [], lw=1.4, label=name, **look.line()) for name, look in zip(names, looks, strict=True)
    ]
    add_legend_below(figure, handles)
    return style.paths(save(figure, path))


def question(cells: Sequence[Cell], metrics: Sequence[str], axes: Iterable[str]) -> str:
    """Return what a figure of curves shows: ``Test accuracy and loss over virtual time``."""
    of_clients = any(with_rows(key, ["test"]) != key for key in metrics)
    measured = [with_rows(key, (run.rows for cell in cells for run in cell.runs)) for key in metrics]
    text = f"{' and '.join(measured)} over {' and '.join(_over(axis, cells) for axis in axes)}"
    return text[0].upper() + text[1:] if of_clients else f"Test {text}"


def _over(axis: str, cells: Sequence[Cell]) -> str:
    """Return what an axis is called in a sentence."""
    rounds = "aggregations" if any_without_rounds(cells) else "rounds"
    is_real = axis_label(axis, cells) == "seconds"
    return {"time": "time" if is_real else "virtual time", "aggregation": rounds, "bytes": "bytes sent"}[axis]


def _names(cells: Sequence[Cell], *, in_paper: bool) -> list[str]:
    """Return the names of lines; in a paper, methods that alone tell settings apart as their papers call them."""
    names = [cell.label for cell in cells]
    if in_paper and names == [cell.method for cell in cells]:
        from fedapp.config.citations import paper_name  # imports Flower, which takes a second

        return [paper_name(name) for name in names]
    return names


def _few(cells: Sequence[Cell], metrics: Sequence[str]) -> tuple[list[Cell], str]:
    """Return at most MOST cells, the best ones, and a note for the title if others are left out."""
    left = list(cells)
    best: list[Cell] = []
    while len(cells) > MOST and len(best) < MOST and (next_best := best_of(left, metrics[0])):
        best.append(next_best)
        left.remove(next_best)
    if not best:
        return list(cells[:MOST]), f"\n{MOST} of {len(cells)} settings: the first" * (len(cells) > MOST)
    order = "highest" if direction_of(cells, metrics[0]) else "lowest"
    return best, f"\n{len(best)} of {len(cells)} settings: those with the {order} {metrics[0]}"


def _bands_text(cells: Sequence[Cell]) -> str:
    """Return what lines and bands are, for the title; "" where no setting has two seeds."""
    numbers = sorted({len(cell.seeds) for cell in cells if len(cell.seeds) > 1})
    if not numbers:
        return ""
    seeds = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    return f"\nlines and bands: mean ± 1 s.d. of {seeds} seeds"


def _draw_band(
    axes: Axes, cell: Cell, key: str, axis: str, look: MethodStyle, *, opacity: float
) -> tuple[Array, Array]:
    """Draw the mean over seeds, for two or more with a band of one standard deviation; return the mean's line."""
    grid, middle, spread = cell.band(key, axis)
    axes.plot(grid, middle, lw=1.4, **look.line(middle))
    if len(cell.seeds) > 1:
        axes.fill_between(grid, middle - spread, middle + spread, color=look.color, alpha=opacity, lw=0)
    return grid, middle


def set_view(axes: Axes, lines: Iterable[tuple[Array, Array]]) -> bool:
    """Fit the vertical axis to the lines (x, y), without their very beginning and without lone spikes.

    Returns whether there is a value to see.
    """
    shown = [y[(x >= _BEGINNING * x[-1]) & np.isfinite(y)] for x, y in lines]
    bounds = [np.percentile(values, _SHOWN) for values in shown if values.size]
    if not bounds:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", fontsize=8, color=INK)
        return False
    lows, highs = np.transpose(bounds)
    low, usual = float(lows.min()), float(np.median(highs))
    high = min(float(highs.max()), usual + _ABOVE * (usual - low))
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)
    return True
