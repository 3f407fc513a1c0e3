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
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from strategies import streams
from strategies.clients.accounts import ACCEPTED, LOST_IN_A_ROW, MAX_MISSES
from strategies.clients.client_metrics import beside
from strategies.clients.member import Member
from strategies.clients.roster import Client, sized_by
from strategies.clients.weights import of_each
from strategies.core.capabilities import hook
from strategies.core.config import (
    OBSERVED,
    AsynchronousConfig,
    EventsConfig,
    PrivateEventsConfig,
    RobustConfig,
    SecureConfig,
    StrategyConfig,
)
from strategies.core.reporter import EvaluateFn
from strategies.core.requests import check_local_noise
from strategies.core.strategy import FederatedStrategy
from strategies.events.arrival_rule import ArrivalRule, check_arrivals
from strategies.events.contribution_weights import ContributionWeights
from strategies.events.dispatcher import FIRST, Dispatcher
from strategies.events.evaluation import RealTimeEvaluation
from strategies.events.event_stream import Arrival, Event, Look, PatienceOver, Tick, checked_interval, events
from strategies.events.statistics import Tally
from strategies.events.tasks import Held, Retry, Task, TaskLedger, Turn, Wake
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import Mail
from strategies.flower.grids import Work
from strategies.flower.packing import packing
from strategies.timing.availability import NEVER
from strategies.timing.scheduler import Times
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Check, Contribution, Local, Noise, fault_of
from strategies.updates.safeguards import PATIENCE

if TYPE_CHECKING:
    from strategies.core.masked_sum import Missed
    from strategies.events.secure_groups import Group, SecureGroups

log = logging.getLogger("flwr.strategies")

RETRY_AFTER = 10.0  # task times until a dropped client is asked again
NOBODY = "no client is left: each was lost or failed"
NO_MODEL = "the run is over, at %g s, before its first model was made: %d contributions wait for it"
STUCK = (
    "ready(%d) is False, and nobody is at work: %d contributions wait, and %d of %d clients count; %s must be "
    "content with len(self.ledger.counting)"
)
TOO_FEW = "aggregation %d: %d contributions are fewer than the %d for %s, the model stays as it is"
LOSES = (
    "clients go away while they work (the first: %s, task %d, at %g s): such tasks are lost, see lost-tasks"
)

# Flower's hooks of a round, and what to override in their place.
_INSTEAD = {
    "configure_train": "choose, local_rule, outgoing or companions",
    "aggregate_train": "accept, weigh, counted or aggregate",
}


class AsynchronousStrategy(FederatedStrategy):
    """The event loop; a method implements ``ready`` or ``interval``, and further hooks where needed.

    The parameters are those of ``strategies.FederatedStrategy``; ``num_rounds`` of ``start`` are aggregations.

    Attributes
    ----------
    ledger : TaskLedger
        Who takes part, who works on what, and what waits for the next aggregation.
    contribution_weights : ContributionWeights
        What every client counts.
    dispatcher : Dispatcher
        Who is sent the model.
    robust : ArrivalRule, optional
        The robust rule, in place of the weighted sum.
    secure : SecureGroups, optional
        The sums of masked updates, in place of those that the server sees.
    total : int
        Aggregations that were asked for.
    """

    Config: ClassVar[type[StrategyConfig]] = AsynchronousConfig
    config: EventsConfig
    has_rounds: ClassVar[bool] = False
    #: Seconds between two aggregations, 1e-9 (``strategies.clock.RESOLUTION``) or more; None: when ``ready`` says so.
    interval: float | None = None
    #: How contributions weigh, ``time-based`` or ``identical``, where the config has no ``aggregation_weights``.
    weighing: ClassVar[str] = "time-based"
    #: Whether a client goes on working while its work waits for the next aggregation.
    works_on: ClassVar[bool] = False

    _mail: Mail
    _check: Check
    _train_config: ConfigRecord
    _evaluate_config: ConfigRecord
    _evaluate_fn: EvaluateFn | None
    _evaluation: RealTimeEvaluation

    def __init__(self, *arguments: Any, **run: Any) -> None:
        for name in self.capabilities.round_hooks:
            raise TypeError(
                f"{type(self).__name__}.{name} would never be called, as there are no rounds: override "
                f"{_INSTEAD[name]}"
            )
        super().__init__(*arguments, **run)
        self.total = 0
        private = self.config if isinstance(self.config, PrivateEventsConfig) else None
        most = private.dp_max_contributions if private is not None and private.dp == "central" else 0
        self.ledger = TaskLedger(self.run, works_on=self.works_on, most=most)
        if self.receiver.clip is not None:
            if self.works_on or self.capabilities.aggregates:
                raise ValueError(
                    f"dp = 'central': {type(self).__name__} puts updates together by itself, or lets clients work on "
                    "while theirs wait (aggregate, works_on); allowed are none, local"
                )
            self.server_step.hide = self._hide
        weighing = getattr(self.config, "aggregation_weights", self.weighing)
        self.robust, self.secure = self._new_rule(weighing), self._new_secure()
        self.contribution_weights = ContributionWeights(
            self.run,
            self.ledger,
            self.population,
            self.safeguards,
            weighing,
            summed=self.robust is None,
            observes=partial(getattr, self, "observes_periods"),
            discounts=partial(getattr, self, "discounts"),
            interval=self._seconds_between,
            periods=self.periods,
            expected_periods=self.expected_periods,
            identical_weight=self.identical_weight,
        )
        self.dispatcher = Dispatcher(
            self.run,
            self.ledger,
            self.requests,
            self.accounts,
            self.timeline,
            without_messages=not (
                self.capabilities.writes_requests or self.compressed is not None or self.secure is not None
            ),
            places=partial(getattr, self, "concurrency"),
            local_rule=self.local_rule,
            companions=self.companions,
            choose=self.choose,
            sends_again=self.sends_again,
            steps=self.task_steps,
            timed_steps=self.timed_steps,
        )
        self._lost_in_a_row = self._refused_in_a_row = 0

    def _new_rule(self, weighing: str) -> ArrivalRule | None:
        """Return the robust rule over arrivals, None for the weighted sum; refuse one where they aren't equals."""
        config, able = self.config, self.capabilities
        if not isinstance(config, RobustConfig) or (rule := config.rule()) is None:
            return None
        check_arrivals(
            type(self).__name__,
            rule,
            config,
            weighing,
            able,
            discounts=self.discounts,
        )
        window = max(2 * config.faulty_clients + 3, rule.least) if able.every_arrival else 0
        return ArrivalRule(rule, window, config.update_norm_bound)

    def _new_secure(self) -> "SecureGroups | None":
        """Return the sums of masked updates; None if clients don't mask theirs."""
        if not isinstance(self.config, SecureConfig) or not self.config.secure_sums:
            return None
        from strategies.events.secure_groups import (
            SecureGroups,
            check_secure,
        )  # loads libraries of cryptography

        check_secure(type(self).__name__, self.config, self.capabilities)
        return SecureGroups(self.config, self.run, self.pending, self.receiver)

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for the robust rule."""
        if self.robust is not None and num_clients < (least := self.robust.rule.least):
            raise ValueError(
                f"{self.robust.rule.text}: needs {least} clients or more, there are {num_clients}"
            )

    # ---- What a method fills in: see strategies/__init__.py ---------------------------------------------------

    @hook
    def ready(self, arrived: int) -> bool:
        """Return True to aggregate, now that ``arrived`` contributions wait."""
        return False

    @hook
    def accept(self, contribution: Contribution) -> bool:
        """Return True if a contribution counts; otherwise it is discarded, and its client is free at once.

        By default where its staleness is ``fresh``.
        """
        return self.fresh(contribution.staleness)

    @hook
    def fresh(self, staleness: int) -> bool:
        """Return True if work of this staleness counts; the length of a run may follow from it."""
        return True

    def choose(self, free: Sequence[Member]) -> Iterable[Member]:
        """Return the clients that get the model now.

        Asked whenever clients have become free: at the start, when one is new, has answered or missed, when their
        work went into a new model, and when one that was dropped may be asked again. The answer may name any other
        client as well; those that have a task under way are passed over.

        Parameters
        ----------
        free : sequence of Member
            The clients that the event freed. By default they get the model, unless their work waits for the next
            aggregation: then they get that one's. With a ``concurrency`` the free places go to any idle clients.
        """
        if not self.concurrency:
            return [member for member in free if self.works_on or not member.waiting]
        ledger, idle = self.ledger, self.ledger.free
        if not (places := min(max(self.concurrency - len(ledger.tasks), 0), len(idle))):
            return []
        rng = streams.generator(self.config.seed, "next-clients", ledger.dispatched)
        return [ledger.members[idle[place]] for place in rng.choice(len(idle), places, replace=False)]

    def sends_again(self, client: Client) -> tuple[int, NDArray[Any]] | None:
        """Return the model (D,) that a client is sent in place of the newest one, and its version; None: the newest.

        The version is the number of the aggregation that made the model. A client that has just delivered a
        ``Contribution`` goes on with the model that it has, if its ``version`` and ``base`` are returned.
        """
        return None

    @hook
    def task_steps(self, client: Client) -> int:
        """Return the number of local steps of a client's task that is sent now; 0: the client's usual work.

        Clients read it from the field ``strategies.steps``. In virtual time a task of ``timed_steps`` steps takes as
        long as the time scenario says, and one of k times as many k times as long.
        """
        return 0

    @property
    def timed_steps(self) -> int:
        """The number of local steps of a task that takes as long as the time scenario says (``task_steps``)."""
        return 0

    def takes(self, waiting: Sequence[Contribution]) -> Sequence[Contribution]:
        """Return the contributions that the next aggregation takes of those that wait; the others wait on."""
        return waiting

    @hook
    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return the weight d_i of each contribution of an aggregation, which come in client order.

        The run ends with a RunError unless it is a finite number >= 0 for each.
        """
        weight = self.contribution_weights.weight
        return [weight(c.client.index) * self.discount(c.staleness) for c in contributions]

    @hook
    def discount(self, staleness: int) -> float:
        """Return the factor of a contribution's weight for its staleness, 1 for work on the present model."""
        return 1.0

    @property
    def discounts(self) -> bool:
        """Whether d_i is known only when a contribution comes: reports then have the mean over contributions."""
        return self.capabilities.discounts_staleness

    @hook
    def periods(self, times: Times) -> Times:
        """Return P_i (C,): aggregations from one contribution of client i to the next, by its task time τ_i (C,).

        Where clients come and go, τ_i is the mean time from one contribution of a client that waits for no other to
        the next: its work, what it works for nothing, and when it isn't there; infinite if it is never done.

        By default as observed since the client is there (``strategies.events.observed_periods``). The run ends with
        a RunError unless it is a number >= 0, or infinity, for each client.
        """
        return self.contribution_weights.observed_periods()

    def expected_periods(self, times: Times) -> Times:
        """Return the expected P_i, where random task times make them differ from ``periods``."""
        return self.periods(times)

    def identical_weight(self, num_clients: int) -> float:
        """Return d for ``aggregation_weights = "identical"``."""
        return 1.0

    def foreseen_aggregations(self, times: Times, seconds: float) -> int | None:
        """Return the number of aggregations in so many seconds, by the task times τ_i (C,).

        A run whose number of aggregations isn't given takes it from here. None: it follows from arrivals or buffers.
        """
        return None

    def own_lr(self) -> float:
        """Return η_g, by default such that one contribution of each client at work moves the model as a round does.

        See ``strategies.events.contribution_weights``. A method with a ``weigh`` of its own, whose weights the d_i
        there aren't, returns its own.
        """
        return self.contribution_weights.step(self.most_at_work)

    def untrained_lr(self) -> float:
        """Return η of strategies/updates/buffers.py: the step by which an arrival moves the buffers."""
        return self.own_lr()

    @property
    def concurrency(self) -> int:
        """M_c, the number of clients at work at once; 0: all. By ``fraction_train`` a share of those that count."""
        fraction, number = self.run.flower.fraction_train, len(self.ledger.counting)
        if fraction == 1:
            return self.config.concurrency
        return max(int(fraction * number), self.run.flower.min_train_nodes, 1)

    def _log_concurrency(self) -> None:
        """Log what ``fraction_train`` means without rounds."""
        if self.run.flower.fraction_train < 1:
            log.info(
                "fraction_train = %g: %d of %d clients work at once, as there are no rounds (concurrency)",
                self.run.flower.fraction_train,
                self.most_at_work,
                len(self.ledger.counting),
            )

    @property
    def most_at_work(self) -> int:
        """τ_c, the largest number of clients at work at once."""
        number = max(len(self.ledger.counting), 1)
        return min(self.concurrency or number, number)

    @property
    def observes_periods(self) -> bool:
        """Whether P_i are observed: they can't be known beforehand, or the config asks for observed ones."""
        unknown = self.contribution_weights.weighing == OBSERVED or not self.capabilities.knows_periods
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
    ) -> Result:
        """Run until ``num_rounds`` aggregations are done, or the time budget is spent.

        Parameters
        ----------
        timeout : float
            Real seconds after which a task is given up; also the time to live of its message. In real time a task is
            given up earlier, after five times the client's usual or last time, but not within a minute
            (``strategies.timing.scheduler.SHORTEST_DEADLINE``); of a client that is dropped, each later.
        evaluate_config : ConfigRecord, optional
            By default ``train_config``, where Flower's strategies send an empty one.

        Returns
        -------
        Result
            The final model, and the metrics by aggregation.
        """
        if not self.capabilities.makes_models and self.interval is None:
            raise RunError(f"{type(self).__name__} makes no model: it fills in neither ready nor interval")
        run, ledger = self.run, self.ledger
        initial_arrays = run.travelling(initial_arrays)
        grid = run.sending(packing(grid, self.receiver.most_bytes))
        self._mail, self.total = Mail(grid, timeout, run.stopped), num_rounds
        self._train_config = ConfigRecord() if train_config is None else train_config
        self._evaluate_config = self._train_config if evaluate_config is None else evaluate_config
        self._evaluate_fn = evaluate_fn
        check_local_noise(self.config, self._train_config)
        with self._running(grid, timeout):
            state = self._begin(initial_arrays)
            self._check, self._lost_in_a_row, self._refused_in_a_row = self.receiver.check(), 0, 0
            self._evaluation = RealTimeEvaluation(
                run, self.evaluator, self.pending, self._mail, self.aggregate_evaluate
            )
            working = self._goes_on()
            if working:
                run.clients = self.population.look(grid, self._train_config)
                if self.secure is not None:
                    self.secure.look(grid)
            self.dispatcher.begin(grid, self._mail, self._train_config)
            if state is None:
                run.pace.begin()
            else:
                self.dispatcher.resume(more=working)
            if working and not run.stopped():
                self.check(len(ledger.members.keys() | {client.index for client in run.clients}))
                self.dispatcher.welcome(run.clients)
                self._log_concurrency()
            self.reporter.stability.moved(run.model, 0.0)
            if state is None:
                self.reporter.report(
                    0,
                    run.result,
                    {},
                    evaluate_fn=evaluate_fn,
                    shares=dict,
                    losses=self.contribution_weights.losses,
                )
            happening = events(run.pace, ledger, self._mail, self._seconds_between)
            while self._goes_on() and not run.stopped():
                if ledger.all_spent:
                    log.warning("every client has contributed as often as it may: the run ends")
                    break
                self._check_waiting()
                if (event := next(happening, None)) is None:
                    if not run.aggregations and not run.stopped():
                        log.warning(NO_MODEL, run.pace.now(), len(ledger.buffer) + len(ledger.held))
                    break
                self._handle(event)
            if ledger.since.unevaluated:
                self._report_evaluation(last=True)
            run.check_worked(initial_arrays)
            self.contribution_weights.log_objective()
            return run.outcome(run.result)

    def _handle(self, event: Event) -> None:
        match event:
            case Arrival(task, reply):
                self._arrive(task, reply)
            case Retry(member) | Turn(member) if self.ledger.members.get(member.client.index) is not member:
                pass  # the client is forgotten
            case Retry(member):
                self.dispatcher.retry(member)
            case Turn(member):
                self.dispatcher.turn(member)
                self._go_on_without(member)
            case Wake():
                if self._is_ready():
                    self._aggregate()
            case PatienceOver():
                self._release()
            case Tick():
                if self.ledger.buffer:  # an interval with nothing in it is no aggregation
                    self._aggregate()
            case Look():
                self._look()

    def _look(self) -> None:
        """Look up the connected clients; dispatch the model to clients that are new, or back."""
        self._release()
        run = self.run
        clients = self.population.look(self._mail.grid, self._train_config, wait=False)
        if clients is not run.clients:
            before = {client.index for client in run.clients}
            if before and not clients and run.pace.real_time:
                log.warning("no client is connected, the run waits for one")
            run.clients = clients
            for member in [*self.ledger.members.values()]:
                if member.client.node_id in self.population.roster.refused:
                    self.ledger.forget(member)
            self.dispatcher.welcome(clients)
            # Who was away is asked at once, not only when its next try is due.
            self.dispatcher.dispatch([self.ledger.members[c.index] for c in clients if c.index not in before])

    # ---- What becomes of a task -------------------------------------------------------------------------------

    def _arrive(self, task: Task, reply: Message | Work | None) -> None:
        """Handle a reply to a task, or its absence."""
        ledger, pace, guards = self.ledger, self.run.pace, self.safeguards
        member = ledger.close(task)
        self.timeline.arrived(member.client.index, pace.now())
        if task.gone:
            self._lose(member)
            return
        base = task.companions.get(self.run.flower.arrayrecord_key)  # what was sent in place of the model
        try:
            if self.secure is not None:
                local = self.secure.kept(task, reply)
            else:
                sent = task.base if base is None else self.run.layout.rounded(base)
                local = self._check(member.client, reply, sent)
        except ArraysMismatchError as error:
            self._miss(member, str(error), fault_of(reply))
            return
        assert reply is not None
        # Not before: a dropped client that is asked again, and fails again, would begin the count anew for ever.
        self._lost_in_a_row = 0
        if pace.real_time:
            self.contribution_weights.expire()
        if member.dropped:
            log.warning("%s answers again and counts again", member.client, extra=member.client.fields)
            ledger.changed()
        if self.secure is None or member.dropped:  # misses in sums count until the client is in one
            member.count_again(self.run.aggregations)
        now = pace.now()
        member.took(now - task.sent)
        if guards.must_wait(len(ledger.counting), self.run.buffers) and now < ledger.patient_until:
            if not ledger.held:
                ledger.patient_until = now + PATIENCE * (now - task.sent)
                ledger.queue.push(ledger.patient_until, -FIRST, PatienceOver())
            guards.see(local)
            ledger.held.append(Held(task, local, reply))
            ledger.wait(member, 1)
            self._release()
            if ledger.held:
                self.dispatcher.dispatch([])  # its place, where there are places
        else:
            self._release()
            if self._goes_on():
                self._take_in(task, local, reply)

    def _release(self) -> None:
        """Aggregate the replies that were held back until the usual norm is known, or the wait is over."""
        ledger, held = self.ledger, self.ledger.held
        if not held:
            return
        enough = not self.safeguards.must_wait(len(ledger.counting), self.run.buffers)
        if enough or self.run.pace.now() >= ledger.patient_until:
            if not enough:
                log.warning(
                    "only %d clients have answered: which updates are too long isn't known yet", len(held)
                )
            while held and self._goes_on():
                first = held.popleft()
                ledger.wait(first.task.member, -1)
                self._take_in(*first)

    def _take_in(self, task: Task, local: Local, reply: Message | Work) -> None:
        """Put a valid local model through the chain, and its contribution into the buffer."""
        member, ledger, run = task.member, self.ledger, self.run
        metrics = reply.metrics if isinstance(reply, Work) else messages.metrics_of(reply)
        told = sized_by(member.client, metrics, run.flower.weighted_by_key)
        if told.num_examples != member.client.num_examples:
            member.client = told
            ledger.resized()
        self.importance()  # how long its update may be depends on the clients' sizes
        self.receiver.links()(local)
        ledger.since.clipped += local.bounded
        staleness = run.aggregations - task.version
        asked = [*task.companions, *([messages.STEPS] if task.steps else ())]
        contribution = self.receiver.contribution(local, reply, task.version, staleness, asked)
        accepted = self.accept(contribution)
        outcome = ACCEPTED if accepted else messages.TOO_OLD
        size = contribution.num_bytes
        if self.secure is None or not accepted:  # of masked work it is known when it is summed
            self.accounts[member.client.index].note(outcome, clipped=local.bounded, num_bytes=size)
            self.timeline.end(member.client.index, run.pace.now(), outcome)
        if not accepted:
            ledger.since.discard(contribution)
            self._refused_in_a_row += 1
            if self._refused_in_a_row > LOST_IN_A_ROW * len(ledger.members):
                raise RunError(
                    f"the last {self._refused_in_a_row} contributions didn't count, one after the other: "
                    f"{type(self).__name__}'s accept, or fresh, must be True of some"
                )
            self.dispatcher.dispatch([member])
            return
        self._refused_in_a_row = 0
        if run.flower.train_metrics_aggr_fn is not None and isinstance(reply, Message):
            ledger.since.keep(reply.content)
        ledger.keep(contribution)
        if self.secure is not None:
            ledger.kept[member.client.index] = task
        if self.ready(len(ledger.buffer)):
            self._aggregate()
        else:
            self.dispatcher.dispatch([member])

    def _lose(self, member: Member) -> None:
        """Note a task that is lost because its client went away; the client continues when it is back."""
        ledger, client, now = self.ledger, member.client, self.run.pace.now()
        ledger.since.failures += 1
        ledger.since.lost += 1
        self.accounts[client.index].note(messages.LOST)
        self.timeline.end(client.index, now, messages.LOST)
        self.run.warn_once(LOSES, client, member.tasks, now)
        member.lost += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row > LOST_IN_A_ROW * max(len(ledger.members), 1):
            others = " but those whose contributions wait" if ledger.buffer else ""
            raise RunError(
                f"the last {self._lost_in_a_row} tasks were lost, one after the other: no client{others} is there "
                "for as long as its task takes (availability, task_failure, time_scenario)"
            )
        self.dispatcher.dispatch([member])
        self._go_on_without(member)

    def _miss(self, member: Member, reason: str, outcome: str) -> None:
        """Note a task that failed or had an invalid reply, and drop its client after several failures."""
        ledger, client, pace = self.ledger, member.client, self.run.pace
        ledger.since.failures += 1
        self.run.missed(reason)
        member.misses += 1
        member.unfit = 0 if outcome == messages.LATE else member.unfit + 1
        self.accounts[client.index].note(outcome)
        self.timeline.end(client.index, pace.now(), outcome)
        log.warning("client %s, task %d: %s", client.located, member.tasks, reason, extra=client.fields)
        if not pace.real_time:
            self._look()  # nobody else does: a miss is the sign that a node may be gone, or back under a new id
        if member.misses < MAX_MISSES:
            if self._goes_on():
                self.dispatcher.dispatch([member])
            return
        if not member.dropped:
            log.warning(
                "%s is dropped after %d misses in a row, the others share its weight",
                client,
                member.misses,
                extra=client.fields,
            )
            member.drop(self.run.aggregations)
            ledger.changed()
            self._release()
            if not ledger.counting and not pace.real_time:
                raise self.run.given_up(NOBODY)
        elif pace.real_time and self._hopeless():
            raise self.run.given_up(NOBODY)
        pause = RETRY_AFTER * float(pace.times([member], ledger.members.values())[0])
        ledger.queue.push(pace.now() + pause, client.index, Retry(member))
        if self._is_ready():
            self._aggregate()  # the others don't wait for it
        elif self._goes_on():
            self.dispatcher.dispatch([])

    def _seconds_between(self) -> float | None:
        """Return ``interval``; raise RunError if it is none between two different times."""
        return checked_interval(f"{type(self).__name__}.interval", self.interval)

    # ---- Whether the run goes on ------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Return True if more aggregations are to come: the run isn't as long as asked for, nor over before."""
        return self.run.aggregations < self.total and not self.run.is_over()

    def _hopeless(self) -> bool:
        """Return True if no work was ever accepted, and all connected clients failed again when they were retried.

        An app or a model that fails everywhere won't be well by itself. Whoever is at work may do better, but that
        is waited for a while only: of many clients, one always is.
        """
        busy, members = self.ledger.busy, self.ledger.members
        if not self.run.clients or any(member.answers for member in members.values()):
            return False
        connected = (members[client.index] for client in self.run.clients)
        return all(m.unfit > (2 * MAX_MISSES if busy(m) else MAX_MISSES) for m in connected)

    def _go_on_without(self, member: Member) -> None:
        """Ask for a model where a client has gone for good: a method may have waited for that one alone."""
        if member.there or self.ledger.busy(member):
            return
        pace = self.run.pace
        if pace.comes(member.client, pace.now()) == NEVER and self._is_ready():
            self._aggregate()

    def _is_ready(self) -> bool:
        """Return True if the waiting contributions are to be aggregated although none has arrived now."""
        waiting = len(self.ledger.buffer)
        return waiting > 0 and self._goes_on() and self.ready(waiting)

    def _check_waiting(self) -> None:
        """Raise RunError if a method waits for more clients than exist; in real time warn, as devices may come."""
        ledger, pace = self.ledger, self.run.pace
        if not ledger.buffer or self.interval is not None or ledger.held:
            return
        if any(not task.member.dropped for task in ledger.tasks.values()):
            return
        if any(isinstance(event, Wake) for _, event in ledger.queue):
            return
        goes_on = (pace.budget or self._may_come()) if len(ledger.queue) else not pace.always
        if (self.works_on or not ledger.counting) if pace.real_time else goes_on:  # more comes, or an end
            return
        waiting = len(ledger.buffer)
        values = waiting, waiting, len(ledger.counting), len(ledger.members), type(self).__name__
        if not pace.real_time:
            raise RunError(STUCK % values)
        self.run.warn_once(f"{STUCK}. The run waits for another client", *values)

    def _may_come(self) -> bool:
        """Tell whether any client that isn't blocked on an aggregation can still deliver work.

        A client that was dropped is asked once more.
        """
        members = self.ledger.members.values()
        return any(m.misses <= MAX_MISSES if m.dropped else not m.waiting or self.works_on for m in members)

    # ---- Aggregation -------------------------------------------------------------------------------------------

    def _aggregate(self) -> None:
        """θ^{n+1} = θ^n + η_g Σ d_i Δ_i over what has arrived, in client order; those clients get the new model.

        With a robust rule the model stays as it is where the updates are too few; with secure sums, where too many
        clients go before their updates are summed.
        """
        run, ledger = self.run, self.ledger
        contributions = [self._aged(each) for each in ledger.take_out(self.takes(ledger.buffer))]
        most, given = self.safeguards.heaviest, self.weigh(contributions)
        if self.capabilities.discounts_staleness:
            of_each(f"{run.name}.weigh or discount", given, [each.client for each in contributions])
        weights = [min(weight, most) if most else weight for weight in given]
        group = None
        if self.secure is not None:
            if (group := self._masked_sum(self.secure, contributions, weights)) is None:
                return
            contributions = [each for each in contributions if each.client.index in group.weights]
            weights = list(group.weights.values())
        owners = [ledger.members[contribution.client.index] for contribution in contributions]
        buffers = Untrained(run.buffers)
        for contribution, weight in zip(contributions, weights, strict=True):
            buffers.add(contribution.client.index, weight, contribution.untrained, contribution.counted_from)
        if self.safeguards.active:
            buffers.bound(self.safeguards.buffers)
        total, average = buffers.weight, buffers
        moved: Vector | None
        if group is not None:
            moved = None if group.total is None else self._moved_by_sum(group.total, weights)
        elif self.robust is None:
            moved = self.aggregate(run.model, contributions, weights)
        else:
            moved = self._moved_by_rule(self.robust, contributions, weights)
            average = self.robust.untrained(run.buffers)
        if moved is not None:
            self.server_step.sound(moved)
            if self.receiver.clip is None:  # averages of buffers would tell of the data
                average.put_into(moved, min(1.0, total * self.untrained_lr()) if total else 0.0, run.model)
        # After the step, whose size follows from the same numbers of contributions as the weights.
        for member, weight in zip(owners, weights, strict=True):
            ledger.count(member, weight)
        if moved is not None:
            run.result.arrays = run.layout.to_record(moved)
            run.model = run.layout.rounded(moved)
            self.reporter.stability.moved(run.model, len(contributions) / self.most_at_work)
        self.dispatcher.take_model()
        ledger.since.take(contributions, run.flower.weighted_by_key)
        run.aggregations += 1
        if self.observes_periods:
            self.contribution_weights.expire()
        done = run.aggregations >= self.total
        if group is not None:
            owners += self._leave_out(group.missed)
        if not done:
            self.dispatcher.dispatch(owners)
        ledger.since.count_bytes(*run.take_frozen_bytes())
        if done or self._is_due():
            self._report_evaluation(last=done or run.stopped())
        else:
            self.reporter.report(run.aggregations, run.result, {})

    def _masked_sum(
        self, secure: "SecureGroups", contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> "Group | None":
        """Have the clients of an aggregation mask their updates; return their sum, None if the run is stopped."""
        ledger, since, now = self.ledger, self.ledger.since, self.run.pace.now()
        members = [ledger.members[contribution.client.index] for contribution in contributions]
        group = secure.sum(self._mail.grid, self.run.aggregations + 1, members, weights)
        if self.run.stopped():  # of no use: a run that goes on has these tasks worked on again
            return None
        since.count_bytes(group.bytes_down, group.bytes_up)
        since.clipped += group.clipped
        for name, (mean, number) in group.metrics.items():
            since.values.setdefault(name, []).extend([mean] * round(number))
        for member in members:
            del ledger.kept[member.client.index]
        for index in group.weights:
            ledger.members[index].misses = ledger.members[index].unfit = 0
            self.accounts[index].note(ACCEPTED)
            self.timeline.end(index, now, ACCEPTED)
        return group

    def _moved_by_sum(self, total: Vector, weights: Sequence[float]) -> Vector:
        """Return the next model (D,), moved by Σ d_i Δ_i (D,) of masked updates; see ``aggregate``."""
        self._hide(total, weights)
        return self.server_step.moved(self.run.model, self.direction(total))

    def _leave_out(self, missed: "Mapping[int, Missed]") -> list[Member]:
        """Note the clients that are missing in a sum of masked updates; return those that aren't at fault."""
        ledger, number, free = self.ledger, self.run.aggregations, list[Member]()
        for index, (reason, reply, outcome) in missed.items():
            if (member := ledger.members.get(index)) is None:
                continue
            if outcome is None:
                self._miss(member, reason, messages.fault_of(reply))
                continue
            ledger.since.failures += 1
            ledger.since.lost += outcome == messages.LOST
            self.accounts[index].note(outcome)
            self.timeline.end(index, self.run.pace.now(), outcome)
            free.append(member)
        for reason in dict.fromkeys(each.reason for each in missed.values() if each.outcome is not None):
            named = [member.client.located for member in free if missed[member.client.index].reason == reason]
            log.warning("aggregation %d: left out client %s: %s", number, ", ".join(named), reason)
        return free

    def _hide(self, total: Vector, weights: Sequence[float]) -> None:
        """Add central noise to Σ d_i Δ_i (D,), for the largest weight that any client may have in an aggregation.

        A client contributes once to an aggregation at most. Weights follow from times alone, not from updates.
        """
        config, clip, run = self.config, self.receiver.clip, self.run
        if not isinstance(config, PrivateEventsConfig) or clip is None:
            return
        heaviest = max(*weights, *self.contribution_weights.current.weight.values())
        rng = run.central_noise(run.aggregations + 1)
        Noise(config.dp_noise_multiplier, clip.norm)(total, heaviest, rng)
        total[run.buffers_at] = 0.0

    def _moved_by_rule(
        self, robust: ArrivalRule, contributions: Sequence[Contribution], weights: Sequence[float]
    ) -> Vector | None:
        """Return the next model (D,), moved by the rule's result times Σ d_i; None if the updates are too few."""
        members, looked_at = self.ledger.members, self.server_step.looked_at
        robust.take(
            {c.client.index: (looked_at(self.counted(c)), c.untrained) for c in contributions},
            lambda index: index in members and not members[index].dropped,
        )
        # A client whose work is in the buffer twice counts once.
        distinct = dict(zip((c.client.index for c in contributions), weights, strict=True))
        update, total = robust.result(max(weights)), sum(distinct.values())
        if update is None:
            values = len(robust), robust.rule.least, robust.rule.text
            if robust.window:  # until enough clients have answered
                self.run.warn_once(TOO_FEW, self.run.aggregations + 1, *values)
            else:
                log.warning(TOO_FEW, self.run.aggregations + 1, *values)
            return None
        total = 1.0 if math.isclose(total, 1.0, rel_tol=1e-9) else total  # m × 1/m
        return self.server_step.moved(self.run.model, self.direction(total * update))

    def _aged(self, contribution: Contribution) -> Contribution:
        """Return a contribution with its present staleness: others may have been aggregated while it waited."""
        staleness = self.run.aggregations - contribution.version
        if staleness == contribution.staleness:
            return contribution
        return replace(contribution, staleness=staleness)

    def _is_due(self) -> bool:
        """Return True if the model is evaluated after this aggregation."""
        if every := self.config.eval_every:
            return self.run.aggregations % every == 0
        return len(self.ledger.since.staleness) >= len(self.ledger.counting)

    def _report_evaluation(self, *, last: bool) -> None:
        """Evaluate the model, and report it with the statistics since the last evaluation.

        In real time the clients' evaluation of this model is waited for only if it is the ``last``.
        """
        run, since = self.run, self.ledger.since
        since.count_bytes(*run.take_frozen_bytes())
        metrics, of_training = since.metrics(), since.metrics_of_clients()
        if (function := run.flower.train_metrics_aggr_fn) is not None and since.contents:
            of_training |= dict(function(since.contents, run.flower.weighted_by_key) or {})
        self.ledger.since = Tally()
        if self.robust is None:
            metrics["weights-distance"] = self.contribution_weights.distance()
        metrics = beside(metrics, of_training)
        number, result = run.aggregations, run.result
        result.train_metrics_clientapp[number] = metrics
        requests = list(
            self.configure_evaluate(number, result.arrays, self._evaluate_config, self._mail.grid)
        )
        if run.pace.real_time:
            told, self.reporter.by_client = self._evaluation.collect(number, requests, last=last)
        else:
            told, self.reporter.by_client = self.evaluator.collect(
                result, number, requests, self._mail.grid, self.aggregate_evaluate
            )
        self.reporter.report(
            number,
            result,
            {**metrics, **told},
            evaluate_fn=self._evaluate_fn,
            shares=self.shares_of_clients,
            losses=self.contribution_weights.losses,
        )

    # ---- What a run knows of its clients, and its checkpoint ---------------------------------------------------

    def importance(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        return self.contribution_weights.importance()

    def shares_of_clients(self) -> dict[str, list[float]]:
        """Return per-client statistics, by index: contributions, weights, importance, expected and observed share."""
        return self.contribution_weights.of_clients(self.reporter)

    def at_work(self) -> list[int]:
        """Return the indices of the clients that have a request or a task under way."""
        return list({*super().at_work(), *self.ledger.at_work()})

    def parts(self) -> list[Any]:
        """Return the parts of every strategy, the bookkeeping of tasks, the contributions' weights, and the rule."""
        own = [self.ledger, self.contribution_weights]
        return [*super().parts(), *own, *([] if self.robust is None else [self.robust])]

    def bytes_kept(self) -> int:
        """Return the bytes of the clients' vectors that the method keeps, and of the robust rule's window."""
        return super().bytes_kept() + (0 if self.robust is None else self.robust.nbytes)
