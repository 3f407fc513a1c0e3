"""Availability of clients in virtual time.

    always
    trace:FILE                       intervals of availability by client, from a CSV or in FedScale's format
    diurnal:SHARE[,PERIOD[,SPREAD]]  once in every PERIOD (a day) a client is available for SHARE of the period; the
                                     middle is drawn for each client around the beginning of the period (midnight),
                                     with a deviation of SPREAD (1/8) of the period: the fleet follows a common cycle
    bernoulli:P[,SECONDS]            in every slot of SECONDS (1) a client is available with probability P

A client that isn't available gets no task. A client that becomes unavailable while it works drops its task, except
under ``bernoulli``, which decides only whether a client may begin a task. An interval [start, end) includes its start
and excludes its end; a task that ends exactly at the end of the interval is completed.

Availability depends only on the time, the client and the seed, so that a resumed run needs no saved state of it.
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
LEAST = 1e-3  # least seconds of a slot of ``bernoulli``
DAY = 86_400.0
SPREAD = 1 / 8
RAREST = 1e-5  # least probability under ``bernoulli`` of being available, and of being unavailable
BLOCK = 512  # number of slots of ``bernoulli`` that are drawn and cached together, for each client
Stretch = tuple[float, float]
_COLUMNS = ("client", "start", "end")  # of a trace


def _past(time: float) -> float:
    """Return a time later by more than the clock's rounding error, so that events due now are over."""
    return time + RESOLUTION + 1e-15 * time


class Availability(ABC):
    """Availability of clients, given by their place in the scenario, at clock times in seconds."""

    #: Whether all clients are always available.
    always = False
    #: Whether the availability until ``horizon`` repeats for ever.
    repeats = True

    @abstractmethod
    def is_available(self, client: int, time: float) -> bool:
        """Return True if a client is available at a time, within the clock's resolution."""

    @abstractmethod
    def changes(self, client: int, time: float) -> float:
        """Return the time of a client's next change of availability; infinity if there is none."""

    def leaves(self, client: int, time: float) -> float:
        """Return when an available client drops a task that it begins at ``time``; infinity if it doesn't."""
        return self.changes(client, time)

    def next_available(self, client: int, time: float) -> float:
        """Return the first time from ``time`` on at which a client is available; infinity if it never is."""
        return time if self.is_available(client, time) else self.changes(client, time)

    def absences(self, client: int, since: float, until: float) -> Iterator[Stretch]:
        """Yield the intervals in which a client isn't available between two times, in order."""
        time, available = since, self.is_available(client, since)
        while time < until:
            turn = min(self.changes(client, time), until)
            if not available:
                yield time, turn
            time, available = turn, not available

    @property
    @abstractmethod
    def horizon(self) -> float:
        """Seconds that are representative of availability: the longest period, or the duration of a trace."""

    def period_of(self, client: int) -> float:
        """Return the horizon of one client, in seconds: its period, if availability ``repeats``."""
        return self.horizon


class Always(Availability):
    """All clients are always available."""

    always = True

    def is_available(self, client: int, time: float) -> bool:
        """Return True."""
        return True

    def changes(self, client: int, time: float) -> float:
        """Return infinity."""
        return NEVER

    @property
    def horizon(self) -> float:
        """Return 0, because availability never changes."""
        return 0.0


def _merged(stretches: Iterable[Stretch], period: float) -> list[Stretch]:
    """Return intervals in order, those that overlap or touch as one; ValueError if one is none, or ends too late."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if not (0 <= start < end < NEVER and end <= period):
            raise ValueError("0 <= start < end, and end <= period")
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


class Stretches:
    """The intervals of availability of one client, sorted and disjoint.

    Parameters
    ----------
    stretches : iterable of (float, float)
        [start, end) in seconds, 0 ≤ start < end, in any order; overlapping and adjacent intervals are merged.
    period : float, optional
        Seconds after which the intervals repeat; no interval may end later. None: they don't repeat.

    Raises
    ------
    ValueError
        If an interval is invalid.
    """

    def __init__(self, stretches: Iterable[Stretch], period: float | None = None) -> None:
        found = _merged(stretches, NEVER if period is None else period)
        self.period = period
        self.whole = found == [(0.0, period)]
        # Times of changes: the client becomes available at even positions, unavailable at odd ones.
        self._turns: list[float] = [time for stretch in found for time in stretch]
        # An interval that lasts beyond the end of the period has no change there.
        wraps = len(found) > 1 and (found[0][0], found[-1][1]) == (0, period)
        self._first_is_coming = not wraps
        if wraps:
            self._turns = self._turns[1:-1]

    @property
    def end(self) -> float:
        """The period in seconds, or the end of the last interval."""
        return self.period or max(self._turns, default=0.0)

    def _at(self, time: float) -> tuple[int, int, float]:
        """Return the number of whole periods before a time, of changes since then, and the period's start."""
        if self.period is None:
            return 0, bisect_right(self._turns, time), 0.0
        number = math.floor(time / self.period)
        return number, bisect_right(self._turns, time - number * self.period), number * self.period

    def is_available(self, time: float) -> bool:
        """Return True if the client is available at a time."""
        return self.whole or (self._at(time)[1] % 2 == 1) == self._first_is_coming

    def changes(self, time: float) -> float:
        """Return the time of the next change after a time."""
        if self.whole or not self._turns:
            return NEVER
        number, over, began = self._at(time)
        if over < len(self._turns):
            return began + self._turns[over]
        return NEVER if self.period is None else (number + 1) * self.period + self._turns[0]


class ByStretches(Availability):
    """Intervals of availability by client; with fewer lists than clients, the lists are reused in turn."""

    def __init__(self, listed: Sequence[Stretches]) -> None:
        self._listed = listed
        self.repeats = all(each.period is not None for each in listed)

    def _of(self, client: int) -> Stretches:
        return self._listed[client % len(self._listed)]

    def is_available(self, client: int, time: float) -> bool:
        """Return True if the client's list has an interval with this time."""
        return self._of(client).is_available(_past(time))

    def changes(self, client: int, time: float) -> float:
        """Return the next change in the client's list."""
        return self._of(client).changes(_past(time))

    @property
    def horizon(self) -> float:
        """The latest end of all lists."""
        return max(listed.end for listed in self._listed)

    def period_of(self, client: int) -> float:
        """Return the end of the client's list."""
        return self._of(client).end


class Diurnal(Availability):
    """One interval in every period, around a time of the day that is drawn for each client."""

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

    def is_available(self, client: int, time: float) -> bool:
        """Return True if the client's interval of the period has this time."""
        return self._of(client).is_available(_past(time))

    def changes(self, client: int, time: float) -> float:
        """Return the next beginning or end of the client's interval."""
        return self._of(client).changes(_past(time))

    @property
    def horizon(self) -> float:
        """The period in seconds."""
        return self.period


class Bernoulli(Availability):
    """Each client is available or not in each slot, by a random draw; a task that has begun is completed."""

    def __init__(self, probability: float, seconds: float, seed: int) -> None:
        self.probability, self.seconds, self.seed = probability, seconds, seed
        # By client, the last drawn block: its number, its draws, and the positions of changes.
        self._blocks: dict[int, tuple[int, bytes, array[int]]] = {}

    def _slot(self, time: float) -> int:
        return math.floor(_past(time) / self.seconds)

    def _block(self, client: int, block: int) -> tuple[bytes, "array[int]"]:
        known = self._blocks.get(client)
        if known is None or known[0] != block:
            rng = streams.generator(self.seed, "slots-of-presence", client, block)
            draws = rng.random(BLOCK) < self.probability
            turns = np.flatnonzero(draws[1:] != draws[:-1]) + 1
            # Kept small, because there may be a million clients.
            known = self._blocks[client] = block, draws.tobytes(), array("H", turns.astype("u2").tobytes())
        return known[1:]

    def _drawn(self, client: int, slot: int) -> bool:
        block, at = divmod(slot, BLOCK)
        return bool(self._block(client, block)[0][at])

    def is_available(self, client: int, time: float) -> bool:
        """Return the draw of the slot that contains the time."""
        return self._drawn(client, self._slot(time))

    def changes(self, client: int, time: float) -> float:
        """Return the beginning of the next slot with a different draw."""
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
        """Seconds of one block of slots, enough to estimate the share."""
        return BLOCK * self.seconds


def make_availability(text: str, num_clients: int, seed: int) -> Availability:
    """Return the availability that a text describes.

    Parameters
    ----------
    text : str
        One of the forms listed in the module's docstring.
    num_clients : int
        C; a CSV must have a row for each client.
    seed : int
        Seed of the random draws.

    Raises
    ------
    ValueError
        If the text or the file is invalid.
    """
    kind, _, argument = text.partition(":")
    if re.fullmatch(PATTERN, text) is None:
        raise ValueError(f"availability = {text!r}: allowed are {ALLOWED}")
    if kind == ALWAYS:
        return Always()
    if kind == "trace":
        return ByStretches(_read(argument, num_clients))
    values = _checked(text, list(numbers(argument.split(","))))
    if kind == "bernoulli":
        if not RAREST <= values[0] <= 1 - RAREST and values[0] != 1:
            raise ValueError(
                f"availability = {text!r}: the first number must be 1, or {RAREST:g} to {1 - RAREST:g}"
            )
        probability, seconds = [*values, *(0.0, 1.0)[len(values) :]]
        return Bernoulli(probability, seconds, seed)
    share, period, spread = [*values, *(0.0, DAY, SPREAD)[len(values) :]]
    return Diurnal(share, period, spread, seed)


def _checked(text: str, values: list[float]) -> list[float]:
    """Return the numbers of an availability; ValueError if the share or the seconds can't be."""
    if not 0 < values[0] <= 1:
        raise ValueError(f"availability = {text!r}: the first number must be above 0, at most 1")
    if len(values) > 1 and not values[1] >= LEAST:
        raise ValueError(f"availability = {text!r}: the second number, seconds, must be {LEAST} or more")
    return values


def check_presence(availability: str, task_failure: float) -> None:
    """Raise ValueError if a value is invalid; a trace is read later, when the number of clients is known."""
    if not availability.startswith("trace:"):
        make_availability(availability, 1, 0)
    if not 0 <= task_failure < 1:
        raise ValueError(f"task_failure = {task_failure}: must be 0 or more, below 1")


def _read(name: str, num_clients: int) -> list[Stretches]:
    """Read a trace: a CSV with one row per interval, or FedScale's file, whose devices are assigned in turn."""
    file = NamedFile("availability", "trace", name)
    if (entries := file.entries()) is not None:
        return [_fedscale(file, entry, number + 1) for number, entry in enumerate(entries[:num_clients])]
    found: dict[int, list[Stretch]] = defaultdict(list)
    periods: dict[int, float | None] = {}

    def read(row: Sequence[str]) -> tuple[int, Stretch]:
        client, (start, end, *others) = int(row[0]), numbers(row[1:])
        period = others[0] if others else None
        Stretches([(start, end)], period)
        if client < 0 or len(others) > 1 or periods.setdefault(client, period) != period:
            raise ValueError
        return client, (start, end)

    must = (
        "client,start,end in seconds, 0 <= start < end, and perhaps the client's period, the same in all its rows "
        "and at least end"
    )
    for _, (client, stretch) in file.read_rows((_COLUMNS, (*_COLUMNS, "period")), read, must):
        found[client].append(stretch)
    complete = file.by_client(found, num_clients)
    return [Stretches(stretches, periods[client]) for client, stretches in enumerate(complete)]


def _fedscale(file: NamedFile, entry: Any, number: int) -> Stretches:
    """Return the intervals of ``{"active": [s, …], "inactive": [s, …], "finish_time": s}``: starts, ends, period."""
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
