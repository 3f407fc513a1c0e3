"""A region: it answers the server above it as one client, with what its devices made in rounds of its own.

L. Liu, J. Zhang, S. H. Song and K. B. Letaief, "Client-edge-cloud hierarchical federated learning", ICC 2020
(HierFAVG). A region r with devices i ∈ r and D_r = Σ_{i∈r} p_i gets the model w̄ and makes κ₂ edge aggregations,

    w_r ← w_r + Σ_{i∈r} (p_i / D_r) Δ_i        κ₂ times, from w_r = w̄, with Δ_i = w_i − w_r,

and answers with w_r and D_r, so that the server above moves its model by Σ_r D_r (w_r − w̄). With κ₂ = 1 this is
Σ_i p_i Δ_i, the sum of the same devices without regions. The clients of a region may be relays again, of smaller
regions: a tree of any depth.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from strategies.clients.roster import Client
from strategies.core.run_state import RunOptions
from strategies.flower import messages
from strategies.flower.errors import RunError
from strategies.flower.internals import APP_RAISED
from strategies.rounds.strategy import SynchronousStrategy

# Fields of a request that are about the region, and not about its devices.
_OF_THE_REGION = (
    messages.SERVER_ROUND,
    messages.CLIENT,
    messages.TASK,
    messages.UNDER_WAY,
    messages.EDGE_ROUNDS,
    messages.WEIGHTS,
)
# Fields of a request, beside those of the app, that mean the same for every device of a region.
_FOR_ALL = (*_OF_THE_REGION, messages.FROZEN, messages.TRAVELS, messages.MODEL)

_NOWHERE: Mapping[str, Any] = {}


class EdgeRounds(SynchronousStrategy):
    """FedAvg among the devices of a region, from whatever model the server above sends, with its local rule."""

    rule: Mapping[str, float] = {}

    def __init__(self, run_options: RunOptions, **options: Any) -> None:
        super().__init__(**options)
        self.run_options = run_options
        self.renew()

    def renew(self) -> None:
        """Prepare for another run of the server above."""
        self._prepare_session()

    def local_rule(self) -> dict[str, float]:
        """Return the local rule of the server above."""
        return dict(self.rule)

    def summary(self) -> None:
        """Log nothing: the server above has said what the run is."""

    def train(self, arrays: ArrayRecord, first: int, number: int) -> tuple[ArrayRecord | None, MetricRecord]:
        """Make ``number`` rounds from a model, the first of which has the number ``first``.

        Returns
        -------
        tuple
            The last round's model, None if no device's work counted in any round, and the last round's metrics.
        """
        session, made, metrics = self.session, None, MetricRecord()
        session.run.result.arrays = arrays
        for edge_round in range(first, first + number):
            cohort = self._ask(session, edge_round)
            if cohort is None:
                break
            moved, found = self._train(session, cohort)
            if session.is_cancelled(cohort):
                break
            session.finish_round(cohort, moved, found)
            made, metrics = made if moved is None else moved, found or metrics
        session.run.result.train_metrics_clientapp.clear()
        session.timeline.take()  # nobody else does
        return made, metrics


class Relay:
    """A region, as a client of the server above it: a run of its own, over the Grid of its own devices.

    Call it with a message of the server above and the node config of the region's own SuperNode, and it returns the
    reply. It answers ``query.describe``, ``train`` and ``evaluate``. The run stays open from message to message.

    Parameters
    ----------
    grid : Grid
        The devices of the region.
    edge_rounds : int
        κ₂, rounds in the region for each training message that doesn't say their number (``messages.EDGE_ROUNDS``).
    timeout : float
        Real seconds to wait for a device's reply.
    of_relays : int
        0: the region's clients are devices. Else they are relays, and make so many rounds for each of this region's.
    run_options : RunOptions, optional
        What is given to the region's run, such as ``should_stop``.
    options
        Fields of ``strategies.SynchronousConfig``, and keywords of Flower's strategies, of the region's rounds.
        Messages may say other ``client_weights`` (``messages.WEIGHTS``).

    Raises
    ------
    ValueError
        If ``edge_rounds`` is less than 1, or another value isn't allowed.
    """

    def __init__(
        self,
        grid: Grid,
        edge_rounds: int = 1,
        timeout: float = 3600.0,
        of_relays: int = 0,
        run_options: RunOptions | None = None,
        **options: Any,
    ) -> None:
        if edge_rounds < 1:
            raise ValueError(f"edge_rounds = {edge_rounds}: must be 1 or more")
        self.strategy = EdgeRounds(run_options or RunOptions(), **{"describe": True, **options})
        self._grid, self._edge_rounds, self._timeout = grid, edge_rounds, timeout
        self._of_relays, self._weights = of_relays, self.strategy.config.client_weights
        self._opened = ExitStack()
        # The id of the run of the server above, and the weights of devices there.
        self._run: tuple[int, str] | None = None

    def close(self) -> None:
        """End the region's run."""
        self._opened.close()

    def __call__(self, message: Message, node_config: Mapping[str, Any] = _NOWHERE) -> Message:
        """Return the reply to a message of the server above; an error reply if no device's work counts."""
        kinds: dict[str, Callable[[Message], RecordDict]] = {
            messages.TRAIN: self._train,
            messages.EVALUATE: self._evaluate,
            messages.DESCRIBE: partial(self._describe, node_config=node_config),
        }
        answer = kinds.get(message.metadata.message_type)
        self._follow_run(message)
        try:
            if answer is None:
                raise RunError(f"a region answers {', '.join(kinds)}, not {message.metadata.message_type}")
            content = answer(message)
        except RunError as error:
            return Message(Error(APP_RAISED, str(error)), reply_to=message)
        except BaseException:  # broken off anywhere: what the session knows may be half of a round
            self._renew()
            raise
        return Message(content, reply_to=message)

    def _follow_run(self, message: Message) -> None:
        """Begin anew with another run of the server above, with the weights of devices that it asks for."""
        strategy = self.strategy
        config: Any = message.content.get(self._keys[1], {}) if message.has_content() else {}
        self._weights = config.get(messages.WEIGHTS, self._weights)
        # Relays say how much their devices count together, whatever a device counts.
        weights: Any = "samples" if self._of_relays else self._weights
        run, differ = (message.metadata.run_id, self._weights), weights != strategy.config.client_weights
        if differ:
            strategy.config = replace(strategy.config, client_weights=weights)
        if differ or self._run not in (None, run):
            self._renew()
        self._run = run

    def _renew(self) -> None:
        """End the region's run, and prepare for another."""
        self.close()
        self.strategy.renew()

    def size(self, config: ConfigRecord) -> float:
        """Return how much the region counts: the examples of its devices, or their number with equal weights.

        Raises
        ------
        RunError
            If a device doesn't say its number of examples in its answer to ``query.describe``.
        """
        session = self.strategy.session
        session.run.clients = session.population.refresh(self._grid, config)
        return self._weight(session.run.clients)

    def _weight(self, clients: Sequence[Client]) -> float:
        if self.strategy.config.client_weights == "uniform":
            return float(len(clients))
        sizes = [client.num_examples for client in clients]
        if None in sizes:
            raise RunError(
                "a region counts by the examples of its devices, and not all answer query.describe with "
                "num-examples; allowed is client_weights = uniform"
            )
        return float(sum(size for size in sizes if size is not None))

    # ---- What it answers ---------------------------------------------------------------------------------------

    def _describe(self, message: Message, node_config: Mapping[str, Any]) -> RecordDict:
        keys = messages.PARTITION_ID, messages.NUM_PARTITIONS
        own = {key: node_config[key] for key in keys if key in node_config}
        own[messages.NUM_EXAMPLES] = self.size(self._clients_config(self._config(message)))
        return RecordDict({messages.METRICS: MetricRecord(own)})

    def _train(self, message: Message) -> RecordDict:
        strategy, arrays, config = self.strategy, self._model(message), self._config(message)
        check_request(message, self._keys)
        strategy.rule = {name: float(config[name]) for name in (messages.ALPHA,) if name in config}
        self._open(arrays, config)
        strategy.session.upper_round = int(config[messages.SERVER_ROUND])
        number = int(config.get(messages.EDGE_ROUNDS, self._edge_rounds))
        first = (int(config[messages.TASK]) - 1) * number + 1
        made, metrics = strategy.train(arrays, first, number)
        if made is None:
            raise RunError(f"no device's work counts in the region: {strategy.session.run.last_failure}")
        own = {name: value for name, value in metrics.items() if not messages.is_ours(name)}
        own[messages.NUM_EXAMPLES] = self._weight(strategy.session.clients)
        content = RecordDict({self._keys[0]: made, messages.METRICS: MetricRecord(own)})
        if strategy.rule:  # the region's run has warned if its devices don't say so
            content[messages.APPLIED] = ConfigRecord(dict(strategy.rule))
        return content

    def _evaluate(self, message: Message) -> RecordDict:
        strategy, arrays, config = self.strategy, self._model(message), self._config(message)
        session, key = strategy.session, strategy.flower_options.weighted_by_key
        self._open(arrays, config)
        session.run.clients = session.population.refresh(self._grid, session.train_config)
        number = int(config[messages.SERVER_ROUND])
        requests = list(strategy.configure_evaluate(number, arrays, session.train_config, session.grid))
        replies = [each for each in session.pending.awaited(session.grid, requests) if not each.has_error()]
        means = session.evaluator.mean(number, replies)
        if means is None:
            raise RunError("no device of the region evaluates the model")
        sizes = [messages.metrics_of(reply).get(key, 0) for reply in replies]
        uniform = strategy.config.client_weights == "uniform"
        own = {**means, key: float(len(replies)) if uniform else float(sum(map(float, sizes)))}  # type: ignore[arg-type]
        return RecordDict({messages.METRICS: MetricRecord(own)})

    # ---- Messages and the run ----------------------------------------------------------------------------------

    @property
    def _keys(self) -> tuple[str, str]:
        return self.strategy.flower_options.keys

    def _config(self, message: Message) -> Any:
        """Return a message's fields, a ConfigRecord, whose values have the types of the protocol."""
        return message.content[self._keys[1]]

    def _model(self, message: Message) -> ArrayRecord:
        arrays = messages.arrays_of(message, self._keys[0])
        assert arrays is not None
        return arrays

    def _open(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Open the region's run at the first message, and let its devices be sent this message's config."""
        session, below = self.strategy.session, self._clients_config(config)
        if not session.is_open:
            opened = session.opened(self._grid, arrays, self._timeout, below, None, None)
            self._opened.enter_context(opened)
            session.begin_model(0)
            if session.masked_sums is not None:
                session.masked_sums.check_grid(session.grid)
            session.run.scheduler.begin()
        session.train_config = session.evaluate_config = below

    def _clients_config(self, config: ConfigRecord) -> ConfigRecord:
        """Return the config for the region's clients of a message's."""
        own = {messages.EDGE_ROUNDS: self._of_relays, messages.WEIGHTS: self._weights}
        given = {name: value for name, value in config.items() if name not in _OF_THE_REGION}
        return ConfigRecord({**given, **(own if self._of_relays else {})})


def check_request(message: Message, keys: tuple[str, str] = (messages.ARRAYS, messages.CONFIG)) -> None:
    """Raise RunError if a training request asks for what single devices alone can do."""
    config = message.content[keys[1]]
    assert isinstance(config, ConfigRecord)
    asked = [name for name in config if name.startswith("strategies.") and name not in _FOR_ALL]
    if asked := [*asked, *(name for name in message.content if name not in keys)]:
        raise RunError(
            f"tiers: the method sends {', '.join(asked)} to single devices, and its clients are regions; allowed are "
            "methods that send a model alone, such as FedAvg, FedProx, FedFix, FedBuff"
        )
