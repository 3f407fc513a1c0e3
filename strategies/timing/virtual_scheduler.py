"""The scheduler in virtual time: arrivals depend on the time scenario and on the availability of clients."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies import streams
from strategies.clients.client_state import ClientState
from strategies.clients.client_statistics import TaskTiming
from strategies.clients.roster import Client
from strategies.clock import RESOLUTION, Clock, WallClock
from strategies.timing.availability import ALWAYS, NEVER, Availability, Stretch, make_availability
from strategies.timing.cycles import Cycle, over_time
from strategies.timing.scheduler import RealTimeScheduler, Schedule, Scheduler, T, TaskEnd, Times
from strategies.timing.task_costs import TaskCost, TaskCosts
from strategies.timing.time_scenario import TimeScenario, is_profile

log = logging.getLogger("flwr.strategies")


class VirtualScheduler(Scheduler):
    """The scheduler in virtual time: the clock jumps from one arrival to the next.

    Parameters
    ----------
    availability : str
        Availability of the clients: see ``strategies.timing.availability``.
    task_failure : float
        Probability that a client drops a task, at a time drawn uniformly from the task's duration.
    """

    real_time = False

    def __init__(
        self,
        clock: Clock,
        scenario: str,
        seed: int,
        budget: float,
        task_costs: TaskCosts | None,
        availability: str,
        task_failure: float,
    ) -> None:
        super().__init__(clock, scenario, seed, budget, task_costs)
        self._clients: Sequence[Client] = ()
        self._law: TimeScenario | None = None
        self._num_restored = 0  # number of clients in the scenario of a resumed run
        self._presence: Availability | None = None
        self._places: dict[int, int] = {}
        self._cycles: dict[tuple[int, float | None, float], float] = {}
        self.availability, self.task_failure = availability, task_failure
        self.always = availability == ALWAYS and not task_failure
        self.uses_device_profiles = is_profile(scenario)
        self.keeps_times = not self.uses_device_profiles

    def watts(self, number: int) -> list[float] | None:
        """Return the watts in the device profile; None unless all devices have some."""
        if not self.uses_device_profiles or (self._law is None and not self._clients):
            return None
        profile = self._scenario().devices
        assert profile is not None
        found = [profile.device(self._places.get(index, index)).watts for index in range(number)]
        known = [watts for watts in found if watts is not None]
        return known if len(known) == number else None

    def register_clients(self, clients: Sequence[Client]) -> None:
        """Register the clients, until a task time is first requested, which fixes their places in the scenario."""
        if self._law is None:
            self._clients = clients

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run, with the clients' places in the scenario."""
        number = self._num_restored if self._law is None else self._law.num_clients
        return {
            **super().state(),
            "places": list(self._places),
            "scenario-clients": number,
            **(self.task_costs.state() if self.uses_device_profiles else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state, with the scenario and the clients' places in it."""
        super().restore(state)
        if self.uses_device_profiles:
            self.task_costs.restore(state)
        if number := state["scenario-clients"]:
            self._num_restored, self._law, self._presence = number, None, None
            self._places = {index: place for place, index in enumerate(state["places"])}

    def round_time(self, clients: Iterable[Client], task: int) -> float:
        """Return the seconds until the last task ends or is lost."""
        if self.always:
            return max(self._task_times(clients, task), default=0.0)
        now = self.now()
        return max((self.predict(client, task, now).due - now for client in clients), default=0.0)

    def predicted_end(self, client: Client, task: int) -> float | None:
        """Return the end of the task by the scenario, or the time at which its client drops it."""
        return self.predict(client, task, self.now()).due

    def predicted_ends(self, clients: Sequence[Client], task: int) -> Sequence[float | None]:
        """Return the ends of the tasks; all at once if clients are always available."""
        if not self.always:
            return super().predicted_ends(clients, task)
        now = self.now()
        return [now + seconds for seconds in self._task_times(clients, task)]

    def timing(self, client: Client) -> TaskTiming | None:
        """Return the parts of a task's time from the device profile; None without a profile."""
        if (devices := self._scenario().devices) is None:
            return None
        return devices.device(self._place(client)).timing(self.task_costs.of_last(client))

    @property
    def comes_and_goes(self) -> bool:
        """Whether availability changes; False until a task time is first requested."""
        return self.availability != ALWAYS and self._presence is not None

    def absences(self, since: float, until: float) -> Iterator[tuple[int, Iterator[Stretch]]]:
        """Yield the intervals of clients that have a place in the scenario; this assigns no new place."""
        if self.comes_and_goes:
            presence = self._presences()
            for index, place in list(self._places.items()):
                yield index, presence.absences(place, since, until)

    def will_drop(self, client: Client, task: int, when: float | None = None) -> bool:
        """Return True if the client leaves before the end of this task, or drops it."""
        return not self.always and self.predict(client, task, self.now() if when is None else when).lost

    def due(self, member: ClientState, when: float, timeout: float, *, lost: bool) -> float:
        """Return the end of the task by the scenario, or the time at which its client drops it."""
        return self.predict(member.client, member.tasks, when).due

    def predict(self, client: Client, task: int, when: float, load: TaskCost | None = None) -> TaskEnd:
        """Return end and outcome of a task with this load; None: the load of the client's last task."""
        due = when + self._task_time(client, task, load)
        if self.always:
            return TaskEnd(due, lost=False)
        if self.task_failure:
            rng = streams.generator(self.seed, "task-failure", self._place(client), task)
            if rng.random() < self.task_failure:
                due = when + rng.random() * (due - when)
                return TaskEnd(min(due, self._leaves(client, when)), lost=True)
        leaves = self._leaves(client, when)
        return TaskEnd(leaves, lost=True) if due > leaves + RESOLUTION else TaskEnd(due, lost=False)

    def is_available(self, client: Client) -> bool:
        """Return True if the client is available now."""
        return self.always or self._presences().is_available(self._place(client), self.now())

    def next_availability_change(self, client: Client) -> float:
        """Return the clock time of the client's next change of availability."""
        return NEVER if self.always else self._presences().changes(self._place(client), self.now())

    def next_available(self, client: Client, when: float) -> float:
        """Return the first time from ``when`` on at which the client is available."""
        return when if self.always else self._presences().next_available(self._place(client), when)

    def times(self, members: Iterable[ClientState], everybody: Iterable[ClientState]) -> Times:
        """Return the mean task times τ_i (n,) of the scenario."""
        return np.array([self._mean_time(member.client) for member in members])

    def cycles(
        self, members: Iterable[ClientState], everybody: Iterable[ClientState], interval: float | None
    ) -> Times:
        """Return the mean cycle times (n,), by simulating the tasks of each client."""
        if self.always:
            return self.times(members, everybody)
        return np.array([self._cycle(member.client, interval) for member in members])

    def expected(
        self, clients: Sequence[Client], shares: Callable[[Sequence[int]], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Return the mean over evenly spaced times; a client that leaves before its task is done doesn't count."""
        if self.availability == ALWAYS:
            return shares(range(len(clients)))
        presence = self._presences()
        places = [self._place(client) for client in clients]
        return over_time(presence, places, [self._mean_time(client) for client in clients], shares)

    def mean(
        self,
        function: Callable[[Times], Times],
        members: Sequence[ClientState],
        everybody: Iterable[ClientState],
    ) -> Times:
        """Return E f(T_i) (n,) over the scenario's distribution of task times."""
        law = self._scenario()
        drawn = (law.distribution(self._place(m.client), self._load(m.client)) for m in members)
        return np.array([function(times).mean() for times in drawn])

    def simulate_schedule(self, simulate: Callable[[Schedule], T]) -> T | None:
        """Return the result of ``simulate`` on this scheduler, which knows all future tasks."""
        return simulate(self)

    def _task_time(self, client: Client, task: int, load: TaskCost | None = None) -> float:
        law = self._scenario()
        if law.devices is None:
            return law.task_time(self._place(client), task) * self.task_costs.part_of(client.index)
        return law.task_time(self._place(client), task, load or self.task_costs.of_last(client))

    def _task_times(self, clients: Iterable[Client], task: int) -> Sequence[float]:
        law = self._scenario()
        if law.devices is None:
            return law.task_times([self._place(client) for client in clients], task)
        return [self._task_time(client, task) for client in clients]

    def _load(self, client: Client) -> TaskCost | None:
        return None if self._scenario().devices is None else self.task_costs.of(client)

    def _mean_time(self, client: Client) -> float:
        return self._scenario().mean(self._place(client), self._load(client))

    def _cycle(self, client: Client, interval: float | None) -> float:
        mean, load = self._mean_time(client), self._load(client)
        key = client.index, interval, mean
        if key not in self._cycles:
            place, law = self._place(client), self._scenario()
            cycle = Cycle(self._presences(), place, interval, mean)
            if len(law.distribution(place, load)) == 1 and not self.task_failure:
                self._cycles[key] = cycle.of_fixed()
            else:
                self._cycles[key] = cycle.of_drawn(lambda k, when: self.predict(client, k, when, load))
        return self._cycles[key]

    def _leaves(self, client: Client, when: float) -> float:
        return self._presences().leaves(self._place(client), when)

    def _presences(self) -> Availability:
        if self._presence is None:
            self._scenario()
        assert self._presence is not None
        return self._presence

    def _scenario(self) -> TimeScenario:
        if self._law is None:
            if not self._num_restored:
                self._places = {client.index: place for place, client in enumerate(self._clients)}
            return self._lay_out(self._num_restored or len(self._clients))
        return self._law

    def _lay_out(self, num_clients: int) -> TimeScenario:
        self._law = self.new_scenario(self.scenario, num_clients, self.seed)
        if not self.always:
            self._presence = make_availability(self.availability, num_clients, self.seed)
        return self._law

    def _place(self, client: Client) -> int:
        return self._places.setdefault(client.index, len(self._places))


def make_scheduler(
    clock: Clock,
    scenario: str,
    seed: int,
    budget: float,
    task_costs: TaskCosts | None = None,
    availability: str = ALWAYS,
    task_failure: float = 0.0,
) -> Scheduler:
    """Return the scheduler of a clock: real time by a ``WallClock``, virtual time by any other."""
    if isinstance(clock, WallClock):
        return RealTimeScheduler(clock, scenario, seed, budget, task_costs)
    return VirtualScheduler(clock, scenario, seed, budget, task_costs, availability, task_failure)
