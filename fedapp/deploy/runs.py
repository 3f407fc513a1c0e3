"""Runs of a deployment: started, stopped, and how far they are, as Flower's command line and a run's log tell."""

import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedapp.deploy.files import CONNECTION
from fedapp.deploy.flower import ask, flwr
from fedapp.deploy.plan import DeployError

LOG_TIMEOUT = 30.0  # seconds; the log of a run that has said nothing yet keeps the command waiting
WHOLE_LOG_TIMEOUT = 300.0  # seconds, where nothing can be done without the log
NONE = "N/A"  # Flower's text for a time or details that don't exist
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The server logs a line of progress about once a minute, and a round after some of the aggregations, no more often.
_PROGRESS = re.compile(
    r"progress: aggregation (?P<done>\d+) of (?P<of>\d+), (?P<busy>\d+) of (?P<all>\d+) devices at work"
    r"(?:, (?P<left>.+) left)?\s*$"
)
_ROUND = re.compile(r"\b(?:round|aggregation) (?P<done>\d+) of (?P<of>\d+): ")
_FOLDER = re.compile(r"Recording this run in (.+?)\s*$")


@dataclass(frozen=True)
class RunProgress:
    """The latest progress in a run's log; what isn't known is empty or 0.

    Attributes
    ----------
    aggregation, of : int
        Number of aggregations so far, and of all.
    num_busy, devices : int
        Number of devices at work, and of all.
    time_left : str
        How much longer the run will take, hours:minutes:seconds.
    """

    aggregation: int = 0
    of: int = 0
    num_busy: int = 0
    devices: int = 0
    time_left: str = ""

    @classmethod
    def read(cls, log: list[str]) -> "RunProgress":
        """Read the latest progress from a log's lines."""
        earlier = cls()
        for line in reversed(log):
            if found := _PROGRESS.search(line):
                done, of, busy, devices = (int(found[name]) for name in ("done", "of", "busy", "all"))
                # A later line may have a higher number of aggregations.
                return cls(max(done, earlier.aggregation), of, busy, devices, found["left"] or "")
            if not earlier.of and (found := _ROUND.search(line)):
                earlier = cls(int(found["done"]), int(found["of"]))
        return earlier


@dataclass(frozen=True)
class DeployedRun:
    """A run of a deployment.

    Attributes
    ----------
    run_id, status, details : str
        In Flower's words; the status is such as ``running`` or ``finished:completed``.
    asked_for : str
        When somebody asked for the run, UTC.
    elapsed : float
        Seconds since it began, or that it took; 0 before it begins.
    log : list of str
        The lines of the ServerApp's log so far.
    """

    run_id: str
    status: str
    details: str
    asked_for: str
    elapsed: float
    log: list[str]

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.status.startswith("finished")

    @property
    def is_waiting(self) -> bool:
        """Whether the ServerApp's process hasn't started yet."""
        return self.status in ("pending", "starting")

    @property
    def folder(self) -> str:
        """The run's folder on the server, which ``resume`` takes; empty until the log names it."""
        return next((found[1] for line in self.log if (found := _FOLDER.search(line))), "")

    @property
    def progress(self) -> RunProgress:
        """The latest progress in the log."""
        return RunProgress.read(self.log)

    def remark(self, node_id: str) -> str:
        """Return the last line that names a node, without its level."""
        named = re.compile(rf"\bnode {node_id}\b")
        line = next((line for line in reversed(self.log) if named.search(line)), "")
        return re.sub(r"^[A-Z]+\s*:\s+", "", line)


def present_runs(out: Path) -> list[DeployedRun]:
    """Return the runs that haven't ended; if all have, the last one.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached.
    """
    listed, going = _listed(out)
    return [_read(out, run) for run in going or listed[:1]]


def run_of(out: Path, run_id: str = "") -> DeployedRun:
    """Return a run by its number, by default the last one.

    Raises
    ------
    DeployError
        If there is no such run, or the SuperLink or the run's log can't be reached.
    """
    listed, _ = _listed(out)
    found = [run for run in listed if run_id in ("", run["run-id"])]
    if not found:
        raise DeployError(
            f"run {run_id}: the SuperLink has no such run" if run_id else "the SuperLink has no run"
        )
    return _of(found[0], _log(out, found[0], WHOLE_LOG_TIMEOUT))


def ended_runs(out: Path) -> list[tuple[str, str]]:
    """Return the number and the status of each run that has ended, the oldest first.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached.
    """
    listed, _ = _listed(out)
    return [
        (run["run-id"], run["status"]) for run in reversed(listed) if run["status"].startswith("finished")
    ]


def start(out: Path, app: Path, config: Mapping[str, Any]) -> str:
    """Start a run of an app, and return its id.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached, or refuses it.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(tomli_w.dumps(dict(config)))
        file.flush()
        answer = ask(out, "run", str(app), "--run-config", file.name)
    return str(answer["run-id"])


def stop(out: Path, run_id: str = "") -> str:
    """Stop a run, by default the only one that hasn't ended, and return its id.

    Raises
    ------
    DeployError
        If there is no such run; without an id, if no run goes, or several do.
    """
    if not run_id:
        going = [run["run-id"] for run in _listed(out)[1]]
        if len(going) != 1:
            raise DeployError(f"stop: which run? {' and '.join(going)} go" if going else "stop: no run goes")
        run_id = going[0]
    ask(out, "stop", run_id)
    return run_id


def _listed(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all runs, and the runs that haven't ended, each the newest first, in Flower's words."""
    listed = ask(out, "list")["runs"]
    return listed, [run for run in listed if not run["status"].startswith("finished")]


def _read(out: Path, said: Mapping[str, Any]) -> DeployedRun:
    try:
        text = _log(out, said, LOG_TIMEOUT)
    except DeployError:
        text = ""
    return _of(said, text)


def _log(out: Path, said: Mapping[str, Any], seconds: float) -> str:
    return flwr(out, "log", said["run-id"], CONNECTION, "--show", seconds=seconds)


def _of(said: Mapping[str, Any], text: str) -> DeployedRun:
    log = [message_of(line) for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    details = said["status-details"].replace(NONE, "")
    return DeployedRun(said["run-id"], said["status"], details, said["pending-at"], said["elapsed"], log)


def message_of(line: str) -> str:
    """Return the message in a line of the log, which is JSON with ``log-format = "json"``."""
    if line.startswith("{"):
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["message"])
    return line
