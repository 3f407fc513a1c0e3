"""The books of the asynchronous loop: clients, their tasks under way, what has arrived, and what is due when."""

import heapq
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from flwr.app import Message, MetricRecord
from numpy.typing import NDArray

from strategies.clients.roster import Client
from strategies.clock import RESOLUTION
from strategies.events.observed_periods import Observed
from strategies.events.statistics import Tally, TallyState
from strategies.flower.arrays import Vector
from strategies.flower.direct import Work
from strategies.timing.availability import NEVER
from strategies.updates.chain import Contribution, Local

log = logging.getLogger("flwr.strategies")

ABSENT = 0  # node id of a client of a resumed run that isn't there


@dataclass
class Member:
    """What the loop knows of a client."""

    client: Client
    tasks: int = 0  # handed out so far
    misses: int = 0  # in a row
    dropped: bool = False
    contributions: int = 0
    weight: float = 0.0  # Σ d_i of its contributions
    seconds: float = 0.0  # Σ of its tasks' times, as observed
    answers: int = 0  # number of tasks that were observed
    latest: float = 0.0  # seconds of the last of them; not saved
    unfit: int = 0  # answers in a row that couldn't be used
    task: str = ""  # message id of its last task
    waiting: int = 0  # contributions of its that wait in the buffer
    since: int = 0  # aggregations that came before it, or while it was dropped
    gone: int = 0  # aggregations when it was dropped
    there: bool = True  # by its availability
    turning: bool = False  # whether the agenda knows when it comes or goes next
    again: bool = False  # whether it is dropped, and may be asked again

    def drop(self, aggregations: int) -> None:
        """Let it count no longer."""
        self.dropped, self.gone = True, aggregations

    def took(self, seconds: float) -> None:
        """Take note of how long a task of its took."""
        self.latest = seconds
        self.seconds += seconds
        self.answers += 1

    def count_again(self, aggregations: int) -> None:
        """Forget its misses; what came while it was away isn't held against it."""
        if self.dropped:
            self.since += aggregations - self.gone
        self.misses, self.unfit, self.dropped, self.again = 0, 0, False, False


@dataclass(frozen=True)
class Task:
    """A task under way: the model it started from, and when (clock seconds) it was sent; lost if it couldn't be."""

    member: Member
    version: int
    base: NDArray[Any]  # the model as sent (D,), shared by the clients that got the same
    message_id: str
    sent: float
    lost: bool
    gone: bool = False  # whether it is lost because its client goes before its end
    companions: Mapping[str, Vector] = field(default_factory=dict)  # vectors (D,) that were sent beside it


class Held(NamedTuple):
    """An answer that is held back until it is known which updates are too long (strategies/updates/safeguards.py)."""

    task: Task
    local: Local
    reply: Message | Work


@dataclass(frozen=True)
class Standing:
    """By client index: p_i, d_i, P_i, and q̃_i, the share of the objective that client i has in the long run."""

    importance: dict[int, float]
    weight: dict[int, float]
    periods: dict[int, float] = field(default_factory=dict)
    expected_share: dict[int, float] = field(default_factory=dict)


class Agenda:
    """Items by due time; those due within ``RESOLUTION`` of each other are equal and come in client order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Any]] = []
        self._count = 0  # breaks ties that remain, first come first served

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[float, Any]]:
        """Due times and items, in no order."""
        return ((due, item) for due, _, _, item in self._heap)

    def push(self, due: float, client: int, item: Any) -> None:
        """Add an item."""
        heapq.heappush(self._heap, (due, client, self._count, item))
        self._count += 1

    def next_due(self) -> float:
        """Return the earliest due time, infinity if there is none."""
        return self._heap[0][0] if self._heap else NEVER

    def pop(self) -> tuple[float, Any]:
        """Remove and return the next item and its due time."""
        equal = [heapq.heappop(self._heap)]
        while self._heap and self._heap[0][0] <= equal[0][0] + RESOLUTION:
            equal.append(heapq.heappop(self._heap))
        first = min(equal, key=lambda entry: (entry[1], entry[2]))
        for entry in equal:
            if entry is not first:
                heapq.heappush(self._heap, entry)
        return first[0], first[3]


LedgerState = TypedDict(
    "LedgerState",
    {
        # Of every member, in the order of `clients`, their indices.
        "clients": list[int],
        "num-examples": list[float | None],
        "tasks": list[int],
        "misses": list[int],
        "dropped": list[bool],
        "contributions": list[int],
        "weight": list[float],
        "seconds": list[float],
        "answers": list[int],
        "there-since": list[int],
        "gone": list[int],
        "since": TallyState,
        "retries": list[tuple[float, int]],  # clock seconds, and who is asked again then
        "tasks-under-way": list[tuple[int, int, float]],  # version, client, clock seconds when it was sent
        "patient-until": NotRequired[float | None],  # none of an earlier version
        "versions": list[int],
        "bases": NDArray[Any],  # the models of `versions`, (n, D)
    },
)
"""The books as a resumed run takes them up."""


class Ledger:
    """Who takes part, who works on what since when, and whose work waits for the next aggregation.

    Attributes
    ----------
    members : dict of int to Member
        Every client that ever took part, by its index.
    tasks : dict of str to Task
        Tasks under way, by message id.
    agenda : Agenda
        Ids of tasks by the time they are due or given up, and dropped members by the time they are asked again.
    buffer : list of Contribution
        What has arrived since the last aggregation.
    held : deque of Held
        What is held back, as it came; at this clock time, ``patient_until``, it is taken in at the latest.
    since : Tally
        What happened since the last evaluation.
    standing : Standing, optional
        What every client is worth; None when that has to be worked out anew.
    importance : dict of int to float, optional
        p_i of those that count, by index; None when they have to be worked out anew.
    handed_out : int
        Tasks that were handed out so far, to all members.

    Parameters
    ----------
    works_on : bool
        Whether a client is free while its work waits for the next aggregation.
    """

    def __init__(self, *, works_on: bool = False) -> None:
        self.members: dict[int, Member] = {}
        self.tasks: dict[str, Task] = {}
        self.agenda = Agenda()
        self.buffer: list[Contribution] = []
        self.held: deque[Held] = deque()
        self.patient_until = NEVER
        self.since = Tally()
        self.standing: Standing | None = None
        self.importance: dict[int, float] | None = None
        self.handed_out = 0
        self._works_on = works_on
        self._counting: list[Member] | None = None
        self._free: list[int] | None = None
        self._observed: Observed | None = None

    @property
    def counting(self) -> list[Member]:
        """The members that aren't dropped, by index."""
        if self._counting is None:
            members = (self.members[index] for index in sorted(self.members))
            self._counting = [member for member in members if not member.dropped]
        return self._counting

    @property
    def observed(self) -> Observed:
        """How often they have contributed."""
        if self._observed is None:
            self._observed = Observed(self.counting)
        return self._observed

    @property
    def idle(self) -> list[Member]:
        """The members that are there, aren't dropped and have no task under way, by index."""
        return [member for member in self.counting if member.there and not self.busy(member)]

    @property
    def free(self) -> list[int]:
        """The indices of the idle members that may be handed a task, in order; not to be changed."""
        if self._free is None:
            self._free = [index for index in sorted(self.members) if self._is_free(self.members[index])]
        return self._free

    def _is_free(self, member: Member) -> bool:
        waits = member.waiting and not self._works_on
        stays = member.again or not member.dropped
        return member.there and not waits and stays and not self.busy(member)

    def ask_again(self, member: Member) -> None:
        """Let a member be among the free again, if it was dropped."""
        member.again = member.dropped and not self.busy(member)
        self.moved(member)

    def moved(self, member: Member) -> None:
        """Take note that a member is free, or no longer."""
        if self._free is None:
            return
        index = member.client.index
        at = bisect_left(self._free, index)
        known = at < len(self._free) and self._free[at] == index
        if self._is_free(member) != known:
            if known:
                del self._free[at]
            else:
                self._free.insert(at, index)

    def busy(self, member: Member) -> bool:
        """Tell whether a member has a task under way."""
        return member.task in self.tasks

    def changed(self) -> None:
        """Take note that other members count than before."""
        self._counting = self._free = self._observed = None
        self.resized()

    def resized(self) -> None:
        """Take note that members count p_i other than before."""
        self.standing = self.importance = None

    def count(self, member: Member, weight: float) -> None:
        """Take note of a contribution and its weight."""
        member.contributions += 1
        member.weight += weight
        if self._observed is not None and not member.dropped:
            self._observed.contributed()

    def open(self, task: Task, due: float) -> None:
        """Note a task that was handed out and is due at a clock time."""
        self.tasks[task.message_id] = task
        task.member.task, task.member.again = task.message_id, False
        self.agenda.push(due, task.member.client.index, task.message_id)
        self.moved(task.member)

    def close(self, task: Task) -> Member:
        """Take a task from the books; return whose it was."""
        del self.tasks[task.message_id]
        self.moved(task.member)
        return task.member

    def keep(self, contribution: Contribution) -> None:
        """Let a contribution wait for the next aggregation."""
        self.wait(self.members[contribution.client.index], 1)
        self.buffer.append(contribution)

    def wait(self, member: Member, change: int) -> None:
        """Let so many more contributions of a member wait, or fewer."""
        member.waiting += change
        self.moved(member)

    def take_buffer(self) -> list[Contribution]:
        """Empty the buffer; return what was in it, in client order."""
        taken, self.buffer = sorted(self.buffer, key=lambda c: c.client.index), []
        for contribution in taken:
            member = self.members[contribution.client.index]
            self.wait(member, -member.waiting)
        return taken

    # ---- Saved and restored ---------------------------------------------------------------------------------------

    def state(self, tasks: Sequence[Task]) -> LedgerState:
        """Return the books with these of the tasks under way. After an aggregation nothing waits in the buffer."""
        members = list(self.members.values())
        bases = {task.version: task.base for task in tasks}
        return {
            "clients": [member.client.index for member in members],
            "num-examples": [member.client.num_examples for member in members],
            "tasks": [member.tasks for member in members],
            "misses": [member.misses for member in members],
            "dropped": [member.dropped for member in members],
            "contributions": [member.contributions for member in members],
            "weight": [member.weight for member in members],
            "seconds": [member.seconds for member in members],
            "answers": [member.answers for member in members],
            "there-since": [member.since for member in members],
            "gone": [member.gone for member in members],
            "since": self.since.state(),
            "retries": [(due, item.client.index) for due, item in self.agenda if isinstance(item, Member)],
            "tasks-under-way": [(task.version, task.member.client.index, task.sent) for task in tasks],
            "patient-until": self.patient_until if self.patient_until < NEVER else None,
            "versions": list(bases),
            "bases": np.array(list(bases.values())),
        }

    def restore(self, state: LedgerState, present: Mapping[int, Client], aggregations: int) -> None:
        """Enter the members of an earlier run, dropped where they aren't ``present``; tasks are to be opened anew."""
        self.since = Tally.restored(state["since"])
        self.handed_out = sum(state["tasks"])
        until = state.get("patient-until")
        self.patient_until = NEVER if until is None else until
        for place, index in enumerate(state["clients"]):
            size = state["num-examples"][place]
            client = present.get(index, Client(ABSENT, index, size, MetricRecord()))
            if client.num_examples is None:
                client = replace(client, num_examples=size)
            self.members[index] = Member(
                client,
                tasks=state["tasks"][place],
                misses=state["misses"][place],
                dropped=state["dropped"][place],
                contributions=state["contributions"][place],
                weight=state["weight"][place],
                seconds=state["seconds"][place],
                answers=state["answers"][place],
                since=state["there-since"][place],
                gone=state["gone"][place],
            )
            if index not in present:
                if not self.members[index].dropped:
                    self.members[index].drop(aggregations)
                log.warning("client %d of the run so far isn't there: the others share its weight", index)
        self.changed()
