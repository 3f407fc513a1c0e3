"""Curves with bands over seeds: what most of the papers' figures are."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedapp.report.figures import STEPS, TEST, TRAIN, new_figure, save, style_axes
from fedapp.reproduce.runs import Runs

COLORS = [TEST, TRAIN, "#117733", "#AA4499", "#999933", "#332288", "#88CCEE", "#882255"]

Lines = Mapping[str, Runs]


def draw_band(axes: Axes, runs: Runs, key: str, x: str, color: str, label: str) -> None:
    """Draw the mean over seeds and, for two seeds or more, a band of one standard deviation."""
    if not runs:
        return
    grid, middle, spread = runs.band(key, x)
    axes.plot(grid, middle, color=color, lw=1.5, label=f"{label}")
    if len(runs) > 1:
        axes.fill_between(grid, middle - spread, middle + spread, color=color, alpha=0.2, lw=0)


def panels(
    path: Path,
    title: str,
    grid: Sequence[Sequence[tuple[str, Lines, str]]],
    *,
    x: str = "time",
    x_label: str = "virtual time",
    y_label: Mapping[str, str] | None = None,
    height: float = 2.3,
    log: Sequence[str] = (),
) -> Path:
    """Draw a grid of panels, each (title, lines by name, metric); all share one legend.

    Parameters
    ----------
    x : str
        Metric of the horizontal axis: ``time`` or ``aggregation``.
    y_label : mapping
        Label of each metric; by default its key.
    log : sequence of str
        Metrics drawn on a log axis.
    """
    figure = new_figure(0.9 + height * len(grid), title)
    axes_grid = figure.subplots(len(grid), max(map(len, grid)), squeeze=False)
    names = list(dict.fromkeys(name for row in grid for _, lines, _ in row for name in lines))
    for number, (row, axes_row) in enumerate(zip(grid, axes_grid, strict=True), start=1):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for column, ((panel_title, lines, key), axes) in enumerate(zip(row, axes_row, strict=False)):
            style_axes(axes)
            for name, runs in lines.items():
                draw_band(axes, runs, key, x, COLORS[names.index(name) % len(COLORS)], name)
            if not any(lines.values()):
                axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")
            axes.set_title(panel_title, fontsize=9)
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
            axes.tick_params(labelsize=8)
            if key in log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
                axes.tick_params(axis="y", which="minor", labelsize=6)
            else:
                axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
            if column == 0 or row[column - 1][2] != key:
                axes.set_ylabel((y_label or {}).get(key, key), fontsize=9)
            if number == len(grid):
                axes.set_xlabel(x_label, fontsize=9)
    handles = {
        label: handle
        for axes in axes_grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 5),
            frameon=False, fontsize=9,
        )  # fmt: skip
    return save(figure, path)


def decline(values: Sequence[float]) -> bool:
    """Tell whether each value is below the one before."""
    return bool(np.all(np.diff(values) < 0))


def finite(*values: float) -> bool:
    """Tell whether all values are numbers."""
    return all(map(math.isfinite, values))
