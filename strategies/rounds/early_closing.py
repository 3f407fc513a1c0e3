"""Rounds that may close before all replies are there: which clients they ask, and which replies count.

See strategies/rounds/deadline.py for when a round closes. A round counts the clients whose replies are in time. Each
client counts with the weight d_i with which it was drawn; the weights are then scaled to the sum of all d_i drawn for
the round, as where clients are lost. A late reply is dropped, and its client is at work until its task is done.

In virtual time the task times tell beforehand which clients are in time, and a late task is never computed. In real
time the replies themselves tell who is in time.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

from flwr.app import Message, Metadata
from flwr.serverapp import Grid

from strategies.clients.accounts import Accounts, Timeline
from strategies.clients.roster import Client
from strategies.clock import RESOLUTION
from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.population import Population
from strategies.core.receiver import Receiver
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError
from strategies.flower.exchange import looks
from strategies.rounds.deadline import ClosingTime, RoundSize, closing, shared
from strategies.rounds.round import Chosen, Round
from strategies.rounds.selection import Selection

log = logging.getLogger("flwr.strategies")

AT_WORK = "late-tasks"  # in a checkpoint: client index and end of each late task


def bytes_of(reply: Message | None) -> int:
    """Return the size in bytes of a reply's arrays; 0 if there are none."""
    return messages.total_bytes(reply) if reply is not None and reply.has_content() else 0


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


@dataclass
class Early:
    """The closing of one round.

    Attributes
    ----------
    began : float
        Clock seconds at which the round began.
    needed : float
        L, the number of valid replies that closes the round; infinity: all replies.
    worth : dict of int to int
        The number of replies for which each client's reply counts, by index.
    due : dict of int to float
        In virtual time, clock seconds at which each reply comes.
    bytes : dict of int to int
        Bytes of each client's request.
    share : float
        Σ p_i of the free clients over Σ p_i of the connected clients.
    closed : ClosingTime, optional
        How the round closed.
    late : dict of int to LateTask
        Tasks of this round that weren't done when it closed.
    answered : set of int
        In real time, the clients that were late for this round and have answered since.
    done : set of int
        Clients that are no longer at work on tasks of earlier rounds.
    wasted : int
        Bytes of replies that came too late.
    """

    began: float
    needed: float
    worth: dict[int, int]
    due: dict[int, float]
    bytes: dict[int, int]
    share: float = 1.0
    closed: ClosingTime | None = None
    late: dict[int, LateTask] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    wasted: int = 0


class EarlyClosing:
    """Closes a round at its deadline, or with as many valid replies as it needs.

    Parameters
    ----------
    receiver : Receiver
        Checks whether a reply is valid.
    """

    early = True

    def __init__(
        self,
        config: SynchronousConfig,
        run: RunState,
        population: Population,
        selection: Selection,
        size: RoundSize,
        receiver: Receiver,
        pending: PendingReplies,
        accounts: Accounts,
        timeline: Timeline,
        capabilities: Capabilities,
    ) -> None:
        self._config, self._run, self._population = config, run, population
        self._selection, self._size = selection, size
        self._receiver, self._pending = receiver, pending
        self._accounts, self._timeline, self._capabilities = accounts, timeline, capabilities
        self._out_of_time = False
        self._late: dict[int, LateTask] = {}  # tasks of earlier rounds that are under way, by client index
        self._bytes_late = 0  # of replies that came when their rounds were over, and aren't reported yet
        self._current: Early | None = None

    # ---- Who is asked ------------------------------------------------------------------------------------------

    def check(self, num_clients: int) -> None:
        """Raise ValueError if there aren't more clients than a round needs, so that none can be over-selected."""
        scheme, over = self._selection.scheme, self._config.over_select
        if over and scheme.scheme != "md" and scheme.sample_size(num_clients) == num_clients:
            raise ValueError(
                f"over_select = {over:g}: all {num_clients} clients are asked without it; fraction_train = "
                f"{scheme.fraction:g} must be less"
            )

    def number_to_draw(self) -> int | None:
        """Return the number of participants to draw, from the number of connected clients, at work or not."""
        return self._size.to_ask(self._size.there())

    @property
    def waits_for_late_work(self) -> bool:
        """Whether clients are at work on tasks of earlier rounds."""
        return bool(self._late)

    def busy(self) -> list[int]:
        """Return the indices of the clients that are at work on late tasks."""
        return list(self._late)

    def free(self, grid: Grid) -> list[Client]:
        """Return the connected clients that aren't at work on late tasks."""
        if not self._late:
            return self._run.clients
        pace = self._run.pace
        if pace.real_time:
            for index, reply in next(looks(grid, self._awaited(), 0.0, self._run.stopped), []):
                self._bytes_late += bytes_of(reply)
                del self._late[index]
        self._forget(self._due_by(pace.now()))
        return [client for client in self._run.clients if client.index not in self._late]

    def _awaited(self) -> dict[str, int]:
        """Return the clients whose late replies may still come, by message id."""
        return {task.request.message_id: index for index, task in self._late.items() if task.request}

    def _due_by(self, now: float) -> set[int]:
        """Return the clients whose late tasks end by a clock time."""
        return {index for index, task in self._late.items() if task.due <= now + RESOLUTION}

    def _forget(self, clients: Iterable[int]) -> None:
        """Forget the late tasks of clients that are done, or gone."""
        for index in clients:
            self._late.pop(index, None)

    def nobody(self, free: Sequence[Client]) -> Chosen | None:
        """Return an empty draw if all clients that the scheme could draw are at work; None otherwise."""
        fixed, late = set(self._selection.scheme.fixed), self._late.keys()
        by_scheme = not self._capabilities.chooses_clients
        if free and not (by_scheme and fixed & late and not fixed & {client.index for client in free}):
            return None
        return [], []

    def open(self, current: Round) -> None:
        """Work out how many valid replies close the round."""
        indices, there = [client.index for client in current.clients], self._size.there()
        worth = self._size.worth(current.weights or [1.0] * len(indices), there)
        self._current = Early(
            self._run.pace.now(),
            self._size.needed(there),
            dict(zip(indices, worth, strict=True)),
            due={},
            bytes={},
            share=self._free_share(),
        )

    def sent(self, client: Client, request: Message) -> None:
        """Note the bytes of a client's request."""
        self._early.bytes[client.index] = messages.total_bytes(request)

    def ready(self, current: Round) -> None:
        """Compute when each reply is due, or its client goes away; the bytes of all requests are known now."""
        foretold = {c.index: self._run.pace.foretold(c, current.number) for c in current.clients}
        self._early.due = {index: time for index, time in foretold.items() if time is not None}

    @property
    def _early(self) -> Early:
        assert self._current is not None
        return self._current

    def _free_share(self) -> float:
        """Return the free clients' share of Σ p_i over the connected ones: the d_i were computed among the free."""
        late = self._late
        if not late:
            return 1.0
        here = [c for c in self._run.clients if c.index in late or self._run.pace.there(c)]
        p = self._population.importances(here)
        return float(sum(w for client, w in zip(here, p, strict=True) if client.index not in late))

    # ---- Whose replies count -----------------------------------------------------------------------------------

    def replies(self, current: Round, grid: Grid, requests: Sequence[Message]) -> Iterable[Message]:
        """Send a round's requests, and return the replies that count."""
        current.begin(requests, self._timeline, self._run.pace)
        asked_now = {client.index for client in current.clients}
        self._early.due = {index: due for index, due in self._early.due.items() if index in asked_now}
        by_node = {request.metadata.dst_node_id: request for request in requests}
        asked = {
            c.index: by_node[c.node_id]
            for c in current.clients
            if c.node_id in by_node and c.index not in current.lost
        }
        if self._run.pace.real_time:
            return self._as_they_come(current, grid, asked)
        return self._as_foretold(current, grid, asked)

    def _plan(self, failed: Collection[int] = ()) -> ClosingTime:
        """Return how the round closes in virtual time, given the clients whose replies aren't valid."""
        early = self._early
        return closing(
            early.due,
            early.began,
            deadline=self._config.round_deadline,
            needed=early.needed,
            worth=early.worth,
            failed=failed,
            busy=[task.due for task in self._late.values()],
        )

    def _as_foretold(self, current: Round, grid: Grid, asked: dict[int, Message]) -> Iterator[Message]:
        """Send the tasks that are done in time."""
        early, replies = self._early, list[Message]()
        failed = early.due.keys() - asked.keys()
        plan = self._plan(failed)
        while early.needed < inf and (new := [i for i in plan.in_time if i in asked]):
            requests = [asked.pop(index) for index in new]
            replies += self._sent(grid, requests)
            failed |= self._invalid(current, new, replies)
            plan = self._plan(failed)
        early.late = {index: LateTask(early.due[index]) for index in plan.late}
        self._out_of_time = self._run.pace.over(plan.at)
        early.done = self._due_by(plan.at)
        self._close(current, plan)
        # What comes too late is worked on only where that is seen later; replies to no request are passed over.
        unseen = plan.late if self._clients_keep_something else []
        rest = [asked[index] for index in [*plan.in_time, *unseen] if index in asked]
        return chain(replies, self._sent(grid, rest))

    @property
    def _clients_keep_something(self) -> bool:
        """Whether clients keep a state from task to task, which dropped work changes, too."""
        return self._capabilities.clients_keep_models or self._config.compression != "none"

    def _sent(self, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        if not requests:
            return iter(())
        return self._pending.awaited(
            grid, requests, lambda index: self._timeline.arrived(index, self._run.pace.now())
        )

    def _as_they_come(self, current: Round, grid: Grid, asked: dict[int, Message]) -> list[Message]:
        """Send all requests, and wait until the round closes; late replies to earlier rounds may come, too."""
        early, run, replies = self._early, self._run, list[Message]()
        by_index = {c.index: c for c in current.clients}
        self._pending.expect({by_index[index].node_id: index for index in asked})
        pushed = set(grid.push_messages(list(asked.values())))
        ids = {request.metadata.message_id: index for index, request in asked.items()}
        earlier = self._awaited()
        waiting = {name: index for name, index in ids.items() if name in pushed}
        open_, got, late = set(waiting.values()), 0, dict[int, Message]()
        deadline = self._config.round_deadline or inf
        seen, ended = False, not (open_ if asked else self._late)
        for look in (
            () if ended else looks(grid, {**earlier, **waiting}, min(deadline, run.timeout), run.stopped)
        ):
            for index, reply in sorted(look, key=lambda pair: pair[0]):
                if reply.metadata.reply_to_message_id in earlier:
                    del self._late[index]
                    self._bytes_late += bytes_of(reply)
                    seen = True
                    continue
                self._timeline.arrived(index, run.pace.now())
                self._pending.answered(by_index[index].node_id)
                open_.discard(index)
                if got >= early.needed:
                    late[index] = reply
                    continue
                replies.append(reply)
                if early.needed < inf:
                    got += early.worth[index] * (not self._invalid(current, [index], [reply]))
            if got >= early.needed or not (open_ if asked else not seen):
                break
        self._pending.expect({})
        in_time = got >= early.needed or deadline <= run.timeout
        self._settle_real_time(current, {i: late.get(i) for i in [*late, *(open_ if in_time else ())]})
        return replies

    def _settle_real_time(self, current: Round, late: Mapping[int, Message | None]) -> None:
        """Note the late tasks of this round, and those of earlier rounds that are over or never will be."""
        early, run = self._early, self._run
        metadata = dict(zip((c.index for c in current.clients), current.requests, strict=True))
        nodes = {client.index: client.node_id for client in run.clients}
        now = run.pace.now()
        for index, reply in late.items():
            early.late[index] = LateTask(early.began + run.timeout, metadata[index])
            early.wasted += bytes_of(reply)
            if reply is not None:
                early.answered.add(index)
        for index, task in self._late.items():
            same = task.request is not None and nodes.get(index) == task.request.dst_node_id
            if task.due <= now or not same:
                early.done.add(index)
        in_time = [client.index for client in current.clients if client.index not in late]
        self._close(current, ClosingTime(now, in_time, sorted(late)))

    def _invalid(self, current: Round, clients: Iterable[int], replies: Iterable[Message]) -> set[int]:
        """Return the clients whose replies don't count, or that haven't replied."""
        check, wrong = self._receiver.check(), set[int]()
        by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
        asked = {c.index: (c, m) for c, m in zip(current.clients, current.requests, strict=True)}
        for index in clients:
            client, metadata = asked[index]
            try:
                check(client, by_id.get(metadata.message_id), current.base_of(client))
            except ArraysMismatchError:
                wrong.add(index)
        return wrong

    def _close(self, current: Round, plan: ClosingTime) -> None:
        """Replace the participants by the clients that are in time."""
        early = self._early
        early.closed = plan
        current.lost -= early.late.keys()  # whether such a task is lost is known when it would have come
        known = current.weights or [0.0] * len(current.clients)
        in_order = sorted(range(len(known)), key=lambda place: current.clients[place].index)
        kept = [place for place in in_order if current.clients[place].index not in early.late]
        total = sum(known) if current.clients else 1.0
        current.clients = [current.clients[place] for place in kept]
        current.requests = [current.requests[place] for place in kept]
        if current.weights is not None:
            current.weights = shared([known[place] * early.share for place in kept], total)

    # ---- What becomes of late work -----------------------------------------------------------------------------

    def settle(self, current: Round) -> Mapping[str, int | float]:
        """Enter late tasks in the accounts, and return their metrics; a round that is cut off leaves no trace."""
        early = self._early
        if early.closed is None:
            return {}
        for index in early.late:
            self._run.missed(f"not done when round {current.number} closed")
            account = self._accounts[index]
            account.tasks += 1
            account.note(messages.LATE)
            self._timeline.end(index, self._run.pace.now(), messages.LATE)
        self._forget(early.done)
        self._late |= {i: task for i, task in early.late.items() if i not in early.answered}
        wasted = early.wasted + self._bytes_late + sum(early.bytes.get(index, 0) for index in early.late)
        self._bytes_late = 0
        return {
            messages.LATE_UPDATES: len(early.late),
            messages.DROPPED_UPDATES: len(early.late),
            messages.BYTES_WASTED: wasted,
        }

    # ---- Time ---------------------------------------------------------------------------------------------------

    def cut_off(self) -> bool:
        """Return True if the run is stopped, or the round would exceed the time budget."""
        return self._run.stopped() or self._out_of_time

    def duration(self, current: Round | None, server_round: int) -> float:
        """Return the duration of the round, seconds of the run's clock."""
        pace = self._run.pace
        if current is None:
            return 0.0
        if pace.real_time:
            return pace.round_time(current.clients, server_round)
        return (self._early.closed or self._plan()).at - pace.now()

    def may_evaluate(self) -> list[Client]:
        """Return the connected clients; in real time without those at work, for which no evaluation waits."""
        run = self._run
        if run.grid is None or not run.pace.real_time:
            return run.clients
        free = self._pending.free(run.grid, messages.EVALUATE)
        return [client for client in free if client.index not in self._late]

    # ---- A run, and going on where an earlier one was ----------------------------------------------------------

    def begin(self) -> None:
        """Begin a run; in real time the late tasks of a resumed run are lost."""
        config = self._config
        self._out_of_time = False
        if not self._run.pace.real_time:
            return
        if config.round_deadline > self._run.timeout:
            log.warning(
                "round_deadline = %g changes nothing: no round waits longer than timeout = %g s",
                config.round_deadline,
                self._run.timeout,
            )
        if self._late:
            log.warning(
                "late work of %d clients was under way when the run ended: it is lost", len(self._late)
            )
            self._late = {}

    def state(self) -> dict[str, Any]:
        """Return the late tasks that are under way: client index and end of each."""
        return (
            {AT_WORK: [[index, task.due] for index, task in sorted(self._late.items())]} if self._late else {}
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the late tasks of a state; ValueError for one of an earlier version, whose late work may count."""
        rows = state.get(AT_WORK, ())
        if any(len(row) != 2 for row in rows):
            raise ValueError(
                "the checkpoint is of an earlier version, which kept late work: begin the run anew"
            )
        self._late = {index: LateTask(due) for index, due in rows}

    def reset(self) -> None:
        """Forget the late tasks of an earlier run."""
        self._late = {}
