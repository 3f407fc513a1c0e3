"""Virtual time: arrivals follow from the time scenario, and the clock jumps from one to the next."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from strategies.clock import RESOLUTION, Clock, WallClock
from strategies.errors import RunError
from strategies.exchange import Mail
from strategies.ledger import Ledger, Member, Task
from strategies.pace import NEVER, Arrival, Event, Pace, Retry, T, TaskTime, Tick, Times, WallPace
from strategies.roster import Client
from strategies.time_scenario import TimeScenario


class VirtualPace(Pace):
    """Time follows from the time scenario; a task is handed out as soon as it is known, so that all stay busy."""

    learns, waits = False, False

    def __init__(self, clock: Clock, scenario: str, seed: int, budget: float) -> None:
        super().__init__(clock, scenario, seed, budget)
        self._clients: Sequence[Client] = ()
        self._law: TimeScenario | None = None
        self._places: dict[int, int] = {}

    def enrol(self, clients: Sequence[Client]) -> None:
        """Take note of the clients, until the first of their times is asked for."""
        if self._law is None:
            self._clients = clients

    def state(self) -> dict[str, Any]:
        """Add which client has which place in the scenario."""
        number = 0 if self._law is None else len(self._law.means)
        return {**super().state(), "places": list(self._places), "scenario-clients": number}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Lay out the scenario as it was."""
        super().restore(state)
        if number := state["scenario-clients"]:
            self._law = TimeScenario(self.scenario, number, self.seed)
            self._places = {index: place for place, index in enumerate(state["places"])}

    def round_time(self, clients: Iterable[Client], task: int) -> float:
        """Return the time of the slowest."""
        return max((self._task_time(client, task) for client in clients), default=0.0)

    def foretold(self, client: Client, task: int) -> float | None:
        """Return when its time in the scenario is over."""
        return self.now() + self._task_time(client, task)

    def task_time(self, member: Member, timeout: float, *, lost: bool) -> float:
        """Return its time in the scenario."""
        return self._task_time(member.client, member.tasks)

    def times(self, members: Iterable[Member], ledger: Ledger) -> Times:
        """Return the scenario's means."""
        means = self._scenario().means
        return np.array([float(means[min(self._place(m.client), len(means) - 1)]) for m in members])

    def mean(self, function: Callable[[Times], Times], members: Sequence[Member], ledger: Ledger) -> Times:
        """Return the mean over the scenario's distribution."""
        law = self._scenario()
        return np.array([function(law.distribution(self._place(m.client))).mean() for m in members])

    def foresee(self, play: Callable[[TaskTime], T]) -> T | None:
        """Play it through."""
        return play(self._task_time)

    def kept(self, tasks: Iterable[Task]) -> list[Task]:
        """Keep all: the resumed run does what this one would have done."""
        return list(tasks)

    def events(self, ledger: Ledger, mail: Mail, interval: float | None) -> Iterator[Event]:
        """Yield what is due next, and jump there."""
        while True:
            due, tick = ledger.agenda.next_due(), self.tick(interval)
            now = min(due, tick)
            if now == NEVER or (due == NEVER and not ledger.buffer):
                raise RunError("no client is left: each was lost or failed; the log names the reasons")
            if self.over(now):
                return
            if due > tick + RESOLUTION:
                self.clock.wait_until(tick)
                self.ticks += 1
                yield Tick()
                continue
            due, item = ledger.agenda.pop()
            if isinstance(item, Member):
                self.clock.wait_until(due)
                yield Retry(item)
            elif (task := ledger.tasks.get(item)) is not None:
                reply = None if task.lost else mail.wait(task.message_id)
                if mail.stopped():
                    return
                self.clock.wait_until(due)
                yield Arrival(task, reply)

    def _task_time(self, client: Client, task: int) -> float:
        return self._scenario().task_time(self._place(client), task)

    def _scenario(self) -> TimeScenario:
        if self._law is None:
            self._law = TimeScenario(self.scenario, len(self._clients), self.seed)
            self._places = {client.index: place for place, client in enumerate(self._clients)}
        return self._law

    def _place(self, client: Client) -> int:
        """Clients are the scenario's in the order of their indices at the start; later ones follow."""
        return self._places.setdefault(client.index, len(self._places))


def make_pace(clock: Clock, scenario: str, seed: int, budget: float) -> Pace:
    """Return the pace of a clock: real time by a ``WallClock``, virtual time by any other."""
    kind = WallPace if isinstance(clock, WallClock) else VirtualPace
    return kind(clock, scenario, seed, budget)
