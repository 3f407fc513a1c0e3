"""A round's tasks without messages: trained where the data are, block by block, and answered with sums.

The config, the model and the rule, which all tasks of a round share, are read once; each task adds its client's rows
and the random stream of its batches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedapp import federation
from fedapp.client.handlers import USER_ERRORS, reason_of
from fedapp.client.training import TaskTerms
from fedapp.engine.models import Models, models_of
from fedapp.engine.nodes import Nodes
from fedapp.engine.shared_rows import SharedRows
from fedapp.federation.rows import RowsOf
from fedapp.training.task import TaskBlock
from fedapp.training.trainer import TrainedStack, Trainer
from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, Layout, Vector, check_values, clip_update
from strategies.updates.aggregation import WeightedSum
from strategies.updates.sums import BlockSum, NotCounted, SumRequest, SumTasks, blocks

# A block on a GPU: the most bytes of models, in float32, the fewest clients, and how many blocks a round has if both
# allow it.
MODELS_ON_GPU, FEWEST_ON_GPU, BLOCKS_ON_GPU = 1 << 30, 16, 4


def sums(request: SumRequest, nodes: Nodes, trainer: Trainer, rows_of: RowsOf) -> Iterator[BlockSum]:
    """Yield the sums of a round's blocks of clients."""
    terms = SharedTerms(request, nodes, rows_of)
    fractions = list(divided(request, on_gpu=terms.on_gpu))
    first = fractions[0] if fractions else request.tasks
    yield from trainer.ahead(
        lambda tasks: terms.block(tasks, trainer),
        fractions,
        alone=terms.on_gpu,
        in_turn=terms.waits(first, trainer),
    )


def divided(request: SumRequest, *, on_gpu: bool) -> Iterator[SumTasks]:
    """Yield the tasks of each block: by their number, the model's size and the kind of device alone."""
    number, size = len(request.tasks), Layout.of(request.arrays).size
    for places in blocks_on_gpu(number, size) if on_gpu else blocks(number, size):
        yield request.tasks[places.start : places.stop]


def blocks_on_gpu(number: int, size: int) -> list[range]:
    """Return the consecutive blocks of ``number`` tasks, for a model of ``size`` values, that a GPU trains.

    A GPU takes as long for the steps of a few clients as for those of many, so that blocks are large: a round has
    ``BLOCKS_ON_GPU`` of them, which workers can share, or fewer, if a block would have less than ``FEWEST_ON_GPU``
    clients, or more, if the models of a block would take more memory than ``MODELS_ON_GPU``.
    """
    most = max(MODELS_ON_GPU // (4 * max(size, 1)), 1)
    count = max(-(-number // most), min(BLOCKS_ON_GPU, number // FEWEST_ON_GPU), min(number, 1))
    ends = [number * each // count for each in range(count + 1)] if count else []
    return [range(start, end) for start, end in pairwise(ends)]


class SharedTerms:
    """The terms that all tasks of a round share, or the reason why none can be done; every block uses them.

    Parameters
    ----------
    request : SumRequest
        The round; its tasks aren't read.
    rows_of : callable
        Returns the rows of all clients.
    """

    def __init__(self, request: SumRequest, nodes: Nodes, rows_of: RowsOf) -> None:
        self.request = request
        try:
            self.shared: _Shared | None = _Shared.of(request, nodes, rows_of)
        except USER_ERRORS as error:
            self.shared, self.why = None, messages.last_line(str(error))

    @property
    def on_gpu(self) -> bool:
        """Whether the tasks are trained on a GPU."""
        return self.shared is not None and self.shared.data.device.type != "cpu"

    def waits(self, tasks: SumTasks, trainer: Trainer) -> bool:
        """Tell whether threads would wait for each other, judged by the first task of a block."""
        block = None if self.shared is None else _Block(self.shared, tasks[:1]).built()
        return block is not None and trainer.waits(block.one(0), len(tasks))

    def block(self, tasks: SumTasks, trainer: Trainer) -> BlockSum:
        """Return the sum of a block."""
        if self.shared is None:
            left_out = dict.fromkeys(range(len(tasks)), NotCounted(self.why))
            return BlockSum(
                np.zeros(Layout.of(self.request.arrays).size), 0.0, len(tasks), not_counted=left_out
            )
        return _Block(self.shared, tasks).summed(trainer)


@dataclass(frozen=True, eq=False)
class _Shared:
    """The terms that a round's tasks share, the rows of all clients, and the model w̄ (D,)."""

    request: SumRequest
    terms: TaskTerms
    data: SharedRows
    starts: Mapping[str, int]  # where each array begins in the model
    base: Vector

    @classmethod
    def of(cls, request: SumRequest, nodes: Nodes, rows_of: RowsOf) -> "_Shared":
        data = SharedRows.of(request.config, nodes, rows_of)
        state = federation.to_state(request.arrays, data.device)
        terms = TaskTerms.of(request.config, data.config, data.dataset, state, data.device)
        layout = Layout.of(request.arrays)
        starts = {name: span.start for name, span in zip(layout.names, layout.spans, strict=True)}
        return cls(request, terms, data, starts, layout.to_vector(request.arrays))


class _Block:
    """Some tasks of a round."""

    def __init__(self, shared: _Shared, tasks: SumTasks) -> None:
        self.shared = shared
        self.tasks = tasks
        # Where the rows of each task that can be done begin and end, by the task's place in the block.
        self.spans: dict[int, tuple[int, int]] = {}
        self.not_counted: dict[int, NotCounted] = {}
        self.bounded: set[int] = set()

    def summed(self, trainer: Trainer) -> BlockSum:
        """Train the tasks that can be done, and add up their updates in the order of the clients."""
        block = self.built()
        places, trained = list(self.spans), []
        stacks: list[TrainedStack] = []
        for stacked, found in () if block is None else trainer.stacks(block):
            if isinstance(found, Exception):
                self.not_counted |= {places[place]: NotCounted(reason_of(found)) for place in stacked}
                continue
            trained += [places[place] for place in stacked]
            stacks.append(found)
        if not stacks:
            return BlockSum(np.zeros(len(self.shared.base)), 0.0, len(self.tasks), {}, self.not_counted)
        models = models_of([parameters for parameters, _ in stacks], self.shared.starts)
        rows = {place: row for row, place in enumerate(trained)}
        counting = {place: rows[place] for place in sorted(rows) if self._counts(place, models, rows[place])}
        total, squares, furthest = self._sum(models, counting)
        losses = np.full(len(self.tasks), np.nan)
        losses[trained] = np.concatenate([loss.double().cpu().numpy() for _, loss in stacks])
        metrics = {messages.TRAIN_LOSS: losses.tolist()}
        return BlockSum(total, squares, len(self.tasks), metrics, self.not_counted, self.bounded, furthest)

    def _at_hand(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the places in the block of the tasks that can be done, and where their rows begin and end."""
        for place, node_id in enumerate(self.tasks.nodes):
            try:
                yield place, self.shared.data.span(node_id)
            except Exception as error:  # an engine answers with an error, whatever a task raised
                self.not_counted[place] = NotCounted(reason_of(error))

    def built(self) -> TaskBlock | None:
        """Return the tasks that can be done; None if there are none."""
        self.spans = dict(self._at_hand())
        if not self.spans:
            return None
        shared, own = self.shared, self.tasks.at(list(self.spans))
        begins, ends = np.array(list(self.spans.values())).T
        tensors = shared.data.rows.x, shared.data.rows.y
        try:
            return shared.terms.block(tensors, begins, ends - begins, own.clients, own.number, own.fractions)
        except Exception as error:  # an engine answers with an error, whatever a task raised
            self.not_counted |= dict.fromkeys(self.spans, NotCounted(reason_of(error)))
            return None

    def _counts(self, place: int, models: Models, row: int) -> bool:
        """Tell whether a client's model has valid values only; if not, note why it doesn't count."""
        try:
            if not models.harmless:
                check_values(models.model(row, self.shared.base))
        except ArraysMismatchError as error:
            self.not_counted[place] = NotCounted(str(error), messages.REFUSED)
            return False
        return True

    def _sum(self, models: Models, rows: Mapping[int, int]) -> tuple[Vector, float, float]:
        """Return Σ d_i Δ_i (D,), Σ d_i ‖Δ_i‖² and the largest d_i ‖Δ_i‖ of the models in these rows, by place."""
        request, base = self.shared.request, self.shared.base
        weights = [self.tasks.weights[place] for place in rows]
        if rows and not (request.bound or request.squares):
            return models.weighted_sum(list(rows.values()), weights, base), 0.0, 0.0
        total = WeightedSum(len(base), len(rows) or 1, squares=request.squares, bound=request.bound)
        for (place, row), weight in zip(rows.items(), weights, strict=True):
            model = models.model(row, base)
            if request.bound and clip_update(model, base, request.bound):
                self.bounded.add(place)
            model -= base
            total.add(weight, model)
        total.end()
        return total.total, total.squares, total.furthest
