"""The load of one SuperLink: rounds of this app on a deployment of this machine, per number of devices and model.

    python -m studies.benchmarks.superlink --nodes 2 4 8 16
    python -m studies.benchmarks.superlink --workers --nodes 2 4 8
    python -m studies.benchmarks.superlink --light --nodes 16 64 256 --models logistic mlp-1m resnet18
    python -m studies.benchmarks.superlink --light --unpacked --requests --nodes 4

With keys, TLS and a database, as on real devices (``fedapp deploy local``). By default each device is a SuperNode of
its own, which starts a ClientApp process for every message, and all of them share this machine's cores with the
SuperLink: seconds per round say little about real devices, which have cores of their own. With ``--light`` the
devices are threads of one process that speak the same protocol and answer at once, so that the SuperLink is what a
round waits for. CPU seconds of the SuperLink's process don't depend on who runs beside it.

With ``--workers`` each device has one, which does the work of those processes. ``--unpacked`` light devices take
models as Flower sends them, an object for each array. ``--requests`` has the SuperLink log every request, and counts
them.

An exchange is a request to a device and its reply. Memory is resident sets (RSS), the largest sum seen.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.deploy.local import LocalDeployment
from fedapp.deploy.plan import SUPEREXEC, WORKER
from fedapp.report.figures import INK, TEST, TRAIN, new_figure, save, style_axes
from strategies import streams
from studies.benchmarks.measure import ROOT, descendants, resident

WIDE = 8_000  # features of the generated vectors
SAMPLES = 640
IMAGES = 64  # generated ones, 32 × 32 in colour: the server evaluates on some of them
MODELS: dict[str, dict[str, Any]] = {
    "logistic": {"model": "logistic"},  # on the embedded digits, 650 parameters
    "mlp-1m": {"model": "mlp", "dataset": "npz"},  # on vectors, 8000-128-10: 1,025,418 parameters
    "resnet18": {"model": "resnet18", "dataset": "npz"},  # on images, 11,181,642 parameters in 62 arrays
}
POLL = 0.25  # seconds between two looks at the processes
IDLE = 20.0  # seconds after the run in which devices only ask for messages
TIMEOUT = 900.0  # seconds of a run
TICK = os.sysconf("SC_CLK_TCK")
SERVER_APP, CLIENT_APP = "flwr-serverapp", "flwr-clientapp"
# The requests of an exchange: messages, their objects, and confirmations; polls aren't counted.
REQUEST = re.compile(
    rb"POST /v1/(?:fleet|runtime)/(?:push-messages|push-object|pull-object|confirm-message-received)"
)


@dataclass(frozen=True)
class Mark:
    """The time at which a round was reported (seconds), CPU seconds so far by process, and requests so far."""

    time: float
    superlink: float
    server_app: float
    devices: float
    requests: int = 0


@dataclass(frozen=True)
class Result:
    """The measurements of one deployment; CPU seconds, and memory in MiB (0 without such a process).

    Attributes
    ----------
    round_seconds : float
        Median over the rounds after the first.
    superlink_cpu, server_app_cpu, device_cpu : float
        Per exchange, after the first round.
    idle_cpu : float
        CPU seconds of the SuperLink per second and device that waits for work.
    memory : dict
        Largest resident set of the SuperLink, its SuperExec and the ServerApp, and of one device's SuperNode (with
        its SuperExec), ClientApp and worker.
    database : float
        The SuperLink's database while it runs, its log included.
    kind : str
        Kind of the devices: ``workers``, ``unpacked``, or empty.
    requests : float
        Requests to the SuperLink per exchange, after the first round, without polls; 0 if they weren't counted.
    """

    devices: int
    light: bool
    model: str
    round_seconds: float
    superlink_cpu: float
    server_app_cpu: float
    device_cpu: float
    idle_cpu: float
    memory: dict[str, float]
    database: float
    kind: str = ""
    requests: float = 0.0


@dataclass
class Watch:
    """Looks at the processes of a deployment, as often as it is asked."""

    deployment: LocalDeployment
    light: subprocess.Popen[bytes] | None
    metrics: Path
    marks: list[Mark] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    database: float = 0.0

    def look(self) -> None:
        """Note the memory, and the time of each round that was reported since the last look."""
        processes = self.deployment.processes
        superlink = self.superlink
        server = descendants(processes["superexec"].pid)
        server_app = [pid for pid in server if SERVER_APP in command_of(pid)]
        self._note("SuperLink", [superlink])
        self._note("SuperExec", set(server) - set(server_app))
        self._note("ServerApp", server_app)
        devices = []
        for device in self.deployment.deployment.devices:
            own = [
                processes[name].pid
                for name in (device.name, f"{device.name}-{SUPEREXEC}")
                if name in processes
            ]
            family = {pid for root in own for pid in descendants(root)}
            client_app = [pid for pid in family if CLIENT_APP in command_of(pid)]
            self._note("SuperNode", family - set(client_app))
            self._note("ClientApp", client_app)
            if (worker := processes.get(f"{device.name}-{WORKER}")) is not None:
                self._note("worker", [worker.pid])
                own.append(worker.pid)
            devices += own
        files = self.deployment.folder.glob("superlink/superlink.db*")
        self.database = max(self.database, sum(file.stat().st_size for file in files) / 2**20)
        if rounds_in(self.metrics) > len(self.marks):
            roots = [self.light.pid] if self.light else devices
            mark = Mark(
                time.monotonic(),
                cpu_seconds([superlink]),
                cpu_seconds(server_app),
                cpu_seconds(pid for root in roots for pid in descendants(root)),
                len(REQUEST.findall(self.deployment.log("superlink").read_bytes())),
            )
            self.marks += [mark] * (rounds_in(self.metrics) - len(self.marks))

    @property
    def superlink(self) -> int:
        """The SuperLink's process id."""
        return self.deployment.processes["superlink"].pid

    def _note(self, name: str, pids: Iterable[int]) -> None:
        self.memory[name] = max(self.memory.get(name, 0.0), sum(resident(pid) for pid in pids) / 2**20)


def measure(devices: int, light: bool, model: str, rounds: int, kind: str = "") -> Result:
    """Deploy, run and end everything; ``rounds`` after the first are measured."""
    with (
        tempfile.TemporaryDirectory(prefix="superlink-") as folder,
        deployed(Path(folder), devices, light, kind) as (deployment, driver),
    ):
        config = {
            **MODELS[model],
            "clock": "wall",
            "min-clients": devices,
            "num-server-rounds": rounds + 1,
            "partitioner": "iid",
            "min-samples": 1,
            "checkpoint-every": 0,
            "round-timeout": TIMEOUT,
            "results-dir": folder,
            "run-name": "run",
        }
        if config.get("dataset") == "npz":
            write = write_images if model == "resnet18" else write_vectors
            config["data-path"] = str(write(Path(folder)))
        watch = Watch(deployment, driver, Path(folder, "run", "metrics.jsonl"))
        with Path(folder, "run.log").open("wb") as log:
            stream = deployment.start_run(ROOT, config, stdout=log, stderr=log)
        deadline = time.monotonic() + TIMEOUT
        while stream.poll() is None and time.monotonic() < deadline:
            watch.look()
            time.sleep(POLL)
        if len(watch.marks) < rounds + 2:  # one for the initial model
            raise RuntimeError(f"the run didn't complete:\n{Path(folder, 'run.log').read_text()[-2000:]}")
        before = cpu_seconds([watch.superlink])
        time.sleep(IDLE)
        idle = (cpu_seconds([watch.superlink]) - before) / IDLE / devices
        return summarise(watch, devices, driver is not None, model, idle, kind)


def summarise(watch: Watch, devices: int, light: bool, model: str, idle: float, kind: str = "") -> Result:
    """Tell what an exchange costs from the marks of a run: the initial model's, the first round's, the others'."""
    first, last = watch.marks[1], watch.marks[-1]
    exchanges = devices * (len(watch.marks) - 2)
    seconds = [later.time - mark.time for mark, later in zip(watch.marks[1:], watch.marks[2:], strict=False)]
    return Result(
        devices,
        light,
        model,
        statistics.median(seconds),
        (last.superlink - first.superlink) / exchanges,
        (last.server_app - first.server_app) / exchanges,
        (last.devices - first.devices) / exchanges,
        idle,
        watch.memory,
        watch.database,
        kind,
        (last.requests - first.requests) / exchanges,
    )


@contextmanager
def deployed(
    folder: Path, devices: int, light: bool, kind: str, *options: str
) -> Iterator[tuple[LocalDeployment, subprocess.Popen[bytes] | None]]:
    """Start a SuperLink and devices, and end them; return the process of the light ones, told ``options``, too."""
    nodes = [{"partition-id": part, "num-partitions": devices} for part in range(devices)]
    with LocalDeployment(folder / "deployment", nodes, workers=kind == "workers") as deployment:
        if not light:
            deployment.start()
            yield deployment, None
            return
        deployment.start_superlink()
        deployment.start_superexec()
        deployment.wait_for_superlink()
        command = [sys.executable, "-m", "studies.benchmarks.light_devices", str(deployment.folder), *options]
        command += ["--unpacked"] * (kind == "unpacked")
        with deployment.log("light").open("wb") as log:
            driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            yield deployment, driver
        finally:
            driver.kill()
            driver.wait()


def write_vectors(folder: Path) -> Path:
    """Write a dataset of long vectors, for a large model that is quick to train."""
    rng = streams.generator(0, "device-rows")
    x = rng.normal(size=(SAMPLES, WIDE)).astype(np.float32)
    np.savez(folder / "vectors.npz", x_train=x, y_train=np.arange(SAMPLES) % 10)
    return folder / "vectors.npz"


def write_images(folder: Path) -> Path:
    """Write a dataset of a few small images, for a model that is only sent to and fro."""
    rng = streams.generator(0, "device-images")
    x = rng.integers(0, 256, size=(IMAGES, 32, 32, 3)).astype(np.uint8)
    np.savez(folder / "images.npz", x_train=x, y_train=np.arange(IMAGES) % 10)
    return folder / "images.npz"


def rounds_in(metrics: Path) -> int:
    """Return the number of complete lines of metrics.jsonl, 0 if it isn't there yet."""
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds that processes used so far, with those of their children that have ended."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(value) for value in fields[11:15])  # utime, stime, cutime, cstime
    return total / TICK


def command_of(pid: int) -> str:
    """Return a process's command line, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", errors="replace")
    except OSError:
        return ""


def table(results: list[Result]) -> str:
    """Return the results as a Markdown table."""
    memory = ("SuperLink", "SuperExec", "ServerApp", "SuperNode", "ClientApp", "worker")
    head = [
        "devices",
        "model",
        "s a round",
        "exchanges a s",
        "requests an exchange",
        "SuperLink CPU ms an exchange",
    ]
    head += ["ServerApp CPU ms", "device CPU s", "SuperLink CPU ms a s and idle device"]
    head += [f"{name} MiB" for name in (*memory, "database")]
    lines = [head, ["---:"] * len(head)]
    for r in results:
        cells = [
            " ".join([str(r.devices), *["light"] * r.light, *r.kind.split()]),
            r.model,
            f"{r.round_seconds:.1f}",
        ]
        cells += [f"{r.devices / r.round_seconds:.1f}", f"{r.requests:.0f}" if r.requests else "-"]
        cells += [f"{1000 * r.superlink_cpu:.0f}"]
        cells += [f"{1000 * r.server_app_cpu:.0f}", f"{r.device_cpu:.2f}", f"{1000 * r.idle_cpu:.1f}"]
        cells += [f"{r.memory[name]:.0f}" if r.memory.get(name) else "-" for name in memory]
        lines.append([*cells, f"{r.database:.0f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(results: list[Result], path: Path) -> Path:
    """Draw seconds per round and the SuperLink's CPU seconds in a round against the number of devices."""
    kinds = sorted({(r.light, r.model) for r in results if not r.kind})
    figure = new_figure(3.2, "One SuperLink: a round in which every device trains")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        style_axes(axes)
        rows = sorted(
            (r for r in results if (r.light, r.model) == kind and not r.kind), key=lambda r: r.devices
        )
        x = [r.devices for r in rows]
        axes.plot(x, [r.round_seconds for r in rows], "o-", color=TEST, label="seconds of the round")
        cpu = [r.devices * r.superlink_cpu for r in rows]
        axes.plot(x, cpu, "o-", color=TRAIN, label="CPU seconds of the SuperLink")
        axes.set_title(f"{kind[1]}, {'light devices' if kind[0] else 'SuperNodes'}", fontsize=10, color=INK)
        axes.set(xlabel="devices", xlim=(0, None), ylim=(0, None))
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return save(figure, path)


def keep(path: Path, results: list[Result]) -> list[Result]:
    """Add results to those of earlier calls in a file, and return them all."""
    if path.exists():
        results = [Result(**content) for content in json.loads(path.read_text("utf-8"))] + results
    path.write_text(json.dumps([asdict(result) for result in results], indent=1), "utf-8")
    return results


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of devices")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=["logistic"])
    parser.add_argument("--rounds", type=int, default=5, help="measured ones, after the first")
    parser.add_argument("--light", action="store_true", help="devices without SuperNode and ClientApp")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--workers", action="store_const", const="workers", dest="kind", default="")
    kind.add_argument("--unpacked", action="store_const", const="unpacked", dest="kind")
    parser.add_argument("--requests", action="store_true", help="count them")
    parser.add_argument("--json", type=Path, help="keep the results there, with those of earlier calls")
    parser.add_argument("--figure", type=Path, help="draw them there")
    options = parser.parse_args(arguments)
    if options.kind and options.light != (options.kind == "unpacked"):
        parser.error(f"--{options.kind}: only {'without' if options.light else 'with'} --light")
    if options.requests:
        os.environ["FLWR_LOG_LEVEL"] = "DEBUG"
    results = []
    for model in options.models:
        for devices in options.nodes:
            results.append(measure(devices, options.light, model, options.rounds, options.kind))
            print(table(results[-1:]).splitlines()[-1], flush=True)
    if options.json:
        results = keep(options.json, results)
    print("\n" + table(results))
    if options.figure:
        draw(results, options.figure)


if __name__ == "__main__":
    main()
