"""Expected cycle times and participation of clients with a known availability."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from strategies.clock import RESOLUTION
from strategies.timing.availability import NEVER, Availability

PLAYED = 512  # least number of simulated tasks of a client with random task times
MOST = 20_000  # largest number of simulated tasks of a client
FEW, SURE = 32, 0.002  # check every 32 intervals of availability; stop at this relative error of the mean
PERIODS = 64  # largest number of a client's periods that may be combined to a whole number of intervals
SAMPLES = 96  # number of sampled times of a period
MANY = 32  # where clients' periods differ, the number of sampled times is at most MANY * SAMPLES
LOOKS = 300_000  # where clients' periods differ, about the largest number of evaluations of a client's availability
GOLDEN = (1 + 5**0.5) / 2  # irrational step, so that the samples cover all phases of every period

# End of a task, given its number (from 1) and its beginning, and whether the task is lost.
Ends = Callable[[int, float], tuple[float, bool]]


class Cycle:
    """The tasks of one client that waits for no other.

    Parameters
    ----------
    presence : Availability
        Availability of the clients.
    place : int
        Place of the client in the scenario.
    interval : float, optional
        Seconds between aggregations: tasks begin at its multiples, or when the client becomes available.
    time : float
        Mean seconds of a task.
    """

    def __init__(self, presence: Availability, place: int, interval: float | None, time: float) -> None:
        self.presence, self.place, self.interval, self.time = presence, place, interval, time

    def of_fixed(self) -> float:
        """Return the mean seconds between two contributions, if all tasks take the same time."""
        now, span = self._begin(), self._span(1)
        if now == NEVER:
            return NEVER
        if self.presence.changes(self.place, now) == NEVER:  # always available from now on
            return self._next(self.time)
        if self._ends(now):
            return self._of_ended(now)
        end = now + span
        if self.presence.repeats:  # a period may begin with a wait for the last one's aggregation
            _, now = self._fixed(now, end)
            end += span
        done, _ = self._fixed(now, end)
        return span / done if done else NEVER

    def _fixed(self, now: float, end: float) -> tuple[int, float]:
        """Return the number of completed tasks that begin before ``end``, and the next beginning."""
        done, again = 0, self._next(self.time)
        before = end * (1 - 1e-12) - RESOLUTION  # excludes the first task of the next period
        while now < before:
            leaves = self.presence.leaves(self.place, now)
            following = now  # beginning of a task that the client drops when it leaves
            if now + self.time <= leaves + RESOLUTION:
                first = self._next(now + self.time)
                more = max(0, math.floor((leaves + RESOLUTION - self.time - first) / again) + 1)
                done, following = done + 1 + more, first + more * again
            # A client that waits for an aggregation keeps waiting even if it leaves and returns meanwhile.
            now = self.presence.next_available(self.place, max(leaves, following))
        return done, now

    def _of_ended(self, now: float) -> float:
        """Return the mean seconds between beginnings of tasks from ``now`` on, if every begun task is completed.

        The sequence of tasks isn't periodic, because a task may outlast a period.
        """
        began, again = now, self._next(self.time)
        spans: list[float] = []
        tasks: list[int] = []  # number of tasks that begin in each interval of availability
        while True:
            first = self._next(now + self.time)
            goes = self.presence.changes(self.place, now) - RESOLUTION
            more = max(0, math.ceil((goes - first) / again))
            following = self.presence.next_available(self.place, first + more * again)
            spans.append(following - now)
            tasks.append(1 + more)
            now = following
            if len(tasks) % FEW == 0 and now - began >= self.presence.horizon:
                mean = (now - began) / sum(tasks)
                off = float(np.linalg.norm(np.array(spans) - mean * np.array(tasks))) / (now - began)
                if off <= SURE or len(tasks) >= PLAYED:
                    return mean

    def of_drawn(self, ends: Ends) -> float:
        """Return the mean seconds between two contributions, by simulation; ``ends`` returns the end of each task."""
        began = now = self._begin()
        if now == NEVER:
            return NEVER
        stays = self._ends(now)
        span = self.presence.horizon if stays else self._span(PLAYED)
        end, done, task = now + span, 0, 0
        # The client may be unavailable most of the time.
        more = self.presence.repeats and not self.presence.always
        while task < MOST:
            if now >= end:
                if not more or done >= PLAYED or not (done or stays):
                    break
                end += span
            task += 1
            now, lost = ends(task, now)
            if not lost:
                done, now = done + 1, self._next(now)
            now = self.presence.next_available(self.place, now)
        return ((now if stays else min(now, end)) - began) / done if done else NEVER

    def _ends(self, now: float) -> bool:
        """Return True if the client completes begun tasks although its availability changes."""
        presence, place = self.presence, self.place
        return presence.leaves(place, now) == NEVER > presence.changes(place, now)

    def _begin(self) -> float:
        """Return the first time at which the client becomes available, so that whole periods follow."""
        available = self.presence.is_available(self.place, 0.0)
        gone = self.presence.changes(self.place, 0.0) if available and self.presence.repeats else 0.0
        return 0.0 if gone == NEVER else self.presence.next_available(self.place, gone)

    def _span(self, tasks: int) -> float:
        """Return the seconds to simulate: whole periods for ``tasks`` tasks, or the horizon without a period."""
        if not self.presence.repeats:
            return self.presence.horizon
        if not (period := self.presence.period_of(self.place)):
            return tasks * self.time
        number, whole = max(math.ceil(tasks * self.time / period), 1), 1
        # Combine periods to about a whole number of intervals, where an interval is a large part of a period.
        if self.interval:
            most = min(max(math.ceil(PLAYED * self.interval / period), 1), PERIODS)
            whole = Fraction(period / self.interval).limit_denominator(most).denominator
        return math.ceil(number / whole) * whole * period

    def _next(self, time: float) -> float:
        """Return the time at which a client that completes a task at ``time`` begins the next one."""
        if not self.interval:
            return time
        return math.ceil(time / self.interval * (1 - 1e-9)) * self.interval


def over_time(
    presence: Availability,
    places: Sequence[int],
    times: Sequence[float],
    shares: Callable[[Sequence[int]], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Return the mean shares (n,) of clients in rounds that begin at times spread evenly over a period.

    If the periods of clients differ, the times cover several of the longest period, and so all phases of each.

    Parameters
    ----------
    places, times : sequence
        Places of the clients in the scenario, and the seconds that their tasks take, (n,).
    shares : callable
        Returns the shares (m,) of the available clients, given their positions (m,). The share of a client that
        leaves before its task is done goes to the other clients.
    """
    total, counted = np.zeros(len(places)), 0
    for moment in _moments(presence, places):
        available = [at for at, place in enumerate(places) if presence.is_available(place, moment)]
        if not available:
            continue
        stays = [presence.leaves(places[at], moment) + RESOLUTION >= moment + times[at] for at in available]
        of_round = shares(available) * np.array(stays)
        if of_round.sum() > 0:
            total[available] += of_round / of_round.sum()
            counted += 1
    return total / counted if counted else total


def _moments(presence: Availability, places: Sequence[int]) -> list[float]:
    """Return times that are spread evenly over the period, or over several if periods differ."""
    longest, number = presence.horizon, SAMPLES
    if presence.repeats:
        turning = {presence.period_of(place) for place in places if presence.changes(place, 0.0) < NEVER}
        longest = max(turning, default=longest)
        if len(turning) > 1:
            number = min(max(LOOKS // len(places), SAMPLES), MANY * SAMPLES)
            step = GOLDEN * longest / number**0.5  # as many periods as sampled phases of each
            return ((np.arange(number) + 0.5) * step).tolist()  # type: ignore[no-any-return]
    return ((np.arange(number) + 0.5) / number * longest).tolist()  # type: ignore[no-any-return]
