"""Rounds of which an engine returns sums of updates, where no part of the strategy needs single updates."""

from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from strategies.flower import messages
from strategies.rounds.round import Aggregate, Round
from strategies.rounds.session import RoundSession
from strategies.updates.aggregation import WeightedSum
from strategies.updates.buffers import BufferAverage
from strategies.updates.sums import SummingGrid, SumRequest, SumTasks


class EngineSums:
    """Has an engine train the participants of a round, and adds the sums of their updates that it returns.

    Parameters
    ----------
    session : RoundSession
        The run.
    """

    def __init__(self, session: RoundSession) -> None:
        self._session = session
        self._request: SumRequest | None = None

    def supports(self, grid: Grid) -> bool:
        """Return True if a grid can add up, and no part of the strategy looks at single updates."""
        session, strategy, run = self._session, self._session.strategy, self._session.run
        able, config = strategy.capabilities, strategy.config
        reads_single_updates = (
            able.sees_single_updates,
            not able.aggregates_on_arrival,
            config.secure_sums,
            run.options.on_client_model,
            config.closes_early,
            config.rule(),
            session.receiver.clip,
            session.safeguards.learns_norms,
            session.compressed,
            run.flower.train_metrics_aggr_fn,
            len(run.buffers_at),
        )
        return isinstance(grid, SummingGrid) and not any(reads_single_updates)

    def ask(self, cohort: Round, config: ConfigRecord, grid: Grid) -> bool:
        """Prepare the one request for all participants; return False if the grid can't add up their updates."""
        if cohort.weights is None:
            return False
        session, strategy, clients = self._session, self._session.strategy, [c.index for c in cohort.clients]
        size, stragglers = messages.num_bytes(cohort.arrays), session.selection.stragglers
        fractions = [stragglers.part(client) for client in clients]
        nodes = [client.node_id for client in cohort.clients]
        tasks = SumTasks(nodes, clients, cohort.number, cohort.weights, np.array(fractions))
        if session.scheduler.uses_device_profiles:
            session.scheduler.task_costs.record_all(clients, size, fractions)
        cohort.bytes_down = size * len(clients)
        rule = strategy.local_rule()
        server_round = session.upper_round or cohort.number
        fields = ConfigRecord({**config, messages.SERVER_ROUND: server_round, **rule})
        bound, squares = strategy.config.update_norm_bound, session.optimizer.reads_squares
        self._request = SumRequest(cohort.arrays, fields, tasks, rule, bound, squares)
        assert isinstance(grid, SummingGrid)
        return grid.can_sum(self._request)

    def run(self, cohort: Round, grid: Grid) -> Aggregate | None:
        """Have the engine work on the tasks; return the weighted sum, None if the round is cancelled."""
        session, request = self._session, self._request
        assert request is not None
        assert isinstance(grid, SummingGrid)
        cohort.begin_tasks(session.timeline, session.scheduler)
        tasks, total = request.tasks, WeightedSum(len(cohort.model), bound=request.bound)
        cohort.weight_by_client = dict(zip(tasks.clients, tasks.weights, strict=True))
        if cohort.lost:
            tasks = _without_lost(cohort, tasks)
        if len(tasks):
            self._add_blocks(cohort, grid, replace(request, tasks=tasks), total)
        if session.run.should_stop():
            return None
        return Aggregate(request.tasks.weights, total, BufferAverage(session.run.buffers))

    def _add_blocks(self, cohort: Round, grid: SummingGrid, request: SumRequest, total: WeightedSum) -> None:
        """Add the blocks' sums as they come, until the round is cancelled; note the tasks that don't count."""
        session, size = self._session, self._session.scheduler.task_costs.up
        tasks, begin = request.tasks, 0
        session.pending.expect(dict(zip(tasks.nodes, tasks.clients, strict=True)))
        try:
            for block in grid.sums(request):
                own = tasks[begin : begin + block.number]
                begin += block.number
                for node_id in own.nodes:
                    session.pending.answered(node_id)
                session.timeline.arrived_all(own.clients, session.scheduler.now())
                for place, (reason, outcome) in block.not_counted.items():
                    session.run.last_failure = reason
                    cohort.reject(cohort.client(own.clients[place]), reason, outcome=outcome)
                bounded, metrics = [own.clients[place] for place in block.bounded], block.metrics
                if block.not_counted:
                    own, metrics = own.at(block.counting), block.counting_metrics
                cohort.count_all(own.clients, size, bounded)
                cohort.metrics.add_columns(own.weights, metrics)
                update = session.server_step.note_nonzero(block.total)
                total.add_block(update, block.squares, own.weights, block.furthest)
                if session.run.should_stop():
                    return
        finally:
            session.pending.expect({})


def _without_lost(cohort: Round, tasks: SumTasks) -> SumTasks:
    """Note the lost tasks of a round, and return the others."""
    for index in [index for index in tasks.clients if index in cohort.lost]:
        cohort.reject(cohort.client(index), messages.NO_REPLY)
    return tasks.at([place for place, index in enumerate(tasks.clients) if index not in cohort.lost])
