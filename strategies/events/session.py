"""A run without rounds: the parts that only the event loop has, what it waits for, and its reports."""

import logging
from collections.abc import Iterator
from typing import Any

from flwr.serverapp.strategy import Result

from strategies.clients.client_metrics import merged_metrics
from strategies.clients.client_statistics import MAX_MISSES
from strategies.core.config import IDENTICAL, PrivateAsyncConfig
from strategies.core.session import Session
from strategies.events.arrival_rule import ArrivalRule
from strategies.events.contribution_weights import ContributionWeights
from strategies.events.dispatcher import Dispatcher
from strategies.events.evaluation import RealTimeEvaluation
from strategies.events.event_stream import Event, EventStream
from strategies.events.statistics import IntervalStatistics
from strategies.events.tasks import TaskTable
from strategies.flower.errors import RunError
from strategies.flower.exchange import MessageClient

log = logging.getLogger("flwr.strategies")

NO_MODEL = "the run is over, at %g s, before its first model was made: %d contributions wait for it"
STUCK = (
    "ready(%d) is False, and no client is training: %d contributions wait, and %d of %d clients are active; %s must "
    "accept len(self.session.task_table.active_clients) contributions"
)


class EventSession(Session):
    """A run without rounds.

    Attributes
    ----------
    task_table : TaskTable
        Who takes part, who works on what, and what waits for the next aggregation.
    contribution_weights : ContributionWeights
        What every client counts.
    dispatcher : Dispatcher
        Who is sent the model.
    robust : ArrivalRule, optional
        The robust rule, in place of the weighted sum.
    executor : ByUpdates or ByMaskedSums
        How replies become contributions, and contributions the next model.
    """

    message_client: MessageClient
    executor: Any
    _evaluation: RealTimeEvaluation

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        config, able = strategy.config, strategy.capabilities
        private = isinstance(config, PrivateAsyncConfig) and config.dp == "central"
        most = config.dp_max_contributions if private else 0
        self.task_table = TaskTable(self.run, trains_while_waiting=strategy.trains_while_waiting, most=most)
        aggregation_weights = getattr(config, "aggregation_weights", strategy.default_aggregation_weights)
        self.robust: ArrivalRule | None = None
        if (rule := config.rule()) is not None:
            window = max(2 * config.faulty_clients + 3, rule.least) if able.aggregates_each_arrival else 0
            self.robust = ArrivalRule(rule, window, config.update_norm_bound)
        self.contribution_weights = ContributionWeights(
            self.run,
            self.task_table,
            self.population,
            aggregation_weights,
            strategy,
            self.robust,
            favours_fast=aggregation_weights == IDENTICAL or able.sets_steps or strategy.discounts_staleness,
        )
        needs_messages = able.writes_requests or self.compressed is not None or config.uses_secure_sums
        self.dispatcher = Dispatcher(
            self.run,
            self.task_table,
            self.requests,
            self.client_stats,
            self.timeline,
            strategy,
            without_messages=not needs_messages,
        )

    # ---- A run -------------------------------------------------------------------------------------------------

    @property
    def secure(self) -> Any:
        """The groups of clients that mask their updates, with secure sums; else None."""
        return getattr(self.executor, "groups", None)

    def begin(self, num_aggregations: int) -> bool:
        """Begin from the initial model, or go on from the state to resume; return True if a state is resumed."""
        run, strategy, grid = self.run, self.strategy, self.grid
        self.message_client = MessageClient(grid, run.timeout, run.should_stop)
        state = self.begin_model(num_aggregations)
        self.executor.begin()
        self._evaluation = RealTimeEvaluation(
            run, self.evaluator, self.pending, self.message_client, strategy.aggregate_evaluate
        )
        if self.more_to_come():
            run.clients = self.population.refresh(grid, self.train_config)
            self.executor.check_grid()
        self.dispatcher.begin(grid, self.message_client, self.train_config)
        if state is None:
            run.scheduler.begin()
        return state is not None

    def report_initial(self) -> None:
        """Evaluate the initial model, and report it."""
        losses = self.contribution_weights.losses
        self.reporter.report_evaluation(0, self.run.result, {}, dict, self.evaluate_fn, losses)

    def remaining_events(self) -> Iterator[Event]:
        """Yield the events until all aggregations are done, a stop condition is met, or nothing can happen again."""
        run, task_table, interval = self.run, self.task_table, self.contribution_weights.interval
        happening = iter(EventStream(run.scheduler, task_table, self.message_client, interval))
        while self.more_to_come() and not run.should_stop():
            if task_table.all_reached_limit:
                log.warning("every client has contributed as often as it may: the run ends")
                return
            self._check_waiting()
            if (event := next(happening, None)) is None:
                if not run.aggregations and not run.should_stop():
                    log.warning(
                        NO_MODEL, run.scheduler.now(), len(task_table.buffer) + len(task_table.held_replies)
                    )
                return
            before = run.aggregations
            yield event
            if run.aggregations > before and self.stops_after(run.aggregations):
                return

    def more_to_come(self) -> bool:
        """Return True if more aggregations are to come: the run isn't as long as asked for, nor over before."""
        return self.run.aggregations < self.total and not self.run.is_over()

    def close(self) -> Result:
        """Evaluate the last model if it hasn't been, and return the result of the run."""
        if self.task_table.interval_stats.unevaluated:
            self.evaluate(last=True)
        self.run.check_progress(self.initial_arrays)
        self.contribution_weights.log_objective()
        return self.end(self.run.result)

    # ---- Whether work may still come ---------------------------------------------------------------------------

    def _check_waiting(self) -> None:
        """Raise RunError if a method waits for more clients than exist; in real time warn, as devices may come."""
        task_table, scheduler = self.task_table, self.run.scheduler
        waiting = len(task_table.buffer)
        if not waiting or self.strategy.interval is not None or task_table.may_fill_buffer:
            return
        if self._may_come():
            return
        values = waiting, waiting, len(task_table.active_clients), len(task_table.members), self.run.name
        if not scheduler.real_time:
            raise RunError(STUCK % values)
        self.run.warn_once(f"{STUCK}. The run waits for another client", *values)

    def _may_come(self) -> bool:
        """Return True if any client that isn't blocked on an aggregation can still deliver work.

        A client that was dropped is asked once more.
        """
        task_table, scheduler = self.task_table, self.run.scheduler
        goes_on = self.strategy.trains_while_waiting
        if scheduler.real_time:
            return goes_on or not task_table.active_clients
        if not len(task_table.queue):
            return not scheduler.always
        members = task_table.members.values()
        return scheduler.budget > 0 or any(
            m.misses <= MAX_MISSES if m.dropped else not m.waiting or goes_on for m in members
        )

    def hopeless(self) -> bool:
        """Return True if no work was ever accepted, and all connected clients failed again when they were retried.

        An app or a model that fails everywhere won't be well by itself. A client at work may do better, but that is
        waited for a while only: of many clients, one always is at work.
        """
        busy, members = self.task_table.busy, self.task_table.members
        if not self.run.clients or any(member.answers for member in members.values()):
            return False
        connected = (members[client.index] for client in self.run.clients)
        return all(m.invalid_replies > (2 * MAX_MISSES if busy(m) else MAX_MISSES) for m in connected)

    def log_concurrency(self) -> None:
        """Log what ``fraction_train`` means without rounds."""
        fraction = self.run.flower.fraction_train
        if fraction < 1:
            log.info(
                "fraction_train = %g: %d of %d clients work at once, as there are no rounds (concurrency)",
                fraction,
                self.strategy.max_concurrency,
                len(self.task_table.active_clients),
            )

    # ---- Reports -----------------------------------------------------------------------------------------------

    def report(self, *, last: bool) -> None:
        """Report the last aggregation; its model is evaluated if that is due, or it is the ``last``."""
        run, since = self.run, self.task_table.interval_stats
        since.count_bytes(*run.take_bytes_beside())
        due = len(since.staleness) >= len(self.task_table.active_clients)
        if every := self.strategy.config.eval_every:
            due = run.aggregations % every == 0
        if last or due:
            self.evaluate(last=last or run.should_stop())
        else:
            self.reporter.report(run.aggregations, run.result, {})

    def evaluate(self, *, last: bool) -> None:
        """Evaluate the model, and report it with the statistics since the last evaluation.

        In real time the clients' evaluation of this model is waited for only if it is the ``last``.
        """
        run, since, strategy = self.run, self.task_table.interval_stats, self.strategy
        since.count_bytes(*run.take_bytes_beside())
        metrics, of_training = since.metrics(), since.metrics_of_clients(robust=self.decides_by_metrics)
        if (function := run.flower.train_metrics_aggr_fn) is not None and since.contents:
            of_training |= dict(function(since.contents, run.flower.weighted_by_key) or {})
        self.task_table.interval_stats = IntervalStatistics()
        if self.robust is None:
            metrics["weights-distance"] = self.contribution_weights.total_variation()
        metrics = merged_metrics(metrics, of_training)
        number, result = run.aggregations, run.result
        result.train_metrics_clientapp[number] = metrics
        requests = list(strategy.configure_evaluate(number, result.arrays, self.evaluate_config, self.grid))
        if run.scheduler.real_time:
            reported, self.reporter.by_client = self._evaluation.collect(number, requests, last=last)
        else:
            reported, self.reporter.by_client = self.evaluator.collect(
                result, number, requests, self.grid, strategy.aggregate_evaluate
            )
        self.reporter.report_evaluation(
            number,
            result,
            {**metrics, **reported},
            self.client_columns,
            self.evaluate_fn,
            self.contribution_weights.losses,
        )

    # ---- What a run knows of its clients, and its checkpoint ---------------------------------------------------

    def client_weights(self) -> dict[int, float]:
        """Return p_i of the clients that count now, by index."""
        return self.contribution_weights.client_weights()

    def client_columns(self) -> dict[str, list[float]]:
        """Return per-client statistics, by index: contributions, weights, importance, expected and observed share."""
        return self.contribution_weights.of_clients(self.reporter)

    def busy_clients(self) -> list[int]:
        """Return the indices of the clients that have a request or a task under way."""
        return list({*super().busy_clients(), *self.task_table.busy_clients()})

    def stateful_components(self) -> list[Any]:
        """Return the parts of every run, the bookkeeping of tasks, the contributions' weights, and the rule."""
        own = [self.task_table, self.contribution_weights]
        return [*super().stateful_components(), *own, *([] if self.robust is None else [self.robust])]

    def client_state_bytes(self) -> int:
        """Return the bytes of the clients' vectors that the run keeps, and of the robust rule's window."""
        return super().client_state_bytes() + (0 if self.robust is None else self.robust.nbytes)
