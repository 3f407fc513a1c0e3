"""What rounds that close early minimise: their draws and closings played through, without any training.

In virtual time task times and draws are known beforehand, so the shares q_i that clients will have are those of the
run itself, as long as no client fails. Fast clients are in time more often than slow ones: Σ q_i f_i is what is
minimised, and not Σ p_i f_i.
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

# Rounds that are played: no more, and no more than ask so many clients in all, but a few in any case.
MOST_ROUNDS, MOST_TASKS, FEWEST_ROUNDS = 5000, 50_000, 20

# Shares are told if they are known so well: by how much ½ Σ |q_i − q̂_i| may be off. Every so many rounds it is looked
# whether they are known very well, and no more are needed.
SURE, VERY_SURE, LOOK_EVERY = 0.02, 0.002, 500

# Participants and weights of a round, by places among those that are free, given these, their p_i, the round's
# number, and how many are there, at work or not.
Drawing = Callable[[Sequence[int], Weights, int, int], Draw]


@dataclass
class Played:
    """What came of it: by client, Σ d_i of what counted, and how often it was asked and counted, (C,).

    ``before`` has Σ d_i as it was every ten rounds: how the first half differs from the second says what is known.
    ``whole``: nobody is there any more, and no run has other rounds than these.
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
        """By how much ½ Σ |q_i − q̂_i| may be off."""
        if self.whole:
            return 0.0
        half = self.before[len(self.before) // 2 - 1]
        return 0.25 * float(np.abs(_shares(half) - _shares(self.weight - half)).sum())

    @property
    def sure(self) -> bool:
        """Whether enough rounds were played to know them."""
        return self.error <= SURE


def _shares(weight: Weights) -> Weights:
    return np.asarray(weight / weight.sum() if weight.any() else weight)


@dataclass(frozen=True)
class Rules:
    """How rounds close, and what becomes of late work: see strategies/rounds/deadline.py.

    ``needed`` and ``worth`` are told how many clients are there when a round begins, at work or not. Where nobody is
    there, a round waits for one that ``may_draw`` wants, by its place.
    """

    deadline: float = 0.0
    needed: Callable[[int], float] = field(default=lambda there: inf)
    late: str = "drop"
    worth: Callable[[Draw, int], list[int]] = field(default=lambda draw, there: [1] * len(draw.clients))
    may_draw: Callable[[int], bool] = field(default=lambda place: True)


def play(schedule: Schedule, clients: Sequence[Client], p: Weights, draw: Drawing, rules: Rules) -> Played:
    """Play rounds through.

    Parameters
    ----------
    schedule : Schedule
        What becomes of a client's task, and when the clients are there.
    clients, p : sequence of Client, array (C,)
        All that there are, and their importances.
    draw : callable
        Who of those that are free takes part in a round, as places among these; called with places among all.
    """
    now, tasks, number, lost = 0.0, 0, 0, set[int]()  # by place: whose last task is lost
    wanted = [place for place in range(len(p)) if rules.may_draw(place)]
    played = Played(np.zeros(len(p)), np.zeros(len(p)), np.zeros(len(p)))
    late: dict[int, tuple[float, float]] = {}  # by place: when it is done, and its d_i
    while number < FEWEST_ROUNDS or (number < MOST_ROUNDS and tasks < MOST_TASKS):
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
