"""The table as a picture: the points of accuracy that each attack costs each method."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from fedapp.report.figures import INK, new_figure, save
from fedapp.report.style import current_style
from studies.attacks.cell import METHODS, OFF, ON, RULE
from studies.attacks.hostile import ATTACKS, HONEST
from studies.attacks.plan import MOST_BY_ATTACK
from studies.attacks.problem import WORDS
from studies.attacks.table import Row

_TITLES = {OFF: "without safeguards", ON: "with safeguards"}
_COLUMNS = (HONEST, *ATTACKS)
_NOT_RUN = "#DDDDDD"


def draw(path: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw points lost against honest clients without safeguards, a panel for each federation under attack.

    Nothing is drawn without an attack.
    """
    federations = list(dict.fromkeys((r.division, r.clients, r.hostile) for r in rows if r.attack != HONEST))
    if not federations:
        return []
    lines = [(name, mode) for name in METHODS for mode in (ON, RULE)]
    lines = [each for each in lines if any(r.method == each[0] and each[1] in r.attacked for r in rows)]
    figure = new_figure(
        0.9 + (0.7 + 0.19 * len(lines)) * len(federations),
        "points of accuracy lost against honest clients without safeguards, mean over the seeds\n"
        f"white: {MOST_BY_ATTACK:g} points; blue: less; red: more; grey: not run",
    )
    panels = figure.subplots(len(federations), len(_TITLES), squeeze=False, sharex=True, sharey=True)
    for federation, line in zip(federations, panels, strict=True):
        division, clients, hostile = federation
        own = [row for row in rows if (row.division, row.clients, row.hostile) == federation]
        for (mode, title), axes in zip(_TITLES.items(), line, strict=True):
            _panel(axes, own, lines, mode)
            axes.set_title(f"{WORDS[division]}, {hostile} of {clients}: {title}", fontsize=8)
    return current_style().paths(save(figure, path))


def _panel(axes: Axes, rows: Sequence[Row], lines: Sequence[tuple[str, str]], mode: str) -> None:
    """Draw a panel; the lines of a robust rule are under safeguards, and empty without."""
    lost = np.full((len(lines), len(_COLUMNS)), np.nan)
    for row in rows:
        if row.attack == HONEST and row.statistics:
            continue
        for place, (method, protection) in enumerate(lines):
            shown = protection if mode == ON else mode
            if row.method == method and shown in row.attacked and (mode == ON or protection == ON):
                lost[place, _COLUMNS.index(row.attack)] = row.lost(shown)
    axes.set_facecolor(_NOT_RUN)
    axes.imshow(lost, cmap="RdBu_r", vmin=-40, vmax=40 + 2 * MOST_BY_ATTACK, aspect="auto")
    for (y, x), value in np.ndenumerate(lost):
        if np.isfinite(value):
            dark = not -20 < value < 50
            axes.text(
                x, y, f"{round(value)}", ha="center", va="center", fontsize=6, color="white" if dark else INK
            )
    names = [method if protection == ON else f"{method}, {protection}" for method, protection in lines]
    axes.set_xticks(range(len(_COLUMNS)), _COLUMNS, rotation=60, ha="right", fontsize=6)
    axes.set_yticks(range(len(lines)), names, fontsize=6)
