"""The scheduler of a run, in virtual or real time: the only module that depends on the kind of clock.

In *virtual* time arrivals depend on the time scenario alone: the clock jumps to the next due task and waits for its
reply. Due times within 1e-9 s are equal, and tasks with equal due times are processed in client order. In *real* time
replies count when they arrive, each task has a deadline, and τ_i is the running mean of the observed task times.

A loop asks its scheduler when a task is due, what happens next, what the task times of clients are, and how long a
round takes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strategies.clients.client_state import ClientState
from strategies.clients.client_statistics import TaskTiming
from strategies.clients.roster import Client
from strategies.clock import RESOLUTION, Clock
from strategies.timing.availability import NEVER, Stretch
from strategies.timing.task_costs import TaskCosts
from strategies.timing.time_scenario import TimeScenario

Times = NDArray[np.float64]
T = TypeVar("T")

SHORTEST_DEADLINE = 60.0  # least deadline of a task in real seconds, unless the timeout is shorter


class TaskEnd(NamedTuple):
    """The clock time in seconds at which a task ends, and whether it is lost because its client leaves."""

    due: float
    lost: bool


class Schedule(Protocol):
    """The predicted ends of all future tasks."""

    def predict(self, client: Client, task: int, when: float) -> TaskEnd:
        """Return end and outcome of a client's task, given its number (from 1) and its beginning."""

    def next_available(self, client: Client, when: float) -> float:
        """Return the first time from ``when`` on at which a client is available; infinity: never."""


@runtime_checkable
class TimedGrid(Protocol):
    """A Grid whose clients' task times follow from those of others, such as a region's from its devices'."""

    def time_scenario(self, name: str, num_clients: int, seed: int) -> TimeScenario:
        """Return the task times of the Grid's clients in virtual time, under a time scenario."""
        ...


def reply_timeout(typical: float, timeout: float) -> float:
    """Return the real seconds to wait for a reply that usually takes ``typical`` seconds."""
    return min(timeout, max(5 * typical, SHORTEST_DEADLINE))


class Scheduler(ABC):
    """Time and task times of a run, as a strategy uses them.

    Parameters
    ----------
    clock : Clock
        The clock of the run, in seconds.
    scenario, seed : str, int
        Task times in virtual time, and the seed of their random draws: see
        ``strategies.timing.time_scenario.TimeScenario``.
    budget : float
        Seconds after ``begin`` at which the run ends; 0: no limit.
    task_costs : TaskCosts
        The costs of the tasks, where the time scenario derives task times from them.
    """

    #: Whether time is real: replies count when they arrive, task times τ_i are estimates that every reply updates,
    #: and a run without clients waits for one.
    real_time: bool
    #: Whether all clients are always available, and no task is lost.
    always: bool = True

    #: Whether task times depend on the work and the bytes of tasks.
    uses_device_profiles: bool = False

    #: Makes the task times of a number of clients in virtual time, of a scenario and a seed.
    new_scenario: Callable[[str, int, int], TimeScenario]

    #: Whether the mean task time τ_i of a client, and its cycle, stay the same for the whole run.
    keeps_times: bool = False

    def __init__(
        self, clock: Clock, scenario: str, seed: int, budget: float, task_costs: TaskCosts | None = None
    ) -> None:
        self.clock, self.new_scenario = clock, TimeScenario
        self.task_costs = task_costs or TaskCosts()
        self.scenario, self.seed, self.budget = scenario, seed, budget
        self.began = self.origin = 0.0  # clock times of the run's begin, and of the first interval
        self.ticks = 0  # number of intervals that are over
        self._interval: float | None = None  # length of these intervals

    def now(self) -> float:
        """Return the seconds of the run's clock."""
        return self.clock.now()

    def watts(self, number: int) -> list[float] | None:
        """Return the watts of ``number`` clients' devices while they train, by index; None if unknown."""
        return None

    def begin(self) -> None:
        """Start intervals and the time budget, once the clients are there."""
        self.began = self.origin = self.clock.now()
        self.ticks, self._interval = 0, None

    def over(self, time: float) -> bool:
        """Return True if a clock time is beyond the time budget."""
        return bool(self.budget) and time > self.began + self.budget + RESOLUTION

    def tick(self, interval: float | None) -> float:
        """Return the clock time at which the next interval is over, (n+1) Δt after the origin."""
        if interval is None:
            return NEVER
        origin, ticks = self._since(interval)
        return origin + (ticks + 1) * interval

    def _since(self, interval: float) -> tuple[float, int]:
        """Return the origin of intervals of this length, and how many are over; another length begins anew."""
        if self._interval is None or interval == self._interval:
            return self.origin, self.ticks
        return self.origin + self.ticks * self._interval, 0

    def count_interval(self, interval: float) -> None:
        """Count an interval that is over; several missed intervals count as one."""
        self.origin, self.ticks = self._since(interval)
        self._interval, now = interval, self.now()
        if now > self.tick(interval) + interval:
            self.origin = now - (self.ticks + 1) * interval
        self.ticks += 1

    def pass_over(self, interval: float, until: float) -> None:
        """Skip the empty intervals of this length before ``until``, and before the budget's end, except the last.

        So a very short interval doesn't cost a look at each; the last ones are left to exact comparisons.
        """
        if self.budget:
            until = min(until, self.began + self.budget)
        self.ticks += max(math.floor((until - self.tick(interval)) / interval * (1 - 1e-12)) - 1, 0)

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"time": self.clock.now(), "began": self.began, "origin": self.origin, "ticks": self.ticks} | (
            {} if self._interval is None else {"interval": self._interval}
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; the time since it was saved doesn't count."""
        self.clock.resume(state["time"])
        self.began, self.origin, self.ticks = state["began"], state["origin"], state["ticks"]
        self._interval = state.get("interval")

    @abstractmethod
    def register_clients(self, clients: Sequence[Client]) -> None:
        """Register the clients of the run; the time scenario applies to those present at its start."""

    def round_time(self, clients: Iterable[Client], task: int) -> float:
        """Return the seconds by which a round of these clients advances the clock; 0 if it advances by itself."""
        return 0.0

    def predicted_end(self, client: Client, task: int) -> float | None:
        """Return the clock time at which a round's task that is dispatched now will end; None if it is unknown.

        A task that its client drops ends at that moment: see ``losing``.
        """
        return None

    def predicted_ends(self, clients: Sequence[Client], task: int) -> Sequence[float | None]:
        """Return the clock times at which tasks of several clients will end, as ``predicted_end`` does."""
        return [self.predicted_end(client, task) for client in clients]

    def timing(self, client: Client) -> TaskTiming | None:
        """Return the download, training and upload seconds of a client's last task; None if they are unknown."""
        return None

    @property
    def comes_and_goes(self) -> bool:
        """Whether clients have a known availability that changes."""
        return False

    def absences(self, since: float, until: float) -> Iterator[tuple[int, Iterator[Stretch]]]:
        """Yield each client's index and the intervals between two clock times in which it isn't available."""
        return iter(())

    def will_drop(self, client: Client, task: int, when: float | None = None) -> bool:
        """Return True if a task dispatched at ``when``, or now, is lost because its client leaves before its end."""
        return False

    def losing(self, clients: Sequence[Client], task: int) -> list[Client]:
        """Return the clients that would lose a task dispatched now."""
        return [] if self.always else [client for client in clients if self.will_drop(client, task)]

    def is_available(self, client: Client) -> bool:
        """Return True if a client is available now."""
        return True

    def next_availability_change(self, client: Client) -> float:
        """Return the clock time of a client's next change of availability; infinity if there is none."""
        return NEVER

    def next_available(self, client: Client, when: float) -> float:
        """Return the first time from ``when`` on at which a client is available; infinity: never."""
        return when

    @abstractmethod
    def due(self, member: ClientState, when: float, timeout: float, *, lost: bool) -> float:
        """Return the clock time at which a task dispatched at ``when`` is due or expires; ``lost``: unsendable."""

    @abstractmethod
    def times(self, members: Iterable[ClientState], everybody: Iterable[ClientState]) -> Times:
        """Return τ_i (n,), the mean task times: expected ones in virtual time, observed ones in real time."""

    def cycles(
        self, members: Iterable[ClientState], everybody: Iterable[ClientState], interval: float | None
    ) -> Times:
        """Return the mean seconds (n,) between two contributions of each client, if it doesn't wait for others.

        A cycle is the task time plus the time in which the client is unavailable or loses tasks; it is infinite for a
        client that is never available for as long as a task takes. ``interval`` is the time between aggregations, at
        which new tasks begin, None if tasks begin at once.
        """
        return self.times(members, everybody)

    def expected(
        self, clients: Sequence[Client], shares: Callable[[Sequence[int]], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Return the mean over time (n,) of ``shares`` (m,), which is called with positions of available clients."""
        return shares(range(len(clients)))

    def mean(
        self,
        function: Callable[[Times], Times],
        members: Sequence[ClientState],
        everybody: Iterable[ClientState],
    ) -> Times:
        """Return E f(T_i) (n,) over the task times T_i of clients; f(τ_i) where only their mean τ_i is known."""
        return function(self.times(members, everybody))

    def simulate_schedule(self, simulate: Callable[[Schedule], T]) -> T | None:
        """Return the result of ``simulate`` on the schedule of all future tasks; None if it is unknown."""
        return None


class RealTimeScheduler(Scheduler):
    """The scheduler in real time."""

    real_time = True

    def begin(self) -> None:
        """Start the clock, too, at 0: what was prepared and the wait for clients don't count."""
        self.clock.resume(0.0)
        super().begin()

    def register_clients(self, clients: Sequence[Client]) -> None:
        """Do nothing, because task times are observed."""

    def due(self, member: ClientState, when: float, timeout: float, *, lost: bool) -> float:
        """Return the deadline of a task: five times the client's mean or last task time; ``when`` if it is lost.

        The deadline doubles with every miss of a dropped client, which the run doesn't wait for, and which may just
        have become slower. An expired task has no observed time, so that τ_i and d_i don't change.
        """
        if lost:
            return when
        typical = max(member.seconds / member.answers, member.latest) if member.answers else NEVER
        longer = 2.0 ** min(member.misses, 60) if member.dropped else 1.0
        return when + min(timeout, longer * reply_timeout(typical, timeout))

    def times(self, members: Iterable[ClientState], everybody: Iterable[ClientState]) -> Times:
        """Return the means of observed task times; before a client's first reply, the mean of the others."""
        known = [m.seconds / m.answers for m in everybody if m.answers]
        typical = float(np.mean(known)) if known else 1.0
        return np.array([m.seconds / m.answers if m.answers else typical for m in members])
