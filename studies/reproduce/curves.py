"""Curves with bands over seeds: what most of the papers' figures are."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedapp.report.figures import INK, STEPS, new_figure, save, style_axes
from fedapp.report.method_styles import COLORS, MethodStyle, styles_of
from fedapp.report.overlay import set_view
from fedapp.report.series import Array
from studies.reproduce.runs import Runs

Lines = Mapping[str, Runs]

_FEW = 10  # points of a line, each of which has a marker
# Where curves are this close at the end, relative to the axis, the end is drawn a second time, larger.
_CLOSE, _END = 0.15, 0.6


def draw_band(axes: Axes, runs: Runs, key: str, x: str, look: MethodStyle, label: str) -> tuple[Array, Array]:
    """Draw the mean over seeds, for two or more with a band of one standard deviation; return the mean's line."""
    grid, middle, spread = runs.band(key, x)
    axes.plot(grid, middle, lw=1.3, label=label, **look.line(middle))
    if len(runs) > 1:
        axes.fill_between(grid, middle - spread, middle + spread, color=look.color, alpha=0.15, lw=0)
    return grid, middle


def panels(
    path: Path,
    title: str,
    grid: Sequence[Sequence[tuple[str, Lines, str]]],
    *,
    x: str = "time",
    x_label: str = "virtual time",
    y_label: Mapping[str, str] | None = None,
    height: float = 2.3,
) -> Path:
    """Draw a grid of panels, each (title, lines by name, metric); all share one legend.

    A panel without a single run is left out. Lines that end close together are shown larger in an inset.

    Parameters
    ----------
    x : str
        Metric of the horizontal axis: ``time`` or ``aggregation``.
    y_label : mapping
        Label of each metric; by default its key.
    """
    grid = [[panel for panel in row if any(panel[1].values())] for row in grid]
    grid = [row for row in grid if row]
    figure = new_figure(0.9 + height * len(grid), title)
    axes_grid = figure.subplots(len(grid), max(map(len, grid)), squeeze=False)
    strategies = {
        name: runs[0].config.strategy
        for row in grid
        for _, lines, _ in row
        for name, runs in lines.items()
        if runs
    }
    looks = dict(zip(strategies, styles_of(strategies.values()), strict=True))
    if len(set(strategies.values())) == 1:  # nothing but lines of one method, which colours tell apart best
        looks = {
            name: MethodStyle(color, "o") for name, color in zip(strategies, cycle(COLORS), strict=False)
        }
    for row, axes_row in zip(grid, axes_grid, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for (panel_title, lines, key), axes in zip(row, axes_row, strict=False):
            style_axes(axes)
            _draw(axes, lines, key, x, looks)
            axes.set_title(panel_title, fontsize=9)
            axes.tick_params(labelsize=7)
            axes.set_ylabel((y_label or {}).get(key, key), fontsize=8)
            axes.set_xlabel(x_label, fontsize=8)
    handles = {
        label: handle
        for axes in axes_grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(len(handles), 5),
            frameon=False,
            fontsize=9,
        )
    return save(figure, path)


def _draw(axes: Axes, lines: Lines, key: str, x: str, looks: Mapping[str, MethodStyle]) -> None:
    """Draw one panel."""
    drawn = {name: draw_band(axes, runs, key, x, looks[name], name) for name, runs in lines.items() if runs}
    right = max(float(grid[-1]) for grid, _ in drawn.values())
    few = max(grid.size for grid, _ in drawn.values()) <= _FEW
    axes.set_xlim(0, 1.02 * right if few else right)  # room for whole markers
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    # The view takes in whole bands of few points; of many points a few wide bands would flatten the lines.
    bands = [runs.band(key, x) for runs in lines.values() if runs and few]
    edges = [(grid, middle + sign * spread) for grid, middle, spread in bands for sign in (-1, 1)]
    if set_view(axes, [*drawn.values(), *edges]):
        _enlarge(axes, drawn, looks)


def _enlarge(axes: Axes, drawn: Mapping[str, tuple[Array, Array]], looks: Mapping[str, MethodStyle]) -> None:
    """Draw the end of the lines again, larger, if they are close there, where there is room: below or above them."""
    low, high = axes.get_ylim()
    end = min(float(grid[-1]) for grid, _ in drawn.values())
    late: dict[str, tuple[Array, Array]] = {}
    for name, (grid, middle) in drawn.items():
        part = (grid >= _END * end) & (grid <= end) & np.isfinite(middle)
        if part.any() and middle[part].max() <= high:
            late[name] = (grid[part], middle[part])
    values = np.concatenate([middle for _, middle in late.values()]) if late else np.zeros(0)
    if len(late) < 2 or np.ptp(values) >= _CLOSE * (high - low):
        return
    below = values.mean() > (low + high) / 2
    inset = axes.inset_axes((0.5, 0.12, 0.48, 0.4) if below else (0.5, 0.5, 0.48, 0.42))
    for name, (grid, middle) in late.items():
        inset.plot(grid, middle, color=looks[name].color, lw=1)
    inset.set_xlim(_END * end, end)
    inset.xaxis.set_major_locator(MaxNLocator(2, steps=STEPS))
    inset.yaxis.set_major_locator(MaxNLocator(3, steps=STEPS))
    inset.tick_params(labelsize=6, length=2, colors=INK, pad=1)
    inset.spines[:].set_color("#999999")


def finite(*values: float) -> bool:
    """Tell whether all values are numbers."""
    return all(map(math.isfinite, values))
