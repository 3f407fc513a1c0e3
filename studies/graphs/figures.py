"""The figures of the graph, over a grid of class and data imbalance: figures 3.3 to 3.5 of Buttaci 2024."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fedapp.report.figures import INK, STEPS, TEST, TRAIN, Array, new_figure, save, style_axes

# Misalignments are counted in bins of a fiftieth of a decade from here up, as they are floored in the graph.
_LEAST, _BINS = 1e-12, 600
_EDGES = np.geomspace(_LEAST, 1, _BINS + 1)
_MOST_BARS = 50
# The most cells of all heat maps together, and the most clients of one: more can't be seen and make the file large.
_HEAT_CELLS, _HEAT_CLIENTS = 28_000, 120
_LINES = [TEST, TRAIN, "#117733", "#882255", "#999933", "#332288"]
# The most class imbalances (columns) and data imbalances (rows) of a grid.
MAX_COLUMNS, MAX_ROWS = 6, 3
_WIDE = 4  # the most columns for which text has full size


@dataclass(frozen=True, eq=False)  # arrays have no single truth value
class GraphPanel:
    """The drawn numbers of the graph of one federated network; panels with equal imbalances are repetitions.

    Attributes
    ----------
    class_imbalance, data_imbalance : float
        κ⁻¹ and φ² of the partition (Buttaci 2024, §3.4.1).
    heat : array (n, n)
        mis(i, j) in [0, 1] of every ``every``-th client.
    every : int
        1: the heat map has all clients.
    counts : array (600,)
        Pairs of clients by misalignment, in fiftieths of a decade from 1e-12.
    eigenvalues : array (C,)
        Of the Laplacian, ascending.
    homogeneity : float
        hom; NaN isn't drawn.
    theta, phi : float
        mis ~ lognormal(−θ, φ²), fitted; φ = 0 or NaN draws no density.
    """

    class_imbalance: float
    data_imbalance: float
    heat: Array
    every: int
    counts: Array
    eigenvalues: Array
    homogeneity: float
    theta: float
    phi: float

    @classmethod
    def of(
        cls,
        class_imbalance: float,
        data_imbalance: float,
        misalignment: Array,
        eigenvalues: Array,
        homogeneity: float,
        theta: float,
        phi: float,
        most: int = _HEAT_CLIENTS,
    ) -> "GraphPanel":
        """Make the panel of a misalignment matrix (C, C), with at most ``most`` clients in the heat map.

        Raises
        ------
        ValueError
            If it isn't square.
        """
        if misalignment.ndim != 2 or len(set(misalignment.shape)) > 1:
            raise ValueError(f"misalignment: must be square, has shape {misalignment.shape}")
        mis = np.clip(np.asarray(misalignment, dtype=np.float64), _LEAST, 1)
        counts = np.histogram(mis[np.triu_indices(len(mis), 1)], _EDGES)[0]
        # Every k-th client rather than a mean over k, which would make clients look alike.
        every = max(1, -(-len(mis) // most))
        heat = mis[::every, ::every]
        return cls(class_imbalance, data_imbalance, heat, every, counts, eigenvalues, homogeneity, theta, phi)


def draw_graph(folder: Path, grid: Sequence[GraphPanel], title: str = "") -> list[Path]:
    """Draw the graphs of a grid of partitions, or of a single run, 1200 pixels wide.

    Writes ``graph-misalignment.png`` (a heat map and, below it, the distribution of each setting),
    ``graph-spectrum.png`` and, for two or more class imbalances, ``graph-homogeneity.png`` (mean over
    repetitions, with their range). Heat maps show the first repetition, all else shows all of them; the
    fitted density has their mean θ and φ.

    Parameters
    ----------
    folder : Path
        Exists.
    grid : sequence of GraphPanel
        In any order; settings may be missing.
    title : str
        Such as the dataset and the number of clients.

    Raises
    ------
    ValueError
        If the grid is empty, or larger than 6 class by 3 data imbalances.
    """
    columns = sorted({panel.class_imbalance for panel in grid})
    rows = sorted({panel.data_imbalance for panel in grid})
    if not (0 < len(columns) <= MAX_COLUMNS and len(rows) <= MAX_ROWS):
        limits = f"1 to {MAX_COLUMNS} class imbalances and 1 to {MAX_ROWS} data imbalances"
        raise ValueError(f"the grid must have {limits}, has {len(columns)} and {len(rows)}")
    cells = [
        [[p for p in grid if (p.data_imbalance, p.class_imbalance) == (row, column)] for column in columns]
        for row in rows
    ]
    before = f"{title}: " if title else ""
    paths = [
        _misalignments(folder, cells, before + "client misalignment"),
        _spectra(folder, cells, before + "eigenvalues of the graph's Laplacian"),
    ]
    if len(columns) > 1:
        paths.append(_homogeneities(folder, cells, before + "network homogeneity"))
    return paths


Cells = list[list[list[GraphPanel]]]
"""Repetitions by row (data imbalance) and column (class imbalance)."""


def _misalignments(folder: Path, cells: Cells, title: str) -> Path:
    wide = len(cells[0])
    if wide > 1:
        side = 0.8 * 8 / wide  # inches
        figure = new_figure(0.9 + len(cells) * (side + 1.7), title)
        grid = figure.subplots(2 * len(cells), wide, squeeze=False, height_ratios=[side, 1.3] * len(cells))
        heats, histograms = grid[::2], grid[1::2]
    else:  # side by side
        figure = new_figure(0.9 + 3.2 * len(cells), title)
        grid = figure.subplots(len(cells), 2, squeeze=False, width_ratios=[1, 1.2])
        heats, histograms = grid[:, :1], grid[:, 1:]
    pairs = np.sum([panel.counts for row in cells for cell in row for panel in cell], axis=0)
    filled = np.flatnonzero(pairs)
    first, last = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, _BINS)
    low, high = float(_EDGES[first]), float(_EDGES[last])
    norm = LogNorm(max(low, high * 1e-4), high)  # a few equal clients must not take all the colours
    most = min(_HEAT_CLIENTS, math.isqrt(_HEAT_CELLS // (len(cells) * wide)))
    bins = np.arange(first, last + (every := -(-(last - first) // _MOST_BARS)), every).clip(max=_BINS)
    image = None
    for row, panels in enumerate(cells):
        for column, cell in enumerate(panels):
            heat, below = heats[row, column], histograms[row, column]
            if not cell:
                heat.set_axis_off()
                below.set_axis_off()
                continue
            image = _heat(heat, cell[0], norm, most)
            heat.set_title(_setting(cell[0], wide), fontsize=9, color=INK)
            heat.set(xlabel="client", ylabel="client")
            below.set(xlabel="misalignment", ylabel="density of ln mis")
            _histogram(below, cell, bins, wide)
    for axes in grid.flat:
        axes.xaxis.label.set_fontsize(8)
        axes.yaxis.label.set_fontsize(8)
    if image is not None:
        bar = figure.colorbar(image, ax=heats.ravel().tolist(), pad=0.01, aspect=40)
        _plain_log(bar.ax.yaxis, max(low, high * 1e-4), high)
        bar.ax.tick_params(labelsize=8, colors=INK)
        bar.set_label("misalignment", fontsize=9)
        bar.outline.set_visible(False)
    return save(figure, folder / "graph-misalignment.png")


def _heat(axes: Axes, panel: GraphPanel, norm: LogNorm, most: int) -> Any:
    further = max(1, -(-len(panel.heat) // most))
    every = further * panel.every
    shown = np.array(panel.heat[::further, ::further])
    np.fill_diagonal(shown, np.nan)
    cmap = colormaps["viridis_r"].resampled(24).with_extremes(bad="white")
    edges = np.arange(len(shown) + 1) * every - 0.5
    image = axes.pcolormesh(edges, edges, np.clip(shown, norm.vmin, norm.vmax), cmap=cmap, norm=norm)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.tick_params(labelsize=8, colors=INK, length=2)
    axes.spines[:].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True, steps=STEPS))
    return image


def _histogram(axes: Axes, cell: list[GraphPanel], bins: Array, wide: int) -> None:
    """Draw the density of ln mis, for which the lognormal is a bell; ``bins`` are numbers of edges."""
    style_axes(axes)
    counts = np.sum([panel.counts for panel in cell], axis=0)
    total, edges = max(1, counts.sum()), _EDGES[bins]
    heights = np.add.reduceat(np.append(counts, 0), bins)[:-1] / total / np.diff(np.log(edges))
    axes.stairs(heights, edges, fill=True, color=TEST, alpha=0.45)
    theta, phi = (float(np.mean([getattr(panel, key) for panel in cell])) for key in ("theta", "phi"))
    if math.isfinite(theta) and phi > 0:
        x = np.linspace(np.log(edges[0]), np.log(edges[-1]), 200)
        axes.plot(
            np.exp(x), np.exp(-(((x + theta) / phi) ** 2) / 2) / (phi * math.sqrt(2 * math.pi)), color=TRAIN
        )
        style: dict[str, Any] = {
            "transform": axes.transAxes,
            "fontsize": 8 if wide <= _WIDE else 6,
            "va": "top",
            "color": TRAIN,
        }
        left = -theta > (np.log(edges[0]) + np.log(edges[-1])) / 2  # the bell is on the right
        x_text, side = (0.03, "left") if left else (0.98, "right")
        axes.text(x_text, 0.97, f"θ = {theta:.2f}\nφ = {phi:.2f}", ha=side, **style)
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    _plain_log(axes.xaxis, edges[0], edges[-1], 5 if wide <= _WIDE else 3)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=STEPS))
    axes.tick_params(labelsize=8)


def _spectra(folder: Path, cells: Cells, title: str) -> Path:
    figure = new_figure(1.0 + 2.1 * len(cells), title)
    grid = figure.subplots(len(cells), len(cells[0]), squeeze=False, sharex=True, sharey=True)
    spectra = [panel.eigenvalues[1:] for row in cells for cell in row for panel in cell]
    values = np.concatenate(spectra) if spectra else np.zeros(0)
    high = float(values.max()) if values.size else 1.0
    edges = np.linspace(0, (high if high > 0 else 1.0) * 1.02, 61)
    for row, panels in enumerate(cells):
        for column, cell in enumerate(panels):
            axes = grid[row, column]
            if not cell:
                axes.set_axis_off()
                continue
            style_axes(axes)
            axes.set_title(_setting(cell[0], len(cells[0])), fontsize=9, color=INK)
            spectrum = np.concatenate([panel.eigenvalues[1:] for panel in cell])
            share = np.histogram(np.clip(spectrum, 0, None), edges)[0] / max(1, len(spectrum))
            axes.stairs(share, edges, fill=True, color=TEST)
            if len(spectrum):
                axes.axvline(spectrum.mean(), color=TRAIN, lw=1.2, label="mean")
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
            axes.tick_params(labelbottom=True, labelleft=True, labelsize=8)
            axes.set_xlabel("λ₂ and above", fontsize=8)
            axes.set_ylabel("share", fontsize=8)
    handles, labels = next((h for h in (a.get_legend_handles_labels() for a in grid.flat) if h[0]), ([], []))
    if handles:
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="upper right")
    return save(figure, folder / "graph-spectrum.png")


def _homogeneities(folder: Path, cells: Cells, title: str) -> Path:
    figure = new_figure(4.2, title)
    axes = figure.subplots()
    style_axes(axes)
    for row, color in zip(cells, _LINES, strict=False):
        points = [(cell[0].class_imbalance, [p.homogeneity for p in cell]) for cell in row if cell]
        points = [(x, [y for y in ys if math.isfinite(y)]) for x, ys in points]
        points = [(x, ys) for x, ys in points if ys]
        if not points:
            continue
        x = [x for x, _ in points]
        data_imbalance = next(cell[0].data_imbalance for cell in row if cell)
        axes.fill_between(
            x, [min(ys) for _, ys in points], [max(ys) for _, ys in points], color=color, alpha=0.2, lw=0
        )
        means = [float(np.mean(ys)) for _, ys in points]
        axes.plot(x, means, "o-", color=color, lw=1.8, ms=4, label=f"data imbalance {data_imbalance:g}")
    imbalances = sorted({cell[0].class_imbalance for row in cells for cell in row if cell})
    positive = [x for x in imbalances if x > 0]
    axes.set_xscale("symlog", linthresh=min(positive, default=1.0))
    axes.xaxis.set_major_locator(FixedLocator(imbalances))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="class imbalance κ⁻¹", ylabel="homogeneity")
    axes.legend(frameon=False, fontsize=9)
    return save(figure, folder / "graph-homogeneity.png")


def _setting(panel: GraphPanel, wide: int) -> str:
    if wide > _WIDE:
        return f"κ⁻¹ = {panel.class_imbalance:g}\nφ² = {panel.data_imbalance:g}"
    return f"class imbalance {panel.class_imbalance:g}\ndata imbalance {panel.data_imbalance:g}"


def _plain_log(axis: Any, low: float, high: float, most: int = 5) -> None:
    """Label a log axis without mathtext, whose parser has global state."""
    decades = math.log10(high / low)
    subs = (1.0,) if decades > most / 2 else (1.0, 3.0) if decades > 1 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=most))
    plain = 0.05 if decades > most / 2 else 5e-4  # from here up; a power of ten is shorter
    axis.set_major_formatter(lambda value, _: f"{value:g}" if value > plain else _power(value))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def _power(value: float) -> str:
    digit, exponent = f"{value:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digit == "1" else f"{digit}·{power}"
