"""A run of a strategy: its parts, its grid, its configs, its checkpoint, and what is reported of it.

A strategy is a method with its settings; a session is one run of it. Each ``start`` has a session of its own, so that
nothing of a run is left in the next one. A subclass of each loop adds the parts that only that loop has.
"""

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies.clients.attendance import log_never_counted
from strategies.clients.by_index import ByIndex
from strategies.clients.client_graph import ClientGraph, DirectionGraph
from strategies.clients.client_statistics import ClientStatistics, Timeline
from strategies.clients.registered import NodeRecord, Registry
from strategies.clients.roster import Client, Roster
from strategies.clock import Clock
from strategies.core.capabilities import fills_in
from strategies.core.client_vectors import ClientVectors
from strategies.core.compressed_updates import CompressedUpdates
from strategies.core.config import AsynchronousConfig, SecureConfig, StrategyConfig
from strategies.core.evaluator import Evaluator
from strategies.core.last_updates import LastUpdates, UpdateGraph
from strategies.core.population import AbsentClients, Population
from strategies.core.receiver import Receiver, clipping
from strategies.core.reporter import EvaluateFn, Reporter, StopFn
from strategies.core.requests import PendingReplies, TrainingRequests, check_local_noise
from strategies.core.run_state import Memory, RunState, State
from strategies.core.server_step import ServerStep
from strategies.core.stability import StabilityMonitor, keys_that_help
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.flower.grids import DEPLOYMENT, MEMORY, engine_of
from strategies.flower.packing import packing
from strategies.timing.scheduler import Scheduler
from strategies.timing.task_costs import TaskCosts
from strategies.timing.virtual_scheduler import make_scheduler
from strategies.updates.clipping import AdaptiveClip
from strategies.updates.compressors import NONE
from strategies.updates.safeguards import Bounds, Safeguards
from strategies.updates.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr.strategies")


class Session:
    """One run of a strategy.

    Parameters
    ----------
    strategy : FederatedStrategy
        The method, whose hooks the run calls. (Its module imports this one, so that no type names it.)

    Attributes
    ----------
    run : RunState
        The model, the clients that are connected, and the number of aggregations.
    client_stats : ClientStatistics
        The outcomes, the seconds and the bytes of each client's tasks.
    timeline : Timeline
        The beginning and end of each client's tasks, until an observer takes them.
    safeguards : Safeguards
        The bounds on the influence of one client on the model.
    population : Population
        The clients that count, and their importances p_i.
    pending : PendingReplies
        The clients that have a request and haven't answered yet.
    requests, receiver : TrainingRequests, Receiver
        The messages to clients, and how a reply becomes a contribution.
    server_step : ServerStep
        The server optimizer's step.
    evaluator, reporter : Evaluator, Reporter
        The evaluation on clients, and what a run reports.
    compressed : CompressedUpdates, optional
        The server's side of compression, where clients compress their updates.
    optimizer_memory : mapping
        The memory of an earlier run's server optimizer, with which this run begins; empty: without any.
    goes_on : bool
        Whether the run goes on from the end of the strategy object's last run.
    total : int
        The number of aggregations at which the run ends, those of earlier runs that it goes on from included.
    returned : dict of str to Array, optional
        The arrays that ``start`` has returned; None until it has.
    stop_after : callable, optional
        Called with the number of each aggregation but the initial model's, and the result so far; True ends the run.
    is_open : bool
        Whether the strategy's own ``start`` is under way.
    used : bool
        Whether a run has begun: the next run of the strategy has another session.
    restored : bool
        Whether the run goes on from the state of an earlier run.
    """

    grid: Grid
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None
    initial_arrays: ArrayRecord

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.is_open = self.used = self.restored = self.goes_on = False
        self.total = 0
        self.returned: dict[str, Array] | None = None
        self.optimizer_memory: Mapping[str, Any] = {}
        self.stop_after: StopFn | None = None
        config, options, able = strategy.config, strategy.run_options, strategy.capabilities
        flower, name, task_costs = strategy.flower_options, type(strategy).__name__, TaskCosts()
        self.run = run = RunState(name, config, flower, partial(_scheduler, config, task_costs), options)
        self.client_stats = ClientStatistics()
        self.timeline = Timeline(self.client_stats.add_task_time)
        # A bound that the config gives, or differential privacy, takes the place of the usual norm.
        clip = clipping(config)
        secure = config if isinstance(config, SecureConfig) and config.secure_sums else None
        # Norm bounds need unmasked updates.
        usual_norm = not config.update_norm_bound and clip is None and secure is None
        bounds = Bounds(
            config.size_ratio_bound,
            config.examples_bound,
            config.norm_ratio_bound if usual_norm else 0.0,
            config.norm_ratio_bound,
            config.arrival_weight_bound if isinstance(config, AsynchronousConfig) else 0.0,
        )
        self.safeguards = Safeguards(config.safeguards, bounds, run.in_real_time)
        roster = Roster(
            config.min_clients,
            run.timeout,
            run.should_stop,
            (flower.weighted_by_key, flower.configrecord_key),
            flower.min_available_nodes,
            Registry(NodeRecord(config.registered_nodes), config.participation, run.client_names),
            partial(
                _rests_on_descriptions,
                run,
                has_rounds=able.has_rounds,
                draws=fills_in(type(strategy), "select"),
            ),
        )
        graph, updates = _graph(config, run)
        counts_absent = able.corrects_participation and graph is None
        absent = AbsentClients(run, self.client_stats) if counts_absent else None
        self.population = Population(run, roster, self.safeguards, config.client_weights, graph, absent)
        self.pending = PendingReplies(run, self._awaits_by_usual_times)
        compresses = config.compression != NONE
        compressed = CompressedUpdates(config.compression, config.seed, run) if compresses else None
        self.compressed = compressed
        if compressed is not None:
            self.population.listeners.append(compressed.hand_back)
        self.population.listeners.append(strategy.clients_present)
        self.requests = TrainingRequests(
            run,
            task_costs,
            strategy,
            compressed,
            keeps=None if secure is None or able.has_rounds else secure.summed_metrics,
        )
        self.receiver = Receiver(
            run, self.safeguards, strategy, clip=clip, compressed=compressed, updates=updates
        )
        self.server_step = ServerStep(
            run,
            config.new_optimizer(),
            config.server_lr,
            strategy.default_server_lr,
            stale=not able.has_rounds,
        )
        stability = StabilityMonitor(partial(keys_that_help, config, has_rounds=able.has_rounds))
        self.evaluator = Evaluator(
            run, self.population, self.pending, config.seed, strategy.evaluation_rule, strategy.personal_model
        )
        unit = "round" if able.has_rounds else "aggregation"
        self.reporter = Reporter(
            run, self.client_stats, roster, unit, self.client_state_bytes, self.model_bytes, stability
        )
        self._of_method: Sequence[Any] = ()

    # ---- What a method, or whoever watches a run, asks ---------------------------------------------------------

    @property
    def model(self) -> Vector:
        """The global model (D,) that the next aggregation moves; don't write to it."""
        return self.run.model

    @property
    def clients(self) -> ByIndex[Client]:
        """The connected clients, by index."""
        return self.run.clients

    @property
    def aggregations(self) -> int:
        """The number of aggregations so far."""
        return self.run.aggregations

    @property
    def memory(self) -> Memory:
        """The method's memory: saved and restored with the run, empty when a run begins."""
        return self.run.memory

    @property
    def scheduler(self) -> Scheduler:
        """The run's scheduler."""
        return self.run.scheduler

    @property
    def clock(self) -> Clock:
        """The run's clock; another one may be given before the run."""
        return self.run.scheduler.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self.run.use_clock(clock)

    @property
    def optimizer(self) -> ServerOptimizer:
        """The server optimizer."""
        return self.server_step.optimizer

    @property
    def graph(self) -> ClientGraph | None:
        """The graph of clients, where importances follow from it."""
        return self.population.graph

    def client_vectors(self, name: str, initial: Vector | None = None) -> ClientVectors:
        """Return the method's vectors (D,) of the clients under a name; a new vector is 0, or ``initial``."""
        known = self.memory.client_vectors
        if name not in known:
            first = np.zeros(len(self.model)) if initial is None else initial
            known[name] = ClientVectors(first, max(len(self.clients), 1))
        return known[name]

    def client_weights(self) -> dict[int, float]:
        """Return the importances p_i of the clients that count now, by index."""
        return self.population.client_weights()

    def objective_weights(self) -> dict[int, float]:
        """Return the weights in the objective of the clients that count now, by index: p_i, or those of a scheme."""
        return self.client_weights()

    @abstractmethod
    def client_columns(self) -> dict[str, list[float]]:
        """Return lists by client index: how often each client counted, its expected weight, and its weight so far."""

    def busy_clients(self) -> list[int]:
        """Return the clients, by index, that have been asked for something and haven't answered yet."""
        return self.pending.busy_clients()

    def client_state_bytes(self) -> int:
        """Return the bytes of the clients' vectors that the run keeps, in memory or in a file."""
        known = 0 if self.graph is None else self.graph.num_bytes
        own = sum(getattr(part, "num_bytes", 0) for part in self._of_method)
        return known + own + sum(vectors.matrix.nbytes for vectors in self.memory.client_vectors.values())

    def model_bytes(self) -> int:
        """Return the bytes of the global model and of the server optimizer's vectors, which every run keeps."""
        vectors = (getattr(self.optimizer, name) for name in self.optimizer.memory)
        return self.model.nbytes + sum(each.nbytes for each in vectors if isinstance(each, np.ndarray))

    # ---- A checkpoint ------------------------------------------------------------------------------------------

    def stateful_components(self) -> list[Any]:
        """Return the parts whose states make up a checkpoint: each has ``state`` and ``restore``."""
        found = [
            self.run,
            self.server_step,
            self.reporter.stability,
            self.safeguards,
            self.population.roster,
            self.client_stats,
            *filter(None, (self.graph, self.population.absent, self.compressed, self.run.best)),
        ]
        return [*found, *self.run.options.stateful_components]

    def state(self) -> State:
        """Return what this run can be resumed from; see ``FederatedStrategy.state``."""
        parts = [*self.stateful_components(), *self._of_method]
        return {key: value for part in parts for key, value in part.state().items()}

    def restore(self, state: State) -> None:
        """Go on from a state when the session is opened; see ``FederatedStrategy.restore``."""
        self.restored = True
        try:
            for part in [*self.stateful_components(), *self._of_method]:
                part.restore(state)
        except KeyError as error:
            raise ValueError(
                f"the state has no {error}, which a run with these settings goes on from"
            ) from None

    # ---- After an earlier run of the same strategy object ------------------------------------------------------

    def has_returned(self, arrays: ArrayRecord) -> bool:
        """Return True if this run has returned a model equal to these arrays to the bit."""
        return self.returned is not None and list(self.returned.items()) == list(arrays.items())

    def go_on(self, state: State) -> None:
        """Go on from the state of the strategy object's last run."""
        self.restore(state)
        self.goes_on = True
        log.info("%s goes on after aggregation %d of its last run", self.run.name, state["aggregations"])

    def begin_anew_after(self, last: "Session") -> None:
        """Begin without what the last run of the strategy object learned, but for Flower's optimizers' memory."""
        self.optimizer_memory = last.server_step.state() if self.strategy.capabilities.own_optimizer else {}
        log.info(
            "%s begins anew%s: it goes on only from the model that its last start() returned",
            self.run.name,
            ", with the server optimizer's memory" if self.optimizer_memory else "",
        )

    # ---- A run -------------------------------------------------------------------------------------------------

    @property
    def decides_by_metrics(self) -> bool:
        """Whether metrics decide about the run, with safeguards: then their weighted medians over clients count."""
        return self.run.best is not None and self.safeguards.active

    @contextmanager
    def opened(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> Iterator[None]:
        """Open the run of the strategy's own ``start``: on a grid, with its configs, from an initial model."""
        strategy, run = self.strategy, self.run
        self.initial_arrays = run.trainable_arrays(initial_arrays)
        self.grid = run.wrap_grid(packing(grid, self.receiver.most_bytes))
        self.train_config = ConfigRecord() if train_config is None else train_config
        self.evaluate_config = self.train_config if evaluate_config is None else evaluate_config
        self.evaluate_fn = evaluate_fn
        check_local_noise(strategy.config, self.train_config)
        run.timeout = self.population.roster.timeout = timeout
        strategy.summary()
        run.attach_grid(self.grid)
        if run.best is not None and self.safeguards.active and run.flower.fraction_evaluate:
            run.best.refuse_spreads()
        self._check_clipping()
        if self.compressed is not None:
            evaluating = not strategy.has_rounds and run.flower.fraction_evaluate > 0
            self.compressed.check_grid(self.grid, evaluating=evaluating)
        self.is_open = self.used = True
        self.returned = None
        try:
            yield
        finally:
            self.is_open = False
        if self.population.roster.devices:
            log_never_counted(self.population.roster, self.client_stats)

    def _check_clipping(self) -> None:
        """Raise RunError where one device could move the norm of clipping as it likes."""
        adapts = isinstance(self.receiver.clip, AdaptiveClip)
        if adapts and self.strategy.config.uses_secure_sums and self.safeguards.active:
            raise RunError(
                "dp_clipping_norm = 0, secure_sums = True: of masked counts of long updates one device can say what "
                "it likes, and the norm follows; with safeguards allowed are dp_clipping_norm > 0, secure_sums = "
                "False"
            )

    def stops_after(self, aggregation: int) -> bool:
        """Return True if the caller of ``start`` ends the run after this aggregation."""
        run = self.run
        if self.stop_after is None or not self.stop_after(
            aggregation - run.earlier, run.numbered_from_start(run.reported_result(self.optimizer))
        ):
            return False
        log.info("should_stop ended the run after aggregation %d", aggregation)
        return True

    def begin_model(self, num_rounds: int) -> State | None:
        """Begin from the initial model, or from the state to resume, which is returned."""
        run = self.run
        state = run.pop_resume_state()
        run.begin(self.initial_arrays, state)
        if self.goes_on:
            run.earlier = run.aggregations
        self.total = run.earlier + num_rounds
        if self.optimizer_memory and state is None:
            self.server_step.keep_memory(self.optimizer_memory, run.layout.size)
        self.requests.note_model(self.initial_arrays)
        self.strategy.begin(run.layout, run.model)
        return state

    def evaluate_initial(self) -> None:
        """Evaluate the model of a run that goes on from an earlier one, as ``start`` does with an initial model."""
        run = self.run
        if not self.goes_on or self.evaluate_fn is None:
            return
        evaluated = self.evaluate_fn(0, run.full_model(run.reported_result(self.optimizer).arrays))
        if evaluated is not None:
            run.result.evaluate_metrics_serverapp[run.earlier] = evaluated

    def end(self, result: Result) -> Result:
        """Return what ``start`` returns, and note its model."""
        outcome = self.run.outcome(result)
        self.returned = dict(outcome.arrays)
        return outcome

    def add_method_parts(self) -> None:
        """Have the method make its own parts of this run."""
        self._of_method = tuple(self.strategy.stateful_components())

    def _awaits_by_usual_times(self) -> bool:
        """Return True if missing replies aren't awaited until the timeout: on devices, with safeguards."""
        run = self.run
        on_devices = run.grid is not None and engine_of(run.grid) in (DEPLOYMENT, MEMORY)
        return self.is_open and run.in_real_time() and on_devices and self.safeguards.active


def _graph(config: StrategyConfig, run: RunState) -> tuple[ClientGraph | None, LastUpdates | None]:
    """Return the graph of clients and the last updates that it is made of, where importances follow from them."""
    if config.client_weights != "adjacency":
        return None, None
    if (memory := config.updates_memory()) is None:
        return DirectionGraph(config.message_floor, config.neighbours), None
    updates = LastUpdates(run, memory)
    return UpdateGraph(updates, config.message_floor, config.neighbours), updates


def _rests_on_descriptions(run: RunState, *, has_rounds: bool, draws: bool) -> bool:
    """Return True if a run is told to have clients describe themselves, or needs their indices or sizes beforehand.

    A method that draws its participants by itself (``draws``) may do so by index or by p_i. Without rounds the
    weights and periods of all clients count from the first task on; times, presence and draws with known weights go
    by the client's index; and masked sums by sizes that are agreed beforehand.
    """
    config, by_index = run.config, ("time_scenario", "availability", "task_failure", "registered_nodes")
    return (
        run.flower.describe
        or draws
        or not has_rounds
        or config.client_weights == "adjacency"
        or config.uses_secure_sums
        or config.participation not in ("full", "flower")
        or any(getattr(config, key) != getattr(StrategyConfig, key) for key in by_index)
    )


def _scheduler(config: StrategyConfig, task_costs: TaskCosts, clock: Clock) -> Scheduler:
    return make_scheduler(
        clock,
        config.time_scenario,
        config.seed,
        config.time_budget,
        task_costs,
        config.availability,
        config.task_failure,
    )
