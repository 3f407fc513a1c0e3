"""The dispatcher of the asynchronous loop: which clients get the model when, and tasks of a resumed run.

A task is a version of the model that a client was sent; one client has one at a time. Tasks under way are in the
task table (strategies/events/tasks.py), and in virtual time a resumed run dispatches them again as they were.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.clients.client_state import ClientState
from strategies.clients.client_statistics import ClientStatistics, Timeline
from strategies.clients.roster import Client
from strategies.clock import RESOLUTION
from strategies.core.requests import TrainingRequests
from strategies.core.run_state import RunState
from strategies.events.task_checkpoint import restored_bases, restored_tasks
from strategies.events.tasks import AvailabilityChanged, Retry, Task, TaskTable
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.exchange import MessageClient
from strategies.flower.grids import HandedTask, WorkingGrid, WorkRequest
from strategies.timing.availability import NEVER

log = logging.getLogger("flwr.strategies")

FIRST = 1 << 40  # before every client, in the event queue

ExtraVectors = Mapping[str, Vector]


class Dispatch(NamedTuple):
    """When a client is sent the model, in clock seconds, its extra vectors, and its local steps (0: as usual)."""

    when: float
    extra_vectors: ExtraVectors
    steps: int = 0


class DispatchHooks(Protocol):
    """What the dispatcher asks of the method; see ``AsynchronousStrategy``."""

    @property
    def concurrency(self) -> int:
        """M_c, the number of clients at work at once; 0: all."""

    @property
    def reference_steps(self) -> int:
        """The number of local steps of a task that takes as long as the time scenario says."""

    def local_rule(self) -> dict[str, float]:
        """Return the fields of training messages that define the algorithm's local step."""

    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[ExtraVectors]:
        """Yield for each client the vectors (D,) that it is sent beside the model, by record name."""

    def select_idle(self, free: Sequence[ClientState]) -> Iterable[ClientState]:
        """Return the clients that get the model now."""

    def resend_model(self, client: Client) -> tuple[int, NDArray[Any]] | None:
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

    _message_client: MessageClient
    _config: ConfigRecord  # of training
    _sent: NDArray[Any]  # the model (D,) that clients have once they got it
    _compressed: ArrayRecord | None = None  # the model's compressed record, where it is sent so

    def __init__(
        self,
        run: RunState,
        task_table: TaskTable,
        requests: TrainingRequests,
        client_stats: ClientStatistics,
        timeline: Timeline,
        hooks: DispatchHooks,
        *,
        without_messages: bool,
    ) -> None:
        self._run, self._task_table, self._requests = run, task_table, requests
        self._client_stats, self._timeline = client_stats, timeline
        self._hooks, self._without_messages = hooks, without_messages
        self._working: WorkingGrid | None = None

    def begin(self, grid: Grid, message_client: MessageClient, config: ConfigRecord) -> None:
        """Begin or resume a run, from the run's model."""
        self._message_client, self._config = message_client, config
        self.take_model()
        self._working = self._needs_no_messages(grid)

    def take_model(self) -> None:
        """Dispatch the run's model from now on."""
        run, self._compressed = self._run, None
        arrays, sent = run.to_send(run.model, run.result.arrays)
        if run.model_compression is not None:
            self._compressed = arrays
        self._sent = sent.astype(run.layout.narrow)

    @property
    def _arrays(self) -> ArrayRecord:
        """The model as it is sent."""
        return self._run.result.arrays if self._compressed is None else self._compressed

    # ---- Who is there ----------------------------------------------------------------------------------------------

    def add_clients(self, clients: Iterable[Client]) -> list[ClientState]:
        """Let clients join that are new, or back as another node; return them."""
        task_table, aggregations, fresh = self._task_table, self._run.aggregations, []
        for client in clients:
            member = task_table.members.get(client.index)
            if member is None:
                # The aggregation under way began before it came.
                since = aggregations and aggregations + 1
                member = task_table.join(client, since)
            elif member.client.node_id == client.node_id:
                continue
            elif member.dropped:
                log.warning("%s is back, as node %d", client, client.node_id, extra=client.fields)
            member.client = client
            member.count_again(aggregations)
            if task_table.reached_contribution_limit(member):  # as another node it is the same client
                member.drop(aggregations)
            task_table.tasks.pop(member.task, None)  # its former node will not answer
            self._watch(member)
            fresh.append(member)
        if fresh:
            task_table.changed(fresh)
        return fresh

    def _watch(self, member: ClientState) -> None:
        """Note whether a client is present, and queue its next change, before other events of that time."""
        scheduler, client = self._run.scheduler, member.client
        member.is_available = scheduler.is_available(client)
        self._task_table.refresh_idle(member)
        next_change = scheduler.next_availability_change(client)
        if not member.turning and next_change < NEVER:
            member.turning = True
            self._task_table.queue.push(next_change, client.index - FIRST, AvailabilityChanged(member))

    def turn(self, member: ClientState) -> list[ClientState]:
        """Let a client come or go; return it if it is free now. The task of one that goes was known to be lost."""
        member.turning = False
        self._watch(member)
        return [member] if member.is_available and (member.again or not member.dropped) else []

    def retry(self, member: ClientState) -> list[ClientState]:
        """Let a client that was dropped be asked again, now or when it is present again; return it if it is free."""
        scheduler = self._run.scheduler
        if member.is_available:
            self._task_table.ask_again(member)
            return [member]
        if (comes := scheduler.next_available(member.client, scheduler.now())) < NEVER:
            self._task_table.queue.push(comes, member.client.index, Retry(member))
        return []

    # ---- Tasks -----------------------------------------------------------------------------------------------------

    def dispatch(self, members: Iterable[ClientState]) -> None:
        """Dispatch the model to the clients that the method chooses among the free ones: one task each."""
        task_table, chosen = self._task_table, self._chosen(members)
        if not chosen:
            return
        for member in chosen.values():
            member.tasks += 1
        task_table.dispatched += len(chosen)
        interval_stats, now = task_table.interval_stats, self._run.scheduler.now()
        interval_stats.bytes_down += len(chosen) * messages.num_bytes(self._arrays)
        extra_vectors = self._hooks.extra_vectors([member.client for member in chosen.values()])
        sent = {
            index: Dispatch(now, next(extra_vectors, {}), self._hooks.task_steps(member.client))
            for index, member in chosen.items()
        }
        for index, member in chosen.items():
            if (again := self._hooks.resend_model(member.client)) is not None:
                interval_stats.bytes_down += self._send({index: sent.pop(index)}, *again)
        if sent:
            interval_stats.bytes_down += self._send(sent, self._run.aggregations, self._sent)

    def _chosen(self, members: Iterable[ClientState]) -> dict[int, ClientState]:
        """Return the clients that the method chooses among the free ones, by index."""
        can_work = self._task_table.can_work
        free = list(filter(can_work, members))
        # The place of a client that went, or was dropped, is another's, where there are places.
        if not free and not self._hooks.concurrency:
            return {}
        return {member.client.index: member for member in filter(can_work, self._hooks.select_idle(free))}

    def _send(self, sent: Mapping[int, Dispatch], version: int, base: NDArray[Any]) -> int:
        """Send a version of the model (D,) as the task of clients by index; return the bytes of the extra vectors."""
        run, requests = self._run, self._requests
        members = [self._task_table.members[index] for index in sent]
        run.options.before_release(list(sent))
        if self._working is not None:
            self._hand(self._working, members, sent, version, base)
            return 0
        current = version == run.aggregations
        arrays = self._arrays if current else run.to_send_again(base)
        written, extra_bytes, reference_steps = [], 0, self._hooks.reference_steps
        model_bytes = messages.num_bytes(self._arrays)
        for member, (_, extra_vectors, steps) in zip(members, sent.values(), strict=True):
            client = member.client
            fields = requests.fields(client, version + 1, member.tasks, self._config)
            if steps:
                fields[messages.STEPS] = steps
                if reference_steps:
                    run.scheduler.task_costs.ask(client.index, steps / reference_steps)
            written.append(requests.request(client, fields, arrays, extra_vectors))
            extra_bytes += messages.total_bytes(written[-1]) - model_bytes
            requests.note_sent(client, written[-1], run.scheduler.task_costs.part_of(client.index))
        goes = self._drop_outs(members, sent)
        # A task that is lost needn't be worked on.
        pushed = self._message_client.push([m for m, lost in zip(written, goes, strict=True) if not lost])
        for member, dispatch, request, dropped_out in zip(members, sent.values(), written, goes, strict=True):
            when, extra_vectors, steps = dispatch
            message_id = request.metadata.message_id
            lost = dropped_out or message_id not in pushed
            self._open(Task(member, version, base, message_id, when, lost, dropped_out, extra_vectors, steps))
        return extra_bytes

    def _hand(
        self,
        grid: WorkingGrid,
        members: Sequence[ClientState],
        sent: Mapping[int, Dispatch],
        version: int,
        base: NDArray[Any],
    ) -> None:
        """Dispatch tasks without messages."""
        scheduler = self._run.scheduler
        for member in members if scheduler.uses_device_profiles else ():
            scheduler.task_costs.record(member.client.index, scheduler.task_costs.model)
        goes = self._drop_outs(members, sent)
        stay = (member for member, dropped_out in zip(members, goes, strict=True) if not dropped_out)
        tasks = [HandedTask(m.client.node_id, m.client.index, m.tasks) for m in stay]
        request = self._work_request(version, base, tasks)
        ids = iter(self._message_client.hand_out(grid, request) if tasks else ())
        for member, dispatch, dropped_out in zip(members, sent.values(), goes, strict=True):
            message_id = "" if dropped_out else next(ids)
            self._open(Task(member, version, base, message_id, dispatch.when, dropped_out, dropped_out))

    def _drop_outs(self, members: Iterable[ClientState], sent: Mapping[int, Dispatch]) -> list[bool]:
        """Return whether each client goes away before the end of its task."""
        pairs = zip(members, sent.values(), strict=True)
        return [self._run.scheduler.will_drop(m.client, m.tasks, each.when) for m, each in pairs]

    def _open(self, task: Task) -> None:
        """Enter a dispatched task in the bookkeeping."""
        member, index, scheduler = task.member, task.member.client.index, self._run.scheduler
        if task.dropped_out:  # there is no message
            task = replace(task, message_id=f"lost/{index}/{member.tasks}")
        self._client_stats[index].tasks += 1
        due = scheduler.due(member, task.sent, self._run.timeout, lost=task.lost)
        self._task_table.open(task, due)
        # The task of a resumed run whose work was held back, and that is worked on again, ended when it first did.
        ended = due if due < scheduler.now() - RESOLUTION else None
        self._timeline.begin(index, task.sent, ended, timing=scheduler.timing(member.client))

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
            or run.scheduler.real_time
            or run.flower.train_metrics_aggr_fn is not None
            or len(run.buffers_at)
        ):
            return None
        return grid if grid.can_work(self._work_request(run.aggregations, self._sent)) else None

    # ---- Going on where an earlier run was ------------------------------------------------------------------

    def resume(self, *, more: bool) -> list[ClientState]:
        """Restore the tasks of an earlier run, and dispatch again those that were under way; return the free clients.

        ``more``: whether there are aggregations to come, so that free clients are sent the model.
        """
        run, task_table = self._run, self._task_table
        present = {client.index: client for client in run.clients}
        state = task_table.resume(present, run.aggregations)
        run.clock.resume(state["time"])  # waiting for the clients didn't count
        members = task_table.members
        for index in present.keys() & members.keys():
            self._watch(members[index])
        self._send_again(state, present)
        for due, index in state["retries"]:
            if index in present:
                task_table.queue.push(due, index, Retry(members[index]))
        if not more:
            return []
        resting = {index for _, index in state["retries"] if members[index].dropped}
        free = [m for index, m in members.items() if index in present and index not in resting]
        for member in free:
            task_table.ask_again(member)
        return free

    def _send_again(self, state: Mapping[str, Any], present: Collection[int]) -> None:
        """Dispatch the tasks of a state that were under way, to the clients that are present."""
        again: dict[int, dict[int, Dispatch]] = {}
        for task in restored_tasks(state):
            if task.client in present:
                dispatch = Dispatch(task.sent, task.extra_vectors, task.steps)
                again.setdefault(task.version, {})[task.client] = dispatch
        bases = restored_bases(state)
        for version, tasks in again.items():
            self._send(tasks, version, bases[version])
        self._run.take_bytes_beside()  # which were counted when the tasks were sent first
