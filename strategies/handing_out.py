"""Who is handed the model, and with what a run goes on: the hand-out half of the asynchronous loop.

A task is a version of the model that a client was sent; one client has one at a time. Tasks under way are in the
books (strategies/ledger.py), and with virtual time a resumed run hands them out again as they were.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from strategies import messages
from strategies.arrays import Vector
from strategies.exchange import Mail
from strategies.ledger import LedgerState, Member, Task
from strategies.lifecycle import State
from strategies.scheme import Scheme

log = logging.getLogger("flwr.strategies")


class HandingOut(Scheme):
    """What hands tasks out."""

    _mail: Mail
    _train: ConfigRecord

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
            fresh.append(member)
        if fresh:
            self.ledger.changed()
            self._offer(fresh)

    def _offer(self, members: Iterable[Member]) -> None:
        """Hand the global model to whom the scheme chooses, now that these are free: a task each, one at a time."""
        free = [member for member in members if not self.ledger.busy(member)]
        chosen = {m.client.index: m for m in self.choose(free) if not self.ledger.busy(m)} if free else {}
        if not chosen:
            return
        for member in chosen.values():
            member.tasks += 1
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
        current = version == self.aggregations
        arrays = self._result.arrays if current else self._layout.to_record(base.astype(np.float64))
        members = [self.ledger.members[index] for index in sent]
        requests, size = [], 0
        for member, (_, beside) in zip(members, sent.values(), strict=True):
            own = self._train_config(member.client, version + 1, member.tasks, self._train)
            requests.append(self._train_request(member.client, own, arrays, beside))
            size += messages.total_bytes(requests[-1]) - messages.num_bytes(arrays)
        pushed = self._mail.push(requests)
        for member, request in zip(members, requests, strict=True):
            message_id = request.metadata.message_id
            when, beside = sent[member.client.index]
            lost = message_id not in pushed
            self.accounts[member.client.index].tasks += 1
            due = when + self.pace.task_time(member, self.timeout, lost=lost)
            self.ledger.open(Task(member, version, base, message_id, when, lost, beside), due)
            self.timeline.begin(member.client.index, when)
        return size

    # ---- Going on where an earlier run was ------------------------------------------------------------------

    def state(self) -> State:
        """Add the books: clients, and in virtual time the tasks under way with the models they started from."""
        tasks = self.pace.kept(self.ledger.tasks.values())
        names = tasks[0].companions if tasks else ()
        companions = {f"sent-{name}": np.array([task.companions[name] for task in tasks]) for name in names}
        return {**super().state(), **self.ledger.state(tasks), **companions}

    def _take_up(self, state: State) -> None:
        """Fill the books from the state of an earlier run, and hand out again what was under way."""
        present = {client.index: client for client in self.clients}
        self.clock.resume(state["time"])  # waiting for the clients didn't count
        books = cast(LedgerState, state)
        self.ledger.restore(books, present, self.aggregations)
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
            self._offer([m for index, m in members.items() if index in present and index not in resting])

    def _take_model(self, model: Vector) -> None:
        super()._take_model(model)
        self._sent = model.astype(self._layout.narrow)
