"""``fedapp list``, ``compare``, ``report`` and ``timeline``: looking at runs that are there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapp.config import ConfigError
from fedapp.report.comparison import Comparison
from fedapp.report.exports import csv_of, json_of
from fedapp.report.paper import ORDERS, RESULT, latex_of, markdown_of, write_paper
from fedapp.report.recorded import RecordedRun
from fedapp.report.runs import client_tables_of, differences_table, reasons, runs_in, runs_table, sweeps_in
from fedapp.report.style import current_style, figure_options
from fedapp.sweeps.sweep import tuning_of

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


@figure_options
def compare_command(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN… | GLOB", help="folders of runs, or of a sweep; quoted patterns"),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="folder for a figure and the table; default: only printed"),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="print the table as CSV")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
    latex: Annotated[
        bool,
        typer.Option(
            "--latex",
            help="print a table of LaTeX for each metric; with --out into files, with the references",
        ),
    ] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="print a Markdown table for each metric; with --out into a file"),
    ] = False,
    order: Annotated[
        str, typer.Option(help=f"order of the settings in tables for a paper: {' or '.join(ORDERS)}")
    ] = RESULT,
) -> None:
    """Runs beside each other: at their end, at equal time, equal rounds and equal bytes, and a verdict.

    Runs that differ in their seed alone are one line, mean ± standard deviation. Names say what tells them apart.
    With --csv, --json, --latex or --markdown nothing else is on the standard output.
    """
    papers = [form for form, wanted in (("latex", latex), ("markdown", markdown)) if wanted]
    forms = ["csv"] * csv + ["json"] * json + papers
    try:
        _check_options(forms, papers, order, out)
        found = recorded(runs)
        comparison = Comparison(found, tuning_of(run.path for run in found))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    is_printed = bool(forms) and not out
    console = Console(stderr=is_printed)
    if is_printed:
        print(_printed(comparison, forms[0], order), end="")
    else:
        for table in comparison.tables():
            console.print(table)
    for note in comparison.remarks:
        console.print(note, style="yellow", markup=False, highlight=False)
    for line in comparison.verdict_lines:
        console.print(line, markup=False, highlight=False)
    if out:
        folder = out.expanduser()
        for path in (*comparison.write(folder), *write_paper(comparison, folder, papers, order)):
            print(path.absolute())


@figure_options
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs, or of one run each")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the page's file; report.html by default")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="serve the page here, and follow the runs")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="with --live; 0: any that is free")] = 0,
) -> None:
    """Runs as one page that opens without a network: curves, clients, data, graph, configs (docs/report.md).

    With --format, --width or --font the curves are also figures beside the page.
    """
    from fedapp.report.page.command import report  # pyarrow and Plotly are slow to import

    report(runs, out, live=live, port=port, tuning_of=tuning_of)


@figure_options
def timeline_command(
    run: Annotated[Path, typer.Argument(help="folder of a run")],
    since: Annotated[
        float | None, typer.Option(help="seconds of the run's clock from which clients are drawn")
    ] = None,
    until: Annotated[float | None, typer.Option(help="… and up to which")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="the figure's file; timeline.png of the run by default")
    ] = None,
) -> None:
    """What each client of a run did when, and how its tasks ended, as timeline.png (docs/report.md)."""
    from fedapp.report.gantt import draw_timeline  # matplotlib is slow to import

    if not (run / "config.toml").is_file():
        raise SystemExit(f"error: {run}: holds no run, a folder with a config.toml")
    try:
        path = draw_timeline(run, since, until, out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    if path is None:
        raise SystemExit(f"error: {run}: has no task on record (tasks.parquet)")
    for each in current_style().paths(path):
        print(each.absolute())


def _check_options(forms: list[str], papers: list[str], order: str, out: Path | None) -> None:
    """Refuse options of a comparison that exclude each other, or that nothing would read."""
    if (len(forms) > 1 and (not out or forms != papers)) or (forms != papers and out):
        raise ConfigError(
            "--csv, --json, --latex, --markdown: one at a time, and --csv and --json without --out"
        )
    if order not in ORDERS:
        raise ConfigError(f"--order {order}: is no order of settings; allowed are {', '.join(ORDERS)}")
    if order != RESULT and not papers:
        raise ConfigError(f"--order {order}: goes with --latex or --markdown")
    if (given := current_style().given) and not out:
        raise ConfigError(f"{given}: goes with --out, which has the figure")


def _printed(comparison: Comparison, form: str, order: str) -> str:
    """Return a comparison in one of the forms that are printed."""
    if form in ("latex", "markdown"):
        return latex_of(comparison, order) if form == "latex" else markdown_of(comparison, order)
    return csv_of(comparison) if form == "csv" else json_of(comparison)


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
