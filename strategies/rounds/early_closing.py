"""Rounds that may close before all replies are there: whom they ask, which replies count, and late work.

See strategies/rounds/deadline.py for when a round closes. A round counts the clients whose replies are in time and,
with ``late = next``, the late work of earlier rounds that has arrived when the round closes. Each client counts with
the weight d_i with which it was drawn; the weights are then scaled to the sum of all d_i drawn for the round, as
where clients are lost. A round draws among the free clients alone, so its d_i are first multiplied by the free
clients' share of the connected clients' Σ p_i. Late work is an update of the model that its client was sent.

In virtual time the task times tell beforehand which clients are in time. A late task is computed in the round in
which it counts, and never if it is dropped. In real time the replies themselves tell who is in time.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Any

from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients.accounts import ACCEPTED, Accounts, Timeline
from strategies.clients.roster import Client
from strategies.clients.weights import Weights
from strategies.core.capabilities import Capabilities
from strategies.core.config import SynchronousConfig
from strategies.core.population import Population
from strategies.core.receiver import Receiver
from strategies.core.requests import PendingReplies, TrainingRequests
from strategies.core.run_state import RunState
from strategies.core.wrapper import OuterLoop
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import looks
from strategies.rounds.deadline import NEXT, ClosingTime, RoundSize, closing, shared
from strategies.rounds.late_work import LateTask, LateWork
from strategies.rounds.objective import RoundObjective
from strategies.rounds.round import Chosen, Round
from strategies.rounds.selection import Selection
from strategies.updates.server_optimizer import FEDEXP

log = logging.getLogger("flwr.strategies")


def bytes_of(reply: Message | None) -> int:
    """Return the size in bytes of a reply's arrays; 0 if there are none."""
    return messages.total_bytes(reply) if reply is not None and reply.has_content() else 0


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
    beside : dict of int to mapping
        The vectors beside the model in each client's request.
    share : float
        Σ p_i of the free clients over Σ p_i of the connected clients.
    closed : ClosingTime, optional
        How the round closed.
    late : dict of int to LateTask
        Tasks of this round that weren't done when it closed.
    earlier : dict of int to LateTask
        Tasks of earlier rounds that count in this one.
    gone : set of int
        Clients whose tasks of earlier rounds never count, and are no longer worked on.
    lost : set of int
        Those of ``gone`` that went away while they worked.
    wasted : int
        Bytes of replies that came too late.
    """

    began: float
    needed: float
    worth: dict[int, int]
    due: dict[int, float]
    bytes: dict[int, int]
    beside: dict[int, Mapping[str, Vector]]
    share: float = 1.0
    closed: ClosingTime | None = None
    late: dict[int, LateTask] = field(default_factory=dict)
    earlier: dict[int, LateTask] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    wasted: int = 0


class EarlyClosing:
    """Closes a round at its deadline, or with as many valid replies as it needs.

    Parameters
    ----------
    requests, receiver : TrainingRequests, Receiver
        They make the requests for late work, and check whether a reply is valid.
    objective : RoundObjective
        The objective that rounds with an early closing minimise.
    """

    early = True

    def __init__(
        self,
        config: SynchronousConfig,
        run: RunState,
        population: Population,
        selection: Selection,
        size: RoundSize,
        objective: RoundObjective,
        requests: TrainingRequests,
        receiver: Receiver,
        pending: PendingReplies,
        accounts: Accounts,
        timeline: Timeline,
        capabilities: Capabilities,
    ) -> None:
        self._config, self._run, self._population = config, run, population
        self._selection, self._size, self._objective = selection, size, objective
        self._requests, self._receiver, self._pending = requests, receiver, pending
        self._accounts, self._timeline, self._capabilities = accounts, timeline, capabilities
        self._out_of_time = False
        self.late_work = LateWork()
        self._fields = ConfigRecord()  # what the loop adds to every request
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
        """Whether work of earlier rounds is under way, or has arrived and isn't counted yet."""
        return bool(self.late_work.tasks)

    def busy(self) -> list[int]:
        """Return the indices of the clients that are at work on late tasks."""
        return [task.client for task in list(self.late_work.tasks.values()) if task.reply is None]

    def free(self, grid: Grid) -> list[Client]:
        """Return the connected clients that aren't at work on late tasks."""
        tasks, pace = self.late_work.tasks, self._run.pace
        if not tasks:
            return self._run.clients
        if pace.real_time:
            ids = {task.request.message_id: i for i, task in tasks.items() if task.request and not task.reply}
            for index, reply in next(looks(grid, ids, 0.0, self._run.stopped), []):
                tasks[index].reply = reply
        if self._config.late != NEXT:
            over = {task.client for task in self.late_work.due_by(pace.now())}
            self._bytes_late += sum(bytes_of(task.reply) for task in tasks.values())
            self.late_work.done(over | {i for i, task in tasks.items() if task.reply})
        return [client for client in self._run.clients if client.index not in tasks]

    def nobody(self, free: Sequence[Client]) -> Chosen | None:
        """Return an empty draw if all clients that the scheme could draw are at work; None otherwise."""
        fixed, late = set(self._selection.scheme.fixed), self.late_work.tasks.keys()
        by_scheme = not self._capabilities.chooses_clients
        if free and not (by_scheme and fixed & late and not fixed & {client.index for client in free}):
            return None
        by_replies = any(task.weight is None for task in self.late_work.tasks.values())
        return [], None if by_replies else []

    def open(self, current: Round, config: ConfigRecord) -> None:
        """Work out how many valid replies close the round."""
        indices, there = [client.index for client in current.clients], self._size.there()
        worth = self._size.worth(current.weights or [1.0] * len(indices), there)
        self._fields = config
        self._current = Early(
            self._run.pace.now(),
            self._size.needed(there),
            dict(zip(indices, worth, strict=True)),
            due={},
            bytes={},
            beside={},
            share=self._free_share(),
        )

    def sent(self, client: Client, request: Message, beside: Mapping[str, Vector]) -> None:
        """Note a client's request, and the vectors (D,) beside the model."""
        early = self._early
        early.bytes[client.index], early.beside[client.index] = messages.total_bytes(request), beside

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
        late = self.late_work.tasks
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
            busy=[task.due for task in self.late_work.tasks.values()] if self._run.own_loop else (),
        )

    def _as_foretold(self, current: Round, grid: Grid, asked: dict[int, Message]) -> Iterator[Message]:
        """Send the tasks that are done in time, and the late tasks of earlier rounds that are done by now."""
        early, run, replies = self._early, self._run, list[Message]()
        failed = early.due.keys() - asked.keys()
        plan = self._plan(failed)
        while early.needed < inf and (new := [i for i in plan.in_time if i in asked]):
            requests = [asked.pop(index) for index in new]
            replies += self._sent(grid, requests)
            failed |= self._invalid(current, new, replies)
            plan = self._plan(failed)
        early.late = {
            index: LateTask(
                index, current.number, early.began, early.due[index], parts=self._timeline.parts(index)
            )
            for index in plan.late
        }
        self._out_of_time = run.pace.over(plan.at)
        present = {client.index for client in run.clients}
        arrived = {task.client: task for task in self.late_work.due_by(plan.at)}
        early.lost = {c.index for c in run.clients if c.index in arrived and self._loses(c, arrived[c.index])}
        early.gone = {i for i, t in arrived.items() if t.base is None or i not in present} | early.lost
        early.earlier = {i: task for i, task in arrived.items() if i not in early.gone}
        again = self._requested_again(early.earlier.values())
        self._close(current, plan)
        # What comes too late is worked on only where that is seen later; replies to no request are passed over.
        unseen = plan.late if self._config.late != NEXT and self._clients_keep_something else []
        rest = [asked[index] for index in [*plan.in_time, *unseen] if index in asked]
        return chain(replies, self._sent(grid, [*rest, *again]))

    @property
    def _clients_keep_something(self) -> bool:
        """Whether clients keep a state from task to task, which dropped work changes, too."""
        return self._capabilities.clients_keep_models or self._config.compression != "none"

    def _loses(self, client: Client, task: LateTask) -> bool:
        return self._run.pace.loses(client, task.number, task.began)

    def _sent(self, grid: Grid, requests: Sequence[Message]) -> Iterator[Message]:
        if not requests:
            return iter(())
        return self._pending.awaited(
            grid, requests, lambda index: self._timeline.arrived(index, self._run.pace.now())
        )

    def _requested_again(self, tasks: Iterable[LateTask]) -> list[Message]:
        """Return requests for late tasks: their clients work on them in the round in which they count."""
        by_index, requests = {client.index: client for client in self._run.clients}, list[Message]()
        arrays = {}
        for task in tasks:
            client = by_index[task.client]
            assert task.base is not None
            if id(task.base) not in arrays:
                arrays[id(task.base)] = self._run.layout.to_record(task.base.astype("float64"))
            own = self._requests.fields(client, task.number, task.number, self._fields)
            requests.append(self._requests.request(client, own, arrays[id(task.base)], task.beside))
            task.request = requests[-1].metadata
        return requests

    def _as_they_come(self, current: Round, grid: Grid, asked: dict[int, Message]) -> list[Message]:
        """Send all requests, and wait until the round closes; late replies to earlier rounds may come, too."""
        early, run, replies = self._early, self._run, list[Message]()
        tasks, by_index = self.late_work.tasks, {c.index: c for c in current.clients}
        self._pending.expect({by_index[index].node_id: index for index in asked})
        pushed = set(grid.push_messages(list(asked.values())))
        ids = {request.metadata.message_id: index for index, request in asked.items()}
        earlier = {t.request.message_id: i for i, t in tasks.items() if t.request and not t.reply}
        waiting = {name: index for name, index in ids.items() if name in pushed}
        open_, got, late = set(waiting.values()), 0, dict[int, Message]()
        deadline = self._config.round_deadline or inf
        waits = {**earlier, **waiting}
        seen = any(task.reply for task in tasks.values())
        ended = not (open_ if asked else tasks and not seen)
        for look in () if ended else looks(grid, waits, min(deadline, run.timeout), run.stopped):
            for index, reply in sorted(look, key=lambda pair: pair[0]):
                if reply.metadata.reply_to_message_id in earlier:
                    tasks[index].reply, seen = reply, True
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
        replies += [task.reply for task in early.earlier.values() if task.reply is not None]
        return replies

    def _settle_real_time(self, current: Round, late: Mapping[int, Message | None]) -> None:
        """Note the late tasks of this round, and those of earlier rounds that have arrived or never will."""
        early, run = self._early, self._run
        metadata = dict(zip((c.index for c in current.clients), current.requests, strict=True))
        nodes = {client.index: client.node_id for client in run.clients}
        now, tasks = run.pace.now(), self.late_work.tasks
        for index, reply in late.items():
            until, sent = early.began + run.timeout, metadata[index]
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
        self._close(current, ClosingTime(now, in_time, sorted(late)))

    def _invalid(self, current: Round, clients: Iterable[int], replies: Iterable[Message]) -> set[int]:
        """Return the clients whose replies don't count, or that haven't replied."""
        check, wrong = self._receiver.check(), set[int]()
        by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
        asked = {c.index: (c, m) for c, m in zip(current.clients, current.requests, strict=True)}
        for index in clients:
            client, metadata = asked[index]
            try:
                check(client, by_id.get(metadata.message_id), current.base_of(client)[0])
            except ArraysMismatchError:
                wrong.add(index)
        return wrong

    def _close(self, current: Round, plan: ClosingTime) -> None:
        """Replace the participants by the clients whose work counts: in time, or late for an earlier round."""
        early = self._early
        early.closed = plan
        current.lost -= early.late.keys()  # whether such a task is lost is known when it would have come
        known = current.weights or [0.0] * len(current.clients)
        sent = dict(
            zip((c.index for c in current.clients), zip(known, current.requests, strict=True), strict=True)
        )
        base, key = current.model.astype(self._run.layout.narrow), self._run.flower.arrayrecord_key
        for index, task in early.late.items():
            task.weight = sent[index][0] * early.share if current.weights is not None else None
            if self._config.late == NEXT:
                task.beside = early.beside[index]
                task.base = task.beside[key].astype(base.dtype) if key in task.beside else base
        by_index = {client.index: client for client in [*self._run.clients, *current.clients]}
        count = {i: (d * early.share, request) for i, (d, request) in sent.items() if i not in early.late}
        for index, task in early.earlier.items():
            assert task.request is not None
            count[index] = (task.weight or 0.0, task.request)
            if task.base is not None:
                current.bases[index] = task.base, task.number
        order = sorted(count)
        total = sum(known) if sent else 1.0
        current.clients = [by_index[index] for index in order]
        current.requests = [count[index][1] for index in order]
        if current.weights is not None:
            current.weights = shared([count[index][0] for index in order], total)

    def closed_by_others(self, current: Round, replies: Iterable[Message]) -> Iterable[Message]:
        """Return the replies that count, of all replies that a user-defined loop has waited for."""
        replies, early, failed = list(replies), self._early, set[int]()
        if early.needed < inf:
            failed = self._invalid(current, early.due, replies)
        plan = self._plan(failed)
        early.late = {i: LateTask(i, current.number, early.began, early.due[i]) for i in plan.late}
        self._close(current, plan)
        kept = {metadata.message_id for metadata in current.requests}
        return [reply for reply in replies if reply.metadata.reply_to_message_id in kept]

    # ---- What becomes of late work -----------------------------------------------------------------------------

    def settle(self, current: Round) -> Mapping[str, int | float]:
        """Enter late tasks in the accounts, and return their metrics; a round that is cut off leaves no trace."""
        early = self._early
        if early.closed is None:
            return {}
        next_counts = self._config.late == NEXT
        dropped = [] if next_counts else list(early.late)
        for index in dropped:
            self._never_counts(index, current.number)
        if next_counts:
            for index in early.gone:
                task = self.late_work.tasks[index]
                self._never_counts(index, task.number, lost=index in early.lost)
                early.wasted += task.sent_bytes
            dropped += early.gone
        self.late_work.done(early.gone | early.earlier.keys())
        for task in early.late.values() if self._run.own_loop else ():
            task.sent_bytes = early.bytes.get(task.client, 0)
            if next_counts or task.reply is None:
                self.late_work.add(task)
        early.wasted += self._bytes_late + sum(early.bytes.get(index, 0) for index in dropped)
        if not next_counts:
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
        if next_counts:
            told[messages.EARLIER_UPDATES] = len(ages)
            if early.lost:  # what is dropped counts as late, whatever became of it
                told[messages.LOST_TASKS] = len(current.lost) + len(early.lost)
                told[messages.FAILURES] = len(current.failures) + len(early.lost)
        if self._selection.weights_say_shares and (q := self._objective.shares()) is not None:
            told["weights-distance"] = self._objective.distance(q)
        if ages:
            told |= {"staleness-mean": sum(ages) / len(ages), "staleness-max": max(ages)}
        return told

    def _never_counts(self, index: int, number: int, *, lost: bool = False) -> None:
        """Note that a client's work never counts."""
        self._run.missed(f"not done when round {number} closed")
        account = self._accounts[index]
        account.tasks += 1
        outcome = messages.LOST if lost else messages.LATE
        account.note(outcome)
        self._timeline.end(index, self._run.pace.now(), outcome)

    # ---- Time, and what is minimised ---------------------------------------------------------------------------

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

    def expected(self, p: Weights, expected: Weights | None) -> Weights | None:
        """Return each client's expected share (n,) of the objective; None if it can't be known."""
        if self._capabilities.counts_again or expected is None:
            return expected
        foreseen = self._objective.shares()  # of those that are there
        return foreseen if foreseen is not None and len(foreseen) == len(p) else None

    def may_evaluate(self) -> list[Client]:
        """Return the connected clients; in real time without those at work, for which no evaluation waits."""
        run = self._run
        if run.grid is None or not run.pace.real_time:
            return run.clients
        free = self._pending.free(run.grid, messages.EVALUATE)
        return [client for client in free if client.index not in self.late_work.tasks]

    # ---- A run, and going on where an earlier one was ----------------------------------------------------------

    def check_loop(self, loop: OuterLoop) -> None:
        """Raise RunError in a user-defined loop if late work needs the strategy's own loop."""
        config = self._config
        if not self._run.own_loop and (config.late == NEXT or self._run.pace.real_time):
            given = f"round_deadline = {config.round_deadline:g}, over_select = {config.over_select:g}"
            raise RunError(
                f"{f'late = {NEXT!r}' if config.late == NEXT else given}: {loop.who} waits for all replies of a "
                f"round before any counts; call {loop.instead}"
            )

    def begin(self) -> None:
        """Continue late work of a resumed run; in real time it is lost."""
        config, tasks, pace = self._config, self.late_work.tasks, self._run.pace
        self._out_of_time = False
        if pace.real_time and config.round_deadline > self._run.timeout:
            log.warning(
                "round_deadline = %g changes nothing: no round waits longer than timeout = %g s",
                config.round_deadline,
                self._run.timeout,
            )
        if tasks and pace.real_time:
            log.warning("late work of %d clients was under way when the run ended: it is lost", len(tasks))
            self.late_work = LateWork()
            return
        for task in tasks.values():
            if config.late == NEXT:
                self._timeline.begin(task.client, task.began, task.due, task.parts)

    def log_objective(self) -> None:
        """Log once which objective the run minimises."""
        self._objective.log_beforehand()

    def end(self) -> None:
        """Log the observed weights of the clients, where they couldn't be known before."""
        self._objective.log_observed()

    def state(self) -> dict[str, Any]:
        """Return the late work that is under way."""
        return self.late_work.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the late work of a state."""
        self.late_work = LateWork.restored(state)

    def reset(self) -> None:
        """Forget the late work and the expected shares of an earlier run."""
        self.late_work = LateWork()
        self._objective.reset()


def check_early(name: str, config: SynchronousConfig, scheme: str, capabilities: Capabilities) -> None:
    """Raise ValueError if the config or the method excludes rounds that close early."""
    given = f"over_select = {config.over_select:g}"
    if config.over_select and scheme not in ("uniform", "md", "flower"):
        raise ValueError(f"{given}: goes with participation uniform, md or flower, not with {scheme!r}")
    if config.over_select and capabilities.chooses_clients:
        raise ValueError(f"{given}: {name} chooses clients by itself (select); allowed is 0")
    if scheme == "paired":
        raise ValueError(
            f"round_deadline = {config.round_deadline:g}: participation = 'paired' needs the last client in "
            "every round, who may be at work on an earlier one; allowed are full, uniform, md, flower, fixed:…"
        )
    why = capabilities.of_one_round
    if config.server_optimizer == FEDEXP:
        why = f"the step size of server_optimizer = {FEDEXP!r} is that of the updates of one round"
    if config.late == NEXT and why:
        raise ValueError(f"late = {NEXT!r}: {why}; allowed is drop")
