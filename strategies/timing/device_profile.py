"""Device profiles: the capacity of each device, which gives the time of a task from its work and bytes.

    T = work / speed + bits down / down + bits up / up + latency                        seconds

Work is measured in processed examples (or in operations, where a work function returns them), and speed in the
same unit per second. A profile is a file with a row per client, or is drawn by a law:

    lognormal:S[,SPEED[,DOWN[,UP[,LATENCY]]]]    speed = SPEED / X, ln X ~ N(0, S²): the heavy tail of FedScale's
    zipf:S[,…], pareto:S[,…]                     X ~ Zipf(S), 1, 2, …; or Pareto with P(X > x) = x^−S from 1: Plato's

X is drawn once for a client's speed, and once more for both directions of its link: DOWN / X and UP / X. X is at most
1,000, because a client with a larger X would never answer. By default SPEED is 100 a second, DOWN 20 Mbit/s, UP 5
Mbit/s and LATENCY 0.1 s.

Sources: F. Lai et al., "FedScale: benchmarking model and system performance of federated learning at scale", ICML
2022; B. Li et al., "Plato: an open-source research framework for scalable federated learning research", 2022.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strategies import streams
from strategies.clients.client_statistics import TaskTiming
from strategies.timing.named_file import NUMBER, NamedFile, numbers
from strategies.timing.task_costs import TaskCost

LAWS = ("lognormal", "zipf", "pareto")
ALLOWED = "profile:FILE, lognormal:S, zipf:S, pareto:S (and SPEED,DOWN,UP,LATENCY after a comma)"
PATTERN = rf"profile:.+|({'|'.join(LAWS)}):{NUMBER}(,{NUMBER}){{0,4}}"
MOST = 1000.0  # upper bound of X

COLUMNS = ("client", "speed", "down", "up", "latency")
WITH_WATTS = (*COLUMNS, "watts")

# FedScale measures one forward pass; a training step takes three times that. FedScale's bandwidths are in kbit/s.
PASSES, KILO = 3.0, 1000.0
# APPFL's bandwidths are in Mbit/s. APPFL measures the time of a step, which a virtual clock can't do.
MEGA = 1e6


class Capacity(NamedTuple):
    """The capacity of a device: work per second, bit/s down and up, seconds of latency, and watts while it works."""

    speed: float
    down: float
    up: float
    latency: float
    watts: float | None = None

    def seconds(self, load: TaskCost) -> float:
        """Return T, the seconds of a task with this load."""
        return self.working(load) + 8 * load.down / self.down + 8 * load.up / self.up + self.latency

    def working(self, load: TaskCost) -> float:
        """Return the seconds of T that the device spends on training."""
        return load.work / self.speed

    def timing(self, load: TaskCost) -> TaskTiming:
        """Return the download, training and upload seconds of T; each direction has half of the latency."""
        way = self.latency / 2
        return TaskTiming(8 * load.down / self.down + way, self.working(load), 8 * load.up / self.up + way)


USUAL = Capacity(100.0, 20e6, 5e6, 0.1)


class DeviceProfile:
    """The devices of a fleet, by client.

    Parameters
    ----------
    name : str
        ``profile:FILE``, or a law listed in the module's docstring.
    num_clients : int
        C.
    seed : int
        Seed of the draws of a law.

    Raises
    ------
    ValueError
        If the name is unknown, or the file is invalid.
    """

    def __init__(self, name: str, num_clients: int, seed: int = 0) -> None:
        kind, _, argument = name.partition(":")
        self.seed = seed
        self._devices: dict[int, Capacity] = {}
        self._law: Callable[[np.random.Generator], float] | None = None
        self.says_speed = True  # whether the profile defines speeds, instead of the default
        if kind == "profile":
            self._listed = _read(argument, num_clients)
            return
        values = _law_of(name, argument)
        self.says_speed = len(values) > 1
        self._law, self._usual = _drawing(kind, values[0]), Capacity(*values[1:], *USUAL[len(values) - 1 :])
        self._listed = []

    def device(self, client: int) -> Capacity:
        """Return a client's capacity; a client without a row in the file is as slow as the slowest in the file."""
        if client < len(self._listed):
            return self._listed[client]
        if client not in self._devices:
            self._devices[client] = self._slowest() if self._law is None else self._drawn(client)
        return self._devices[client]

    def _drawn(self, client: int) -> Capacity:
        assert self._law is not None
        rng, usual = streams.generator(self.seed, "device-profile", client), self._usual
        slower, further = self._law(rng), self._law(rng)
        return Capacity(usual.speed / slower, usual.down / further, usual.up / further, usual.latency)

    def _slowest(self) -> Capacity:
        known = self._listed
        watts = [device.watts for device in known if device.watts is not None]
        return Capacity(
            min(device.speed for device in known),
            min(device.down for device in known),
            min(device.up for device in known),
            max(device.latency for device in known),
            max(watts, default=None),
        )


def _law_of(name: str, argument: str) -> list[float]:
    try:
        values = list(numbers(argument.split(",")))
    except ValueError:
        values = []
    if not 1 <= len(values) <= 5 or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"time_scenario = {name!r}: must be a law and 1 to 5 numbers: {ALLOWED}")
    if not all(value > 0 for value in values[1:4]):
        raise ValueError(f"time_scenario = {name!r}: SPEED, DOWN and UP must be above 0")
    kind, least = name.partition(":")[0], {"lognormal": 0.0, "zipf": 1.0, "pareto": 0.0}
    if kind != "lognormal" and not values[0] > least[kind]:
        raise ValueError(f"time_scenario = {name!r}: S of {kind} must be above {least[kind]:g}")
    return values


def _drawing(kind: str, shape: float) -> Callable[[np.random.Generator], float]:
    """Return a function that draws X."""
    draw: dict[str, Callable[[np.random.Generator], float]] = {
        "lognormal": lambda rng: float(np.exp(shape * rng.standard_normal())),
        "zipf": lambda rng: float(rng.zipf(shape)),
        "pareto": lambda rng: 1.0 + float(rng.pareto(shape)),
    }
    return lambda rng: min(draw[kind](rng), MOST)


def _read(name: str, num_clients: int) -> list[Capacity]:
    """Read a profile: a CSV, or FedScale's device capacity or APPFL's profiles, which are assigned in turn."""
    file = NamedFile("time_scenario", "profile", name)
    if (entries := file.entries()) is not None:
        is_appfl = isinstance(entries[0], dict) and "compute_factor" in entries[0]
        read = _appfl if is_appfl else _fedscale
        return [read(file, entries, client) for client in range(num_clients)]
    found: dict[int, Capacity] = {}
    must = "client,speed,down,up,latency and perhaps watts, with speed, down and up > 0"
    for number, (client, device) in file.read_rows((COLUMNS, WITH_WATTS), _row, must):
        if client in found:
            raise file.wrong(f"row {number} is a second one for client {client}")
        found[client] = device
    return file.by_client(found, num_clients)


def _row(row: Sequence[str]) -> tuple[int, Capacity]:
    client, values = int(row[0]), list(numbers(row[1:]))
    right = client >= 0 and len(values) in (4, 5) and all(math.isfinite(v) and v >= 0 for v in values)
    if not right or not all(value > 0 for value in values[:3]):
        raise ValueError
    return client, Capacity(*values)


def _fedscale(file: NamedFile, entries: Sequence[Any], client: int) -> Capacity:
    """Return the capacity of ``{"computation": ms per example, forward, "communication": kbit/s}``."""
    milliseconds, bandwidth = _two(file, entries, client, "computation", "communication")
    return Capacity(1000 / (PASSES * milliseconds), KILO * bandwidth, KILO * bandwidth, 0.0)


def _appfl(file: NamedFile, entries: Sequence[Any], client: int) -> Capacity:
    """Return the capacity of ``{"compute_factor": slowdown, "bandwidth": Mbit/s}``, APPFL's ClientProfile."""
    slower, bandwidth = _two(file, entries, client, "compute_factor", "bandwidth")
    return Capacity(USUAL.speed / slower, MEGA * bandwidth, MEGA * bandwidth, 0.0)


def _two(file: NamedFile, entries: Sequence[Any], client: int, *names: str) -> tuple[float, float]:
    """Return two positive numbers of a client's entry."""
    at = client % len(entries)
    try:
        first, second = (float(entries[at][name]) for name in names)
        sensible = 0 < first < math.inf and 0 < second < math.inf
    except (KeyError, TypeError, ValueError):
        sensible = False
    if not sensible:
        raise file.wrong(f"entry {at + 1} must have {' and '.join(names)}, both > 0")
    return first, second
