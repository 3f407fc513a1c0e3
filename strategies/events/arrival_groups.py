"""Groups of clients whose work arrives together, by local steps that suit each client's speed.

The rules are those of FedCompass (Z. Li et al. 2024, algorithm 1, as the authors' scheduler in APPFL has them). Q_min
and Q_max bound the local steps of a task, λ ≥ 1 is the slack, and s_i are the seconds of client i's local step, as
observed. A client that is free at time t is assigned to a group and a number of steps:

    join    of the groups with Q_min ≤ ⌊(T_expected − t) / s_i⌋ ≤ Q_max, the one with most steps
    found   if there is none, a group of its own, with Q steps: the most ⌊(T_latest,g + Q_max s_fastest,g − t) / s_i⌋
            ≤ Q_max over the groups g that aren't late, so that the client arrives with the next group of g's fastest;
            at least Q_min, and Q_max where there is no such group. T_expected = t + Q s_i, T_latest = t + λ Q s_i

A group is complete when all its clients have come, and is over at T_latest.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from strategies.clock import RESOLUTION

NEWEST = 0.9  # share of the last task in the estimate of a client's speed, as in APPFL
CLOSE = 1 + 1e-9  # a number of steps up to so much below a whole number counts as it


@dataclass
class Group:
    """Clients whose work is to arrive together.

    Attributes
    ----------
    expected, latest : float
        Clock seconds T_expected and T_latest; both are 0 once the group was aggregated without some of its clients.
    clients, come : list of int
        Clients that are at work, and those that have come, by index.
    """

    expected: float
    latest: float
    clients: list[int] = field(default_factory=list)
    come: list[int] = field(default_factory=list)


@dataclass
class Assignment:
    """The present task of a client: its number of local steps, its beginning in clock seconds, and its group."""

    steps: int
    began: float
    group: int | None = None


class ArrivalGroups:
    """Assigns clients to groups, and knows which contributions wait for which.

    Parameters
    ----------
    least, most, slack : int, int, float
        Q_min, Q_max and λ.

    Attributes
    ----------
    groups : dict of int to Group
        By number, in the order in which they were founded.
    tasks : dict of int to Assignment
        The last task of each client, by index.
    speeds : dict of int to float
        s_i, seconds of a local step, by client index.
    general : list of int
        The clients, by index, whose contributions came too late for their groups, and count with the next one.
    """

    def __init__(self, least: int, most: int, slack: float) -> None:
        self.least, self.most, self.slack = least, most, slack
        self.groups: dict[int, Group] = {}
        self.tasks: dict[int, Assignment] = {}
        self.speeds: dict[int, float] = {}
        self.general: list[int] = []
        self._founded = 0

    # ---- Work that arrives -----------------------------------------------------------------------------------------

    def arrive(self, client: int, now: float) -> bool:
        """Note that a client's work arrived; return True if it is aggregated alone, as the client has no group."""
        task = self.tasks[client]
        seconds, known = max(now - task.began, RESOLUTION) / task.steps, self.speeds.get(client)
        self.speeds[client] = seconds if known is None else (1 - NEWEST) * known + NEWEST * seconds
        if (group := self._group_of(client)) is None:
            return True
        if now > group.latest + RESOLUTION:
            self.general.append(client)
        else:
            group.come.append(client)
        self._leave(client)
        return False

    def due(self, now: float, next_event: float = math.inf) -> int | None:
        """Return a group that is to be aggregated: one that is complete, or whose T_latest has come; None: none.

        ``next_event`` is the time of the next event: if that is now, too, a T_latest of now hasn't come yet.
        """
        over = now if next_event > now + RESOLUTION else now - 2 * RESOLUTION
        for number, group in self.groups.items():
            if group.come and (not group.clients or over >= group.latest - RESOLUTION):
                return number
        return None

    def close(self, number: int) -> None:
        """Note that a group is aggregated, together with the contributions that were too late for theirs."""
        group = self.groups[number]
        group.come, group.expected, group.latest, self.general = [], 0.0, 0.0, []
        if not group.clients:
            del self.groups[number]

    def waits(self, client: int) -> bool:
        """Return True if a client's contribution waits for its group, so that it gets no task."""
        return any(client in group.come for group in self.groups.values())

    def waiting(self, client: int) -> int:
        """Return the number of contributions of a client that wait."""
        return self.general.count(client) + self.waits(client)

    # ---- Tasks -----------------------------------------------------------------------------------------------------

    def assign(self, client: int, now: float) -> float | None:
        """Assign a free client to a group and a number of steps; return T_latest if it has founded the group.

        A client whose speed isn't known yet has Q_max steps, and no group.
        """
        self._leave(client)  # if its last task came to nothing
        if (speed := self.speeds.get(client)) is None:
            self.tasks[client] = Assignment(self.most, now)
            return None
        fitting = {
            number: steps
            for number, group in self.groups.items()
            if self.least <= (steps := math.floor((group.expected - now) / speed * CLOSE)) <= self.most
        }
        if fitting:
            number = max(fitting, key=lambda each: (fitting[each], each))
            self.groups[number].clients.append(client)
            self.tasks[client] = Assignment(fitting[number], now, number)
            return None
        steps = self._steps_of_new(speed, now)
        number = self._founded
        group = Group(now + steps * speed, now + self.slack * steps * speed, [client])
        self.groups[number], self._founded = group, number + 1
        self.tasks[client] = Assignment(steps, now, number)
        return group.latest

    def _steps_of_new(self, speed: float, now: float) -> int:
        """Return the number of steps of a client that founds a group, by its seconds of a step."""
        found = []
        for group in self.groups.values():
            if now < group.latest:
                fastest = min(self.speeds[each] for each in (*group.clients, *group.come))
                steps = math.floor((group.latest + self.most * fastest - now) / speed * CLOSE)
                found.append(steps)
        fitting = [steps for steps in found if steps <= self.most]
        return max(max(fitting), self.least) if fitting else self.most

    def _group_of(self, client: int) -> Group | None:
        """Return the group that a client is at work for; None if it has none."""
        task = self.tasks.get(client)
        group = None if task is None or task.group is None else self.groups.get(task.group)
        return group if group is not None and client in group.clients else None

    def _leave(self, client: int) -> None:
        """Take a client out of those that are at work for its group."""
        if (group := self._group_of(client)) is not None:
            group.clients.remove(client)
            if not (group.clients or group.come):
                self.groups = {number: each for number, each in self.groups.items() if each is not group}

    # ---- Saved and restored ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return groups, tasks and speeds as JSON values."""
        return {
            "arrival-groups": {
                "groups": [[number, asdict(group)] for number, group in self.groups.items()],
                "tasks": [[client, asdict(task)] for client, task in self.tasks.items()],
                "speeds": list(self.speeds.items()),
                "general": list(self.general),
                "founded": self._founded,
            }
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``."""
        kept = state["arrival-groups"]
        self.groups = {number: Group(**group) for number, group in kept["groups"]}
        self.tasks = {client: Assignment(**task) for client, task in kept["tasks"]}
        self.speeds = dict(kept["speeds"])
        self.general, self._founded = list(kept["general"]), kept["founded"]
