"""How methods look on figures and on the page: each has a colour and a mark of its own, the same everywhere.

Settings of one method that differ share its mark, and differ in dashes and in the shade of its colour.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

BLUE, VERMILION, GREEN, WINE = "#0072B2", "#D55E00", "#009E73", "#882255"
ORANGE, SKY, PINK, GREY = "#E69F00", "#56B4E9", "#CC79A7", "#7A7A7A"

# The colours of Okabe and Ito without black and yellow, and wine of Paul Tol's: told apart under the common forms of
# colour blindness. For lines that aren't methods.
COLORS = [BLUE, VERMILION, GREEN, ORANGE, WINE, SKY, PINK, GREY]

# Colour and mark, as matplotlib calls it, of each strategy; those that are most often compared differ in colour.
_METHODS = {
    "fedavg": (BLUE, "o"),
    "feddyn": (VERMILION, "o"),
    "fedbuff": (GREEN, "o"),
    "scaffold": (ORANGE, "o"),
    "fedfix": (WINE, "o"),
    "fedprox": (SKY, "o"),
    "fednova": (PINK, "o"),
    "async-fedavg": (ORANGE, "s"),
    "spectral": (VERMILION, "s"),
    "async-spectral": (GREEN, "s"),
    "fedasync": (BLUE, "s"),
    "delay-adaptive": (WINE, "s"),
    "mifa": (SKY, "s"),
    "fedcompass": (PINK, "s"),
    "ditto": (BLUE, "^"),
    "fedamp": (VERMILION, "^"),
    "ca2fl": (GREEN, "^"),
    "fedstale": (ORANGE, "^"),
    "fedau": (WINE, "^"),
    "area": (SKY, "^"),
    "ace": (PINK, "^"),
    "ringmaster": (BLUE, "D"),
    "ringleader": (VERMILION, "D"),
    "rennala": (GREEN, "D"),
    "malenia": (WINE, "D"),
    "fedawe": (SKY, "D"),
    "fadas": (ORANGE, "D"),
    "aced": (PINK, "D"),
}
_OWN_MARKS = (
    "v",
    "P",
    "X",
    "<",
    ">",
    "p",
    "h",
    "*",
)  # of strategies that aren't in the table, all of them grey

_SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "X": "x",
    "<": "triangle-left",
    ">": "triangle-right",
    "p": "pentagon",
    "h": "hexagon",
    "*": "star",
}
_DASHES: dict[str, Any] = {
    "solid": "solid",
    "dash": (0, (5, 2)),
    "dot": (0, (1, 1.3)),
    "dashdot": (0, (5, 2, 1, 2)),
    "longdash": (0, (9, 2)),
}
_SHADES = (0.0, -0.45, 0.45)  # part of black, if below 0, or of white in the colour

MARKS_ON_LINE = 8  # about as many marks are on a line as there is room for


@dataclass(frozen=True)
class MethodStyle:
    """The look of a setting.

    Attributes
    ----------
    color : str
        Hexadecimal.
    mark : str
        The mark's name in matplotlib.
    dash : str
        The dashes' name in Plotly.
    """

    color: str
    mark: str
    dash: str = "solid"

    @property
    def symbol(self) -> str:
        """The mark's name in Plotly."""
        return _SYMBOLS[self.mark]

    def line(self, values: ArrayLike = ()) -> dict[str, Any]:
        """Return the keywords of a line of some values in matplotlib, with few marks.

        Without a finite value there is no mark: matplotlib fails to place any on such a line.
        """
        return {
            "color": self.color,
            "ls": _DASHES[self.dash],
            "marker": self.mark,
            "ms": 4,
            "mew": 0,
            "markevery": 1 / MARKS_ON_LINE if np.isfinite(values).any() else None,
        }


def styles_of(strategies: Iterable[str]) -> list[MethodStyle]:
    """Return the look of each setting from its strategy; the first setting of a strategy has the strategy's own look.

    A strategy that isn't the library's is grey, and has a mark by its place among others of these.
    """
    seen: Counter[str] = Counter()
    own: dict[str, str] = {}
    found = []
    for strategy in strategies:
        if strategy not in _METHODS:
            own.setdefault(strategy, _OWN_MARKS[len(own) % len(_OWN_MARKS)])
        color, mark = _METHODS.get(strategy) or (GREY, own[strategy])
        number = seen[strategy]
        seen[strategy] += 1
        dash = list(_DASHES)[number % len(_DASHES)]
        found.append(MethodStyle(_shaded(color, _SHADES[number % len(_SHADES)]), mark, dash))
    return found


def _shaded(color: str, part: float) -> str:
    """Return a colour mixed with black, if the part is below 0, or with white."""
    ground = 255 if part > 0 else 0
    values = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(abs(part) * ground + (1 - abs(part)) * value):02X}" for value in values)
