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
NONE = "N/A"  # Flower's for no time and no details
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# The server logs the first about once a minute, the second after some of the aggregations, as often at most.
_PROGRESS = re.compile(
    r"progress: aggregation (?P<done>\d+) of (?P<of>\d+), (?P<busy>\d+) of (?P<all>\d+) devices at work"
    r"(?:, (?P<left>.+) left)?\s*$"
)
_ROUND = re.compile(r"\b(?:round|aggregation) (?P<done>\d+) of (?P<of>\d+): ")
_FOLDER = re.compile(r"Recording this run in (.+?)\s*$")


@dataclass(frozen=True)
class RunProgress:
    """How far a run was when its log last said so; what isn't known is empty or 0.

    Attributes
    ----------
    aggregation, of : int
        How many aggregations there were, of how many.
    at_work, devices : int
        How many devices were at work, of how many.
    time_left : str
        How much longer the run will take, hours:minutes:seconds.
    """

    aggregation: int = 0
    of: int = 0
    at_work: int = 0
    devices: int = 0
    time_left: str = ""

    @classmethod
    def read(cls, log: list[str]) -> "RunProgress":
        """Read the last of it out of a log's lines."""
        earlier = cls()
        for line in reversed(log):
            if found := _PROGRESS.search(line):
                done, of, busy, devices = (int(found[name]) for name in ("done", "of", "busy", "all"))
                # A later line may have said that there are more aggregations.
                return cls(max(done, earlier.aggregation), of, busy, devices, found["left"] or "")
            if not earlier.of and (found := _ROUND.search(line)):
                earlier = cls(int(found["done"]), int(found["of"]))
        return earlier


@dataclass(frozen=True)
class DeployedRun:
    """A run.

    Attributes
    ----------
    run_id, status, details : str
        In Flower's words; the status is such as ``running`` or ``finished:completed``.
    asked_for : str
        When it was, UTC.
    elapsed : float
        Seconds since it began, or that it took; 0 before it begins.
    log : list of str
        What its server said so far, empty if nothing yet.
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
        """Whether its server's process isn't there yet."""
        return self.status in ("pending", "starting")

    @property
    def folder(self) -> str:
        """Where it is recorded on the server, which is what ``resume`` takes; empty if it hasn't said so."""
        return next((found[1] for line in self.log if (found := _FOLDER.search(line))), "")

    @property
    def progress(self) -> RunProgress:
        """How far it is."""
        return RunProgress.read(self.log)

    def remark(self, node_id: str) -> str:
        """Return the last line that names a node, without its level."""
        named = re.compile(rf"\bnode {node_id}\b")
        line = next((line for line in reversed(self.log) if named.search(line)), "")
        return re.sub(r"^[A-Z]+\s*:\s+", "", line)


def present_runs(out: Path) -> list[DeployedRun]:
    """Return the runs that go, or the last one that there was.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached.
    """
    listed, going = _listed(out)
    return [_read(out, run) for run in going or listed[:1]]


def ended_runs(out: Path) -> list[tuple[str, str]]:
    """Return the number and the status of each run that has ended, the first first.

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
    """Stop a run, by default the one that goes, and return its id.

    Raises
    ------
    DeployError
        If there is no such run, or none goes, or several.
    """
    if not run_id:
        going = [run["run-id"] for run in _listed(out)[1]]
        if len(going) != 1:
            raise DeployError(f"stop: which run? {' and '.join(going)} go" if going else "stop: no run goes")
        run_id = going[0]
    ask(out, "stop", run_id)
    return run_id


def _listed(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all runs, the newest first, and those that go, in Flower's words."""
    listed = ask(out, "list")["runs"]
    return listed, [run for run in listed if not run["status"].startswith("finished")]


def _read(out: Path, said: Mapping[str, Any]) -> DeployedRun:
    try:
        text = flwr(out, "log", said["run-id"], CONNECTION, "--show", seconds=LOG_TIMEOUT)
    except DeployError:
        text = ""
    log = [message_of(line) for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    details = said["status-details"].replace(NONE, "")
    return DeployedRun(said["run-id"], said["status"], details, said["pending-at"], said["elapsed"], log)


def message_of(line: str) -> str:
    """Return what a line of the log says, where it is one of ``log-format = "json"`` too."""
    if line.startswith("{"):
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["message"])
    return line
