"""Tables of the runs in a folder, and of one run's devices, for the terminal."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from fedapp.report.client_tables import last_clients
from fedapp.report.differences import descriptions, differing
from fedapp.report.files import (
    AUTO,
    LOSS,
    data_of,
    metrics_among,
    read_config,
    rows_of,
    with_rows,
)
from fedapp.report.recorded import RecordedRun, metrics_of, names_of
from fedapp.report.table import clients_table, devices_table
from fedapp.sorting import natural_key

_OWN_COLUMN = ("strategy", "dataset")


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, by name, those of a sweep in its ``runs``; or itself if it is a run's."""
    if (folder / "config.toml").is_file():
        return [folder]
    found = [
        path.parent for pattern in ("*/config.toml", "runs/*/config.toml") for path in folder.glob(pattern)
    ]
    return sorted(found, key=lambda path: natural_key(path.as_posix()))


def sweeps_in(folder: Path) -> list[Path]:
    """Return the folders in a folder that hold runs of their own."""
    return sorted({path.parents[2] for path in folder.glob("*/runs/*/config.toml")})


def runs_table(runs: Iterable[Path], *, differences: bool) -> Table:
    """Return a row for each run: status, with ``differences`` the values in which runs differ, and final metrics.

    Metrics are those of the model that a run leaves. Where a run has ``keep = "best"``, a column names the round of
    that model.

    Runs of a sweep are named by the values in which they differ, without the hash at the end of their folders' names.
    """
    every = [RecordedRun(path) for path in runs]
    in_sweep = _are_of_sweeps(every)
    keys = _differing(every) if differences and not in_sweep else []
    metrics = metrics_of(every) or ["accuracy", LOSS]
    if all(run.config.get("metrics", AUTO) == AUTO for run in every):  # no run names metrics of its own
        metrics = list(dict.fromkeys((metrics[0], metrics[-1])))
    kept = any(run.keeps_best for run in every)
    headers = ["run", "status", "strategy", "data", "differs in", "rounds", "kept", *metrics]
    told = descriptions([run.config for run in every], keys)
    names = names_of(every) if in_sweep else [run.path.name for run in every]
    rows = [_row(run, name, what, metrics) for run, name, what in zip(every, names, told, strict=True)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    lacking = {"differs in": not keys, "kept": not kept}
    shown = [at for at, name in enumerate(headers) if not lacking.get(name)]
    for at in shown:
        name = with_rows(headers[at], (run.rows for run in every))
        least = {"run": 14, "differs in": 20, "data": 8}.get(headers[at])  # columns that may be folded
        table.add_column(name, overflow="fold", no_wrap=least is None, min_width=least)
    for row in rows:
        table.add_row(*(Text(row[at]) for at in shown))  # a str's brackets would be markup
    return table


def _are_of_sweeps(runs: Sequence[RecordedRun]) -> bool:
    return all(run.path.resolve().parent.name == "runs" for run in runs) and len(runs) > 1


def _differing(runs: Sequence[RecordedRun]) -> list[str]:
    return [key for key in differing([run.config for run in runs]) if key not in _OWN_COLUMN]


def differences_table(runs: Iterable[Path]) -> Table | None:
    """Return a row for each run with the values in which runs differ, for a narrow terminal.

    None if runs don't differ, or if they are a sweep's, whose names have these values.
    """
    every = [RecordedRun(path) for path in runs]
    if _are_of_sweeps(every) or not (keys := _differing(every)):
        return None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("run", "differs in"):
        table.add_column(header, overflow="fold")
    for run, what in zip(every, descriptions([run.config for run in every], keys), strict=True):
        table.add_row(Text(run.path.name), Text(what))
    return table


def reasons(runs: Iterable[Path]) -> list[str]:
    """Return a line for each run that says why it failed, diverged or can't be read."""
    every = [RecordedRun(path) for path in runs]
    names = names_of(every) if _are_of_sweeps(every) else [run.path.name for run in every]
    return [f"{name}: {run.reason}" for name, run in zip(names, every, strict=True) if run.reason]


def _row(run: RecordedRun, name: str, differs_in: str, metrics: Sequence[str]) -> list[str]:
    summary = run.summary
    scores = [summary.get(key) for key in metrics]
    return [
        name,
        run.standing,
        str(summary.get("strategy", run.config.get("strategy", "?"))),
        data_of(run.config),
        differs_in,
        str(summary.get("aggregations", "?")),
        str(summary.get("best-aggregation", "-")) if run.keeps_best else "last",
        *(
            f"{score:.4f}" if isinstance(score, int | float) and math.isfinite(score) else "-"
            for score in scores
        ),
    ]


def client_tables_of(run: Path) -> list[Table]:
    """Return the tables of a run's clients that have names, and of its devices, if it has any."""
    clients, config = last_clients(run), read_config(run)
    scores = metrics_among(clients, config.get("metrics", AUTO))
    tables = clients_table(clients, scores, rows_of(config)), devices_table(clients)
    return [table for table in tables if table is not None]
