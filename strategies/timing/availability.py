"""When clients are there, in virtual time.

    always
    trace:FILE                       stretches of time by client, from a CSV or in FedScale's form
    diurnal:SHARE[,PERIOD[,SPREAD]]  once in every PERIOD (a day) a client is there for SHARE of it; the middle is
                                     drawn for each client around the beginning of the period (midnight), with a
                                     deviation of SPREAD (1/8) of the period: the whole fleet comes and goes
    bernoulli:P[,SECONDS]            in every SECONDS (1) a client is there with probability P, anew

A client that isn't there is handed nothing. One that goes while it works drops its task, but for ``bernoulli``: that
says who begins a task, and who began one ends it. A stretch [start, end) is there at its start and gone at its end;
work that ends just then is done.

Everything follows from the time, the client and the seed, so that a run needs no state of it to be resumed.
"""

import math
import re
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from strategies import streams
from strategies.clock import RESOLUTION
from strategies.timing.named_file import NUMBER, NamedFile, numbers

ALWAYS = "always"
ALLOWED = "always, trace:FILE, diurnal:SHARE[,PERIOD[,SPREAD]], bernoulli:P[,SECONDS]"
PATTERN = rf"^(always|trace:.+|diurnal:{NUMBER}(,{NUMBER}){{0,2}}|bernoulli:{NUMBER}(,{NUMBER})?)$"
NEVER = math.inf
LEAST = 1e-3  # seconds of a slot of ``bernoulli``
DAY = 86_400.0
SPREAD = 1 / 8
RAREST = 1e-5  # of ``bernoulli``: so rare are slots that differ from the others at most
BLOCK = 512  # draws of ``bernoulli`` that are made and kept together, for each client
Stretch = tuple[float, float]


def _past(time: float) -> float:
    """Return a time at which what is due now has happened, however far the clock is."""
    return time + RESOLUTION + 1e-15 * time


class Availability(ABC):
    """When clients are there: by the client's place in the scenario, and clock seconds."""

    #: Whether nobody ever goes.
    always = False
    #: Whether what is there until the horizon comes again, and goes on for ever.
    repeats = True

    @abstractmethod
    def there(self, client: int, time: float) -> bool:
        """Tell whether a client is there at a time, to which the clock's resolution counts."""

    @abstractmethod
    def changes(self, client: int, time: float) -> float:
        """Return when the client goes or comes next, after a time; infinity if it doesn't."""

    def leaves(self, client: int, time: float) -> float:
        """Return when a client drops a task that it begins at a time at which it is there; infinity: it doesn't."""
        return self.changes(client, time)

    def comes(self, client: int, time: float) -> float:
        """Return when the client is there, from a time on: then or later; infinity if it never is."""
        return time if self.there(client, time) else self.changes(client, time)

    def away(self, client: int, since: float, until: float) -> Iterator[Stretch]:
        """Yield the stretches in which a client isn't there, from one time to another, in their order."""
        time, there = since, self.there(client, since)
        while time < until:
            turn = min(self.changes(client, time), until)
            if not there:
                yield time, turn
            time, there = turn, not there

    @property
    @abstractmethod
    def horizon(self) -> float:
        """Seconds that tell how often clients are there: the longest period, or what a file has."""

    def period_of(self, client: int) -> float:
        """Return the same of one client: after so many seconds what it does comes again, where it ``repeats``."""
        return self.horizon


class Always(Availability):
    """Everybody is always there."""

    always = True

    def there(self, client: int, time: float) -> bool:
        """Return True."""
        return True

    def changes(self, client: int, time: float) -> float:
        """Return infinity."""
        return NEVER

    @property
    def horizon(self) -> float:
        """There is none."""
        return 0.0


class Stretches:
    """The stretches of one client, in order and apart from each other.

    Parameters
    ----------
    stretches : iterable of (float, float)
        [start, end) in seconds, 0 ≤ start < end, in any order; those that meet are one.
    period : float, optional
        After which they come again; none of them ends later. None: they don't.

    Raises
    ------
    ValueError
        If they aren't such.
    """

    def __init__(self, stretches: Iterable[Stretch], period: float | None = None) -> None:
        found: list[Stretch] = []
        for start, end in sorted(stretches):
            if not (0 <= start < end < NEVER and (period is None or end <= period)):
                raise ValueError("0 <= start < end, and end <= period")
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], end)
            else:
                found.append((start, end))
        self.period = period
        self.whole = found == [(0.0, period)]
        # Every time at which the client comes, even places, or goes.
        self._turns: list[float] = [time for stretch in found for time in stretch]
        # One that lasts over the end of the period has no turn there.
        if period is not None and len(found) > 1 and found[0][0] == 0 and found[-1][1] == period:
            self._turns = [*self._turns[1:-1]]
            self._first_is_coming = False
        else:
            self._first_is_coming = True

    @property
    def end(self) -> float:
        """When all is over: the period, or the last end."""
        return self.period or max(self._turns, default=0.0)

    def _at(self, time: float) -> tuple[int, int, float]:
        """Return the periods before a time, the turns of its own that are over, and when that period began."""
        if self.period is None:
            return 0, bisect_right(self._turns, time), 0.0
        number = math.floor(time / self.period)
        return number, bisect_right(self._turns, time - number * self.period), number * self.period

    def there(self, time: float) -> bool:
        """Tell whether the client is there."""
        return self.whole or (self._at(time)[1] % 2 == 1) == self._first_is_coming

    def changes(self, time: float) -> float:
        """Return the next turn after a time."""
        if self.whole or not self._turns:
            return NEVER
        number, over, began = self._at(time)
        if over < len(self._turns):
            return began + self._turns[over]
        return NEVER if self.period is None else (number + 1) * self.period + self._turns[0]


class ByStretches(Availability):
    """Stretches of time by client; there may be fewer lists than clients, which then take them in turn."""

    def __init__(self, listed: Sequence[Stretches]) -> None:
        self._listed = listed
        self.repeats = all(each.period is not None for each in listed)

    def _of(self, client: int) -> Stretches:
        return self._listed[client % len(self._listed)]

    def there(self, client: int, time: float) -> bool:
        """Look into the client's list."""
        return self._of(client).there(_past(time))

    def changes(self, client: int, time: float) -> float:
        """Return its next turn."""
        return self._of(client).changes(_past(time))

    @property
    def horizon(self) -> float:
        """The longest list's end."""
        return max(listed.end for listed in self._listed)

    def period_of(self, client: int) -> float:
        """Return the client's own."""
        return self._of(client).end


class Diurnal(ByStretches):
    """A stretch of every period, around a time of the day that is the client's own."""

    def __init__(self, share: float, period: float, spread: float, seed: int) -> None:
        self.share, self.period, self.spread, self.seed = share, period, spread, seed
        self._known: dict[int, Stretches] = {}

    def _of(self, client: int) -> Stretches:
        if client not in self._known:
            drawn = streams.generator(self.seed, "time-of-the-day", client).standard_normal()
            start = (self.spread * drawn - self.share / 2) % 1.0 * self.period
            end = start + self.share * self.period
            over = max(0.0, end - self.period)
            ends = [(start, min(end, self.period)), *([(0.0, over)] if over else [])]
            if self.share >= 1:
                ends = [(0.0, self.period)]
            self._known[client] = Stretches(ends, self.period)
        return self._known[client]

    @property
    def horizon(self) -> float:
        """A period."""
        return self.period


class Bernoulli(Availability):
    """There or not in every slot of time, by a draw; who began a task ends it."""

    def __init__(self, probability: float, seconds: float, seed: int) -> None:
        self.probability, self.seconds, self.seed = probability, seconds, seed
        # By client, the last block that was drawn: its number, its draws, and where they differ from the one before.
        self._blocks: dict[int, tuple[int, bytes, array[int]]] = {}

    def _slot(self, time: float) -> int:
        return math.floor(_past(time) / self.seconds)

    def _block(self, client: int, block: int) -> tuple[bytes, "array[int]"]:
        known = self._blocks.get(client)
        if known is None or known[0] != block:
            rng = streams.generator(self.seed, "slots-of-presence", client, block)
            draws = rng.random(BLOCK) < self.probability
            turns = np.flatnonzero(draws[1:] != draws[:-1]) + 1
            # Of a million clients there are as many of these.
            known = self._blocks[client] = block, draws.tobytes(), array("H", turns.astype("u2").tobytes())
        return known[1:]

    def _drawn(self, client: int, slot: int) -> bool:
        block, at = divmod(slot, BLOCK)
        return bool(self._block(client, block)[0][at])

    def there(self, client: int, time: float) -> bool:
        """Look at the slot's draw."""
        return self._drawn(client, self._slot(time))

    def changes(self, client: int, time: float) -> float:
        """Return the beginning of the next slot with another draw."""
        if self.probability >= 1:
            return NEVER
        block, at = divmod(self._slot(time), BLOCK)
        draws, turns = self._block(client, block)
        now, over = draws[at], bisect_right(turns, at)
        while over == len(turns):
            block, over = block + 1, 0
            draws, turns = self._block(client, block)
            if draws[0] != now:
                return block * BLOCK * self.seconds
        return (block * BLOCK + turns[over]) * self.seconds

    def leaves(self, client: int, time: float) -> float:
        """Return infinity."""
        return NEVER

    @property
    def horizon(self) -> float:
        """So many slots as tell the share."""
        return BLOCK * self.seconds


def make_availability(text: str, num_clients: int, seed: int) -> Availability:
    """Return who is there when.

    Parameters
    ----------
    text : str
        See the module.
    num_clients : int
        C, of which a CSV must know each.
    seed : int
        Fixes what is drawn.

    Raises
    ------
    ValueError
        If it is no such text, or the file isn't as it should be.
    """
    kind, _, argument = text.partition(":")
    if re.fullmatch(PATTERN, text) is None:
        raise ValueError(f"availability = {text!r}: allowed are {ALLOWED}")
    if kind == ALWAYS:
        return Always()
    if kind == "trace":
        return ByStretches(_read(argument, num_clients))
    values = list(numbers(argument.split(",")))
    if not 0 < values[0] <= 1:
        raise ValueError(f"availability = {text!r}: the first number must be above 0, at most 1")
    if len(values) > 1 and not values[1] >= LEAST:
        raise ValueError(f"availability = {text!r}: the second number, seconds, must be {LEAST} or more")
    if kind == "bernoulli":
        if not RAREST <= values[0] <= 1 - RAREST and values[0] != 1:
            raise ValueError(
                f"availability = {text!r}: the first number must be 1, or {RAREST:g} to {1 - RAREST:g}"
            )
        return Bernoulli(values[0], values[1] if len(values) > 1 else 1.0, seed)
    share, period, spread = [*values, *(0.0, DAY, SPREAD)[len(values) :]]
    return Diurnal(share, period, spread, seed)


def check_presence(availability: str, task_failure: float) -> None:
    """Raise ValueError if either is none; of a file nothing is known without the number of clients."""
    if not availability.startswith("trace:"):
        make_availability(availability, 1, 0)
    if not 0 <= task_failure < 1:
        raise ValueError(f"task_failure = {task_failure}: must be 0 or more, below 1")


def _read(name: str, num_clients: int) -> list[Stretches]:
    """Read a trace: a CSV with a row per stretch, or FedScale's, whose devices the clients take in turn."""
    file = NamedFile("availability", "trace", name)
    if (entries := file.entries()) is not None:
        return [_fedscale(file, entry, number + 1) for number, entry in enumerate(entries[:num_clients])]
    found: dict[int, list[Stretch]] = defaultdict(list)
    periods: dict[int, float | None] = {}
    for number, row in file.rows(("client", "start", "end"), ("client", "start", "end", "period")):
        try:
            client, (start, end, *others) = int(row[0]), numbers(row[1:])
            period = others[0] if others else None
            Stretches([(start, end)], period)
            right = client >= 0 and len(others) < 2 and periods.setdefault(client, period) == period
        except (ValueError, IndexError):
            right = False
        if not right:
            raise file.wrong(
                f"row {number} must be client,start,end in seconds, 0 <= start < end, and perhaps the client's "
                "period, the same in all its rows and at least end"
            )
        found[client].append((start, end))
    if missing := [client for client in range(num_clients) if client not in found]:
        raise file.wrong(f"has no row for client {missing[0]}; there are {num_clients} clients, from 0")
    return [Stretches(found[client], periods[client]) for client in range(num_clients)]


def _fedscale(file: NamedFile, entry: Any, number: int) -> Stretches:
    """Make stretches of ``{"active": [s, …], "inactive": [s, …], "finish_time": s}``: come, gone, and the period."""
    try:
        come, gone, period = list(entry["active"]), list(entry["inactive"]), float(entry["finish_time"])
        if len(come) != len(gone) or not period > 0:
            raise ValueError
        pairs = [(float(a), min(float(b), period)) for a, b in zip(come, gone, strict=True)]
        return Stretches([pair for pair in pairs if pair[0] != pair[1]], period)
    except (KeyError, TypeError, ValueError):
        raise file.wrong(
            f"entry {number} must have active and inactive, as many seconds each, active < inactive, and finish_time"
        ) from None
