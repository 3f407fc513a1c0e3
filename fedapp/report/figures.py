"""The figures of a run, without pyplot or any other global state: the ServerApp draws from a thread."""

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from fedapp.report import as_number, read_config, read_metrics
from fedapp.report.client_tables import last_clients
from fedapp.report.files import LOSS, data_of, metrics_among, step_of, without_digest
from fedapp.report.method_styles import BLUE, VERMILION, MethodStyle, styles_of
from fedapp.report.style import SCREEN, current_style

log = logging.getLogger("flwr.fedapp")

Array = NDArray[Any]

TEST, TRAIN, INK, _GRID = BLUE, VERMILION, "#333333", "#E3E3E3"
# Paul Tol's "muted" scheme: told apart under the common forms of colour blindness.
_CLASSES = ["#332288", "#88CCEE", "#44AA99", "#117733", "#999933"]
_CLASSES += ["#DDCC77", "#CC6677", "#882255", "#AA4499", "#BBBBBB"]
_MARKED_POINTS = 25  # up to this number of evaluations, each gets a marker
_LOG_RATIO = 50.0  # a loss that spans more is drawn on a log axis
_BAR_CLIENTS = 60

# Titles of the legend, by `Dataset.strata_are`.
_STRATA = {
    "class": "class",
    "tenth": "tenth of the target, 0: lowest",
    "natural client": "natural client",
    "all rows": "all rows",
}
_NAMED_BARS = 15  # most names that have room below their bars, aslant
_NAMED_CLASSES = 26  # most names that have room beside a heat map
_HEAT_CLIENTS = 250  # more columns than that can't be seen at 1200 pixels
STEPS = [1, 2, 2.5, 5, 10]
_MOST_COLUMNS = 4  # of a legend
_BEFORE_LABEL = 10  # characters that have room where a legend's entry has its line or patch
_USUAL_SIZE = 10.0  # points, of matplotlib's texts


def draw_curves(run_dir: Path) -> Path:
    """Draw loss and score against rounds and, where it looks different, against time into ``curves.png``.

    The score is the first metric of the run beside the loss, such as accuracy; without one there is the loss alone.

    The figure is 1200 pixels wide. It is half as high, without the panels over time, where all rounds take equally
    long, and where there are no times.

    Parameters
    ----------
    run_dir
        Holds ``config.toml`` and ``metrics.jsonl`` (time in seconds, or in the scenario's virtual unit).
    """
    records = read_metrics(run_dir)
    scores = [key for key in _metrics(run_dir, records) if key != LOSS][:1]
    columns = {
        key: np.array([as_number(record.get(key)) for record in records], dtype=np.float64)
        for key in ("aggregation", "time", LOSS, "train-loss", *scores)
    }
    virtual = bool(records) and records[-1].get("clock") == "virtual"
    x_labels = {"aggregation": "server round" if step_of(records) == "round" else "aggregation"}
    if not _says_the_same(columns["aggregation"], columns["time"]):
        x_labels["time"] = "virtual time" if virtual else "seconds"
    (look,) = styles_of([str(read_config(run_dir).get("strategy", ""))])
    over = " and ".join(f"{label}s" if key == "aggregation" else label for key, label in x_labels.items())
    title = f"Test {' and '.join((LOSS, *scores))} over {over.replace('seconds', 'time')}"
    figure = new_figure(0.6 + 2.4 * len(x_labels), f"{title}\n{_from_config(run_dir, *_NAMED)}".rstrip())
    grid = figure.subplots(len(x_labels), 1 + len(scores), sharey="col", squeeze=False)
    for row, (key, label) in zip(grid, x_labels.items(), strict=True):
        for axes, name in zip(row, (LOSS, *scores), strict=True):
            train = {"train": columns["train-loss"]} if name == LOSS else {}
            _curves(axes, columns[key], {"test": columns[name], **train}, look)
            axes.set_ylabel(f"{name}, log scale" if axes.get_yscale() == "log" else name)
            axes.set_xlabel(label)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=key == "aggregation", steps=STEPS))
    if np.isfinite(columns["train-loss"]).any():
        grid[0, 0].legend(frameon=False, fontsize=9)
    return save(figure, run_dir / "curves.png")


def _metrics(run_dir: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics of a run's model, the metric by which the run is judged first."""
    return metrics_among(
        (key for record in records for key in record), read_config(run_dir).get("metrics", "")
    )


def _says_the_same(rounds: Array, times: Array) -> bool:
    """Tell whether a curve over time has the same shape as over rounds, or can't be drawn."""
    if not np.isfinite(times).any():
        return True
    return bool(np.isfinite(times).all() and np.allclose(times * rounds[-1], rounds * times[-1]))


def draw_partition(run_dir: Path, labels: Array, num_classes: int, *, strata: str = "class") -> Path:
    """Draw the samples of each class on each client into ``partition.png``, 1200 pixels wide.

    Stacked bars; for more than 60 clients or 10 classes a heat map below the client sizes.

    Parameters
    ----------
    run_dir
        Holds ``partition.npz`` and, for the title, ``config.toml``.
    labels
        Class of each dataset row, shape (rows,), integers in 0..num_classes - 1; otherwise a ValueError.
    num_classes
        Number of classes, also counting those that no client holds.
    strata
        What a class is (`Dataset.strata_are`): a key of ``_STRATA``.
    """
    with np.load(run_dir / "partition.npz") as stored:
        counts = class_counts(stored["client_indices"], stored["client_offsets"], labels, num_classes)
        classes = stored["class_names"].tolist() if "class_names" in stored else []
        named = stored["client_names"].tolist() if "client_names" in stored else []
    clients = named or _names(run_dir, len(counts))
    source = _from_config(run_dir, "dataset", "partitioner")
    return draw_division(run_dir / "partition.png", counts, source, clients, classes, strata=strata)


def draw_division(
    path: Path, counts: Array, source: str, clients: Sequence[str], classes: Sequence[str], *, strata: str
) -> Path:
    """Draw the samples of each class on each client, ``counts`` (clients, classes), 1200 pixels wide.

    ``clients`` and ``classes`` are names, empty where there are none; the title begins with ``source``.
    """
    sizes = counts.sum(axis=1)
    title = f"{source}: " * bool(source) + f"{len(sizes):,} clients, {sizes.sum():,} samples"
    spread = f"samples per client: median {np.median(sizes):,.9g}, min {sizes.min():,}, max {sizes.max():,}"
    as_bars = len(counts) <= _BAR_CLIENTS and counts.shape[1] <= len(_CLASSES)
    figure = new_figure(4.4 if as_bars else 5.6, f"{title}\n{spread}")
    if as_bars:
        _stacked_bars(figure, counts, clients, classes, strata=strata)
    else:
        _heat_map(figure, counts, clients, classes, strata=strata)
    return save(figure, path)


def _curves(axes: Axes, x: Array, series: Mapping[str, Array], look: MethodStyle) -> None:
    style_axes(axes)
    right = np.max(x, where=np.isfinite(x), initial=0) or 1
    left = np.min(x, where=np.isfinite(x), initial=right)
    axes.set_xlim(left if left < right else 0, right)
    shown = {name: np.where(np.isfinite(x) & np.isfinite(y), y, np.nan) for name, y in series.items()}
    for name, y in shown.items():
        mark, form = (look.mark, {"lw": 1.8}) if name == "test" else (".", {"lw": 1.0, "ls": (0, (3, 1.5))})
        axes.plot(x, y, color=look.color, label=name, **form)
        missing = np.pad(np.isnan(y), 1, constant_values=True)
        # A line can't show a value that stands alone between missing ones.
        marked = (missing[:-2] & missing[2:]) | (len(y) <= _MARKED_POINTS)
        axes.plot(x[marked], y[marked], mark, color=look.color, ms=4, mew=0)
    values = np.concatenate([y[np.isfinite(y)] for y in shown.values()])
    if values.size and values.min() > 0 and values.max() / values.min() > _LOG_RATIO:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")  # not mathtext: its parser has global state
    _mark_last(axes, x, shown["test"], right, look)


def _mark_last(axes: Axes, x: Array, y: Array, right: float, look: MethodStyle) -> None:
    finite = np.flatnonzero(np.isfinite(y))
    if not finite.size:
        axes.tick_params(left=False, labelleft=False, grid_alpha=0)
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=INK, fontsize=9)
        return
    end = (x[finite[-1]], y[finite[-1]])
    axes.plot(*end, look.mark, color=look.color, ms=6, clip_on=False, zorder=4)
    style: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "color": INK}
    axes.annotate(f"{end[1]:.4g}", end, (7, 0), va="center", fontsize=9, fontweight="bold", **style)
    if finite[-1] < len(y) - 1:
        axes.axvspan(end[0], right, color="#F2F2F2", zorder=0)
        axes.text(right, 1.01, "not finite", transform=axes.get_xaxis_transform(), ha="right", fontsize=8)


def _names(run_dir: Path, clients: int) -> list[str]:
    """Return the names of devices that hold the parts, if they all have one."""
    names = last_clients(run_dir).get("name", [])
    return list(names) if len(names) == clients and all(names) else []


def shortened(name: str, most: int = 20) -> str:
    """Return a name as a figure shows it: its beginning, without characters that no font has or mathtext reads."""
    text = "".join(each if each.isprintable() else "?" for each in name).replace("$", r"\$")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def name_ticks(axis: Axis, names: Sequence[str], *, upright: bool = False) -> None:
    """Name whole numbers from 0 on an axis, as many as have room: below bars up to 60, aslant up to 15."""
    if not names or len(names) > _BAR_CLIENTS:
        return
    many = len(names) > _NAMED_BARS
    turned: dict[str, Any] = {"rotation": 90, "fontsize": 7} if many else {"rotation": 30, "ha": "right"}
    axis.set_ticks(range(len(names)), [shortened(name) for name in names], **({} if upright else turned))


def _stacked_bars(
    figure: Figure, counts: Array, clients: Sequence[str], classes: Sequence[str] = (), *, strata: str
) -> None:
    axes = figure.subplots()
    style_axes(axes)
    axes.grid(False, axis="x")
    bottoms = np.cumsum(counts, axis=1) - counts
    for label, color in enumerate(_CLASSES[: counts.shape[1]]):
        name = shortened(classes[label]) if classes else str(label)
        style: dict[str, Any] = {"color": color, "label": name, "ec": "white", "lw": 0.4}
        axes.bar(range(len(counts)), counts[:, label], 0.8, bottoms[:, label], **style)
    axes.set(xlabel="client", ylabel="samples", xlim=(-0.7, len(counts) - 0.3))
    axes.xaxis.set_major_locator(MaxNLocator(25, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, steps=STEPS))
    name_ticks(axes.xaxis, clients)
    axes.legend(
        title=_STRATA[strata].replace(" of ", " of\n").replace(", ", ",\n"),
        reverse=True,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
    )


def _heat_map(
    figure: Figure, counts: Array, clients: Sequence[str] = (), classes: Sequence[str] = (), *, strata: str
) -> None:
    top, heat = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    # Every k-th client rather than a mean over k, which would make skewed clients look alike.
    every = -(-len(counts) // _HEAT_CLIENTS)
    shown = counts[::every]
    edges = np.arange(len(shown) + 1) * every - 0.5
    _binned_sizes(top, counts.sum(axis=1), every, edges)
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, shown.max()))
    image = heat.pcolormesh(edges, np.arange(counts.shape[1] + 1) - 0.5, shown.T, cmap="Blues", norm=norm)
    style_axes(top)
    style_axes(heat)
    top.set(ylabel="samples", ylim=(0, None))
    heat.set(xlabel="client" + f" (rows of one in {every} shown)" * (every > 1))
    heat.set(ylabel=_STRATA[strata])
    heat.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=STEPS))
    heat.yaxis.set_major_locator(MaxNLocator(10, integer=True, steps=STEPS))
    name_ticks(heat.xaxis, clients)
    if len(classes) <= _NAMED_CLASSES:
        name_ticks(heat.yaxis, classes, upright=True)
    bar = figure.colorbar(image, ax=heat, pad=0.02, ticks=MaxNLocator(5, integer=True), label="samples")
    bar.ax.tick_params(labelsize=9, colors=INK)
    bar.outline.set_visible(False)


def _binned_sizes(axes: Axes, sizes: Array, every: int, edges: Array) -> None:
    """Draw client sizes, ``every`` clients as one bar: their mean, and the largest of them."""
    starts = np.arange(0, len(sizes), every)
    means = np.add.reduceat(sizes, starts) / np.diff([*starts, len(sizes)])
    axes.stairs(means, edges, fill=True, color=TEST, label=f"mean of {every} clients" if every > 1 else None)
    if every > 1:
        largest = np.maximum.reduceat(sizes, starts)
        axes.stairs(largest, edges, color=TRAIN, lw=0.8, label="the largest of them")
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")


def class_counts(indices: Array, offsets: Array, labels: Array, num_classes: int) -> Array:
    """Samples of each class on each client, shape (clients, classes)."""
    own = np.asarray(labels)[indices].astype(np.int64)
    if own.ndim != 1 or np.any((own < 0) | (own >= num_classes)):
        raise ValueError(f"labels: expected one class in 0..{num_classes - 1} per row")
    counts = np.zeros((len(offsets) - 1, num_classes), dtype=np.int64)
    np.add.at(counts, (np.repeat(np.arange(len(counts)), np.diff(offsets)), own), 1)
    return counts


def _font() -> FT2Font:
    return get_font(findfont(FontProperties()))


def _without_glyph(signs: Iterable[str]) -> str:
    return "".join(
        sorted(sign for sign in signs if sign.isprintable() and not _font().get_char_index(ord(sign)))
    )


@cache
def _say_boxes(signs: str, font: str) -> None:
    log.warning("figures have boxes for %s, which their font, %s, hasn't", signs, font)


def _from_config(run_dir: Path, *keys: str) -> str:
    config = read_config(run_dir)
    told = {key: without_digest(str(config[key])) for key in keys if key in config}
    if "dataset" in told:
        told["dataset"] = data_of(config)
    return ", ".join(text + " clients" * (key == "num-clients") for key, text in told.items())


# Keys that name a run in a title.
_NAMED = ("strategy", "dataset", "model", "num-clients")


def new_figure(height: float, title: str) -> Figure:
    """Return a figure of a height in inches, of the current style's width; sizes of texts are those of a screen."""
    style = current_style()
    figure = Figure(figsize=(style.inches, height), dpi=style.dpi, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    size = 9 if style.width else 11  # in a paper a caption says the most
    figure.suptitle(style.wrapped(title, size), fontsize=size, color=INK)
    return figure


def style_axes(axes: Axes) -> None:
    axes.grid(True, color=_GRID, lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(labelsize=9, colors=INK, length=3)


def add_legend_below(figure: Figure, handles: Sequence[Artist], title: str = "") -> None:
    """Add a legend below a figure's axes, in as many columns as fit."""
    style = current_style()
    lengths = [len(str(handle.get_label())) + _BEFORE_LABEL for handle in handles]
    room = style.characters(8)
    columns = next(
        (
            number
            for number in range(min(_MOST_COLUMNS, len(lengths)), 1, -1)
            if sum(max(column) for column in np.array_split(lengths, number)) <= room
        ),
        1,
    )
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
        title=style.wrapped(title, 8),
        title_fontsize=8,
    )


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG and in the formats and font of the current style; return the path of the PNG."""
    style = current_style()
    if style == SCREEN:
        _save_png(figure, path)
        return path
    _scale_texts(figure, style.scale)
    with style.fonts():
        _save_png(figure, path)
        for each in style.paths(path)[1:]:
            figure.savefig(each)
    return path


def _scale_texts(figure: Figure, scale: float) -> None:
    axes = [axis for each in figure.axes for axis in (each.xaxis, each.yaxis)]
    ticks = [axis.get_tick_params().get("labelsize", _USUAL_SIZE) for axis in axes]
    for text in {each for each in figure.findobj(Text) if isinstance(each, Text)}:
        text.set_fontsize(scale * float(text.get_fontsize()))
    for axis, size in zip(axes, ticks, strict=True):  # further ticks are made when the figure is drawn
        axis.set_tick_params(labelsize=scale * size)


def _save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG; a line in the log names signs that the font hasn't, which are boxes in the figure."""
    texts = {text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)}
    if lacking := _without_glyph(frozenset(chain(*texts))):
        _say_boxes(lacking, _font().family_name)
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        canvas.draw()
    # 256 colours are enough for these figures and make the file a third as large.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(256)
    # Not tempfile: only the owner could read its files.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        image.save(temporary, format="PNG", optimize=True, dpi=(figure.dpi, figure.dpi))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
