"""The event loop of the asynchronous strategies, and the hooks that a method implements.

Fraboni et al. 2023, algorithm 1 and eq. 6. Clients work at their own speed on the model they were sent:

    θ^{n+1} = θ^n + η_g Σ_{i ∈ S_n} d_i Δ_i(ρ_i(n)),    Δ_i = trained model − the model that client was *sent*

S_n are the clients whose work arrived since the last aggregation; the new model goes only to them. A method says
*when* to aggregate and with *which* d_i, and is a subclass with two methods. For the weight it tells how many
aggregations pass from one contribution of client i to the next, P_i: then d_i = p_i P_i makes every client count
p_i in the long run ("time-based"), while the same d for all ("identical") favours the fast. It may also say what
becomes of work that is late, and whom to send the model.

What happens next, in virtual or in real time, strategies/events/event_stream.py knows; who works on what,
strategies/events/tasks.py; who is sent the model, strategies/events/dispatcher.py; what clients count,
strategies/events/contribution_weights.py.

Nothing stalls the loop: every task has a deadline and its message a time to live. An error, a silent loss or an
invalid model is a miss, named in the log; after ``MAX_MISSES`` in a row the client is dropped from p, and asked again
later; where nobody ever does better, the run ends. A late reply to a task that was given up is never pulled, and none
is counted twice.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from strategies import streams
from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.core.capabilities import hook
from strategies.core.config import OBSERVED, AsyncConfigBase, AsynchronousConfig, StrategyConfig
from strategies.core.reporter import EvaluateFn, StopFn
from strategies.core.strategy import FederatedStrategy
from strategies.events.executors import ByMaskedSums, ByUpdates
from strategies.events.pump import EventPump
from strategies.events.session import EventSession
from strategies.flower.errors import RunError
from strategies.timing.scheduler import Times
from strategies.updates.pipeline import Contribution

log = logging.getLogger("flwr.strategies")

# Flower's hooks of a round, and what to override in their place.
_INSTEAD = {
    "configure_train": "select_idle, local_rule, extra_records or extra_vectors",
    "aggregate_train": "accept, weigh, transform_update or aggregate",
}


class AsynchronousStrategy(FederatedStrategy):
    """The event loop; a method implements ``ready`` or ``interval``, and further hooks where needed.

    The parameters are those of ``strategies.FederatedStrategy``; ``num_rounds`` of ``start`` are aggregations.
    """

    Config: ClassVar[type[StrategyConfig]] = AsynchronousConfig
    config: AsyncConfigBase
    has_rounds: ClassVar[bool] = False
    #: Seconds between two aggregations, 1e-9 (``strategies.clock.RESOLUTION``) or more; None: when ``ready`` says so.
    interval: float | None = None
    #: How contributions weigh, ``time-based`` or ``identical``, where the config has no ``aggregation_weights``.
    default_aggregation_weights: ClassVar[str] = "time-based"
    #: Whether a client goes on working while its work waits for the next aggregation.
    trains_while_waiting: ClassVar[bool] = False

    session: EventSession

    def __init__(self, *arguments: Any, **run: Any) -> None:
        for name in self.capabilities.round_hooks:
            raise TypeError(
                f"{type(self).__name__}.{name} would never be called, as there are no rounds: override "
                f"{_INSTEAD[name]}"
            )
        super().__init__(*arguments, **run)

    def _new_session(self) -> EventSession:
        session = EventSession(self)
        masks = self.config.uses_secure_sums
        session.executor = ByMaskedSums(session) if masks else ByUpdates(session)
        return session

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for the robust rule."""
        if (robust := self.session.robust) is not None and num_clients < (least := robust.rule.least):
            raise ValueError(f"{robust.rule.text}: needs {least} clients or more, there are {num_clients}")

    # ---- What a method fills in: see strategies/__init__.py ---------------------------------------------------

    @hook
    def ready(self, arrived: int) -> bool:
        """Return True to aggregate, now that ``arrived`` contributions wait."""
        return False

    @hook
    def accept(self, contribution: Contribution) -> bool:
        """Return True if a contribution counts; otherwise it is discarded, and its client is free at once.

        By default where its staleness is ``is_fresh_enough``.
        """
        return self.is_fresh_enough(contribution.staleness)

    @hook
    def is_fresh_enough(self, staleness: int) -> bool:
        """Return True if work of this staleness counts; the length of a run may follow from it."""
        return True

    def select_idle(self, free: Sequence[ClientState]) -> Iterable[ClientState]:
        """Return the clients that get the model now.

        Asked whenever clients have become free: at the start, when one is new, has answered or missed, when their
        work went into a new model, and when one that was dropped may be asked again. The answer may name any other
        client as well; those that have a task under way are passed over.

        Parameters
        ----------
        free : sequence of ClientState
            The clients that the event freed. By default they get the model, unless their work waits for the next
            aggregation: then they get that one's. With a ``concurrency`` the free places go to any idle clients.
        """
        if not self.concurrency:
            return [member for member in free if self.trains_while_waiting or not member.waiting]
        task_table, idle = self.session.task_table, self.session.task_table.free
        if not (places := min(max(self.concurrency - len(task_table.tasks), 0), len(idle))):
            return []
        rng = streams.generator(self.config.seed, "next-clients", task_table.dispatched)
        return [task_table.members[idle[place]] for place in rng.choice(len(idle), places, replace=False)]

    def resend_model(self, client: Client) -> tuple[int, NDArray[Any]] | None:
        """Return the model (D,) that a client is sent in place of the newest one, and its version; None: the newest.

        The version is the number of the aggregation that made the model. A client that has just delivered a
        ``Contribution`` goes on with the model that it has, if its ``version`` and ``base`` are returned.
        """
        return None

    @hook
    def task_steps(self, client: Client) -> int:
        """Return the number of local steps of a client's task that is sent now; 0: the client's usual work.

        Clients read it from the field ``strategies.steps``. In virtual time a task of ``reference_steps`` steps takes
        as long as the time scenario says, and one of k times as many k times as long.
        """
        return 0

    @property
    def reference_steps(self) -> int:
        """The number of local steps of a task that takes as long as the time scenario says (``task_steps``)."""
        return 0

    def on_contribution(self, contribution: Contribution) -> Contribution:
        """Take note of an accepted contribution; return what of it waits in the buffer, by default all."""
        return contribution

    def take_from_buffer(self, waiting: Sequence[Contribution]) -> Sequence[Contribution]:
        """Return the contributions that the next aggregation takes of those that wait; the others wait on."""
        return waiting

    @hook
    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return the weight d_i of each contribution of an aggregation, which come in client order.

        The run ends with a RunError unless it is a finite number >= 0 for each.
        """
        weight = self.session.contribution_weights.weight
        return [weight(c.client.index) * self.discount(c.staleness) for c in contributions]

    @hook
    def discount(self, staleness: int) -> float:
        """Return the factor of a contribution's weight for its staleness, 1 for work on the present model."""
        return 1.0

    @property
    def discounts_staleness(self) -> bool:
        """Whether d_i is known only when a contribution comes: reports then have the mean over contributions."""
        return self.capabilities.discounts_staleness

    @hook
    def contribution_periods(self, times: Times) -> Times:
        """Return P_i (C,): aggregations from one contribution of client i to the next, by its task time τ_i (C,).

        Where clients come and go, τ_i is the mean time from one contribution of a client that waits for no other to
        the next: its work, what it works for nothing, and when it isn't there; infinite if it is never done.

        By default as observed since the client is there (``strategies.events.observed_periods``). The run ends with
        a RunError unless it is a number >= 0, or infinity, for each client.
        """
        return self.session.contribution_weights.observed_periods()

    def expected_periods(self, times: Times) -> Times:
        """Return the expected P_i, where random task times make them differ from ``contribution_periods``."""
        return self.contribution_periods(times)

    def identical_weight(self, num_clients: int) -> float:
        """Return d for ``aggregation_weights = "identical"``."""
        return 1.0

    def weights_over_time(self) -> Mapping[int, float] | None:
        """Return Σ of the weights with which each client's updates moved the model so far, by client index.

        A method whose server goes on using an update after the aggregation in which it came, for a time that isn't
        known in advance, says here what that came to: the run's shares q_i are taken from it. None: from d_i and P_i.
        """
        return None

    def predict_num_aggregations(self, times: Times, seconds: float) -> int | None:
        """Return the number of aggregations in so many seconds, by the task times τ_i (C,).

        A run whose number of aggregations isn't given takes it from here. None: it follows from arrivals or buffers.
        """
        return None

    def default_server_lr(self) -> float:
        """Return η_g, by default such that one contribution of each client at work moves the model as a round does.

        See ``strategies.events.contribution_weights``. A method with a ``weigh`` of its own, whose weights the d_i
        there aren't, returns its own.
        """
        return self.session.contribution_weights.step(self.max_concurrency)

    def buffer_lr(self) -> float:
        """Return η of strategies/updates/buffers.py: the step by which an arrival moves the buffers."""
        return self.default_server_lr()

    @property
    def concurrency(self) -> int:
        """M_c, the number of clients at work at once; 0: all. By ``fraction_train`` a share of those that count."""
        fraction, number = self.session.run.flower.fraction_train, len(self.session.task_table.active_clients)
        if fraction == 1:
            return self.config.concurrency
        return max(int(fraction * number), self.session.run.flower.min_train_nodes, 1)

    @property
    def max_concurrency(self) -> int:
        """τ_c, the largest number of clients at work at once."""
        number = max(len(self.session.task_table.active_clients), 1)
        return min(self.concurrency or number, number)

    @property
    def observes_periods(self) -> bool:
        """Whether P_i are observed: they can't be known beforehand, or the config asks for observed ones."""
        unknown = (
            self.session.contribution_weights.aggregation_weights == OBSERVED
            or not self.capabilities.knows_periods
        )
        return bool(self.concurrency) or unknown

    # ---- Flower's hooks, which a loop without rounds has no use for --------------------------------------------

    @hook
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: there are no rounds."""
        self._refuse_rounds()

    @hook
    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse: there are no rounds."""
        self._refuse_rounds()

    def _refuse_rounds(self) -> NoReturn:
        raise RunError(
            f"{type(self).__name__} has no rounds: call its own start(), not one around it, such as that of Flower's "
            "differential-privacy wrappers"
        )

    # ---- The loop ----------------------------------------------------------------------------------------------

    @hook
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        should_stop: StopFn | None = None,
    ) -> Result:
        """Run until ``num_rounds`` aggregations are done, or the time budget is spent.

        On the model that the last ``start`` of this object returned, the run goes on from there; on another model it
        begins anew.

        Parameters
        ----------
        timeout : float
            Real seconds after which a task is given up; also the time to live of its message. In real time a task is
            given up earlier, after five times the client's usual or last time, but not within a minute
            (``strategies.timing.scheduler.SHORTEST_DEADLINE``); of a client that is dropped, each later.
        evaluate_config : ConfigRecord, optional
            By default ``train_config``, where Flower's strategies send an empty one.
        should_stop : callable, optional
            Called after each aggregation with its number and the result so far; True ends the run with that result.

        Returns
        -------
        Result
            The final model, and the metrics by aggregation.
        """
        if not self.capabilities.makes_models and self.interval is None:
            raise RunError(f"{type(self).__name__} makes no model: it fills in neither ready nor interval")
        if not (initial_arrays or self.run_options.only_own_arrays):
            raise RunError(
                f"{type(self).__name__}: initial_arrays has no arrays, and without rounds no replies make the first "
                "model: give the initial model"
            )
        session: EventSession = self._fresh_session(initial_arrays)
        session.stop_after = should_stop
        with session.opened(grid, initial_arrays, timeout, train_config, evaluate_config, evaluate_fn):
            pump, resumed = EventPump(session), session.begin(num_rounds)
            pump.begin(resumed=resumed)
            if resumed:
                session.evaluate_initial()
            else:
                session.report_initial()
            for event in session.remaining_events():  # a reply, an interval's end, a client to ask again, …
                pump.handle(event)
            return session.close()
