"""Formats, width and font of figures: as on a screen, or as in a paper's columns.

Figures are drawn deep inside reports of many kinds, so the style isn't handed down: a command with `figure_options`
sets it for what the command calls, and `fedapp.report.figures` reads it where a figure begins and is saved.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer

from fedapp.config import ConfigError

FORMATS = ("pdf", "svg", "png")
ONE_COLUMN = "one-column"
WIDTHS = {ONE_COLUMN: 3.5, "two-columns": 7.16}  # inches, the columns of IEEE's journals
GENERIC = ("sans-serif", "serif", "monospace")
_SIZE, _SMALLEST, _LARGEST = 8.0, 4.0, 24.0  # points
_SCREEN_WIDTH, _SCREEN_SIZE = 8.0, 9.0  # inches; points of labels, to which sizes of other texts are relative
_DPI = 300  # of a PNG in a paper
_CHARACTERS = 124.0  # of one point that have room on an inch

OPTIONS = {
    "formats": Annotated[
        str,
        typer.Option(
            "--format", help="formats of figures beside PNG, with commas: pdf, svg; text stays text"
        ),
    ],
    "width": Annotated[str, typer.Option(help=f"figures for a paper: {' or '.join(WIDTHS)}")],
    "font": Annotated[
        str, typer.Option(help=f"font of figures: {', '.join(GENERIC)}, or one that is installed")
    ],
    "font_size": Annotated[float, typer.Option(help="size of the figures' labels, points")],
}


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

    @property
    def scale(self) -> float:
        """Size of texts, as a multiple of that on a screen."""
        return (self.font_size or (_SIZE if self.width else _SCREEN_SIZE)) / _SCREEN_SIZE

    def characters(self, size: float) -> float:
        """Return how many characters of ``size`` points on a screen have room beside each other."""
        return _CHARACTERS * self.inches / (self.scale * size)

    def wrapped(self, title: str, size: float) -> str:
        """Return a title in lines that fit the figure."""
        most = int(self.characters(size))
        lines = [wrap(line, most, break_on_hyphens=False) for line in title.splitlines()]
        return "\n".join(chain(*lines))

    def paths(self, path: Path) -> list[Path]:
        """Return the files of a figure that is saved as a PNG of some path: this one first, then other formats."""
        return [path, *(path.with_suffix(f".{form}") for form in self.formats if form != "png")]

    @property
    def given(self) -> str:
        """An option that gives this style, with its value; empty for that of a screen."""
        size = f"{self.font_size:g}" if self.font_size else ""
        values = (",".join(self.formats), self.width, self.font, size)
        flags = ("--format", "--width", "--font", "--font-size")
        return next((f"{flag} {value}" for flag, value in zip(flags, values, strict=True) if value), "")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give figures this style, as long as the context lasts."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def fonts(self) -> Iterator[None]:
        """Let matplotlib use the font and write texts as texts; its settings are global, so not from a thread."""
        from matplotlib import rc_context, rcParams

        names = rcParams[f"font.{self.font}"] if self.font in GENERIC else [self.font]
        fallback = [*names, *rcParams["font.sans-serif"]] if self.font else rcParams["font.sans-serif"]
        with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "font.sans-serif": fallback}):
            yield


SCREEN = FigureStyle()
_current = ContextVar("style of figures", default=SCREEN)  # a thread begins with the default


def current_style() -> FigureStyle:
    """Return the style of figures here."""
    return _current.get()


def figure_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of figures; whatever the command draws has their style."""
    own = signature(command)

    @wraps(command)
    def styled(*arguments: Any, **given: Any) -> None:
        try:
            style = FigureStyle.read(**{name: given.pop(name) for name in OPTIONS if name in given})
        except ConfigError as error:
            raise SystemExit(f"error: {error}") from None
        with style.applied():
            command(*arguments, **given)

    usual = {each.name: each.default for each in fields(FigureStyle)} | {"formats": ""}
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=usual[name], annotation=annotation)
        for name, annotation in OPTIONS.items()
    ]
    styled.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])  # type: ignore[attr-defined]
    styled.__annotations__ = {**command.__annotations__, **OPTIONS}
    return styled


def _check_installed(font: str) -> None:
    from matplotlib.font_manager import FontProperties, findfont, get_font_names

    try:
        findfont(FontProperties(family=font), fallback_to_default=False)
    except ValueError:
        there = ", ".join(sorted(name for name in get_font_names() if not name.startswith(("cm", "STIX"))))
        raise ConfigError(
            f"--font {font}: isn't installed; allowed are {', '.join(GENERIC)}, and of the installed ones {there}"
        ) from None
