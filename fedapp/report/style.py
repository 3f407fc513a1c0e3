"""Formats, width and font of figures that compare settings: as on a screen, or as in a paper's columns."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from fedapp.config import ConfigError

FORMATS = ("pdf", "svg", "png")
WIDTHS = {"one-column": 3.5, "two-columns": 7.16}  # inches, the columns of IEEE's journals
GENERIC = ("sans-serif", "serif", "monospace")
_SIZE, _SMALLEST, _LARGEST = 8.0, 4.0, 24.0  # points
_SCREEN_WIDTH, _SCREEN_SIZE = (
    8.0,
    9.0,
)  # inches; points of the labels that sizes of other texts are relative to
_DPI = 300  # of a PNG in a paper

Formats = Annotated[
    str,
    typer.Option("--format", help="formats of figures beside PNG, with commas: pdf, svg; text stays text"),
]
Width = Annotated[str, typer.Option("--width", help=f"figures for a paper: {' or '.join(WIDTHS)}")]
Font = Annotated[
    str, typer.Option("--font", help=f"font of figures: {', '.join(GENERIC)}, or one that is installed")
]
FontSize = Annotated[float, typer.Option("--font-size", help="size of the figures' labels, points")]


@dataclass(frozen=True)
class FigureStyle:
    """The style of figures.

    Attributes
    ----------
    formats : tuple of str
        Formats beside PNG: those of ``FORMATS``.
    width : str
        A key of ``WIDTHS``; empty for a screen, 1200 pixels wide.
    font : str
        One of ``GENERIC``, or the name of an installed font; empty: matplotlib's own.
    font_size : float
        Size of labels, points; other texts are larger or smaller in proportion. 0: 8 in a paper, 9 on a screen.
    """

    formats: tuple[str, ...] = ()
    width: str = ""
    font: str = ""
    font_size: float = 0.0

    @classmethod
    def read(
        cls, formats: str = "", width: str = "", font: str = "", font_size: float = 0.0
    ) -> "FigureStyle":
        """Return the style that options give.

        Raises
        ------
        ConfigError
            If one of them has a value that isn't possible.
        """
        names = tuple(dict.fromkeys(name.strip() for name in formats.split(","))) if formats else ()
        if unknown := [name for name in names if name not in FORMATS]:
            raise ConfigError(
                f"--format {formats}: {unknown[0]!r} is no format of figures; allowed are {', '.join(FORMATS)}"
            )
        if width and width not in WIDTHS:
            raise ConfigError(f"--width {width}: is no width of figures; allowed are {', '.join(WIDTHS)}")
        if font_size and not _SMALLEST <= font_size <= _LARGEST:
            raise ConfigError(f"--font-size {font_size:g}: must be from {_SMALLEST:g} to {_LARGEST:g} points")
        if font and font not in GENERIC:
            _check_installed(font)
        return cls(names, width, font, font_size)

    @property
    def inches(self) -> float:
        """The width of a figure."""
        return WIDTHS.get(self.width, _SCREEN_WIDTH)

    @property
    def dpi(self) -> int:
        """Dots per inch of a PNG."""
        return _DPI if self.width else 150

    def points(self, size: float) -> float:
        """Return the size of a text that has ``size`` points on a screen."""
        return size * (self.font_size or (_SIZE if self.width else _SCREEN_SIZE)) / _SCREEN_SIZE

    @contextmanager
    def fonts(self) -> Iterator[None]:
        """Let matplotlib use the font and write texts as texts; its settings are global, so not from a thread."""
        from matplotlib import rc_context, rcParams

        names = rcParams[f"font.{self.font}"] if self.font in GENERIC else [self.font]
        fallback = [*names, *rcParams["font.sans-serif"]] if self.font else rcParams["font.sans-serif"]
        with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "font.sans-serif": fallback}):
            yield


SCREEN = FigureStyle()


def _check_installed(font: str) -> None:
    from matplotlib.font_manager import FontProperties, findfont, get_font_names

    try:
        findfont(FontProperties(family=font), fallback_to_default=False)
    except ValueError:
        there = ", ".join(sorted(name for name in get_font_names() if not name.startswith(("cm", "STIX"))))
        raise ConfigError(
            f"--font {font}: isn't installed; allowed are {', '.join(GENERIC)}, and of the installed ones {there}"
        ) from None
