"""How often clients contribute whose availability is known: their cycles, and who is there on average."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from strategies.clock import RESOLUTION
from strategies.timing.availability import NEVER, Availability

PLAYED = 512  # tasks of a client, at least, where something is drawn
MOST = 20_000  # and at most
FEW, SURE = 32, 0.002  # so many are enough if their mean is known so well
PERIODS = 64  # of a client, at most, of which a whole number of intervals is made
SAMPLES = 96  # times of a period
MANY = 32  # of periods that differ, up to so many times as many times,
LOOKS = 300_000  # of so many looks at clients in all
GOLDEN = (1 + 5**0.5) / 2  # a step by which no period is met at few times of its own

# Of a task by its number from 1 and its beginning: its end, and whether it is lost.
Ends = Callable[[int, float], tuple[float, bool]]


class Cycle:
    """The tasks of one client that waits for no other.

    Parameters
    ----------
    presence : Availability
        When it is there.
    place : int
        Which client it is.
    interval : float, optional
        A task begins at a multiple of it, but for one with which the client comes.
    time : float
        Mean seconds of a task.
    """

    def __init__(self, presence: Availability, place: int, interval: float | None, time: float) -> None:
        self.presence, self.place, self.interval, self.time = presence, place, interval, time

    def of_fixed(self) -> float:
        """Return the mean seconds from one contribution to the next, where all tasks take the same time."""
        now, span = self._begin(), self._span(1)
        if now == NEVER:
            return NEVER
        if self.presence.changes(self.place, now) == NEVER:  # there for good: from one beginning to the next
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
        """Return how many tasks that begin by a time are done, and the next beginning."""
        done, again = 0, self._next(self.time)
        before = end * (1 - 1e-12) - RESOLUTION  # the next period's first task isn't one of these
        while now < before:
            leaves = self.presence.leaves(self.place, now)
            following = now  # the beginning of a task that isn't done when the client goes
            if now + self.time <= leaves + RESOLUTION:
                first = self._next(now + self.time)
                more = max(0, math.floor((leaves + RESOLUTION - self.time - first) / again) + 1)
                done, following = done + 1 + more, first + more * again
            # Who waits for an aggregation waits for it also where it has gone and come back meanwhile.
            now = self.presence.comes(self.place, max(leaves, following))
        return done, now

    def _of_ended(self, now: float) -> float:
        """Return the mean seconds between beginnings from a time on, where whoever begins a task ends it.

        There is no period after which all begins anew: a task may outlast any.
        """
        began, again = now, self._next(self.time)
        spans: list[float] = []
        tasks: list[int] = []  # that begin before the client goes, and the seconds until it comes
        while True:
            first = self._next(now + self.time)
            goes = self.presence.changes(self.place, now) - RESOLUTION
            more = max(0, math.ceil((goes - first) / again))
            following = self.presence.comes(self.place, first + more * again)
            spans.append(following - now)
            tasks.append(1 + more)
            now = following
            if len(tasks) % FEW == 0 and now - began >= self.presence.horizon:
                mean = (now - began) / sum(tasks)
                off = float(np.linalg.norm(np.array(spans) - mean * np.array(tasks))) / (now - began)
                if off <= SURE or len(tasks) >= PLAYED:
                    return mean

    def of_drawn(self, ends: Ends) -> float:
        """Return the same, of tasks that ``ends`` says the end of."""
        began = now = self._begin()
        if now == NEVER:
            return NEVER
        stays = self._ends(now)
        span = self.presence.horizon if stays else self._span(PLAYED)
        end, done, task = now + span, 0, 0
        more = self.presence.repeats and not self.presence.always  # it may be away most of the time
        while task < MOST:
            if now >= end:
                if not more or done >= PLAYED or not (done or stays):
                    break
                end += span
            task += 1
            now, lost = ends(task, now)
            if not lost:
                done, now = done + 1, self._next(now)
            now = self.presence.comes(self.place, now)
        return ((now if stays else min(now, end)) - began) / done if done else NEVER

    def _ends(self, now: float) -> bool:
        """Tell whether the client ends what it begins, though it comes and goes."""
        presence, place = self.presence, self.place
        return presence.leaves(place, now) == NEVER > presence.changes(place, now)

    def _begin(self) -> float:
        """Return the first time at which the client comes, so that whole periods follow."""
        there = self.presence.there(self.place, 0.0)
        gone = self.presence.changes(self.place, 0.0) if there and self.presence.repeats else 0.0
        return 0.0 if gone == NEVER else self.presence.comes(self.place, gone)

    def _span(self, tasks: int) -> float:
        """Return how long to look: so many tasks, in whole periods; all there is where nothing comes again."""
        if not self.presence.repeats:
            return self.presence.horizon
        if not (period := self.presence.period_of(self.place)):
            return tasks * self.time
        number, whole = max(math.ceil(tasks * self.time / period), 1), 1
        if (
            self.interval
        ):  # so many periods are about a whole number of intervals, where one is much of a period
            most = min(max(math.ceil(PLAYED * self.interval / period), 1), PERIODS)
            whole = Fraction(period / self.interval).limit_denominator(most).denominator
        return math.ceil(number / whole) * whole * period

    def _next(self, time: float) -> float:
        """Return when a client that is done at a time begins again."""
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

    Where clients have periods of their own, over so many of the longest that each is met at all times of its own.

    Parameters
    ----------
    places, times : sequence
        Which clients they are, and how long their tasks take, (n,).
    shares : callable
        Of those that are there, by their positions (m,), returns the shares (m,). Those that go before they are
        done leave theirs to the others.
    """
    total, counted = np.zeros(len(places)), 0
    for moment in _moments(presence, places):
        there = [at for at, place in enumerate(places) if presence.there(place, moment)]
        if not there:
            continue
        stays = [presence.leaves(places[at], moment) + RESOLUTION >= moment + times[at] for at in there]
        of_round = shares(there) * np.array(stays)
        if of_round.sum() > 0:
            total[there] += of_round / of_round.sum()
            counted += 1
    return total / counted if counted else total


def _moments(presence: Availability, places: Sequence[int]) -> list[float]:
    """Return times that are spread evenly over what comes again."""
    longest, number = presence.horizon, SAMPLES
    if presence.repeats:
        turning = {presence.period_of(place) for place in places if presence.changes(place, 0.0) < NEVER}
        longest = max(turning, default=longest)
        if len(turning) > 1:
            number = min(max(LOOKS // len(places), SAMPLES), MANY * SAMPLES)
            step = GOLDEN * longest / number**0.5  # as many periods as times of each
            return ((np.arange(number) + 0.5) * step).tolist()  # type: ignore[no-any-return]
    return ((np.arange(number) + 0.5) / number * longest).tolist()  # type: ignore[no-any-return]
