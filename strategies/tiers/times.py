"""The task times of regions in virtual time, from those of their devices."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.timing.task_costs import TaskCost
from strategies.timing.time_scenario import TimeScenario, is_profile

# Tasks of a region whose mean time is its τ, where its devices' times are drawn.
_TASKS = 100


class RegionTimes(TimeScenario):
    """Task times of regions: Σ over a task's κ₂ edge rounds of the time of the region's slowest device.

    Parameters
    ----------
    name : str
        The time scenario of the devices.
    regions : sequence of sequence of int
        The indices of each region's devices, which are 0 to C − 1 in all.
    edge_rounds : int
        κ₂.
    seed : int
        The seed of the devices' draws.

    Raises
    ------
    ValueError
        If the scenario is unknown or a device profile, or a file of it is invalid.
    """

    def __init__(self, name: str, regions: Sequence[Sequence[int]], edge_rounds: int, seed: int = 0) -> None:
        if is_profile(name):
            raise ValueError(
                f"time_scenario = {name!r}: with tiers allowed are times without a device profile"
            )
        super().__init__(name, sum(map(len, regions)), seed)
        self._devices = TimeScenario(name, self.num_clients, seed)
        self._regions, self._edge_rounds, self.num_clients = regions, edge_rounds, len(regions)
        self._drawn: dict[int, NDArray[np.float64]] = {}  # by region

    @property
    def means(self) -> NDArray[np.float64]:
        """τ > 0 of the regions, shape (R,)."""
        return np.array([self.mean(region) for region in range(len(self._regions))])

    def mean(self, client: int, load: TaskCost | None = None) -> float:
        """Return τ of a region."""
        return float(self.distribution(client).mean())

    def task_time(self, client: int, task: int, load: TaskCost | None = None) -> float:
        """Return the seconds that task number ``task`` (from 1) of a region takes."""
        first, devices = (task - 1) * self._edge_rounds + 1, self._regions[client]
        rounds = range(first, first + self._edge_rounds)
        return sum(max(self._devices.task_times(devices, number)) for number in rounds)

    def task_times(self, clients: Sequence[int], task: int) -> list[float]:
        """Return the seconds of task number ``task`` for each of these regions."""
        return [self.task_time(client, task) for client in clients]

    def distribution(self, client: int, load: TaskCost | None = None) -> NDArray[np.float64]:
        """Return equally likely values of a region's task time: those of its first tasks."""
        if client not in self._drawn:
            tasks = _TASKS if self.law or self.trace else 1
            self._drawn[client] = np.array([self.task_time(client, 1 + task) for task in range(tasks)])
        return self._drawn[client]
