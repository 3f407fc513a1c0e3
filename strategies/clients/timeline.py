"""When each task of a client began and ended, and its parts, by any strategy, until somebody takes that down."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from strategies.clock import Clock, WallClock
from strategies.flower import messages

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
