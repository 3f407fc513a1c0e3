"""What rounds that close early, or whose tasks fail, minimise: they are played in advance, without any training.

In virtual time task times and draws are known beforehand, so the shares q_i found here are those of the run itself,
as long as every reply is valid. Fast clients are in time more often than slow ones, so the run minimises Σ q_i f_i
and not Σ p_i f_i.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.clock import RESOLUTION
from strategies.rounds.deadline import NEXT, closing, shared
from strategies.rounds.participation import Draw
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Schedule

# Largest number of rounds that are played, of tasks in them, and of looks: rounds times clients.
MOST_ROUNDS, MOST_TASKS, MOST_LOOKS = 5000, 50_000, 10_000_000

# Smallest number of rounds that tell of shares. If they would have more tasks than this, playing stops before.
FEWEST_ROUNDS, TOO_MANY_TASKS = 20, 500_000

# Largest errors of the distance ½ Σ |q_i − q̂_i| with which shares are reported, and at which playing stops early; the
# number of rounds between two looks at the error.
SURE, VERY_SURE, LOOK_EVERY = 0.02, 0.002, 500

# Draws a round's participants, as places among the free clients, and their weights, given the free clients, their
# p_i, the round's number, and the number of clients that are there, at work or not.
Drawing = Callable[[Sequence[int], Weights, int, int], Draw]


@dataclass
class Played:
    """The result of the rounds that were played.

    Attributes
    ----------
    weight, asked, counted : array (C,)
        For each client, the sum of the d_i with which it counted, and how often it was asked and counted.
    before : list of array (C,)
        ``weight`` after every tenth round: the difference of the two halves of the rounds estimates the error.
    whole : bool
        Whether a run has no further rounds, as no client comes any more.
    """

    weight: Weights
    asked: Weights
    counted: Weights
    before: list[Weights] = field(default_factory=list)
    whole: bool = False

    @property
    def shares(self) -> Weights:
        """q_i (C,): zeros if nothing counted."""
        return _shares(self.weight)

    @property
    def error(self) -> float:
        """Estimated error of the distance ½ Σ |q_i − q̂_i|; infinite if too few rounds were played."""
        if self.whole:
            return 0.0
        if not self.enough:
            return inf
        half = self.before[len(self.before) // 2 - 1]
        return 0.25 * float(np.abs(_shares(half) - _shares(self.weight - half)).sum())

    @property
    def enough(self) -> bool:
        """Whether as many rounds were played as tell of shares."""
        return self.whole or 10 * len(self.before) >= FEWEST_ROUNDS

    @property
    def sure(self) -> bool:
        """Whether enough rounds were played to know the shares."""
        return self.error <= SURE


def _shares(weight: Weights) -> Weights:
    return np.asarray(weight / weight.sum() if weight.any() else weight)


@dataclass(frozen=True)
class Rules:
    """How rounds close, and what becomes of late work: see strategies/rounds/deadline.py.

    ``needed`` and ``worth`` are given the number of clients that are there when a round begins, at work or not. Where
    no client is there, a round waits for one whose place ``may_draw`` accepts.
    """

    deadline: float = 0.0
    needed: Callable[[int], float] = field(default=lambda there: inf)
    late: str = "drop"
    worth: Callable[[Draw, int], list[int]] = field(default=lambda draw, there: [1] * len(draw.clients))
    may_draw: Callable[[int], bool] = field(default=lambda place: True)


def play(schedule: Schedule, clients: Sequence[Client], p: Weights, draw: Drawing, rules: Rules) -> Played:
    """Play rounds in advance.

    Parameters
    ----------
    schedule : Schedule
        When a client's task ends and whether it is lost, and when the clients are there.
    clients, p : sequence of Client, array (C,)
        All clients, and their importances.
    draw : callable
        Draws the participants of a round; called with the free clients as places among all clients.
    """
    now, tasks, number = 0.0, 0, 0
    lost: set[int] = set()  # places of the clients whose last task is lost
    wanted = [place for place in range(len(p)) if rules.may_draw(place)]
    played = Played(np.zeros(len(p)), np.zeros(len(p)), np.zeros(len(p)))
    late: dict[int, tuple[float, float]] = {}  # by place: when the late task is done, and its d_i
    while tasks * FEWEST_ROUNDS <= TOO_MANY_TASKS * number and (
        number < FEWEST_ROUNDS
        or (number < MOST_ROUNDS and tasks < MOST_TASKS and number * len(p) < MOST_LOOKS)
    ):
        number += 1
        if rules.late != NEXT:
            late = {place: task for place, task in late.items() if task[0] > now + RESOLUTION}
        comes = {place: schedule.comes(clients[place], now) for place in range(len(p)) if place not in late}
        if not late and (now := max(now, min((comes[place] for place in wanted), default=NEVER))) == NEVER:
            played.whole = True
            break
        free = [place for place, time in comes.items() if time <= now]
        there = len(free) + sum(schedule.comes(clients[place], now) <= now for place in late)
        known = p[free].sum() + p[list(late)].sum()
        share = p[free].sum() / known if 0 < known < 1 - 1e-12 else p[free].sum()
        drawn = draw(free, p[free] / p[free].sum(), number, there) if share > 0 else Draw((), ())
        asked = [free[place] for place in drawn.clients]
        d = {place: weight * share for place, weight in zip(asked, drawn.weights, strict=True)}
        ends = {place: schedule.outlook(clients[place], number, now) for place in asked}
        due = {place: end.due for place, end in ends.items()}
        lost = (lost - ends.keys()) | {place for place, end in ends.items() if end.lost}
        end = closing(
            due,
            now,
            deadline=rules.deadline,
            needed=rules.needed(there),
            worth=dict(zip(asked, rules.worth(drawn, there), strict=True)),
            failed=lost,
            busy=[time for time, _ in late.values()],
        )
        arrived = [place for place, (time, _) in late.items() if time <= end.at + RESOLUTION]
        counting = {place: d[place] for place in end.in_time if place not in lost}
        if rules.late == NEXT:
            counting |= {place: late[place][1] for place in arrived if place not in lost}
        given = shared(list(counting.values()), sum(drawn.weights) if asked else 1.0)
        for place, weight in zip(counting, given, strict=True):
            played.weight[place] += weight
            played.counted[place] += 1
        played.asked[asked] += 1
        late = {place: task for place, task in late.items() if place not in arrived}
        late |= {place: (due[place], d[place]) for place in end.late}
        now, tasks = end.at, tasks + len(asked)
        if number % 10 == 0:
            played.before.append(played.weight.copy())
        if number % LOOK_EVERY == 0 and played.error <= VERY_SURE:
            break
    return played
