"""A strategy's runs: with which clock they begin, what they go on from, and when one came to nothing."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies import streams
from strategies.clients.accounts import Accounts
from strategies.clients.client_graph import ClientGraph
from strategies.clients.roster import Client, Roster
from strategies.clients.timeline import Timeline
from strategies.clock import Clock, VirtualClock, WallClock
from strategies.core.memory import Memory
from strategies.core.progress import Observer
from strategies.core.reporting import Reporting
from strategies.core.wrapper import Wrapped
from strategies.flower import messages
from strategies.flower.arrays import NOT_FINITE, OVERFLOWS, ArraysMismatchError, Layout, Vector
from strategies.flower.engine_name import DEPLOYMENT, engine_of
from strategies.flower.errors import DivergedError, RunError
from strategies.flower.exchange import never
from strategies.timing.load import Loads
from strategies.timing.scheduler import Pace
from strategies.timing.virtual_scheduler import make_pace
from strategies.updates.buffers import untrained_positions
from strategies.updates.compression import Compression, compressing, request_fields, size_of
from strategies.updates.compression_residual import LeftOut
from strategies.updates.compressors import NONE
from strategies.updates.safeguards import Safeguards
from strategies.updates.server_optimizer import make_optimizer

log = logging.getLogger("flwr.strategies")

# What a run goes on from: arrays, and values that JSON holds.
State = dict[str, Any]


class Lifecycle(Reporting):
    """What begins, is saved and restored, and ends.

    Attributes
    ----------
    memory : Memory
        What the method remembers: saved and restored with the run, empty when one begins.
    loads : Loads
        What clients' tasks weigh, which their times in virtual time may follow from.
    timeline : Timeline
        When each client's tasks began and ended, until somebody takes that down; empty when a run begins.
    """

    memory: Memory
    #: A number that no other run has, but one that goes on from it: what a client's state belongs to.
    run_id: int
    #: How clients' work counts beside or past a round's weighted sum, unseen by a wrapper; "" if it doesn't.
    past_the_sum: ClassVar[str] = ""
    #: Whether the last ``aggregate`` left the model as it is, for now: a method that waits says so.
    stays: bool = False

    def __init__(
        self, clock: Clock | None, observer: Observer | None, stopped: Callable[[], bool] = never
    ) -> None:
        self._clock_follows, self.loads = clock is None, Loads()
        self.pace: Pace = self._pace_of(clock or VirtualClock())
        self.observer = observer
        self.stopped = stopped
        self.timeout = 3600.0
        self.clients: list[Client] = []
        self._asked: dict[int, int] = {}
        self._by_client = {}
        self.aggregations = 0
        self._evaluated = 0  # the last aggregation that was
        self._resumed: State | None = None
        self._any_moved = False  # whether any client's update was one
        self._any_missed = False  # whether any client's work couldn't be had
        self._own_loop = False  # whether this object's own start is under way, not one around it
        self._said: set[str] = set()
        self._why = ""  # the last reason against a client's work
        self._watch, self._quiet_until = WallClock(), 0.0  # of the log
        self.timeline = Timeline(self._took)
        self.left_out = LeftOut(self.config.compression)
        self.reset()

    def stop_when(self, stopped: Callable[[], bool]) -> None:
        """Ask something else at every poll whether the run is to end."""
        self.stopped = self.roster.stopped = stopped

    # Bound methods, not lambdas, so that a strategy can be pickled, and a copy has its own.
    def _in_real_time(self) -> bool:
        return self.pace.learns

    def _took(self, index: int, seconds: float, outcome: str) -> None:
        self.accounts.took(index, seconds, outcome)

    # ---- Its clock ------------------------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """The run's clock; another one may be put in its place between two runs."""
        return self.pace.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self._clock_follows = False
        self.pace = self._pace_of(clock)

    def _set_clock(self, grid: Grid) -> None:
        """Begin with a clock that suits the grid, unless one was given."""
        if self._clock_follows:
            on_devices = engine_of(grid) == DEPLOYMENT
            self.pace = self._pace_of(WallClock() if on_devices else VirtualClock())
            log.info("clock: %s", "real time, on devices" if on_devices else "virtual time, in a simulation")

    def _pace_of(self, clock: Clock) -> Pace:
        config = self.config
        return make_pace(
            clock,
            config.time_scenario,
            config.seed,
            config.time_budget,
            self.loads,
            config.availability,
            config.task_failure,
        )

    # ---- Going on where an earlier run was ------------------------------------------------------------------

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
        arrays = self._result.arrays
        values = [
            np.empty(0, Layout.of(arrays).narrow),
            *(array.numpy().ravel() for array in arrays.values()),
        ]
        return {
            "strategy": type(self).__name__,
            "aggregations": self.aggregations,
            "evaluated": self._evaluated,
            "run-id": self.run_id,
            "model": np.concatenate(values),
            **self.pace.state(),
            **self.optimizer.state(),
            **self.safeguards.state(),
            **self.roster.state(),
            **self.accounts.state(),
            **({} if self.graph is None else self.graph.state()),
            **self.memory.state(),
            **self.left_out.state(self.run_id),
        }

    def restore(self, state: State) -> None:
        """Let the next ``start`` go on from the ``state`` of an earlier run with the same config.

        In virtual time it then does what the earlier run would have done: to the last bit if the clients do, and
        within 1e-5 without rounds on a Grid that trains tasks together, as those under way are then with others. In
        real time, tasks that were under way are handed out anew.

        Raises
        ------
        ValueError
            If the state is another strategy's.
        """
        if state["strategy"] != type(self).__name__:
            raise ValueError(f"the state is that of {state['strategy']}, this is {type(self).__name__}")
        if not np.isfinite(state["model"]).all():
            raise ValueError("the model of its state isn't finite")
        self._resumed = state
        self.run_id = state.get("run-id", self.run_id)
        self.optimizer.restore(state)
        self.safeguards.restore(state)
        self.roster.restore(state)
        self.accounts.restore(state)
        if self.graph is not None:
            self.graph.restore(state)
        self.memory = Memory.restored(state)

    def reset(self) -> None:
        """Drop what an earlier run left: a new one begins."""
        config = self.config
        self.optimizer = make_optimizer(config.server_optimizer, config.server_lr or 1.0)
        self.safeguards = Safeguards(config, self._in_real_time)
        self.memory = Memory()
        self.accounts = Accounts()
        self.wrapped = Wrapped(type(self).__name__)
        self.run_id = int(streams.unpredictable().integers(2**62))
        self._refused_by_mods: set[int] = set()
        self.roster = Roster(
            config.min_clients,
            self.timeout,
            self.stopped,
            self.flower.weighted_by_key,
            self.flower.configrecord_key,
            self.flower.min_available_nodes,
        )
        self.graph: ClientGraph | None = None
        if config.client_weights == "adjacency":
            self.graph = ClientGraph(config.message_floor, config.neighbours)

    def bytes_kept(self) -> int:
        """Return how much of ``vectors`` there is, in bytes; in a file beyond a limit
        (strategies/core/client_vectors.py)."""
        return sum(vectors.matrix.nbytes for vectors in self.memory.vectors.values())

    # ---- Beginning and end ----------------------------------------------------------------------------------

    def begin(self, layout: Layout, model: Vector) -> None:
        """Prepare for a run from this model (D,), or for one that goes on: its ``memory`` is back then."""

    @abstractmethod
    def summary(self) -> None:
        """Log what is about to run."""

    @contextmanager
    def _running(self, grid: Grid, timeout: float) -> Iterator[None]:
        """Run this object's own loop, not one around it such as that of Flower's wrappers."""
        self.timeout = self.roster.timeout = timeout
        self.summary()
        self._set_clock(grid)
        self.left_out.look(grid, evaluating=not self.has_rounds and self.flower.fraction_evaluate > 0)
        self._own_loop = True
        try:
            yield
        finally:
            self._own_loop = False

    def _begin(self, initial_arrays: ArrayRecord) -> State | None:
        """Start from the initial model, or from the state to resume, which is returned."""
        state, self._resumed = self._resumed, None
        if state is None:
            self.reset()
        self.timeline.clear()
        self._result = Result(arrays=initial_arrays)
        self.aggregations = self._evaluated = 0
        self._any_moved = self._any_missed = False
        self._said.clear()
        self._take_layout(initial_arrays)
        if state is not None:
            layout = self._layout
            if len(state["model"]) != layout.size:
                raise ValueError(
                    f"the state is that of a model of {len(state['model'])} values, this one has {layout.size}"
                )
            self._result.arrays = layout.to_record(np.array(state["model"], dtype=np.float64))
            self.aggregations, self._evaluated = state["aggregations"], state["evaluated"]
            self.pace.restore(state)
            self.left_out.restore(state)
        self._take_model(self._initial_model(self._result.arrays))
        self.begin(self._layout, self.model)
        return state

    def _follow(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Take part in somebody else's loop, such as Flower's ``Strategy.start`` and its wrappers."""
        if self.past_the_sum:
            raise RunError(
                f"{type(self).__name__}: {self.past_the_sum}, which a wrapper around the strategy, such as one for "
                "privacy, knows nothing of; call the strategy's own start()"
            )
        if self.config.compression != NONE:
            raise RunError(
                f"compression = {self.config.compression!r}: a wrapper around the strategy, such as one for privacy, "
                "can't read compressed updates; allowed is none, or the strategy's own start()"
            )
        self._take_layout(arrays)
        if server_round == 1:  # the only sign that a run begins
            self._set_clock(grid)
            self.reset()
            self._take_model(self._initial_model(arrays))
            self.begin(self._layout, self.model)
            if self.optimizer.averages:
                log.warning(
                    "server_optimizer = %r: its result is the mean of the last two models, which a loop around the "
                    "strategy doesn't make: it has the last one",
                    self.config.server_optimizer,
                )

    def reply_bytes(self, arrays: ArrayRecord) -> int:
        """Return the bytes of a client's reply to this model, foretold; what makes replies smaller says so here."""
        if self.config.compression == NONE:
            return messages.num_bytes(arrays)
        return size_of(Layout.of(arrays), self.config.compression, self.flower.untrained)

    def reported(self, model: Vector) -> Vector:
        """Return the model (D,) that a run has come to, from the one (D,) that its next aggregation moves."""
        return self.optimizer.outcome(model)

    def _told_of(self, result: Result) -> Result:
        """Return the result with the model that is evaluated, reported and returned."""
        if not self.optimizer.averages:
            return result
        model = self.reported(self._layout.to_vector(result.arrays))
        return replace(result, arrays=self._layout.to_record(model))

    def _initial_model(self, arrays: ArrayRecord) -> Vector:
        """Return the model (D,) that a run begins with, or raise ArraysMismatchError: it is none."""
        try:
            return self._layout.to_vector(arrays)
        except ArraysMismatchError as error:
            of_values = NOT_FINITE in str(error) or OVERFLOWS in str(error)
            faults = self._layout.faults(arrays) if of_values else []
            raise ArraysMismatchError(
                f"the initial arrays are no model to train: {'; '.join(faults) or error}"
            ) from None

    def _take_layout(self, arrays: ArrayRecord) -> None:
        try:
            self._layout = Layout.of(arrays)
        except ArraysMismatchError as error:
            raise ArraysMismatchError(f"the initial arrays are no model to train: {error}") from None
        self.loads.model, self.loads.up = messages.num_bytes(arrays), self.reply_bytes(arrays)
        self._untrained_at = untrained_positions(self._layout, self.flower.untrained)

    def _take_model(self, model: Vector) -> None:
        self.model = model

    def _check_worked(self, initial_arrays: ArrayRecord) -> None:
        """Raise RunError if no client's work was ever accepted; say so if all of it still waits for others'."""
        tried = self.aggregations or self._any_missed
        if self.stays and tried and not self.stopped():
            log.warning(
                "%d aggregations were too few for %s, which waits until all clients that count have answered "
                "once: the model is the initial one",
                self.aggregations,
                type(self).__name__,
            )
        if tried and self._result.arrays is initial_arrays and not self.stopped():
            raise self.given_up(
                f"no client's work was accepted in {self.aggregations} aggregations, the model is the initial one"
            )

    def given_up(self, what: str) -> RunError:
        """Return the error that ends a run in which nobody's work counts, with the last reason against one's."""
        if not self._why:
            return RunError(f"{what}; the log names the reasons")
        reason = f"{what}; the last reason was {self._why!r}"
        if NOT_FINITE in self._why or OVERFLOWS in self._why:
            return DivergedError(f"{reason}: the clients' steps are too large (lr)")
        return RunError(reason)

    # ---- Compressed updates ---------------------------------------------------------------------------------

    def _compression(self) -> Compression | None:
        return compressing(self.config.compression, self._layout, self.flower.untrained)

    def _compression_fields(self) -> dict[str, Any]:
        """Return the fields of a training request that ask for a compressed update."""
        config, flower = self.config, self.flower
        return request_fields(
            config.compression, config.seed, self.run_id, flower.arrayrecord_key, flower.untrained
        )

    def _say_whole(self) -> None:
        self._say_once(
            "compression = %r: clients send their models whole; an app follows by the mod `compresses` of "
            "strategies.compression",
            self.config.compression,
        )

    def _say_once(self, text: str, *values: object) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text, *values)
