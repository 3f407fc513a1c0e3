"""When a round closes, and whose work counts in it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients.accounts import Timeline
from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower.arrays import Vector
from strategies.rounds.round import Chosen, Round


class Closing(Protocol):
    """What the loop of rounds asks whoever closes a round.

    Attributes
    ----------
    early : bool
        Whether a round may close before all replies are there.
    """

    early: bool

    @property
    def waits_for_late_work(self) -> bool:
        """Whether work of earlier rounds is under way, or there and not counted yet."""

    def begin(self) -> None:
        """Begin a run, or go on with one."""

    def log_objective(self) -> None:
        """Log once which objective the run minimises."""

    def end(self) -> None:
        """End a run: log how much each client counted, where that couldn't be known before."""

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few."""

    def check_loop(self) -> None:
        """Raise RunError where a loop around the strategy won't do."""

    def busy(self) -> list[int]:
        """Return the clients, by index, that are at work on earlier rounds."""

    def free(self, grid: Grid) -> list[Client]:
        """Return the clients that are there and aren't at work on earlier rounds."""

    def nobody(self, free: Sequence[Client]) -> Chosen | None:
        """Return the participants of a round that asks nobody, where these are free; None: it is drawn."""

    def number_to_draw(self) -> int | None:
        """Return how many participants are drawn; None: as the scheme says."""

    def open(self, current: Round, config: ConfigRecord) -> None:
        """Begin a round, before its requests are made; ``config``: what the loop adds to each."""

    def sent(self, client: Client, request: Message, beside: Mapping[str, Vector]) -> None:
        """Take note of what a client is sent."""

    def ready(self, current: Round) -> None:
        """Take note that all requests of a round are made."""

    def replies(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterable[Message]:
        """Send a round's requests, and yield the replies that count."""

    def closed_by_others(self, current: Round, replies: Iterable[Message]) -> Iterable[Message]:
        """Return the replies that count, of all that a loop around the strategy has waited for."""

    def settle(self, current: Round) -> Mapping[str, int | float]:
        """Enter late work in the accounts, and return counts."""

    def cut_off(self) -> bool:
        """Tell whether the round under way is given up: the run is to end, or its time budget would be passed."""

    def duration(self, current: Round | None, server_round: int) -> float:
        """Return the seconds by which a round moves the clock on."""

    def expected(self, p: Weights, expected: Weights | None) -> Weights | None:
        """Return the share (n,) of each client in what is minimised, from that by the participation scheme."""

    def may_evaluate(self) -> list[Client]:
        """Return the clients that may be asked to evaluate a model."""

    def state(self) -> dict[str, Any]:
        """Return what a run goes on from."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""

    def reset(self) -> None:
        """Forget an earlier run."""


class WaitForAll:
    """A round closes when all its participants have answered, or the timeout is over."""

    early = False
    waits_for_late_work = False

    def __init__(self, run: RunState, pending: PendingReplies, timeline: Timeline) -> None:
        self._run, self._pending, self._timeline = run, pending, timeline

    def begin(self) -> None:
        """Do nothing: nothing is late."""

    def log_objective(self) -> None:
        """Do nothing: the participation scheme says it."""

    def end(self) -> None:
        """Do nothing: all was known before."""

    def check(self, num_clients: int) -> None:
        """Do nothing: any number will do."""

    def check_loop(self) -> None:
        """Do nothing: any loop waits for all replies."""

    def busy(self) -> list[int]:
        """Return nobody."""
        return []

    def free(self, grid: Grid) -> list[Client]:
        """Return all clients."""
        return self._run.clients

    def nobody(self, free: Sequence[Client]) -> Chosen | None:
        """Return None: participants are drawn in every round."""
        return None

    def number_to_draw(self) -> int | None:
        """Return None."""
        return None

    def open(self, current: Round, config: ConfigRecord) -> None:
        """Do nothing."""

    def sent(self, client: Client, request: Message, beside: Mapping[str, Vector]) -> None:
        """Do nothing."""

    def ready(self, current: Round) -> None:
        """Do nothing."""

    def replies(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        """Send the requests, and yield all replies as they come."""
        current.begin(requests, self._timeline, self._run.pace)
        requests = current.to_work_on(requests)
        return self._pending.awaited(
            grid, requests, lambda index: self._timeline.arrived(index, self._run.pace.now())
        )

    def closed_by_others(self, current: Round, replies: Iterable[Message]) -> Iterable[Message]:
        """Return all replies."""
        return replies

    def settle(self, current: Round) -> Mapping[str, int | float]:
        """Return no counts."""
        return {}

    def cut_off(self) -> bool:
        """Tell whether the run is to end."""
        return self._run.stopped()

    def duration(self, current: Round | None, server_round: int) -> float:
        """Return the time of the slowest participant."""
        return 0.0 if current is None else self._run.pace.round_time(current.clients, server_round)

    def expected(self, p: Weights, expected: Weights | None) -> Weights | None:
        """Return what the participation scheme says."""
        return expected

    def may_evaluate(self) -> list[Client]:
        """Return all clients."""
        return self._run.clients

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""
