"""The requests to clients: the messages that ask them to train, and who has not answered yet."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from strategies.clients.roster import Client, index_by_node
from strategies.core.compressed_updates import CompressedUpdates
from strategies.core.config import PrivateConfig, StrategyConfig
from strategies.core.reply_timeouts import Limit, ReplyTimeouts
from strategies.core.run_state import RunState
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import never, poll_replies, pushed
from strategies.timing.task_costs import TaskCosts

_USUAL = "usual-times-"  # before the kind of a request, in a checkpoint
# Message types with an adaptive reply timeout.
_AWAITED = (messages.TRAIN, messages.EVALUATE, *messages.SECURE_STAGES)


class RequestHooks(Protocol):
    """What training requests ask of the method; see ``FederatedStrategy``."""

    def local_rule(self) -> dict[str, float]:
        """Return the fields that define the algorithm's local step."""

    def task_fields(self) -> Mapping[str, Any]:
        """Return further fields, on which local steps don't depend."""

    def extra_records(self, client: Client) -> Mapping[str, messages.RecordType]:
        """Return records for a client beside the model, by name."""


def check_local_noise(config: StrategyConfig, train_config: ConfigRecord) -> None:
    """Raise RunError for ``dp = 'local'`` if requests don't ask clients for the noise, which they alone add."""
    if isinstance(config, PrivateConfig) and config.dp == "local" and train_config.get("dp") != "local":
        raise RunError(
            "dp = 'local': clients add this noise, and their requests don't ask for it; allowed are central, or an "
            "app that adds it by train_config: dp = 'local', dp-clipping-norm, dp-noise-multiplier"
        )


class TrainingRequests:
    """The training requests of a run.

    Parameters
    ----------
    task_costs : TaskCosts
        The work and the bytes of clients' tasks.
    hooks : RequestHooks
        The method.
    compressed : CompressedUpdates, optional
        The compression that clients are asked for.
    keeps : sequence of str, optional
        Where clients are to keep their updates, to mask them later (``strategies.secure``): the names of the metrics
        that they keep, too.
    """

    def __init__(
        self,
        run: RunState,
        task_costs: TaskCosts,
        hooks: RequestHooks,
        compressed: CompressedUpdates | None = None,
        *,
        keeps: Sequence[str] | None = None,
    ) -> None:
        self._run, self._task_costs, self._hooks = run, task_costs, hooks
        self._compressed, self._keeps = compressed, keeps

    def note_model(self, arrays: ArrayRecord) -> None:
        """Note the bytes of the model in a request and in a reply."""
        size, compression = messages.num_bytes(arrays), self._run.model_compression
        self._task_costs.model = size if compression is None else compression.num_bytes
        self._task_costs.up = size if self._compressed is None else self._compressed.size(arrays)

    def fields(self, client: Client, server_round: int, task: int, config: ConfigRecord) -> ConfigRecord:
        """Return the fields of a client's request: a copy of the loop's ``config`` and the strategy's own fields."""
        sent = {messages.SERVER_ROUND: server_round, messages.CLIENT: client.index, messages.TASK: task}
        asked = {} if self._compressed is None else self._compressed.fields(self._run.run_id)
        own = config.copy()  # whose values are checked already
        own.update({**sent, **self._hooks.local_rule(), **asked, **self._hooks.task_fields()})
        return own

    def request(
        self, client: Client, fields: ConfigRecord, arrays: ArrayRecord, extra_vectors: Mapping[str, Vector]
    ) -> Message:
        """Return a client's request: the model's arrays, and vectors (D,) beside them by record name.

        A vector by the name of the model's own record is sent in its place.
        """
        run, key = self._run, self._run.flower.arrayrecord_key
        records = {
            name: run.to_send(vector)[0] if name == key else run.layout.to_record(vector)
            for name, vector in extra_vectors.items()
        }
        extra_records = {**self._hooks.extra_records(client), **records}
        if self._keeps is not None:
            own = ConfigRecord({"stage": messages.KEEP, "task": fields[messages.TASK]})
            own["arrays"] = self._run.flower.arrayrecord_key
            if self._keeps:
                own["metrics"] = list(self._keeps)
            extra_records[messages.SECURE] = own
        if extra_records:
            size = sum(map(messages.record_bytes, extra_records.values()))
            self._run.max_extra_bytes = max(self._run.max_extra_bytes, size)
        return messages.request(
            messages.TRAIN,
            client.node_id,
            fields,
            ttl=self._run.timeout,
            arrays=arrays,
            extra_records=extra_records,
            keys=self._run.flower.keys,
        )

    def note_sent(self, client: Client, request: Message, part: float = 1.0) -> None:
        """Note the load of a client's task, where task times follow from loads; ``part``: share of its usual work."""
        if self._run.scheduler.uses_device_profiles:
            self._task_costs.record(client.index, messages.total_bytes(request), part)


@dataclass(frozen=True)
class _Overdue:
    """A request for whose reply the round waited no longer; the reply's time enters the client's usual time."""

    client: int
    node_id: int
    sent: float
    reply_timeouts: ReplyTimeouts


class PendingReplies:
    """Sends requests, yields the replies, and knows which clients haven't answered yet.

    Parameters
    ----------
    gives_up : callable
        Returns True if a reply's timeout adapts to the clients' usual times (strategies/core/reply_timeouts.py); else
        it is the run's timeout. A client whose reply is overdue is busy until it comes, or until the run's timeout.
    """

    def __init__(self, run: RunState, gives_up: Callable[[], bool] = never) -> None:
        self._run, self._gives_up = run, gives_up
        self._asked: dict[int, int] = {}  # indices of the clients that haven't answered, by node id
        # By the kind of request.
        self._reply_timeouts: defaultdict[str, ReplyTimeouts] = defaultdict(ReplyTimeouts)
        self._overdue: dict[str, _Overdue] = {}  # by message id
        self._late_bytes = 0
        self.at_hand = (
            0  # number of replies that were pulled with the last one that was yielded, and follow it
        )

    def state(self) -> dict[str, Any]:
        """Return the clients' usual times; overdue replies of a run that ended don't come."""
        found = (
            reply_timeouts.state(f"{_USUAL}{kind}") for kind, reply_timeouts in self._reply_timeouts.items()
        )
        return {name: rows for each in found for name, rows in each.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the clients' usual times."""
        for kind in _AWAITED:
            if f"{_USUAL}{kind}" in state:
                self._reply_timeouts[kind] = ReplyTimeouts.restored(state, f"{_USUAL}{kind}")

    def busy_clients(self) -> list[int]:
        """Return the indices of the clients that haven't answered; safe to call from another thread."""
        return [*self._asked.copy().values(), *(each.client for each in self._overdue.copy().values())]

    def expect(self, clients: Mapping[int, int]) -> None:
        """Expect answers of these clients and of no others: indices by node id."""
        self._asked = dict(clients)

    def answered(self, node_id: int) -> int | None:
        """Note a node's answer; return its client's index, None if no answer of the node is expected."""
        return self._asked.pop(node_id, None)

    def free(self, grid: Grid, kind: str) -> list[Client]:
        """Return the connected clients that can be sent a request, ``messages.TRAIN`` or ``EVALUATE``.

        The others are at work on an overdue request, or rest because they missed several rounds in a row.
        """
        run, now = self._run, self._run.scheduler.now()
        for _, reply in next(poll_replies(grid, dict.fromkeys(self._overdue, 0), 0.0, run.should_stop), []):
            self._came_late(reply)
        nodes, overdue = {client.index: client.node_id for client in run.clients}, self._overdue
        self._overdue = {
            name: each
            for name, each in overdue.items()
            if now < each.sent + run.timeout and nodes.get(each.client, each.node_id) == each.node_id
        }
        busy = {each.client for each in self._overdue.values()}
        rests, number = self._reply_timeouts[kind].is_backing_off, run.aggregations
        return [c for c in run.clients if c.index not in busy and not rests(c.index, number)]

    def take_late_bytes(self) -> int:
        """Return the bytes of the overdue replies that have come since the last call."""
        size, self._late_bytes = self._late_bytes, 0
        return size

    def awaited(
        self,
        grid: Grid,
        requests: Iterable[Message],
        arrived: Callable[[int], None] = lambda index: None,
        overdue: dict[int, str] | None = None,
        kind: str = "",
    ) -> Iterator[Message]:
        """Push requests at once, and yield the replies as they come; ``arrived`` gets each client's index.

        Replies that are no longer awaited, by client index, and why are put into ``overdue``. ``kind`` is
        the kind of request by which the clients' usual times are known; by default its type.
        """
        requests = list(requests)
        nodes = {request.metadata.dst_node_id for request in requests}
        indices = index_by_node(self._run.clients)
        self.expect({node_id: index for node_id, index in indices.items() if node_id in nodes})
        kind = kind or (requests[0].metadata.message_type if requests else "")
        reply_timeouts = self._reply_timeouts[kind] if kind in _AWAITED and self._gives_up() else None
        overdue = {} if overdue is None else overdue
        return self._replies(grid, pushed(grid, requests), arrived, reply_timeouts, overdue)

    def _replies(
        self,
        grid: Grid,
        waiting: dict[str, int],
        arrived: Callable[[int], None],
        reply_timeouts: ReplyTimeouts | None,
        overdue: dict[int, str],
    ) -> Iterator[Message]:
        """Yield the replies until the rest isn't awaited any more; late replies of earlier rounds may come, too.

        ``reply_timeouts``: the clients' usual times; None: every reply is awaited until the run's timeout.
        """
        run, began, asked = self._run, self._run.scheduler.now(), dict(self._asked)
        sent, took = dict(waiting), dict[int, float]()  # what hasn't been answered, and when the rest was

        def missing() -> list[int]:
            return [asked[node] for node in sent.values() if node in asked]

        def limits() -> dict[int, Limit] | None:
            return None if reply_timeouts is None else reply_timeouts.limits(took, missing())

        def limit() -> float:
            known = limits()
            longest = inf if known is None else max((each.seconds for each in known.values()), default=inf)
            return min(longest, run.timeout)

        try:
            for poll in poll_replies(
                grid, {**dict.fromkeys(self._overdue, 0), **waiting}, limit, run.should_stop
            ):
                for place, (node_id, reply) in enumerate(poll, 1):
                    self.at_hand = len(poll) - place
                    if sent.pop(reply.metadata.reply_to_message_id, None) is None:
                        self._came_late(reply)
                        continue
                    if (index := self.answered(node_id)) is not None:
                        if reply_timeouts is not None and not reply.has_error():
                            took[index] = run.scheduler.now() - began
                            reply_timeouts.answered(index, took[index])
                        arrived(index)
                    yield reply
                if not sent:
                    break
            if reply_timeouts is not None and not run.should_stop():
                known = limits()
                reply_timeouts.charge(took, missing(), run.scheduler.now() - began)
                self._give_up(sent, began, reply_timeouts, known, overdue)
        finally:
            self.at_hand = 0
            self.expect({})

    def _give_up(
        self,
        sent: Mapping[str, int],
        began: float,
        reply_timeouts: ReplyTimeouts,
        limits: Mapping[int, Limit] | None,
        overdue: dict[int, str],
    ) -> None:
        """Note the requests, nodes by message id, whose replies aren't awaited any more."""
        seconds = self._run.scheduler.now() - began
        for name, node_id in sent.items():
            if (index := self._asked.get(node_id)) is None:
                continue
            reply_timeouts.missed(index, self._run.aggregations)
            if limits is None or limits[index].seconds >= self._run.timeout:
                continue  # the timeout is over, and with it the message's time to live
            self._overdue[name] = _Overdue(index, node_id, began, reply_timeouts)
            overdue[index] = f"no reply within {seconds:.3g} s: {limits[index].why}"

    def _came_late(self, reply: Message) -> None:
        """Add the time of an overdue reply to the usual time of its client."""
        task = self._overdue.pop(reply.metadata.reply_to_message_id)
        if not reply.has_error():
            task.reply_timeouts.answered(task.client, self._run.scheduler.now() - task.sent, late=True)
            self._late_bytes += messages.total_bytes(reply) if reply.has_content() else 0
