"""``fedapp bounds``: a finished run's curve with the bounds that apply to it, and the constants they were made of."""

import logging
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fedapp.config import in_keys
from fedapp.logs import shown_from
from fedapp.report.style import current_style, figure_options
from fedapp.server import USER_ERRORS
from studies.theory.run_bounds import RunBounds, bounds_of_run


@figure_options
def bounds(
    run_dir: Annotated[Path, typer.Argument(help="folder of a finished run")],
) -> None:
    """Draw a run's f(w̄_t) − f* with the convergence bounds that apply, into RUN_DIR/bounds.png.

    The run is repeated in this process to see every model, so this takes as long as the run did. Prints the constants
    and each bound's last value; for every theorem that doesn't apply it says why.
    """
    from studies.theory.figure import draw_bounds  # matplotlib is slow to import

    console = Console()
    try:
        # The repeated run's own progress is shown here.
        with shown_from(logging.WARNING), Progress(console=console, transient=True) as progress:
            task = progress.add_task("repeating the run", total=None)
            found = bounds_of_run(
                run_dir, lambda done, total: progress.update(task, completed=done, total=total)
            )
    except USER_ERRORS as error:
        raise SystemExit(f"error: {in_keys(error)}") from None
    if found.rows:
        console.print(_constants_table(found))
    if found.bounds:
        console.print(_bounds_table(found))
    if found.terms:
        console.print(_terms_table(found))
    for reason in found.refusals:
        print(f"doesn't apply: {reason}")
    if found.bounds:
        for path in current_style().paths(draw_bounds(run_dir, found)):
            print(path.absolute())


def _constants_table(found: RunBounds) -> Table:
    table = Table(title="constants")
    for name, side in (("", "left"), ("value", "right"), ("found", "left")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for row in found.rows:
        table.add_row(row.symbol, f"{row.value:.5g}", row.origin)
    return table


def _bounds_table(found: RunBounds) -> Table:
    table = Table(title=f"after {len(found.gaps) - 1} rounds")
    for name, side in (
        ("bound", "left"),
        ("source", "left"),
        ("bound", "right"),
        ("measured", "right"),
        ("ratio", "right"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for bound in found.bounds:
        measured, value = (found.means if bound.of_mean else found.gaps)[-1], bound.values[-1]
        ratio = f"{value / measured:.3g}" if measured > 0 and np.isfinite(value) else "-"
        table.add_row(bound.name, bound.source, f"{value:.5g}", f"{measured:.5g}", ratio)
    return table


def _terms_table(found: RunBounds) -> Table:
    table = Table(title=f"terms after {len(found.gaps) - 1} aggregations; f(w) − f* is {found.gaps[-1]:.5g}")
    table.add_column("term")
    table.add_column("value", justify="right")
    for name, value in found.terms.items():
        table.add_row(name, f"{value:.5g}")
    return table
