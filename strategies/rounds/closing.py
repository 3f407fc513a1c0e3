"""When a round closes, and which replies count in it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from strategies.clients.accounts import Timeline
from strategies.clients.roster import Client
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.rounds.round import Chosen, Round


class Closing(Protocol):
    """The interface between the round loop and the part that closes rounds.

    Attributes
    ----------
    early : bool
        Whether a round may close before all replies are there.
    """

    early: bool

    @property
    def waits_for_late_work(self) -> bool:
        """Whether clients are at work on tasks of earlier rounds."""

    def begin(self) -> None:
        """Begin or resume a run."""

    def check(self, num_clients: int) -> None:
        """Raise ValueError if this number of clients is too small."""

    def busy(self) -> list[int]:
        """Return the indices of the clients that are at work on earlier rounds."""

    def free(self, grid: Grid) -> list[Client]:
        """Return the connected clients that aren't at work on earlier rounds."""

    def nobody(self, free: Sequence[Client]) -> Chosen | None:
        """Return the empty participants of a round that asks no client, given the free ones; None: draw the round."""

    def number_to_draw(self) -> int | None:
        """Return the number of participants to draw; None: the participation scheme's number."""

    def open(self, current: Round) -> None:
        """Open a round, before its requests are made."""

    def sent(self, client: Client, request: Message) -> None:
        """Note a client's request."""

    def ready(self, current: Round) -> None:
        """Note that all requests of a round are made."""

    def replies(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterable[Message]:
        """Send a round's requests, and return the replies that count, as they come."""

    def settle(self, current: Round) -> Mapping[str, int | float]:
        """Enter late tasks in the accounts, and return the round's metrics of late tasks."""

    def cut_off(self) -> bool:
        """Return True if the round is given up: the run is stopped, or the round would exceed the time budget."""

    def duration(self, current: Round | None, server_round: int) -> float:
        """Return the duration of a round, seconds of the run's clock."""

    def may_evaluate(self) -> list[Client]:
        """Return the clients that can be asked to evaluate a model."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""

    def reset(self) -> None:
        """Forget an earlier run."""


class WaitForAll:
    """Closes a round when all its participants have answered, or the rest isn't awaited any more.

    A reply is awaited until the timeout; on devices, with safeguards, by what clients usually take
    (strategies/core/patience.py). What comes later is late, and dropped.

    Parameters
    ----------
    suffices : callable
        Returns True if a round can be drawn among some of the connected clients; otherwise all can be asked.
    """

    early = False
    waits_for_late_work = False

    def __init__(
        self,
        run: RunState,
        pending: PendingReplies,
        timeline: Timeline,
        suffices: Callable[[Sequence[Client]], bool] = bool,
    ) -> None:
        self._run, self._pending, self._timeline, self._suffices = run, pending, timeline, suffices
        self._bytes: dict[int, int] = {}  # of the requests of a round in real time, by client index

    def begin(self) -> None:
        """Do nothing: nothing is late."""

    def check(self, num_clients: int) -> None:
        """Do nothing: any number of clients works."""

    def busy(self) -> list[int]:
        """Return the clients whose replies were no longer awaited, and haven't come."""
        return self._pending.at_work()

    def free(self, grid: Grid) -> list[Client]:
        """Return the clients that aren't at work on earlier rounds; all, if no round can be drawn among these."""
        if not self._run.pace.real_time:
            return self._run.clients
        free = self._pending.free(grid, messages.TRAIN)
        return free if self._suffices(free) else self._run.clients

    def nobody(self, free: Sequence[Client]) -> Chosen | None:
        """Return None: participants are drawn in every round."""
        return None

    def number_to_draw(self) -> int | None:
        """Return None."""
        return None

    def open(self, current: Round) -> None:
        """Forget the requests of the last round."""
        self._bytes = {}

    def sent(self, client: Client, request: Message) -> None:
        """Note the bytes of a client's request."""
        if self._run.pace.real_time:
            self._bytes[client.index] = messages.total_bytes(request)

    def ready(self, current: Round) -> None:
        """Do nothing."""

    def replies(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        """Send the requests, and return the replies that are awaited, as they come."""
        current.begin(requests, self._timeline, self._run.pace)
        requests = current.to_work_on(requests)
        return self._pending.awaited(
            grid,
            requests,
            lambda index: self._timeline.arrived(index, self._run.pace.now()),
            current.overdue,
        )

    def settle(self, current: Round) -> Mapping[str, int | float]:
        """Return the counts of replies that weren't awaited any more: those are late, not failed."""
        late, wasted = current.overdue.keys() & current.failures.keys(), self._pending.take_late_bytes()
        if not late and not wasted:
            return {}
        wasted += sum(self._bytes.get(index, 0) for index in late)
        return {
            messages.LATE_UPDATES: len(late),
            messages.DROPPED_UPDATES: len(late),
            messages.FAILURES: len(current.failures) - len(late),
            messages.BYTES_WASTED: wasted,
        }

    def cut_off(self) -> bool:
        """Return True if the run is stopped."""
        return self._run.stopped()

    def duration(self, current: Round | None, server_round: int) -> float:
        """Return the task time of the slowest participant, seconds."""
        return 0.0 if current is None else self._run.pace.round_time(current.clients, server_round)

    def may_evaluate(self) -> list[Client]:
        """Return the clients that aren't at work on earlier rounds."""
        run = self._run
        if run.grid is None or not run.pace.real_time:
            return run.clients
        return self._pending.free(run.grid, messages.EVALUATE)

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""
