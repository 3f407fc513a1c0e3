"""What a map keeps of its runs: curves.parquet, from which all else is made.

A row for each evaluation: ``run`` (`PlannedRun.key`), the labels of its cell, its method, tuned value and seed,
``status``, wall ``seconds``, ``time`` (virtual seconds) and ``value`` of the metric, which the file's metadata name.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fedapp.config import ConfigError
from fedapp.report import read_metrics
from fedapp.report.files import replacing
from fedapp.report.recorded import RecordedRun, metrics_of
from fedapp.report.series import Array
from fedapp.sweeps.point import DIVERGED, FINISHED, PlannedRun, folder_of

FILE = "curves.parquet"
ENDED = (FINISHED, DIVERGED)
USUAL = "accuracy"  # the metric where nothing says which it is
_METADATA, _METRIC = b"fedapp", b"metric"
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
    """Return a run's curve and the versions that made it; None while it hasn't ended.

    Raises
    ------
    ConfigError
        If it came to its end without such a metric.
    """
    run = RecordedRun(folder_of(planned, runs))
    if run.status not in ENDED:
        return None
    if run.status == FINISHED and not any(metric in record for record in read_metrics(run.path)):
        there = ", ".join(metrics_of([run]))
        raise ConfigError(f"metric = {metric!r}: {planned.name} has none; there are {there}")
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


def metric_in(path: Path) -> str | None:
    """Return the metric of which a file has the curves; None if there is no file.

    Raises
    ------
    ConfigError
        If the file is another one than `write_curves` writes.
    """
    if not path.exists():
        return None
    try:
        schema = parquet.read_schema(path)
    except pa.ArrowInvalid:
        schema = pa.schema([])
    if not {*_OWN} <= {*schema.names}:
        raise ConfigError(f"{path}: holds no curves of a map; another folder, -o, or without that file")
    kept: bytes = (schema.metadata or {}).get(_METRIC, USUAL.encode())
    return kept.decode()


def write_curves(
    path: Path, curves: Mapping[str, MapCurve], versions: Mapping[str, str], metric: str = USUAL
) -> None:
    """Write all curves, in one go; a run without an evaluation has a row without one."""
    every = list(curves.values())
    nothing: Array = np.full(1, np.nan)
    columns: dict[str, Any] = {
        "run": list(curves),
        **{name: [each.labels[name] for each in every] for name in every[0].labels},
        "status": [each.status for each in every],
        "seconds": [each.seconds for each in every],
    }
    lengths = [max(1, len(each.times)) for each in every]
    arrays = {name: _repeated(values, lengths) for name, values in columns.items()}
    for name, parts in (("time", [each.times for each in every]), ("value", [each.values for each in every])):
        arrays[name] = pa.array(np.concatenate([part if len(part) else nothing for part in parts]))
    kept = {_METADATA: json.dumps(dict(versions)).encode(), _METRIC: metric.encode()}
    table = pa.table(arrays).replace_schema_metadata(kept)
    with replacing(path) as new:
        parquet.write_table(table, new, compression="zstd", compression_level=9)


def _repeated(values: Sequence[Any], lengths: Sequence[int]) -> pa.Array:
    """Return each value as often as its run has rows."""
    rows = np.repeat(np.arange(len(values)), lengths)
    taken = pa.array(values).take(pa.array(rows))
    return taken.dictionary_encode() if isinstance(values[0], str) else taken


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
