"""Rounds of which an engine returns the sums of updates: no single update is looked at."""

from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from strategies.clients.timeline import Timeline
from strategies.core.pending import PendingReplies
from strategies.core.run_state import RunState
from strategies.core.server_step import ServerStep
from strategies.flower import messages
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection
from strategies.updates.aggregation import WeightedSum
from strategies.updates.sums import SummingGrid, SumRequest, SumTasks


class SummedRounds:
    """Asks an engine for a round's sums.

    Parameters
    ----------
    local_rule : callable
        Hook of the method.
    bound : float
        S: a longer update is shortened to it; 0: no bound.
    """

    def __init__(
        self,
        run: RunState,
        server_step: ServerStep,
        pending: PendingReplies,
        timeline: Timeline,
        selection: Selection,
        local_rule: Callable[[], dict[str, float]],
        bound: float,
    ) -> None:
        self._run, self._server_step, self._pending = run, server_step, pending
        self._timeline, self._selection = timeline, selection
        self._local_rule, self._bound = local_rule, bound

    def request(
        self, current: Round, arrays: ArrayRecord, config: ConfigRecord, weights: Sequence[float]
    ) -> SumRequest:
        """Return what a round asks for."""
        size, rule = messages.num_bytes(arrays), self._local_rule()
        nodes = [client.node_id for client in current.clients]
        clients = [client.index for client in current.clients]
        stragglers = self._selection.stragglers
        parts = [1.0 if stragglers is None else stragglers.part(client) for client in clients]
        tasks = SumTasks(nodes, clients, current.number, weights, np.array(parts))
        if self._run.pace.weighs:
            self._run.pace.loads.note_all(clients, size, parts)
        current.bytes_down = size * len(clients)
        fields = ConfigRecord({**config, messages.SERVER_ROUND: current.number, **rule})
        return SumRequest(arrays, fields, tasks, rule, self._bound, self._server_step.optimizer.reads_squares)

    def work(
        self, current: Round, grid: SummingGrid, request: SumRequest, cut_off: Callable[[], bool]
    ) -> WeightedSum:
        """Have a round's tasks done, and return their sum; ``cut_off``: whether the round is given up."""
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
            self._gather(current, grid, request.with_tasks(tasks), gathered, cut_off)
        return gathered

    def _gather(
        self,
        current: Round,
        grid: SummingGrid,
        request: SumRequest,
        gathered: WeightedSum,
        cut_off: Callable[[], bool],
    ) -> None:
        """Take sums in as they come, until the round is cut off; keep the reasons against single tasks."""
        size, tasks, begin = messages.num_bytes(request.arrays), request.tasks, 0
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
