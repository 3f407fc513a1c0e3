"""A run read back. Import ``figures`` late: it loads matplotlib, which is slow."""

import json
import tomllib
from numbers import Real
from pathlib import Path
from typing import Any


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run, oldest first; non-finite numbers may be ``None``.

    An incomplete last line is left out: a run that was killed while it wrote leaves one behind. Raises
    FileNotFoundError without ``metrics.jsonl``, and ValueError where an earlier line isn't JSON.
    """
    path = run_dir / "metrics.jsonl"
    # A kill can also cut a multi-byte character in two, hence "replace".
    lines = path.read_bytes().decode("utf-8", errors="replace").strip().split("\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
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
