"""The round loop of the synchronous strategies, and the hooks an algorithm fills in.

A round draws its participants, sends each the global model, waits for the trained models and puts them together:
w̄ ← server_rule(w̄, Σ d_i Δ_i), with Δ_i = w_i − w̄ and d_i the weight that makes the participation scheme unbiased
(papers/000_eaef941d18240f45.txt, algorithm 1; strategies/weights.py). The sum runs in the order of the clients, in
float64, so that a run doesn't depend on who answers first. A reply that is an error, missing, not finite or of
another shape or dtype is left out, named in the log and counted; its weight is shared over the others. A round with
no valid reply keeps the model.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from strategies import messages
from strategies.arrays import ArraysMismatchError, Layout, Vector
from strategies.client_graph import ClientGraph
from strategies.clock import RESOLUTION, Clock, VirtualClock, WallClock
from strategies.exchange import exchange, never
from strategies.graph import FLOOR
from strategies.roster import Client, Roster
from strategies.time_scenario import fixed_task_times
from strategies.weights import Participation, Weights, importances

log = logging.getLogger("flwr.strategies")

# Tag of the random stream that draws participants, beside the seed and the round.
_PARTICIPATION_STREAM = 1

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True)
class SynchronousConfig:
    """What every synchronous strategy can be told.

    Parameters
    ----------
    client_weights : str
        Importances p_i: ``samples``, ``uniform``, or ``adjacency``: how alike a client's data are to the others'.
    participation, fraction_train : str, float
        Who takes part in a round: see ``strategies.weights.Participation``.
    seed : int
        Fixes the draws of participants.
    eval_every : int
        Rounds between two evaluations; the first and the last model are always evaluated.
    client_evaluation : bool
        Evaluate on the clients too, weighted by p_i.
    time_budget : float
        Stop before the clock passes this time (seconds); 0: no limit.
    time_scenario : str
        In virtual time, how long a client's task takes; a round takes as long as its slowest participant.
    min_clients : int
        Clients to wait for before the first round.
    message_floor, neighbours : float, int
        Of the graph behind ``adjacency``: see ``strategies.client_graph.ClientGraph``.
    """

    client_weights: str = "samples"
    participation: str = "full"
    fraction_train: float = 1.0
    seed: int = 0
    eval_every: int = 1
    client_evaluation: bool = False
    time_budget: float = 0.0
    time_scenario: str = "F80"
    min_clients: int = 1
    message_floor: float = FLOOR
    neighbours: int = 0


@dataclass(frozen=True)
class Progress:
    """What an observer is told after the initial evaluation (aggregation 0) and after every aggregation."""

    aggregation: int
    time: float  # seconds of the run's clock
    arrays: ArrayRecord
    metrics: Mapping[str, float]
    evaluated: bool


Observer = Callable[[Progress], None]


@dataclass
class _Round:
    """A round under way: the model sent and, by client index, who got it and with which weight."""

    layout: Layout
    model: Vector
    clients: list[Client]
    weights: list[float]
    requests: list[Metadata]
    bytes_down: int
    failures: dict[int, str] = field(default_factory=dict)


class SynchronousStrategy(Strategy):
    """The loop that FedAvg, FedProx and the spectral method share; a Flower Strategy for any Flower app.

    Parameters
    ----------
    config : SynchronousConfig
        The algorithm's own frozen config.
    clock : Clock
        ``VirtualClock`` (default) or ``WallClock``.
    observer : callable
        Called with a ``Progress`` after every aggregation.
    stopped : callable
        Asked at every poll; True ends the run after the last complete round.
    """

    Config: ClassVar[type[SynchronousConfig]] = SynchronousConfig

    def __init__(
        self,
        config: SynchronousConfig | None = None,
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
        stopped: Callable[[], bool] = never,
    ) -> None:
        self.config = self._adapt(config or self.Config())
        self.participation = Participation.parse(self.config.participation, self.config.fraction_train)
        fixed_task_times(self.config.time_scenario, 1)  # checks the name
        if self.config.eval_every < 1:
            raise ValueError(f"eval-every = {self.config.eval_every}: must be 1 or more")
        self.clock = clock or VirtualClock()
        self.observer = observer
        self.stopped = stopped
        self.timeout = 3600.0
        self.roster = Roster(self.config.min_clients, self.timeout, stopped)
        self.graph: ClientGraph | None = None
        if self.config.client_weights == "adjacency":
            self.graph = ClientGraph(self.config.message_floor, self.config.neighbours)
        self.clients: list[Client] = []
        self._round: _Round | None = None

    # ---- What an algorithm fills in -------------------------------------------------------------------------

    def server_rule(self, model: Vector, update: Vector) -> Vector:
        """Return w̄_{t+1} from w̄_t and Σ d_i Δ_i, each of shape (D,)."""
        raise NotImplementedError

    def local_rule(self) -> dict[str, float]:
        """Return the message fields that tell clients the algorithm's local step."""
        return {}

    def companions(
        self, participants: Sequence[Client], layout: Layout, model: Vector
    ) -> Iterator[ArrayRecord]:
        """Yield a second model for each participant, sent beside w̄; by default none."""
        return iter(())

    def received(self, client: Client, local_model: Vector) -> None:
        """Take note of a valid local model (D,), before it is aggregated."""

    def _adapt(self, config: SynchronousConfig) -> SynchronousConfig:
        """Return the config with what the algorithm demands."""
        return config

    # ---- Flower's hooks -------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the participants of a round and build their requests, in the order of the clients."""
        self.clients = clients = self._take_part(grid, config)
        if not clients:  # stopped before they could answer
            return []
        rng = np.random.default_rng([self.config.seed, _PARTICIPATION_STREAM, server_round])
        draw = self._participation_among(clients).draw(self._importances(clients), rng)
        participants = [clients[position] for position in draw.clients]
        layout = Layout.of(arrays)
        model = layout.to_vector(arrays)
        companions = chain(self.companions(participants, layout, model), repeat(None))
        requests = [
            messages.request(
                messages.TRAIN,
                client.node_id,
                self._train_config(server_round, client, config),
                ttl=self.timeout,
                arrays=arrays,
                neighbours=companion,
            )
            for client, companion in zip(participants, companions, strict=False)
        ]
        self._round = _Round(
            layout=layout,
            model=model,
            clients=participants,
            weights=list(draw.weights),
            requests=[request.metadata for request in requests],
            bytes_down=sum(messages.num_bytes(r) for m in requests for r in m.content.array_records.values()),
        )
        return requests

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put the valid replies of the round together; None for the arrays if there is none."""
        current = self._round
        if current is None:
            raise RuntimeError("aggregate_train is called after configure_train")
        # Not by src_node_id: an error that the SuperLink reports carries its own.
        asked = {request.message_id: request.dst_node_id for request in current.requests}
        by_node = {asked.get(r.metadata.reply_to_message_id, 0): r for r in replies}
        weights = self._weights_of(current, by_node)
        total = np.zeros_like(current.model)
        kept, loss, loss_weight, bytes_up = 0.0, 0.0, 0.0, 0
        for client, weight in zip(current.clients, weights, strict=True):
            delta = self._local_model(current, client, by_node.get(client.node_id))
            if delta is None:
                continue
            self.received(client, delta)
            delta -= current.model
            reply = by_node[client.node_id]
            total += weight * delta
            kept += weight
            bytes_up += sum(messages.num_bytes(record) for record in reply.content.array_records.values())
            if isinstance(train_loss := messages.metrics_of(reply).get(messages.TRAIN_LOSS), float):
                loss += weight * train_loss
                loss_weight += weight
        metrics = MetricRecord(
            {
                messages.PARTICIPANTS: len(current.clients) - len(current.failures),
                messages.FAILURES: len(current.failures),
                messages.BYTES_DOWN: current.bytes_down,
                messages.BYTES_UP: bytes_up,
            }
        )
        self._log_failures(server_round, current)
        if loss_weight > 0:
            metrics[messages.TRAIN_LOSS] = loss / loss_weight
        if kept <= 0:
            log.warning("round %d: no valid reply, the model stays as it is", server_round)
            return None, metrics
        if current.failures:
            total *= sum(weights) / kept
        return current.layout.to_record(self.server_rule(current.model, total)), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client to evaluate the model, if ``client_evaluation`` says so."""
        if not self.config.client_evaluation:
            return []
        return [
            messages.request(
                messages.EVALUATE,
                client.node_id,
                ConfigRecord({**config, messages.SERVER_ROUND: server_round, messages.CLIENT: client.index}),
                ttl=self.timeout,
                arrays=arrays,
            )
            for client in self.clients
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics by p_i; ``loss`` becomes the federated objective f(w) = Σ p_i f_i(w)."""
        by_node = {r.metadata.src_node_id: r for r in replies if not r.has_error()}
        clients = [client for client in self.clients if client.node_id in by_node]
        if not clients:
            return None
        weights = self._importances(_sized(clients, by_node))
        sums: dict[str, float] = {}
        totals: dict[str, float] = {}
        for client, weight in zip(clients, weights.tolist(), strict=True):
            for key, value in messages.metrics_of(by_node[client.node_id]).items():
                if isinstance(value, int | float) and key != messages.NUM_EXAMPLES:
                    sums[key] = sums.get(key, 0.0) + weight * value
                    totals[key] = totals.get(key, 0.0) + weight
        return MetricRecord({key: sums[key] / totals[key] for key in sums if totals[key] > 0})

    def summary(self) -> None:
        """Log the strategy and its config."""
        log.info("%s: %s", type(self).__name__, self.config)

    # ---- The loop -------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run up to ``num_rounds`` rounds; see ``flwr.serverapp.strategy.Strategy.start``.

        Parameters
        ----------
        timeout : float
            Seconds that a round waits for its replies; also the time to live of its messages.

        Returns
        -------
        Result
            The final model (the initial one if no round succeeded) and the metrics by round.
        """
        self.timeout = self.roster.timeout = timeout
        self.summary()
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = train_config if evaluate_config is None else evaluate_config
        result = Result(arrays=initial_arrays)
        self._report(0, result, evaluate_fn, MetricRecord(), evaluate=True)
        metrics, unevaluated = MetricRecord(), 0
        for server_round in range(1, num_rounds + 1):
            requests = list(self.configure_train(server_round, result.arrays, train_config, grid))
            if self.stopped() or not self._fits_budget():
                break
            replies = exchange(grid, requests, timeout, self.stopped)
            if self.stopped():
                break  # a round that was cut off would count only its fast clients
            arrays, train_metrics = self.aggregate_train(server_round, list(replies.values()))
            result.arrays = arrays or result.arrays
            self.clock.wait_until(self.clock.now() + self._duration())
            metrics, unevaluated = train_metrics or MetricRecord(), server_round
            result.train_metrics_clientapp[server_round] = metrics
            if evaluate := server_round % self.config.eval_every == 0 or server_round == num_rounds:
                metrics = self._evaluate_on_clients(server_round, result, evaluate_config, grid, metrics)
                unevaluated = 0
            self._report(server_round, result, evaluate_fn, metrics, evaluate=evaluate)
        if unevaluated:  # stopped early, between two evaluations
            self._report(unevaluated, result, evaluate_fn, MetricRecord(), evaluate=True)
        return result

    def _evaluate_on_clients(
        self, server_round: int, result: Result, config: ConfigRecord, grid: Grid, metrics: MetricRecord
    ) -> MetricRecord:
        requests = list(self.configure_evaluate(server_round, result.arrays, config, grid))
        if not requests:
            return metrics
        replies = exchange(grid, requests, self.timeout, self.stopped)
        averages = self.aggregate_evaluate(server_round, list(replies.values()))
        if averages is None:
            return metrics
        result.evaluate_metrics_clientapp[server_round] = averages
        return MetricRecord({**metrics, **{f"client-{key}": value for key, value in averages.items()}})

    def _report(
        self,
        server_round: int,
        result: Result,
        evaluate_fn: EvaluateFn | None,
        metrics: MetricRecord,
        *,
        evaluate: bool,
    ) -> None:
        collected = dict(metrics)
        if evaluate and evaluate_fn and (evaluated := evaluate_fn(server_round, result.arrays)) is not None:
            result.evaluate_metrics_serverapp[server_round] = evaluated
            collected.update(evaluated)
        if self.observer:
            scalars = {key: value for key, value in collected.items() if isinstance(value, int | float)}
            self.observer(Progress(server_round, self.clock.now(), result.arrays, scalars, evaluate))

    # ---- Parts of a round -----------------------------------------------------------------------------------

    def _train_config(self, server_round: int, client: Client, config: ConfigRecord) -> ConfigRecord:
        fields = {
            messages.SERVER_ROUND: server_round,
            messages.CLIENT: client.index,
            messages.TASK: server_round,
            **self.local_rule(),
        }
        return ConfigRecord({**config, **fields})

    def _take_part(self, grid: Grid, config: ConfigRecord) -> list[Client]:
        """Look who is there; with a graph, who is in it."""
        clients = self.roster.refresh(grid, config)
        if self.graph is None or not clients:
            return clients
        return self.graph.refresh(grid, clients, config, self.timeout, self.stopped)

    def _importances(self, clients: list[Client]) -> Weights:
        if self.graph is not None:
            return self.graph.weights(clients)
        sizes = [client.num_examples for client in clients]
        if any(size is None for size in sizes):
            # Sizes come with the replies; until then all count the same (strategies/roster.py).
            return importances("uniform", [1] * len(clients))
        return importances(self.config.client_weights, [size or 0 for size in sizes])

    def _participation_among(self, clients: list[Client]) -> Participation:
        """Translate the client indices of scheme ``fixed`` to positions among those that are there."""
        if self.participation.scheme != "fixed":
            return self.participation
        positions = tuple(i for i, client in enumerate(clients) if client.index in self.participation.fixed)
        if missing := set(self.participation.fixed) - {client.index for client in clients}:
            log.warning("participation names clients that aren't there: %s", sorted(missing))
        if not positions:
            raise RuntimeError(
                f"participation = {self.config.participation!r}: none of these clients is there"
            )
        return replace(self.participation, fixed=positions)

    def _weights_of(self, current: _Round, replies: Mapping[int, Message]) -> list[float]:
        """Weights d_i of the participants; by the sizes in their replies where none were known before."""
        unknown = any(client.num_examples is None for client in current.clients)
        if (
            not unknown
            or self.config.client_weights != "samples"
            or self.participation.scheme in ("md", "paired")
        ):
            return current.weights
        sizes = [client.num_examples or 0 for client in _sized(current.clients, replies)]
        return [size / sum(sizes) for size in sizes] if any(sizes) else current.weights

    def _local_model(self, current: _Round, client: Client, reply: Message | None) -> Vector | None:
        """Return w_i of a valid reply; None, with the reason kept, of any other."""
        try:
            if reply is None:
                raise ArraysMismatchError("no reply before the deadline")
            if reply.has_error():
                raise ArraysMismatchError(messages.reason_of(reply))
            if messages.ARRAYS not in reply.content.array_records:
                raise ArraysMismatchError(f"its reply has no record {messages.ARRAYS!r}")
            return current.layout.to_vector(reply.content.array_records[messages.ARRAYS])
        except ArraysMismatchError as error:
            current.failures[client.index] = str(error)
            return None

    def _log_failures(self, server_round: int, current: _Round) -> None:
        """Name every client left out, in one line per reason."""
        nodes = {client.index: client.node_id for client in current.clients}
        for reason in dict.fromkeys(current.failures.values()):
            named = ", ".join(
                f"{index} (node {nodes[index]})" for index, r in current.failures.items() if r == reason
            )
            log.warning("round %d: left out client %s: %s", server_round, named, reason)

    def _duration(self) -> float:
        """Virtual seconds of the round under way; 0 on a wall clock, which passes by itself."""
        if isinstance(self.clock, WallClock) or self._round is None or not self._round.clients:
            return 0.0
        times = fixed_task_times(self.config.time_scenario, len(self.clients))
        position = {client.node_id: i for i, client in enumerate(self.clients)}
        return float(max(times[position[client.node_id]] for client in self._round.clients))

    def _fits_budget(self) -> bool:
        budget = self.config.time_budget
        return not budget or self.clock.now() + self._duration() <= budget + RESOLUTION


def _sized(clients: list[Client], replies: Mapping[int, Message]) -> list[Client]:
    """Fill in the number of examples, where the handshake didn't tell, from the clients' replies."""
    sized = []
    for client in clients:
        reply = replies.get(client.node_id)
        if client.num_examples is None and reply is not None and reply.has_content():
            number = messages.whole(messages.metrics_of(reply).get(messages.NUM_EXAMPLES))
            client = replace(client, num_examples=number)
        sized.append(client)
    return sized
