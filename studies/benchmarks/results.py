"""From measurements to what is reported: medians, ratios, the machine; the check that all learned the same."""

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from studies.benchmarks.measure import Measurement
from studies.benchmarks.workloads import Workload

# Accuracies of one workload may differ by so much: a point.
TOLERANCE = 0.01

# Ratios are those to these contenders.
REFERENCES = ("stock", "bare-1", "ray")

JsonObject = dict[str, Any]


def rows_of(workload: Workload, measured: Mapping[str, Sequence[Measurement]]) -> list[JsonObject]:
    """Return a row for each contender: medians over its runs, and ratios to the references.

    ``seconds`` are per round or per 1,000 events, ``startup`` is in seconds, ``memory`` in bytes; ``speedup`` says
    how many times as fast as a reference.
    """
    number, unit = workload.unit
    seconds = {name: number * median(m.seconds for m in runs) for name, runs in measured.items()}
    return [
        {
            "workload": workload.name,
            "title": workload.title,
            "clients": workload.num_clients,
            "contender": name,
            "unit": unit,
            "aggregations": workload.rounds_for(name),
            "seconds": seconds[name],
            "seconds-of-runs": [number * m.seconds for m in runs],
            "startup": median(m.startup for m in runs),
            "memory": median(m.memory for m in runs),
            "accuracy": median(m.accuracy[workload.rounds_for(name)] for m in runs),
            "accuracy-at": {at: median(m.accuracy[at] for m in runs) for at in runs[0].accuracy},
            "speedup": {other: seconds[other] / seconds[name] for other in REFERENCES if other in seconds},
        }
        for name, runs in measured.items()
    ]


def differences(rows: Sequence[JsonObject]) -> list[str]:
    """Return what is wrong with the accuracies of a workload: wherever several contenders evaluated the same
    aggregation, they must agree within a point.
    """
    wrong = []
    for at in sorted({at for row in rows for at in row["accuracy-at"]}):
        found = {row["contender"]: row["accuracy-at"][at] for row in rows if at in row["accuracy-at"]}
        listed = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        if max(found.values()) - min(found.values()) > TOLERANCE:
            wrong.append(
                f"{rows[0]['workload']}: after {at} aggregations accuracies differ by over a point: {listed}"
            )
    return wrong


def machine() -> dict[str, str]:
    """Describe the machine and the versions that were measured."""
    packages = {name: _version(name) for name in ("torch", "flwr", "ray", "numpy")}
    return {
        "cpu": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **packages,
    }


def report(
    rows: Sequence[JsonObject], scaling: Sequence[JsonObject], problems: Sequence[str], data: str
) -> JsonObject:
    """Return everything as one JSON object."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine(),
        "data": data,
        "rows": list(rows),
        "scaling": list(scaling),
        "problems": list(problems),
    }


def _commit() -> str:
    """Return the commit that is measured, with a + where files differ from it; "unknown" outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
