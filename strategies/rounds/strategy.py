"""The round loop of the synchronous strategies, and the hooks that a method implements.

A round draws its participants, sends each the global model, waits for the trained models and puts them together:
w̄ ← step(w̄, Σ d_i Δ_i), with Δ_i = w_i − w̄, d_i the weight that makes the participation scheme unbiased (Dhasade,
Kremer & Renard, algorithm 1; strategies/rounds/participation.py) and step the server optimizer's, by default the
sum. Σ runs in the order of the clients, in float64, so that a run doesn't depend on the order of the replies. A reply
that is an error, missing, not finite or of another shape or dtype doesn't count: the log names its client, and its
weight is shared over the other clients. A round with no valid reply keeps the model, and the optimizer takes no step.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies.clients.roster import Client
from strategies.clients.weights import Weights, of_each, rescale
from strategies.core.capabilities import hook
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.reporter import EvaluateFn, StopFn
from strategies.core.strategy import FederatedStrategy
from strategies.flower.arrays import Vector
from strategies.rounds.aggregator import RoundAggregation
from strategies.rounds.first_model import check_replies_make_it, take_first_model
from strategies.rounds.outer_loop import cohort_of_replies, follow
from strategies.rounds.round import Aggregate, Round
from strategies.rounds.session import RoundSession
from strategies.rounds.summed import EngineSums
from strategies.updates.pipeline import Contribution

log = logging.getLogger("flwr.strategies")

Outcome = tuple[ArrayRecord | None, MetricRecord | None]


class SynchronousStrategy(FederatedStrategy):
    """The round loop of all synchronous methods; a Flower Strategy for any Flower app.

    The parameters are those of ``strategies.FederatedStrategy``. In virtual time a round takes as long as its slowest
    participant, unless it closes early (strategies/rounds/deadline.py). Under Flower's own ``Strategy.start`` the
    rounds are the same; clock, time budget and observer belong to ``start`` of this class.

    New model: when all participants have answered.
    """

    Config: ClassVar[type[StrategyConfig]] = SynchronousConfig
    config: SynchronousConfig
    session: RoundSession

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _warn_of_unread(type(self).__name__, self)

    def _new_session(self) -> RoundSession:
        session = RoundSession(self)
        session.engine_sums = EngineSums(session)
        if self.config.secure_sums:
            from strategies.rounds.secure_sums import SecureSums  # loads libraries of cryptography

            session.masked_sums = SecureSums(session)
        return session

    # ---- What an algorithm may fill in: see strategies/__init__.py ---------------------------------------------

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for participation, aggregation rule or over_select."""
        self.session.selection.check(num_clients)
        if self.session.masked_sums is not None:
            self.session.masked_sums.check(num_clients)

    @hook
    def select(
        self, clients: Sequence[Client], rng: np.random.Generator
    ) -> tuple[Sequence[Client], Sequence[float] | None]:
        """Return the participants of a round and their weights d_i; None: by the sizes in their replies.

        Parameters
        ----------
        clients : sequence of Client
            The clients that are present and free, by index; ``client_weights`` has the p_i of all clients.
        rng : np.random.Generator
            The round's random generator.
        """
        selection = self.session.selection
        return selection.draw(clients, rng, selection.number_to_draw())

    @hook
    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return the weight d_i of each contribution of a round, which come in client order.

        The run ends with a RunError unless it is a finite number >= 0 for each.
        """
        weight_by_client = {} if self.session.cohort is None else self.session.cohort.weight_by_client
        d = [weight_by_client[contribution.client.index] for contribution in contributions]
        return rescale(d, sum(weight_by_client.values()))

    def expected_weights(self, p: Weights) -> Weights | None:
        """Return each client's expected share (n,) of the objective, from its p_i (n,); None if it is unknown."""
        selection = self.session.selection
        if self.capabilities.corrects_participation and not self.config.closes_early:
            return selection.corrected(p)  # participation changes the corrections, not the objective
        return selection.expected(p)

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
        """Run up to ``num_rounds`` rounds; see ``flwr.serverapp.strategy.Strategy.start``.

        On the model that the last ``start`` of this object returned, the run goes on from there; on another model it
        begins anew.

        Parameters
        ----------
        timeout : float
            Seconds that a round waits for its replies; also the time to live of its messages.
        evaluate_config : ConfigRecord, optional
            By default ``train_config``, where Flower's strategies send an empty one.
        should_stop : callable, optional
            Called after each aggregation with its number and the result so far; True ends the run with that result.

        Returns
        -------
        Result
            The final model (the initial one if no round succeeded) and the metrics by round.
        """
        session: RoundSession = self._fresh_session(initial_arrays)
        session.stop_after = should_stop
        with session.opened(grid, initial_arrays, timeout, train_config, evaluate_config, evaluate_fn):
            if not (session.initial_arrays or self.run_options.only_own_arrays):
                check_replies_make_it(session)
            session.begin(num_rounds)
            for server_round in session.remaining_rounds():
                session.note_release()
                cohort = self._ask(session, server_round)  # participants, their weights d_i, their requests
                if cohort is None or session.exceeds_budget(cohort):
                    break
                arrays, metrics = self._train(session, cohort)  # the model moved by Σ d_i Δ_i
                if arrays is None and session.is_cancelled(cohort):
                    break
                session.finish_round(cohort, arrays, metrics)
                session.report(evaluate=session.is_evaluation_round(server_round))
            return session.close()

    def _ask(self, session: RoundSession, server_round: int) -> Round | None:
        """Return the round of the sampled participants with their requests; None if there is nobody to ask.

        The executor that works on the round is chosen here: an engine is asked for sums where it can add up and
        nothing looks at single updates; otherwise messages go out, which ``configure_train`` makes.
        """
        arrays, config, grid = session.run.result.arrays, session.train_config, session.grid
        session.cohort = None
        if not arrays or not session.engine_sums.supports(grid):
            asked = list(self.configure_train(server_round, arrays, config, grid))
            if session.nobody_to_ask():
                return None
            cohort = session.cohort_of(server_round, arrays, asked)
        else:
            chosen = session.sampler.participants(server_round, grid, config)
            if chosen is None or session.nobody_to_ask():
                return None
            cohort, asked = session.open_cohort(server_round, arrays, chosen), []
            if session.engine_sums.ask(cohort, config, grid):
                cohort.executor = session.engine_sums
                return cohort
            asked = session.requests_of(cohort, config)
        if cohort is not None:
            cohort.asked, cohort.executor = asked, session.masked_sums
        return cohort

    def _train(self, session: RoundSession, cohort: Round) -> Outcome:
        """Have the participants of a round train; return the next model and the round's metrics.

        None for the model and the metrics of a round that was cancelled; None for the model if no reply is valid.
        """
        if cohort.executor is not None:
            aggregate = cohort.executor.run(cohort, session.grid)
            return (None, None) if aggregate is None else self._conclude(cohort, aggregate)
        replies = session.collector.collect(cohort, session.grid, cohort.asked)
        if not (session.run.result.arrays or self.run_options.only_own_arrays):
            replies = take_first_model(session, cohort, replies)
        if "aggregate_train" not in self.capabilities.round_hooks:
            return self.aggregate_train(cohort.number, replies)
        # A user-defined ``aggregate_train`` gets a list, as from Flower's loop.
        given = list(replies)
        cohort.replies = {reply.metadata.reply_to_message_id: reply for reply in given}
        arrays, metrics = self.aggregate_train(cohort.number, given)
        if not cohort.outcomes:  # it aggregates by itself
            session.record_replies(cohort)
        return None if arrays is None else session.server_step.as_the_model(arrays), metrics

    # ---- Flower's hooks, the steps of a round by messages ------------------------------------------------------

    @hook
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the participants of a round and build their requests, in the order of the clients."""
        if not self.session.is_open:  # a loop around the strategy: round 1 is the only sign that a run begins
            if server_round == 1:
                self._fresh_session()
            follow(self.session, server_round, arrays, config, grid)
        session = self.session
        chosen = session.sampler.participants(server_round, grid, config)
        if chosen is None:
            return []
        return session.requests_of(session.open_cohort(server_round, arrays, chosen), config)

    @hook
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Aggregate the valid replies of the round; None for the arrays if no reply is valid.

        None for the arrays and the metrics of a round that was cancelled, in which only fast clients would count.
        """
        session, cohort, own = self.session, self.session.cohort, True
        if not session.is_open:  # a loop around the strategy, whose requests may be its own
            replies = list(replies)
            known = {request.message_id for request in cohort.requests} if cohort is not None else set()
            own = bool(known) and all(reply.metadata.reply_to_message_id in known for reply in replies)
            if not own:
                replies.sort(key=lambda reply: reply.metadata.src_node_id)  # a sum depends on its order
                cohort = cohort_of_replies(session, server_round, replies)
        if cohort is None:
            log.warning("round %d: no valid reply, the model stays as it is", server_round)
            return None, None
        aggregation = RoundAggregation(session, cohort)
        for place, reply in enumerate(replies):
            aggregation.take(reply, None if own else place)
        if session.is_cancelled(cohort):
            return None, None
        return self._conclude(cohort, aggregation.result())

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate the model: ``fraction_evaluate`` of them, ``min_evaluate_nodes`` at least."""
        session = self.session
        if not session.is_open and not session.run.clients:  # the hook is called alone
            session.run.clients = session.population.refresh(grid, config)
        return session.evaluator.requests(server_round, arrays, config, session.free_to_evaluate())

    # ---- From a round's sum to the next model ------------------------------------------------------------------

    def _conclude(self, cohort: Round, aggregate: Aggregate) -> Outcome:
        """Enter a round in client_stats, and make the next model of its sum; None if no reply is valid."""
        session, run = self.session, self.session.run
        metrics = session.record_outcomes(cohort)
        updated_model = self._moved(cohort, aggregate)
        if updated_model is None:
            why = session.why_model_stays(cohort)
            if session.selection.scheme.scheme == "poisson" and not cohort.clients:
                log.info("round %d: no client was drawn, the model stays as it is", cohort.number)
                return run.layout.to_record(cohort.model), metrics
            log.warning("round %d: %s, the model stays as it is", cohort.number, why)
            return None, metrics
        if not self.capabilities.logs_own_weights:
            cohort.record_weights(session.client_stats)
        # Buffers stay as they are if the model doesn't move, or if averaging them would leak data.
        if session.receiver.clip is None and not run.model_unchanged:
            aggregate.buffers.put_into(updated_model)
        arrays = run.layout.to_record(updated_model)
        ours = (
            not self.capabilities.needs_all_updates
        )  # where a method's ``aggregate`` returns what may be its own
        run.know(arrays, run.layout.rounded(updated_model, in_place=ours))
        return arrays, metrics

    def _moved(self, cohort: Round, aggregate: Aggregate) -> Vector | None:
        """Return the next global model (D,); None if the valid replies are too few."""
        session, server_step = self.session, self.session.server_step
        if self.capabilities.needs_all_updates and session.masked_sums is None:
            return self._moved_by_method(cohort) if cohort.contributions else None
        summed = aggregate.total.result(aggregate.weights)
        if summed is None:
            return None
        update = self.server_update(summed)
        if session.receiver.clip is not None and not self.config.distributes_noise:  # which is in the sum
            session.add_central_noise(cohort, update, aggregate.total.sensitivity(aggregate.weights))
        squares = aggregate.total.mean_square(aggregate.weights)
        in_place = update is summed  # nobody else has it
        return server_step.validated(server_step.apply(cohort.model, update, squares, in_place=in_place))

    def _moved_by_method(self, cohort: Round) -> Vector:
        """Return the next global model (D,) that the method makes of all contributions at once."""
        session, taken = self.session, cohort.contributions
        weights = self.weigh(taken)
        of_each(f"{session.run.name}.weigh", weights, [contribution.client for contribution in taken])
        cohort.weight_by_client = {c.client.index: d for c, d in zip(taken, weights, strict=True)}
        return session.server_step.validated(self.aggregate(cohort.model, taken, weights))


def _warn_of_unread(name: str, strategy: SynchronousStrategy) -> None:
    """Warn of keys that a method's ``select`` may not read."""
    config, able, scheme = strategy.config, strategy.capabilities, strategy.session.selection.scheme.scheme
    if able.chooses_clients and (scheme, config.fraction_train) != ("full", 1.0):
        log.warning(
            "participation = %r, fraction_train = %g: %s selects clients itself; these keys have no effect unless "
            "its select() reads them",
            config.participation,
            config.fraction_train,
            name,
        )
