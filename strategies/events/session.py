"""A run without rounds: the parts that only the event loop has, what it waits for, and its reports."""

import logging
from collections.abc import Iterator
from typing import Any

from flwr.serverapp.strategy import Result

from strategies.clients.accounts import MAX_MISSES
from strategies.clients.client_metrics import beside
from strategies.core.config import PrivateEventsConfig, RobustConfig, SecureConfig
from strategies.core.session import Session
from strategies.events.arrival_rule import ArrivalRule
from strategies.events.contribution_weights import ContributionWeights
from strategies.events.dispatcher import Dispatcher
from strategies.events.evaluation import RealTimeEvaluation
from strategies.events.event_stream import Event, checked_interval, events
from strategies.events.statistics import Tally
from strategies.events.tasks import TaskLedger, Wake
from strategies.flower.errors import RunError
from strategies.flower.exchange import Mail

log = logging.getLogger("flwr.strategies")

NO_MODEL = "the run is over, at %g s, before its first model was made: %d contributions wait for it"
STUCK = (
    "ready(%d) is False, and nobody is at work: %d contributions wait, and %d of %d clients count; %s must be "
    "content with len(self.session.ledger.counting)"
)


class EventSession(Session):
    """A run without rounds.

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
    executor : ByUpdates or ByMaskedSums
        How replies become contributions, and contributions the next model.
    total : int
        Aggregations that were asked for.
    """

    mail: Mail
    executor: Any
    _evaluation: RealTimeEvaluation

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        config, able = strategy.config, strategy.capabilities
        self.total = 0
        private = isinstance(config, PrivateEventsConfig) and config.dp == "central"
        most = config.dp_max_contributions if private else 0
        self.ledger = TaskLedger(self.run, works_on=strategy.works_on, most=most)
        weighing = getattr(config, "aggregation_weights", strategy.weighing)
        rule = config.rule() if isinstance(config, RobustConfig) else None
        self.robust: ArrivalRule | None = None
        if rule is not None:
            window = max(2 * config.faulty_clients + 3, rule.least) if able.every_arrival else 0
            self.robust = ArrivalRule(rule, window, config.update_norm_bound)
        masks = isinstance(config, SecureConfig) and config.secure_sums
        self.contribution_weights = ContributionWeights(
            self.run,
            self.ledger,
            self.population,
            self.safeguards,
            weighing,
            strategy,
            summed=self.robust is None,
        )
        self.dispatcher = Dispatcher(
            self.run,
            self.ledger,
            self.requests,
            self.accounts,
            self.timeline,
            strategy,
            without_messages=not (able.writes_requests or self.compressed is not None or masks),
        )

    # ---- A run -------------------------------------------------------------------------------------------------

    @property
    def secure(self) -> Any:
        """The groups of clients that mask their updates, with secure sums; else None."""
        return getattr(self.executor, "groups", None)

    def begin(self, num_aggregations: int) -> bool:
        """Begin from the initial model, or go on from the state to resume; return True if a state is resumed."""
        run, strategy, grid = self.run, self.strategy, self.grid
        self.mail, self.total = Mail(grid, run.timeout, run.stopped), num_aggregations
        state = self.begin_model()
        self.executor.begin()
        self._evaluation = RealTimeEvaluation(
            run, self.evaluator, self.pending, self.mail, strategy.aggregate_evaluate
        )
        if self.goes_on():
            run.clients = self.population.look(grid, self.train_config)
            self.executor.look()
        self.dispatcher.begin(grid, self.mail, self.train_config)
        if state is None:
            run.pace.begin()
        return state is not None

    def report_initial(self) -> None:
        """Evaluate the initial model, and report it."""
        self.reporter.report(
            0,
            self.run.result,
            {},
            evaluate_fn=self.evaluate_fn,
            shares=dict,
            losses=self.contribution_weights.losses,
        )

    def remaining_events(self) -> Iterator[Event]:
        """Yield the events until all aggregations are done, a stop condition is met, or nothing can happen again."""
        run, ledger = self.run, self.ledger
        happening = events(run.pace, ledger, self.mail, self.seconds_between)
        while self.goes_on() and not run.stopped():
            if ledger.all_spent:
                log.warning("every client has contributed as often as it may: the run ends")
                return
            self._check_waiting()
            if (event := next(happening, None)) is None:
                if not run.aggregations and not run.stopped():
                    log.warning(NO_MODEL, run.pace.now(), len(ledger.buffer) + len(ledger.held))
                return
            yield event

    def goes_on(self) -> bool:
        """Return True if more aggregations are to come: the run isn't as long as asked for, nor over before."""
        return self.run.aggregations < self.total and not self.run.is_over()

    def seconds_between(self) -> float | None:
        """Return the method's ``interval``; raise RunError if it is none between two different times."""
        return checked_interval(f"{self.run.name}.interval", self.strategy.interval)

    def close(self) -> Result:
        """Evaluate the last model if it hasn't been, and return the result of the run."""
        if self.ledger.since.unevaluated:
            self.evaluate(last=True)
        self.run.check_worked(self.initial_arrays)
        self.contribution_weights.log_objective()
        return self.run.outcome(self.run.result)

    # ---- Whether work may still come ---------------------------------------------------------------------------

    def _check_waiting(self) -> None:
        """Raise RunError if a method waits for more clients than exist; in real time warn, as devices may come."""
        ledger, pace = self.ledger, self.run.pace
        if not ledger.buffer or self.strategy.interval is not None or ledger.held:
            return
        if any(not task.member.dropped for task in ledger.tasks.values()):
            return
        if any(isinstance(event, Wake) for _, event in ledger.queue):
            return
        more_comes = (pace.budget or self._may_come()) if len(ledger.queue) else not pace.always
        if (self.strategy.works_on or not ledger.counting) if pace.real_time else more_comes:
            return
        waiting = len(ledger.buffer)
        values = waiting, waiting, len(ledger.counting), len(ledger.members), self.run.name
        if not pace.real_time:
            raise RunError(STUCK % values)
        self.run.warn_once(f"{STUCK}. The run waits for another client", *values)

    def _may_come(self) -> bool:
        """Return True if any client that isn't blocked on an aggregation can still deliver work.

        A client that was dropped is asked once more.
        """
        members, works_on = self.ledger.members.values(), self.strategy.works_on
        return any(m.misses <= MAX_MISSES if m.dropped else not m.waiting or works_on for m in members)

    def hopeless(self) -> bool:
        """Return True if no work was ever accepted, and all connected clients failed again when they were retried.

        An app or a model that fails everywhere won't be well by itself. A client at work may do better, but that is
        waited for a while only: of many clients, one always is at work.
        """
        busy, members = self.ledger.busy, self.ledger.members
        if not self.run.clients or any(member.answers for member in members.values()):
            return False
        connected = (members[client.index] for client in self.run.clients)
        return all(m.unfit > (2 * MAX_MISSES if busy(m) else MAX_MISSES) for m in connected)

    def log_concurrency(self) -> None:
        """Log what ``fraction_train`` means without rounds."""
        fraction = self.run.flower.fraction_train
        if fraction < 1:
            log.info(
                "fraction_train = %g: %d of %d clients work at once, as there are no rounds (concurrency)",
                fraction,
                self.strategy.most_at_work,
                len(self.ledger.counting),
            )

    # ---- Reports -----------------------------------------------------------------------------------------------

    def report(self, *, last: bool) -> None:
        """Report the last aggregation; its model is evaluated if that is due, or it is the ``last``."""
        run, since = self.run, self.ledger.since
        since.count_bytes(*run.take_frozen_bytes())
        every = self.strategy.config.eval_every
        due = run.aggregations % every == 0 if every else len(since.staleness) >= len(self.ledger.counting)
        if last or due:
            self.evaluate(last=last or run.stopped())
        else:
            self.reporter.report(run.aggregations, run.result, {})

    def evaluate(self, *, last: bool) -> None:
        """Evaluate the model, and report it with the statistics since the last evaluation.

        In real time the clients' evaluation of this model is waited for only if it is the ``last``.
        """
        run, since, strategy = self.run, self.ledger.since, self.strategy
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
        requests = list(strategy.configure_evaluate(number, result.arrays, self.evaluate_config, self.grid))
        if run.pace.real_time:
            told, self.reporter.by_client = self._evaluation.collect(number, requests, last=last)
        else:
            told, self.reporter.by_client = self.evaluator.collect(
                result, number, requests, self.grid, strategy.aggregate_evaluate
            )
        self.reporter.report(
            number,
            result,
            {**metrics, **told},
            evaluate_fn=self.evaluate_fn,
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
        """Return the parts of every run, the bookkeeping of tasks, the contributions' weights, and the rule."""
        own = [self.ledger, self.contribution_weights]
        return [*super().parts(), *own, *([] if self.robust is None else [self.robust])]

    def bytes_kept(self) -> int:
        """Return the bytes of the clients' vectors that the run keeps, and of the robust rule's window."""
        return super().bytes_kept() + (0 if self.robust is None else self.robust.nbytes)
