"""A large model over slow links: seconds a round, bytes of each link, and the peak memory of each process.

    python -m studies.benchmarks.slow_link --values 100000000
    python -m studies.benchmarks.slow_link --values 100000000 --compression int8 --compression-down int8
    python -m studies.benchmarks.slow_link --values 250000000 --adapters 0.001
    python -m studies.benchmarks.slow_link --values 100000000 --fault cut-down --seconds 20

A SuperLink with keys, TLS and a database, and two SuperNodes, each behind a link of its own (``link.py``), run the
app in ``app``: its ClientApp adds whole numbers to the model, and nothing is trained. The command fails if the
model isn't what it must be. With ``--adapters`` this share of the values is trained, in float32, and the others are
float16, frozen, and sent once: numpy has no bfloat16.

``--fault`` hits the first device in the middle of the first round's download or upload: its link is cut for so many
``--seconds``, or its SuperNode is killed. A SuperNode that has ended is started again after 10 s, as by its systemd
unit. A round that goes on with the other device
alone leaves another model, which isn't an error then.

Memory is each process's peak of its resident set (VmHWM).
"""

import argparse
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.plan import SUPEREXEC
from studies.benchmarks.measure import ROOT, descendants
from studies.benchmarks.slow_link.link import Link
from studies.benchmarks.superlink import CLIENT_APP, SERVER_APP, command_of

APP = Path(__file__).with_name("app")
DEVICES = 2
POLL = 0.2  # seconds between two looks
RESTART_PAUSE = 10.0  # seconds, RestartSec of the units
FAULTS = ("cut-down", "cut-up", "kill-down")
LARGEST_ERROR = 1e-3  # of a value up to 1000 that int8 has a code for, after float32's rounding
LAST = 3000  # characters of a log that an error shows
MOST_LINES = 30  # warnings and errors that are kept


@dataclass(frozen=True)
class Case:
    """What is measured: the model, the link and what happens to it."""

    values: int
    adapters: float = 0.0
    delay: float = 0.05
    mbit: float = 50.0
    rounds: int = 2
    compression: str = "none"
    compression_down: str = "none"
    fault: str = ""
    seconds: float = 0.0
    round_timeout: float = 3600.0

    @property
    def down(self) -> int:
        """Bytes of the model in the first round's download."""
        width = 2 if self.adapters else 1 if self.compression_down == "int8" else 4
        return self.values * width

    @property
    def up(self) -> int:
        """Bytes of an update."""
        return int(self.values * (self.adapters or 1)) * (1 if self.compression == "int8" else 4)


@dataclass(frozen=True)
class Result:
    """The measurements of one run.

    Attributes
    ----------
    round_seconds : list of float
        Each round's, the first with the handshake.
    down, up : list of list of int
        By round, bytes of each device's link, TLS and all requests included.
    memory : dict of str to float
        By kind of process, the largest peak, in MiB.
    replies : list of int
        By round, the replies that count.
    error : float
        Largest difference of the last model's values from what they must be.
    log : list of str
        Warnings and errors of the run and of the first device, each once.
    """

    case: Case
    round_seconds: list[float]
    down: list[list[int]]
    up: list[list[int]]
    memory: dict[str, float]
    replies: list[int]
    error: float
    log: list[str]


@dataclass
class Watch:
    """Looks at a run: its events, the links' bytes at each, and the peaks of memory."""

    deployment: LocalDeployment
    links: Sequence[Link]
    events: Path
    seen: list[dict[str, Any]] = field(default_factory=list)
    passed: list[tuple[list[int], list[int]]] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)  # SuperNodes that aren't started again yet

    def look(self) -> None:
        """Note peaks of memory, and the bytes at each event since the last look."""
        for name, process in self.deployment.processes.items():
            for pid in descendants(process.pid):
                kind = kind_of(name, pid)
                self.memory[kind] = max(self.memory.get(kind, 0.0), peak(pid))
        found = read_lines(self.events)[len(self.seen) :]
        now = [link.down.passed for link in self.links], [link.up.passed for link in self.links]
        self.seen += found
        self.passed += [now] * len(found)

    def start_again(self) -> None:
        """Start each SuperNode that has ended, after a pause."""
        for device in self.deployment.deployment.devices:
            name = device.name
            if self.deployment.processes[name].poll() is None:
                self.ended_at.pop(name, None)
            elif time.monotonic() > self.ended_at.setdefault(name, time.monotonic()) + RESTART_PAUSE:
                self.deployment.start_supernode(name)

    @property
    def ended(self) -> bool:
        """Whether the ServerApp has written its last event."""
        return bool(self.seen) and "error" in self.seen[-1]


def measure(case: Case) -> Result:
    """Deploy, run and end everything.

    Raises
    ------
    RuntimeError
        If the run doesn't complete; the text ends with its log.
    """
    # The processes' apps import this checkout's library.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="slow-link-") as name, deployed(Path(name), case) as watch:
        folder = Path(name)
        config = {
            "num-server-rounds": case.rounds,
            "values": case.values,
            "adapters": case.adapters,
            "compression": case.compression,
            "compression-down": case.compression_down,
            "round-timeout": case.round_timeout,
            "events": str(watch.events),
        }
        with (folder / "run.log").open("wb") as log:
            stream = watch.deployment.start_run(APP, config, stdout=log, stderr=log)
        faults = hit(case, watch)
        while not watch.ended and (stream.poll() is None or watch.deployment.status() == "running"):
            next(faults, None)
            watch.look()
            watch.start_again()
            time.sleep(POLL)
        watch.look()
        printed = (folder / "run.log").read_text("utf-8", errors="replace")
        if not watch.ended:
            logs = [
                printed,
                *(path.read_text("utf-8", "replace") for path in folder.glob("deployment/*.log")),
            ]
            ends = "\n".join(each[-LAST:] for each in logs)
            raise RuntimeError(f"the run is {watch.deployment.status()}:\n{ends}")
        device = watch.deployment.log("device-0").read_text("utf-8", errors="replace")
        return summarise(case, watch, told(printed) + told(device))


@contextmanager
def deployed(folder: Path, case: Case) -> Iterator[Watch]:
    """Start a SuperLink and two devices, each behind a link, and end them."""
    nodes = [{"partition-id": part, "num-partitions": DEVICES} for part in range(DEVICES)]
    with ExitStack() as stack:
        deployment = stack.enter_context(LocalDeployment(folder / "deployment", nodes))
        links = []
        for device in deployment.deployment.devices:
            links.append(stack.enter_context(Link(deployment.deployment.port, case.delay, case.mbit)))
            service = deployment.services[device.name]
            own = {deployment.deployment.address: f"127.0.0.1:{links[-1].port}"}
            command = [own.get(each, each) for each in service.command]
            deployment.services[device.name] = replace(service, command=command)
        stack.callback(deployment.stop)  # before the links, which wait for their connections
        deployment.start()
        yield Watch(deployment, links, folder / "events.jsonl")


def hit(case: Case, watch: Watch) -> Iterator[None]:
    """Do what the case says to the first device, step by step."""
    if not case.fault:
        return
    link = watch.links[0]
    way, size = (link.up, case.up) if case.fault == "cut-up" else (link.down, case.down)
    while way.passed < size / 2:
        yield
    if case.fault == "kill-down":
        watch.deployment.kill("device-0")
    else:
        link.cut(case.seconds)


def summarise(case: Case, watch: Watch, log: list[str]) -> Result:
    """Tell what a run showed from its events: one before the rounds, one for each of them, the error."""
    *marks, last = watch.seen
    pairs = list(itertools.pairwise(marks))
    down, up = (
        [
            [now - before for before, now in zip(old[way], new[way], strict=True)]
            for old, new in itertools.pairwise(watch.passed[: len(marks)])
        ]
        for way in (0, 1)
    )
    return Result(
        case,
        [round(new["time"] - old["time"], 1) for old, new in pairs],
        down,
        up,
        {kind: round(most) for kind, most in watch.memory.items()},
        [int(mark.get("participants", 0)) for mark in marks[1:]],
        last["error"],
        log,
    )


def kind_of(name: str, pid: int) -> str:
    """Return what a process is, given the name of the deployment's process from which it descends."""
    command = command_of(pid)
    for mark, kind in ((SERVER_APP, "ServerApp"), (CLIENT_APP, "ClientApp")):
        if mark in command:
            return kind
    if name.endswith(SUPEREXEC):
        return "SuperExec"
    return "SuperLink" if name == "superlink" else "SuperNode"


def peak(pid: int) -> float:
    """Return the peak of a process's resident set in MiB, 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", errors="replace")
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) / 1024 if found else 0.0


def told(log: str) -> list[str]:
    """Return the warnings and errors of a log, each once."""
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in log.splitlines()]
    marks = ("WARNING", "ERROR", "the SuperNode")
    found = [
        re.sub(r"[\d.]+ seconds", "… seconds", " ".join(line.split()))
        for line in lines
        if any(mark in line for mark in marks)
    ]
    return list(dict.fromkeys(found))[:MOST_LINES]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON Lines file, none if it isn't there yet."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def keep(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to those of earlier calls in a file."""
    rows = json.loads(path.read_text("utf-8")) if path.exists() else []
    path.write_text(json.dumps([*rows, row], indent=1) + "\n", "utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=int, default=100_000_000, help="of the model")
    parser.add_argument(
        "--adapters", type=float, default=0.0, help="share of the values that is trained; 0: all"
    )
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, each way")
    parser.add_argument("--mbit", type=float, default=50.0, help="Mbit/s, each way")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compression", default="none", help="of updates")
    parser.add_argument("--compression-down", default="none", help="of models")
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the fault")
    parser.add_argument("--round-timeout", type=float, default=3600.0)
    parser.add_argument("--json", type=Path, help="keep the figures there, with those of earlier calls")
    options = vars(parser.parse_args(arguments))
    path = options.pop("json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the processes end, too
    found = measure(Case(**options))
    row = asdict(found)
    print(json.dumps(row, indent=1))
    if path:
        keep(path, row)
    rounded = "int8" in (found.case.compression, found.case.compression_down)
    if found.error > (LARGEST_ERROR if rounded else 0) and not found.case.fault:
        sys.exit(f"error: a value of the model is off by {found.error}")


if __name__ == "__main__":
    main()
