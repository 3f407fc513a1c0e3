"""The round loop of the synchronous strategies, and the hooks an algorithm fills in.

A round draws its participants, sends each the global model, waits for the trained models and puts them together:
w̄ ← step(w̄, Σ d_i Δ_i), with Δ_i = w_i − w̄, d_i the weight that makes the participation scheme unbiased (Dhasade,
Kremer & Renard, algorithm 1; strategies/weights.py) and step the server optimizer's, by default the
sum. Σ runs in the order of the clients, in float64, so that a run doesn't depend on who answers first. A reply that
is an error, missing, not finite or of another shape or dtype is left out, named in the log and counted; its weight is
shared over the others. A round with no valid reply keeps the model, and the optimizer takes no step.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies import messages, streams
from strategies.aggregation import MEAN, WeightedSum, gathering
from strategies.arrays import ArraysMismatchError, Vector
from strategies.chain import Check, Clip, Contribution, Link, Noise, UnweighedError, chain
from strategies.config import SynchronousConfig
from strategies.errors import RunError
from strategies.exchange import in_order
from strategies.metrics import MetricsMean
from strategies.packing import packing
from strategies.reporting import EvaluateFn
from strategies.round import Round
from strategies.safeguards import bounded
from strategies.timed_rounds import TimedRounds
from strategies.untrained import Untrained

log = logging.getLogger("flwr.strategies")


class SynchronousStrategy(TimedRounds):
    """The loop that FedAvg, FedProx and the spectral method share; a Flower Strategy for any Flower app.

    The parameters are those of ``strategies.base.FederatedStrategy``. In virtual time a round takes as long as its
    slowest participant, unless it closes early (strategies/deadline.py). Under Flower's own ``Strategy.start`` the
    rounds are the same; clock, time budget and observer belong to this one.

    New model: when all participants have answered.
    """

    #: Whether a reply is done with as it comes, so that a round's models are never all in memory. Not where a hook
    #: changes what later rounds rest on, as a cache does: a round that is cut off must leave no trace.
    streams: ClassVar[bool] = True

    def __init__(self, config: SynchronousConfig | None = None, **run: Any) -> None:
        super().__init__(config, **run)
        config = self.config
        self._clip = Clip(config.dp_clipping_norm) if config.dp == "central" else None
        noise = Noise(config.dp_noise_multiplier, config.dp_clipping_norm)
        self._noise = noise if config.dp == "central" else None

    # ---- Flower's hooks -------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the participants of a round and build their requests, in the order of the clients."""
        if not self._own_loop:
            self._follow(server_round, arrays, grid)
            self._check_loop()
            self.wrapped.asks(server_round, config)
        self.clients = clients = self._take_part(grid, config)
        if not clients:  # stopped before they could answer
            return []
        self._say_objective()
        drawn = self._drawn(self._free(grid), server_round)
        participants, weights = self.stragglers.among(*drawn, server_round)
        self.model = self._layout.to_vector(arrays)
        early, self._fields = self._early(participants, weights, server_round), config
        companions, requests = self.companions(participants), []
        beside: Mapping[str, Vector] = {}
        for client in participants:
            beside = next(companions, {})
            own = self._train_config(client, server_round, server_round, config)
            own.update(self.stragglers.asks(client))
            requests.append(self._train_request(client, own, arrays, beside))
            if early is not None:
                early.note_sent(client, requests[-1], beside)
        self._round = Round(
            number=server_round,
            model=self.model,
            clients=list(participants),
            weights=weights,
            requests=[request.metadata for request in requests],
            companions=tuple(beside),
            bytes_down=sum(messages.total_bytes(request) for request in requests),
            metrics=MetricsMean(self.flower.weighted_by_key, self.flower.train_metrics_aggr_fn),
            early=early,
        )
        return requests

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put the valid replies of the round together; None for the arrays if there is none.

        A round that is cut off leaves no trace: None for both.
        """
        current = self._round
        if current is None:
            raise RuntimeError("aggregate_train is called after configure_train")
        self.wrapped.passes_on()
        if current.early is not None and not self._own_loop:
            replies = self._closed_by_others(current, replies)
        streaming = self.streams and current.weights is not None and not self._must_look_first
        if not streaming:
            replies = list(replies)
            if self._cut_off():
                return None, None  # a round that was cut off would count only its fast clients
        weights = self._weights_of(current, replies)
        self._worth = {client.index: d for client, d in zip(current.clients, weights, strict=True)}
        size, rule = len(current.model), self.config.aggregation_rule
        gathered = gathering(rule, self.config.faulty_clients, size, squares=self.optimizer.reads_squares)
        apart = self._gather(current, weights, replies, gathered)
        if streaming and self._cut_off():
            return None, None
        metrics = current.told(clipped=bool(self.config.update_norm_bound) or self.safeguards.learns_norms)
        current.settle(self.accounts, self.timeline, self.pace.now())
        metrics.update(self._settle_late(current))
        moved = self._step(current, weights, gathered)
        if moved is None:
            number = metrics[messages.PARTICIPANTS]
            few = "no valid reply" if not number else f"{number} valid replies are too few for {rule}"
            few = "no reply in time" if current.early and not current.clients else few
            log.warning("round %d: %s, the model stays as it is", server_round, few)
            return None, metrics
        current.credit(self.accounts, self._worth)
        if self._noise is None:  # what isn't trained would tell of the data; it stays as it is
            apart.put_into(moved)
        return self._layout.to_record(moved), metrics

    def _step(self, current: Round, weights: Sequence[float], gathered: WeightedSum) -> Vector | None:
        """Return the next global model (D,); None if there is nothing that it could be made of."""
        if self._wants_all:
            if not (taken := current.contributions):
                return None
            weights = self.weigh(taken)
            self._worth = {each.client.index: d for each, d in zip(taken, weights, strict=True)}
            return self._sound(self.aggregate(current.model, taken, weights))
        total = gathered.result(weights)
        if total is None:
            return None
        update = self.direction(total)
        if self._noise is not None:
            self._noise(update, gathered.sensitivity(weights), self._noise_stream(current.number))
            update[self._untrained_at] = 0.0
        return self._sound(self._moved(current.model, update, gathered.mean_square(weights)))

    # ---- The loop -------------------------------------------------------------------------------------------

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

        Returns
        -------
        Result
            The final model (the initial one if no round succeeded) and the metrics by round.
        """
        grid = packing(grid)
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = train_config if evaluate_config is None else evaluate_config
        with self._running(grid, timeout):
            return self._run(grid, initial_arrays, num_rounds, train_config, evaluate_config, evaluate_fn)

    def _run(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        if self._begin(initial_arrays) is None:
            self._report(0, self._result, evaluate_fn, MetricRecord(), evaluate=True)
        self._take_up_late_work()
        result = self._result
        for server_round in range(self.aggregations + 1, num_rounds + 1):
            requests = list(self.configure_train(server_round, result.arrays, train_config, grid))
            if self.stopped() or not self._fits_budget(server_round):
                break
            replies: Iterable[Message] = self._replies(self._round, grid, requests)
            if type(self).aggregate_train is not SynchronousStrategy.aggregate_train:
                replies = list(replies)  # as Flower's own loop gives them
            arrays, train_metrics = self.aggregate_train(server_round, replies)
            if arrays is None and self._cut_off():  # cut off; a round that is complete counts
                break
            result.arrays = arrays or result.arrays
            self.clock.wait_until(self.pace.now() + self._duration(server_round))
            self.aggregations, metrics = server_round, train_metrics or MetricRecord()
            result.train_metrics_clientapp[server_round] = metrics
            every = self.config.eval_every or 1
            told = self._told_of(result)
            if evaluate := server_round % every == 0 or server_round == num_rounds:
                metrics = self._evaluate_on_clients(server_round, told, evaluate_config, grid, metrics)
            self._report(server_round, told, evaluate_fn, metrics, evaluate=evaluate)
        if self.aggregations > self._evaluated:  # stopped early, between two evaluations
            self._report(self.aggregations, self._told_of(result), evaluate_fn, MetricRecord(), evaluate=True)
        self._check_worked(initial_arrays)
        self._say_observed()
        return self._told_of(result)

    def _noise_stream(self, server_round: int) -> np.random.Generator:
        """Return a round's stream of noise, which nobody can know unless the run is to be repeated."""
        if not self.repeatable:
            return streams.unpredictable()
        return streams.generator(self.config.seed, "central-noise", server_round)

    # ---- Parts of a round -----------------------------------------------------------------------------------

    def _links(self) -> list[Link | None]:
        """Clip as the clients have done, if they are ours, before anybody sees the model."""
        bound, *others = super()._links()
        return [bound, self._clip, *others]

    def _gather(
        self, current: Round, weights: Sequence[float], replies: Iterable[Message], gathered: WeightedSum
    ) -> Untrained:
        """Take the valid replies in, in the order of the clients; keep the reasons against the others.

        Return what isn't trained, set apart.
        """
        apart = Untrained(self._untrained_at, robust=self.config.aggregation_rule != MEAN)
        check, links, unweighed = self._reads(apart), chain(*self._links()), False
        if self._must_look_first:
            replies = list(replies)
            self._look_at_norms(current, check, replies)
        answers = in_order(current.requests, replies)
        for client, weight, reply in zip(current.clients, weights, answers, strict=True):
            base, sent_in = current.base_of(client)
            try:
                local = check(client, reply, base)
            except ArraysMismatchError as error:
                self._why = str(error)
                current.leave_out(client, self._why, reply)
                unweighed = unweighed or isinstance(error, UnweighedError)
                continue
            assert reply is not None
            self.wrapped.look(local, apart.positions, reply)
            links(local)
            age, key = current.number - sent_in, self.flower.arrayrecord_key
            contribution = Contribution.of(local, reply, sent_in - 1, age, key)
            self._check_applied(contribution, [*current.companions, *self.stragglers.asks(client)])
            if self._wants_all:
                current.contributions.append(contribution)
            else:
                moves = self._look_at(self.counted(contribution))
                gathered.add(weight, bounded(weight, moves, self.config.update_norm_bound))
            apart.add(weight, contribution.untrained)
            current.take_in(contribution, weight, reply, bounded=local.bounded)
        if unweighed and len(current.failures) == len(current.clients):
            raise RunError(f"no client counts: {next(iter(current.failures.values()))}")
        self._check_mods(current)
        self.wrapped.judge()
        return apart

    @property
    def _must_look_first(self) -> bool:
        """Whether nobody knows yet what norms are usual: then all of the round are looked at before any counts."""
        return self.safeguards.learns_norms and not self.safeguards.norms.knows_enough(len(self.clients))

    def _look_at_norms(self, current: Round, check: Check, replies: Iterable[Message]) -> None:
        for client, reply in zip(current.clients, in_order(current.requests, replies), strict=True):
            with suppress(ArraysMismatchError):
                self.safeguards.norms.see(check(client, reply, current.base_of(client)[0]))
