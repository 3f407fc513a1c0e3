"""The base class of both loops: the parts that every strategy has, and the hooks that a method implements."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from strategies.clients.accounts import Accounts, Timeline
from strategies.clients.attendance import log_never_counted
from strategies.clients.client_graph import ClientGraph
from strategies.clients.registered import NodeRecord
from strategies.clients.roster import Client, Roster
from strategies.clock import Clock
from strategies.core.capabilities import Capabilities, hook
from strategies.core.client_vectors import ClientVectors
from strategies.core.compressed_updates import CompressedUpdates
from strategies.core.config import (
    AsynchronousConfig,
    EventsConfig,
    SecureConfig,
    StrategyConfig,
    SynchronousConfig,
    configured,
)
from strategies.core.evaluator import Evaluator
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.last_updates import LastUpdates
from strategies.core.population import AbsentClients, Population
from strategies.core.receiver import Receiver, Witness, clipping
from strategies.core.reporter import Observer, Reporter
from strategies.core.requests import PendingReplies, TrainingRequests
from strategies.core.run_state import Memory, RunState, State
from strategies.core.server_step import ServerStep, check_extrapolation
from strategies.core.stability import StabilityMonitor, keys_that_help
from strategies.flower import internals, messages
from strategies.flower.arrays import Layout, Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import never
from strategies.flower.grids import DEPLOYMENT, MEMORY, engine_of
from strategies.timing.availability import ALWAYS, check_presence
from strategies.timing.load import Loads
from strategies.timing.scheduler import Scheduler
from strategies.timing.time_scenario import TimeScenario
from strategies.timing.virtual_scheduler import make_scheduler
from strategies.updates.aggregation import WeightedSum
from strategies.updates.chain import Contribution
from strategies.updates.compressors import NONE
from strategies.updates.safeguards import Bounds, Safeguards
from strategies.updates.server_optimizer import ServerOptimizer

log = logging.getLogger("flwr.strategies")


class FederatedStrategy(Strategy):
    """Base of the synchronous and the asynchronous loop: it builds the parts of a strategy and wires them.

    Parameters
    ----------
    arguments
        The algorithm's own frozen config; or, of a synchronous strategy, values in the order of Flower's own strategy
        of the name: ``FedAvg(0.5)``.
    options
        Fields of the config by name, which replace those of a ``config``, and the keywords of Flower's own strategies
        (``strategies.core.config.FlowerOptions``): ``FedProx(proximal_mu=0.1, fraction_train=0.5)``. The keywords of
        Flower's FedAvg are attributes, too, which can be set before ``start``.
    clock : Clock, optional
        ``VirtualClock()`` or ``WallClock()``. By default a run on devices has real time and a simulation has virtual
        time; each run begins with a new clock, and the log says which.
    observer : callable
        Called with a ``Progress`` after every aggregation. Without an observer the progress is logged.
    witness : callable
        Called with the client's index and its model (D,) for every valid reply, before it is aggregated.
    stopped : callable
        Called at every poll; True ends the run with the last complete aggregation.

    Attributes
    ----------
    config : StrategyConfig
        The method's own frozen config.
    run : RunState
        The model, the clients that are connected, and the number of aggregations.
    accounts : Accounts
        The outcomes, the seconds and the bytes of each client's tasks.
    timeline : Timeline
        The beginning and end of each client's tasks, until an observer takes them; empty when a run begins.
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

    Raises
    ------
    TypeError
        If a keyword isn't known, or its value has another type.
    ValueError
        If a value isn't allowed.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    config: StrategyConfig
    #: What the class needs of its loop.
    capabilities: ClassVar[Capabilities]
    #: True of a synchronous strategy; False of an asynchronous one, which aggregates work as it arrives.
    has_rounds: ClassVar[bool] = True

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("_construct_messages", "_check_and_log_replies"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called, as a round has its own messages and checks: "
                    "override configure_train or aggregate_train, which may call it"
                )
        base = SynchronousConfig if cls.has_rounds else EventsConfig
        if not (isinstance(cls.Config, type) and issubclass(cls.Config, base)):
            given = getattr(cls.Config, "__name__", cls.Config)
            raise TypeError(f"{cls.__name__}.Config = {given}: must be a subclass of {base.__name__}")
        cls.capabilities = Capabilities.of(cls)

    fraction_train = FlowerAttribute()
    fraction_evaluate = FlowerAttribute()
    min_train_nodes = FlowerAttribute()
    min_evaluate_nodes = FlowerAttribute()
    min_available_nodes = FlowerAttribute()
    weighted_by_key = FlowerAttribute()
    arrayrecord_key = FlowerAttribute()
    configrecord_key = FlowerAttribute()
    train_metrics_aggr_fn = FlowerAttribute()
    evaluate_metrics_aggr_fn = FlowerAttribute()
    # Helpers of subclasses that fill in Flower's hooks; the loops don't call them.
    _construct_messages = internals.construct_messages
    _check_and_log_replies = internals.check_and_log_replies

    def __init__(
        self,
        *arguments: Any,
        clock: Clock | None = None,
        observer: Observer | None = None,
        witness: Witness | None = None,
        stopped: Callable[[], bool] = never,
        **options: Any,
    ) -> None:
        _check_given(type(self).__name__, clock, observer=observer, witness=witness, stopped=stopped)
        own, flower = configured(type(self).__name__, self.Config, arguments, options)
        self.config = config = self.adapted(own)
        _check(type(self).__name__, own, config, given="client_weights" in options)
        check_extrapolation(type(self).__name__, self.capabilities, config)
        loads, name = Loads(), type(self).__name__
        self.run = run = RunState(name, config, flower, partial(_pace, config, loads), clock, stopped)
        self.accounts = Accounts()
        self.timeline = Timeline(self.accounts.took)
        # A bound that the config gives, or differential privacy, takes the place of the usual norm.
        clip = clipping(config)
        secure = config if isinstance(config, SecureConfig) and config.secure_sums else None
        # Nobody sees how long a masked update is.
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
            run.is_stopped,
            flower.weighted_by_key,
            flower.configrecord_key,
            flower.min_available_nodes,
            NodeRecord(config.registered_nodes) if config.registered_nodes else None,
            config.participation,
        )
        by_graph = config.client_weights == "adjacency"
        memory = config.updates_memory() if by_graph else None
        updates = None if memory is None else LastUpdates(run, memory)
        graph = ClientGraph(config.message_floor, config.neighbours, updates=updates) if by_graph else None
        corrects = self.capabilities.corrects_participation
        away = AbsentClients(run, self.accounts) if corrects and not by_graph else None
        self.population = Population(run, roster, self.safeguards, config.client_weights, graph, away)
        self.pending = PendingReplies(run, partial(_gives_up, run, self.safeguards))
        compresses = config.compression != NONE
        compressed = CompressedUpdates(config.compression, config.seed, run) if compresses else None
        self.compressed = compressed
        self.population.listeners += (
            [self.clients_present] if compressed is None else [compressed.hand_back, self.clients_present]
        )
        self.requests = TrainingRequests(
            run,
            loads,
            self.local_rule,
            self.task_fields,
            self.outgoing,
            compressed,
            keeps=None if secure is None or self.has_rounds else secure.summed_metrics,
        )
        self.receiver = Receiver(
            run,
            self.safeguards,
            must_weigh=config.client_weights == "samples",
            replies_beside=self.capabilities.replies_beside,
            bound=config.update_norm_bound,
            local_rule=self.local_rule,
            received=self.received,
            compressed=compressed,
            clip=clip,
            updates=updates,
            witness=witness,
            masked=secure is not None,
        )
        self.server_step = ServerStep(
            run, partial(_new_optimizer, run), config.server_lr, self.own_lr, stale=not self.has_rounds
        )
        stability = StabilityMonitor(partial(keys_that_help, config, has_rounds=self.has_rounds))
        self.evaluator = Evaluator(
            run, self.population, self.pending, config.seed, self.evaluation_rule, self.personal_model
        )
        unit = "round" if self.has_rounds else "aggregation"
        self.reporter = Reporter(run, self.accounts, roster, unit, self.bytes_kept, observer, stability)

    # ---- Hooks that a method fills in: see strategies/__init__.py ----------------------------------------------

    def adapted(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config with the values that the algorithm demands."""
        return config

    def check(self, num_clients: int) -> None:
        """Raise ValueError if the config can't be used with this number of clients."""

    @hook
    def local_rule(self) -> dict[str, float]:
        """Return the fields of training messages that define the algorithm's local step."""
        return {}

    @hook
    def task_fields(self) -> Mapping[str, Any]:
        """Return further fields of training messages, on which local steps don't depend."""
        return {}

    @hook
    def outgoing(self, client: Client) -> Mapping[str, messages.RecordType]:
        """Return records for a client beside the model, by name; those of replies are in ``Contribution.records``."""
        return {}

    @hook
    def companions(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield for each client the vectors (D,) that it is sent beside the model, by record name.

        The vectors arrive as records of the model's layout. By default there are none. The loop asks once for all
        clients of a round. A vector under the model's own name, ``arrayrecord_key``, is sent in place of the model.
        """
        return iter(())

    @hook
    def received(self, client: Client, local_model: Vector) -> None:
        """Take note of a valid local model (D,), before it is aggregated; the array is on loan."""

    @hook
    def counted(self, contribution: Contribution) -> Vector:
        """Return the vector (D,) of a contribution that is weighted and summed; by default its update Δ_i."""
        return contribution.update

    @hook
    def direction(self, total: Vector) -> Vector:
        """Return the update (D,) for the server optimizer's step, from the weighted sum (D,)."""
        return total

    @hook
    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return the next global model (D,) from this one (D,) and the contributions with their weights d_i.

        By default the server optimizer's step by the ``direction`` of Σ d_i × what ``counted`` returns.
        """
        squares, bound = self.optimizer.reads_squares, self.config.update_norm_bound
        total = WeightedSum(len(model), len(weights), squares=squares, bound=bound)
        for weight, contribution in zip(weights, contributions, strict=True):
            total.add(weight, self.server_step.looked_at(self.counted(contribution)))
        total.end()
        if self.server_step.hide is not None:
            self.server_step.hide(total.total, weights)
        return self.server_step.moved(model, self.direction(total.total), total.squares)

    def own_lr(self) -> float:
        """Return the method's server step size η_g, used where config and server optimizer have none."""
        return 1.0

    def begin(self, layout: Layout, model: Vector) -> None:
        """Prepare for a run from this model (D,); ``memory`` is restored before, where a run is resumed."""

    def clients_present(self, clients: Sequence[Client]) -> None:
        """Take note of the connected clients, each time before requests are made."""

    def evaluation_rule(self) -> dict[str, float]:
        """Return the fields of evaluation messages that name what is evaluated beside the global model."""
        return {}

    @hook
    def personal_model(self, client: Client) -> Vector | None:
        """Return the model (D,) that a client evaluates beside the global model; None if the client keeps its own."""
        return None

    def without_companions(self) -> str:
        """Return the parameter and value with which no vector is sent beside the model; "" if there is none."""
        return ""

    def unseen_by_wrappers(self) -> str:
        """Return how clients' work affects the model outside a round's weighted sum; "" if it doesn't."""
        return self.capabilities.past_the_sum

    def bytes_kept(self) -> int:
        """Return the bytes of the clients' vectors that the method keeps, in memory or in a file."""
        known = 0 if self.graph is None or self.graph.updates is None else self.graph.updates.num_bytes
        return known + sum(vectors.matrix.nbytes for vectors in self.memory.vectors.values())

    # ---- What a method, or whoever watches a run, asks ---------------------------------------------------------

    @property
    def model(self) -> Vector:
        """The global model (D,) that the next aggregation moves; don't write to it."""
        return self.run.model

    @property
    def clients(self) -> list[Client]:
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
    def pace(self) -> Scheduler:
        """The run's scheduler."""
        return self.run.pace

    @property
    def clock(self) -> Clock:
        """The run's clock; it may be replaced between two runs."""
        return self.run.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self.run.clock = clock

    @property
    def optimizer(self) -> ServerOptimizer:
        """The server optimizer."""
        return self.server_step.optimizer

    @property
    def graph(self) -> ClientGraph | None:
        """The graph of clients, where importances follow from it."""
        return self.population.graph

    @property
    def observer(self) -> Observer | None:
        """The callable that receives every aggregation, in place of the log."""
        return self.reporter.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self.reporter.observer = observer

    def vectors(self, name: str) -> ClientVectors:
        """Return the method's vectors (D,) of the clients under a name; a new vector is 0."""
        known = self.memory.vectors
        if name not in known:
            known[name] = ClientVectors(np.zeros(len(self.model)), max(len(self.clients), 1))
        return known[name]

    def importance(self) -> dict[int, float]:
        """Return the importances p_i of the clients that count now, by index."""
        return self.population.importance()

    def minimised(self) -> dict[int, float]:
        """Return the weights in the objective of the clients that count now, by index: p_i, or those of a scheme."""
        return self.importance()

    @abstractmethod
    def shares_of_clients(self) -> dict[str, list[float]]:
        """Return lists by client index: how often each client counted, its expected weight, and its weight so far."""

    def at_work(self) -> list[int]:
        """Return the clients, by index, that have been asked for something and haven't answered yet."""
        return self.pending.at_work()

    def most_tasks(self) -> int:
        """Return how many tasks a client has been handed at most; every round counts, whoever took part."""
        return self.aggregations

    def summary(self) -> None:
        """Log the strategy, and the keys of its config that aren't the defaults."""
        usual = self.run.usual or self.Config()
        values = {item.name: getattr(self.config, item.name) for item in fields(self.config)}
        unusual = [f"{key} = {value!r}" for key, value in values.items() if value != getattr(usual, key)]
        log.info("%s: %s", type(self).__name__, ", ".join(unusual) or "default settings")

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """Refuse to be a strategy of Flower's older API, which calls this first."""
        raise RunError(
            f"{self.run.name} sends messages: LegacyContext and the workflows of flwr.server, such as "
            "SecAggPlusWorkflow, take strategies of flwr.server alone"
        )

    # ---- Evaluation: Flower's hooks ----------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate the model: ``fraction_evaluate`` of them, ``min_evaluate_nodes`` at least."""
        return self.evaluator.requests(server_round, arrays, config, self.clients)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics by p_i; ``loss`` becomes the federated objective f(w) = Σ p_i f_i(w)."""
        return self.evaluator.mean(server_round, replies)

    # ---- A run, and going on where an earlier one was ----------------------------------------------------------

    def parts(self) -> list[Any]:
        """Return the parts whose states make up a checkpoint: each has ``state``, ``restore`` and ``reset``."""
        found = [
            self.run,
            self.server_step,
            self.reporter.stability,
            self.safeguards,
            self.population.roster,
            self.accounts,
        ]
        return [
            *found,
            *filter(None, (self.graph, self.population.away, self.compressed, self.run.best)),
            *self.run.parts,
        ]

    def state(self) -> State:
        """Return what this run can be resumed from; an observer takes it, after any aggregation.

        Arrays may be those that the run goes on to work with: write them before the observer returns. Random
        streams need no state, each comes from the seed, the client and the task or round. A method's
        ``memory`` is in it; what it remembers elsewhere it adds here, takes back in ``restore``, drops in ``reset``.

        Returns
        -------
        dict
            Arrays, ``model`` (D,) among them, and values that JSON holds.
        """
        return {key: value for part in self.parts() for key, value in part.state().items()}

    def restore(self, state: State) -> None:
        """Let the next ``start`` go on from the ``state`` of an earlier run with the same config.

        In virtual time it then does what the earlier run would have done: to the last bit if the clients do, and
        within 1e-5 without rounds on a Grid that trains tasks together, as those under way are then with others. In
        real time, tasks that were under way are handed out anew.

        Raises
        ------
        ValueError
            If the state is another strategy's, or lacks what these settings go on from.
        """
        try:
            for part in self.parts():
                part.restore(state)
        except KeyError as error:
            self.run.resumed()  # the next run begins anew
            raise ValueError(
                f"the state has no {error}, which a run with these settings goes on from"
            ) from None

    def reset(self) -> None:
        """Drop the state of an earlier run: a new run begins."""
        for part in self.parts():
            part.reset()

    @contextmanager
    def _running(self, grid: Grid, timeout: float) -> Iterator[None]:
        """Prepare a run of this object's own loop, as opposed to a loop around it, such as a wrapper of Flower's."""
        self.run.timeout = self.population.roster.timeout = timeout
        self.summary()
        self.run.enter(grid)
        if self.compressed is not None:
            evaluating = not self.has_rounds and self.run.flower.fraction_evaluate > 0
            self.compressed.look(grid, evaluating=evaluating)
        self.run.own_loop = True
        try:
            yield
        finally:
            self.run.own_loop = False
        if self.population.roster.devices:
            log_never_counted(self.population.roster, self.accounts)

    def _begin(self, initial_arrays: ArrayRecord) -> State | None:
        """Start from the initial model, or from the state to resume, which is returned."""
        if (state := self.run.resumed()) is None:
            self.reset()
        self.timeline.clear()
        self.run.begin(initial_arrays, state)
        self.requests.note_model(initial_arrays)
        self.begin(self.run.layout, self.model)
        return state


def _new_optimizer(run: RunState) -> ServerOptimizer:
    return run.config.new_optimizer()


def _gives_up(run: RunState, safeguards: Safeguards) -> bool:
    """Return True if missing replies aren't awaited until the timeout: on devices, with safeguards."""
    on_devices = run.grid is not None and engine_of(run.grid) in (DEPLOYMENT, MEMORY)
    return run.own_loop and run.in_real_time() and on_devices and safeguards.active


def _pace(config: StrategyConfig, loads: Loads, clock: Clock) -> Scheduler:
    return make_scheduler(
        clock,
        config.time_scenario,
        config.seed,
        config.time_budget,
        loads,
        config.availability,
        config.task_failure,
    )


def _check_given(name: str, clock: Clock | None, **called: object) -> None:
    """Raise TypeError if ``clock`` is no clock, such as its name or its class, or another argument isn't callable."""
    of_clock = (getattr(clock, each, None) for each in ("now", "wait_until", "resume"))
    if clock is not None and (isinstance(clock, type) or not all(map(callable, of_clock))):
        raise TypeError(f"{name}(clock = {clock!r}): must be VirtualClock() or WallClock()")
    for keyword, each in called.items():
        if not (callable(each) or (each is None and keyword != "stopped")):
            raise TypeError(f"{name}({keyword} = {each!r}): must be callable")


def _check(name: str, own: StrategyConfig, config: StrategyConfig, *, given: bool) -> None:
    """Refuse values that no field can refuse by itself; warn of client weights that the method replaces."""
    if not config.time_scenario.startswith(("trace:", "profile:")):
        TimeScenario(config.time_scenario, 1)  # checks the name; a file needs the number of clients
    if (config.availability, config.task_failure) != (ALWAYS, 0.0):
        check_presence(config.availability, config.task_failure)
    given = given or own.client_weights != StrategyConfig.client_weights
    if own.client_weights != config.client_weights and given:
        log.warning(
            "client_weights = %r isn't read: %s's are %s", own.client_weights, name, config.client_weights
        )
