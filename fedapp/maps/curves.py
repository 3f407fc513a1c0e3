"""What a map keeps of its runs: curves.parquet, from which all else is made.

A row for each evaluation: ``run`` (`PlannedRun.key`), the labels of its cell, its method, tuned value and seed,
``status``, wall ``seconds``, ``time`` (virtual seconds) and ``value`` of the metric.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from fedapp.report.recorded import RecordedRun
from fedapp.report.series import Array
from fedapp.sweeps.point import DIVERGED, FINISHED, PlannedRun, folder_of

FILE = "curves.parquet"
ENDED = (FINISHED, DIVERGED)
_METADATA = b"fedapp"
_OWN = ("run", "status", "seconds", "time", "value")


@dataclass(frozen=True, eq=False)
class MapCurve:
    """A run that came to its end, or diverged.

    Attributes
    ----------
    labels : mapping
        Its cell, method, tuned value and seed.
    seconds : float
        How long it took, of the machine's time, from its config.toml to its last file.
    times, values : array (evaluations,)
        Virtual seconds, and the metric then: NaN where it isn't finite.
    """

    labels: Mapping[str, Any]
    status: str
    seconds: float
    times: Array
    values: Array


def read_run(planned: PlannedRun, runs: Path, metric: str) -> tuple[MapCurve, dict[str, str]] | None:
    """Return a run's curve and the versions that made it; None while it hasn't ended."""
    run = RecordedRun(folder_of(planned, runs))
    if run.status not in ENDED:
        return None
    config = run.path / "config.toml"
    content = tomllib.loads(config.read_text("utf-8"))
    versions = {str(name): str(number) for name, number in content.get("versions", {}).items()}
    # All of it, the figures at its end among it, which summary.json can't know of.
    seconds = max(path.stat().st_mtime for path in run.path.iterdir()) - config.stat().st_mtime
    curve = MapCurve(dict(planned.labels), run.status, seconds, run.column("time"), run.column(metric))
    return curve, versions


def read_curves(path: Path) -> tuple[dict[str, MapCurve], dict[str, str]]:
    """Return the curves by run and the versions that made them; none if there is no file."""
    if not path.exists():
        return {}, {}
    table = parquet.read_table(path)
    found: dict[str, MapCurve] = {}
    frame = table.to_pandas()
    labels = [column for column in frame.columns if column not in _OWN]
    for key, rows in frame.groupby("run", sort=False, observed=True):
        first = rows.iloc[0]
        known = rows["time"].notna().to_numpy()
        found[str(key)] = MapCurve(
            {label: first[label] for label in labels},
            str(first["status"]),
            float(first["seconds"]),
            rows["time"].to_numpy(np.float64)[known],
            rows["value"].to_numpy(np.float64)[known],
        )
    return found, json.loads(table.schema.metadata[_METADATA])


def write_curves(path: Path, curves: Mapping[str, MapCurve], versions: Mapping[str, str]) -> None:
    """Write all curves, in one go."""
    parts = [_rows(key, each) for key, each in curves.items()]
    frame = pd.concat(parts, ignore_index=True)
    texts = [name for name in frame.columns if frame[name].map(type).eq(str).all()]
    table = pa.Table.from_pandas(frame.astype(dict.fromkeys(texts, "category")), preserve_index=False)
    table = table.replace_schema_metadata({_METADATA: json.dumps(dict(versions)).encode()})
    temporary = path.with_name(f".{path.name}.tmp")
    parquet.write_table(table, temporary, compression="zstd", compression_level=19)
    os.replace(temporary, path)


def _rows(key: str, curve: MapCurve) -> pd.DataFrame:
    """Return a run's rows; one without an evaluation where it has none."""
    has_any = len(curve.times) > 0
    return pd.DataFrame(
        {
            "run": key,
            **curve.labels,
            "status": curve.status,
            "seconds": curve.seconds,
            "time": curve.times if has_any else [np.nan],
            "value": curve.values if has_any else [np.nan],
        }
    )


def collected(
    planned: Iterable[PlannedRun], runs: Path, metric: str, curves: Mapping[str, MapCurve]
) -> tuple[dict[str, MapCurve], dict[str, str]]:
    """Return the curves of planned runs that have ended and aren't kept yet, and the last one's versions."""
    found: dict[str, MapCurve] = {}
    versions: dict[str, str] = {}
    for each in planned:
        if each.key not in curves and each.key not in found and (read := read_run(each, runs, metric)):
            found[each.key], versions = read
    return found, versions
