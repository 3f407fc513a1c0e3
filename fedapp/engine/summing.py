"""A round's tasks without messages: trained where the data are, block by block, and answered with sums.

What all tasks of a round share is read once; of each client there remain its rows, and the stream of its batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedapp import federation
from fedapp.client.device import device_of
from fedapp.client.handlers import USER_ERRORS
from fedapp.client.local_data import expected_data, local_data, no_rows
from fedapp.client.request import config_of
from fedapp.client.training import TaskTerms
from fedapp.engine.nodes import Nodes
from fedapp.federation.rows import Rows, RowsOf
from fedapp.training.block import TaskBlock
from fedapp.training.trainer import Trainer
from fedapp.training.vectors import Parameters
from strategies import messages
from strategies.aggregation import added_in_order, square_of
from strategies.arrays import ArraysMismatchError, Layout, Vector, check_values
from strategies.sums import BlockSum, NotCounted, SumRequest, SumTasks, blocks

# A stack's models are harmless where the squares of their values, summed in float32, are below this.
HARMLESS = 1e30

# Values of models that are added up at once, in float64: half of a core's cache.
AT_ONCE = 1 << 17


def can_sum(request: SumRequest, nodes: Nodes) -> bool:
    """Tell whether tasks can be summed: by a rule that reads nothing beside the model, on data that all share."""
    shared = not any("data-path" in context.node_config for context in nodes.known.values())
    return shared and config_of(request.config).dp == "none" and set(request.rule) <= {messages.ALPHA}


def sums(request: SumRequest, nodes: Nodes, trainer: Trainer, rows_of: RowsOf) -> Iterator[BlockSum]:
    """Yield the sums of a round's blocks of clients."""
    terms = SharedTerms(request, nodes, rows_of)
    first = next(divided(request), request.tasks)
    yield from trainer.ahead(
        lambda tasks: terms.block(tasks, trainer),
        divided(request),
        alone=terms.on_gpu,
        in_turn=terms.waits(first, trainer),
    )


def divided(request: SumRequest) -> Iterator[SumTasks]:
    """Yield the tasks of each block."""
    for places in blocks(len(request.tasks), Layout.of(request.arrays).size):
        yield request.tasks[places.start : places.stop]


class SharedTerms:
    """What the tasks of a round share, or why none can be done; it stands for any of the round's blocks.

    Parameters
    ----------
    request : SumRequest
        Its tasks aren't read.
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
        return self.shared is not None and self.shared.rows.x.device.type != "cpu"

    def waits(self, tasks: SumTasks, trainer: Trainer) -> bool:
        """Say whether threads would wait for each other, by a block."""
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
    """What a round's tasks share: the terms, all clients' rows, and whose are which; and the model w̄ (D,)."""

    request: SumRequest
    terms: TaskTerms
    rows: Rows
    offsets: Sequence[int]  # of each partition in the rows
    nodes: Nodes
    starts: Mapping[str, int]  # where each array begins in the model
    base: Vector

    @classmethod
    def of(cls, request: SumRequest, nodes: Nodes, rows_of: RowsOf) -> "_Shared":
        config = config_of(request.config)
        device = device_of(config)
        dataset = expected_data(config, request.config, len(nodes))
        partition = federation.partition_of(config, len(nodes))
        rows = rows_of(config, len(nodes), device, dataset.moments)
        state = federation.to_state(request.arrays, device)
        terms = TaskTerms.of(request.config, config, dataset, state, device)
        layout = Layout.of(request.arrays)
        starts = dict(zip(layout.names, np.cumsum([0, *layout.sizes]).tolist(), strict=False))
        offsets = partition.client_offsets.tolist()
        return cls(request, terms, rows, offsets, nodes, starts, layout.to_vector(request.arrays))

    def rows_at(self, node_id: int) -> tuple[int, int]:
        """Return where the rows of a node's client begin and end; they are there then.

        Raises
        ------
        DataError
            If it has none.
        """
        place = self.nodes.partition_of(node_id)
        if not isinstance(place, int) or not 0 <= place < len(self.nodes):
            local_data(self.terms.config, self.request.config, self.nodes[node_id])  # says what is wrong
        assert isinstance(place, int)
        begin, end = self.offsets[place], self.offsets[place + 1]
        if begin == end:
            raise no_rows(place)
        self.rows.need(begin, end)
        return begin, end


class _Block:
    """Some tasks of a round."""

    def __init__(self, shared: _Shared, tasks: SumTasks) -> None:
        self.shared = shared
        self.tasks = tasks
        self.spans: dict[int, tuple[int, int]] = {}  # of the rows of tasks that can be done, by place
        self.not_counted: dict[int, NotCounted] = {}
        self.bounded: set[int] = set()

    def summed(self, trainer: Trainer) -> BlockSum:
        """Train the tasks that can be done, and add up their updates in the order of the clients."""
        block = self.built()
        if block is None:
            return BlockSum(np.zeros(len(self.shared.base)), 0.0, len(self.tasks), {}, self.not_counted)
        stacks = list(trainer.stacks(block))
        places = list(self.spans)
        trained = [places[place] for stacked, _, _ in stacks for place in stacked]
        models = _Models([parameters for _, parameters, _ in stacks], self.shared.starts)
        rows = {place: row for row, place in enumerate(trained)}
        counting = {place: rows[place] for place in places if self._counts(place, models, rows[place])}
        total, squares = self._sum(models, counting)
        losses = np.full(len(self.tasks), np.nan)
        losses[trained] = np.concatenate([loss.double().cpu().numpy() for _, _, loss in stacks])
        metrics = {messages.TRAIN_LOSS: losses.tolist()}
        return BlockSum(total, squares, len(self.tasks), metrics, self.not_counted, self.bounded)

    def _at_hand(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the places in the block of the tasks that can be done, and where their rows begin and end."""
        for place, node_id in enumerate(self.tasks.nodes):
            try:
                yield place, self.shared.rows_at(node_id)
            except Exception as error:  # an engine answers with an error, whatever a task raised
                self.not_counted[place] = NotCounted(_why(error))

    def built(self) -> TaskBlock | None:
        """Return the tasks that can be done; None if there are none."""
        self.spans = dict(self._at_hand())
        if not self.spans:
            return None
        shared, own = self.shared, self.tasks.at(list(self.spans))
        begins, ends = np.array(list(self.spans.values())).T
        tensors = shared.rows.x, shared.rows.y
        try:
            return shared.terms.block(tensors, begins, ends - begins, own.clients, own.number, own.parts)
        except Exception as error:  # likewise
            self.not_counted |= dict.fromkeys(self.spans, NotCounted(_why(error)))
            return None

    def _counts(self, place: int, models: "_Models", row: int) -> bool:
        """Tell whether a client's model is one; if not, note why."""
        try:
            if not models.harmless:
                check_values(models.model(row, self.shared.base))
        except ArraysMismatchError as error:
            self.not_counted[place] = NotCounted(str(error), messages.REFUSED)
            return False
        return True

    def _sum(self, models: "_Models", rows: Mapping[int, int]) -> tuple[Vector, float]:
        """Return Σ d_i Δ_i (D,) and Σ d_i ‖Δ_i‖² of the models in these rows, by place."""
        request, base, squares = self.shared.request, self.shared.base, 0.0
        weights = [self.tasks.weights[place] for place in rows]
        if rows and not (request.bound or request.squares):
            return models.weighted_sum(list(rows.values()), weights, base), 0.0
        total = np.zeros(len(base))
        for (place, row), weight in zip(rows.items(), weights, strict=True):
            update, longer = request.counted(models.model(row, base), base, weight)
            squares += weight * square_of(update) if request.squares else 0.0
            total += weight * update
            if longer:
                self.bounded.add(place)
        return total, squares


class _Models:
    """The models of some stacks, one after the other: their arrays (G, ...) on the host, by where they begin.

    Parameters
    ----------
    stacks : sequence of Parameters
        What of them is trained.
    starts : mapping of str to int
        Where each array begins in a model (D,).
    """

    def __init__(self, stacks: Sequence[Parameters], starts: Mapping[str, int]) -> None:
        self.arrays: dict[int, NDArray[np.float32]] = {}
        for name in stacks[0]:
            found = [stack[name].flatten(1).cpu().numpy() for stack in stacks]
            self.arrays[starts[name]] = np.concatenate(found) if len(found) > 1 else found[0]

    @cached_property
    def harmless(self) -> bool:
        """Whether no model can hold what doesn't count (``strategies.arrays.check_values``)."""
        flat = [values.reshape(-1) for values in self.arrays.values()]
        with np.errstate(over="ignore", invalid="ignore"):
            return all(float(np.dot(values, values)) < HARMLESS for values in flat)

    def model(self, row: int, base: Vector) -> Vector:
        """Return a client's model (D,)."""
        model = base.copy()
        for start, values in self.arrays.items():
            model[start : start + values.shape[1]] = values[row]
        return model

    def weighted_sum(self, rows: Sequence[int], weights: Sequence[float], base: Vector) -> Vector:
        """Return Σ d_i Δ_i (D,) of some, in this order: 0 where nothing is trained.

        So many values at once as stay in a core's cache, of all clients.
        """
        total, factors = np.zeros(len(base)), np.array(weights)[:, None]
        step = max(AT_ONCE // max(len(rows), 1), 1)
        in_order = list(rows) == list(range(len(rows)))
        for start, values in self.arrays.items():
            for begin in range(0, values.shape[1], step):
                some = values[:, begin : begin + step]
                place = slice(start + begin, start + begin + some.shape[1])
                moves = (some[: len(rows)] if in_order else some[rows]).astype(np.float64)
                moves -= base[place]
                moves *= factors
                total[place] = added_in_order(moves)
        return total


def _why(error: Exception) -> str:
    text = str(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {error}"
    return messages.last_line(text)
