"""The asynchronous event loop against a large fleet of simulated devices that come, go and fail.

    python -m studies.benchmarks.event_loop_scale --devices 10000 --hours 24
    python -m studies.benchmarks.event_loop_scale --devices 10000 --hours 24 --profiles --concurrency 1000

Devices work in virtual time on a stub Grid: their tasks take minutes (lognormal between devices), some replies are
errors, and devices leave for hours and come back under another node id. With ``--profiles`` tasks take what their
work and bytes take on devices drawn by a law, and half a day of each device is its own (docs/fleet.md): those that go
drop their tasks, and no node changes its id. What is measured is the server: how many arrivals it takes in per CPU
second, without the stub's own CPU time; memory; how old the models are that work arrives for; and whether any device
that was there was left out. The start, from the first look for devices to the first evaluation, is told apart.
"""

import argparse
import heapq
import logging
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from strategies import REGISTRY, AsynchronousStrategy, Progress, streams
from strategies.clock import VirtualClock
from strategies.flower import messages
from strategies.flower.arrays import pack, unpack
from strategies.flower.grids import NodeChanges
from strategies.testing import LocalGrid, be_the_server

HOUR = 3600.0
MEDIAN_TASK = 20 * 60.0  # seconds
LATE, LEAVING = (
    0.1,
    0.3,
)  # share of the devices that arrive late; probability that a device leaves, and leaves again
OPTIONS: dict[str, dict[str, Any]] = {
    "async-fedavg": {"server_lr": 1e-4},
    "fedfix": {"fedfix_interval": 60.0},
    # Time-based weights simulate the schedule whenever a device comes or goes, which takes seconds in a large fleet.
    "fedbuff": {"buffer_size": 100, "aggregation_weights": "identical"},
}

# Tasks of 20 minutes (median) of 260 examples, and 4 kB each way.
PROFILES = {"time_scenario": "lognormal:0.5,0.22,1e6,3e5", "availability": "diurnal:0.5"}


@dataclass
class FleetDevice:
    """A simulated device: seconds of a task, and when it is there."""

    seconds: float
    num_examples: int
    absences: list[tuple[float, float]] = field(default_factory=list)  # from, to (seconds), ascending

    def hours_there(self, end: float) -> float:
        """Return how long the device is there until ``end`` (seconds)."""
        away = sum(min(back, end) - min(gone, end) for gone, back in self.absences)
        return (end - away) / HOUR


def make_fleet(num_devices: int, hours: float, seed: int) -> list[FleetDevice]:
    """Draw devices: some arrive late, some leave for one to six hours, of which some more than once."""
    rng = streams.generator(seed, "presence-of-devices")
    seconds = MEDIAN_TASK * rng.lognormal(0.0, 0.5, num_devices)
    fleet = [
        FleetDevice(float(s), int(n))
        for s, n in zip(seconds, rng.integers(20, 500, num_devices), strict=True)
    ]
    newcomers = max(1, round(LATE * num_devices))
    slowest = max(device.seconds for device in fleet[:-newcomers])
    for device, at in zip(fleet[-newcomers:], np.linspace(0.02, 0.5, newcomers).tolist(), strict=True):
        device.absences.append((0.0, at * hours * HOUR))
        device.seconds = slowest  # as in every time scenario
    for device in fleet:
        while rng.random() < LEAVING:
            after = device.absences[-1][1] if device.absences else 0.0
            if after >= hours * HOUR:
                break
            gone = float(rng.uniform(after, hours * HOUR))
            device.absences.append((gone, gone + float(rng.uniform(1, 6)) * HOUR))
    return fleet


class FleetGrid(LocalGrid):
    """A Grid of devices that answer at once with a model a little off the one they got, or with an error.

    Parameters
    ----------
    fleet : list of FleetDevice
        Device i is partition i; it has a new node id each time it is back.
    clock : VirtualClock
        The run's.
    failures : float
        Share of the tasks that end in an error.

    Attributes
    ----------
    cpu_seconds : float
        CPU time that the devices and the Grid have taken.
    """

    def __init__(self, fleet: list[FleetDevice], clock: VirtualClock, failures: float, seed: int) -> None:
        be_the_server()
        self.fleet, self.clock, self.failures = fleet, clock, failures
        self.rng = streams.generator(seed, "failures-of-devices")
        self.errors = 0
        self.device_of = {i + 1: i for i in range(len(fleet))}  # by the node ids there are now
        self.node_of = {i: i + 1 for i in range(len(fleet))}
        self._next_node = len(fleet) + 1
        self._changed: list[tuple[int, bool]] = [(i + 1, True) for i in range(len(fleet))]  # node, there
        self._changes = [
            (at, i, there)
            for i, device in enumerate(fleet)
            for absence in device.absences
            for at, there in zip(absence, (False, True), strict=True)
        ]
        heapq.heapify(self._changes)
        self._waiting: dict[str, Message] = {}
        self._sent, self.cpu_seconds = 0, 0.0

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the CPU time of a call."""
        began = time.process_time()
        yield
        self.cpu_seconds += time.process_time() - began

    def _pass_time(self) -> None:
        """Let devices leave and come back, up to the clock's time."""
        while self._changes and self._changes[0][0] <= self.clock.now():
            _, i, there = heapq.heappop(self._changes)
            if there:
                self.device_of[self._next_node] = i
                self.node_of[i] = self._next_node
                self._next_node += 1
            else:
                self.device_of.pop(self.node_of[i])
            self._changed.append((self.node_of[i], there))

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the devices that are there."""
        with self._counted():
            self._pass_time()
            return list(self.device_of)

    def node_changes(self, since: int) -> NodeChanges:
        """Return which devices came and went."""
        with self._counted():
            self._pass_time()
            last = dict(self._changed[since:])
            came = [node for node, there in last.items() if there]
            return NodeChanges(len(self._changed), came, last.keys() - came)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages; their replies are there when they are asked for."""
        messages = list(messages)  # the server makes them
        with self._counted():
            ids = []
            for message in messages:
                self._sent += 1
                message.metadata.__dict__["_message_id"] = str(self._sent)
                self._waiting[message.metadata.message_id] = message
                ids.append(message.metadata.message_id)
            return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer messages."""
        with self._counted():
            self._pass_time()
            return [self._answer(self._waiting.pop(i)) for i in message_ids if i in self._waiting]

    def _answer(self, message: Message) -> Message:
        i = self.device_of.get(message.metadata.dst_node_id)
        if i is None or (
            message.metadata.message_type == messages.TRAIN and self.rng.random() < self.failures
        ):
            self.errors += 1
            return Message(Error(5, "the device is gone" if i is None else "out of memory"), reply_to=message)
        if message.metadata.message_type == messages.DESCRIBE:
            metrics = {messages.PARTITION_ID: i, messages.NUM_EXAMPLES: self.fleet[i].num_examples}
            return Message(RecordDict({messages.METRICS: MetricRecord(metrics)}), reply_to=message)
        metrics = {messages.NUM_EXAMPLES: self.fleet[i].num_examples, messages.TRAIN_LOSS: 1.0}
        content = RecordDict({messages.METRICS: MetricRecord(metrics)})
        if message.metadata.message_type == messages.TRAIN:
            model = unpack(message.content[messages.ARRAYS]["w"])
            trained = np.asarray(0.99 * model + 0.01, dtype=model.dtype)
            content[messages.ARRAYS] = ArrayRecord({"w": pack(trained)})
        return Message(content, reply_to=message)


@dataclass
class LoopReport:
    """The measurements of the server."""

    strategy: str
    devices: int
    cpu_seconds: float  # of the server
    start_seconds: float  # CPU seconds of these until the initial model has been evaluated
    stub_seconds: float  # CPU seconds of the stub beside these
    virtual_hours: float
    aggregations: int
    arrivals: int
    errors: int
    lost: int  # tasks whose devices went away
    peak_memory: int  # bytes, of the whole process
    memory_per_device: float  # bytes that the run adds to the process, over the devices
    staleness_mean: float
    staleness_max: int
    starved: list[int]  # devices with time for ten tasks or more that contributed less than a fifth of them
    fairness: tuple[
        float, float, float
    ]  # contributions over those it had time for: 1st, 50th, 99th percentile

    def lines(self) -> list[str]:
        """Return the report as text."""
        low, middle, high = self.fairness
        events, loop_seconds = self.arrivals + self.errors + self.lost, self.cpu_seconds - self.start_seconds
        return [
            f"{self.strategy}, {self.devices:,} devices, {self.virtual_hours:.1f} h of virtual time "
            f"in {self.cpu_seconds:.1f} s of one core, {self.start_seconds:.1f} s of these for the start; "
            f"the stub took {self.stub_seconds:.1f} s more",
            f"  throughput   {self.arrivals:,} arrivals, {self.errors:,} errors and {self.lost:,} lost tasks, "
            f"{events / self.cpu_seconds:,.0f} a second, {events / loop_seconds:,.0f} without the start; "
            f"{self.aggregations:,} aggregations",
            f"  memory       {self.peak_memory / 2**20:,.0f} MiB at most, "
            f"{self.memory_per_device / 1000:.1f} kB a device",
            f"  staleness    mean {self.staleness_mean:.1f}, at most {self.staleness_max} aggregations",
            f"  work done    of what devices had time for: median {middle:.2f}, 1st to 99th percentile "
            f"{low:.2f} to {high:.2f}",
            f"  starved      {len(self.starved)} devices",
        ]


def measure(
    name: str,
    num_devices: int,
    hours: float,
    *,
    size: int = 1000,
    failures: float = 0.02,
    seed: int = 0,
    profiles: bool = False,
    **given: Any,
) -> LoopReport:
    """Run a strategy over a fleet; the model has ``size`` float32 values, ``given`` are fields of the config."""
    before = _peak_memory()
    fleet = make_fleet(num_devices, hours, seed)
    if profiles:
        fleet = [FleetDevice(device.seconds, device.num_examples) for device in fleet]
        given = PROFILES | given
    clock, end = VirtualClock(), hours * HOUR
    grid = FleetGrid(fleet, clock, failures, seed)
    aggregations, arrivals, lost, staleness, oldest, start = 0, 0, 0, 0.0, 0, 0.0

    def server_seconds() -> float:
        return time.process_time() - began - grid.cpu_seconds

    def observe(progress: Progress) -> None:
        nonlocal aggregations, arrivals, lost, staleness, oldest, start
        aggregations = progress.aggregation
        start = start if aggregations else server_seconds()
        number = int(progress.metrics.get("contributions", 0))
        lost += int(progress.metrics.get(messages.LOST_TASKS, 0))
        arrivals += number
        staleness += number * progress.metrics.get("staleness-mean", 0.0)
        oldest = max(oldest, int(progress.metrics.get("staleness-max", 0)))

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "times.csv"
        trace.write_text("\n".join(f"{i},{device.seconds}" for i, device in enumerate(fleet)))
        kind = REGISTRY[name]
        options = {"time_scenario": f"trace:{trace}", "time_budget": end, "eval_every": num_devices}
        options |= OPTIONS[name] | given
        strategy = kind(kind.Config(**options), clock=clock, observer=observe)
        assert isinstance(strategy, AsynchronousStrategy)
        began = time.process_time()
        strategy.start(
            grid,
            ArrayRecord({"w": Array(np.zeros(size, dtype=np.float32))}),
            num_rounds=1
            + int(sum(end / device.seconds for device in fleet)) // options.get("buffer_size", 1),
            train_config=ConfigRecord({f"key-{i}": i for i in range(60)}),  # as many as the app's
        )
        seconds = server_seconds()
    contributions = {
        index: member.contributions for index, member in strategy.session.task_table.members.items()
    }
    shares, starved = [], []
    for i, device in enumerate(fleet):
        tasks = device.hours_there(end) * HOUR / device.seconds
        if tasks >= 10:
            shares.append(contributions.get(i, 0) / tasks)
            if shares[-1] < 0.2:
                starved.append(i)
    low, middle, high = np.percentile(shares or [0.0], [1, 50, 99]).tolist()
    return LoopReport(
        name,
        num_devices,
        seconds,
        start,
        grid.cpu_seconds,
        clock.now() / HOUR,
        aggregations,
        arrivals,
        grid.errors,
        lost,
        _peak_memory(),
        (_peak_memory() - before) / num_devices,
        staleness / max(arrivals, 1),
        oldest,
        starved,
        (low, middle, high),
    )


def _peak_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=OPTIONS, action="append", help="default: all three")
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--size", type=int, default=1000, help="values of the model")
    parser.add_argument("--profiles", action="store_true", help="devices by a law, there for half of the day")
    parser.add_argument("--concurrency", type=int, default=0, help="devices at work at once; 0: all")
    parser.add_argument("--failures", type=float, default=0.02, help="share of tasks that end in an error")
    options = parser.parse_args()
    logging.getLogger("flwr.strategies").setLevel(logging.ERROR)  # it names every failure
    for name in options.strategy or OPTIONS:
        report = measure(
            name,
            options.devices,
            options.hours,
            size=options.size,
            failures=options.failures,
            profiles=options.profiles,
            concurrency=options.concurrency,
        )
        print("\n".join(report.lines()), flush=True)


if __name__ == "__main__":
    main()
