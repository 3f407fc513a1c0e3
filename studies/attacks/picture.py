"""The table as a picture: the points of accuracy that each attack costs each method."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from fedapp.report.figures import INK, new_figure, save
from studies.attacks.cell import METHODS, MODES, OFF, ON, RULE
from studies.attacks.hostile import ATTACKS, HONEST
from studies.attacks.plan import MOST_BY_ATTACK
from studies.attacks.problem import IID, NON_IID, WORDS
from studies.attacks.table import Row

_TITLES = {OFF: "without safeguards", ON: "with safeguards", RULE: "with safeguards, trimmed mean"}
_COLUMNS = (HONEST, *ATTACKS)


def draw(path: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw points lost against honest clients without safeguards, a panel for each federation and protection.

    Nothing is drawn without a row on IID or non-IID data.
    """
    federations = list(
        dict.fromkeys((r.division, r.clients, r.hostile) for r in rows if r.division in (IID, NON_IID))
    )
    if not federations:
        return []
    figure = new_figure(
        0.9 + 2.3 * len(federations),
        "points of accuracy lost against honest clients without safeguards, mean over the seeds\n"
        f"white: {MOST_BY_ATTACK:g} points; blue: less; red: more",
    )
    methods = [name for name in METHODS if any(row.method == name for row in rows)]
    panels = figure.subplots(len(federations), len(MODES), squeeze=False, sharex=True, sharey=True)
    for federation, line in zip(federations, panels, strict=True):
        division, clients, hostile = federation
        own = [row for row in rows if (row.division, row.clients, row.hostile) == federation]
        for mode, axes in zip(MODES, line, strict=True):
            _panel(axes, own, methods, mode)
            axes.set_title(f"{WORDS[division]}, {hostile} of {clients}: {_TITLES[mode]}", fontsize=7)
    return [save(figure, path)]


def _panel(axes: Axes, rows: Sequence[Row], methods: Sequence[str], mode: str) -> None:
    lost = np.full((len(methods), len(_COLUMNS)), np.nan)
    for row in rows:
        if mode in row.attacked and not (row.attack == HONEST and row.statistics):
            lost[methods.index(row.method), _COLUMNS.index(row.attack)] = row.lost(mode)
    axes.imshow(lost, cmap="RdBu_r", vmin=-40, vmax=40 + 2 * MOST_BY_ATTACK, aspect="auto")
    for (y, x), value in np.ndenumerate(lost):
        if np.isfinite(value):
            dark = not -20 < value < 50
            axes.text(
                x, y, f"{round(value)}", ha="center", va="center", fontsize=6, color="white" if dark else INK
            )
    axes.set_xticks(range(len(_COLUMNS)), _COLUMNS, rotation=60, ha="right", fontsize=6)
    axes.set_yticks(range(len(methods)), methods, fontsize=6)
