"""The figure of a run and its bounds. Import it late: it loads matplotlib, which is slow."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedapp.report.figures import INK, STEPS, TEST, TRAIN, new_figure, save, style_axes
from studies.theory.constants import Array
from studies.theory.run_bounds import RunBounds

# Colours other than the measured curves' blue and vermilion, each with its own dashes.
_BOUNDS = [("#CC6677", "--"), ("#117733", "-."), ("#882255", ":")]


def draw_bounds(run_dir: Path, found: RunBounds) -> Path:
    """Draw f(w̄_t) − f* and its bounds against rounds into ``bounds.png``, on a log axis, 1200 x 780 pixels.

    Parameters
    ----------
    run_dir : Path
        The folder of ``bounds.png``.
    found : RunBounds
        With at least one bound.
    """
    figure = new_figure(5.2, f"{run_dir.name}: optimality gap and its upper bounds")
    axes = figure.subplots()
    style_axes(axes)
    rounds = np.arange(len(found.gaps), dtype=np.float64)
    _line(axes, rounds, found.gaps, TEST, "-", "measured, f(w̄_t) − f*", 1.8)
    if any(bound.of_mean for bound in found.bounds):
        _line(axes, rounds[1:], found.means, TRAIN, "-", "measured, mean of rounds 1 to t", 1.2)
    for bound, (color, dashes) in zip(found.bounds, _BOUNDS, strict=False):
        _line(axes, bound.rounds, bound.values, color, dashes, f"{bound.source}: {bound.name}", 1.6)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")  # not mathtext: its parser has global state
    axes.set(xlabel="server round", ylabel="f − f*, log scale", xlim=(0, rounds[-1] or 1))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=STEPS))
    axes.legend(
        frameon=False, fontsize=9, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2
    )
    return save(figure, run_dir / "bounds.png")


def _line(axes: Axes, x: Array, y: Array, color: str, dashes: str, label: str, width: float) -> None:
    # A log axis can't show values that are 0 or less by rounding.
    axes.plot(x, np.where(y > 0, y, np.nan), color=color, ls=dashes, lw=width, label=label)
