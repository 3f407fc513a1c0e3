"""What becomes of a round's work: replies through the chain, or sums from where the clients are, to the next model.

The loop is in strategies/rounds/strategy.py.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from strategies import streams
from strategies.clients.metrics import MetricsMean
from strategies.clients.roster import Client
from strategies.core.config import SynchronousConfig
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Vector
from strategies.flower.errors import RunError
from strategies.flower.exchange import in_order
from strategies.rounds.round import Round
from strategies.rounds.timed_rounds import TimedRounds
from strategies.updates.aggregation import MEAN, WeightedSum
from strategies.updates.buffers import Untrained
from strategies.updates.chain import Check, Clip, Contribution, Link, Noise, UnweighedError, chain
from strategies.updates.sums import SummingGrid, SumRequest, SumTasks

log = logging.getLogger("flwr.strategies")


class GatheredRounds(TimedRounds):
    """Rounds whose work becomes a new model."""

    _looks_at_updates: bool  # in a hook of its own, or at messages

    #: Whether a reply is done with as it comes, so that a round's models are never all in memory. Not where a hook
    #: changes what later rounds rest on, as a cache does: a round that is cut off must leave no trace.
    streams: ClassVar[bool] = True

    def __init__(self, config: SynchronousConfig | None = None, **run: Any) -> None:
        super().__init__(config, **run)
        config = self.config
        self._clip = Clip(config.dp_clipping_norm) if config.dp == "central" else None
        noise = Noise(config.dp_noise_multiplier, config.dp_clipping_norm)
        self._noise = noise if config.dp == "central" else None

    def _round_of(
        self, server_round: int, participants: Sequence[Client], weights: Sequence[float] | None
    ) -> Round:
        metrics = MetricsMean(self.flower.weighted_by_key, self.flower.train_metrics_aggr_fn)
        return Round(server_round, self.model, list(participants), weights, metrics)

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
                if client.index not in current.lost:
                    gathered.skip()
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
                gathered.add(weight, moves)
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

    def _conclude(
        self, current: Round, weights: Sequence[float], gathered: WeightedSum, apart: Untrained
    ) -> tuple[ArrayRecord | None, MetricRecord]:
        """Enter a round in the books, and make the next model of what was gathered; None if there is nothing."""
        bounds = bool(self.config.update_norm_bound) or self.safeguards.learns_norms
        metrics = current.told(clipped=bounds and self._clip is None)
        current.settle(self.accounts, self.timeline, self.pace.now())
        metrics.update(self._settle_late(current))
        moved = self._step(current, weights, gathered)
        if moved is None:
            number = metrics[messages.PARTICIPANTS]
            rule = self.config.aggregation_rule
            few = "no valid reply" if not number else f"{number} valid replies are too few for {rule}"
            few = "no reply in time" if current.early and not current.clients else few
            log.warning("round %d: %s, the model stays as it is", current.number, few)
            return None, metrics
        current.credit(self.accounts, self._worth)
        # What isn't trained stays as it is where the model does, and where it would tell of the data.
        if self._noise is None and not self.stays:
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

    def _noise_stream(self, server_round: int) -> np.random.Generator:
        """Return a round's stream of noise, which nobody can know unless the run is to be repeated."""
        if not self.repeatable:
            return streams.unpredictable()
        return streams.generator(self.config.seed, "central-noise", server_round)

    # ---- Sums from where the clients are ----------------------------------------------------------------------

    @property
    def _takes_sums(self) -> bool:
        """Whether nobody looks at single updates of a round."""
        return not (
            self._looks_at_updates
            or not self.streams
            or self.witness is not None
            or self.closes_early
            or self.config.aggregation_rule != MEAN
            or self._noise is not None
            or self.safeguards.learns_norms
            or self._compression() is not None
            or self.flower.train_metrics_aggr_fn is not None
            or len(self._untrained_at)
        )

    def _sum_request(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        participants: Sequence[Client],
        weights: Sequence[float] | None,
    ) -> SumRequest | None:
        """Return what a round asks for where it asks for sums; None where it needs messages."""
        if weights is None:
            return None
        current = self._round = self._round_of(server_round, participants, weights)
        size, rule = messages.num_bytes(arrays), self.local_rule()
        nodes, clients = (
            [client.node_id for client in participants],
            [client.index for client in participants],
        )
        parts = [self.stragglers.part(client) for client in clients]
        tasks = SumTasks(nodes, clients, server_round, weights, np.array(parts))
        self.loads.note_all(clients, size, parts)
        current.bytes_down = size * len(participants)
        fields = ConfigRecord({**config, messages.SERVER_ROUND: server_round, **rule})
        bound, squares = self.config.update_norm_bound, self.optimizer.reads_squares
        return SumRequest(arrays, fields, tasks, rule, bound, squares)

    def _aggregate_sums(
        self, grid: SummingGrid, request: SumRequest
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Have a round's tasks done and summed, and make the next model of the sum."""
        current = self._round
        assert current is not None
        assert current.weights is not None
        current.begin_tasks(self.timeline, self.pace)
        tasks = request.tasks
        self._worth = dict(zip(tasks.clients, tasks.weights, strict=True))
        if current.lost:
            tasks = tasks.at(
                [place for place, index in enumerate(tasks.clients) if index not in current.lost]
            )
        gathered = WeightedSum(len(current.model), len(tasks), bound=request.bound)
        for client in current.clients:
            if client.index in current.lost:
                current.leave_out(client, messages.NO_REPLY)
        if len(tasks):
            self._gather_sums(current, grid, replace(request, tasks=tasks), gathered)
        if self._cut_off():
            return None, None
        return self._conclude(current, current.weights, gathered, Untrained(self._untrained_at))

    def _gather_sums(
        self, current: Round, grid: SummingGrid, request: SumRequest, gathered: WeightedSum
    ) -> None:
        """Take sums in as they come, until the round is cut off; keep the reasons against single tasks."""
        size, tasks, begin = messages.num_bytes(request.arrays), request.tasks, 0
        self._asked = dict(zip(tasks.nodes, tasks.clients, strict=True))
        try:
            for block in grid.sums(request):
                own = tasks[begin : begin + block.number]
                begin += block.number
                for node_id in own.nodes:
                    del self._asked[node_id]
                self.timeline.arrived_all(own.clients, self.pace.now())
                for place, (reason, outcome) in block.not_counted.items():
                    self._why = reason
                    current.leave_out(current.client(own.clients[place]), reason, outcome=outcome)
                bounded, told = [own.clients[place] for place in block.bounded], block.metrics
                if block.not_counted:
                    counting = [place for place in range(block.number) if place not in block.not_counted]
                    told = {name: [values[place] for place in counting] for name, values in told.items()}
                    own = own.at(counting)
                current.count_all(own.clients, size, bounded)
                current.metrics.add_columns(own.weights, told)
                gathered.add_block(self._look_at(block.total), block.squares, own.weights, block.furthest)
                if self._cut_off():
                    return
        finally:
            self._asked = {}
