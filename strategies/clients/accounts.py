"""Bookkeeping of each client's work, under any strategy: what became of it, and when its tasks began and ended.

A task that was dispatched ends as one of ``OUTCOMES``; an update that was too long and was shortened counts as
``clipped`` beside its outcome. Metrics and reports are made from the ``Accounts`` of the clients, and the task
records from the ``Timeline``, which keeps the spans of tasks until they are taken.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from strategies.clock import Clock, WallClock
from strategies.flower import messages

ACCEPTED = "accepted"
MAX_MISSES = 3  # tasks of a client that come to nothing in a row: then nobody waits for it
OUTCOMES = (ACCEPTED, messages.LATE, messages.FAILED, messages.REFUSED, messages.TOO_OLD, messages.LOST)


@dataclass
class Account:
    """What was asked of a client, and what came of it."""

    tasks: int = 0
    accepted: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    discarded: int = 0
    clipped: int = 0
    bytes: int = 0  # of its valid replies' arrays
    weight: float = 0.0  # Σ d_i of what counted, in rounds
    lost: int = 0
    seconds: float = 0.0  # of the run's clock that its tasks took
    wasted: float = 0.0  # of these, of tasks that came to nothing

    def note(self, outcome: str, *, clipped: bool = False, num_bytes: int = 0) -> None:
        """Count how a task ended, one of ``OUTCOMES``."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.clipped += clipped
        self.bytes += num_bytes


class Accounts:
    """The accounts by client index; a client has one from the first time that it is named."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with no account."""
        self._accounts: defaultdict[int, Account] = defaultdict(Account)
        self._seconds = self._wasted = 0.0

    def took(self, index: int, seconds: float, outcome: str) -> None:
        """Note how long a client's task took, by the run's clock, and what became of it."""
        account, wasted = self._accounts[index], 0.0 if outcome == ACCEPTED else seconds
        account.seconds += seconds
        account.wasted += wasted
        self._seconds += seconds
        self._wasted += wasted

    def costs(self) -> dict[str, float]:
        """Return what all tasks together took; {} before the first has ended."""
        if not self._accounts:
            return {}
        return {messages.DEVICE_SECONDS: self._seconds, messages.WASTED_SECONDS: self._wasted}

    def __getitem__(self, index: int) -> Account:
        return self._accounts[index]

    def items(self) -> list[tuple[int, Account]]:
        """Return the accounts that there are; another thread may ask."""
        return sorted(self._accounts.copy().items())

    def columns(self, least: int = 0) -> dict[str, list[float]]:
        """Return every count as a list by client index, of so many at least; zeros for those without an account."""
        size = max(least, self.size)
        accounts = [self._accounts.get(index, Account()) for index in range(size)]
        columns = {
            field.name: [float(getattr(account, field.name)) for account in accounts]
            for field in fields(Account)
            if field.name not in ("weight", "seconds", "wasted")
        }
        # As the asynchronous strategies call what counted.
        return {"participation": columns.pop(ACCEPTED), **columns}

    @property
    def size(self) -> int:
        """One more than the largest index that has an account."""
        return max(self._accounts.copy(), default=-1) + 1

    def column(self, name: str, size: int) -> list[float]:
        """Return one count as a list by client index, of so many."""
        values = [0.0] * size
        for index, account in self._accounts.copy().items():
            if index < size:
                values[index] = float(getattr(account, name))
        return values

    def state(self) -> dict[str, Any]:
        """Return the accounts as an array, a row for each client that has one."""
        rows = [(index, *vars(account).values()) for index, account in self.items()]
        accounts = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(fields(Account)))
        return {"accounts": accounts, "account-totals": [self._seconds, self._wasted]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, in which there may be none."""
        kept = state.get("accounts", ())
        kinds = [type(value) for value in vars(Account()).values()]
        if isinstance(kept, np.ndarray):
            restored = {
                int(index): Account(*(kind(value) for kind, value in zip(kinds, values, strict=False)))
                for index, *values in kept.tolist()
            }
        else:  # of an earlier version
            restored = {int(index): Account(**account) for index, account in kept}
        self._accounts = defaultdict(Account, restored)
        # Not the sums of the clients': added up in another order they differ in the last bit.
        self._seconds, self._wasted = state.get("account-totals", (0.0, 0.0))


# Ended tasks that are kept for whoever takes them; of more, the last.
MOST = 200_000

# What a task is whose client hasn't answered when somebody looks, and one whose client went, or came back without it.
UNDER_WAY, LOST = "under way", messages.LOST

_ROUNDING = 1e-6  # seconds


class Parts(NamedTuple):
    """Seconds of a task: its model is on its way to the client, the client works, its reply is on the way."""

    receiving: float
    working: float
    sending: float


class TaskSpan(NamedTuple):
    """A task of a client: seconds of the run's clock and of the machine's, and what became of it.

    ``outcome`` is one of ``strategies.clients.accounts.OUTCOMES``, ``UNDER_WAY`` or ``LOST``. Of the clock's
    seconds the
    model was on its way for ``receiving``, and the reply for ``sending``; the client worked for the rest. None:
    nobody can tell them apart.
    """

    client: int
    began: float
    ended: float
    wall_began: float
    wall_ended: float
    outcome: str
    receiving: float | None = None
    sending: float | None = None


class _Open:
    """A task that has begun; ``ended`` is known once the reply is there, or beforehand in virtual time."""

    __slots__ = ("began", "ended", "parts", "wall_began", "wall_ended")

    def __init__(self, began: float, ended: float | None, wall_began: float, parts: Parts | None) -> None:
        self.began, self.ended, self.parts = began, ended, parts
        self.wall_began = wall_began
        self.wall_ended: float | None = None

    def arrive(self, now: float, wall: float) -> tuple[float, float]:
        """Note that its reply is there, if it wasn't before; return when it ended, by both clocks."""
        if self.wall_ended is None:
            self.wall_ended = wall
        if self.ended is None:
            self.ended = now
        return self.ended, self.wall_ended


class Timeline:
    """The tasks of a run's clients; a client has one at a time.

    Parameters
    ----------
    took : callable, optional
        Told of each task that ends: the client, the seconds of the run's clock, and what became of it.

    Attributes
    ----------
    watch : Clock
        Real seconds; another one may be put in its place before the run begins.
    """

    def __init__(self, took: Callable[[int, float, str], None] | None = None) -> None:
        self.watch: Clock = WallClock()
        self._took = took
        self._open: dict[int, _Open] = {}
        self._ended: deque[TaskSpan] = deque(maxlen=MOST)

    def clear(self) -> None:
        """Forget all: a run begins."""
        self._open.clear()
        self._ended.clear()

    def begin(self, client: int, began: float, ends: float | None = None, parts: Parts | None = None) -> None:
        """Note that a client was handed a task at a time of the clock.

        ``ends``: when it ends; ``parts``: what its time consists of, all of it; if that is known.
        """
        if client in self._open:
            self.end(client, began, LOST)
        self._open[client] = _Open(began, ends, self.watch.now(), parts)

    def begin_all(
        self,
        clients: Sequence[int],
        began: float,
        ends: Iterable[float | None],
        parts: Iterable[Parts | None],
    ) -> None:
        """Note that several were handed one at once."""
        for client in [each for each in clients if each in self._open]:
            self.end(client, began, LOST)
        wall = self.watch.now()
        self._open.update(
            (client, _Open(began, end, wall, each))
            for client, end, each in zip(clients, ends, parts, strict=False)
        )

    def parts(self, client: int) -> Parts | None:
        """Return what the time of a client's task that hasn't ended consists of, if that is known."""
        task = self._open.get(client)
        return None if task is None else task.parts

    def arrived(self, client: int, now: float) -> None:
        """Note that a client's reply is there, or that nobody waits for it any more; what it is worth comes later."""
        self.arrived_all([client], now)

    def arrived_all(self, clients: Iterable[int], now: float) -> None:
        """Note that for some clients at once."""
        wall = self.watch.now()
        for client in clients:
            if (task := self._open.get(client)) is not None:
                task.arrive(now, wall)

    def end(self, client: int, now: float, outcome: str) -> None:
        """Note what became of a client's task, which ends now if it hasn't before; one that isn't known is none."""
        self.end_all([client], now, [outcome])

    def end_all(self, clients: Iterable[int], now: float, outcomes: Iterable[str]) -> None:
        """Note that for some clients, in this order."""
        wall = self.watch.now()
        for client, outcome in zip(clients, outcomes, strict=True):
            if (task := self._open.pop(client, None)) is None:
                continue
            ended, wall_ended = task.arrive(now, wall)
            self._ended.append(_span(client, task, ended, wall_ended, outcome))
            if self._took is not None:
                self._took(client, ended - task.began, outcome)

    def take(self) -> list[TaskSpan]:
        """Return the tasks that ended since this was last asked, in that order, and keep them no longer."""
        taken = list(self._ended)
        self._ended.clear()
        return taken

    def under_way(self, now: float) -> list[TaskSpan]:
        """Return the tasks that haven't ended, up to now, by client."""
        wall, found = self.watch.now(), []
        for client, task in sorted(self._open.items()):
            until = now if task.ended is None else min(now, task.ended)
            found.append(_span(client, task, max(task.began, until), wall, UNDER_WAY))
        return found


def _span(client: int, task: _Open, ended: float, wall_ended: float, outcome: str) -> TaskSpan:
    ways = (None, None) if task.parts is None else _on_the_way(task.parts, ended - task.began)
    return TaskSpan(client, task.began, ended, task.wall_began, wall_ended, outcome, *ways)


def _on_the_way(parts: Parts, seconds: float) -> tuple[float, float]:
    """Return the seconds of receiving and sending in those that a task took, which may be cut off in any part."""
    rest = seconds - parts.receiving - parts.working
    whole = (
        rest > parts.sending - _ROUNDING
    )  # so that the same task has the same parts, however late the clock is
    return min(parts.receiving, seconds), parts.sending if whole else max(rest, 0.0)
