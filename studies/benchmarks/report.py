"""Measurements as a table on the terminal, as Markdown, and as a figure."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from studies.benchmarks.results import REFERENCES, JsonObject
from studies.benchmarks.workloads import CONTENDERS

HEADERS = ("seconds", "× stock", "× bare", "× our Ray", "start-up", "memory", "accuracy")
BEGIN, END = "<!-- make bench writes from here", "to here -->"

# Okabe and Ito's colours, told apart under the common forms of colour blindness; ours are the strong ones.
COLORS = {
    "bare-1": "#BBBBBB",
    "bare-2": "#999999",
    "stock": "#E69F00",
    "simulate": "#A65628",
    "ray": "#56B4E9",
    "sequential": "#009E73",
    "vectorized": "#0072B2",
    "workers": "#332288",
    "vmap": "#D55E00",
    "jax": "#CC79A7",
    "batched": "#F0E442",
    "appfl": "#882255",
    "flgo": "#44AA99",
    "pfl": "#000000",
}


def tables(report: JsonObject) -> list[Table]:
    """Return a table of each workload, and one of the scaling in the number of clients."""
    shown = []
    for title, rows in _groups(report):
        table = Table(
            title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False
        )  # 80 columns wide, at most
        for number, header in enumerate(("", *HEADERS)):
            shown_as = header.replace("our ", "our\n").replace("accu", "accu-\n")
            table.add_column(shown_as, justify="right" if number else "left", no_wrap=True)
        for row in rows:
            table.add_row(
                _name(row), *_cells(row), style="bold" if row["contender"] == "vectorized" else None
            )
        shown.append(table)
    return shown


def markdown(report: JsonObject) -> str:
    """Return the same as Markdown, with date and machine."""
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [f"Measured on {report['date']} at commit {report['commit']}: {machine}. Data: {report['data']}."]
    for title, rows in _groups(report):
        lines += [
            "",
            f"**{title}**",
            "",
            "| | " + " | ".join(HEADERS) + " |",
            "|---|" + "---:|" * len(HEADERS),
        ]
        lines += ["| " + " | ".join((_name(row), *_cells(row))) + " |" for row in rows]
    return "\n".join([*lines, *(f"\n**Not comparable**: {problem}" for problem in report["problems"])])


def write_results(report: JsonObject, path: Path) -> None:
    """Put the Markdown into a file, between its markers; what else is in the file stays."""
    text = path.read_text("utf-8") if path.exists() else f"# How fast\n\n{BEGIN} -->\n<!-- {END}\n"
    before, begin, rest = text.partition(f"{BEGIN} -->\n")
    _, end, after = rest.partition(f"<!-- {END}")
    if not (begin and end):
        raise ValueError(f"{path}: has no lines '{BEGIN} -->' and '<!-- {END}' to write between")
    path.write_text(f"{before}{begin}\n{markdown(report)}\n\n{end}{after}", "utf-8")


def draw(report: JsonObject, path: Path) -> Path:
    """Draw the seconds of every workload as bars, and the scaling in the number of clients as curves."""
    from fedapp.report.figures import new_figure, save  # matplotlib is slow to import

    panels = _by_workload(report["rows"])
    height = sum(0.6 + 0.25 * len(rows) for rows in panels) + 3.2 * bool(report["scaling"])
    figure = new_figure(max(2.5, height), f"{report['machine']['cpu']}, {report['machine']['cores']} cores")
    shares = [0.6 + 0.25 * len(rows) for rows in panels] + [3.2] * bool(report["scaling"])
    grid = figure.add_gridspec(len(shares), 2, height_ratios=shares)
    for number, rows in enumerate(panels):
        _bars(figure.add_subplot(grid[number, :]), rows)
    if report["scaling"]:
        for column, (key, label, scale) in enumerate(
            (("seconds", "seconds per round", 1.0), ("memory", "peak memory, GiB", 2.0**-30))
        ):
            _curves(
                figure.add_subplot(grid[-1, column]), report["scaling"], key, label, scale, named=column == 0
            )
    return save(figure, path)


def _bars(axes: Any, rows: Sequence[JsonObject]) -> None:
    from fedapp.report.figures import INK, style_axes

    style_axes(axes)
    axes.grid(False, axis="y")
    values = [row["seconds"] for row in rows]
    axes.barh(range(len(rows)), values, 0.75, color=[COLORS[row["contender"]] for row in rows])
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:.3g}",
            (value, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set(xlim=(0, 1.1 * max(values)), ylim=(len(rows) - 0.5, -0.5))
    axes.set_title(
        f"{rows[0]['workload']}: {rows[0]['title']}, s per {rows[0]['unit']}", fontsize=9, loc="left"
    )


def _curves(
    axes: Any, rows: Sequence[JsonObject], key: str, label: str, scale: float, *, named: bool
) -> None:
    from fedapp.report.figures import style_axes

    style_axes(axes)
    for name in CONTENDERS:
        own = [row for row in rows if row["contender"] == name]
        if own:
            values = [scale * row[key] for row in own]
            axes.plot(
                [row["clients"] for row in own], values, "o-", color=COLORS[name], ms=4, label=_name(own[0])
            )
    axes.set(xscale="log", yscale="log", xlabel="clients, 10 samples each", ylabel=label)
    axes.xaxis.set_major_formatter(
        lambda value, _: f"{value:,.0f}"
    )  # not mathtext: its parser has global state
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    if named:
        axes.legend(frameon=False, fontsize=8)


def _groups(report: JsonObject) -> list[tuple[str, list[JsonObject]]]:
    groups = []
    for rows in _by_workload(report["rows"] + report["scaling"]):
        first = rows[0]
        name = f"{first['workload']}: " if first in report["rows"] else ""
        number = len(first["seconds-of-runs"])
        runs = "one run" if number == 1 else f"median of {number} runs"
        groups.append((f"{name}{first['title']}, per {first['unit']}, {runs}", rows))
    return groups


def _by_workload(rows: Sequence[JsonObject]) -> list[list[JsonObject]]:
    return [list(group) for _, group in groupby(rows, key=lambda row: row["workload"])]


def _name(row: JsonObject) -> str:
    return CONTENDERS[row["contender"]][2]


def _cells(row: JsonObject) -> tuple[str, ...]:
    ratios = (f"{row['speedup'][name]:.2f}" if name in row["speedup"] else "-" for name in REFERENCES)
    return (
        f"{row['seconds']:.3f}",
        *ratios,
        f"{row['startup']:.1f} s",
        f"{row['memory'] / 2**20:,.0f} MiB",
        f"{row['accuracy']:.4f}",
    )
