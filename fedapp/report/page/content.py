"""The content of the page: numbers and text of runs from their folders, thinned out where there are too many."""

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedapp.report import as_number, read_config, read_metrics
from fedapp.report.cells import UNTUNED, Cell, Tuning, cells_of, equal_time, why_unlike
from fedapp.report.client_tables import WALL, column, read_clients
from fedapp.report.differences import PLACES, differing
from fedapp.report.files import (
    LOSS,
    metrics_among,
    read_summary,
    read_warnings,
    rows_of,
    stated_directions,
)
from fedapp.report.method_styles import MARKS_ON_LINE, styles_of
from fedapp.report.page.timeline import BARS, FEWEST_BARS, timeline
from fedapp.report.recorded import AXES, RecordedRun, metrics_of, names_of
from fedapp.report.series import DIGITS, mean_and_spread, metric_text, spaced, with_extremes
from fedapp.report.verdict.costs import bytes_text, time_text
from fedapp.report.verdict.of_runs import verdict_of
from strategies.flower.higher_is_better import higher_is_better

Array = NDArray[Any]
T = TypeVar("T")

# Most points that a browser draws without freezing, of all runs together, and the least that one run gets of them.
RUNS = 60
POINTS, FEWEST_POINTS = 24_000, 100  # evaluations, of each metric
NUMBERS = 16_000  # of all curves together: as many as a page of 2 MB has room for
CLIENTS, FEWEST_CLIENTS = 20_000, 100
CELLS, FEWEST_CELLS = 90_000, 900  # cells of the graph's heat map
METRICS = 60
CLASSES = 100
LINES = 400  # last lines of the log
BAND = 150  # points of a setting's mean
MOST_POINTS, MOST_CLIENTS = 1000, 2000
_LONGEST = 30  # characters of a name beside an axis

# What numpy.load raises for a file of arrays that is cut off or has other bytes.
_DAMAGED = (OSError, ValueError, EOFError, RuntimeError, BadZipFile, zlib.error)

_OF_CLIENTS = ("client-{}-worst-tenth", "personal-{}-mean")

_SHOWN = ("weight", "expected", "observed", "work", "contribution-weight")
_COUNTS = (
    "time",
    "wall-seconds",
    "bytes",
    "tasks",
    "late",
    "failed",
    "refused",
    "discarded",
    "clipped",
    "lost",
    "task-time",
    "device-seconds",
    "wasted-seconds",
    "joules",
    "aggregation",
    "client",
    "name",
    "rows",
    *_SHOWN,
)


def page_content(runs: Sequence[Path], tuning: Tuning = UNTUNED) -> dict[str, Any]:
    """Return the content of the page for run folders, as JSON holds it; ``left_out`` says what isn't in it.

    ``tuning`` is that of the sweep that all runs are of.
    """
    left_out = []
    if len(runs) > RUNS:
        left_out.append(f"{len(runs) - RUNS} of {len(runs)} runs: the first {RUNS} are shown")
    shown = list(runs)[:RUNS]
    recorded = [RecordedRun(path) for path in shown]
    names = names_of(recorded)
    # The metric that each run is judged by, and the loss.
    firsts = [metrics_of([run])[:1] for run in recorded]
    looks = _looks([str(run.config.get("strategy", "")) for run in recorded])
    by_time = len(shown) > 1 and len({run.clock for run in recorded}) == 1
    by_time = by_time and any("contributions" in run.columns for run in recorded)
    return {
        # A method without rounds needs less time for the same number of aggregations, so time is the fair axis.
        "axis": "time" if by_time else "aggregation",
        "runs": [
            {**_run(run.path, name, len(shown)), "look": look}
            for run, name, look in zip(recorded, names, looks, strict=True)
        ],
        "scores": (scores := list(dict.fromkeys([*filter(None, [tuning.by]), *chain(*firsts), LOSS]))),
        **_settings(recorded, dict(zip((run.path for run in recorded), names, strict=True)), scores, tuning),
        "places": _places(recorded),
        "digits": DIGITS,
        "left_out": left_out,
    }


def _places(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the keys that say where and how runs are recorded, not what they compute."""
    with_path = differing([run.config for run in runs])
    return [key for key in PLACES if key not in with_path]


def _looks(strategies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the looks of runs or settings from their strategies, in Plotly's words."""
    return [
        {"color": each.color, "dash": each.dash, "symbol": each.symbol, "marks": MARKS_ON_LINE}
        for each in styles_of(strategies)
    ]


def _settings(
    runs: Sequence[RecordedRun], names: Mapping[Path, str], scores: Sequence[str], tuning: Tuning
) -> dict[str, Any]:
    """Return the settings, each the runs that differ in their seed alone: curves and scores, mean ± deviation."""
    cells = [replace(cell, name=cell.label) for cell in cells_of(runs, tuning)]
    looks = _looks([cell.method for cell in cells])
    time = equal_time(cells)
    keys = [*scores, "train-loss", *(form.format(key) for key in scores for form in _OF_CLIENTS)]
    members: dict[str, list[str]] = {cell.name: [] for cell in cells}
    for cell in cells:
        members[cell.name] += [names[run.path] for run in cell.runs]
    place = "at the end" if time is None else f"at time {time:.4g}"
    several = sum(bool(cell.runs) for cell in cells) > 1
    unlike = next(filter(None, (why_unlike(cells, key) for key in scores)), "")
    return {
        "verdict": _verdict(cells, tuning.by or next(iter(metrics_of(runs)), LOSS), time, tuning)
        if several
        else None,
        "place": place + f"; not comparable: {unlike}" * bool(unlike),
        "settings": [
            {
                "name": cell.name,
                "runs": members[cell.name],
                "seeds": len(cell.seeds),
                "of": cell.seeds_text,
                "scores": {key: cell.text(key, time) for key in scores},
                "means": {key: _number(mean_and_spread(cell.scores(key, time))[0]) for key in scores},
                "bands": _bands(cell, keys) if len(cell.seeds) > 1 else {},
                "look": look,
            }
            for cell, look in zip(cells, looks, strict=True)
        ],
    }


def _verdict(cells: Sequence[Cell], metric: str, time: float | None, tuning: Tuning) -> dict[str, Any]:
    """Return the verdict by a metric: sentences, what may spoil it, each setting's mean and costs, files."""
    files = "metrics.jsonl in the folder of each run"
    verdict = verdict_of(cells, metric, time=time, tuning=tuning, files=files)
    return {
        "sentences": verdict.sentences,
        "doubts": verdict.doubts,
        "files": verdict.files,
        "metric": f"{metric} {verdict.place}",
        "target": _number(verdict.target),
        "costs": [
            {
                "name": each.setting,
                "leads": each.setting == verdict.leader,
                "mean": metric_text(verdict.means[each.setting]),
                "reached": f"{each.reached} of {each.seeds}",
                "time": time_text(each.time),
                "bytes": bytes_text(each.bytes),
                "server": bytes_text(each.server_bytes),
            }
            for each in verdict.costs
        ],
    }


def _bands(cell: Cell, keys: Sequence[str]) -> dict[str, dict[str, list[list[float | None]]]]:
    """Return, by metric and axis, places on the axis, mean and deviation over the seeds: (3, points)."""
    found: dict[str, dict[str, list[list[float | None]]]] = {}
    for key in keys:
        if all(key in run.columns for run in cell.runs):
            for axis in AXES:
                if all(np.isfinite(run.along(axis)).any() for run in cell.runs):
                    band = cell.band(key, axis)
                    at = spaced(len(band[0]), BAND)
                    found.setdefault(key, {})[axis] = [_rounded(values[at]) for values in band]
    return found


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _run(path: Path, name: str, runs: int) -> dict[str, Any]:
    left_out: list[str] = []
    summary = read_summary(path)
    if warnings := read_warnings(path):
        summary["warnings"] = f"{len(warnings)}: {warnings[0]}"
    table = _read(partial(read_clients, path), left_out)
    bars = partial(timeline, path, max(BARS // runs, FEWEST_BARS), _side(runs), left_out)
    return {
        "name": name,
        "summary": {key: _plain(value) for key, value in summary.items() if key != "process"},
        "config": {key: _plain(value) for key, value in _config(path).items()},
        "curves": _curves(path, table, POINTS // runs, NUMBERS // runs, left_out),
        "clients": _clients(
            table,
            min(max(CLIENTS // runs, FEWEST_CLIENTS), MOST_CLIENTS),
            left_out,
            read_config(path),
        ),
        "partition": _partition(path, min(max(CLIENTS // runs, FEWEST_CLIENTS), 500), left_out),
        "graph": _graph(path, _side(runs), left_out),
        "tasks": _read(bars, left_out) or {},
        "log": _log(path, left_out),
        "left_out": left_out,
    }


def _read(read: Callable[[], T], left_out: list[str]) -> T | None:
    """Return the result of ``read``; if a file of the run is damaged, None, with the reason added to ``left_out``."""
    try:
        return read()
    except ValueError as error:
        left_out.append(str(error))
        return None


def _side(runs: int) -> int:
    return math.isqrt(max(CELLS // runs, FEWEST_CELLS))


def _config(path: Path) -> dict[str, Any]:
    content = read_config(path)
    versions = content.pop("versions", {})
    return content | {f"version of {package}": version for package, version in versions.items()}


def _curves(path: Path, table: Any, most: int, in_all: int, left_out: list[str]) -> dict[str, Any]:
    try:
        records = read_metrics(path)
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            left_out.append(f"the curves: {error}")
        return {}
    keys = list(
        dict.fromkeys(key for record in records for key, value in record.items() if _is_number(value))
    )
    if len(keys) > METRICS:
        left_out.append(f"{len(keys) - METRICS} of {len(keys)} metrics")
    most = max(min(most, MOST_POINTS, in_all // max(1, min(len(keys), METRICS))), FEWEST_POINTS)
    by = next(iter(metrics_among(keys, read_config(path).get("metrics", ""))), LOSS)
    at = with_extremes([as_number(record.get(by)) for record in records], most)
    if len(at) < len(records):
        left_out.append(
            f"{len(records) - len(at):,} of {len(records):,} evaluations: of each stretch those with the lowest and "
            f"the highest {by} are drawn"
        )
    kept = [records[index] for index in at]
    curves = {key: _rounded([as_number(record.get(key)) for record in kept]) for key in keys[:METRICS]}
    wall: dict[float, float] = {}
    if table is not None:
        numbers, first = np.unique(column(table, "aggregation"), return_index=True)
        wall = dict(zip(numbers.tolist(), column(table, WALL)[first].tolist(), strict=True))
    clock = str(records[-1].get("clock", "")) if records else ""
    if clock == "wall":
        curves["wall-seconds"] = curves.get("time", [])
    elif wall:
        curves["wall-seconds"] = _rounded([wall.get(record.get("aggregation"), math.nan) for record in kept])
    return {"clock": clock, "columns": curves}


def _clients(table: Any, most: int, left_out: list[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last rows of every client, and of each metric the last evaluation that has it."""
    if table is None or not len(table):
        return {}
    metrics = [name for name in table.column_names if name not in (*_COUNTS, "importance")]
    size = int(column(table, "client").max()) + 1
    values, since = _last_values(table, (*metrics, *_SHOWN), size)
    named = str(config.get("metrics", ""))
    scores = [*metrics_among(values, named), *(name for name in metrics if name in values)]
    order = values[scores[0]] if scores else np.arange(size)
    ranks = np.argsort(order, kind="stable")
    chosen = np.sort(ranks[spaced(size, most)])
    if len(chosen) < size:
        left_out.append(
            f"{size - len(chosen):,} of {size:,} clients: clients evenly spaced by rank are drawn"
        )
    stated = stated_directions(named)
    directions = {name: higher_is_better(name, stated) for name in metrics}
    names = _names_of_clients(table, size)
    return {
        "total": size,
        "index": chosen.tolist(),
        "names": [names[index] for index in chosen] if any(names) else [],
        "metrics": [name for name in metrics if name in values],
        "rows": rows_of(config),
        "costs": [name for name in metrics if directions[name] is False],
        "unknown": [name for name in metrics if directions[name] is None],
        "since": since,
        "columns": {name: _rounded(each[chosen]) for name, each in values.items()},
    }


def _last_values(table: Any, names: Sequence[str], size: int) -> tuple[dict[str, Array], dict[str, int]]:
    """Return columns (size,) by client of the last evaluation that has each, and that evaluation's number."""
    numbers, clients = column(table, "aggregation"), column(table, "client").astype(int)
    values: dict[str, Array] = {}
    since: dict[str, int] = {}
    for name in names:
        own = column(table, name)
        there = ~np.isnan(own)
        if there.any():
            last = there & (numbers == numbers[there].max())
            values[name] = np.full(size, np.nan)
            values[name][clients[last]] = own[last]
            since[name] = int(numbers[there].max())
    return values, since


def _names_of_clients(table: Any, size: int) -> list[str]:
    """Return the name of each client by its index, "" of one without."""
    names = [""] * size
    named = pc.filter(table, pc.is_valid(table["name"]))
    for index, name in zip(named["client"].to_pylist(), named["name"].to_pylist(), strict=True):
        names[index] = name
    return names


def _partition(path: Path, most: int, left_out: list[str]) -> dict[str, Any]:
    names = ("client_offsets", "class_counts", "client_names", "class_names")
    stored = partial(_arrays, path / "partition.npz", *names)
    arrays = _read(stored, left_out) or {}
    if "client_offsets" not in arrays:
        return {}
    sizes = np.diff(arrays["client_offsets"])
    at = spaced(len(sizes), most)
    if len(at) < len(sizes):
        left_out.append(
            f"{len(sizes) - len(at):,} of {len(sizes):,} parts of the data: evenly spaced ones are drawn"
        )
    counts = arrays.get("class_counts")
    if counts is not None and counts.shape[1] > CLASSES:
        left_out.append(f"{counts.shape[1] - CLASSES} of {counts.shape[1]} classes")
    return {
        "index": at.tolist(),
        "names": _shown_names(arrays, "client_names", at),
        "classes": _shown_names(arrays, "class_names", slice(CLASSES)),
        "sizes": sizes[at].tolist(),
        "counts": None if counts is None else counts[at, :CLASSES].T.tolist(),
    }


def _shown_names(arrays: Mapping[str, Array], name: str, at: Any) -> list[str]:
    """Return some of the names in an array, [] where there is none; two that are cut alike keep their numbers."""
    if name not in arrays:
        return []
    cut = [each if len(each) <= _LONGEST else f"{each[: _LONGEST - 1]}…" for each in arrays[name].tolist()]
    twice = Counter(cut)
    told = [f"{each} ({place})" if twice[each] > 1 else each for place, each in enumerate(cut)]
    return np.array(told, object)[at].tolist()  # type: ignore[no-any-return]


def _graph(path: Path, most: int, left_out: list[str]) -> dict[str, Any]:
    stored = partial(_arrays, path / "graph.npz", "clients", "misalignment", "eigenvalues")
    arrays = _read(stored, left_out) or {}
    if len(arrays) < 3:
        return {}
    at = spaced(len(arrays["clients"]), most)
    if len(at) < len(arrays["clients"]):
        left_out.append(
            f"{len(arrays['clients']) - len(at):,} rows of the graph: evenly spaced ones are drawn"
        )
    spectrum = spaced(len(arrays["eigenvalues"]), MOST_CLIENTS)
    return {
        "index": arrays["clients"][at].tolist(),
        "misalignment": [_rounded(row, 3) for row in arrays["misalignment"][np.ix_(at, at)]],
        "eigenvalues": _rounded(arrays["eigenvalues"][spectrum]),
        "rank": spectrum.tolist(),
    }


def _log(path: Path, left_out: list[str]) -> list[str]:
    try:
        lines = (path / "log.txt").read_bytes().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    if len(lines) > LINES:
        left_out.append(f"{len(lines) - LINES:,} of {len(lines):,} lines of the log: the last are shown")
    return [line[:2000] for line in lines[-LINES:]]


def _arrays(path: Path, *names: str) -> dict[str, Array]:
    """Return those arrays of a file that are there, by name; {} where there is no file.

    Raises
    ------
    ValueError
        If the file is damaged; the text names it.
    """
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in names if name in stored}
    except _DAMAGED as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} can't be read ({reason})") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(values: Any, digits: int = 6) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in map(float, values)]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return (
        value
        if isinstance(value, str | int | float | bool) or value is None
        else json.dumps(value, default=str)
    )
