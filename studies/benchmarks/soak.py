"""A long run on one SuperLink: does memory stay, does no task get stuck, does every device have its share?

    nice -n 10 python -m studies.benchmarks.soak --devices 64 --minutes 30

A SuperLink with keys, TLS and a database, and light devices (``light_devices.py``) of which the slowest takes 5/3 as
long for a task as the fastest, train by ``async-fedavg``, by default for half an hour. The command fails if

- the SuperLink's or the ServerApp's median memory (RSS) of the last third is more than 5 % above that of the first;
- a task took longer than two of the device's and two minutes more, or didn't end with an update that counts;
- a device's share of all that moved the model isn't within 10 % of its due p_i, the same for every device here.

The first evaluation after the initial model's begins the first third: before it processes start and devices describe
themselves. A device's share is short by what it did since its last update, so that minutes must be many times its
task's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fedapp.deploy.local import LocalDeployment
from fedapp.report.client_tables import last_clients, read_tasks
from fedapp.report.files import RUNNING, read_summary
from strategies.clients.client_statistics import ACCEPTED, UNDER_WAY
from studies.benchmarks.light_devices import task_seconds
from studies.benchmarks.measure import ROOT, descendants, resident
from studies.benchmarks.superlink import SERVER_APP, command_of, cpu_seconds, deployed, rounds_in

PROCESSES = ("SuperLink", "ServerApp")
LOOK = 5.0  # seconds between two looks at the processes
MORE_MEMORY = 0.05  # of the first third's
SHARE_OFF = 0.1  # of a device's due
LATE = 120.0  # seconds beyond two task times of a device after which a task is stuck
FEWEST = 9  # looks
START = 600.0  # seconds beyond its time in which a run must begin and end


@dataclass(frozen=True)
class Look:
    """Seconds since the first look, resident sets in MiB, and CPU seconds so far, by process of ``PROCESSES``."""

    seconds: float
    memory: dict[str, float]
    cpu: dict[str, float]


@dataclass(frozen=True)
class Soak:
    """What a soak showed.

    Attributes
    ----------
    minutes : float
        Between the first look and the last.
    memory : dict
        By process, median resident sets of the first and the last third, MiB.
    cpu : dict
        By process, CPU seconds per second.
    updates : int
        Updates that count.
    stuck : list of str
        The tasks that are stuck or didn't end with an update that counts, one text each.
    longest : float
        Seconds of the longest task that ended.
    shares : tuple
        The smallest and the largest share of a device, in dues.
    """

    devices: int
    minutes: float
    memory: dict[str, tuple[float, float]]
    cpu: dict[str, float]
    updates: int
    stuck: list[str]
    longest: float
    shares: tuple[float, float]

    def problems(self) -> list[str]:
        """Return what isn't as it should be, one line each."""
        found = [
            f"{name}: {last:.0f} MiB in the last third, {first:.0f} in the first"
            for name, (first, last) in self.memory.items()
            if last > (1 + MORE_MEMORY) * first
        ]
        least, most = self.shares
        if not 1 - SHARE_OFF <= least <= most <= 1 + SHARE_OFF:  # also if one is NaN
            found.append(f"shares of devices are {least:.2f} to {most:.2f} of their due")
        return found + self.stuck

    def text(self) -> str:
        """Return the figures, a line each."""
        lines = [f"{self.devices} devices, {self.minutes:.0f} minutes, {self.updates} updates"]
        for name, (first, last) in self.memory.items():
            change = 100 * (last / first - 1)
            lines.append(
                f"{name}: {first:.0f} MiB in the first third, {last:.0f} in the last ({change:+.1f} %), "
                f"{1000 * self.cpu[name]:.0f} CPU ms a second"
            )
        lines.append(f"longest task: {self.longest:.0f} s; stuck or without an update: {len(self.stuck)}")
        lines.append(f"shares: {self.shares[0]:.2f} to {self.shares[1]:.2f} of the due")
        return "\n".join(lines)


def soak(devices: int, minutes: float, mean_seconds: float) -> Soak:
    """Deploy, run for so many minutes, and end everything; ``mean_seconds`` is the mean length of a task.

    Raises
    ------
    RuntimeError
        If the run doesn't begin, or doesn't end in time; the text ends with its log.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        run = folder / "run"
        config = {
            "strategy": "async-fedavg",
            "clock": "wall",
            "min-clients": devices,
            "num-server-rounds": 10**6,
            "time-budget": 60 * minutes,
            "eval-every": max(devices // 4, 1),
            "model": "logistic",
            "partitioner": "iid",
            "min-samples": 1,
            "figures": False,
            "results-dir": name,
            "run-name": run.name,
        }
        with deployed(folder, devices, True, "", "--task-seconds", str(mean_seconds)) as (deployment, _):
            log_path = folder / "run.log"
            with log_path.open("wb") as log:
                stream = deployment.start_run(ROOT, config, stdout=log, stderr=log)
            looks = watch(deployment, stream, run, START + 60 * minutes)
        status = read_summary(run).get("status", "not begun")
        if status != "finished" or len(looks) < FEWEST:
            raise RuntimeError(
                f"the run is {status}, after {len(looks)} looks at its processes:\n"
                + log_path.read_text("utf-8")[-3000:]
            )
        return summarise(looks, read_tasks(run), last_clients(run), mean_seconds)


def watch(
    deployment: LocalDeployment, stream: subprocess.Popen[bytes], run: Path, timeout: float
) -> list[Look]:
    """Look at the processes from the second evaluation to the end of the run, at most ``timeout`` seconds."""
    looks: list[Look] = []
    began = time.monotonic()
    while time.monotonic() < began + timeout:
        status = read_summary(run).get("status")
        # The stream of a run's log may break off earlier than the run ends.
        unborn = status is None and stream.poll() is not None and deployment.status().startswith("finished")
        if unborn or status not in (None, RUNNING):
            break
        if rounds_in(run / "metrics.jsonl") >= 2:
            family = descendants(deployment.processes["superexec"].pid)
            pids = {
                "SuperLink": [deployment.processes["superlink"].pid],
                "ServerApp": [pid for pid in family if SERVER_APP in command_of(pid)],
            }
            memory = {name: sum(map(resident, found)) / 2**20 for name, found in pids.items()}
            cpu = {name: cpu_seconds(found) for name, found in pids.items()}
            if all(memory.values()):  # the ServerApp ends a little later than the run
                looks.append(Look(time.monotonic() - began, memory, cpu))
        time.sleep(LOOK)
    return looks


def summarise(
    looks: Sequence[Look], tasks: pa.Table, clients: Mapping[str, Sequence[float]], mean_seconds: float
) -> Soak:
    """Tell what a soak showed from the looks at its processes, its tasks, and its clients at the last evaluation."""
    shares = np.array(clients["observed-share"]) / clients["importance"]
    devices, third = len(shares), len(looks) // 3
    first, last = looks[0], looks[-1]
    memory = {
        name: tuple(
            statistics.median(each.memory[name] for each in part) for part in (looks[:third], looks[-third:])
        )
        for name in PROCESSES
    }
    seconds = last.seconds - first.seconds
    cpu = {name: (last.cpu[name] - first.cpu[name]) / seconds for name in PROCESSES}
    stuck, longest, updates = [], 0.0, 0
    for task in tasks.to_pylist():
        client, outcome, took = task["client"], task["outcome"], task["ended"] - task["began"]
        if outcome != UNDER_WAY:
            longest = max(longest, took)
        updates += outcome == ACCEPTED
        if took > 2 * task_seconds(mean_seconds, client, devices) + LATE or outcome not in (
            ACCEPTED,
            UNDER_WAY,
        ):
            stuck.append(f"client {client}: a task of {took:.0f} s, {outcome}")
    return Soak(
        devices,
        seconds / 60,
        memory,
        cpu,
        updates,
        stuck,
        longest,
        (float(shares.min()), float(shares.max())),
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--task-seconds", type=float, default=180.0, help="mean length of a task")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args(arguments)
    if options.devices < 1 or options.minutes <= 0 or options.task_seconds <= 0:
        parser.error("--devices, --minutes and --task-seconds must be > 0")
    found = soak(options.devices, options.minutes, options.task_seconds)
    print(found.text())
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=1) + "\n", "utf-8")
    if problems := found.problems():
        sys.exit("error: " + "\n".join(problems))


if __name__ == "__main__":
    main()
