"""Who is handed the model, and with what a run goes on: the hand-out half of the asynchronous loop.

A task is a version of the model that a client was sent; one client has one at a time. Tasks under way are in the
books (strategies/events/tasks.py), and with virtual time a resumed run hands them out again as they were.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.core.lifecycle import State
from strategies.core.strategy import FederatedStrategy
from strategies.events.scheme import Scheme
from strategies.events.tasks import LedgerState, Member, Task
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.direct import HandedTask, WorkingGrid, WorkRequest, writes_requests
from strategies.flower.exchange import Mail
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Turn

log = logging.getLogger("flwr.strategies")

FIRST = 1 << 40  # before every client, in the agenda


class HandingOut(Scheme):
    """What hands tasks out."""

    _mail: Mail
    _train: ConfigRecord
    _working: WorkingGrid | None  # where tasks need no messages

    def _welcome(self) -> None:
        fresh = []
        for client in self.clients:
            member = self.ledger.members.get(client.index)
            if member is None:
                # The aggregation under way began before it came.
                since = self.aggregations and self.aggregations + 1
                member = self.ledger.members[client.index] = Member(client, since=since)
            elif member.client.node_id == client.node_id:
                continue
            elif member.dropped:
                log.warning("%s is back, as node %d", client, client.node_id, extra=client.fields)
            member.client = client
            member.count_again(self.aggregations)
            self.ledger.tasks.pop(member.task, None)  # its former node will not answer
            self._watch_over(member)
            fresh.append(member)
        if fresh:
            self.ledger.changed()
            self._offer(fresh)

    def _watch_over(self, member: Member) -> None:
        """Note whether a client is there now, and when it comes or goes next: before anything else at that time."""
        member.there = self.pace.there(member.client)
        self.ledger.moved(member)
        turns = self.pace.turns(member.client)
        if not member.turning and turns < NEVER:
            member.turning = True
            self.ledger.agenda.push(turns, member.client.index - FIRST, Turn(member))

    def _turn(self, member: Member) -> None:
        """Let a client come or go. What it works on when it goes is lost then: that is known since it began."""
        member.turning = False
        self._watch_over(member)
        if member.there and (member.again or not member.dropped):
            self._offer([member])

    def _retry(self, member: Member) -> None:
        """Ask a client again that was dropped, or when it is there again."""
        if member.there:
            self.ledger.ask_again(member)
            self._offer([member])
        elif (comes := self.pace.comes(member.client, self.pace.now())) < NEVER:
            self.ledger.agenda.push(comes, member.client.index, member)

    def _offer(self, members: Iterable[Member]) -> None:
        """Hand the global model to whom the scheme chooses, now that these are free: a task each, one at a time."""
        free = [member for member in members if member.there and not self.ledger.busy(member)]
        # The place of a client that went, or was dropped, is another's, where there are places.
        asks = free or self.config.concurrency
        chosen = {m.client.index: m for m in self.choose(free) if not self.ledger.busy(m)} if asks else {}
        if away := [index for index, member in chosen.items() if not member.there]:
            chosen = {index: member for index, member in chosen.items() if index not in away}
        if not chosen:
            return
        for member in chosen.values():
            member.tasks += 1
        self.ledger.handed_out += len(chosen)
        since, now = self.ledger.since, self.pace.now()
        since.bytes_down += len(chosen) * messages.num_bytes(self._result.arrays)
        companions = self.companions([member.client for member in chosen.values()])
        sent = {index: (now, next(companions, {})) for index in chosen}
        since.bytes_down += self._send(sent, self.aggregations, self._sent)

    def _send(
        self, sent: Mapping[int, tuple[float, Mapping[str, Vector]]], version: int, base: NDArray[Any]
    ) -> int:
        """Send a version of the model (D,) as the task of clients by index, at these clock seconds, with companions.

        Return the bytes of the companions.
        """
        members = [self.ledger.members[index] for index in sent]
        if self._working is not None:
            self._hand(
                self._working, members, {index: when for index, (when, _) in sent.items()}, version, base
            )
            return 0
        current = version == self.aggregations
        arrays = self._result.arrays if current else self._layout.to_record(base.astype(np.float64))
        requests, size = [], 0
        for member, (_, beside) in zip(members, sent.values(), strict=True):
            own = self._train_config(member.client, version + 1, member.tasks, self._train)
            requests.append(self._train_request(member.client, own, arrays, beside))
            size += messages.total_bytes(requests[-1]) - messages.num_bytes(arrays)
            self.loads.note(member.client.index, messages.total_bytes(requests[-1]))
        goes = [self._goes(member, sent[member.client.index][0]) for member in members]
        # What is lost needn't be worked on.
        pushed = self._mail.push([request for request, gone in zip(requests, goes, strict=True) if not gone])
        for member, request, gone in zip(members, requests, goes, strict=True):
            when, beside = sent[member.client.index]
            message_id = request.metadata.message_id
            stored = not gone and message_id in pushed
            self._open(Task(member, version, base, message_id, when, not stored, gone, beside))
        return size

    def _hand(
        self,
        grid: WorkingGrid,
        members: Sequence[Member],
        sent: Mapping[int, float],
        version: int,
        base: NDArray[Any],
    ) -> None:
        """Do so without messages; ``sent`` are clock seconds by index."""
        for member in members:
            self.loads.note(member.client.index, self.loads.model)
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
        """Tell whether a client goes before the task is done that it is sent at a clock time."""
        return self.pace.loses(member.client, member.tasks, when)

    def _open(self, task: Task) -> None:
        """Enter a task in the books that was handed out."""
        member, index = task.member, task.member.client.index
        if task.gone:  # there is no message
            task = replace(task, message_id=f"lost/{index}/{member.tasks}")
        self.accounts[index].tasks += 1
        due = self.pace.due(member, task.sent, self.timeout, lost=task.lost)
        self.ledger.open(task, due)
        self.timeline.begin(index, task.sent, parts=self.pace.parts(member.client))

    # ---- Without messages -----------------------------------------------------------------------------------

    def _work_request(
        self, version: int, base: NDArray[Any], tasks: Sequence[HandedTask] = ()
    ) -> WorkRequest:
        return WorkRequest(self._layout, base, self._train, version + 1, tasks, self.local_rule())

    def _works_without_messages(self, grid: Grid) -> WorkingGrid | None:
        """Return the grid if its clients need no messages, and nobody looks at these."""
        if (
            not isinstance(grid, WorkingGrid)
            or writes_requests(type(self), FederatedStrategy)
            or self.pace.waits
            or self._compression() is not None
            or self.flower.train_metrics_aggr_fn is not None
            or len(self._untrained_at)
        ):
            return None
        return grid if grid.can_work(self._work_request(self.aggregations, self._sent)) else None

    # ---- Going on where an earlier run was ------------------------------------------------------------------

    def state(self) -> State:
        """Add the books: clients, and in virtual time the tasks under way with the models they started from.

        What is held back counts as under way: it is worked on again, and comes at once.
        """
        held = [each.task for each in self.ledger.held]
        tasks = self.pace.kept([*held, *self.ledger.tasks.values()])
        names = tasks[0].companions if tasks else ()
        companions = {f"sent-{name}": np.array([task.companions[name] for task in tasks]) for name in names}
        return {**super().state(), **self.ledger.state(tasks), **companions}

    def _take_up(self, state: State) -> None:
        """Fill the books from the state of an earlier run, and hand out again what was under way."""
        present = {client.index: client for client in self.clients}
        self.clock.resume(state["time"])  # waiting for the clients didn't count
        books = cast(LedgerState, state)
        self.ledger.restore(books, present, self.aggregations)
        for index in present.keys() & self.ledger.members.keys():
            self._watch_over(self.ledger.members[index])
        companions = {key.removeprefix("sent-"): state[key] for key in state if key.startswith("sent-")}
        again: dict[int, dict[int, tuple[float, Mapping[str, Vector]]]] = {}
        for place, (version, index, sent) in enumerate(books["tasks-under-way"]):
            if index in present:
                beside = {name: np.array(vectors[place]) for name, vectors in companions.items()}
                again.setdefault(version, {})[index] = sent, beside
        bases = dict(zip(books["versions"], books["bases"], strict=True))
        for version, tasks in again.items():
            self._send(tasks, version, np.array(bases[version]))
        members = self.ledger.members
        for due, index in books["retries"]:
            if index in present:
                self.ledger.agenda.push(due, index, members[index])
        if self.aggregations < self.total:
            resting = {index for _, index in books["retries"] if members[index].dropped}
            free = [m for index, m in members.items() if index in present and index not in resting]
            for member in free:
                self.ledger.ask_again(member)
            self._offer(free)

    def _take_model(self, model: Vector) -> None:
        super()._take_model(model)
        self._sent = model.astype(self._layout.narrow)
