"""The state of a run: its model, the number of aggregations, its clients, and the method's memory."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from strategies import streams
from strategies.clients.by_index import ByIndex
from strategies.clients.roster import Client
from strategies.clock import Clock, VirtualClock, WallClock
from strategies.core.best_model import BestModel
from strategies.core.client_vectors import ClientVectors
from strategies.core.config import FlowerOptions, StrategyConfig, SynchronousConfig
from strategies.flower.arrays import (
    NOT_FINITE,
    OVERFLOWS,
    TOO_LARGE,
    ArraysMismatchError,
    Layout,
    Vector,
    equal_values,
    flat,
)
from strategies.flower.errors import DivergedError, RunError
from strategies.flower.exchange import never
from strategies.flower.frozen import FrozenGrid, FrozenParameterCache, FrozenParameters, split_initial
from strategies.flower.grids import DEPLOYMENT, check_mods, engine_of
from strategies.secure.openings import Openings
from strategies.timing.scheduler import Scheduler, TimedGrid
from strategies.updates.buffers import Buffers
from strategies.updates.compressed_models import ModelCompression, compressing_models
from strategies.updates.compressors import NONE
from strategies.updates.server_optimizer import ServerOptimizer

_VALUES, _VECTORS = "memory:", "vectors:"  # prefixes of the memory's names in a state


class Memory(dict[str, Any]):
    """A method's memory: arrays and JSON values by name, and vectors of each client.

    Attributes
    ----------
    client_vectors : dict of str to ClientVectors
        The clients' vectors, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.client_vectors: dict[str, ClientVectors] = {}

    def state(self) -> dict[str, Any]:
        """Return the memory for a checkpoint."""
        state = {f"{_VALUES}{name}": value for name, value in self.items()}
        for name, vectors in self.client_vectors.items():
            state |= vectors.state(f"{_VECTORS}{name}")
        return state

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Memory":
        """Return the memory of a state."""
        memory = cls()
        for key, value in state.items():
            if key.startswith(_VALUES):
                kept = np.array(value) if isinstance(value, np.ndarray) else value
                memory[key.removeprefix(_VALUES)] = kept
            elif key.startswith(_VECTORS) and f"{key}-initial" in state:
                vectors = ClientVectors.restored(state, key)
                assert vectors is not None
                memory.client_vectors[key.removeprefix(_VECTORS)] = vectors
        return memory


log = logging.getLogger("flwr.strategies")

# What a run goes on from: arrays, and values that JSON holds.
State = dict[str, Any]


# Called with a client's index and its local model (D,) for every valid reply, before it is aggregated. The array is
# only valid during the call.
ClientModelFn = Callable[[int, Vector], None]


def _not_noted(clients: Sequence[int]) -> None:
    pass


def _no_fields(client: Client) -> dict[str, int]:
    return {}


@dataclass
class RunOptions:
    """What whoever runs a strategy gives to every run of it.

    Attributes
    ----------
    clock : Clock, optional
        By default it follows from where a run is: real time on devices, virtual time in any simulation.
    observer : callable, optional
        Receives the ``Progress`` of every aggregation, in place of the log.
    on_client_model : callable, optional
        Called with a client's index and its local model (D,) for every valid reply.
    should_stop : callable
        Asked at every poll; True ends the run with the last complete aggregation.
    frozen : FrozenParameters, optional
        The arrays of clients' models that are none of this model's, as they never change; clients build them.
    only_own_arrays : bool
        Whether each array of a client's model is its own, so that the model of the run is empty, and stays so.
    default_config : StrategyConfig, optional
        Baseline config, by default the method's defaults; ``summary`` logs the differences.
    evaluation_fields : callable
        Returns further fields of a client's requests to evaluate.
    stateful_components : list
        Further parts with ``state`` and ``restore``, whose states are saved in checkpoints.
    deterministic_noise : bool
        Whether noise that protects data comes from the seed, as in a simulation, where there is nothing to protect.
    before_release : callable
        Called before each round, and, without rounds, with the indices of clients before they are sent tasks.
    openings : Openings, optional
        The secure sums that this run has opened, also before it was resumed; None: a repeated sum is opened.
    client_names : mapping of int to str
        Names of clients by index, where a simulation knows them, such as the natural ids in the data; for display.
    higher_is_better : mapping of str to bool
        Whether a higher value of a metric is better, of clients' metrics whose names don't say so; None if that isn't
        known, and is said.
    """

    clock: Clock | None = None
    observer: Callable[[Any], None] | None = None
    on_client_model: ClientModelFn | None = None
    should_stop: Callable[[], bool] = never
    frozen: FrozenParameters | None = None
    only_own_arrays: bool = False
    default_config: StrategyConfig | None = None
    evaluation_fields: Callable[[Client], dict[str, int]] = _no_fields
    stateful_components: list[Any] = field(default_factory=list)
    deterministic_noise: bool = False
    before_release: Callable[[Sequence[int]], None] = _not_noted
    openings: Openings | None = None
    client_names: Mapping[int, str] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool | None] = field(default_factory=dict)


class RunState:
    """The progress of a run.

    Attributes
    ----------
    scheduler : Scheduler
        The run's time.
    config : StrategyConfig
        The strategy's config.
    flower : FlowerOptions
        The keywords of Flower's strategies.
    options : RunOptions
        What whoever runs the strategy gives to every run of it.
    grid : Grid, optional
        Where the clients are, once the run has begun.
    frozen : FrozenParameters, optional
        The arrays of clients' models that never change, and so aren't in this model.
    timeout : float
        Real seconds that a reply is waited for.
    clients : ByIndex of Client
        Those that are there, by index.
    layout : Layout
        The model's arrays.
    model : array (D,)
        The global model that the next aggregation moves; nobody writes to it.
    buffers : Buffers
        Where the values that aren't trained are in the model; ``buffers_at`` (B,) are their positions.
    model_compression : ModelCompression, optional
        Compresses the models that clients are sent to train from.
    max_extra_bytes : int
        The most bytes of records beside the model in a request of this run.
    result : Result
        Flower's: the model as arrays, and the metrics by aggregation.
    aggregations, evaluated : int
        How many there have been, and which of them was evaluated last.
    earlier : int
        How many of them an earlier ``start`` of the strategy object made, from whose model the run goes on. What
        ``start`` calls and returns counts without them; messages, hooks and reports count on.
    memory : Memory
        What the method remembers.
    best : BestModel, optional
        The best evaluation and the stop conditions, where ``keep``, ``stop_at`` or ``patience`` ask for them.
    run_id : int
        A number that no other run has, but one that goes on from it: what a client's state belongs to.
    model_unchanged : bool
        Whether the last aggregation left the model as it is, for now: a method that waits says so.
    any_nonzero_update, any_failure : bool
        Whether any client's update wasn't zero, and whether any client's work couldn't be had.
    last_failure : str
        The last reason against a client's work.

    Parameters
    ----------
    name : str
        The strategy's, for errors and for the checkpoint.
    make_scheduler : callable
        Returns the time of a run by a clock.
    """

    clients: ByIndex[Client]
    layout: Layout
    model: Vector
    result: Result
    buffers: Buffers

    def __init__(
        self,
        name: str,
        config: StrategyConfig,
        flower: FlowerOptions,
        make_scheduler: Callable[[Clock], Scheduler],
        options: RunOptions | None = None,
    ) -> None:
        self.name, self.config, self.flower = name, config, flower
        self.options = RunOptions() if options is None else options
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler(self.options.clock or VirtualClock())
        self._resumed: State | None = None
        self.grid: Grid | None = None
        self.frozen: FrozenParameters | None = None
        self.model_compression: ModelCompression | None = None
        self._bytes_of_whole_models = 0
        self.timeout = 3600.0
        self.max_extra_bytes = 0
        self.aggregations = self.evaluated = self.earlier = 0
        self.any_nonzero_update = self.any_failure = self.model_unchanged = False
        self.last_failure = ""
        self._said: set[str] = set()
        self._known: tuple[list[tuple[str, Array, bytes]], Vector] = [], np.empty(0)
        self.best = BestModel(config) if config.stop_at or config.compares_evaluations else None
        self.memory, self.clients = Memory(), ByIndex[Client]()
        self.run_id = int(streams.unpredictable().integers(2**62))

    @property
    def buffers_at(self) -> NDArray[np.intp]:
        """Positions (B,) of the values that aren't trained in the model."""
        return self.buffers.positions

    @property
    def clock(self) -> Clock:
        """The run's clock."""
        return self.scheduler.clock

    def use_clock(self, clock: Clock) -> None:
        """Let this run, and later ones of the strategy, go by a clock."""
        self.options.clock = clock
        self.scheduler = self._make_scheduler(clock)

    def should_stop(self) -> bool:
        """Return True if the run is to end with the last complete aggregation."""
        return self.options.should_stop()

    def client_names(self) -> Mapping[int, str]:
        """Return the names of a simulation's clients, by index."""
        return self.options.client_names

    def attach_grid(self, grid: Grid) -> None:
        """Note the grid of a run, and begin with a clock that suits the grid, unless a clock was given."""
        check_mods(grid)
        self.grid = grid
        self._begin_clock(grid)
        if isinstance(grid, TimedGrid):
            self.scheduler.new_scenario = grid.time_scenario

    def _begin_clock(self, grid: Grid) -> None:
        if self.options.clock is not None:
            if self.options.clock is not self.scheduler.clock:  # it was set after the strategy was made
                self.use_clock(self.options.clock)
            return
        on_devices = engine_of(grid) == DEPLOYMENT
        self.scheduler = self._make_scheduler(WallClock() if on_devices else VirtualClock())
        if _reads_time(self.config):
            log.info("clock: %s", "real time, on devices" if on_devices else "virtual time, in a simulation")

    def wrap_grid(self, grid: Grid) -> Grid:
        """Return a Grid that sends compressed models, and frozen arrays, to clients that need them."""
        if self.config.compression_down != NONE:
            grid = compressing_models(grid, self._sent_whole)
        return grid if self.frozen is None else FrozenGrid(grid, self.frozen)

    def _sent_whole(self, num_bytes: int) -> None:
        """Note the bytes that a client was sent beyond those of a compressed model."""
        self._bytes_of_whole_models += num_bytes
        self.warn_once(
            "compression_down = %r: some clients are sent the rounded model in full precision; a ClientApp decodes "
            "compressed models by the mod strategies.compress_updates",
            self.config.compression_down,
        )

    def take_bytes_beside(self) -> tuple[int, int]:
        """Return the bytes since the last call that requests and replies don't show: sent, and received.

        They are those of frozen arrays, and of models that were sent whole in place of compressed ones.
        """
        sent, received = (0, 0) if self.frozen is None else self.frozen.take_bytes()
        whole, self._bytes_of_whole_models = self._bytes_of_whole_models, 0
        return sent + whole, received

    def to_send(self, model: Vector, arrays: ArrayRecord | None = None) -> tuple[ArrayRecord, Vector]:
        """Return the record of a model (D,) for clients, and the model (D,) that they have once they got it.

        ``arrays`` is the model's own record, if there is one.
        """
        if self.model_compression is not None:
            return self.model_compression.sent(model)
        if arrays is not None:
            return arrays, model
        return self.layout.to_record(model), self.layout.rounded(model)

    def to_send_again(self, base: NDArray[Any]) -> ArrayRecord:
        """Return the record of a model (D,) that a client was sent before."""
        if self.model_compression is not None:
            return self.model_compression.sent_again(base)
        return self.layout.to_record(base.astype(np.float64))

    def trainable_arrays(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the initial arrays of the run's model: all, or those that travel where ``trained`` names some.

        Raises
        ------
        ValueError
            If ``trained`` names no array.
        RunError
            If the state to resume has other frozen arrays.
        """
        flower, self.frozen = self.flower, self.options.frozen
        if flower.trained is None:
            return initial_arrays
        self.frozen = None
        split, nodes = split_initial(initial_arrays, flower.trained, flower.untrained, self._resumed)
        if not split.frozen:
            log.info("trained: names all arrays of the model, so that all of them travel")
            return initial_arrays
        self.frozen = FrozenParameterCache(split, flower.keys, self.warn_once, nodes)
        log.info(
            "trained: %d of %d arrays travel; the others are sent once to each client with the mod "
            "cache_frozen_parameters",
            len(split.sent),
            len(split.arrays),
        )
        return ArrayRecord({name: initial_arrays[name] for name in split.sent})

    def full_model(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the whole model of its arrays that travel."""
        return arrays if self.frozen is None else self.frozen.full_model(arrays)

    def central_noise(self, number: int) -> np.random.Generator:
        """Return the generator of an aggregation's central noise: unpredictable, unless the run is to be repeated."""
        if self.options.deterministic_noise:
            return streams.generator(self.config.seed, "central-noise", number)
        return streams.unpredictable()

    def state(self) -> State:
        """Return the state for a checkpoint: the model (D,), the counts and the method's memory."""
        return {
            "strategy": self.name,
            "aggregations": self.aggregations,
            "evaluated": self.evaluated,
            "run-id": self.run_id,
            "model": flat(self.result.arrays),
            "layout": _named_shapes(self.layout),
            **self.scheduler.state(),
            **self.memory.state(),
            **({} if self.frozen is None else self.frozen.state()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the memory of a state; ``begin`` restores the rest.

        Raises
        ------
        ValueError
            If the state is another strategy's, or holds no finite model.
        """
        if state["strategy"] != self.name:
            raise ValueError(f"the state is that of {state['strategy']}, this is {self.name}")
        if not np.isfinite(state["model"]).all():
            raise ValueError("the model of its state isn't finite")
        self.run_id = state["run-id"]
        self.memory = Memory.restored(state)
        self._resumed = dict(state)

    def pop_resume_state(self) -> State | None:
        """Return, once, the state that the next run resumes; None: the run begins anew."""
        state, self._resumed = self._resumed, None
        return state

    def begin(self, arrays: ArrayRecord, state: Mapping[str, Any] | None = None) -> None:
        """Begin a run with initial arrays, or resume the state of an earlier run.

        Raises
        ------
        ArraysMismatchError
            If the arrays are no model to train.
        ValueError
            If the state holds a model of another size, or of other arrays.
        """
        self.result = Result(arrays=arrays)
        self.aggregations = self.evaluated = 0
        self.any_nonzero_update = self.any_failure = self.model_unchanged = False
        self._said.clear()
        self.take_layout(arrays)
        if state is not None:
            _check_model(state, self.layout)
            self.result.arrays = self.layout.to_record(np.array(state["model"], dtype=np.float64))
            self.aggregations, self.evaluated = state["aggregations"], state["evaluated"]
            self.scheduler.restore(state)
        if self.best is not None:
            self.best.begin(self.layout)
        self.model = self.initial_model(self.result.arrays)

    def take_layout(self, arrays: ArrayRecord) -> None:
        """Read the layout of a model's arrays."""
        try:
            self.layout = Layout.of(arrays)
        except ArraysMismatchError as error:
            raise ArraysMismatchError(f"the initial arrays are no model to train: {error}") from None
        if self.layout.is_bytes:
            raise ArraysMismatchError(
                "the initial arrays are no model to train: bytes of a serialised model, such as trees of xgboost, "
                "can't be averaged like vectors (Flower's FedXgbBagging collects trees)"
            )
        untrained, name = self.flower.untrained, self.config.compression_down
        self.buffers = Buffers.of(self.layout, untrained)
        self.model_compression = None if name == NONE else ModelCompression(name, self.layout, untrained)

    def know(self, arrays: ArrayRecord, model: Vector) -> None:
        """Note what a record is as a vector (D,), so that ``vector_of`` needn't read its bytes."""
        self._known = [(name, array, array.data) for name, array in arrays.items()], model

    def vector_of(self, arrays: ArrayRecord) -> Vector:
        """Return a record's model (D,); raise ArraysMismatchError if the arrays are no valid model."""
        (known, model), self._known = self._known, ([], np.empty(0))
        same = len(known) == len(arrays) > 0 and all(
            name == key and array is each and data is each.data  # an array's bytes can be replaced
            for (name, array, data), (key, each) in zip(known, arrays.items(), strict=True)
        )
        return model if same else self.layout.to_vector(arrays)

    def initial_model(self, arrays: ArrayRecord) -> Vector:
        """Return the initial model (D,); raise ArraysMismatchError if the arrays are no valid model."""
        try:
            return self.layout.to_vector(arrays)
        except ArraysMismatchError as error:
            why = str(error)
            if any(fault in why for fault in (NOT_FINITE, OVERFLOWS, TOO_LARGE)):  # such as a mask of −∞
                why = "; ".join(self.layout.faults(arrays)) or why
                why += "; arrays that never change may hold any values if trained names the others"
            raise ArraysMismatchError(f"the initial arrays are no model to train: {why}") from None

    def in_real_time(self) -> bool:
        """Return True in real time, where task times are observed; False in virtual time."""
        return self.scheduler.real_time

    def reported_result(self, optimizer: ServerOptimizer) -> Result:
        """Return the result with the model that is evaluated, reported and returned, by the server optimizer."""
        if not optimizer.averages:
            return self.result
        outcome = optimizer.outcome(self.layout.to_vector(self.result.arrays))
        return replace(self.result, arrays=self.layout.to_record(outcome))

    def is_over(self) -> bool:
        """Return True if an evaluation has met a stop condition."""
        return self.best is not None and bool(self.best.over)

    def outcome(self, result: Result) -> Result:
        """Return the result of the whole run: the whole model, and the best one, where that is kept."""
        if self.best is not None and not self.should_stop():
            self.best.warn_without_value()
        best = None if self.best is None else self.best.arrays
        arrays = self.full_model(result.arrays if best is None else best)
        return replace(self.numbered_from_start(result), arrays=arrays)

    def numbered_from_start(self, result: Result) -> Result:
        """Return a result whose metrics are numbered from this ``start`` on, without the ``earlier`` aggregations."""
        if not self.earlier:
            return result
        records: dict[str, Any] = {
            item.name: {
                number - self.earlier: record for number, record in getattr(result, item.name).items()
            }
            for item in fields(result)
            if item.name != "arrays"
        }
        return replace(result, **records)

    def warn_once(self, text: str, *values: object) -> None:
        """Log a warning only once in a run."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text, *values)

    def note_failure(self, reason: str) -> None:
        """Note that a client's work was missed, and why."""
        self.any_failure, self.last_failure = True, reason

    def check_progress(self, initial_arrays: ArrayRecord) -> None:
        """Raise RunError if no client's work was ever accepted; warn if the model is the initial one all the same."""
        if self.should_stop():
            return
        done = self.aggregations - self.earlier
        tried = done or self.any_failure
        if self.model_unchanged and tried:
            log.warning(
                "%d aggregations were too few for %s, which waits until all clients that count have answered "
                "once: the model is the initial one",
                done,
                self.name,
            )
        if tried and self.result.arrays is initial_arrays:
            raise self.no_progress_error(
                f"no client's work was accepted in {done} aggregations, the model is the initial one"
            )
        if self.model_unchanged:  # said already
            return
        if not done and self.best is not None and self.is_over():
            log.warning("%s: there was nothing to do, the model is the initial one", self.best.over)
        elif not done:
            # Without rounds it is said already.
            if self.scheduler.budget and isinstance(self.config, SynchronousConfig):
                log.warning(
                    "time_budget = %g s is shorter than the first round: the model is the initial one",
                    self.scheduler.budget,
                )
        elif self.layout.size and equal_values(self.result.arrays, initial_arrays):
            log.warning(
                "after %d aggregations the model is the initial one: %s",
                done,
                "the moves were 0, or too short for its numbers (lr, server_lr, update_norm_bound)"
                if self.any_nonzero_update
                else "no client took part, or every update was 0",
            )

    def no_progress_error(self, what: str) -> RunError:
        """Return the error that ends a run in which no client's work counts, with the last reason against one's."""
        if not self.last_failure:
            return RunError(f"{what}; the log names the reasons")
        reason = f"{what}; the last reason was {self.last_failure!r}"
        if NOT_FINITE in self.last_failure or OVERFLOWS in self.last_failure:
            return DivergedError(f"{reason}: the clients' steps are too large (lr)")
        return RunError(reason)


def _named_shapes(layout: Layout) -> list[list[Any]]:
    return [[name, list(shape)] for name, shape in zip(layout.names, layout.shapes, strict=True)]


def _check_model(state: Mapping[str, Any], layout: Layout) -> None:
    """Raise ValueError if a state holds a model of another size, or of other arrays."""
    if len(state["model"]) != layout.size:
        raise ValueError(
            f"the state is that of a model of {len(state['model'])} values, this one has {layout.size}"
        )
    ours = _named_shapes(layout)
    for before, now in zip_longest(state["layout"], ours):
        if before != now:
            raise ValueError(
                f"the state is that of a model with {_in_words(before)} where this one has {_in_words(now)}"
            )


def _in_words(named: list[Any] | None) -> str:
    return "no array" if named is None else f"the array {named[0]} {tuple(named[1])}"


def _reads_time(config: StrategyConfig) -> bool:
    """Return True if a run depends on time: there are no rounds, or a key that brings time into rounds is set."""
    keys = ("time_scenario", "time_budget", "availability", "task_failure", "round_deadline", "over_select")
    with_rounds = isinstance(config, SynchronousConfig)
    return not with_rounds or any(getattr(config, key) != getattr(SynchronousConfig, key) for key in keys)
