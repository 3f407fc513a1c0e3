"""A comparison for other programs: CSV, JSON, LaTeX."""

import json
import math
import re
from typing import TYPE_CHECKING, Any

from fedapp.report.cells import why_unlike
from fedapp.report.comparison import Comparison
from fedapp.report.series import mean_and_spread

if TYPE_CHECKING:
    import pandas as pd

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


def latex_of(comparison: Comparison) -> str:
    """Return a table of LaTeX (package booktabs) for each metric: mean ± standard deviation over seeds."""
    return "\n".join(_tabular(comparison, key) for key in comparison.metrics)


def _tabular(comparison: Comparison, key: str) -> str:
    head, *rows = [[_in_latex(cell) for cell in row] for row in (comparison.header, *comparison.rows(key))]
    unlike = why_unlike(comparison.cells, key)
    lines = [
        *([f"% not comparable: {unlike}"] if unlike else []),
        f"% {comparison.title}: {comparison.heading(key)}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"\toprule",
        *(" & ".join(row) + r" \\" for row in [[_in_latex(key), *head[1:]]]),
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _in_latex(text: str) -> str:
    """Return a text as LaTeX sets it."""
    escaped = re.sub(r"[\\~^&%$#_{}]", lambda sign: _LATEX.get(sign[0], f"\\{sign[0]}"), text)
    return escaped.replace("±", r"$\pm$")
