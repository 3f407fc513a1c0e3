"""What all strategies evaluate, and what they tell their observer."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from strategies import streams
from strategies.clients import fairness
from strategies.clients.accounts import Accounts
from strategies.clients.metrics import MetricsMean
from strategies.clients.roster import Client, Roster, sized_by_replies
from strategies.clients.weights import Weights, mean_and_spread
from strategies.clock import Clock
from strategies.core.memory import Memory
from strategies.core.progress import Observer, Progress
from strategies.core.wrapper import Wrapped
from strategies.flower import messages
from strategies.flower.arrays import Layout, Vector
from strategies.flower.exchange import arriving
from strategies.timing.scheduler import Pace

if TYPE_CHECKING:
    from strategies.core.config import FlowerOptions, StrategyConfig

log = logging.getLogger("flwr.strategies")

_NOT_LOGGED = (
    messages.BYTES_DOWN,
    messages.BYTES_UP,
    messages.BYTES_KEPT,
    messages.DEVICE_SECONDS,
    messages.WASTED_SECONDS,
)

_LEFT_OUT = "evaluation %d: left out of the means client %s: %s"
_LATE = "evaluation of aggregation %d: %d of %d haven't answered in time, it is without %s"

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Reporting(Strategy):
    """Evaluation on the clients and on the server; the observer."""

    config: "StrategyConfig"
    flower: "FlowerOptions"
    pace: Pace
    observer: Observer | None
    stopped: Callable[[], bool]
    clients: list[Client]
    roster: Roster
    memory: Memory
    #: What has become of each client's work.
    accounts: Accounts
    #: What is known of a wrapper around it.
    wrapped: Wrapped
    timeout: float
    has_rounds: ClassVar[bool]
    _layout: Layout
    _asked: dict[int, int]  # clients whose answer is waited for, by node id
    _evaluated: int
    _by_client: dict[str, fairness.ByClient]  # what clients told in an evaluation that isn't reported yet
    _watch: Clock
    _quiet_until: float

    @property
    def _counting(self) -> Sequence[Client]:
        """The clients that count now: those that are there."""
        return self.clients

    @abstractmethod
    def importance(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""

    @abstractmethod
    def shares_of_clients(self) -> dict[str, list[float]]:
        """Return what is known of each client, by index."""

    @abstractmethod
    def _importances(self, clients: Sequence[Client]) -> Weights: ...

    @abstractmethod
    def bytes_kept(self) -> int:
        """Return how much the method keeps of clients, such as a vector of each, in bytes."""

    @abstractmethod
    def _say_once(self, text: str, *values: object) -> None: ...

    #: Whether clients have models of their own, which they evaluate beside the global one.
    personal: ClassVar[bool] = False

    def evaluation_rule(self) -> dict[str, float]:
        """Return the message fields that tell clients what to evaluate beside the global model."""
        return {}

    def personal_model(self, client: Client) -> Vector | None:
        """Return the model (D,) that a client is to evaluate beside the global one; None if it keeps its own."""
        return None

    def _personal_record(self, client: Client) -> dict[str, messages.RecordType]:
        own = self.personal_model(client)
        return {} if own is None else {messages.PERSONAL_MODEL: self._layout.to_record(own)}

    def at_work(self) -> list[int]:
        """Return the clients, by index, that have been asked for something and haven't answered yet."""
        return list(self._asked.copy().values())

    def _awaited(
        self, grid: Grid, requests: Iterable[Message], arrived: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, Message]]:
        """Push requests and yield node ids and replies as they come; meanwhile the others are at work.

        ``arrived`` is told of each client, by index, whose reply is there.
        """
        requests = list(requests)
        nodes = {request.metadata.dst_node_id for request in requests}
        self._asked = {client.node_id: client.index for client in self.clients if client.node_id in nodes}
        return self._crossing_off(arriving(grid, requests, self.timeout, self.stopped), arrived)

    def _crossing_off(
        self, replies: Iterable[tuple[int, Message]], arrived: Callable[[int], None] | None
    ) -> Iterator[tuple[int, Message]]:
        try:
            for node_id, reply in replies:
                index = self._asked.pop(node_id, None)
                if arrived is not None and index is not None:
                    arrived(index)
                yield node_id, reply
        finally:
            self._asked = {}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate the model: ``fraction_evaluate`` of them, ``min_evaluate_nodes`` at least."""
        self.wrapped.ends(server_round)
        clients = self._evaluating()
        fraction, number = self.flower.fraction_evaluate, len(clients)
        if not fraction:
            return []
        size = min(max(int(fraction * number), self.flower.min_evaluate_nodes, 1), number)
        chosen: Iterable[int] = range(number)
        if size < number:
            rng = streams.generator(self.config.seed, "evaluators", server_round)
            chosen = sorted(rng.choice(number, size, replace=False).tolist())
        return [
            messages.request(
                messages.EVALUATE,
                client.node_id,
                ConfigRecord(
                    {
                        **config,
                        messages.SERVER_ROUND: server_round,
                        messages.CLIENT: client.index,
                        **self.evaluation_rule(),
                    }
                ),
                ttl=self.timeout,
                arrays=arrays,
                companions=self._personal_record(client),
                keys=self.flower.keys,
            )
            for client in (clients[place] for place in chosen)
        ]

    def _evaluating(self) -> list[Client]:
        """Return the clients that may be asked to evaluate a model."""
        return self.clients

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics by p_i; ``loss`` becomes the federated objective f(w) = Σ p_i f_i(w).

        A client that hasn't described itself counts by the number of examples in its reply.
        """
        replies = list(replies)
        by_node = {r.metadata.src_node_id: r for r in replies if not r.has_error()}
        self._say_failed(server_round, [r for r in replies if r.has_error()], everybody=not by_node)
        clients = [client for client in self.clients if client.node_id in by_node]
        if not clients:
            return None
        key = self.flower.weighted_by_key
        mean = MetricsMean(key, self.flower.evaluate_metrics_aggr_fn)
        if self.config.client_weights == "samples" and mean.function is None:
            clients = self._weighed(server_round, clients, by_node)
        weights = self._importances(clients)
        for client, weight in zip(clients, weights.tolist(), strict=True):
            mean.add(weight, by_node[client.node_id].content)
        return MetricRecord(dict(mean.result()))

    def _say_failed(self, server_round: int, replies: Sequence[Message], *, everybody: bool) -> None:
        """Name those that couldn't evaluate the model; where nobody can, as an app may have no handler, only once."""
        located = {client.node_id: client.located for client in self.clients}
        failed: dict[str, list[str]] = {}
        for reply in replies:  # the SuperLink's own, where a node is gone, don't say which
            client = located.get(reply.metadata.src_node_id, "that is gone")
            failed.setdefault(messages.reason_of(reply), []).append(client)
        if failed and everybody:
            self._say_once(
                "no client evaluates the model: %s (fraction_evaluate = 0 asks none)", next(iter(failed))
            )
            return
        for reason, clients in failed.items():
            log.warning(_LEFT_OUT, server_round, ", ".join(clients), reason)

    def _weighed(
        self, server_round: int, clients: Sequence[Client], by_node: Mapping[int, Message]
    ) -> list[Client]:
        """Return the clients with the sizes that they evaluated on; those that tell none are left out and named."""
        key = self.flower.weighted_by_key
        # Not as many as it trains on, which its replies to training have told.
        unsized = [c if c.described else replace(c, num_examples=None) for c in clients]
        sized = sized_by_replies(unsized, by_node, key)
        left_out = {c.located: _unweighed(by_node[c.node_id], key) for c in sized if c.num_examples is None}
        if len(left_out) == len(sized):
            return sized  # all count the same
        for reason in dict.fromkeys(left_out.values()):
            named = ", ".join(located for located, why in left_out.items() if why == reason)
            log.warning(_LEFT_OUT, server_round, named, reason)
        return [client for client in sized if client.num_examples is not None]

    def _evaluate_on_clients(
        self, aggregation: int, result: Result, config: ConfigRecord, grid: Grid, metrics: MetricRecord
    ) -> MetricRecord:
        requests = list(self.configure_evaluate(aggregation, result.arrays, config, grid))
        if not requests:
            return metrics
        replies = dict(self._awaited(grid, requests))
        if not self.stopped():
            self._say_missing(
                aggregation, {r.metadata.dst_node_id for r in requests} - replies.keys(), len(requests)
            )
        averages = self.aggregate_evaluate(aggregation, list(replies.values()))
        if averages is None:
            return metrics
        result.evaluate_metrics_clientapp[aggregation] = averages
        self._by_client = self._told_by(replies.values())
        return MetricRecord({**metrics, **{fairness.of_clients(key): each for key, each in averages.items()}})

    def _say_missing(self, aggregation: int, late: Collection[int], asked: int) -> None:
        """Name the nodes whose answer to an evaluation hasn't come in time."""
        if late:
            log.warning(_LATE, aggregation, len(late), asked, self.roster.named(late))

    def _told_by(self, replies: Iterable[Message]) -> dict[str, fairness.ByClient]:
        indices = {client.node_id: client.index for client in self.clients}
        return fairness.from_replies(replies, indices.get, self.flower.weighted_by_key)

    def _report(
        self,
        aggregation: int,
        result: Result,
        evaluate_fn: EvaluateFn | None,
        metrics: MetricRecord,
        *,
        evaluate: bool,
        clients: Mapping[str, list[float]] | None = None,
    ) -> None:
        collected: dict[str, Any] = {**metrics, **self.accounts.costs()}
        if kept := self.bytes_kept():
            collected[messages.BYTES_KEPT] = kept
        if evaluate:
            self._evaluated = aggregation
        if evaluate and evaluate_fn and (evaluated := evaluate_fn(aggregation, result.arrays)) is not None:
            result.evaluate_metrics_serverapp[aggregation] = evaluated
            collected.update(evaluated)
            if not self.has_rounds and isinstance(losses := collected.get(messages.CLIENT_LOSSES), list):
                collected.update(self._losses(losses))
            self._by_client |= fairness.from_evaluation(collected)
        if evaluate:
            if clients is None and aggregation and self.observer is not None:
                clients = self.shares_of_clients()
            clients, by_client = clients or {}, self._by_client
            self._by_client = {}
            for name, values in by_client.items():
                collected.update(fairness.spread(name, values.values()))
            size = max(map(len, clients.values()), default=0)
            if self.roster.devices:
                clients = {**self.accounts.columns(size), **clients}
            elif not self.pace.always:
                clients = {**clients, messages.LOST: self.accounts.column(messages.LOST, size)}
            if messages.JOULES in clients:
                collected[messages.JOULES] = sum(clients[messages.JOULES])
            clients = {**fairness.columns(by_client, size), **clients}
        scalars = {key: value for key, value in collected.items() if isinstance(value, int | float)}
        if self.observer is None:
            self._log_line(aggregation, scalars)
        else:
            now, names = self.pace.now(), self.roster.names
            self.observer(Progress(aggregation, now, result.arrays, scalars, evaluate, clients or {}, names))

    def _costs_of_clients(self, size: int) -> dict[str, list[float]]:
        """Return what each client's tasks took, by index: bytes, seconds, and energy where watts are known."""
        seconds = self.accounts.column("seconds", size)
        costs = {
            "bytes": self.accounts.column("bytes", size),
            messages.DEVICE_SECONDS: seconds,
            messages.WASTED_SECONDS: self.accounts.column("wasted", size),
        }
        if (watts := self.pace.watts(size)) is not None:
            costs[messages.JOULES] = [each * power for each, power in zip(seconds, watts, strict=True)]
        return costs

    def _log_line(self, aggregation: int, metrics: Mapping[str, float]) -> None:
        """Say how a run goes that nobody watches; one without rounds at most once a second."""
        now = self._watch.now()
        if self.has_rounds or now >= self._quiet_until:
            self._quiet_until = now + 1.0
            told = ", ".join(
                f"{name} {value:.4g}" for name, value in metrics.items() if name not in _NOT_LOGGED
            )
            log.info(
                "%s %d%s", "round" if self.has_rounds else "aggregation", aggregation, told and f": {told}"
            )

    def _losses(self, losses: object) -> dict[str, float]:
        """Federated loss Σ p_i f_i and its spread, from the f_i by client index, if the evaluation tells them."""
        if not isinstance(losses, list) or not self.clients:
            return {}
        return mean_and_spread("federated-loss", self.importance(), losses)


def _unweighed(reply: Message, key: str) -> str:
    """Return why a reply doesn't say how much it counts."""
    try:
        messages.weight_of(messages.metrics_of(reply), key)
    except ValueError as error:
        return str(error)
    return f"no metric {key!r}"
