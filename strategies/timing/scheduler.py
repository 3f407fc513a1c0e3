"""How time passes in a run: the only place that knows which clock it is.

In *virtual* time arrivals follow from the time scenario alone: the clock jumps to the next task that is due and waits
for that one reply. Due times within 1e-9 s are equal, and equal ones are taken in client order. In *real* time
replies count when they come, a task has a deadline, and τ_i is the running mean of what was observed.

A loop asks its scheduler when a task is due, what happens next, what a client's times are and how long a round takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from strategies.clients.accounts import Parts
from strategies.clients.member import Member
from strategies.clients.roster import Client
from strategies.clock import RESOLUTION, Clock
from strategies.timing.availability import NEVER, Stretch
from strategies.timing.load import Loads

Times = NDArray[np.float64]
T = TypeVar("T")

SHORTEST_DEADLINE = 60.0  # real seconds that a task is given at least, when the timeout allows


class Outlook(NamedTuple):
    """When a task is over (clock seconds), and whether it is lost then, as its client is gone."""

    due: float
    lost: bool


class Schedule(Protocol):
    """What is known of all tasks to come."""

    def outlook(self, client: Client, task: int, when: float) -> Outlook:
        """Return what becomes of a client's task, by its number from 1, that begins at a time."""

    def comes(self, client: Client, when: float) -> float:
        """Return when a client is there, from a time on; infinity: never."""


def patience(usual: float, timeout: float) -> float:
    """Return for how many real seconds an answer is waited for that usually takes so many."""
    return min(timeout, max(5 * usual, SHORTEST_DEADLINE))


class Scheduler(ABC):
    """Time as a strategy sees it.

    Parameters
    ----------
    clock : Clock
        Seconds of the run.
    scenario, seed : str, int
        How long tasks take in virtual time: see ``strategies.timing.time_scenario.TimeScenario``.
    budget : float
        Seconds after ``begin`` (of rounds: after the clock's start) at which the run ends; 0: no limit.
    loads : Loads
        What tasks weigh, where their times follow from that.
    """

    #: Whether time passes by itself: replies count when they come, task times τ_i are estimates that every answer
    #: changes, and a run without clients waits for one.
    real_time: bool
    #: Whether everybody is always there, and no task is lost.
    always: bool = True

    #: Whether the times of tasks follow from their work and their bytes.
    weighs: bool = False

    def __init__(
        self, clock: Clock, scenario: str, seed: int, budget: float, loads: Loads | None = None
    ) -> None:
        self.clock = clock
        self.loads = loads or Loads()
        self.scenario, self.seed, self.budget = scenario, seed, budget
        self.began = self.origin = 0.0  # clock seconds of the first task, and that intervals are counted from
        self.ticks = 0  # intervals that are over

    def now(self) -> float:
        """Return the seconds of the run's clock."""
        return self.clock.now()

    def watts(self, number: int) -> list[float] | None:
        """Return what so many clients' devices take while they have a task, by index; None if nobody says."""
        return None

    def begin(self) -> None:
        """Count intervals and the budget from now."""
        self.began = self.origin = self.clock.now()
        self.ticks = 0

    def over(self, time: float) -> bool:
        """Tell whether a clock time lies beyond the budget."""
        return bool(self.budget) and time > self.began + self.budget + RESOLUTION

    def tick(self, interval: float | None) -> float:
        """Return the clock time at which the next interval is over, (n+1) Δt after the origin."""
        return NEVER if interval is None else self.origin + (self.ticks + 1) * interval

    def count_interval(self, interval: float) -> None:
        """Count an interval that is over; of several that were missed only one counts."""
        now = self.now()
        if now > self.tick(interval) + interval:
            self.origin = now - (self.ticks + 1) * interval
        self.ticks += 1

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""
        return {"time": self.clock.now(), "began": self.began, "origin": self.origin, "ticks": self.ticks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; what passed since doesn't count."""
        self.clock.resume(state["time"])
        self.began, self.origin, self.ticks = state["began"], state["origin"], state["ticks"]

    @abstractmethod
    def enrol(self, clients: Sequence[Client]) -> None:
        """Take note of the clients of the run; the time scenario is for those that are there at its start."""

    @abstractmethod
    def round_time(self, clients: Iterable[Client], task: int) -> float:
        """Return the seconds by which a round of these clients moves the clock on."""

    @abstractmethod
    def foretold(self, client: Client, task: int) -> float | None:
        """Return the clock time at which a round's task that is handed out now ends; None where nobody can know.

        One that its client drops ends then: see ``loses``.
        """

    def foretold_all(self, clients: Sequence[Client], task: int) -> Sequence[float | None]:
        """Return that of several."""
        return [self.foretold(client, task) for client in clients]

    def parts(self, client: Client) -> Parts | None:
        """Return what the time of a client's last task consists of; None where nobody can tell its parts apart."""
        return None

    @property
    def comes_and_goes(self) -> bool:
        """Whether it is known when clients aren't there."""
        return False

    def away(self, since: float, until: float) -> Iterator[tuple[int, Iterator[Stretch]]]:
        """Yield each client's index and when it isn't there, from one clock time to another."""
        return iter(())

    def loses(self, client: Client, task: int, when: float | None = None) -> bool:
        """Tell whether a task that is handed out at a time, or now, is lost, as its client goes before its end."""
        return False

    def losing(self, clients: Sequence[Client], task: int) -> list[Client]:
        """Return those of some clients that lose a task which is handed out now."""
        return [] if self.always else [client for client in clients if self.loses(client, task)]

    def there(self, client: Client) -> bool:
        """Tell whether a client is there, by its availability."""
        return True

    def turns(self, client: Client) -> float:
        """Return the clock time at which a client comes or goes next; infinity: it doesn't."""
        return NEVER

    def comes(self, client: Client, when: float) -> float:
        """Return when a client is there, from a time on; infinity: never."""
        return when

    @abstractmethod
    def due(self, member: Member, when: float, timeout: float, *, lost: bool) -> float:
        """Return the clock time at which a task handed out at one is due, or given up; ``lost``: it can't be sent."""

    @abstractmethod
    def times(self, members: Iterable[Member], everybody: Iterable[Member]) -> Times:
        """Return τ_i (n,), the mean task times: expected ones in virtual time, observed ones in real time."""

    def cycles(self, members: Iterable[Member], everybody: Iterable[Member], interval: float | None) -> Times:
        """Return the mean seconds (n,) from one contribution to the next of a client that waits for no other.

        They are its task times, and the time that it isn't there or works for nothing; infinite for one that is
        never there for as long as a task takes. ``interval``: between aggregations, with which its next task begins.
        """
        return self.times(members, everybody)

    def expected(
        self, clients: Sequence[Client], shares: Callable[[Sequence[int]], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Return the mean (n,) of ``shares`` (m,) among those who are there, by their places, over time."""
        return shares(range(len(clients)))

    @abstractmethod
    def mean(
        self, function: Callable[[Times], Times], members: Sequence[Member], everybody: Iterable[Member]
    ) -> Times:
        """Return E f(T_i) (n,) over a client's task times T_i, of whose law real time knows but the mean."""

    @abstractmethod
    def foresee(self, play: Callable[[Schedule], T]) -> T | None:
        """Return what ``play`` makes of all tasks to come; None where they can't be known."""


class RealTimeScheduler(Scheduler):
    """Time passes by itself."""

    real_time = True

    def enrol(self, clients: Sequence[Client]) -> None:
        """Do nothing: times are observed."""

    def round_time(self, clients: Iterable[Client], task: int) -> float:
        """Return 0: the clock has moved on already."""
        return 0.0

    def foretold(self, client: Client, task: int) -> float | None:
        """Return None: time tells."""
        return None

    def due(self, member: Member, when: float, timeout: float, *, lost: bool) -> float:
        """Return its deadline, five times the client's usual or last time; at once if it can't be sent.

        It doubles with every miss of a client that is dropped: nobody waits for that one, and it may just be slower
        than it was. What is given up tells no time, so that τ_i, and with it d_i, stays what was observed.
        """
        if lost:
            return when
        usual = max(member.seconds / member.answers, member.latest) if member.answers else NEVER
        longer = 2.0 ** min(member.misses, 60) if member.dropped else 1.0
        return when + min(timeout, longer * patience(usual, timeout))

    def times(self, members: Iterable[Member], everybody: Iterable[Member]) -> Times:
        """Return the means of what was observed; before a client's first answer, that of the others."""
        known = [m.seconds / m.answers for m in everybody if m.answers]
        usual = float(np.mean(known)) if known else 1.0
        return np.array([m.seconds / m.answers if m.answers else usual for m in members])

    def mean(
        self, function: Callable[[Times], Times], members: Sequence[Member], everybody: Iterable[Member]
    ) -> Times:
        """Return f(τ_i): no more than the mean is known."""
        return function(self.times(members, everybody))

    def foresee(self, play: Callable[[Schedule], T]) -> T | None:
        """Return None."""
        return None
