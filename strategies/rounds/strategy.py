"""The round loop of the synchronous strategies, and the hooks that a method implements.

A round draws its participants, sends each the global model, waits for the trained models and puts them together:
w̄ ← step(w̄, Σ d_i Δ_i), with Δ_i = w_i − w̄, d_i the weight that makes the participation scheme unbiased (Dhasade,
Kremer & Renard, algorithm 1; strategies/rounds/participation.py) and step the server optimizer's, by default the
sum. Σ runs in the order of the clients, in float64, so that a run doesn't depend on the order of the replies. A reply
that is an error, missing, not finite or of another shape or dtype doesn't count: the log names its client, and its
weight is shared over the other clients. A round with no valid reply keeps the model, and the optimizer takes no step.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies.clients import client_metrics
from strategies.clients.accounts import ACCEPTED
from strategies.clients.client_metrics import MetricsMean
from strategies.clients.roster import Client
from strategies.clients.weights import Weights, of_each
from strategies.core.capabilities import hook
from strategies.core.config import StrategyConfig, SynchronousConfig
from strategies.core.reporter import EvaluateFn
from strategies.core.requests import check_local_noise
from strategies.core.strategy import FederatedStrategy
from strategies.core.wrapper import OuterLoop, Wrapped
from strategies.flower import messages
from strategies.flower.arrays import Vector
from strategies.flower.errors import RunError
from strategies.flower.packing import packing
from strategies.rounds.aggregator import Aggregator, RoundAggregation
from strategies.rounds.closing import Closing, WaitForAll
from strategies.rounds.deadline import RoundSize
from strategies.rounds.early_closing import EarlyClosing, check_early
from strategies.rounds.participation import IN_ORDER
from strategies.rounds.round import Chosen, Round
from strategies.rounds.selection import CallUp, Selection, check_equality, check_loop
from strategies.rounds.stragglers import check_stragglers
from strategies.rounds.summed import SummedRound
from strategies.updates.aggregation import Gathered
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Clip, Contribution, Noise
from strategies.updates.clipping import AdaptiveClip
from strategies.updates.sums import SummingGrid

if TYPE_CHECKING:
    from strategies.rounds.secure_sums import SecureSums

log = logging.getLogger("flwr.strategies")

Outcome = tuple[ArrayRecord | None, MetricRecord | None]


class SynchronousStrategy(FederatedStrategy):
    """The round loop of all synchronous methods; a Flower Strategy for any Flower app.

    The parameters are those of ``strategies.FederatedStrategy``. In virtual time a round takes as long as its slowest
    participant, unless it closes early (strategies/rounds/deadline.py). Under Flower's own ``Strategy.start`` the
    rounds are the same; clock, time budget and observer belong to ``start`` of this class.

    Attributes
    ----------
    selection : Selection
        The participation scheme: the draw of participants, and their expected weights.
    closing : WaitForAll or EarlyClosing
        When a round closes, and which replies count in it.
    aggregator : Aggregator
        How a round's replies become one update.

    New model: when all participants have answered.
    """

    Config: ClassVar[type[StrategyConfig]] = SynchronousConfig
    config: SynchronousConfig

    def __init__(self, *arguments: Any, **run: Any) -> None:
        super().__init__(*arguments, **run)
        config, able, name = self.config, self.capabilities, self.run.name
        self.selection = Selection(config, self.run, self.population, able)
        if config.stragglers:
            check_stragglers(config)
        _check(name, self)
        self.closing = _closing(self)
        self._call_up = CallUp(
            self.run, self.population, self.selection, self.closing, self.select, self.check
        )
        self.aggregator = Aggregator(
            config,
            self.run,
            self.receiver,
            self.safeguards,
            self.server_step,
            self.selection,
            able,
            self.counted,
            self.without_companions,
        )
        self._round: Round | None = None
        self._secure: SecureSums | None = None
        if config.secure_sums:
            from strategies.rounds import secure_sums  # loads libraries of cryptography

            secure_sums.check_secure(name, config, able)
            self._secure = secure_sums.SecureSums(
                config,
                self.run,
                self.pending,
                self.timeline,
                self.receiver,
                self.selection,
                self.accounts,
                able,
            )

    # ---- What an algorithm may fill in: see strategies/__init__.py ---------------------------------------------

    def check(self, num_clients: int) -> None:
        """Raise ValueError if so many clients are too few for participation, aggregation rule or closing."""
        self.selection.check(num_clients)
        self.closing.check(num_clients)
        if self._secure is not None:
            self._secure.check(num_clients)

    @hook
    def select(
        self, clients: Sequence[Client], rng: np.random.Generator
    ) -> tuple[Sequence[Client], Sequence[float] | None]:
        """Return the participants of a round and their weights d_i; None: by the sizes in their replies.

        Parameters
        ----------
        clients : sequence of Client
            The clients that are present and free, by index; ``importance`` has the p_i of all clients.
        rng : np.random.Generator
            The round's random generator.
        """
        return self.selection.draw(clients, rng, self.closing.number_to_draw())

    @hook
    def weigh(self, contributions: Sequence[Contribution]) -> Sequence[float]:
        """Return the weight d_i of each contribution of a round, which come in client order.

        The run ends with a RunError unless it is a finite number >= 0 for each.
        """
        worth = {} if self._round is None else self._round.worth
        d = [worth[contribution.client.index] for contribution in contributions]
        return [weight * (sum(worth.values()) / sum(d)) for weight in d] if sum(d) > 0 else d

    def expected_weights(self, p: Weights) -> Weights | None:
        """Return each client's expected share (n,) of the objective, from its p_i (n,); None if it is unknown."""
        if self.capabilities.corrects_participation and not self.closing.early:
            return self.selection.corrected(p)  # participation changes the corrections, not the objective
        return self.selection.expected(p)

    def minimised(self) -> dict[int, float]:
        """Return E[d_i] of the clients that count now, by index, as if all were present and in time."""
        return self.selection.minimised()

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
        """Run up to ``num_rounds`` rounds; see ``flwr.serverapp.strategy.Strategy.start``.

        Parameters
        ----------
        timeout : float
            Seconds that a round waits for its replies; also the time to live of its messages.
        evaluate_config : ConfigRecord, optional
            By default ``train_config``, where Flower's strategies send an empty one.

        Returns
        -------
        Result
            The final model (the initial one if no round succeeded) and the metrics by round.
        """
        initial_arrays = self.run.travelling(initial_arrays)
        grid = self.run.sending(packing(grid, self.receiver.most_bytes))
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = train_config if evaluate_config is None else evaluate_config
        check_local_noise(self.config, train_config)

        def evaluate(metrics: MetricRecord, *, on_clients: bool) -> None:
            """Evaluate the model of the last round, and report it with the round's metrics."""
            number, told, of_clients = self.run.aggregations, self.run.told(self.optimizer), dict[str, Any]()
            if on_clients:
                requests = list(self.configure_evaluate(number, told.arrays, evaluate_config, grid))
                of_clients, self.reporter.by_client = self.evaluator.collect(
                    told, number, requests, grid, self.aggregate_evaluate
                )
            self.reporter.report(
                number,
                told,
                {**metrics, **of_clients},
                evaluate_fn=evaluate_fn,
                shares=self.shares_of_clients,
            )

        with self._running(grid, timeout):
            run, closing, reporter, pace = self.run, self.closing, self.reporter, self.run.pace
            self._call_up.begin()
            state = self._begin(initial_arrays)
            if run.aggregations < num_rounds and not run.is_over():
                run.clients = self.population.look(grid, train_config)
            if state is None:
                pace.begin()
                reporter.report(0, run.result, {}, evaluate_fn=evaluate_fn, shares=dict)
            else:
                run.clock.resume(state["time"])  # waiting for the clients didn't count
            if self._secure is not None:
                self._secure.look(grid)
            closing.begin()
            result = run.result
            for server_round in range(run.aggregations + 1, num_rounds + 1):
                if run.is_over():
                    break
                asked = self._configure(server_round, result.arrays, train_config, grid)
                if run.stopped() or self._call_up.nobody_comes:
                    break
                if pace.budget and pace.over(pace.now() + closing.duration(self._round, server_round)):
                    break
                arrays, train_metrics = self._train(server_round, grid, asked)
                if arrays is None and closing.cut_off():  # cut off; a round that is complete counts
                    break
                result.arrays = result.arrays if arrays is None else arrays
                pace.clock.wait_until(pace.now() + closing.duration(self._round, server_round))
                self.reporter.stability.moved(run.model, 1.0)  # from which this round began
                run.aggregations, metrics = server_round, train_metrics or MetricRecord()
                result.train_metrics_clientapp[server_round] = metrics
                if server_round % (self.config.eval_every or 1) and server_round != num_rounds:
                    reporter.report(server_round, run.told(self.optimizer), metrics)
                else:
                    evaluate(metrics, on_clients=True)
            if run.aggregations > run.evaluated:  # ended early, between two evaluations
                metrics = result.train_metrics_clientapp.get(run.aggregations, MetricRecord())
                evaluate(metrics, on_clients=not run.stopped())
            run.check_worked(initial_arrays)
            if closing.early:
                self.selection.log_observed(self.accounts)
            return run.outcome(run.told(self.optimizer))

    # ---- A round, and Flower's hooks ---------------------------------------------------------------------------

    def _configure(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message] | SummedRound:
        """Draw a round's participants; return the requests, or the round whose sum an engine is asked for."""
        if not isinstance(grid, SummingGrid) or not self._takes_sums():
            self._round = None
            asked = list(self.configure_train(server_round, arrays, config, grid))
            if self.run.stopped() or self._call_up.nobody_comes:
                return asked
            by_node = {request.metadata.dst_node_id: request for request in asked}
            others = self._call_up.others(by_node, self._round, grid, config)
            if others is not None:  # their sizes in replies are their weights: the draw has none for them
                current = self._open(server_round, arrays, (others, None))
                self.closing.open(current)
                for client in others:
                    self.closing.sent(client, by_node[client.node_id])
                self.closing.ready(current)
                current.bytes_down = sum(map(messages.total_bytes, asked))
            return asked
        chosen = self._call_up.participants(server_round, grid, config)
        if chosen is None:
            return []
        current = self._open(server_round, arrays, chosen)
        if current.weights is not None:
            summed = SummedRound(
                self.run,
                self.server_step,
                self.pending,
                self.timeline,
                current,
                arrays,
                config,
                self.local_rule(),
                self.config.update_norm_bound,
                self.selection.stragglers,
            )
            if grid.can_sum(summed.request):
                return summed
        return self._requests(current, arrays, config)

    def _train(self, server_round: int, grid: Grid, asked: Sequence[Message] | SummedRound) -> Outcome:
        """Have the clients of a round train, and make the next model of their updates.

        A round that is cut off leaves no trace: None for the model and the metrics.
        """
        current = self._round
        assert current is not None
        if isinstance(asked, SummedRound):
            assert isinstance(grid, SummingGrid)
            total = asked.work(grid, self.closing.cut_off)
            if self.closing.cut_off():
                return None, None
            return self._conclude(current, asked.request.tasks.weights, total, Untrained(self.run.buffers))
        if self._secure is not None:
            noise = self.config.dp_noise_multiplier
            total, weights = self._secure.work(current, grid, asked, noise, self.closing.cut_off)
            if self.closing.cut_off():
                return None, None
            return self._conclude(current, weights, total, Untrained(self.run.buffers))
        replies = self.closing.replies(current, grid, asked)
        if "aggregate_train" in self.capabilities.round_hooks:
            # A user-defined ``aggregate_train`` gets a list, as from Flower's loop.
            arrays, metrics = self.aggregate_train(server_round, list(replies))
            return None if arrays is None else self.server_step.as_the_model(arrays), metrics
        aggregation = RoundAggregation(self.aggregator, current)
        for reply in replies:
            aggregation.take(reply)
        return self._aggregated(current, aggregation)

    @hook
    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the participants of a round and build their requests, in the order of the clients."""
        if not self.run.own_loop:
            loop = OuterLoop.around(self.run.name, own_start=self.capabilities.own_start)
            self._follow(server_round, arrays, grid, loop)
            if server_round == 1:
                self._call_up.begin()
            check_loop(self.run.pace, self.config, loop)
            check_local_noise(self.config, config)
            if self._secure is not None:
                raise RunError(f"secure_sums = True: {loop.who} reads single updates; call {loop.instead}")
            self.closing.check_loop(loop)
            self.aggregator.wrapper = self.aggregator.wrapper or Wrapped(loop)
            self.aggregator.wrapper.asks(server_round, config)
        chosen = self._call_up.participants(server_round, grid, config)
        if chosen is None:
            return []
        return self._requests(self._open(server_round, arrays, chosen), arrays, config)

    def _open(self, server_round: int, arrays: ArrayRecord, chosen: Chosen) -> Round:
        """Open a round of the chosen participants, with their weights."""
        self.run.model, (participants, weights) = self.run.layout.to_vector(arrays), chosen
        flower = self.run.flower
        metrics = MetricsMean(flower.weighted_by_key, flower.train_metrics_aggr_fn)
        each = self.selection.each
        self._round = Round(server_round, self.run.model, list(participants), weights, metrics, each)
        if isinstance(self.receiver.clip, AdaptiveClip):
            self.receiver.clip.begin()
        return self._round

    def _requests(self, current: Round, arrays: ArrayRecord, config: ConfigRecord) -> list[Message]:
        """Build a round's requests, in the order of the clients."""
        key, requests = self.run.flower.arrayrecord_key, []
        self.closing.open(current)
        companions = self.companions(current.clients)
        beside: Mapping[str, Vector] = {}
        for client in current.clients:
            beside = next(companions, {})
            fields = self.requests.fields(client, current.number, current.number, config)
            fields.update(part := self.selection.asks(client))
            requests.append(self.requests.request(client, fields, arrays, beside))
            self.requests.note_sent(client, requests[-1], part.get(messages.PART, 1.0))
            if key in beside:  # sent in place of the model
                current.bases[client.index] = self.run.layout.rounded(beside[key])
            self.closing.sent(client, requests[-1])
        self.closing.ready(current)
        current.requests = [request.metadata for request in requests]
        current.companions = tuple(beside)
        current.bytes_down = sum(messages.total_bytes(request) for request in requests)
        return requests

    @hook
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Aggregate the valid replies of the round; None for the arrays if no reply is valid.

        A round that is cut off leaves no trace: None for the arrays and the metrics.
        """
        current = self._round
        if current is None:
            raise RunError(
                f"{self.run.name}: aggregate_train is called after configure_train of this library; in a loop around "
                "the strategy an override calls super().configure_train()"
            )
        if self.aggregator.wrapper is not None:
            self.aggregator.wrapper.passes_on()
        if not self.run.own_loop:
            replies = list(replies)
            known = {request.message_id for request in current.requests}
            if any(reply.metadata.reply_to_message_id not in known for reply in replies):
                self.run.warn_once(
                    "replies to requests that super().configure_train() didn't make don't count in a loop around the "
                    "strategy; in its own start() they do"
                )
            replies = self.closing.closed_by_others(current, replies)
        aggregation = RoundAggregation(self.aggregator, current)
        for reply in replies:
            aggregation.take(reply)
        return self._aggregated(current, aggregation)

    def _aggregated(self, current: Round, aggregation: RoundAggregation) -> Outcome:
        """Make the next model of a round's replies; none if the round is cut off: only fast clients would count."""
        if self.closing.cut_off():
            return None, None
        aggregation.end()
        return self._conclude(current, aggregation.weights, aggregation.total, aggregation.buffers)

    def _conclude(
        self, current: Round, weights: Sequence[float], total: Gathered, apart: Untrained
    ) -> Outcome:
        """Enter a round in the accounts, and make the next model of its sum; None if no reply is valid."""
        sent, received = self.run.take_frozen_bytes()
        current.bytes_down, current.bytes_up = current.bytes_down + sent, current.bytes_up + received
        metrics = current.told(
            clipped=self.receiver.clip is None and (self.receiver.bounds_updates or self._secure is not None)
        )
        current.settle(self.accounts, self.timeline, self.run.pace.now())
        metrics.update(self.closing.settle(current))
        if self.selection.weights_say_shares and self.safeguards.left(()) is not None:
            p = self.importance()
            expected = self.expected_weights(np.array(list(p.values())))
            if (q := _as_shortened(expected, self.safeguards.left(p))) is not None:
                metrics["weights-distance"] = 0.5 * float(np.abs(q - np.array(list(p.values()))).sum())
        metrics = client_metrics.beside(metrics, current.metrics.result())
        if isinstance(self.receiver.clip, AdaptiveClip):
            metrics[messages.CLIPPING_NORM] = self.receiver.clip.norm
        moved = self._step(current, weights, total)
        if moved is None:
            number, rule = metrics[messages.PARTICIPANTS], self.config.rule()
            few = f"{number} valid replies without a weight above 0" if number else "no valid reply"
            if number and rule is not None:
                few = f"{number} valid replies are fewer than the {rule.least} for {rule.text}"
            few = "no reply in time" if self.closing.early and not current.clients else few
            if self.selection.scheme.scheme == "poisson" and not current.clients:
                log.info("round %d: no client was drawn, the model stays as it is", current.number)
                return self.run.layout.to_record(current.model), metrics
            log.warning("round %d: %s, the model stays as it is", current.number, few)
            return None, metrics
        if not self.capabilities.records_shares:
            current.credit(self.accounts)
        # Buffers stay as they are if the model doesn't move, or if averaging them would leak data.
        if self.receiver.clip is None and not self.run.keeps_model:
            apart.put_into(moved)
        return self.run.layout.to_record(moved), metrics

    def _step(self, current: Round, weights: Sequence[float], total: Gathered) -> Vector | None:
        """Return the next global model (D,); None if the valid replies are too few."""
        if self.capabilities.needs_all_updates and self._secure is None:
            if not (taken := current.contributions):
                return None
            weights = self.weigh(taken)
            of_each(f"{self.run.name}.weigh", weights, [each.client for each in taken])
            current.worth = {each.client.index: d for each, d in zip(taken, weights, strict=True)}
            return self.server_step.sound(self.aggregate(current.model, taken, weights))
        summed = total.result(weights)
        if summed is None:
            return None
        update = self.direction(summed)
        if self.receiver.clip is not None and not self.config.distributes_noise:  # which is in the sum
            z, sensitivity = self.config.dp_noise_multiplier, total.sensitivity(weights)
            if (tree := self.aggregator.tree) is not None:
                noise = Noise(z, self.config.dp_clipping_norm)
                tree(update, noise, sensitivity, current.number)
            else:
                rng = self.run.central_noise(current.number)
                _add_noise(self.receiver.clip, z, update, sensitivity, rng)
            self.run.any_moved = True  # the noise moves the model, whoever came
            update[self.run.buffers_at] = 0.0
        return self.server_step.sound(
            self.server_step.moved(current.model, update, total.mean_square(weights))
        )

    def _takes_sums(self) -> bool:
        """Return True if the sum of a round's updates is enough: no part of the strategy looks at single updates."""
        able = self.capabilities
        return not (
            able.sees_single_updates
            or not able.streams
            or self._secure is not None
            or self.receiver.witness is not None
            or self.closing.early
            or self.config.rule() is not None
            or self.receiver.clip is not None
            or self.safeguards.learns_norms
            or self.compressed is not None
            or self.run.flower.train_metrics_aggr_fn is not None
            or len(self.run.buffers_at)
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate the model: ``fraction_evaluate`` of them, ``min_evaluate_nodes`` at least."""
        if self.aggregator.wrapper is not None:
            self.aggregator.wrapper.ends(server_round)
        return self.evaluator.requests(server_round, arrays, config, self.closing.may_evaluate())

    def _follow(self, server_round: int, arrays: ArrayRecord, grid: Grid, loop: OuterLoop) -> None:
        """Prepare a round of a user-defined loop, such as Flower's ``Strategy.start`` and its wrappers."""
        run, config = self.run, self.config
        if why := self.unseen_by_wrappers():
            raise RunError(f"{run.name}: {why}, which {loop.who} knows nothing of; call {loop.instead}")
        if self.compressed is not None:
            raise RunError(
                f"compression = {config.compression!r}: {loop.who} can't read compressed updates; allowed is none, "
                f"or {loop.instead}"
            )
        if run.flower.trained is not None:
            raise RunError(f"trained: {loop.who} sends whole models; allowed is none, or {loop.instead}")
        if run.best is not None:
            raise RunError(
                f"keep = {self.config.keep!r}, stop_at = {self.config.stop_at!r}, patience = {self.config.patience}: "
                f"{loop.who} evaluates and ends by itself; call {loop.instead}"
            )
        run.grid, run.aggregations = grid, server_round - 1
        run.take_layout(arrays)
        self.requests.note_model(arrays)
        if server_round == 1:  # the only sign that a run begins
            run.enter(grid)
            self.reset()
            run.model = run.initial_model(arrays)
            self.begin(run.layout, run.model)
            if self.optimizer.averages:
                log.warning(
                    "server_optimizer = %r: its result is the mean of the last two models, which a loop around the "
                    "strategy doesn't make: it has the last one",
                    config.server_optimizer,
                )

    # ---- What a run knows of its clients, and its checkpoint ---------------------------------------------------

    def shares_of_clients(self) -> dict[str, list[float]]:
        """Return per-client statistics, by index: participations, importance, expected and observed share.

        The shares are only known where weights define them: not under a robust rule, nor where a method chooses
        clients or aggregates their work by itself.
        """
        sized = self.config.client_weights != "samples" or all(
            client.num_examples is not None for client in self.run.clients
        )
        p = self.importance() if sized else {}
        size = max(self.accounts.size, max(p, default=-1) + 1)
        shares = {"importance": p} if p else {}
        weighed = self.config.rule() is None
        if p and weighed and (expected := self.expected_weights(np.array(list(p.values())))) is not None:
            q = _as_shortened(expected, self.safeguards.left(p))
            shares["expected-share"] = dict(zip(p, q.tolist(), strict=True))  # type: ignore[union-attr]
        told = {name: [values.get(index, 0.0) for index in range(size)] for name, values in shares.items()}
        if weighed and (not self.capabilities.aggregates or self.capabilities.by_weights):
            told["observed-share"] = client_metrics.shares(self.accounts.column("weight", size))
        counted = self.accounts.column(ACCEPTED, size)
        return {"participation": counted, **told, **self.reporter.costs_of_clients(size)}

    def at_work(self) -> list[int]:
        """Return the indices of the clients that have a request, late tasks included."""
        return list({*super().at_work(), *self.closing.busy()})

    def parts(self) -> list[Any]:
        """Return the parts that have a state: those of every strategy, and those of the round loop."""
        adaptive = [self.receiver.clip] if isinstance(self.receiver.clip, AdaptiveClip) else []
        return [*super().parts(), self.pending, self.closing, self.aggregator, *adaptive]


def _as_shortened(expected: Weights | None, left: Weights | None) -> Weights | None:
    """Return clients' shares (n,), by those expected and by the factors by which safeguards shorten updates."""
    if expected is None or left is None:
        return expected
    shares = expected * left
    return np.asarray(shares / (shares.sum() or 1.0))


def _add_noise(
    clip: Clip | AdaptiveClip, z: float, update: Vector, sensitivity: float, rng: np.random.Generator
) -> None:
    """Add central noise to a round's sum (D,), and adapt the norm to which the next round clips."""
    if not isinstance(clip, AdaptiveClip):
        Noise(z, clip.norm)(update, sensitivity, rng)
        return
    expected = 1 / sensitivity
    Noise(clip.multiplier(z, expected), clip.norm)(update, sensitivity, rng)
    clip.adapt(z, expected, rng)


def _check(name: str, strategy: SynchronousStrategy) -> None:
    """Raise ValueError for values that exclude each other; warn of keys that a method's ``select`` may not read."""
    config, able, scheme = strategy.config, strategy.capabilities, strategy.selection.scheme.scheme
    if scheme == "paired" and not strategy.run.pace.always:
        raise ValueError(
            "participation = 'paired': the last client is in every round, and can't be if it comes and goes; "
            "allowed with availability and task_failure are full, uniform, md, flower, fixed:…"
        )
    if scheme == "turns":
        _check_turns(strategy)
    check_equality(name, config, scheme, able)
    if config.dp == "central" and config.dp_mechanism == "tree":
        _check_tree(name, strategy)
    if config.distributes_noise:
        _check_distributed(config)
    if able.chooses_clients and (scheme, config.fraction_train) != ("full", 1.0):
        log.warning(
            "participation = %r, fraction_train = %g: %s chooses clients by itself (select), by these "
            "only where it reads them",
            config.participation,
            config.fraction_train,
            name,
        )


def _check_distributed(config: SynchronousConfig) -> None:
    """Raise ValueError for noise of clients that nothing hides, or that leaves something without."""
    given = "dp_mechanism = 'distributed'"
    if not config.secure_sums:
        raise ValueError(
            f"secure_sums = False: with {given} the noise of one client is a part of a sum's; allowed is True"
        )
    if not config.dp_clipping_norm:
        raise ValueError(
            f"dp_clipping_norm = 0: with {given} the count by which a norm adapts would have no noise; allowed is a "
            "number > 0"
        )
    if not config.dp_noise_multiplier:
        raise ValueError(f"dp_noise_multiplier = 0: with {given} allowed is a number > 0")


def _check_turns(strategy: SynchronousStrategy) -> None:
    """Raise ValueError for a config in which a client could take part out of its turn."""
    config = strategy.config
    if not strategy.run.pace.always:
        raise ValueError(
            "participation = 'turns': a client takes part in its turn alone, and can't if it comes and goes; allowed "
            "with availability and task_failure are full, uniform, md, flower, fixed:…"
        )
    for field in ("round_deadline", "over_select"):
        if value := getattr(config, field):
            raise ValueError(
                f"{field} = {value}: participation = 'turns' waits for those whose turn it is; allowed is 0"
            )


def _check_tree(name: str, strategy: SynchronousStrategy) -> None:
    """Raise ValueError for a config in which it isn't known beforehand how often a client takes part."""
    config, able, given = strategy.config, strategy.capabilities, "dp_mechanism = 'tree'"
    scheme = strategy.selection.scheme.scheme
    if scheme not in IN_ORDER:
        raise ValueError(
            f"{given}: its account is of rounds in an order that is known, without a draw; "
            f"participation = {scheme!r}, allowed are full, turns, fixed:…"
        )
    if able.chooses_clients or able.round_hooks:
        raise ValueError(f"{given}: {name} chooses or asks clients by itself; allowed is gaussian")
    if not config.dp_clipping_norm:
        raise ValueError(
            f"dp_clipping_norm = 0: with {given} noise is of sums over many rounds, which have one norm; allowed is "
            "a number > 0"
        )
    for field in ("round_deadline", "over_select"):
        if value := getattr(config, field):
            raise ValueError(
                f"{field} = {value}: {given} counts each client in the round that asks it; allowed is 0"
            )


def _closing(strategy: SynchronousStrategy) -> Closing:
    """Return when rounds close: when all have answered, at a deadline, or with as many replies as are needed."""
    config, able, run, selection = strategy.config, strategy.capabilities, strategy.run, strategy.selection
    pending, timeline = strategy.pending, strategy.timeline
    if not (config.round_deadline or config.over_select):
        return WaitForAll(run, pending, timeline, selection.suffices)
    size = RoundSize(run, partial(attrgetter("scheme"), selection), config.over_select)
    check_early(run.name, config, selection.scheme.scheme, able)
    return EarlyClosing(
        config,
        run,
        strategy.population,
        selection,
        size,
        strategy.receiver,
        pending,
        strategy.accounts,
        timeline,
        able,
    )
