"""Per-client statistics and task records, under any strategy: the outcome of each task, its start and its end.

A dispatched task ends with one of ``OUTCOMES``. An update whose norm exceeded the bound, and that was shortened, also
counts as ``clipped``. Metrics and reports are made from ``ClientStatistics``, the statistics of the clients; task
records come from ``Timeline``, which keeps the span of each ended task until the report collects it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from strategies.clock import Clock, WallClock
from strategies.flower import messages

ACCEPTED = "accepted"
MAX_MISSES = 3  # after this many failed tasks in a row, a client is no longer waited for
LOST_IN_A_ROW = 200  # after this many lost or refused tasks in a row, none of a client is expected to count
OUTCOMES = (ACCEPTED, messages.LATE, messages.FAILED, messages.REFUSED, messages.TOO_OLD, messages.LOST)


@dataclass
class ClientRecord:
    """The statistics of one client: number of tasks by outcome, bytes, weight and seconds."""

    tasks: int = 0
    accepted: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    discarded: int = 0
    clipped: int = 0
    bytes: int = 0  # total size of the arrays of its valid replies
    weight: float = 0.0  # Σ d_i of its accepted updates, in synchronous rounds
    lost: int = 0
    seconds: float = 0.0  # duration of all its tasks, by the run's clock
    wasted: float = 0.0  # duration of its tasks that were not accepted
    opened: int = 0  # secure sums with its update that could be opened, whatever became of them

    def record(self, outcome: str, *, clipped: bool = False, num_bytes: int = 0) -> None:
        """Count the outcome of a task, one of ``OUTCOMES``, and the bytes of its reply."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.clipped += clipped
        self.bytes += num_bytes


class ClientStatistics:
    """The statistics of all clients, by client index; an entry is created when its client is first named."""

    def __init__(self) -> None:
        self._client_stats: defaultdict[int, ClientRecord] = defaultdict(ClientRecord)
        self._seconds = self._wasted = 0.0

    def add_task_time(self, index: int, seconds: float, outcome: str) -> None:
        """Add the duration of a client's task, in seconds of the run's clock, and its outcome."""
        account, wasted = self._client_stats[index], 0.0 if outcome == ACCEPTED else seconds
        account.seconds += seconds
        account.wasted += wasted
        self._seconds += seconds
        self._wasted += wasted

    def costs(self) -> dict[str, float]:
        """Return the duration of all tasks and of the wasted ones, in seconds; {} before any client has an entry."""
        if not self._client_stats:
            return {}
        return {messages.DEVICE_SECONDS: self._seconds, messages.WASTED_SECONDS: self._wasted}

    def add_weights(self, shares: Mapping[int, float]) -> None:
        """Add to the weights of clients what each counted, by client index."""
        for index, share in shares.items():
            self[index].weight += share

    def missed(self, index: int) -> int:
        """Return the number of a client's tasks without a valid reply; 0 for a client without an entry."""
        account = self._client_stats.get(index, ClientRecord())
        return account.late + account.failed + account.refused

    def __getitem__(self, index: int) -> ClientRecord:
        return self._client_stats[index]

    def items(self) -> list[tuple[int, ClientRecord]]:
        """Return the pairs of client index and statistics, by index; safe to call from another thread."""
        return sorted(self._client_stats.copy().items())

    def columns(self, least: int = 0) -> dict[str, list[float]]:
        """Return every count as a list by client index, with at least ``least`` entries; 0 for unknown clients."""
        size = max(least, self.size)
        client_stats = [self._client_stats.get(index, ClientRecord()) for index in range(size)]
        columns = {
            field.name: [float(getattr(account, field.name)) for account in client_stats]
            for field in fields(ClientRecord)
            if field.name not in ("weight", "seconds", "wasted", "opened")
        }
        # The asynchronous strategies call the number of accepted updates "participation".
        return {"participation": columns.pop(ACCEPTED), **columns}

    @property
    def size(self) -> int:
        """One more than the largest client index that has an entry."""
        return max(self._client_stats.copy(), default=-1) + 1

    def column(self, name: str, size: int) -> list[float]:
        """Return one count as a list by client index, with ``size`` entries."""
        values = [0.0] * size
        for index, account in self._client_stats.copy().items():
            if index < size:
                values[index] = float(getattr(account, name))
        return values

    def state(self) -> dict[str, Any]:
        """Return the statistics as an array, one row for each client that has an entry."""
        rows = [(index, *vars(account).values()) for index, account in self.items()]
        client_stats = np.array(rows, dtype=np.float64).reshape(-1, 1 + len(fields(ClientRecord)))
        return {"accounts": client_stats, "account-totals": [self._seconds, self._wasted]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the statistics from ``state``."""
        kinds = [type(value) for value in vars(ClientRecord()).values()]
        for index, *values in state["accounts"].tolist():
            counts = [kind(value) for kind, value in zip(kinds, values, strict=True)]
            self._client_stats[int(index)] = ClientRecord(*counts)
        # The totals are saved too: summing the clients' seconds in another order would change the last bit.
        self._seconds, self._wasted = state["account-totals"]


# Number of ended tasks that are kept until the report collects them; the oldest are dropped first.
MOST = 200_000

# Outcomes of a task that is still running when it is reported, and of one whose client left or lost it.
UNDER_WAY, LOST = "under way", messages.LOST

_ROUNDING = 1e-6  # seconds


class TaskTiming(NamedTuple):
    """Seconds that a task spends on the download of the model, on training, and on the upload of the reply."""

    receiving: float
    working: float
    sending: float


class TaskSpan(NamedTuple):
    """A task of a client: its start and end by the run's clock and by the machine's clock, and its outcome.

    ``outcome`` is one of ``strategies.clients.client_statistics.OUTCOMES``, ``UNDER_WAY`` or ``LOST``. Of the seconds
    by the run's clock, the download of the model took ``receiving`` and the upload of the reply took ``sending``; the
    client trained for the rest. None means that the three parts are unknown.
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
    """A running task; ``ended`` is known when the reply arrives, or from the start in virtual time."""

    __slots__ = ("began", "ended", "timing", "wall_began", "wall_ended")

    def __init__(
        self, began: float, ended: float | None, wall_began: float, timing: TaskTiming | None
    ) -> None:
        self.began, self.ended, self.timing = began, ended, timing
        self.wall_began = wall_began
        self.wall_ended: float | None = None

    def arrive(self, now: float, wall: float) -> tuple[float, float]:
        """Record the arrival of the reply, once; return the end of the task by the run's clock and the wall clock."""
        if self.wall_ended is None:
            self.wall_ended = wall
        if self.ended is None:
            self.ended = now
        return self.ended, self.wall_ended


class Timeline:
    """The task records of a run's clients; a client has at most one running task.

    Parameters
    ----------
    add_task_time : callable, optional
        Called for each task that ends, with the client index, the seconds by the run's clock, and the outcome.

    Attributes
    ----------
    watch : Clock
        The wall clock; a test may replace it before the run begins.
    """

    def __init__(self, add_task_time: Callable[[int, float, str], None] | None = None) -> None:
        self.watch: Clock = WallClock()
        self._add_task_time = add_task_time
        self._open: dict[int, _Open] = {}
        self._ended: deque[TaskSpan] = deque(maxlen=MOST)

    def clear(self) -> None:
        """Forget all tasks: a new run begins."""
        self._open.clear()
        self._ended.clear()

    def begin(
        self, client: int, began: float, ends: float | None = None, timing: TaskTiming | None = None
    ) -> None:
        """Record that a task was dispatched to a client at time ``began`` of the run's clock.

        ``ends`` is the time when the task will end, and ``timing`` its download, training and upload seconds; both
        are None where they are unknown.
        """
        self.begin_all([client], began, [ends], [timing])

    def begin_all(
        self,
        clients: Sequence[int],
        began: float,
        ends: Iterable[float | None],
        timings: Iterable[TaskTiming | None],
    ) -> None:
        """Record that one task each was dispatched to several clients at the same time."""
        wall = self.watch.now()
        for client, end, timing in zip(clients, ends, timings, strict=False):
            if client in self._open:
                self.end(client, began, LOST)
            self._open[client] = _Open(began, end, wall, timing)

    def timing(self, client: int) -> TaskTiming | None:
        """Return the download, training and upload seconds of a client's running task, None if they are unknown."""
        task = self._open.get(client)
        return None if task is None else task.timing

    def arrived(self, client: int, now: float) -> None:
        """Record that a client's reply arrived, or is no longer awaited; ``end`` records the outcome later."""
        self.arrived_all([client], now)

    def arrived_all(self, clients: Iterable[int], now: float) -> None:
        """Record the arrival of the replies of several clients at the same time."""
        wall = self.watch.now()
        for client in clients:
            if (task := self._open.get(client)) is not None:
                task.arrive(now, wall)

    def end(self, client: int, now: float, outcome: str) -> None:
        """Record the outcome of a client's task, which ends now unless it ended before; ignore unknown tasks."""
        self.end_all([client], now, [outcome])

    def end_all(self, clients: Iterable[int], now: float, outcomes: Iterable[str]) -> None:
        """Record the outcomes of several clients' tasks, in the order given."""
        wall = self.watch.now()
        for client, outcome in zip(clients, outcomes, strict=True):
            if (task := self._open.pop(client, None)) is None:
                continue
            ended, wall_ended = task.arrive(now, wall)
            self._ended.append(_span(client, task, ended, wall_ended, outcome))
            if self._add_task_time is not None:
                self._add_task_time(client, ended - task.began, outcome)

    def take(self) -> list[TaskSpan]:
        """Return the tasks that ended since the last call, in the order of their ends, and forget them."""
        taken = list(self._ended)
        self._ended.clear()
        return taken

    def under_way(self, now: float) -> list[TaskSpan]:
        """Return the running tasks, with ``now`` as their end, by client index."""
        wall, found = self.watch.now(), []
        for client, task in sorted(self._open.items()):
            until = now if task.ended is None else min(now, task.ended)
            found.append(_span(client, task, max(task.began, until), wall, UNDER_WAY))
        return found


def _span(client: int, task: _Open, ended: float, wall_ended: float, outcome: str) -> TaskSpan:
    ways = (None, None) if task.timing is None else _on_the_way(task.timing, ended - task.began)
    return TaskSpan(client, task.began, ended, task.wall_began, wall_ended, outcome, *ways)


def _on_the_way(timing: TaskTiming, seconds: float) -> tuple[float, float]:
    """Return the seconds of download and of upload of a task that took ``seconds`` and may have been cut off."""
    rest = seconds - timing.receiving - timing.working
    # A tolerance, so that the same task has the same parts at any time of the clock, whatever the rounding.
    whole = rest > timing.sending - _ROUNDING
    return min(timing.receiving, seconds), timing.sending if whole else max(rest, 0.0)
