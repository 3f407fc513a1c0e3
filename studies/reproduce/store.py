"""The stored results of an experiment: curves.parquet, from which its report can be made without any run.

One row per evaluation: ``run`` (`PlannedRun.name`), ``seed``, ``aggregation``, ``time`` and every scalar metric (null
where missing). The file's metadata hold the rest as compressed JSON: each run's facts, and the named numbers that an
experiment measures from models and data.
"""

import json
import math
import os
import tomllib
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fedapp.report import as_number, read_metrics
from fedapp.report.client_tables import by_evaluation
from fedapp.report.files import read_summary
from fedapp.report.series import Array
from fedapp.server.journal import machine
from fedapp.sweeps.point import DIVERGED, PlannedRun
from studies.reproduce.runs import KEPT, Curves

FILE = "curves.parquet"

_METADATA = b"fedapp"


@dataclass
class Stored:
    """The content of curves.parquet.

    Attributes
    ----------
    curves : dict of str to Curves
        By `PlannedRun.key`.
    seeds : dict of str to int
        By `PlannedRun.key`.
    numbers : dict
        Named numbers that were measured from models and data: JSON.
    measured : dict
        ``date``, ``versions``, ``machine`` and ``seconds`` of that measurement.
    absent : dict of str to str
        Why something couldn't be run or measured.
    sources : dict of str to str
        Digests of what numbers were measured from, for numbers whose name doesn't say it.
    """

    curves: dict[str, Curves] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def changed_from(self, before: "Stored") -> bool:
        """Tell whether a file has to be written; runs of one key are the same run."""
        names, former = ({key: each.name for key, each in it.curves.items()} for it in (self, before))
        return names != former or any(
            getattr(self, name) != getattr(before, name) for name in ("numbers", "absent", "sources")
        )


def read_folder(planned: PlannedRun, folder: Path) -> Curves:
    """Read a finished run's folder.

    Beside the scalar metrics there is ``hardware-loss``: Fraboni et al.'s surrogate objective for identical weights,
    Σ q_i f_i with q_i ∝ 1/τ_i, whatever weights the run has; and ``hardware-loss-std``, its spread over clients.
    A run that diverged before its end has only the columns of ``KEPT``: it counts as worse than all others.
    """
    records = read_metrics(folder)
    keys = dict.fromkeys(
        key for record in records for key, value in record.items() if isinstance(value, Real)
    )
    columns = {key: np.array([as_number(record.get(key)) for record in records]) for key in keys}
    clients = by_evaluation(folder)
    surrogate = np.array([_by_hardware(clients.get(record["aggregation"], {})) for record in records])
    if np.isfinite(surrogate).any():
        columns |= {"hardware-loss": surrogate[:, 0], "hardware-loss-std": surrogate[:, 1]}
    summary = read_summary(folder)
    if summary.get("status") == DIVERGED and summary.get("complete") is False:  # its last part isn't there
        columns = {
            key: column if key in KEPT else np.full(len(column), np.nan) for key, column in columns.items()
        }
    facts = {
        **{key: value for key, value in summary.items() if isinstance(value, Real | str)},
        "evaluations": len(records),
        "versions": tomllib.loads((folder / "config.toml").read_text("utf-8")).get("versions", {}),
        # Runs of before don't say when and where they ended.
        "date": summary.get("date") or _date_of(folder / "summary.json"),
        "machine": summary.get("machine") or machine(),
    }
    return Curves(planned.name, columns, facts)


def _date_of(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).date().isoformat()


def _by_hardware(clients: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Mean and standard deviation of the clients' losses, weighted by how often each answers."""
    if not {"loss", "task-time"} <= clients.keys():  # the start has no times
        return math.nan, math.nan
    losses, share = np.array(clients["loss"], dtype=np.float64), 1 / np.array(clients["task-time"])
    share /= share.sum()
    average = float(share @ losses)
    return average, float(share @ (losses - average) ** 2) ** 0.5


def read_stored(path: Path) -> Stored:
    """Read curves.parquet; empty if there is none."""
    if not path.exists():
        return Stored()
    file = parquet.ParquetFile(path)
    table, kept = file.read(), _unpacked(file.metadata.metadata[_METADATA])
    names = np.asarray(table["run"].to_pylist(), dtype=object)
    seeds = table["seed"].to_numpy()
    columns = {
        key: table[key].to_numpy().astype(np.float64)
        for key in table.column_names
        if key not in ("run", "seed")
    }
    stored = Stored(
        numbers=kept["numbers"],
        measured=kept["measured"],
        absent=kept["absent"],
        sources=kept.get("sources", {}),  # files of before have none
    )
    for key, run in kept["runs"].items():
        own = names == run["name"]
        present = {name: values[own] for name, values in columns.items() if name in run["columns"]}
        stored.curves[key] = Curves(run["name"], present, run["facts"])
        stored.seeds[key] = int(seeds[own][0])
    return stored


def write_stored(path: Path, stored: Stored) -> None:
    """Write curves.parquet, in one go."""
    temporary = path.with_name(f".{path.name}.tmp")
    table = _table(stored)
    with parquet.ParquetWriter(
        temporary, table.schema, compression="zstd", compression_level=19, use_dictionary=["run"]
    ) as writer:
        writer.write_table(table)
        # Not the schema's own, of which the file would hold two copies.
        writer.add_key_value_metadata({_METADATA: _packed(_metadata(stored))})
    os.replace(temporary, path)


def _table(stored: Stored) -> pa.Table:
    curves = stored.curves
    metrics = dict.fromkeys(["aggregation", "time"])
    metrics |= dict.fromkeys(name for each in curves.values() for name in each.columns)
    lengths = [len(each.columns["time"]) for each in curves.values()]
    arrays: dict[str, pa.Array] = {
        "run": pa.array(
            _repeated([each.name for each in curves.values()], lengths), pa.string()
        ).dictionary_encode(),
        "seed": pa.array(_repeated([stored.seeds[key] for key in curves], lengths), pa.int64()),
    }
    for name in metrics:
        parts = [
            each.columns.get(name, np.full(length, np.nan))
            for each, length in zip(curves.values(), lengths, strict=True)
        ]
        values: Array = np.concatenate(parts) if parts else np.zeros(0)
        kind = pa.int64() if name == "aggregation" else pa.float64()
        arrays[name] = pa.array(values, pa.float64(), from_pandas=True).cast(kind)
    return pa.table(arrays)


def _metadata(stored: Stored) -> str:
    """Return all that isn't a curve, as JSON."""
    content = {
        "runs": {
            key: {"name": each.name, "columns": list(each.columns), "facts": dict(each.facts)}
            for key, each in stored.curves.items()
        },
        "numbers": stored.numbers,
        "measured": stored.measured,
        "absent": stored.absent,
        "sources": stored.sources,
    }
    return json.dumps(content, ensure_ascii=False)


def _repeated(values: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


def _packed(text: str) -> bytes:
    """Compress metadata, which Parquet stores uncompressed, into text."""
    return b64encode(zlib.compress(text.encode(), 9))


def _unpacked(content: bytes) -> Any:
    """Return the metadata before compression; metadata of older files, which aren't compressed, unchanged."""
    return json.loads(content if content.startswith(b"{") else zlib.decompress(b64decode(content)))
