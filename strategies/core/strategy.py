"""The base class of both loops: the parts that every strategy has, and the hooks that a method implements."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from strategies.clients.roster import Client
from strategies.clock import Clock, WallClock
from strategies.core.capabilities import Capabilities, check_hooks, fills_in, hook
from strategies.core.config import (
    AsyncConfigBase,
    FlowerOptions,
    StrategyConfig,
    SynchronousConfig,
    configured,
)
from strategies.core.conflicts import check_conflicts
from strategies.core.flower_attributes import FlowerAttribute
from strategies.core.reporter import Observer
from strategies.core.run_state import ClientModelFn, RunOptions, State
from strategies.core.session import Session
from strategies.flower import internals, messages
from strategies.flower.arrays import Layout, Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import never
from strategies.timing.availability import ALWAYS, check_presence
from strategies.timing.time_scenario import TimeScenario
from strategies.updates.aggregation import WeightedSum, block_size
from strategies.updates.pipeline import Contribution

log = logging.getLogger("flwr.strategies")


class FederatedStrategy(Strategy):
    """Base of both loops: a method with its settings, whose runs are sessions (strategies/core/session.py).

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
    on_client_model : callable
        Called with the client's index and its model (D,) for every valid reply, before it is aggregated.
    should_stop : callable
        Called at every poll; True ends the run with the last complete aggregation.

    Attributes
    ----------
    config : StrategyConfig
        The method's own frozen config.
    session : Session
        The present run with its parts, or the next one before ``start``. Each run has a session of its own.
    run_options : RunOptions
        What whoever runs the strategy gives to every run: clock, observer, ``on_client_model``, ``should_stop``.

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
    session: Session

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("_construct_messages", "_check_and_log_replies"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called, as a round has its own messages and checks: "
                    "override configure_train or aggregate_train, which may call it"
                )
        base = SynchronousConfig if cls.has_rounds else AsyncConfigBase
        if not (isinstance(cls.Config, type) and issubclass(cls.Config, base)):
            given = getattr(cls.Config, "__name__", cls.Config)
            raise TypeError(f"{cls.__name__}.Config = {given}: must be a subclass of {base.__name__}")
        check_hooks(cls)
        cls.capabilities = Capabilities.of(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; what is this library's and set to something else is told at once."""
        if (kind := _OWN.get(name)) is not None and not isinstance(value, kind):
            raise AttributeError(
                f"{type(self).__name__}.{name} = {value!r}: the library's {kind.__name__} has this name; "
                "another one is needed"
            )
        super().__setattr__(name, value)

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
        on_client_model: ClientModelFn | None = None,
        should_stop: Callable[[], bool] = never,
        **options: Any,
    ) -> None:
        _check_given(
            type(self).__name__,
            clock,
            observer=observer,
            on_client_model=on_client_model,
            should_stop=should_stop,
        )
        own, self._flower_options = configured(type(self).__name__, self.Config, arguments, options)
        self.config = self.resolve_config(own)
        _check(type(self).__name__, own, self.config, given="client_weights" in options)
        real_time = isinstance(clock, WallClock)
        check_conflicts(
            type(self).__name__, self.capabilities, self.config, self._flower_options, real_time=real_time
        )
        self.run_options = RunOptions(clock, observer, on_client_model, should_stop)
        self._prepare_session()

    @property
    def flower_options(self) -> FlowerOptions:
        """The keywords of Flower's own strategies, which the present session follows."""
        return self._flower_options

    @flower_options.setter
    def flower_options(self, options: FlowerOptions) -> None:
        self._flower_options = self.session.run.flower = options

    @abstractmethod
    def _new_session(self) -> Session:
        """Return the session of the next run."""

    def _prepare_session(self) -> None:
        """Give the next run a session of its own, with the method's own parts of a run."""
        self.session = self._new_session()
        self.session.add_method_parts()

    def _fresh_session(self, initial_arrays: ArrayRecord | None = None) -> Any:
        """Return the session of a run that begins: the prepared one, or a new one after a run.

        On the model that the last run returned, equal to the bit, the new session goes on from that run's end. On
        another model, and in a loop around the strategy, it begins anew; strategies under Flower's names then keep
        the server optimizer's memory, as Flower's do.
        """
        if not self.session.used:
            return self.session
        last = self.session
        if initial_arrays is not None and last.has_returned(initial_arrays):
            state = last.state()  # by hooks, which read the session of the strategy
            self._prepare_session()
            self.session.go_on(state)
        else:
            self._prepare_session()
            self.session.begin_anew_after(last)
        return self.session

    # ---- Hooks that a method fills in: see strategies/__init__.py ----------------------------------------------

    def resolve_config(self, config: StrategyConfig) -> StrategyConfig:
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
    def extra_records(self, client: Client) -> Mapping[str, messages.RecordType]:
        """Return records for a client beside the model, by name; those of replies are in ``Contribution.records``."""
        return {}

    @hook
    def extra_vectors(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield for each client the vectors (D,) that it is sent beside the model, by record name.

        The vectors arrive as records of the model's layout. By default there are none. The loop asks once for all
        clients of a round. A vector under the model's own name, ``arrayrecord_key``, is sent in place of the model.
        """
        return iter(())

    @hook
    def on_local_model(self, client: Client, local_model: Vector) -> None:
        """Take note of a valid local model (D,), before it is aggregated; the array is on loan."""

    @hook
    def transform_update(self, contribution: Contribution) -> Vector:
        """Return the vector (D,) of a contribution that is weighted and summed; by default its update Δ_i."""
        return contribution.update

    @hook
    def server_update(self, total: Vector) -> Vector:
        """Return the update (D,) for the server optimizer's step, from the weighted sum (D,).

        The sum's memory is overwritten afterwards: a method that keeps the sum keeps a copy.
        """
        return total

    @hook
    def aggregate(
        self, model: Vector, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector:
        """Return the next global model (D,) from this one (D,) and the contributions with their weights d_i.

        By default the server optimizer's step by the ``server_update`` of Σ d_i × what ``transform_update`` returns.
        """
        squares, bound = self.session.optimizer.reads_squares, self.config.update_norm_bound
        note_nonzero, block = self.session.server_step.note_nonzero, block_size(len(weights), len(model))
        total = WeightedSum(len(model), block, squares=squares, bound=bound)
        if squares or bound or fills_in(type(self), "transform_update"):
            for weight, contribution in zip(weights, contributions, strict=True):
                total.add(weight, note_nonzero(self.transform_update(contribution)))
        else:  # the same bits, with the updates read from their replies a chunk of all at a time
            pairs = [(d, note_nonzero(c.summand)) for d, c in zip(weights, contributions, strict=True)]
            total.sum_blocks([pairs[start : start + block] for start in range(0, len(pairs), block)])
        total.end()
        if self.session.server_step.add_noise is not None:
            self.session.server_step.add_noise(total.total, weights)
        update = self.server_update(total.total)
        in_place = update is total.total  # nobody else has it
        return self.session.server_step.apply(model, update, total.squares, in_place=in_place)

    def default_server_lr(self) -> float:
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

    def stateful_components(self) -> Sequence[Any]:
        """Return the method's own parts of a new run that have a state: each has ``state`` and ``restore``.

        Called once for each session, whose parts are there already. The bytes of a part with ``num_bytes`` are
        reported as ``bytes-kept``.
        """
        return ()

    def summary(self) -> None:
        """Log the strategy, and the keys of its config that aren't the defaults."""
        usual = self.run_options.default_config or self.Config()
        values = {item.name: getattr(self.config, item.name) for item in fields(self.config)}
        unusual = [f"{key} = {value!r}" for key, value in values.items() if value != getattr(usual, key)]
        log.info("%s: %s", type(self).__name__, ", ".join(unusual) or "default settings")

    def initialize_parameters(self, client_manager: Any) -> NoReturn:
        """Refuse to be a strategy of Flower's older API, which calls this first."""
        raise RunError(
            f"{type(self).__name__} sends messages: LegacyContext and the workflows of flwr.server, such as "
            "SecAggPlusWorkflow, take strategies of flwr.server alone"
        )

    # ---- Evaluation: Flower's hooks ----------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate the model: ``fraction_evaluate`` of them, ``min_evaluate_nodes`` at least."""
        return self.session.evaluator.requests(server_round, arrays, config, self.session.clients)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics by p_i; ``loss`` becomes the federated objective f(w) = Σ p_i f_i(w)."""
        return self.session.evaluator.mean(server_round, replies)

    # ---- Going on where an earlier run was ---------------------------------------------------------------------

    def state(self) -> State:
        """Return what this run can be resumed from; an observer takes it, after any aggregation.

        Arrays may be those that the run goes on to work with: write them before the observer returns. Random
        streams need no state, each comes from the seed, the client and the task or round. A method's
        ``session.memory`` is in it, and the states of its own ``stateful_components``.

        Returns
        -------
        dict
            Arrays, ``model`` (D,) among them, and values that JSON holds.
        """
        return self.session.state()

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
        if self.session.used or self.session.restored:
            self._prepare_session()
        try:
            self.session.restore(state)
        except ValueError:
            self._prepare_session()  # the next run begins anew
            raise


# The attributes of a strategy object that the loops read, and their types.
_OWN: dict[str, type] = {"config": StrategyConfig, "session": Session, "run_options": RunOptions}


def _check_given(name: str, clock: Clock | None, **called: object) -> None:
    """Raise TypeError if ``clock`` is no clock, such as its name or its class, or another argument isn't callable."""
    of_clock = (getattr(clock, each, None) for each in ("now", "wait_until", "resume"))
    if clock is not None and (isinstance(clock, type) or not all(map(callable, of_clock))):
        raise TypeError(f"{name}(clock = {clock!r}): must be VirtualClock() or WallClock()")
    for keyword, each in called.items():
        if not (callable(each) or (each is None and keyword != "should_stop")):
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
