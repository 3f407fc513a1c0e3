"""Rounds that close at a deadline, or with as many valid replies as they need (strategies/rounds/deadline.py).

A late reply is dropped, and its client is busy until its task is done. The weights of the clients in time are
rescaled to the sum of all weights drawn, as they are where clients fail.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from strategies.clients.client_statistics import Timeline
from strategies.clients.roster import Client
from strategies.clients.weights import rescale
from strategies.clock import RESOLUTION
from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.receiver import Receiver
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError
from strategies.flower.exchange import poll_replies, pushed
from strategies.rounds.deadline import ClosingTime, closing_time
from strategies.rounds.reply_collection import Metrics, late_metrics
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection

log = logging.getLogger("flwr.strategies")

LATE_TASKS = "late-tasks"  # in a checkpoint: client index and end of each late task


@dataclass
class LateTask:
    """A client's task that wasn't done when its round closed.

    Attributes
    ----------
    due : float
        Clock seconds at which the task ends; in real time, at which it is given up.
    request : Metadata, optional
        In real time, metadata of the request.
    """

    due: float
    request: Metadata | None = None

    def is_over(self, now: float) -> bool:
        """Return True if the task ends by a clock time."""
        return self.due <= now + RESOLUTION


@dataclass
class _Closing:
    """How a round closes.

    Attributes
    ----------
    began : float
        Clock seconds at which the round began.
    needed : float
        L, the number of valid replies that closes the round; infinity: all replies.
    multiplicities : dict of int to int
        The number of replies for which each client's reply counts, by index.
    due : dict of int to float
        In virtual time, clock seconds at which each reply comes, or its client goes away.
    share : float
        Σ p_i of the free clients over Σ p_i of the connected clients.
    closed : ClosingTime, optional
        How the round closed.
    late : dict of int to LateTask
        The tasks that go on after the round, by client index.
    """

    began: float
    needed: float
    multiplicities: dict[int, int]
    due: dict[int, float]
    share: float
    closed: ClosingTime | None = None
    late: dict[int, LateTask] = field(default_factory=dict)


class _Arrivals:
    """The replies to a round's requests in real time, as they come.

    Attributes
    ----------
    replies : list of Message
        The replies that came in time, in their order.
    late : dict of int to Message
        The replies that came in one poll with the last one needed, and after it, by client index.
    unanswered : set of int
        The clients that haven't answered yet.
    """

    def __init__(self, opened: _Closing, unanswered: set[int]) -> None:
        self._needed, self._multiplicities, self._valid = opened.needed, opened.multiplicities, 0
        self.replies: list[Message] = []
        self.late: dict[int, Message] = {}
        self.unanswered = unanswered

    @property
    def complete(self) -> bool:
        """Whether as many valid replies as the round needs are there."""
        return self._valid >= self._needed

    def take(self, index: int, reply: Message, is_valid: Callable[[int, Message], bool]) -> None:
        """Take a client's reply, which is late if the round is complete."""
        self.unanswered.discard(index)
        if self.complete:
            self.late[index] = reply
            return
        self.replies.append(reply)
        if self._needed < inf and is_valid(index, reply):
            self._valid += self._multiplicities[index]


class DeadlineCollector:
    """Closes a round at its deadline, or with as many valid replies as it needs.

    In virtual time the task times tell beforehand which clients are in time, and a late task is never computed. In
    real time the replies themselves tell who is in time.

    Parameters
    ----------
    selection : Selection
        The size of a round, and the importance of the free clients.
    receiver : Receiver
        Checks whether a reply is valid.
    """

    def __init__(
        self,
        config: SynchronousConfig,
        run: RunState,
        selection: Selection,
        receiver: Receiver,
        pending: PendingReplies,
        timeline: Timeline,
        capabilities: Capabilities,
    ) -> None:
        self._config, self._run, self._selection = config, run, selection
        self._receiver, self._pending, self._timeline = receiver, pending, timeline
        # Late tasks change what stateful clients keep: they work on these tasks, though nobody reads the replies.
        self._clients_keep_something = capabilities.clients_keep_models or config.compression != "none"
        self._late: dict[int, LateTask] = {}  # that are under way, by client index
        self._late_bytes = 0  # of replies that came after their rounds, and aren't reported yet
        self._current: tuple[Round, _Closing] | None = None

    def state(self) -> dict[str, Any]:
        """Return the late tasks that are under way."""
        rows = [[index, task.due] for index, task in sorted(self._late.items())]
        return {LATE_TASKS: rows} if rows else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the late tasks of a state."""
        self._late = {index: LateTask(due) for index, due in state.get(LATE_TASKS, ())}

    # ---- Who is free -------------------------------------------------------------------------------------------

    def busy_clients(self) -> list[int]:
        """Return the indices of the clients that are at work on late tasks."""
        return list(self._late)

    def free_clients(self, grid: Grid) -> Sequence[Client]:
        """Return the connected clients that aren't at work on late tasks."""
        if not self._late:
            return self._run.clients
        scheduler = self._run.scheduler
        if scheduler.real_time:
            self._drop_restored()
            for index, reply in next(poll_replies(grid, self._awaited(), 0.0, self._run.should_stop), []):
                self._came_late(index, reply)
        self._late = {i: task for i, task in self._late.items() if not task.is_over(scheduler.now())}
        return [client for client in self._run.clients if client.index not in self._late]

    def _drop_restored(self) -> None:
        """Drop the late tasks of a run that ended: in real time nobody works on them any more."""
        restored = [index for index, task in self._late.items() if task.request is None]
        if restored:
            log.warning("late work of %d clients was under way when the run ended: it is lost", len(restored))
        for index in restored:
            del self._late[index]

    def _awaited(self) -> dict[str, int]:
        """Return the clients whose late replies may still come, by message id."""
        return {task.request.message_id: index for index, task in self._late.items() if task.request}

    def _came_late(self, index: int, reply: Message) -> None:
        """Note a reply to a request of an earlier round: its client isn't at work any more."""
        del self._late[index]
        self._late_bytes += _bytes_of(reply)

    # ---- A round -----------------------------------------------------------------------------------------------

    def _opened(self, current: Round) -> _Closing:
        """Return how a round closes: worked out when it is asked first, once all requests are made."""
        if self._current is None or self._current[0] is not current:
            run, clients = self._run, current.clients
            needed, multiplicities = self._selection.replies_needed(current.weights or [1.0] * len(clients))
            due = {client.index: run.scheduler.predicted_end(client, current.number) for client in clients}
            opened = _Closing(
                run.scheduler.now(),
                needed,
                {client.index: number for client, number in zip(clients, multiplicities, strict=True)},
                {index: time for index, time in due.items() if time is not None},
                self._selection.share_beside(self._late),
            )
            self._current = current, opened
        return self._current[1]

    def duration(self, current: Round) -> float:
        """Return the seconds until the round closes; before its replies are collected, as if all were valid."""
        scheduler = self._run.scheduler
        if scheduler.real_time:
            return scheduler.round_time(current.clients, current.number)
        opened = self._opened(current)
        return (opened.closed or self._plan(opened)).at - scheduler.now()

    def _plan(self, opened: _Closing, failed: Collection[int] = ()) -> ClosingTime:
        """Return how a round closes in virtual time, given the clients whose replies aren't valid."""
        return closing_time(
            opened.due,
            opened.began,
            deadline=self._config.round_deadline,
            needed=opened.needed,
            multiplicities=opened.multiplicities,
            failed=failed,
            busy=[task.due for task in self._late.values()],
        )

    def collect(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterable[Message]:
        """Send a round's requests, and return the replies that count."""
        opened = self._opened(current)
        current.begin(requests, self._timeline, self._run.scheduler)
        by_node = {request.metadata.dst_node_id: request for request in requests}
        asked = {c.index: by_node[c.node_id] for c in current.clients if c.index not in current.lost}
        if self._run.scheduler.real_time:
            return self._as_they_come(current, opened, grid, asked)
        # A user-defined hook may have left out some clients.
        opened.due = {client.index: opened.due[client.index] for client in current.clients}
        return self._as_foretold(current, opened, grid, asked)

    def _as_foretold(
        self, current: Round, opened: _Closing, grid: Grid, asked: dict[int, Message]
    ) -> Iterator[Message]:
        """Send the requests whose tasks are done in time."""
        replies = list[Message]()
        failed = opened.due.keys() - asked.keys()
        plan = self._plan(opened, failed)
        while opened.needed < inf and (new := [i for i in plan.in_time if i in asked]):
            replies += self._exchanged(grid, [asked.pop(index) for index in new])
            failed |= self._invalid(current, new, replies)
            plan = self._plan(opened, failed)
        current.exceeds_budget = self._run.scheduler.over(plan.at)
        opened.late = {index: LateTask(opened.due[index]) for index in plan.late}
        self._close(current, opened, plan)
        unread = plan.late if self._clients_keep_something else []
        rest = [asked[index] for index in [*plan.in_time, *unread] if index in asked]
        return chain(replies, self._exchanged(grid, rest))

    def _exchanged(self, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        """Send some requests, and return their replies."""
        if not requests:
            return iter(())
        return self._pending.awaited(
            grid, requests, lambda index: self._timeline.arrived(index, self._run.scheduler.now())
        )

    def _as_they_come(
        self, current: Round, opened: _Closing, grid: Grid, asked: dict[int, Message]
    ) -> list[Message]:
        """Send all requests, and wait until the round closes; late replies to earlier rounds may come, too."""
        run, nodes = self._run, {client.index: client.node_id for client in current.clients}
        indices = {nodes[index]: index for index in asked}
        self._pending.expect(indices)
        waiting = {name: indices[node_id] for name, node_id in pushed(grid, asked.values()).items()}
        arrivals, earlier = _Arrivals(opened, set(waiting.values())), self._awaited()
        may_come, late = (arrivals.unanswered if asked else self._late), len(self._late)
        awaited = {**earlier, **waiting} if may_come else {}
        for poll in poll_replies(grid, awaited, self._longest(), run.should_stop):
            for index, reply in sorted(poll, key=lambda pair: pair[0]):
                if reply.metadata.reply_to_message_id in earlier:
                    self._came_late(index, reply)
                    continue
                self._timeline.arrived(index, run.scheduler.now())
                self._pending.answered(nodes[index])
                arrivals.take(index, reply, lambda i, reply: not self._invalid(current, [i], [reply]))
            # A round for which nobody is free ends when the first client is.
            if arrivals.complete or (not arrivals.unanswered if asked else len(self._late) < late):
                break
        self._pending.expect({})
        self._close_by_arrivals(current, opened, arrivals)
        return arrivals.replies

    def _close_by_arrivals(self, current: Round, opened: _Closing, arrivals: _Arrivals) -> None:
        """Close a round in real time with the replies that are there."""
        run, requests = self._run, current.request_of()
        # A reply that hasn't come by the timeout has failed; if the round ended earlier, the reply is late.
        failed = not arrivals.complete and not 0 < self._config.round_deadline <= run.timeout
        unanswered = set() if failed else arrivals.unanswered
        opened.late = {i: LateTask(opened.began + run.timeout, requests[i]) for i in unanswered}
        self._late_bytes += sum(map(_bytes_of, arrivals.late.values()))
        too_late = arrivals.late.keys() | unanswered
        in_time = [index for index in requests if index not in too_late]
        self._close(current, opened, ClosingTime(run.scheduler.now(), in_time, sorted(too_late)))

    def _longest(self) -> float:
        """Return the seconds after which a round in real time closes at the latest."""
        timeout, deadline = self._run.timeout, self._config.round_deadline
        if timeout < deadline:
            self._run.warn_once(
                "round_deadline = %g changes nothing: no round waits longer than timeout = %g s",
                deadline,
                timeout,
            )
        return min(deadline or inf, timeout)

    def _invalid(self, current: Round, clients: Iterable[int], replies: Iterable[Message]) -> set[int]:
        """Return the clients whose replies don't count, or that haven't replied."""
        check, wrong, requests = self._receiver.check(), set[int](), current.request_of()
        by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
        for index in clients:
            client = current.client(index)
            try:
                check(client, by_id.get(requests[index].message_id), current.base_of(client))
            except ArraysMismatchError:
                wrong.add(index)
        return wrong

    def _close(self, current: Round, opened: _Closing, plan: ClosingTime) -> None:
        """Leave the clients that are in time in the round: they share the weight of the late ones."""
        opened.closed, current.late = plan, plan.late
        late = set(plan.late)
        current.lost -= late  # whether a late task is lost is known only at its end
        weights = current.weights or [0.0] * len(current.clients)
        total = sum(weights) if current.clients else 1.0
        in_order = sorted(range(len(weights)), key=lambda place: current.clients[place].index)
        kept = [place for place in in_order if current.clients[place].index not in late]
        current.clients = [current.clients[place] for place in kept]
        current.requests = [current.requests[place] for place in kept]
        if current.weights is not None:
            # The share cancels out, but for the last bit, which runs on record have.
            current.weights = rescale([weights[place] * opened.share for place in kept], total)

    def finish(self, current: Round) -> Metrics:
        """Record the late tasks of a completed round; a cancelled round records nothing."""
        opened = self._opened(current)
        assert opened.closed is not None
        if current.late:
            self._run.note_failure(f"not done when round {current.number} closed")
        nodes = {client.index: client.node_id for client in self._run.clients}
        for index, task in list(self._late.items()):
            # A device that has gone, or come back as another node, never answers.
            dropped_out = task.request is not None and nodes.get(index) != task.request.dst_node_id
            if dropped_out or task.is_over(opened.closed.at):
                del self._late[index]
        self._late |= opened.late
        sent = sum(current.request_bytes.get(index, 0) for index in current.late)
        wasted, self._late_bytes = self._late_bytes + sent, 0
        return late_metrics(len(current.late), wasted)


def _bytes_of(reply: Message) -> int:
    return messages.total_bytes(reply) if reply.has_content() else 0
