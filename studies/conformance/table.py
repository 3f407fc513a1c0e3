"""The table of implementations that pass: of the kit's own adapters, or of other modules."""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .problem import names
from .runner import Verdict, check

# The kit's own adapters: the module in ``adapters`` by the adapter's name.
KNOWN = {
    "fedapp": "fedapp_strategies",
    "flower": "flower",
    "appfl": "appfl",
    "flgo": "flgo",
}
NONE = "–"


@dataclass(frozen=True)
class Column:
    """The verdicts on one set of implementations.

    Attributes
    ----------
    title : str
        Name and version of the implementations.
    verdicts : dict of str to Verdict or str
        By the problem's name; the error's first line where the implementation raised one.
    missing : str
        Why there are no verdicts; "" if there are.
    tolerance : float, optional
        The adapter's tolerance, if it has one in place of the problems' own.
    """

    title: str
    verdicts: dict[str, Verdict | str]
    missing: str = ""
    tolerance: float | None = None

    @property
    def fails(self) -> bool:
        """Whether an implementation fails, or none was tried."""
        failed = [each for each in self.verdicts.values() if isinstance(each, str) or not each.passes]
        return bool(self.missing or failed or not self.verdicts)


def column(name: str, methods: Sequence[str]) -> Column:
    """Try the implementations of an adapter: one of the kit's, or any module that Python finds.

    A module has ``implementations()``, and may have the other names that ``conformance.adapters`` lists.

    Raises
    ------
    ValueError
        If there is no such module, a module that it imports isn't there, it has no ``implementations()``, or a key of
        these is no problem's name.
    """
    try:
        adapter: Any = (
            importlib.import_module(f".adapters.{KNOWN[name]}", __package__)
            if name in KNOWN
            else importlib.import_module(name)
        )
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"adapter {name!r} can't be imported: {error}") from None
        raise ValueError(f"no adapter {name!r} ({error}): known are {', '.join(KNOWN)}") from None
    title = getattr(adapter, "NAME", name)
    packages: tuple[str, ...] = getattr(adapter, "PACKAGES", ())
    tolerance = getattr(adapter, "TOLERANCE", None)
    for package in packages:
        try:
            found = version(package)
        except PackageNotFoundError:
            return Column(title, {}, f"{package} isn't installed")
        title = f"{title} {found}" if package == packages[0] else title
    if not hasattr(adapter, "implementations"):
        raise ValueError(f"adapter {name!r} has no function implementations()")
    there = adapter.implementations()
    if unknown := sorted(there.keys() - set(names())):
        wrong, allowed = ", ".join(map(repr, unknown)), ", ".join(names())
        raise ValueError(f"adapter {name!r}: no problem is called {wrong}: allowed are {allowed}")
    verdicts: dict[str, Verdict | str] = {}
    for method in methods:
        if method in there:
            try:
                with silent():
                    verdicts[method] = check(there[method], method, tolerance)
            except Exception as error:  # whatever an implementation raises
                verdicts[method] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Column(title, verdicts, tolerance=tolerance)


@contextmanager
def silent() -> Iterator[None]:
    """Let nothing be printed and nothing below an error be logged."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(before)


def cell(found: Verdict | str | None) -> str:
    """Return the text of a cell."""
    if found is None:
        return NONE
    if isinstance(found, str):
        return found
    return f"passes: {found.difference:.0e}" if found.passes else f"step {found.step}: {found.difference:.0e}"


def markdown(columns: Sequence[Column], methods: Sequence[str]) -> str:
    """Return the table: a row for each problem that has an implementation.

    A cell has the largest difference if the implementation passes, else the first step that differs, and by how much.
    """
    there = [each for each in columns if not each.missing]
    rows = [["problem", *(each.title for each in there)]]
    for method in methods:
        cells = [cell(each.verdicts.get(method)) for each in there]
        if set(cells) - {NONE}:
            rows.append([method, *cells])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = [f"{each.title}: {each.missing}." for each in columns if each.missing]
    notes += [f"{each.title}: the tolerance is {each.tolerance:g}." for each in there if each.tolerance]
    return "\n".join([*lines, "", *notes] if notes else lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if an adapter of ``--of`` has an implementation that fails, or none to try."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="fedapp-conformance",
        description="Compare implementations of federated methods with the models that the methods' formulas give.",
        epilog="The exit status is 1 if an adapter of --of has an implementation that fails, or none to try.",
    )
    parser.add_argument(
        "--of",
        nargs="+",
        metavar="ADAPTER",
        help=f"{', '.join(KNOWN)}, or a module of yours; by default {', '.join(KNOWN)}",
    )
    parser.add_argument("--methods", nargs="+", choices=names(), metavar="METHOD", help=", ".join(names()))
    given = parser.parse_args(arguments)
    methods = given.methods or names()
    sys.path.insert(0, os.getcwd())
    try:
        columns = [column(name, methods) for name in given.of or KNOWN]
    except ValueError as error:
        parser.error(str(error))
    finally:
        with suppress(ValueError):
            sys.path.remove(os.getcwd())
    print(markdown(columns, methods))
    return int(bool(given.of) and any(each.fails for each in columns))
