"""A run read back: the files of its folder, and which of its numbers are its model's metrics.

Files are replaced whole or not at all. A run that is running by its summary.json, and whose process is gone, has
failed.
"""

import fcntl
import json
import math
import os
import re
import socket
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path, PurePath
from typing import Any

from strategies.flower.higher_is_better import PERSONAL, higher_is_better, split_direction


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run, oldest first; non-finite numbers may be ``None``.

    An incomplete last line is left out: a run that was killed while it wrote leaves one behind. Raises
    FileNotFoundError without ``metrics.jsonl``, and ValueError where an earlier line isn't JSON, or a line isn't
    a JSON object.
    """
    path = run_dir / "metrics.jsonl"
    # A kill can also cut a multi-byte character in two, hence "replace".
    lines = path.read_bytes().decode("utf-8", errors="replace").strip().split("\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            continue
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: {line[:40]!r} is no JSON object")
        records.append(record)
    return records


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's config.toml; {} where it can't be read."""
    try:
        return tomllib.loads((run_dir / "config.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def as_number(value: object) -> float:
    """Return ``value`` as a float, NaN where it isn't a number (missing, null, text)."""
    return float(value) if isinstance(value, Real) else float("nan")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, whose file then replaces ``path``; after an OSError the former file stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk needs its space
        raise


RUNNING, FAILED = "running", "failed"
GONE = "its process ended without a word: killed, or its machine went down"

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> dict[str, Any]:
    """Return host, process id and boot id, which identify this process among those of all machines."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text("ascii").strip()
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot": boot}


# A line of log.txt: day, time, level, message.
_WARNING = re.compile(r"^\S+ \S+ WARNING (.*)$", re.MULTILINE)


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; {} if there is none that can be read.

    A run holds the lock of its folder until its process ends, however it ends. If a run of this machine has the
    status running and its lock is free, the summary's status becomes failed, with the reason.
    """
    path = run_dir / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if summary["status"] != RUNNING or not _is_ours(summary.get("process")):
            return summary
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return _judged(run_dir, summary)


def read_warnings(run_dir: Path) -> list[str]:
    """Return the distinct warnings in a run's log.txt, in order; [] where there is none that can be read.

    Keys that nothing reads aren't among them: summary.json names these.
    """
    try:
        log = (run_dir / "log.txt").read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [text for text in dict.fromkeys(_WARNING.findall(log)) if not text.startswith("not read by ")]


def write_summary(run_dir: Path, content: Mapping[str, Any]) -> None:
    """Replace a run's summary.json, whole or not at all."""
    with replacing(run_dir / "summary.json") as new:
        new.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")


def _judged(run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run with the status running; as failed if its process is gone."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now: dict[str, Any] = json.loads((run_dir / "summary.json").read_text("utf-8"))
        if now["status"] != RUNNING:  # it ended between the two looks
            return now
        rest = {key: value for key, value in summary.items() if key not in ("status", "process")}
        failed = {"status": FAILED, "reason": GONE, **rest}
        with suppress(OSError):  # the folder isn't ours to write: the status is returned all the same
            write_summary(run_dir, failed)
        return failed
    except OSError:  # the run holds the lock, or the file system has no locks
        return summary
    finally:
        os.close(descriptor)


def _is_ours(process: Mapping[str, Any] | None) -> bool:
    """Tell whether a process is, or was, of this machine, where its lock can be seen."""
    if process is None:
        return True
    here = this_process()
    return any(process.get(key) == here[key] != "" for key in ("host", "boot"))


LOSS = "loss"
AUTO, NONE = "auto", "none"  # values of the key metrics

# The metrics of metrics = "auto": accuracy for classes, rmse and r2 for numbers.
_USUAL = ("accuracy", "rmse", "r2")

# A part that was handed over in Python, with a digest behind its name.
_OF_PYTHON = re.compile(r"(python:[^,\s]+?)_[0-9a-f]{8}(?!\w)")
_HANDED_OVER = re.compile(r"[0-9a-f]{20}")  # names of files of data from Python

# How names of metrics over clients begin or end; which a run has depends on its method and on client evaluation.
_OF_CLIENTS = (PERSONAL, "client-")
_OVER_CLIENTS = ("-mean", "-worst-tenth", "-best", "-std")

Record = Mapping[str, object]


def metrics_among(keys: Iterable[str], *named: object) -> list[str]:
    """Return which of a run's numbers are its model's metrics: those that the config names, in its order, loss last.

    The first is the run's metric. Second is the mean of the first over clients' own models, if there are any.

    Parameters
    ----------
    named : str
        Values of the config's key ``metrics``.
    """
    there = set(keys)
    own = [name for names in named for name in _names(names)]
    found = [key for key in dict.fromkeys((*own, *_USUAL, LOSS)) if key in there]
    personal = f"{PERSONAL}{found[0]}-mean" if found else ""
    return [*found[:1], personal, *found[1:]] if personal in there else found


def measured_by(named: object) -> list[str]:
    """Return the metrics of a run by the value of its key ``metrics``, loss first."""
    return [LOSS, *(_USUAL if named == AUTO else () if named == NONE else _names(named))]


def may_be_measured(metric: str, named: Iterable[object]) -> bool:
    """Tell whether runs can have a metric, by their values of the key ``metrics``; metrics over clients always."""
    of_clients = metric.startswith(_OF_CLIENTS) or metric.endswith(_OVER_CLIENTS)
    return of_clients or any(metric in measured_by(each) for each in named)


def without_digest(name: str) -> str:
    """Return the name of a part that exists in a process alone, ``python:NAME``, without the digest behind it."""
    return _OF_PYTHON.sub(r"\1", name)


def data_of(config: Mapping[str, Any]) -> str:
    """Return what a run's data are called in titles: of files the name of the file or folder, else the dataset's."""
    name, path = str(config.get("dataset", "?")), PurePath(str(config.get("data-path", "")))
    if name in ("files", "npz") and path.name and not _HANDED_OVER.fullmatch(path.stem):
        return path.name
    return without_digest(name)


def _names(named: object) -> list[str]:
    """Return the names of a config's metrics; a metric of the user's own has the name of its function."""
    names = (without_digest(split_direction(name)[1]) for name in str(named).split(","))
    return [name.rpartition(":")[2].rpartition(".")[2].replace("_", "-") for name in names]


def functions_of(named: object) -> dict[str, str]:
    """Return what each metric of a value of the key ``metrics`` is, by its name in the files: ``module:name``."""
    parts = [without_digest(split_direction(part)[1]) for part in str(named).split(",")]
    return {_names(part)[0]: part for part in parts}


def stated_directions(*named: object) -> dict[str, bool]:
    """Return whether a higher value is better, of each metric of which values of the key ``metrics`` state it.

    A metric of which two values state the opposite isn't among them.
    """
    parts = [part for names in named for part in str(names).split(",")]
    stated = {(_names(part)[0], split_direction(part)[0]) for part in parts} - {("", None)}
    known = {name: higher for name, higher in stated if higher is not None}
    return {name: higher for name, higher in known.items() if (name, not higher) not in stated}


def keeps_best(config: Record) -> bool:
    """Return True if a run leaves the model of its best evaluation, by its config."""
    return config.get("keep") == "best"


def kept_at(records: Sequence[Record], summary: Record) -> int | None:
    """Return the place of the evaluation whose model a run with ``keep = "best"`` leaves; None if there is none."""
    number = summary.get("best-aggregation")
    places = (place for place, record in enumerate(records) if record.get("aggregation") == number)
    return None if number is None else next(places, None)


def rows_of(config: Record) -> str:
    """Return on which rows of clients the metrics of each client are measured: ``train`` or ``test``."""
    return "test" if config.get("test-on") == "own" else "train"


def with_rows(metric: str, rows: Iterable[str]) -> str:
    """Return a metric's heading: of a metric over clients with the rows on which each client's is measured."""
    return f"{metric} ({rows_in_words(rows)})" if metric.startswith(_OF_CLIENTS) else metric


def rows_in_words(rows: Iterable[str]) -> str:
    """Return the rows on which metrics of several runs' clients are measured, in words."""
    return " or ".join("training" if each == "train" else each for each in sorted(set(rows))) + " rows"


# Metrics of the model beside those that the config names.
_OF_MODEL = ("train-loss", "federated-loss", "surrogate-loss")


def is_of_model(key: str, named: object) -> bool:
    """Return True if a number of an evaluation is of its model: a loss, a metric, or one over clients.

    Totals and counts of the run aren't.
    """
    own = key.removesuffix("-std")
    return key.startswith(_OF_CLIENTS) or own in (*_OF_MODEL, *measured_by(named))


def best_at(records: Sequence[Record], metric: str, stated: Mapping[str, bool] | None = None) -> int | None:
    """Return the first evaluation with the best value of a metric, by its place.

    None if no value is finite, or if the metric's direction is neither ``stated`` nor known by its name.
    """
    if (higher := higher_is_better(metric, stated)) is None:
        return None
    sign = -1.0 if higher else 1.0
    scores = [sign * as_number(record.get(metric)) for record in records]
    finite = [place for place, score in enumerate(scores) if math.isfinite(score)]
    return min(finite, key=scores.__getitem__, default=None)


def step_of(records: Iterable[Record]) -> str:
    """Return "aggregation" for a method without rounds, which reports contributions; else "round"."""
    return "aggregation" if any("contributions" in record for record in records) else "round"
