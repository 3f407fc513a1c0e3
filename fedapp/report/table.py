"""The table that closes a run on the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fedapp.report import as_number
from fedapp.report.files import (
    LOSS,
    best_at,
    keeps_best,
    kept_at,
    metrics_among,
    rows_in_words,
    rows_of,
    stated_directions,
    step_of,
    with_rows,
)
from strategies.flower.higher_is_better import PERSONAL, higher_is_better, split_direction

Record = Mapping[str, object]
_SPACED_ROWS = 7  # besides the best evaluation
_HEADERS = {"aggregation": "aggre-\ngation"}  # as wide as a round
_SCORES = 2  # most metrics beside the loss that have room
_MOST_CLIENTS = 30  # most clients that the table of named clients lists
_WIDTH = 60  # title and caption wrap at the table's width, which would otherwise be that of its columns


def closing_table(summary: Record, metrics: Sequence[Record], config: Record | None = None) -> Table:
    """Return a table of at most eight evaluations of a run and its totals, 60 columns wide.

    With ``keep = "best"`` the evaluation of the kept model is marked; otherwise the best one by the first metric, or
    by the loss without metrics, if it is known which of its values are better.

    Parameters
    ----------
    summary
        Content of ``summary.json``: wall-seconds in seconds, bytes-up and -down in bytes; any may be missing.
    metrics
        The evaluations, from :func:`fedapp.report.read_metrics`.
    config
        The run config by key: ``metrics``, ``keep``, ``best-of`` and ``test-on`` are read.
    """
    config = config or {}
    named = str(config.get("metrics", "auto"))
    by, best = _best(summary, metrics, config, named)
    keys = _shown(metrics, by, named)
    caption = _caption(summary)
    if best is not None:
        caption += f"\n{_best_line(metrics, best, by, config, named)}"
    table = Table(
        title=_title(summary, named),
        caption=caption,
        min_width=_WIDTH,
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    virtual = bool(metrics) and metrics[-1].get("clock") == "virtual"
    wrapped = [_wrapped(with_rows(key, [rows_of(config)])) for key in keys]
    step = step_of(metrics)
    for header in (_HEADERS.get(step, step), "virtual\ntime" if virtual else "seconds", *wrapped):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    _add_evaluations(table, metrics, keys, best, "kept" if keeps_best(config) else "best")
    return table


def _best(summary: Record, metrics: Sequence[Record], config: Record, named: str) -> tuple[str, int | None]:
    """Return the metric by which a run's best evaluation is sought, and the place of that evaluation, if any."""
    if keeps_best(config):
        return split_direction(str(config.get("best-of", LOSS)))[1], kept_at(metrics, summary)
    by = _measured(metrics, named)[0]
    return by, best_at(metrics, by, stated_directions(named))


def _measured(metrics: Sequence[Record], named: str) -> list[str]:
    return metrics_among({key for record in metrics for key in record}, named) or [LOSS]


def _shown(metrics: Sequence[Record], by: str, named: str) -> list[str]:
    """Return the metrics that have room: the loss, the first ones with that of the best evaluation, train-loss."""
    own = _measured(metrics, named)
    trained = any(math.isfinite(as_number(record.get("train-loss"))) for record in metrics)
    scores = [key for key in dict.fromkeys((own[0], by, *own)) if key not in (LOSS, "train-loss")]
    return [LOSS, *scores[:_SCORES]] + ["train-loss"] * trained


def _best_line(metrics: Sequence[Record], best: int, by: str, config: Record, named: str) -> str:
    step, number = step_of(metrics), metrics[best].get("aggregation")
    value = _cell(metrics[best].get(by), 4)
    if keeps_best(config):
        return f"kept: {step} {number}, {by} {value}"
    word = "peak" if higher_is_better(by, stated_directions(named)) else "lowest"
    return f"{word} {by} {value} at {step} {number}"


def _add_evaluations(
    table: Table, metrics: Sequence[Record], keys: Sequence[str], best: int | None, mark: str
) -> None:
    """Add rows of evaluations that are evenly spaced, and of the best one, which is marked."""
    last = len(metrics) - 1
    rows = {round(step * last / (_SPACED_ROWS - 1)) for step in range(_SPACED_ROWS)} if metrics else set()
    for index in sorted(rows.union(() if best is None else (best,))):
        cells = [_cell(metrics[index].get("aggregation"), 0), _cell(metrics[index].get("time"), 1)]
        cells += [_cell(metrics[index].get(key), 4) for key in keys]
        remark = ", ".join([mark] * (index == best) + ["last"] * (index == last))
        table.add_row(*cells, remark, style="bold" if index == best else None)


def _wrapped(heading: str) -> str:
    """Return the heading of a metric over clients in lines as narrow as a column."""
    for begin in (PERSONAL, "client-"):
        heading = heading.replace(begin, f"{begin}\n")
    return heading.replace(" (", "\n(")


def devices_table(clients: Mapping[str, Sequence[Any]]) -> Table | None:
    """Return a table of each device's tasks by outcome, from an evaluation's columns; None without devices."""
    if "tasks" not in clients:
        return None
    table = Table(title="devices", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("client", justify="right")
    table.add_column("name", overflow="fold")
    for header in _ACCOUNT:
        table.add_column(header, justify="right", no_wrap=True)
    names = clients.get("name", [])
    for index in range(len(clients["tasks"])):
        counts = (clients.get(key, []) for key in _ACCOUNT.values())
        cells = [_cell(column[index], 0) if index < len(column) else "-" for column in counts]
        table.add_row(str(index), Text(names[index] if index < len(names) else ""), *cells)
    return table


def clients_table(clients: Mapping[str, Sequence[Any]], metrics: Sequence[str], rows: str) -> Table | None:
    """Return a table of the metrics of each client that has a name, from an evaluation's columns.

    None if no client has a name, there are more than 30 clients, or none of the metrics is among the columns.

    Parameters
    ----------
    clients
        Columns by client index, ``name`` among them.
    metrics
        The metrics to show, in their order.
    rows
        The rows on which clients are evaluated: ``train`` or ``test``.
    """
    names, there = clients.get("name", []), [metric for metric in metrics if metric in clients]
    if not any(names) or len(names) > _MOST_CLIENTS or not there:
        return None
    table = Table(
        title=f"each client, on its {rows_in_words([rows])}", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    table.add_column("client", overflow="fold")
    for metric in there:
        table.add_column(metric, justify="right", no_wrap=True)
    for index, name in enumerate(names):
        cells = (clients[metric] for metric in there)
        numbers = [_cell(column[index], 4) if index < len(column) else "-" for column in cells]
        table.add_row(Text(name or str(index)), *numbers)
    return table


def add_values(table: Table, header: str, values: Sequence[str]) -> None:
    """Add a column of numbers and their spreads, which on a narrow terminal stand below each other, none cut off."""
    words = [word for text in (header, *values) for word in text.replace(" ±", "_±").split()]
    table.add_column(header, justify="right", overflow="fold", min_width=max(map(len, words)))


def markdown_row(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return "| " + " | ".join(each.replace("|", "\\|").replace("\n", " ") for each in cells) + " |"


# Columns of the table of devices, and where metrics.jsonl has them.
_ACCOUNT = {
    "tasks": "tasks",
    "counted": "participation",
    "late": "late",
    "failed": "failed",
    "refused": "refused",
    "too old": "discarded",
    "clipped": "clipped",
}


def _title(summary: Record, named: str) -> Text:
    strategy, engine, status = (str(summary.get(key, "?")) for key in ("strategy", "engine", "status"))
    final = [f"{key} {_cell(summary[key], 4)}" for key in metrics_among(summary, named)]
    text = f"{strategy} on {engine}, {status}" + (":\n" + ", ".join(final) if final else "")
    text += f"\n{summary['reason']}" if status == "finished" and summary.get("reason") else ""
    return Text(text, style="bold" if status == "finished" else "bold yellow")


def _caption(summary: Record) -> str:
    totals = {key: as_number(value) for key, value in summary.items() if math.isfinite(as_number(value))}
    work = [
        f"{key} {totals[key]:,.0f}"
        for key in ("aggregations", "failures", "tasks-late", "tasks-dropped")
        if key in totals
    ]
    work += [f"wall time {totals['wall-seconds']:,.1f} s"] if "wall-seconds" in totals else []
    sent = {way: totals[f"bytes-{way}"] for way in ("up", "down") if f"bytes-{way}" in totals}
    result = [f"{way} {decimal(int(count))}" for way, count in sent.items()]
    took, wasted = (totals.get(f"{name}-seconds", 0.0) for name in ("device", "wasted"))
    tasks = [f"clients' tasks {took:,.0f} s"] if took else []
    tasks += [f"{wasted / took:.0%} of it for nothing"] if took and wasted else []
    return "\n".join(", ".join(line) for line in (work, result, tasks) if line)


def _cell(value: object, digits: int) -> str:
    number = as_number(value)
    text = f"{number:.{digits}f}" if abs(number) < 1e7 else f"{number:.3e}"
    return text if math.isfinite(number) else "-"
