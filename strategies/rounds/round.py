"""A round: its participants with their weights, its requests, and the outcomes of its replies."""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.serverapp import Grid
from numpy.typing import NDArray

from strategies.clients.client_metrics import MetricsMean
from strategies.clients.client_statistics import ACCEPTED, ClientStatistics, Timeline
from strategies.clients.roster import Client, by_reason, display_names
from strategies.clients.weights import rescale
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.timing.scheduler import Scheduler
from strategies.updates.aggregation import UpdateSum
from strategies.updates.buffers import BufferAverage
from strategies.updates.pipeline import Contribution

log = logging.getLogger("flwr.strategies")

# The participants of a round, and their weights d_i; None: by the sizes in their replies.
Chosen = tuple[Sequence[Client], Sequence[float] | None]


class Aggregate(NamedTuple):
    """What a round's participants made: their weights d_i, Σ d_i Δ_i or a robust rule's result, and the buffers."""

    weights: Sequence[float]
    total: UpdateSum
    buffers: BufferAverage


class Executor(Protocol):
    """Turns a round's participants into results, in place of messages to each."""

    def run(self, cohort: "Round", grid: Grid) -> Aggregate | None:
        """Have the participants train; return what they made, None if the round is cancelled."""


class EngineExecutor(Executor, Protocol):
    """Asks an engine for the sums of the participants' updates: ``strategies.rounds.summed``."""

    def supports(self, grid: Grid) -> bool:
        """Return True if a grid can add up, and no part of the strategy looks at single updates."""
        ...

    def ask(self, cohort: "Round", config: ConfigRecord, grid: Grid) -> bool:
        """Prepare the one request for all participants; return False if the grid can't add up their updates."""
        ...


class MaskedExecutor(Executor, Protocol):
    """Has the participants mask their updates, and takes their sum: ``strategies.rounds.secure_sums``."""

    def check(self, num_clients: int) -> None:
        """Raise ValueError if a round of this number of clients has no sum."""

    def check_grid(self, grid: Grid) -> None:
        """Raise RunError, before a client trains, where an engine or a part of this run needs single updates."""


GONE = "it went away before its task was done"


@dataclass
class Round:
    """The state of a round from its draw to its aggregation.

    Attributes
    ----------
    number : int
        The round's number, from 1.
    model : Vector
        The global model (D,), which the round moves.
    arrays : ArrayRecord
        The model as it is sent.
    sent : Vector
        The model (D,) that the participants have then: the global one, but for what compression changes.
    clients : list of Client
        The participants, by index.
    weights : sequence of float, optional
        The weights d_i of the participants; None: by the sizes in their replies.
    metrics : MetricsMean
        The clients' training metrics.
    each : float
        The weight of every participant, where the draw must stay secret (``Selection.hides``); 0: otherwise.
    requests : list of Metadata
        The metadata of the requests, in the order of the clients; empty where an engine is asked for the sum.
    request_bytes : dict of int to int
        The bytes of each client's request, by client index; empty where an engine is asked for the sum.
    extra_names : tuple of str
        The names of the records beside the model.
    bytes_down, bytes_up : int
        Bytes of all requests, and of the updates that count.
    contributions : list of Contribution
        The contributions, where a hook needs all of them at once.
    failures : dict of int to str
        The reason why a client's work doesn't count, by client index.
    late : list of int
        The indices of the clients that weren't done when the round closed early; they aren't in ``clients`` any more.
    exceeds_budget : bool
        Whether the round would end after the time budget.
    overdue : dict of int to str
        The reason why a client's reply isn't awaited any more before the timeout, by client index.
    outcomes : dict of int to str
        The outcome of each client's task, by client index: see strategies/clients/client_statistics.py.
    bounded : set of int
        The indices of the clients whose updates were shortened.
    sizes : dict of int to int
        The bytes of each client's update, by client index.
    by_mods : set of int
        The indices of the clients whose app refused by a mod.
    lost : set of int
        The indices of the clients that go away before their tasks are done.
    weight_by_client : dict of int to float
        The weights d_i by which clients count, by index.
    bases : dict of int to array (D,)
        The model that a client was sent, where it isn't that of the others, by client index.
    outside : int
        The number of clients with values beyond the range of a secure sum, whose indices aren't known.
    asked : sequence of Message
        The requests, as ``configure_train`` made them, until they are sent.
    replies : dict of str to Message
        The replies that a user-defined ``aggregate_train`` is given, by the id of the request; it may leave some out.
    executor : Executor, optional
        What the participants work through; None: messages to each, and their replies.
    """

    number: int
    model: Vector
    arrays: ArrayRecord
    sent: Vector
    clients: list[Client]
    weights: Sequence[float] | None
    metrics: MetricsMean
    each: float = 0.0
    requests: list[Metadata] = field(default_factory=list)
    request_bytes: dict[int, int] = field(default_factory=dict)
    extra_names: tuple[str, ...] = ()
    bytes_down: int = 0
    contributions: list[Contribution] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)
    exceeds_budget: bool = False
    overdue: dict[int, str] = field(default_factory=dict)
    bytes_up: int = 0
    outcomes: dict[int, str] = field(default_factory=dict)
    bounded: set[int] = field(default_factory=set)
    sizes: dict[int, int] = field(default_factory=dict)
    by_mods: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    weight_by_client: dict[int, float] = field(default_factory=dict)
    bases: dict[int, NDArray[Any]] = field(default_factory=dict)
    outside: int = 0
    asked: Sequence[Message] = ()
    replies: dict[str, Message] = field(default_factory=dict)
    executor: Executor | None = None

    def request_of(self) -> dict[int, Metadata]:
        """Return the metadata of the requests, by client index."""
        return {client.index: request for client, request in zip(self.clients, self.requests, strict=True)}

    def base_of(self, client: Client) -> NDArray[Any]:
        """Return the model (D,) that a client was sent."""
        return self.bases.get(client.index, self.sent)

    def begin(self, requests: Iterable[Message], timeline: Timeline, scheduler: Scheduler) -> None:
        """Note the requests that are really sent, which a user-defined hook may change, and that tasks begin."""
        requests = list(requests)
        by_node = {request.metadata.dst_node_id: request.metadata for request in requests}
        if any(client.node_id not in by_node for client in self.clients):
            self._ask_only(by_node.keys(), requests)
        self.requests = [by_node[client.node_id] for client in self.clients]
        self.begin_tasks(timeline, scheduler)

    def _ask_only(self, nodes: Collection[int], requests: Sequence[Message]) -> None:
        """Take out the clients that a user-defined hook doesn't ask; the others share their weights."""
        places = [place for place, client in enumerate(self.clients) if client.node_id in nodes]
        if self.weights is not None:
            self.weights = rescale([self.weights[place] for place in places], sum(self.weights))
        self.clients = [self.clients[place] for place in places]
        self.requests = [self.requests[place] for place in places]
        self.bytes_down = sum(messages.total_bytes(request) for request in requests)

    def begin_tasks(self, timeline: Timeline, scheduler: Scheduler) -> None:
        """Note that tasks begin, and which clients are known to go away before their tasks are done."""
        clients = self.clients
        ends = scheduler.predicted_ends(clients, self.number)
        timings = map(scheduler.timing, clients) if scheduler.uses_device_profiles else repeat(None)
        timeline.begin_all([client.index for client in clients], scheduler.now(), ends, timings)
        self.lost |= {client.index for client in scheduler.losing(clients, self.number)}

    def to_work_on(self, requests: Sequence[Message]) -> list[Message]:
        """Return the requests without those of lost tasks, on which no client needs to work."""
        dropped_out = {client.node_id for client in self.clients if client.index in self.lost}
        return [request for request in requests if request.metadata.dst_node_id not in dropped_out]

    def accept_reply(self, client: Client, weight: float, reply: Message, *, bounded: bool) -> None:
        """Note that a client's work counts, and its metrics."""
        self.count(client.index, messages.total_bytes(reply), bounded=bounded)
        self.metrics.add(weight, reply.content)

    def count(self, index: int, num_bytes: int, *, bounded: bool) -> None:
        """Note that the work of a client, given by index, counts."""
        self.outcomes[index] = ACCEPTED
        if bounded:
            self.bounded.add(index)
        self.sizes[index] = num_bytes
        self.bytes_up += num_bytes

    def count_all(self, indices: Sequence[int], num_bytes: int, bounded: Iterable[int]) -> None:
        """Note that the work of some clients counts, ``num_bytes`` each; the updates of some were shortened."""
        self.outcomes.update(dict.fromkeys(indices, ACCEPTED))
        self.sizes.update(dict.fromkeys(indices, num_bytes))
        self.bytes_up += num_bytes * len(indices)
        self.bounded.update(bounded)

    def client(self, index: int) -> Client:
        """Return a participant by its client index."""
        return self._by_index[index]

    @cached_property
    def _by_index(self) -> dict[int, Client]:
        return {client.index: client for client in self.clients}

    def reject(
        self, client: Client, reason: str, reply: Message | None = None, outcome: str | None = None
    ) -> None:
        """Note why a client's work doesn't count, and its outcome: by default the fault that its reply shows."""
        lost = client.index in self.lost
        self.failures[client.index] = GONE if lost else self.overdue.get(client.index, reason)
        self.outcomes[client.index] = messages.LOST if lost else outcome or messages.fault_of(reply)
        if reply is not None and messages.refused_by_mod(reply):
            self.by_mods.add(client.index)

    def round_metrics(self, *, clipped: bool) -> MetricRecord:
        """Return the round's metrics; with ``clipped``, also the number of clipped updates."""
        metrics = MetricRecord(
            {
                messages.PARTICIPANTS: len(self.clients) - len(self.failures),
                messages.FAILURES: len(self.failures),
                messages.BYTES_DOWN: self.bytes_down,
                messages.BYTES_UP: self.bytes_up,
            }
        )
        if clipped:
            metrics[messages.CLIPPED] = len(self.bounded) + self.outside
        gone = {index for index, outcome in self.outcomes.items() if outcome == messages.LOST}
        if lost := len(self.lost | gone):
            metrics[messages.LOST_TASKS] = lost
        return metrics

    def record_weights(self, client_stats: ClientStatistics) -> None:
        """Enter the clients' weights in client_stats; weights of work that doesn't count are shared over the rest."""
        weight_by_client = self.weight_by_client
        counted = [
            index
            for index, outcome in self.outcomes.items()
            if outcome == ACCEPTED and index in weight_by_client
        ]
        weights = rescale([weight_by_client[index] for index in counted], sum(weight_by_client.values()))
        for index, weight in zip(counted, weights, strict=True):
            client_stats[index].weight += weight

    def record_outcomes(self, client_stats: ClientStatistics, timeline: Timeline, now: float) -> None:
        """Enter the outcomes in client_stats, and log the clients whose work doesn't count, one line per reason."""
        indices = [client.index for client in self.clients if client.index in self.outcomes]
        ended = {index: self.outcomes[index] for index in indices} | dict.fromkeys(self.late, messages.LATE)
        for index, outcome in ended.items():
            account = client_stats[index]
            account.tasks += 1
            account.record(outcome, clipped=index in self.bounded, num_bytes=self.sizes.get(index, 0))
        timeline.end_all(ended.keys(), now, ended.values())
        for reason, clients in by_reason(self.clients, self.failures).items():
            who = {"aggregation": self.number, "clients": [client.fields for client in clients]}
            left_out = display_names(clients)
            log.warning("round %d: left out client %s: %s", self.number, left_out, reason, extra=who)
