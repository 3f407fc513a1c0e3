"""summary.json read back: a run that says that it goes on, and whose process is gone, has failed."""

import fcntl
import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedapp.report.replacing import replacing

RUNNING, FAILED = "running", "failed"
GONE = "its process ended without a word: killed, or its machine went down"

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> dict[str, Any]:
    """Return what tells this process from those of other machines and other days."""
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text("ascii").strip()
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot": boot}


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; {} if there is none that can be read.

    A run holds the lock of its folder until its process ends, however it does. One of this machine that is said to be
    running while nobody holds the lock is put down as failed, with the reason.
    """
    path = run_dir / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if summary["status"] != RUNNING or not _is_ours(summary.get("process")):
            return summary
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return _judged(run_dir, summary)


def write_summary(run_dir: Path, content: Mapping[str, Any]) -> None:
    """Replace a run's summary.json, whole or not at all."""
    with replacing(run_dir / "summary.json") as new:
        new.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", "utf-8")


def _judged(run_dir: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run that is said to be running, as it is."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now: dict[str, Any] = json.loads((run_dir / "summary.json").read_text("utf-8"))
        if now["status"] != RUNNING:  # it ended between the two looks
            return now
        rest = {key: value for key, value in summary.items() if key not in ("status", "process")}
        failed = {"status": FAILED, "reason": GONE, **rest}
        with suppress(OSError):  # somebody else's folder: told, though not written
            write_summary(run_dir, failed)
        return failed
    except OSError:  # the run has the lock; or there are none on this file system, and nobody can tell
        return summary
    finally:
        os.close(descriptor)


def _is_ours(process: Mapping[str, Any] | None) -> bool:
    """Tell whether a process is, or was, of this machine, where its lock can be seen."""
    if process is None:
        return True
    here = this_process()
    return any(process.get(key) == here[key] != "" for key in ("host", "boot"))
