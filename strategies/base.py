"""What all strategies share: the handshake, importances, evaluation, and telling an observer how the run goes."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies import messages
from strategies.accounts import Accounts
from strategies.arrays import LARGEST_SQUARE, Layout, Vector
from strategies.chain import Bound, Contribution, Link, Tell
from strategies.client_graph import ClientGraph
from strategies.clock import Clock, VirtualClock
from strategies.errors import DivergedError, RunError
from strategies.exchange import never
from strategies.graph import FLOOR
from strategies.pace import Pace, make_pace
from strategies.progress import Observer
from strategies.reporting import Reporting
from strategies.roster import Client, Roster
from strategies.safeguards import Safeguards, SafeguardsConfig
from strategies.server_optimizer import make_optimizer
from strategies.time_scenario import TimeScenario
from strategies.weights import IMPORTANCES, Weights, importances

log = logging.getLogger("flwr.strategies")


@dataclass(frozen=True)
class StrategyConfig(SafeguardsConfig):
    """What every strategy can be told.

    Parameters
    ----------
    client_weights : str
        Importances p_i: ``samples``, ``uniform``, or ``adjacency``: how alike a client's data are to the others'.
    seed : int
        Fixes the draws of participants and of task times.
    eval_every : int
        Aggregations between two evaluations; the first and the last model are always evaluated.
    client_evaluation : bool
        Evaluate on the clients too, weighted by p_i.
    time_budget : float
        Stop before the clock passes this time (seconds); 0: no limit.
    time_scenario : str
        In virtual time, how long a client's task takes: see ``strategies.time_scenario.TimeScenario``.
    min_clients : int
        Clients to wait for before the first task.
    update_norm_bound : float
        S: a longer update Δ_i = w_i − w̄ is shortened to ‖Δ_i‖ = S and counted, and none moves the model further
        than S; 0: no bound.
    server_optimizer, server_lr : str, float
        How the global model moves by Σ d_i Δ_i, and η_g: see ``strategies.server_optimizer``.
    message_floor, neighbours : float, int
        Of the graph behind ``adjacency``: see ``strategies.client_graph.ClientGraph``.

    The others are those of ``strategies.safeguards.SafeguardsConfig``.
    """

    client_weights: str = "samples"
    seed: int = 0
    eval_every: int = 1
    client_evaluation: bool = False
    time_budget: float = 0.0
    time_scenario: str = "F80"
    min_clients: int = 1
    update_norm_bound: float = 0.0
    server_optimizer: str = "sgd"
    server_lr: float = 1.0
    message_floor: float = FLOOR
    neighbours: int = 0


# Told of every valid local model (D,), by client index, before it is aggregated; the array is on loan.
Witness = Callable[[int, Vector], None]

# What a run goes on from: arrays, and values that JSON holds.
State = dict[str, Any]


class FederatedStrategy(Reporting):
    """Base of the synchronous and the asynchronous loop.

    Parameters
    ----------
    config : StrategyConfig
        The algorithm's own frozen config.
    clock : Clock
        ``VirtualClock`` (default) or ``WallClock``.
    observer : callable
        Called with a ``Progress`` after every aggregation.
    witness : callable
        Called with the client's index and its model (D,) for every valid reply, before it is aggregated.
    stopped : callable
        Asked at every poll; True ends the run with the last complete aggregation.
    """

    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    config: StrategyConfig
    # Whether noise that protects data comes from the seed, as in a simulation, where there is nothing to protect.
    repeatable: bool = False
    #: Whether it goes round by round, each of models of one age, or takes work as it comes.
    has_rounds: ClassVar[bool] = True
    #: The global model (D,) that the next aggregation moves; don't write to it.
    model: Vector

    def __init__(
        self,
        config: StrategyConfig | None = None,
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
        witness: Witness | None = None,
        stopped: Callable[[], bool] = never,
    ) -> None:
        self.config = self._adapt(config or self.Config())
        if self.config.eval_every < 1:
            raise ValueError(f"eval_every = {self.config.eval_every}: must be 1 or more")
        if not self.config.time_scenario.startswith("trace:"):
            TimeScenario(self.config.time_scenario, 1)  # checks the name; a file needs the number of clients
        if self.config.client_weights not in (*IMPORTANCES, "adjacency"):
            raise ValueError(
                f"client_weights = {self.config.client_weights!r}: allowed are {', '.join(IMPORTANCES)}, adjacency"
            )
        self.reset()
        self.pace: Pace = self._pace_of(clock or VirtualClock())
        self.observer = observer
        self.witness = witness
        self.stopped = stopped
        self.timeout = 3600.0
        self.roster = Roster(self.config.min_clients, self.timeout, stopped)
        self.graph: ClientGraph | None = None
        if self.config.client_weights == "adjacency":
            self.graph = ClientGraph(self.config.message_floor, self.config.neighbours)
        self.clients: list[Client] = []
        self._asked: dict[int, int] = {}
        self.aggregations = 0
        self._evaluated = 0  # the last aggregation that was
        self._resumed: State | None = None
        self._any_moved = False  # whether any client's update was one
        self._any_missed = False  # whether any client's work couldn't be had

    def stop_when(self, stopped: Callable[[], bool]) -> None:
        """Ask something else at every poll whether the run is to end."""
        self.stopped = self.roster.stopped = stopped

    @property
    def clock(self) -> Clock:
        """The run's clock; another one may be put in its place between two runs."""
        return self.pace.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self.pace = self._pace_of(clock)

    def _pace_of(self, clock: Clock) -> Pace:
        config = self.config
        return make_pace(clock, config.time_scenario, config.seed, config.time_budget)

    # ---- What an algorithm fills in: see strategies/__init__.py -----------------------------------------------

    def check(self, num_clients: int) -> None:
        """Raise ValueError if the config is none for so many clients."""

    def local_rule(self) -> dict[str, float]:
        """Return the message fields that tell clients the algorithm's local step."""
        return {}

    def companions(self, clients: Sequence[Client]) -> Iterator[Mapping[str, Vector]]:
        """Yield for each of the clients what it is sent beside the model: vectors (D,) by record name.

        They arrive as records of the model's layout. By default none; a loop asks once for all that it sends.
        """
        return iter(())

    def received(self, client: Client, local_model: Vector) -> None:
        """Take note of a valid local model (D,), before it is aggregated; the array is on loan."""

    def counted(self, contribution: Contribution) -> Vector:
        """Return what of a contribution is weighted and summed, (D,); by default its update Δ_i."""
        return contribution.update

    def direction(self, total: Vector) -> Vector:
        """Return the update (D,) that the server optimizer takes, from the sum over what counted, (D,)."""
        return total

    def _adapt(self, config: StrategyConfig) -> StrategyConfig:
        """Return the config with what the algorithm demands."""
        return config

    # ---- Going on where an earlier run was ------------------------------------------------------------------

    def state(self) -> State:
        """Return what this run can be resumed from; an observer takes it, after any aggregation.

        Arrays may be those that the run goes on to work with: write them before the observer returns. Random
        streams need no state, each comes from the seed, the client and the task or round. A strategy with memory
        of its own adds it here, takes it back in ``restore`` and drops it in ``reset``.

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
            "model": np.concatenate(values),
            **self.pace.state(),
            **self.optimizer.state(),
            **self.safeguards.state(),
            **self.roster.state(),
            **(self.accounts.state() if self.roster.devices else {}),
            **({} if self.graph is None else self.graph.state()),
        }

    def restore(self, state: State) -> None:
        """Let the next ``start`` go on from the ``state`` of an earlier run with the same config.

        In virtual time it then does what the earlier run would have done, to the last bit. In real time, tasks that
        were under way are handed out anew.

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
        self.optimizer.restore(state)
        self.safeguards.restore(state)
        self.roster.restore(state)
        self.accounts.restore(state)
        if self.graph is not None:
            self.graph.restore(state)

    def reset(self) -> None:
        """Drop what an earlier run left: a new one begins."""
        self.optimizer = make_optimizer(self.config.server_optimizer, self.config.server_lr)
        self.safeguards = Safeguards(self.config, lambda: self.pace.learns)
        self.accounts = Accounts()

    def _begin(self, initial_arrays: ArrayRecord) -> State | None:
        """Start from the initial model, or from the state to resume, which is returned."""
        state, self._resumed = self._resumed, None
        if state is None:
            self.reset()
        self._result = Result(arrays=initial_arrays)
        self.aggregations = self._evaluated = 0
        self._any_moved = self._any_missed = False
        if state is not None:
            layout = Layout.of(initial_arrays)
            if len(state["model"]) != layout.size:
                raise ValueError(
                    f"the state is that of a model of {len(state['model'])} values, this one has {layout.size}"
                )
            self._result.arrays = layout.to_record(np.array(state["model"], dtype=np.float64))
            self.aggregations, self._evaluated = state["aggregations"], state["evaluated"]
            self.pace.restore(state)
        return state

    def summary(self) -> None:
        """Log the strategy and its config."""
        log.info("%s: %s", type(self).__name__, self.config)

    def _moved(self, model: Vector, update: Vector) -> Vector:
        """Return the next global model (D,), by the server optimizer, from this one and the update (D,).

        Raises
        ------
        DivergedError
            If it is none that can be trained on.
        """
        moved = self.optimizer.step(model, update)
        number = self.aggregations + 1
        if not float(np.einsum("i,i->", moved, moved)) <= LARGEST_SQUARE:
            raise DivergedError(
                f"aggregation {number} made a model that isn't finite, or too large to train on: the steps are too "
                "large (lr, server_lr), or the noise is"
            )
        if number == 1 and not self._any_moved:
            log.warning(
                "the first aggregation left the model as it was: are the steps (lr, server_lr) too small?"
            )
        return moved

    def _look_at(self, update: Vector) -> Vector:
        """Note whether any client's update (D,) is one."""
        self._any_moved = self._any_moved or bool(update.any())
        return update

    def _check_worked(self, initial_arrays: ArrayRecord) -> None:
        """Raise RunError if no client's work was ever accepted."""
        tried = self.aggregations or self._any_missed
        if tried and self._result.arrays is initial_arrays and not self.stopped():
            raise RunError(
                f"no client's work was accepted in {self.aggregations} aggregations, the model is the initial one; "
                "the log names the reasons"
            )

    def importance(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        if not self.clients:
            return {}
        weights = self._importances(self.clients).tolist()
        return {client.index: p for client, p in zip(self.clients, weights, strict=True)}

    def _set_timeout(self, timeout: float) -> None:
        self.timeout = self.roster.timeout = timeout

    def _train_config(
        self, client: Client, server_round: int, task: int, config: ConfigRecord
    ) -> ConfigRecord:
        own = config.copy()  # the caller's stays as it is
        own[messages.SERVER_ROUND] = server_round
        own[messages.CLIENT] = client.index
        own[messages.TASK] = task
        for key, value in self.local_rule().items():
            own[key] = value
        return own

    def _take_part(self, grid: Grid, config: ConfigRecord, *, wait: bool = True) -> list[Client]:
        """Look who is there; with a graph, who is in it. Without ``wait``, newcomers are in once they answer."""
        clients = self.roster.refresh(grid, config) if wait else self.roster.look(grid, config)
        if self.graph is not None and clients:
            self.graph.guarded = self.safeguards.active
            clients = self.graph.refresh(grid, clients, config, self.timeout, self.stopped)
        self.pace.enrol(clients)
        return clients

    def _importances(self, clients: list[Client]) -> Weights:
        if self.graph is not None:
            return self.graph.weights(clients)
        sizes = [client.num_examples for client in clients]
        if any(size is None for size in sizes):
            # Sizes come with the replies; until then all count the same (strategies/roster.py).
            return importances("uniform", [1] * len(clients))
        return self._by_size(clients, [size or 0 for size in sizes])

    def _by_size(self, clients: Sequence[Client], sizes: Sequence[int]) -> Weights:
        """Return p_i (n,) of clients by the sizes that they tell."""
        kind = self.config.client_weights
        return importances(kind, self.safeguards.sizes(clients, sizes) if kind == "samples" else sizes)

    def _links(self) -> list[Link | None]:
        """Return what a local model goes through between the check and the sum."""
        bound, witness = self.config.update_norm_bound, self.witness
        return [
            Bound(bound) if bound else None,
            self.safeguards.norms if self.safeguards.learns_norms else None,
            Tell(self.received),
            Tell(lambda client, model: witness(client.index, model)) if witness else None,
        ]

    def most_tasks(self) -> int:
        """Return how many tasks a client has been handed at most; every round counts, whoever took part."""
        return self.aggregations
