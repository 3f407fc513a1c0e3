"""Rounds of which an engine returns sums of updates, where no part of the strategy needs single updates."""

from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from strategies.clients.accounts import Timeline
from strategies.core.requests import PendingReplies
from strategies.core.run_state import RunState
from strategies.core.server_step import ServerStep
from strategies.flower import messages
from strategies.rounds.round import Round
from strategies.rounds.stragglers import Stragglers
from strategies.updates.aggregation import WeightedSum
from strategies.updates.sums import SummingGrid, SumRequest, SumTasks


class SummedRound:
    """A round of which an engine is asked for the sum of its updates.

    Parameters
    ----------
    current : Round
        The round, whose weights are known.
    arrays, config : ArrayRecord, ConfigRecord
        The model that clients are sent, and what the loop adds to each request.
    rule : dict of str to float
        The method's local rule.
    bound : float
        S: a longer update is shortened to it; 0: no bound.
    stragglers : Stragglers, optional
        Which participants get only a part of their work done.

    Attributes
    ----------
    request : SumRequest
        The one request for all clients.
    """

    def __init__(
        self,
        run: RunState,
        server_step: ServerStep,
        pending: PendingReplies,
        timeline: Timeline,
        current: Round,
        arrays: ArrayRecord,
        config: ConfigRecord,
        rule: dict[str, float],
        bound: float,
        stragglers: Stragglers | None = None,
    ) -> None:
        self._run, self._server_step, self._pending, self._timeline = run, server_step, pending, timeline
        self._current = current
        assert current.weights is not None
        size = messages.num_bytes(arrays)
        nodes = [client.node_id for client in current.clients]
        clients = [client.index for client in current.clients]
        parts = [1.0 if stragglers is None else stragglers.part(client) for client in clients]
        tasks = SumTasks(nodes, clients, current.number, current.weights, np.array(parts))
        if run.pace.weighs:
            run.pace.loads.note_all(clients, size, parts)
        current.bytes_down = size * len(clients)
        fields = ConfigRecord({**config, messages.SERVER_ROUND: current.number, **rule})
        squares = server_step.optimizer.reads_squares
        self.request = SumRequest(arrays, fields, tasks, rule, bound, squares)

    def work(self, grid: SummingGrid, cut_off: Callable[[], bool]) -> WeightedSum:
        """Have the engine work on the tasks; return the weighted sum. ``cut_off``: whether to give up the round."""
        current, request = self._current, self.request
        current.begin_tasks(self._timeline, self._run.pace)
        tasks = request.tasks
        current.worth = dict(zip(tasks.clients, tasks.weights, strict=True))
        if current.lost:
            tasks = tasks.at(
                [place for place, index in enumerate(tasks.clients) if index not in current.lost]
            )
        gathered = WeightedSum(len(current.model), len(tasks), bound=request.bound)
        for client in current.clients:
            if client.index in current.lost:
                current.leave_out(client, messages.NO_REPLY)
        if len(tasks):
            self._gather(grid, request.with_tasks(tasks), gathered, cut_off)
        return gathered

    def _gather(
        self,
        grid: SummingGrid,
        request: SumRequest,
        gathered: WeightedSum,
        cut_off: Callable[[], bool],
    ) -> None:
        """Add the blocks' sums as they come, until the round is cut off; note the tasks that don't count."""
        current, size = self._current, messages.num_bytes(request.arrays)
        tasks, begin = request.tasks, 0
        self._pending.expect(dict(zip(tasks.nodes, tasks.clients, strict=True)))
        try:
            for block in grid.sums(request):
                own = tasks[begin : begin + block.number]
                begin += block.number
                for node_id in own.nodes:
                    self._pending.answered(node_id)
                self._timeline.arrived_all(own.clients, self._run.pace.now())
                for place, (reason, outcome) in block.not_counted.items():
                    self._run.last_reason = reason
                    current.leave_out(current.client(own.clients[place]), reason, outcome=outcome)
                bounded, told = [own.clients[place] for place in block.bounded], block.metrics
                if block.not_counted:
                    counting = [place for place in range(block.number) if place not in block.not_counted]
                    told = {name: [values[place] for place in counting] for name, values in told.items()}
                    own = own.at(counting)
                current.count_all(own.clients, size, bounded)
                current.metrics.add_columns(own.weights, told)
                moved = self._server_step.looked_at(block.total)
                gathered.add_block(moved, block.squares, own.weights, block.furthest)
                if cut_off():
                    return
        finally:
            self._pending.expect({})
