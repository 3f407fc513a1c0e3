"""Rounds that close early: whose replies count, and what becomes of late work; see strategies/rounds/deadline.py.

With d_i the weight that a client was drawn with, a round counts those that are in time and, with late = next, the
late work of earlier rounds that has arrived when it closes: with their d_i, scaled to the sum of all d_i that were
drawn for the round, as where clients are lost. As the d_i of a round are by the clients that are free alone, they
are told with the share Σ p_i of these first. Late work is an update of the model that its client was sent.

In virtual time task times say beforehand who is in time. A task that is late is worked on in the round in which it
counts, and not at all if it is dropped. In real time it is as replies come.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients.accounts import ACCEPTED
from strategies.clients.roster import Client
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError
from strategies.flower.exchange import looks
from strategies.rounds.deadline import NEXT, Closing, LateTask, shared
from strategies.rounds.early_closing import EarlyClosing, bytes_of
from strategies.rounds.round import Early, Round
from strategies.updates.buffers import Untrained

log = logging.getLogger("flwr.strategies")


class TimedRounds(EarlyClosing):
    """Rounds that may close before all replies are there."""

    _fields: ConfigRecord | None = None  # what the loop adds to every request
    _out_of_time = False  # whether a round would have taken the clock past the time budget

    # ---- Whose replies count ---------------------------------------------------------------------------------

    def _replies(self, current: Round | None, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        """Send a round's requests and yield its replies, up to its end."""
        if current is None or current.early is None:
            return super()._replies(current, grid, requests)
        current.begin(requests, self.timeline, self.pace)
        by_node = {request.metadata.dst_node_id: request for request in requests}
        lost = current.lost
        asked = {
            c.index: by_node[c.node_id]
            for c in current.clients
            if c.node_id in by_node and c.index not in lost
        }
        if self.pace.waits:
            return iter(self._as_they_come(current, current.early, grid, asked))
        return self._as_foretold(current, current.early, grid, asked)

    def _as_foretold(
        self, current: Round, early: Early, grid: Grid, asked: dict[int, Message]
    ) -> Iterator[Message]:
        """Send what is in time, and with what is late for earlier rounds and comes now."""
        replies: list[Message] = []
        failed = early.due.keys() - asked.keys()
        plan = self._plan(early, failed)
        while early.needed < inf and (new := [i for i in plan.in_time if i in asked]):
            requests = [asked.pop(index) for index in new]
            replies += self._sent(grid, requests)
            failed |= self._invalid(current, new, replies)
            plan = self._plan(early, failed)
        early.late = {
            index: LateTask(
                index, current.number, early.began, early.due[index], parts=self.timeline.parts(index)
            )
            for index in plan.late
        }
        self._out_of_time = self.pace.over(plan.at)
        present = {client.index for client in self.clients}
        arrived = {task.client: task for task in self.late_work.due_by(plan.at)}
        early.lost = {
            c.index for c in self.clients if c.index in arrived and self._loses(c, arrived[c.index])
        }
        early.gone = {i for i, t in arrived.items() if t.base is None or i not in present} | early.lost
        early.earlier = {i: task for i, task in arrived.items() if i not in early.gone}
        again = self._requested_again(early.earlier.values())
        self._close(current, early, plan)
        # What comes too late is worked on only where that is seen later; replies to no request are passed over.
        unseen = plan.late if self.config.late != NEXT and self.keeps_on_clients else []
        rest = [asked[index] for index in [*plan.in_time, *unseen] if index in asked]
        return chain(replies, self._sent(grid, [*rest, *again]))

    def _loses(self, client: Client, task: LateTask) -> bool:
        return self.pace.loses(client, task.number, task.began)

    def _sent(self, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        if not requests:
            return iter(())
        awaited = self._awaited(grid, requests, lambda index: self.timeline.arrived(index, self.pace.now()))
        return (reply for _, reply in awaited)

    def _requested_again(self, tasks: Iterable[LateTask]) -> list[Message]:
        """Return the requests of late tasks, which are worked on now."""
        by_index, requests = {client.index: client for client in self.clients}, []
        arrays = {}
        for task in tasks:
            client, config = by_index[task.client], self._fields or ConfigRecord()
            assert task.base is not None
            if id(task.base) not in arrays:
                arrays[id(task.base)] = self._layout.to_record(task.base.astype("float64"))
            own = self._train_config(client, task.number, task.number, config)
            requests.append(self._train_request(client, own, arrays[id(task.base)], task.beside))
            task.request = requests[-1].metadata
        return requests

    def _as_they_come(
        self, current: Round, early: Early, grid: Grid, asked: dict[int, Message]
    ) -> list[Message]:
        """Send all, and wait for what closes the round; what is late for earlier rounds may come meanwhile."""
        tasks, by_index, replies = self.late_work.tasks, {c.index: c for c in current.clients}, []
        self._asked = {by_index[index].node_id: index for index in asked}
        pushed = set(grid.push_messages(list(asked.values())))
        ids = {request.metadata.message_id: index for index, request in asked.items()}
        earlier = {t.request.message_id: i for i, t in tasks.items() if t.request and not t.reply}
        waiting = {name: index for name, index in ids.items() if name in pushed}
        open_, got, late = set(waiting.values()), 0, dict[int, Message]()
        deadline = self.config.round_deadline or inf
        waits = {**earlier, **waiting}
        seen = any(task.reply for task in tasks.values())
        ended = not (open_ if asked else tasks and not seen)
        for look in () if ended else looks(grid, waits, min(deadline, self.timeout), self.stopped):
            for index, reply in sorted(look, key=lambda pair: pair[0]):
                if reply.metadata.reply_to_message_id in earlier:
                    tasks[index].reply, seen = reply, True
                    continue
                self.timeline.arrived(index, self.pace.now())
                self._asked.pop(by_index[index].node_id, None)
                open_.discard(index)
                if got >= early.needed:
                    late[index] = reply
                    continue
                replies.append(reply)
                if early.needed < inf:
                    got += early.worth[index] * (not self._invalid(current, [index], [reply]))
            if got >= early.needed or not (open_ if asked else not seen):
                break
        self._asked = {}
        in_time = got >= early.needed or deadline <= self.timeout
        self._settle_real_time(current, early, {i: late.get(i) for i in [*late, *(open_ if in_time else ())]})
        replies += [task.reply for task in early.earlier.values() if task.reply is not None]
        return replies

    def _settle_real_time(self, current: Round, early: Early, late: Mapping[int, Message | None]) -> None:
        """Note which tasks are late, and which late ones of earlier rounds have come, or never will."""
        metadata = dict(zip((c.index for c in current.clients), current.requests, strict=True))
        nodes = {client.index: client.node_id for client in self.clients}
        now, tasks = self.pace.now(), self.late_work.tasks
        for index, reply in late.items():
            until, sent = early.began + self.timeout, metadata[index]
            task = LateTask(index, current.number, early.began, until, request=sent, reply=reply)
            early.late[index] = task
        for index, task in tasks.items():
            same = task.request is not None and nodes.get(index) == task.request.dst_node_id
            if task.base is not None and task.reply is not None and index in nodes:
                early.earlier[index] = task
            elif task.reply is not None or task.due <= now or not same:
                early.gone.add(index)
                early.wasted += bytes_of(task.reply)
        in_time = [client.index for client in current.clients if client.index not in late]
        self._close(current, early, Closing(now, in_time, sorted(late)))

    def _invalid(self, current: Round, clients: Iterable[int], replies: Iterable[Message]) -> set[int]:
        """Return the clients whose replies don't count, or that haven't replied."""
        check, wrong = self._reads(Untrained(self._untrained_at)), set[int]()
        by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
        asked = {c.index: (c, m) for c, m in zip(current.clients, current.requests, strict=True)}
        for index in clients:
            client, metadata = asked[index]
            try:
                check(client, by_id.get(metadata.message_id), current.model)
            except ArraysMismatchError:
                wrong.add(index)
        return wrong

    def _close(self, current: Round, early: Early, plan: Closing) -> None:
        """Let those count that are in time, and what is late for earlier rounds: all by client."""
        early.closed = plan
        current.lost -= early.late.keys()  # whether such a task is lost is known when it would have come
        known = current.weights or [0.0] * len(current.clients)
        sent = dict(
            zip((c.index for c in current.clients), zip(known, current.requests, strict=True), strict=True)
        )
        base, key = current.model.astype(self._layout.narrow), self.flower.arrayrecord_key
        for index, task in early.late.items():
            task.weight = sent[index][0] * early.share if current.weights is not None else None
            if self.config.late == NEXT:
                task.beside = early.beside[index]
                task.base = task.beside[key].astype(base.dtype) if key in task.beside else base
        by_index = {client.index: client for client in [*self.clients, *current.clients]}
        count = {i: (d * early.share, request) for i, (d, request) in sent.items() if i not in early.late}
        for index, task in early.earlier.items():
            assert task.request is not None
            count[index] = (task.weight or 0.0, task.request)
        order = sorted(count)
        total = sum(known) if sent else 1.0
        current.clients = [by_index[index] for index in order]
        current.requests = [count[index][1] for index in order]
        if current.weights is not None:
            current.weights = shared([count[index][0] for index in order], total)

    def _closed_by_others(self, current: Round, replies: Iterable[Message]) -> list[Message]:
        """Return the replies that count, of all that somebody else's loop has waited for."""
        replies, early, failed = list(replies), current.early, set[int]()
        assert early is not None
        if early.needed < inf:
            failed = self._invalid(current, early.due, replies)
        plan = self._plan(early, failed)
        early.late = {i: LateTask(i, current.number, early.began, early.due[i]) for i in plan.late}
        self._close(current, early, plan)
        kept = {metadata.message_id for metadata in current.requests}
        return [reply for reply in replies if reply.metadata.reply_to_message_id in kept]

    # ---- What becomes of late work ---------------------------------------------------------------------------

    def _settle_late(self, current: Round) -> dict[str, int | float]:
        """Enter what is late in the books, and return the counts; a round that is cut off leaves no trace."""
        early = current.early
        if early is None or early.closed is None:
            return {}
        dropped = [] if self.config.late == NEXT else list(early.late)
        for index in dropped:
            self._say_late(index, current.number)
        if self.config.late == NEXT:
            for index in early.gone:
                task = self.late_work.tasks[index]
                self._say_late(index, task.number, lost=index in early.lost)
                early.wasted += task.sent_bytes
            dropped += early.gone
        self.late_work.done(early.gone | early.earlier.keys())
        for task in early.late.values() if self._own_loop else ():
            task.sent_bytes = early.bytes.get(task.client, 0)
            if self.config.late == NEXT or task.reply is None:
                self.late_work.add(task)
        early.wasted += self._bytes_late + sum(early.bytes.get(index, 0) for index in dropped)
        if self.config.late != NEXT:
            early.wasted += sum(bytes_of(task.reply) for task in early.late.values())
        self._bytes_late = 0
        ages = [
            current.number - task.number
            for index, task in early.earlier.items()
            if current.outcomes.get(index) == ACCEPTED
        ]
        told: dict[str, int | float] = {
            messages.LATE_UPDATES: len(early.late),
            messages.DROPPED_UPDATES: len(dropped),
            messages.BYTES_WASTED: early.wasted,
        }
        if self.config.late == NEXT:
            told[messages.EARLIER_UPDATES] = len(ages)
            if early.lost:  # what is dropped counts as late, whatever became of it
                told[messages.LOST_TASKS] = len(current.lost) + len(early.lost)
                told[messages.FAILURES] = len(current.failures) + len(early.lost)
        if self._tells_shares and (shares := self._foreseen_shares()) is not None:
            told["weights-distance"] = self.weights_distance(shares)
        if ages:
            told |= {"staleness-mean": sum(ages) / len(ages), "staleness-max": max(ages)}
        return told

    def _say_late(self, index: int, number: int, *, lost: bool = False) -> None:
        """Note that a client's work never counts."""
        self._any_missed, self._why = True, f"not done when round {number} closed"
        account = self.accounts[index]
        account.tasks += 1
        outcome = messages.LOST if lost else messages.LATE
        account.note(outcome)
        self.timeline.end(index, self.pace.now(), outcome)

    # ---- Time ------------------------------------------------------------------------------------------------

    def _duration(self, server_round: int) -> float:
        """Seconds by which the round under way moves the clock on."""
        current = self._round
        if current is None:
            return 0.0
        if current.early is None or self.pace.waits:
            return self.pace.round_time(current.clients, server_round)
        closed = current.early.closed or self._plan(current.early)
        return closed.at - self.pace.now()

    def _fits_budget(self, server_round: int) -> bool:
        return not self.pace.budget or not self.pace.over(self.pace.now() + self._duration(server_round))

    def _cut_off(self) -> bool:
        """Tell whether the round under way is given up."""
        return self.stopped() or self._out_of_time
