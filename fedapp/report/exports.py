"""A comparison for other programs and for papers: CSV, JSON, LaTeX, Markdown."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedapp.report.cells import Cell, why_unlike
from fedapp.report.comparison import Comparison
from fedapp.report.series import mean_and_spread, spread_text
from fedapp.report.table import markdown_row
from fedapp.report.verdict.judging import LEVEL
from fedapp.report.verdict.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd

_DIGITS = 3  # decimals of means and deviations in tables for papers
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def frame_of(comparison: Comparison) -> "pd.DataFrame":
    """Return a row for each setting and metric: mean and ``-std`` at the end, and at equal time, rounds and bytes.

    Columns: ``run``, ``metric``, ``seeds``, ``end``, ``end-std``, and for each axis ``equal-AXIS``,
    ``equal-AXIS-std``. ``seeds`` are those whose metric is known at the end. A spread of one seed is NaN.
    """
    import pandas as pd

    rows = []
    for cell in comparison.cells:
        for key in comparison.metrics:
            finals = cell.finals(key)
            row: dict[str, Any] = {"run": cell.name, "metric": key}
            row["seeds"] = sum(map(math.isfinite, finals))
            row["end"], row["end-std"] = mean_and_spread(finals)
            for axis, place in comparison.axes.items():
                values = cell.values_at(axis, place, key)
                row[f"equal-{axis}"], row[f"equal-{axis}-std"] = mean_and_spread(values)
            rows.append(row)
    return pd.DataFrame(rows)


def csv_of(comparison: Comparison) -> str:
    """Return `frame_of` as CSV."""
    return str(frame_of(comparison).to_csv(index=False))


def json_of(comparison: Comparison) -> str:
    """Return JSON: ``rows`` of `frame_of`, null for NaN; ``equal``, where runs are compared; ``remarks``."""
    rows = json.loads(frame_of(comparison).to_json(orient="records"))
    return (
        json.dumps({"equal": comparison.axes, "rows": rows, "remarks": comparison.remarks}, indent=2) + "\n"
    )


@dataclass(frozen=True)
class PaperTable:
    """The table of a metric for a paper: settings from the best to the worst, equal digits.

    Attributes
    ----------
    note : str
        Why the numbers can't be compared; empty if they can.
    caption : str
        What the table shows, of how many seeds, and what is bold.
    head : sequence of str
        The columns.
    rows : sequence of (sequence of str, bool)
        Each setting's cells, and whether the verdict has it in bold.
    bold_at : int
        The column in which the verdict's numbers are.
    """

    note: str
    caption: str
    head: Sequence[str]
    rows: Sequence[tuple[Sequence[str], bool]]
    bold_at: int

    @classmethod
    def of(cls, comparison: Comparison, key: str) -> "PaperTable":
        """Return the table of a metric.

        Bold are the setting with the best mean and those that the tests can't tell from it; nothing where no test is
        possible.
        """
        verdict = comparison.verdict_by(key)
        apart = {pair.other for pair in verdict.pairs if pair.better == verdict.best and pair.apart}
        is_tested = any(pair.seeds > 1 for pair in verdict.pairs)
        bold = set(verdict.means) - apart if is_tested else set()
        places = {name: place for place, name in enumerate(verdict.means)}
        cells = sorted(comparison.cells, key=lambda cell: places.get(cell.name, len(places)))
        columns = [(None, math.nan), *comparison.axes.items()]
        rows = [
            (
                [cell.name, cell.seeds_text, *(_spread(cell, key, axis, end) for axis, end in columns)],
                cell.name in bold,
            )
            for cell in cells
        ]
        by_time = comparison.time is not None
        at = (
            3 + list(comparison.axes).index("time") if by_time else 2
        )  # after the name, the seeds and the end
        return cls(
            why_unlike(comparison.cells, key),
            _caption(comparison, key, verdict if is_tested else None),
            [key, *comparison.header[1:]],
            rows,
            at,
        )


def _spread(cell: Cell, key: str, axis: str | None, end: float) -> str:
    values = cell.finals(key) if axis is None else cell.values_at(axis, end, key)
    return spread_text(values, _DIGITS, equal=True)


def _caption(comparison: Comparison, key: str, verdict: Verdict | None) -> str:
    seeds = sorted({len(cell.seeds) for cell in comparison.cells if cell.runs})
    number = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0] if seeds else 0}"
    text = f"{comparison.title}: {comparison.heading(key)}, mean ± standard deviation over {number} seeds."
    if verdict is None:
        return text
    return (
        f"{text} Bold: the best mean {verdict.place} and what isn't apart from it (paired t-tests, p-values by Holm "
        f"over all {len(verdict.pairs)} pairs, level {LEVEL:g})."
    )


def markdown_of(comparison: Comparison) -> str:
    """Return a table in Markdown for each metric, with its caption."""
    parts = []
    for key in comparison.metrics:
        shown = PaperTable.of(comparison, key)
        rows = [_bold(cells, shown.bold_at, "**{}**") if bold else cells for cells, bold in shown.rows]
        lines = [markdown_row(shown.head), "|" + "---|" * len(shown.head), *map(markdown_row, rows)]
        note = [f"**Not comparable:** {shown.note}", ""] if shown.note else []
        parts.append("\n".join([*note, shown.caption, "", *lines]) + "\n")
    return "\n".join(parts)


def latex_of(comparison: Comparison) -> str:
    """Return a table of LaTeX (package booktabs) for each metric, with its caption."""
    return "\n".join(_tabular(PaperTable.of(comparison, key)) for key in comparison.metrics)


def _tabular(shown: PaperTable) -> str:
    rows = []
    for cells, bold in shown.rows:
        escaped = [_in_latex(cell) for cell in cells]
        rows.append(_bold(escaped, shown.bold_at, r"\textbf{{{}}}") if bold else escaped)
    lines = [
        *([f"% not comparable: {shown.note}"] if shown.note else []),
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_in_latex(shown.caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(shown.head) - 1)}}}",
        r"\toprule",
        " & ".join(map(_in_latex, shown.head)) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _bold(cells: Sequence[str], at: int, form: str) -> list[str]:
    """Return a row whose first cell and the one at a place are bold by a form."""
    return [form.format(cell) if place in (0, at) else cell for place, cell in enumerate(cells)]


def _in_latex(text: str) -> str:
    """Return a text as LaTeX sets it."""
    escaped = re.sub(r"[\\~^&%$#_{}]", lambda sign: _LATEX.get(sign[0], f"\\{sign[0]}"), text)
    return escaped.replace("±", r"$\pm$").replace("≥", r"$\geq$").replace("≤", r"$\leq$")
