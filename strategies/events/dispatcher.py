"""The dispatcher of the asynchronous loop: which clients get the model when, and tasks of a resumed run.

A task is a version of the model that a client was sent; one client has one at a time. Tasks under way are in the
ledger (strategies/events/tasks.py), and in virtual time a resumed run dispatches them again as they were.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.clients.accounts import Accounts, Timeline
from strategies.clients.member import Member
from strategies.clients.roster import Client
from strategies.clock import RESOLUTION
from strategies.core.requests import TrainingRequests
from strategies.core.run_state import RunState
from strategies.events.tasks import COMPANION, Retry, Task, TaskLedger, Turn
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.exchange import Mail
from strategies.flower.grids import HandedTask, WorkingGrid, WorkRequest
from strategies.timing.availability import NEVER

log = logging.getLogger("flwr.strategies")

FIRST = 1 << 40  # before every client, in the event queue

Beside = Mapping[str, Vector]


class Sent(NamedTuple):
    """When a client is sent the model, in clock seconds, its companions, and its local steps (0: its usual work)."""

    when: float
    beside: Beside
    steps: int = 0


class DispatchHooks(Protocol):
    """What the dispatcher asks of the method; see ``AsynchronousStrategy``."""

    @property
    def concurrency(self) -> int:
        """M_c, the number of clients at work at once; 0: all."""

    @property
    def timed_steps(self) -> int:
        """The number of local steps of a task that takes as long as the time scenario says."""

    def local_rule(self) -> dict[str, float]:
        """Return the fields of training messages that define the algorithm's local step."""

    def companions(self, clients: Sequence[Client]) -> Iterator[Beside]:
        """Yield for each client the vectors (D,) that it is sent beside the model, by record name."""

    def choose(self, free: Sequence[Member]) -> Iterable[Member]:
        """Return the clients that get the model now."""

    def sends_again(self, client: Client) -> tuple[int, NDArray[Any]] | None:
        """Return an earlier version and its model (D,), which a client is sent; None: the newest one."""

    def task_steps(self, client: Client) -> int:
        """Return the number of local steps of a client's task; 0: its usual work."""


class Dispatcher:
    """Dispatches tasks to clients, and tracks which clients are present.

    Parameters
    ----------
    hooks : DispatchHooks
        The method.
    without_messages : bool
        Whether a grid whose clients need no messages may be handed tasks without any.
    """

    _mail: Mail
    _config: ConfigRecord  # of training
    _sent: NDArray[Any]  # the model (D,) as it is sent

    def __init__(
        self,
        run: RunState,
        ledger: TaskLedger,
        requests: TrainingRequests,
        accounts: Accounts,
        timeline: Timeline,
        hooks: DispatchHooks,
        *,
        without_messages: bool,
    ) -> None:
        self._run, self._ledger, self._requests = run, ledger, requests
        self._accounts, self._timeline = accounts, timeline
        self._hooks, self._without_messages = hooks, without_messages
        self._working: WorkingGrid | None = None

    def begin(self, grid: Grid, mail: Mail, config: ConfigRecord) -> None:
        """Begin or resume a run, from the run's model."""
        self._mail, self._config = mail, config
        self.take_model()
        self._working = self._needs_no_messages(grid)

    def take_model(self) -> None:
        """Dispatch the run's model from now on."""
        self._sent = self._run.model.astype(self._run.layout.narrow)

    # ---- Who is there ----------------------------------------------------------------------------------------------

    def welcome(self, clients: Iterable[Client]) -> list[Member]:
        """Let clients join that are new, or back as another node; return them."""
        ledger, aggregations, fresh = self._ledger, self._run.aggregations, []
        for client in clients:
            member = ledger.members.get(client.index)
            if member is None:
                # The aggregation under way began before it came.
                since = aggregations and aggregations + 1
                member = ledger.join(client, since)
            elif member.client.node_id == client.node_id:
                continue
            elif member.dropped:
                log.warning("%s is back, as node %d", client, client.node_id, extra=client.fields)
            member.client = client
            member.count_again(aggregations)
            if ledger.is_spent(member):  # as another node it is the same client
                member.drop(aggregations)
            ledger.tasks.pop(member.task, None)  # its former node will not answer
            self._watch(member)
            fresh.append(member)
        if fresh:
            ledger.changed()
        return fresh

    def _watch(self, member: Member) -> None:
        """Note whether a client is present, and queue its next change, before other events of that time."""
        pace, client = self._run.pace, member.client
        member.there = pace.there(client)
        self._ledger.moved(member)
        turns = pace.turns(client)
        if not member.turning and turns < NEVER:
            member.turning = True
            self._ledger.queue.push(turns, client.index - FIRST, Turn(member))

    def turn(self, member: Member) -> list[Member]:
        """Let a client come or go; return it if it is free now. The task of one that goes was known to be lost."""
        member.turning = False
        self._watch(member)
        return [member] if member.there and (member.again or not member.dropped) else []

    def retry(self, member: Member) -> list[Member]:
        """Let a client that was dropped be asked again, now or when it is present again; return it if it is free."""
        pace = self._run.pace
        if member.there:
            self._ledger.ask_again(member)
            return [member]
        if (comes := pace.comes(member.client, pace.now())) < NEVER:
            self._ledger.queue.push(comes, member.client.index, Retry(member))
        return []

    # ---- Tasks -----------------------------------------------------------------------------------------------------

    def dispatch(self, members: Iterable[Member]) -> None:
        """Dispatch the model to the clients that the method chooses among the free ones: one task each."""
        ledger = self._ledger
        members = [member for member in members if not ledger.is_spent(member)]
        free = [member for member in members if member.there and not ledger.busy(member)]
        # The place of a client that went, or was dropped, is another's, where there are places.
        if not free and not self._hooks.concurrency:
            return
        chosen = {m.client.index: m for m in self._hooks.choose(free) if not ledger.busy(m) and m.there}
        chosen = {index: member for index, member in chosen.items() if not ledger.is_spent(member)}
        if not chosen:
            return
        for member in chosen.values():
            member.tasks += 1
        ledger.dispatched += len(chosen)
        since, now = ledger.since, self._run.pace.now()
        since.bytes_down += len(chosen) * messages.num_bytes(self._run.result.arrays)
        companions = self._hooks.companions([member.client for member in chosen.values()])
        sent = {
            index: Sent(now, next(companions, {}), self._hooks.task_steps(member.client))
            for index, member in chosen.items()
        }
        for index, member in chosen.items():
            if (again := self._hooks.sends_again(member.client)) is not None:
                since.bytes_down += self._send({index: sent.pop(index)}, *again)
        if sent:
            since.bytes_down += self._send(sent, self._run.aggregations, self._sent)

    def _send(self, sent: Mapping[int, Sent], version: int, base: NDArray[Any]) -> int:
        """Send a version of the model (D,) as the task of clients by index; return the bytes of the companions."""
        run, requests = self._run, self._requests
        members = [self._ledger.members[index] for index in sent]
        if self._working is not None:
            self._hand(
                self._working, members, {index: each.when for index, each in sent.items()}, version, base
            )
            return 0
        current = version == run.aggregations
        arrays = run.result.arrays if current else run.layout.to_record(base.astype(np.float64))
        written, size, timed_steps = [], 0, self._hooks.timed_steps
        for member, (_, beside, steps) in zip(members, sent.values(), strict=True):
            fields = requests.fields(member.client, version + 1, member.tasks, self._config)
            if steps:
                fields[messages.STEPS] = steps
                if timed_steps:
                    run.pace.loads.ask(member.client.index, steps / timed_steps)
            written.append(requests.request(member.client, fields, arrays, beside))
            size += messages.total_bytes(written[-1]) - messages.num_bytes(arrays)
            requests.note_sent(member.client, written[-1], run.pace.loads.part_of(member.client.index))
        goes = [self._goes(member, sent[member.client.index].when) for member in members]
        # A task that is lost needn't be worked on.
        pushed = self._mail.push([request for request, gone in zip(written, goes, strict=True) if not gone])
        for member, request, gone in zip(members, written, goes, strict=True):
            when, beside, steps = sent[member.client.index]
            message_id = request.metadata.message_id
            stored = not gone and message_id in pushed
            self._open(Task(member, version, base, message_id, when, not stored, gone, beside, steps))
        return size

    def _hand(
        self,
        grid: WorkingGrid,
        members: Sequence[Member],
        sent: Mapping[int, float],
        version: int,
        base: NDArray[Any],
    ) -> None:
        """Dispatch tasks without messages; ``sent``: clock seconds by client index."""
        loads = self._run.pace.loads
        for member in members if self._run.pace.weighs else ():
            loads.note(member.client.index, loads.model)
        goes = [self._goes(member, sent[member.client.index]) for member in members]
        stay = [member for member, gone in zip(members, goes, strict=True) if not gone]
        tasks = [HandedTask(m.client.node_id, m.client.index, m.tasks) for m in stay]
        request = self._work_request(version, base, tasks)
        ids = iter(self._mail.hand_out(grid, request) if tasks else ())
        for member, gone in zip(members, goes, strict=True):
            message_id = "" if gone else next(ids)
            when = sent[member.client.index]
            self._open(Task(member, version, base, message_id, when, gone, gone))

    def _goes(self, member: Member, when: float) -> bool:
        """Return True if a client goes away before it is done with a task that it is sent at ``when``."""
        return self._run.pace.loses(member.client, member.tasks, when)

    def _open(self, task: Task) -> None:
        """Enter a dispatched task in the bookkeeping."""
        member, index, pace = task.member, task.member.client.index, self._run.pace
        if task.gone:  # there is no message
            task = replace(task, message_id=f"lost/{index}/{member.tasks}")
        self._accounts[index].tasks += 1
        due = pace.due(member, task.sent, self._run.timeout, lost=task.lost)
        self._ledger.open(task, due)
        # The task of a resumed run whose work was held back, and that is worked on again, ended when it first did.
        ended = due if due < pace.now() - RESOLUTION else None
        self._timeline.begin(index, task.sent, ended, parts=pace.parts(member.client))

    # ---- Without messages -----------------------------------------------------------------------------------

    def _work_request(
        self, version: int, base: NDArray[Any], tasks: Sequence[HandedTask] = ()
    ) -> WorkRequest:
        return WorkRequest(self._run.layout, base, self._config, version + 1, tasks, self._hooks.local_rule())

    def _needs_no_messages(self, grid: Grid) -> WorkingGrid | None:
        """Return the grid if its clients need no messages, and no hook writes or reads messages."""
        run = self._run
        if (
            not isinstance(grid, WorkingGrid)
            or not self._without_messages
            or run.pace.real_time
            or run.flower.train_metrics_aggr_fn is not None
            or len(run.buffers_at)
        ):
            return None
        return grid if grid.can_work(self._work_request(run.aggregations, self._sent)) else None

    # ---- Going on where an earlier run was ------------------------------------------------------------------

    def resume(self, *, more: bool) -> list[Member]:
        """Restore the tasks of an earlier run, and dispatch again those that were under way; return the free clients.

        ``more``: whether there are aggregations to come, so that free clients are sent the model.
        """
        run, ledger = self._run, self._ledger
        present = {client.index: client for client in run.clients}
        state = ledger.resume(present, run.aggregations)
        run.clock.resume(state["time"])  # waiting for the clients didn't count
        members = ledger.members
        for index in present.keys() & members.keys():
            self._watch(members[index])
        companions = {key.removeprefix(COMPANION): state[key] for key in state if key.startswith(COMPANION)}
        steps = state.get("steps-under-way", [0] * len(state["tasks-under-way"]))
        again: dict[int, dict[int, Sent]] = {}
        for place, (version, index, sent) in enumerate(state["tasks-under-way"]):
            if index in present:
                beside = {name: np.array(vectors[place]) for name, vectors in companions.items()}
                again.setdefault(version, {})[index] = Sent(sent, beside, steps[place])
        bases = dict(zip(state["versions"], state["bases"], strict=True))
        for version, tasks in again.items():
            self._send(tasks, version, np.array(bases[version]))
        run.take_frozen_bytes()  # which were counted when the tasks were sent first
        for due, index in state["retries"]:
            if index in present:
                ledger.queue.push(due, index, Retry(members[index]))
        if not more:
            return []
        resting = {index for _, index in state["retries"] if members[index].dropped}
        free = [m for index, m in members.items() if index in present and index not in resting]
        for member in free:
            ledger.ask_again(member)
        return free
