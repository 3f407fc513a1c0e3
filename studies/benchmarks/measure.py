"""Run a contender in a process of its own: how long it takes, and how much memory it and its children hold."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from studies.benchmarks.job import Job, Log

ROOT = Path(__file__).parents[2]
POLL = 0.5  # seconds between two looks at the memory
LINES = 25  # last lines of a failed contender's output that are shown


class ContenderError(RuntimeError):
    """A contender failed or took too long; the text says which, and ends with what it printed last."""


@dataclass(frozen=True)
class Measurement:
    """The measurements of one run.

    Attributes
    ----------
    seconds : float
        Seconds per aggregation, without the first ``warmup`` and the last.
    startup : float
        Seconds from the start of the process to the first aggregation, plus the extra time of the first ones.
    memory : int
        Bytes: largest sum of the resident sets of all processes of the contender; pages that its processes share
        count in each of them.
    accuracy : dict
        Accuracy by aggregation.
    """

    seconds: float
    startup: float
    memory: int
    accuracy: dict[int, float]


def measure(kind: str, job: Job, warmup: int, timeout: float) -> Measurement:
    """Run ``job`` as contender ``kind``; the first ``warmup`` aggregations and the last don't count.

    The last is left out for the evaluation that belongs to it.

    Raises
    ------
    ContenderError
        If its process fails or takes longer than ``timeout`` seconds.
    """
    with TemporaryDirectory() as folder:
        job_path, log_path, output_path = (
            Path(folder, name) for name in ("job.json", "log.json", "output.txt")
        )
        job.write(job_path)
        command = [sys.executable, "-m", "studies.benchmarks.contender", kind, str(job_path), str(log_path)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        began = time.time()
        with output_path.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                memory = _watch(process, began + timeout)
            finally:
                _end(process)
        if process.returncode != 0 or not log_path.is_file():
            how = "took longer than" if time.time() > began + timeout else "failed within"
            last = output_path.read_text("utf-8", errors="replace").splitlines()[-LINES:]
            raise ContenderError(f"{kind} {how} {time.time() - began:.0f} s:\n" + "\n".join(last))
        return summarise(Log.read(log_path), began, memory, warmup)


def summarise(log: Log, began: float, memory: int, warmup: int) -> Measurement:
    """Tell start-up and steady state apart; ``began`` is when the process was started (``time.time()``)."""
    first, last = warmup, len(log.marks) - 2
    if last <= first:
        raise ValueError(f"{len(log.marks) - 1} aggregations: {warmup + 2} or more are needed to time them")
    seconds = (log.marks[last] - log.marks[first]) / (last - first)
    startup = max(0.0, log.marks[first] - began - first * seconds)
    return Measurement(seconds, startup, memory, log.accuracy)


def _watch(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Wait for a process; return the most memory that it and its descendants held, in bytes."""
    most = 0
    while time.time() < deadline:
        family = descendants(process.pid)
        most = max(most, sum(resident(pid) for pid in family))
        # wait4 knows the exact peak of a process that is alone.
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return max(most, usage.ru_maxrss * 1024)
        time.sleep(POLL)
    return most


def descendants(root: int) -> list[int]:
    """Return a process and all that descend from it, by process id; on Linux, elsewhere only the process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may contain anything.
            parent = int(path.read_text("utf-8", errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    family, unseen = [root], [root]
    while unseen:
        found = children.get(unseen.pop(), [])
        family += found
        unseen += found
    return family


def resident(pid: int) -> int:
    """Return the resident set of a process in bytes, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs of a contender."""
    if process.returncode is not None:
        return
    for pid in reversed(descendants(process.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
