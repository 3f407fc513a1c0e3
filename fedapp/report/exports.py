"""A comparison for other programs: CSV, JSON."""

import json
import math
from typing import TYPE_CHECKING, Any

from fedapp.report.comparison import Comparison
from fedapp.report.series import mean_and_spread

if TYPE_CHECKING:
    import pandas as pd


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
