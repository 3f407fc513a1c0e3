"""Time scenarios: the task times of clients in virtual time.

Source: Fraboni et al. 2023, section 5.1; ``half-normal``: Nguyen et al. 2022 (FedBuff), whose tasks have such times.
"""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strategies import streams
from strategies.timing.device_profile import ALLOWED as PROFILES
from strategies.timing.device_profile import LAWS, DeviceProfile
from strategies.timing.device_profile import PATTERN as PROFILE_PATTERN
from strategies.timing.named_file import NamedFile
from strategies.timing.task_costs import TaskCost

ALLOWED = f"F0 to F99, exponential or half-normal, alone or with :F0 to :F99, trace:FILE, {PROFILES}"
PATTERN = rf"^(F\d{{1,2}}|(exponential|half-normal)(:F\d{{1,2}})?|trace:.+|{PROFILE_PATTERN})$"
_DRAWN = ("exponential", "half-normal")
_WIDTH = (np.pi / 2) ** 0.5  # scale of a half-normal law with mean 1


def is_profile(scenario: str) -> bool:
    """Return True if a time scenario is a device profile, from which task times are computed."""
    return scenario.partition(":")[0] in ("profile", *LAWS)


class TimeScenario:
    """Task times T_i of a federation, and their means τ_i, in seconds.

    ``F-X``: fixed, evenly spaced from 1 − X/100 (client 0, the fastest) to 1 (the last); F0: all 1. ``exponential``:
    T_i ~ Exp(mean τ_i), drawn anew for every task, with the τ_i of F80, or of another F-X that is named after a
    colon. ``half-normal``: likewise T_i = |N|, N ~ N(0, π/2 τ_i²), whose mean is τ_i. ``trace:FILE``: a CSV of
    ``client,seconds`` rows; a client's rows are the times of its tasks, repeated from the first after the last.
    ``profile:FILE``, ``lognormal:S``, ``zipf:S``, ``pareto:S``: a profile of the devices, with task times that
    depend on the work and the bytes of a task (``strategies.timing.device_profile``).

    Parameters
    ----------
    name : str
        One of the scenarios above.
    num_clients : int
        C.
    seed : int
        Seed of the draws of ``exponential`` and ``half-normal``, and of the laws of devices.

    Attributes
    ----------
    devices : DeviceProfile, optional
        Profile of the devices; None if the scenario defines task times directly.

    Raises
    ------
    ValueError
        If the scenario is unknown, or the file is invalid.
    """

    def __init__(self, name: str, num_clients: int, seed: int = 0) -> None:
        kind, _, argument = name.partition(":")
        self.seed, self.num_clients = seed, num_clients
        self.law = kind if kind in _DRAWN else ""
        self.trace: list[list[float]] = []
        self.devices: DeviceProfile | None = None
        if is_profile(name):
            self.devices = DeviceProfile(name, num_clients, seed)
        elif kind == "trace":
            self.trace = _read_trace(argument, num_clients)
            self._means = np.array([np.mean(times) for times in self.trace])
        else:
            self._means = _spaced((argument or "F80") if self.law else name, num_clients, name)
        if self.devices is None:
            self._slowest = float(self._means.max())

    @property
    def means(self) -> NDArray[np.float64]:
        """τ_i > 0, shape (C,).

        Raises
        ------
        ValueError
            If task times depend on the load of tasks, which a profile doesn't contain.
        """
        if self.devices is not None:
            raise ValueError("time_scenario: the times of its tasks follow from their work and their bytes")
        return self._means

    @property
    def slowness(self) -> NDArray[np.float64]:
        """Relative seconds (C,) of the clients for the same work, up to a common factor: τ_i, or 1 / speed."""
        if self.devices is None:
            return self._means
        return np.array([1 / self.devices.device(client).speed for client in range(self.num_clients)])

    def mean(self, client: int, load: TaskCost | None = None) -> float:
        """Return τ_i of a client, also one that joined late; a profile needs the task's ``load``."""
        if self.devices is not None:
            assert load is not None
            return self.devices.device(client).seconds(load)
        if client >= self.num_clients:  # a client that joined after the start is as slow as the slowest
            return self._slowest
        return float(self._means[client])

    def task_time(self, client: int, task: int, load: TaskCost | None = None) -> float:
        """Return the seconds that task number ``task`` (from 1) of client ``client`` takes."""
        if self.devices is not None:
            return self.mean(client, load)
        if client >= self.num_clients:
            return self.mean(client)
        if self.trace:
            return self.trace[client][(task - 1) % len(self.trace[client])]
        if self.law:
            rng, mean = streams.generator(self.seed, "task-times", client, task), self._means[client]
            drawn = rng.exponential(mean) if self.law == "exponential" else mean * abs(rng.normal(0, _WIDTH))
            return float(drawn)
        return float(self._means[client])

    def task_times(self, clients: Sequence[int], task: int) -> list[float]:
        """Return the seconds of task number ``task`` for each of these clients, without a device profile."""
        if self.trace or self.law or max(clients, default=0) >= self.num_clients:
            return [self.task_time(client, task) for client in clients]
        return self._means[np.asarray(clients, dtype=np.int64)].tolist()  # type: ignore[no-any-return]

    def distribution(self, client: int, load: TaskCost | None = None) -> NDArray[np.float64]:
        """Return equally likely values of T_i: all values of a trace, or 2,000 quantiles of a random law."""
        if client < self.num_clients and self.trace:
            return np.array(self.trace[client])
        mean = self.mean(client, load)
        if client >= self.num_clients:
            return np.array([mean])
        levels = (np.arange(2000) + 0.5) / 2000
        if self.law == "exponential":
            return np.asarray(-mean * np.log1p(-levels))
        if self.law:
            from scipy.special import ndtri  # slow to import, and devices import this module

            return np.asarray(mean * _WIDTH * ndtri((1 + levels) / 2))
        return np.array([mean])


def _spaced(fixed: str, num_clients: int, name: str) -> NDArray[np.float64]:
    match = re.fullmatch(r"F(\d{1,2})", fixed)
    if match is None:
        raise ValueError(f"time_scenario = {name!r}: allowed are {ALLOWED}")
    return np.linspace(1 - int(match[1]) / 100, 1.0, num_clients) if num_clients > 1 else np.ones(1)


def _row(row: Sequence[str]) -> tuple[int, float]:
    client, seconds = int(row[0]), float(row[1])
    if len(row) != 2 or client < 0 or not 0 < seconds < float("inf"):
        raise ValueError
    return client, seconds


def _read_trace(name: str, num_clients: int) -> list[list[float]]:
    file = NamedFile("time_scenario", "trace", name)
    times: dict[int, list[float]] = defaultdict(list)
    for _, (client, seconds) in file.read_rows(
        [("client", "seconds")], _row, "client,seconds with seconds > 0"
    ):
        times[client].append(seconds)
    return file.by_client(times, num_clients)
