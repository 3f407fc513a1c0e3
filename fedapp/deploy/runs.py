"""Runs of a deployment: started, stopped, kept going, and how far they are, as Flower's commands and a log tell."""

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedapp.config import ConfigError, RunConfig
from fedapp.deploy.audit import FILE, audited
from fedapp.deploy.files import CONNECTION, read_deployment
from fedapp.deploy.flower import ask, flwr
from fedapp.deploy.given import read_given
from fedapp.deploy.nodes import registered_nodes
from fedapp.deploy.plan import DeployError, relay_socket
from fedapp.deploy.seal import entries, sign_ends

LOG_TIMEOUT = 30.0  # seconds; the log of a run that has said nothing yet keeps the command waiting
WHOLE_LOG_TIMEOUT = 300.0  # seconds, where nothing can be done without the log
RELAY = "relay"  # the command that keeps a region's run going, in the audit
LOOK = 30.0  # seconds between two looks at a region's run
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


def statuses(out: Path) -> dict[str, str]:
    """Return the status of each run by its number, in Flower's words.

    Raises
    ------
    DeployError
        If the SuperLink can't be reached.
    """
    return {str(run["run-id"]): str(run["status"]) for run in _listed(out)[0]}


def is_going(status: str) -> bool:
    """Return True if a run of this status goes, or will."""
    return status.partition(":")[0] in ("pending", "starting", "running")


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


# ---- The run of a region, whose devices answer as one device of another SuperLink -----------------------------


def region_config(out: Path, texts: list[str] | None) -> dict[str, Any]:
    """Return the config of a region's run.

    Raises
    ------
    ConfigError
        If a key isn't one that the run of a region reads.
    DeployError
        If there is no deployment.
    """
    deployment = read_deployment(out)
    given = read_given(texts).values
    config = {
        "relay": relay_socket(deployment.home),
        "min-clients": len(deployment.devices),
        **({"tiers": "relays"} if deployment.has_relays else {}),
        **given,
    }
    if not config["relay"]:
        raise ConfigError("relay = '': must be the path of a socket on the region's server")
    RunConfig.load(config)
    return config


def keep_going(out: Path, app: Path, config: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
    """Start the run of a region, and start it again whenever it ends, until an interrupt, which stops it.

    A run that an earlier call started, and that still goes, is kept.

    Raises
    ------
    DeployError
        If the first look at the SuperLink fails, or the run can't be stopped at the end.
    """
    run_id = _earlier(out)
    say(f"run {run_id} of the region goes already" if run_id else "starting the region's run")
    try:
        while True:
            try:
                run_id = _going_run(out, app, config, run_id, say)
            except DeployError as error:
                say(f"the region's SuperLink can't be asked, and is asked again in {LOOK:g} s: {error}")
            time.sleep(LOOK)
    except KeyboardInterrupt:
        if run_id:
            with audited(out, RELAY, run=run_id) as audit:
                stop(out, run_id)
                audit.record("stopped", run=run_id)
            sign_ends(out, ended_runs(out))
            say(f"run {run_id} of the region is stopped")


def _earlier(out: Path) -> str:
    """Return the run that an earlier call started and that still goes; empty if there is none."""
    known = entries(out) if (out / FILE).exists() else []
    started = [entry for entry in known if entry.get("command") == RELAY]
    run_id = next((str(entry.get("run", "")) for entry in reversed(started) if "run" in entry), "")
    return run_id if run_id and is_going(statuses(out).get(run_id, "")) else ""


def _going_run(
    out: Path, app: Path, config: Mapping[str, Any], run_id: str, say: Callable[[str], None]
) -> str:
    """Return the region's run; another one, which is started, if there is none or it has ended."""
    if run_id:
        status = statuses(out).get(run_id, "unknown to the SuperLink")
        if is_going(status):
            return run_id
        say(f"run {run_id} of the region is {status}: it is started again")
    with audited(out, RELAY) as audit:
        told = registered_nodes(out, read_deployment(out))  # devices may have been added
        run_id = start(out, app, {"clock": "wall", "registered-nodes": told, **config})
        audit.record("started", run=run_id)
    say(f"run {run_id} of the region is started")
    return run_id
