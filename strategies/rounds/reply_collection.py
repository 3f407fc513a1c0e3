"""Reply collection: which clients a round may ask, when the round closes, and which replies count.

``AllReplies`` waits for all participants; strategies/rounds/deadline_collector.py closes a round earlier.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.clients.client_statistics import Timeline
from strategies.clients.roster import Client
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.rounds.round import Round

Metrics = Mapping[str, int | float]


class ReplyCollector(Protocol):
    """The interface between the round loop and reply collection."""

    def busy_clients(self) -> list[int]:
        """Return the indices of the clients that are at work on earlier rounds."""

    def free_clients(self, grid: Grid) -> Sequence[Client]:
        """Return the connected clients that a round may ask."""

    def duration(self, current: Round) -> float:
        """Return the duration of a round, seconds of the run's clock; before its replies are collected, at most."""

    def collect(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterable[Message]:
        """Send a round's requests, and return the replies that count, as they come."""

    def finish(self, current: Round) -> Metrics:
        """Note the late tasks of a round that is complete, and return the round's metrics of late replies."""


class AllReplies:
    """Closes a round when all its participants have answered, or the rest isn't awaited any more.

    A reply is awaited until the timeout; on devices with safeguards the timeout adapts to the clients' usual times
    (strategies/core/reply_timeouts.py). A later reply is late, and dropped.

    Parameters
    ----------
    can_draw_from : callable
        Returns True if a round can be drawn among some of the connected clients; otherwise all can be asked.
    """

    def __init__(
        self,
        run: RunState,
        pending: PendingReplies,
        timeline: Timeline,
        can_draw_from: Callable[[Sequence[Client]], bool] = bool,
    ) -> None:
        self._run, self._pending, self._timeline, self._can_draw_from = run, pending, timeline, can_draw_from

    def busy_clients(self) -> list[int]:
        """Return the clients whose replies were no longer awaited, and haven't come."""
        return self._pending.busy_clients()

    def free_clients(self, grid: Grid) -> Sequence[Client]:
        """Return the clients that aren't at work on earlier rounds; all, if no round can be drawn among these."""
        if not self._run.scheduler.real_time:
            return self._run.clients
        free = self._pending.free(grid, messages.TRAIN)
        return free if self._can_draw_from(free) else self._run.clients

    def duration(self, current: Round) -> float:
        """Return the task time of the slowest participant, seconds."""
        return self._run.scheduler.round_time(current.clients, current.number)

    def collect(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        """Send the requests, and return the replies that are awaited, as they come."""
        current.begin(requests, self._timeline, self._run.scheduler)
        return self._pending.awaited(
            grid,
            current.to_work_on(requests),
            lambda index: self._timeline.arrived(index, self._run.scheduler.now()),
            current.overdue,
        )

    def finish(self, current: Round) -> Metrics:
        """Return the counts of replies that weren't awaited any more: those are late, not failed."""
        late, wasted = current.overdue.keys() & current.failures.keys(), self._pending.take_late_bytes()
        if not late and not wasted:
            return {}
        wasted += sum(current.request_bytes.get(index, 0) for index in late)
        return {**late_metrics(len(late), wasted), messages.FAILURES: len(current.failures) - len(late)}


def late_metrics(number: int, wasted: int) -> dict[str, int | float]:
    """Return a round's metrics of late replies: their number, and the bytes that are wasted."""
    return {messages.LATE_UPDATES: number, messages.DROPPED_UPDATES: number, messages.BYTES_WASTED: wasted}
