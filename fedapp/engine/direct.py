"""Tasks without messages: they wait until one of them is asked for, and then all that wait are trained together.

The groups of tasks that are trained together are the same as if each task were a message whose reply is asked for
alone (fedapp/engine/vectorized.py), and the results are bit-equal.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord
from torch import Tensor

from fedapp.client.handlers import reason_of
from fedapp.client.training import TaskTerms, parts_of, task_metrics
from fedapp.engine.nodes import Nodes
from fedapp.engine.shared_rows import SharedRows
from fedapp.federation.rows import RowsOf
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Trained, Trainer
from fedapp.training.work import scheduled_lr
from strategies.flower import messages
from strategies.flower.grids import HandedTask, Work, WorkRequest

# Most waiting tasks that are trained together, and most values of their models together: of larger models fewer tasks
# are in a group, so that threads and workers share the groups.
TOGETHER, TOGETHER_VALUES = 8, 1 << 20


def together(number: int, size: int) -> list[range]:
    """Return the places of tasks that are trained together, for a model of ``size`` values, on any engine."""
    step = max(min(TOGETHER, TOGETHER_VALUES // max(size, 1)), 1)
    return [range(start, min(start + step, number)) for start in range(0, number, step)]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A waiting task, and its request, which other tasks share."""

    id: str
    task: HandedTask
    request: WorkRequest


class DirectTasks:
    """The tasks that were dispatched, and their results.

    Parameters
    ----------
    nodes : Nodes
        The nodes of the simulation.
    trainer : Trainer
        Trains the groups of tasks.
    rows_of : callable
        Returns the rows of all clients.
    budget : int
        Bytes of models from which on no more tasks are trained at once.
    """

    def __init__(self, nodes: Nodes, trainer: Trainer, rows_of: RowsOf, budget: int) -> None:
        self.nodes, self.trainer, self.rows_of, self.budget = nodes, trainer, rows_of, budget
        self._queue: deque[_Waiting] = deque()
        self._done: dict[str, Work] = {}
        self._numbers = count()
        self._shared: tuple[WorkRequest, _Shared] | None = None

    def hand_out(self, request: WorkRequest) -> Sequence[str]:
        """Add a request's tasks to the queue; return their ids."""
        ids = [f"task/{next(self._numbers)}" for _ in request.tasks]
        self._queue.extend(_Waiting(*each, request) for each in zip(ids, request.tasks, strict=True))
        return ids

    def work(self, task_id: str) -> Work | None:
        """Return a task's result, once; if the task waits, first train the tasks at the head of the queue."""
        if task_id not in self._done:
            self.train()
        return self._done.pop(task_id, None)

    def train_all(self) -> None:
        """Train all tasks that wait."""
        while self._queue:
            self.train()

    def train(self) -> None:
        """Train tasks from the head of the queue, until their models have ``budget`` bytes."""
        built: list[tuple[_Waiting, LocalTask]] = []
        models: dict[object, TaskTerms] = {}
        for waiting in self._head():
            try:
                task = self._built(waiting, models)
            except Exception as error:  # an engine answers with an error, whatever a task raised
                self._done[waiting.id] = _undone(error)
                continue
            built.append((waiting, task))
        groups = together(len(built), built[0][0].request.layout.size) if built else []
        trained = self.trainer.train([task for _, task in built], groups)
        for (waiting, task), result in zip(built, trained, strict=True):
            self._done[waiting.id] = (
                _undone(result) if isinstance(result, Exception) else _work_of(waiting.request, task, result)
            )

    def _head(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        size = 0
        while self._queue and size < self.budget:
            taken.append(self._queue.popleft())
            size += taken[-1].request.layout.num_bytes
        return taken

    def _built(self, waiting: _Waiting, models: dict[object, TaskTerms]) -> LocalTask:
        """Return the task to train; ``models`` has the terms by model and rule, and grows with new ones."""
        request = waiting.request
        before = None if self._shared is None else self._shared[0]
        if before is None or before.config is not request.config or before.rule != request.rule:
            self._shared = request, _Shared.of(request, self.nodes, self.rows_of)
        assert self._shared is not None
        shared = self._shared[1]
        same = id(request.base), id(request.config), tuple(sorted(request.rule.items()))
        if (terms := models.get(same)) is None:
            terms = models[same] = shared.terms_on(request)
        return shared.task(terms, waiting.task)


@dataclass(frozen=True, eq=False)
class _Shared:
    """The terms that the tasks of a run share, and the rows of all clients."""

    terms: TaskTerms
    data: SharedRows

    @classmethod
    def of(cls, request: WorkRequest, nodes: Nodes, rows_of: RowsOf) -> "_Shared":
        data = SharedRows.of(request.config, nodes, rows_of)
        fields = ConfigRecord({**request.config, messages.SERVER_ROUND: request.server_round, **request.rule})
        state = _state_of(request, data.device)
        return cls(TaskTerms.of(fields, data.config, data.dataset, state, data.device), data)

    def terms_on(self, request: WorkRequest) -> TaskTerms:
        """Return the terms of the tasks on one version of the model."""
        config = self.data.config
        lr = scheduled_lr(config.lr, config.lr_schedule, request.server_round, config.num_server_rounds)
        start, fixed = parts_of(self.terms.model, _state_of(request, self.data.device))
        return replace(self.terms, start=start, fixed=fixed, lr=lr)

    def task(self, terms: TaskTerms, asked: HandedTask) -> LocalTask:
        """Return a client's task."""
        begin, end = self.data.span(asked.node_id)
        rows = self.data.rows
        return terms.task((rows.x, rows.y, begin), end - begin, asked.client, asked.number)


def _state_of(request: WorkRequest, device: torch.device) -> dict[str, Tensor]:
    """Return a request's model as tensors, which its tasks share and don't write to."""
    state, layout = {}, request.layout
    for name, shape, dtype, span in zip(
        layout.names, layout.shapes, layout.dtypes, layout.spans, strict=True
    ):
        values = request.base[span].reshape(shape).astype(dtype, copy=False)
        state[name] = torch.from_numpy(values).to(device)
    return state


def _undone(error: Exception) -> Work:
    return Work(np.empty(0), MetricRecord(), reason=reason_of(error))


def _work_of(request: WorkRequest, task: LocalTask, trained: Trained) -> Work:
    arrays, loss = trained
    model, layout = np.empty(len(request.base)), request.layout
    for name, span in zip(layout.names, layout.spans, strict=True):
        own = arrays.get(name)
        model[span] = request.base[span] if own is None else own.reshape(-1)
    return Work(model, task_metrics(task, loss), layout.num_bytes)
