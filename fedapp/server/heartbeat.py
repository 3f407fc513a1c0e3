"""A sign of life in the log, also while nothing happens."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from fedapp.report.progress import progress_line
from fedapp.server.record import Entry, Observer
from strategies.clock import WallClock

log = logging.getLogger("flwr.fedapp")

# Real seconds between two lines. The longest pause between two polls of a waiting run is 5 s: a line every 30 s.
EVERY = 25.0


class HowFar(NamedTuple):
    """How far a run is, and how many of its clients are busy."""

    aggregation: int
    working: int
    clients: int


class Heartbeat(Observer):
    """Logs a line of progress now and then; what waits looks in at every poll.

    It says how far a run is, saved or not: what a kill loses of that is made again.

    Parameters
    ----------
    total : int
        Aggregations of the run.
    standing : callable
        Tells how it stands.
    budget_left : callable
        Real seconds after which the run ends in any case; None: it has no such limit.
    now : callable
        Real seconds.
    """

    def __init__(
        self,
        total: int,
        standing: Callable[[], HowFar],
        budget_left: Callable[[], float | None] = lambda: None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.total = total
        self.standing = standing
        self.budget_left = budget_left
        self.now = now or WallClock().now
        self._told = self.now()
        self._first: tuple[int, float] | None = None  # aggregation, and when it was noted
        self._last = (0, 0.0)

    def watching(self, stopped: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``stopped`` so that whoever asks it lets the line be logged where it is due."""

        def asked() -> bool:
            self.look()
            return stopped()

        return asked

    def look(self) -> None:
        """Log the line if it is due."""
        if self.now() - self._told >= EVERY:
            self._told = self.now()
            standing = self.standing()
            text = progress_line(
                standing.aggregation, self.total, standing.working, standing.clients, self.seconds_left()
            )
            log.info("%s", text, extra={"aggregation": standing.aggregation})

    def note(self, entry: Entry) -> None:
        """Note when an aggregation was done."""
        self._last = entry.progress.aggregation, self.now()
        self._first = self._first or self._last
        self.look()

    def seconds_left(self) -> float | None:
        """Return how long the rest takes at the mean pace so far, counted from the first that was seen."""
        budget = self.budget_left()
        if self._first is None or self._last[0] == self._first[0]:
            return budget
        mean = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        rest = (self.total - self._last[0]) * mean - min(self.now() - self._last[1], mean)
        return max(0.0, rest if budget is None else min(rest, budget))
