"""``fedapp list`` and ``fedapp compare``: looking at runs that are there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapp.config import ConfigError
from fedapp.report.comparison import Comparison
from fedapp.report.exports import csv_of, json_of, latex_of, markdown_of
from fedapp.report.recorded import RecordedRun
from fedapp.report.runs import client_tables_of, differences_table, reasons, runs_in, runs_table, sweeps_in
from fedapp.sweeps.formats import read_formats

# Columns of a terminal in which a run and what tells it from others have room beside each other.
WIDE = 120


def list_command(
    folder: Annotated[
        Path, typer.Argument(help="folder of runs, or of one run: then its devices, too")
    ] = Path("results"),
) -> None:
    """How runs stand, what tells them from each other, and what came of them.

    A run whose process is gone is put down as failed.
    """
    runs, sweeps = runs_in(folder), sweeps_in(folder)
    if not runs and not sweeps:
        raise SystemExit(f"error: {folder}: holds no run, a folder with a config.toml")
    console = Console()
    if runs:
        wide = console.width >= WIDE
        console.print(runs_table(runs, differences=wide))
        if not wide and (table := differences_table(runs)) is not None:
            console.print(table)
    for reason in reasons(runs):
        console.print(reason, style="yellow", markup=False, highlight=False)
    for sweep in sweeps:
        print(f"{len(runs_in(sweep))} runs of a sweep: fedapp list {sweep}")
    try:
        for table in client_tables_of(folder) if runs == [folder] else ():
            console.print(table)
    except ValueError as error:  # its table of clients is damaged
        console.print(str(error), style="yellow", markup=False, highlight=False)


def compare_command(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN… | GLOB", help="folders of runs, or of a sweep; quoted patterns"),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="folder for a figure and the table; default: only printed"),
    ] = None,
    formats: Annotated[
        str, typer.Option("--format", help="formats of the figure beside PNG, with commas: pdf, svg")
    ] = "",
    csv: Annotated[bool, typer.Option("--csv", help="print the table as CSV")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="print a table of LaTeX for each metric")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print a Markdown table for each metric")
    ] = False,
) -> None:
    """Runs beside each other: at their end, at equal time, equal rounds and equal bytes, and a verdict.

    Runs that differ in their seed alone are one line, mean ± standard deviation. Names say what tells them apart.
    With --csv, --json, --latex or --markdown nothing else is on the standard output.
    """
    by_option = ((csv_of, csv), (json_of, json), (latex_of, latex), (markdown_of, markdown))
    forms = [form for form, wanted in by_option if wanted]
    try:
        if len(forms) > 1 or (forms and out):
            raise ConfigError("--csv, --json, --latex, --markdown and --out: one at a time")
        if formats and not out:
            raise ConfigError(f"--format {formats}: goes with --out, which has the figure")
        forms_of_figures = read_formats(formats)
        comparison = Comparison(recorded(runs))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    console = Console(stderr=bool(forms))
    for form in forms:
        print(form(comparison), end="")
    for table in () if forms else comparison.tables():
        console.print(table)
    for note in comparison.remarks:
        console.print(note, style="yellow", markup=False, highlight=False)
    for line in comparison.verdict_lines:
        console.print(line, markup=False, highlight=False)
    for path in comparison.write(out.expanduser(), forms_of_figures) if out else ():
        print(path.absolute())


def _folders(path: Path) -> list[Path]:
    """Return the folders that a path or pattern names; what is there is meant as it stands, with brackets, too."""
    if path.exists():
        return [path]
    there = next((parent for parent in path.parents if parent.exists()), Path())
    return sorted(there.glob(str(path.relative_to(there))))


def recorded(texts: Sequence[str]) -> list[RecordedRun]:
    """Return the runs that folders, sweeps and patterns name, each once.

    Raises
    ------
    ConfigError
        If one names no run, or all together name fewer than two that have an evaluation.
    """
    found: dict[Path, RecordedRun] = {}
    for text in texts:
        path = Path(text).expanduser()
        own = [run for folder in _folders(path) for run in runs_in(folder)]
        if not own:
            raise ConfigError(f"{text}: no run is there, a folder with a config.toml")
        found |= {path.resolve(): RecordedRun(path) for path in own}
    if sum(run.evaluations > 0 for run in found.values()) < 2:
        raise ConfigError(f"{' '.join(texts)}: there must be two runs with an evaluation to compare")
    return list(found.values())
