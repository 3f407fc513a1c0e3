"""The bookkeeping of tasks: the clients, their tasks under way, and the buffer of the next aggregation."""

import logging
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.core.run_state import RunState
from strategies.events import task_checkpoint
from strategies.events.active_clients import ActiveClients
from strategies.events.observed_periods import Observed
from strategies.events.statistics import IntervalStatistics
from strategies.events.task_checkpoint import SentTask
from strategies.flower.arrays import Vector
from strategies.flower.grids import Work
from strategies.timing.availability import NEVER
from strategies.timing.event_queue import EventQueue
from strategies.updates.pipeline import Contribution, LocalModel

log = logging.getLogger("flwr.strategies")

LAST = 1 << 40  # after every client, in the event queue


@dataclass(frozen=True)
class Task:
    """A task under way.

    Attributes
    ----------
    version : int
        The aggregation that made the model which the client was sent.
    base : array (D,)
        That model as it was sent, shared by the clients that got the same.
    sent : float
        Clock seconds when it was sent.
    lost : bool
        Whether no reply will come: it couldn't be sent, or its client goes before its end (``dropped_out``).
    extra_vectors : mapping of str to array (D,)
        Vectors that were sent beside it.
    steps : int
        Local steps that the client was asked for; 0: its usual work.
    """

    member: ClientState
    version: int
    base: NDArray[Any]
    message_id: str
    sent: float
    lost: bool
    dropped_out: bool = False
    extra_vectors: Mapping[str, Vector] = field(default_factory=dict)
    steps: int = 0

    def as_sent(self) -> SentTask:
        """Return the task as it was sent, for a checkpoint."""
        return SentTask(self.version, self.member.client.index, self.sent, self.extra_vectors, self.steps)


class HeldReply(NamedTuple):
    """An answer that is held back until it is known which updates are too long (strategies/updates/safeguards.py)."""

    task: Task
    local: LocalModel
    reply: Message | Work


class Retry(NamedTuple):
    """A client that was dropped is to get another task."""

    member: ClientState


class AvailabilityChanged(NamedTuple):
    """A client comes or goes."""

    member: ClientState


class Recheck(NamedTuple):
    """The method is to be asked whether it is ready, although nothing has arrived."""


class TaskTable:
    """The clients, their tasks under way, and the contributions that wait for the next aggregation.

    Parameters
    ----------
    trains_while_waiting : bool
        Whether a client is free while its work waits for the next aggregation.
    most : int
        Number of contributions after which a client gets no further task; 0: no limit.

    Attributes
    ----------
    members : dict of int to ClientState
        Every client that ever took part, by its index.
    tasks : dict of str to Task
        Tasks under way, by message id.
    queue : EventQueue
        What is due when: the ids of tasks, by the time they end or are given up, and other events.
    buffer : list of Contribution
        What has arrived since the last aggregation.
    held_replies : deque of HeldReply
        Replies that are held back, in the order in which they came.
    patient_until : float
        Clock time at which replies that are held back are taken in at the latest.
    kept : dict of int to Task
        With secure sums, the tasks whose updates are kept by their clients and wait, by client index.
    interval_stats : IntervalStatistics
        What happened since the last evaluation.
    dispatched : int
        Tasks that were dispatched so far, to all members.
    departed : dict of int to (int, int)
        Numbers of contributions and of tasks, by index, of clients that were forgotten.
    changes : int
        How often the clients that count, or their p_i, have changed.
    """

    def __init__(self, run: RunState, *, trains_while_waiting: bool = False, most: int = 0) -> None:
        self._run, self._trains_while_waiting, self._most = run, trains_while_waiting, most
        self.changes = 0
        self.members: dict[int, ClientState] = {}
        self.tasks: dict[str, Task] = {}
        self.queue = EventQueue()
        self.buffer: list[Contribution] = []
        self.held_replies: deque[HeldReply] = deque()
        self.kept: dict[int, Task] = {}
        self.patient_until = NEVER
        self.interval_stats = IntervalStatistics()
        self.dispatched = 0
        self.departed: dict[int, tuple[int, int]] = {}
        self._active: ActiveClients | None = None
        self._free: list[int] | None = None
        self._observed: Observed | None = None
        self._resumed: Mapping[str, Any] = {}

    @property
    def active_clients(self) -> Sequence[ClientState]:
        """The clients that aren't dropped, by index."""
        return self.active.members

    @property
    def active(self) -> ActiveClients:
        """The clients that aren't dropped, with numbers of each."""
        if self._active is None:
            members = (self.members[index] for index in sorted(self.members))
            self._active = ActiveClients([member for member in members if not member.dropped])
        return self._active

    def half_time(self) -> float | None:
        """Return M, the seconds in which half of the clients that count answer in the mean; None before half have."""
        members = self.active_clients
        times = sorted(member.seconds / member.answers for member in members if member.answers)
        half = (len(members) - 1) // 2
        return times[half] if half < len(times) else None

    @property
    def observed(self) -> Observed:
        """What the observed periods P_i of the clients that count are computed from."""
        if self._observed is None:
            self._observed = Observed(self.active_clients)
        return self._observed

    @property
    def free(self) -> list[int]:
        """The indices of the idle clients that can get a task, in order; don't change the list."""
        if self._free is None:
            self._free = [index for index in sorted(self.members) if self._is_free(self.members[index])]
        return self._free

    def _is_free(self, member: ClientState) -> bool:
        waits = member.waiting and not self._trains_while_waiting
        stays = member.again or not member.dropped
        return stays and not waits and self.can_work(member)

    def contributions_of(self, member: ClientState) -> int:
        """Return how often a client has contributed, also before it was forgotten and came back."""
        return member.contributions + self.departed.get(member.client.index, (0, 0))[0]

    @property
    def contributions(self) -> dict[int, int]:
        """The number of contributions of each client that ever took part, by its index."""
        departed = {index: contributions for index, (contributions, _) in self.departed.items()}
        return departed | {index: self.contributions_of(member) for index, member in self.members.items()}

    def max_contributions_per_client(self, further: Mapping[int, int] = MappingProxyType({})) -> int:
        """Return the number of contributions of the client with most, with ``further`` ones by client index."""
        counts = self.contributions
        return max((count + further.get(index, 0) for index, count in counts.items()), default=0)

    def max_tasks_per_client(self, further: Mapping[int, int] = MappingProxyType({})) -> int:
        """Return the number of tasks of the client that has got most, with ``further`` ones by client index."""
        counts = {index: tasks for index, (_, tasks) in self.departed.items()}
        counts |= {index: member.tasks for index, member in self.members.items()}
        return max((count + further.get(index, 0) for index, count in counts.items()), default=0)

    def join(self, client: Client, since: int) -> ClientState:
        """Return a new client's entry; one that was forgotten goes on with its numbers of tasks, and their draws."""
        _, tasks = self.departed.get(client.index, (0, 0))
        member = self.members[client.index] = ClientState(client, tasks=tasks, since=since)
        return member

    def reached_contribution_limit(self, member: ClientState) -> bool:
        """Return True if a client has contributed as often as it may."""
        return bool(self._most) and self.contributions_of(member) >= self._most

    @property
    def may_fill_buffer(self) -> bool:
        """Whether a reply is held back, a client that counts is at work, or the method is to be asked again."""
        at_work = any(not task.member.dropped for task in self.tasks.values())
        return at_work or bool(self.held_replies) or bool(self._queued(Recheck))

    def _queued(self, kind: type) -> list[tuple[float, Any]]:
        """Return the queued events of a kind, with their due times."""
        return [(due, event) for due, event in self.queue if isinstance(event, kind)]

    def can_work(self, member: ClientState) -> bool:
        """Return True if a client can be sent a task: it is there, has none, and may contribute again."""
        return member.is_available and not self.busy(member) and not self.reached_contribution_limit(member)

    @property
    def all_reached_limit(self) -> bool:
        """Whether there are clients, and all have contributed as often as they may."""
        return bool(self.members) and all(map(self.reached_contribution_limit, self.members.values()))

    def ask_again(self, member: ClientState) -> None:
        """Let a client that was dropped be free again."""
        member.again = member.dropped and not self.busy(member)
        self.refresh_idle(member)

    def refresh_idle(self, member: ClientState) -> None:
        """Note whether a client is free."""
        if self._free is None:
            return
        index = member.client.index
        begin, end = bisect_left(self._free, index), bisect_right(self._free, index)
        free = self.members.get(index) is member and self._is_free(member)
        self._free[begin:end] = [index] if free else []

    def busy(self, member: ClientState) -> bool:
        """Return True if a client has a task under way."""
        return member.task in self.tasks

    def busy_clients(self) -> list[int]:
        """Return the indices of the clients with a task under way; safe to call from another thread."""
        return [task.member.client.index for task in self.tasks.copy().values() if not task.lost]

    def changed(self, members: Sequence[ClientState] | None = None) -> None:
        """Note that clients count now, or don't count any more, or are another node now; by default any of them."""
        self.changes += 1
        if self._active is None or members is None:
            self._active = self._free = self._observed = None
            return
        counting = {member.index: member if self._counts(member) else None for member in members}
        former = self._active.replace(counting)
        if self._observed is not None:
            for before, now in zip(former, counting.values(), strict=True):
                self._observed.replace(before, now)
        for member in members:
            self.refresh_idle(member)

    def _counts(self, member: ClientState) -> bool:
        return self.members.get(member.index) is member and not member.dropped

    def resized(self, member: ClientState) -> None:
        """Note that the size of a client has changed, and so the importances p_i."""
        self.changes += 1
        if self._active is not None and not member.dropped:
            self._active.replace({member.index: member})

    def count(self, member: ClientState, weight: float) -> None:
        """Note a contribution and its weight."""
        member.contributions += 1
        member.weight += weight
        if self._observed is not None and not member.dropped:
            self._observed.contributed()
        if self.reached_contribution_limit(member):
            self._run.warn_once(
                "%s has contributed dp_max_contributions = %d times: it isn't asked any more, nor is any other then",
                member.client,
                self._most,
            )
            member.drop(self._run.aggregations)
            self.changed([member])

    def open(self, task: Task, due: float) -> None:
        """Note a task that was dispatched and is due at a clock time."""
        self.tasks[task.message_id] = task
        task.member.task, task.member.again = task.message_id, False
        self.queue.push(due, task.member.client.index, task.message_id)
        self.refresh_idle(task.member)

    def close(self, task: Task) -> ClientState:
        """Remove a task; return its client."""
        del self.tasks[task.message_id]
        self.refresh_idle(task.member)
        return task.member

    def forget_nodes(self, indices: Mapping[int, int]) -> None:
        """Forget the clients at some nodes, which can't take part any more; ``indices`` are theirs by node id."""
        for node_id, index in indices.items():
            member = self.members.get(index)
            if member is not None and member.client.node_id == node_id:
                self.forget(member)

    def forget(self, member: ClientState) -> None:
        """Forget a client that can't take part any more, its task under way and its work that waits."""
        node_id, index = member.client.node_id, member.client.index
        del self.members[index]
        self.departed[index] = self.contributions_of(member), member.tasks
        self.tasks.pop(member.task, None)
        self.buffer = [each for each in self.buffer if each.client.node_id != node_id]
        self.held_replies = deque(each for each in self.held_replies if each.task.member is not member)
        self.kept.pop(index, None)
        self.changed([member])

    def add_to_buffer(self, contribution: Contribution) -> None:
        """Let a contribution wait for the next aggregation."""
        self.wait(self.members[contribution.client.index], 1)
        self.buffer.append(contribution)

    def wait(self, member: ClientState, change: int) -> None:
        """Change the number of a client's contributions that wait."""
        member.waiting += change
        self.refresh_idle(member)

    def wake(self, when: float) -> None:
        """Ask the method at a clock time whether it is ready, after the replies that arrive at that time."""
        self.queue.push(when, LAST, Recheck())

    def take_out(self, contributions: Sequence[Contribution]) -> list[Contribution]:
        """Take contributions out of the buffer; return them in client order."""
        taken = {id(contribution) for contribution in contributions}
        self.buffer = [contribution for contribution in self.buffer if id(contribution) not in taken]
        for contribution in contributions:
            self.wait(self.members[contribution.client.index], -1)
        return sorted(contributions, key=lambda contribution: contribution.client.index)

    # ---- Saved and restored ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return clients and, in virtual time, the tasks under way with the models that they started from.

        After an aggregation something waits in the buffer only if the method ``take_from_buffer`` a part; of that
        everything is saved but the records of replies. What is held back, or kept by its client, counts as under way:
        it is worked on again, and comes at once. In real time, tasks under way are dispatched anew.
        """
        kept = [*(each.task for each in self.held_replies), *self.kept.values()]
        tasks = [] if self._run.scheduler.real_time else [*kept, *self.tasks.values()]
        buffer = [each for each in self.buffer if each.client.index not in self.kept]
        wakes = [due for due, _ in self._queued(Recheck)]
        bases = {task.version: task.base for task in tasks}
        bases |= {contribution.version: contribution.base for contribution in buffer}
        return {
            **task_checkpoint.clients_state([*self.members.values()]),
            "parted": [(index, *numbers) for index, numbers in self.departed.items()],
            "since": self.interval_stats.state(),
            # Clock seconds, and who is asked again then.
            "retries": [(due, event.member.client.index) for due, event in self._queued(Retry)],
            **({"wakes": wakes} if wakes else {}),
            "patient-until": self.patient_until if self.patient_until < NEVER else None,
            **task_checkpoint.tasks_state([task.as_sent() for task in tasks]),
            **task_checkpoint.waiting_state(buffer),
            "versions": list(bases),  # of the models (D,) that tasks and waiting contributions began with
            "bases": np.array(list(bases.values())),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep a state until ``resume``, when the connected clients are known."""
        self._resumed = state

    def resume(self, present: Mapping[int, Client], aggregations: int) -> Mapping[str, Any]:
        """Restore the clients of an earlier run, and drop those that aren't ``present``; return the state.

        The tasks that were under way are to be dispatched anew.
        """
        state, self._resumed = self._resumed, {}
        self.interval_stats = IntervalStatistics.restored(state["since"])
        self.dispatched = sum(state["tasks"])
        self.departed = {index: (contributions, tasks) for index, contributions, tasks in state["parted"]}
        if (until := state["patient-until"]) is not None:
            self.patient_until = until
        self.members |= {m.client.index: m for m in task_checkpoint.restored_clients(state, present)}
        for index in [index for index in self.members if index not in present]:
            if not self.members[index].dropped:
                self.members[index].drop(aggregations)
            log.warning("client %d of the run so far isn't there: the others share its weight", index)
        clients = {index: member.client for index, member in self.members.items()}
        for contribution in task_checkpoint.restored_waiting(state, clients, self._run.buffers):
            self.add_to_buffer(contribution)
        for due in state.get("wakes", ()):
            self.wake(due)
        self.changed()
        return state
