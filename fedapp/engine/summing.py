"""A round's tasks without messages: trained where the data are, block by block, and answered with sums.

What all tasks of a round share is read once; of each client there remain its rows, and the stream of its batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor

from fedapp import federation
from fedapp.client.device import device_of
from fedapp.client.handlers import USER_ERRORS
from fedapp.client.local_data import expected_data, local_data, no_rows
from fedapp.client.request import config_of
from fedapp.client.training import TaskTerms
from fedapp.data.partition import Partition
from fedapp.federation.rows import Rows, RowsOf
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Trainer
from strategies import messages
from strategies.aggregation import square_of
from strategies.arrays import ArraysMismatchError, Layout, Vector, check_values
from strategies.sums import BlockSum, Summand, SumRequest, SumTask, blocks

# A stack's models are harmless where the squares of their values, summed in float32, are below this.
HARMLESS = 1e30


def can_sum(request: SumRequest, contexts: Mapping[int, Context]) -> bool:
    """Tell whether tasks can be summed: by a rule that reads nothing beside the model, on data that all share."""
    shared = not any("data-path" in context.node_config for context in contexts.values())
    return shared and config_of(request.config).dp == "none" and set(request.rule) <= {messages.ALPHA}


def sums(
    request: SumRequest, contexts: Mapping[int, Context], trainer: Trainer, rows_of: RowsOf
) -> Iterator[BlockSum]:
    """Yield the sums of a round's blocks; ``contexts`` are those of the nodes, by id."""
    terms = SharedTerms(request, contexts, rows_of)
    yield from trainer.ahead(lambda tasks: terms.block(tasks, trainer), divided(request), alone=terms.on_gpu)


def divided(request: SumRequest) -> Iterator[Sequence[SumTask]]:
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

    def __init__(self, request: SumRequest, contexts: Mapping[int, Context], rows_of: RowsOf) -> None:
        self.request = request
        try:
            self.shared: _Shared | None = _Shared.of(request, contexts, rows_of)
        except USER_ERRORS as error:
            self.shared, self.why = None, messages.last_line(str(error))

    @property
    def on_gpu(self) -> bool:
        """Whether the tasks are trained on a GPU."""
        return self.shared is not None and self.shared.rows.x.device.type != "cpu"

    def block(self, tasks: Sequence[SumTask], trainer: Trainer) -> BlockSum:
        """Return the sum of a block."""
        if self.shared is None:
            size = Layout.of(self.request.arrays).size
            return BlockSum(np.zeros(size), 0.0, [Summand(reason=self.why)] * len(tasks))
        return _Block(self.shared, tasks).summed(trainer)


@dataclass(frozen=True, eq=False)
class _Shared:
    """What a round's tasks share: the terms, all clients' rows, and whose are which; and the model w̄ (D,)."""

    request: SumRequest
    terms: TaskTerms
    rows: Rows
    partition: Partition
    contexts: Mapping[int, Context]
    layout: Layout
    base: Vector

    @classmethod
    def of(cls, request: SumRequest, contexts: Mapping[int, Context], rows_of: RowsOf) -> "_Shared":
        config = config_of(request.config)
        device = device_of(config)
        dataset = expected_data(config, request.config, len(contexts))
        partition = federation.partition_of(config, len(contexts))
        rows = rows_of(config, len(contexts), device, dataset.moments)
        state = federation.to_state(request.arrays, device)
        terms = TaskTerms.of(request.config, config, dataset, state, device)
        layout = Layout.of(request.arrays)
        base = layout.to_vector(request.arrays)
        return cls(request, terms, rows, partition, contexts, layout, base)

    def task(self, asked: SumTask) -> LocalTask:
        """Return a client's task."""
        context = self.contexts[asked.node_id]
        place = context.node_config.get("partition-id")
        if not isinstance(place, int) or not 0 <= place < len(self.contexts):
            local_data(self.terms.config, self.request.config, context)  # says what is wrong
        assert isinstance(place, int)
        begin, end = self.partition.client_offsets[place : place + 2].tolist()
        if begin == end:
            raise no_rows(place)
        self.rows.need(begin, end)
        tensors = self.rows.x, self.rows.y, begin
        return self.terms.task(tensors, end - begin, asked.client, asked.number, part=asked.part)


class _Trained:
    """A stack's parameters on the host, each (G, ...), by where they begin in a model's vector."""

    def __init__(self, parameters: Mapping[str, Tensor], layout: Layout) -> None:
        starts = dict(zip(layout.names, np.cumsum([0, *layout.sizes]).tolist(), strict=False))
        arrays = {starts[name]: value.cpu().numpy() for name, value in parameters.items()}
        self.arrays = {start: value.reshape(len(value), -1) for start, value in arrays.items()}

    @property
    def is_harmless(self) -> bool:
        """Whether no model can hold what doesn't count (``strategies.arrays.check_values``)."""
        flat: list[NDArray[np.float32]] = [value.reshape(-1) for value in self.arrays.values()]
        with np.errstate(over="ignore", invalid="ignore"):
            return all(float(np.dot(values, values)) < HARMLESS for values in flat)

    def model(self, number: int, base: Vector) -> Vector:
        """Return a client's model (D,)."""
        model = base.copy()
        for start, value in self.arrays.items():
            model[start : start + value.shape[1]] = value[number]
        return model

    def update(self, number: int, base: Vector, out: Vector) -> Vector:
        """Return a client's update (D,) in ``out``, which is 0 where nothing is trained."""
        for start, value in self.arrays.items():
            end = start + value.shape[1]
            np.subtract(value[number], base[start:end], out=out[start:end])
        return out


class _Block:
    """Some tasks of a round."""

    def __init__(self, shared: _Shared, asked: Sequence[SumTask]) -> None:
        self.shared = shared
        self.asked = asked
        self.summands: list[Summand | None] = [None] * len(asked)

    def summed(self, trainer: Trainer) -> BlockSum:
        """Train the tasks that can be done, and add up their updates in the order of the clients."""
        built = list(self._built())
        found: dict[int, tuple[_Trained, bool, int, float]] = {}
        for places, parameters, losses in trainer.stacks([task for _, task in built]):
            trained = _Trained(parameters, self.shared.layout)
            harmless = trained.is_harmless
            for number, (place, loss) in enumerate(zip(places, losses.tolist(), strict=True)):
                found[place] = trained, harmless, number, loss
        total, memory, squares = np.zeros(len(self.shared.base)), np.zeros(len(self.shared.base)), 0.0
        request, base = self.shared.request, self.shared.base
        for i, (place, _) in enumerate(built):
            trained, harmless, number, loss = found[i]
            weight, longer = self.asked[place].weight, False
            try:
                if not harmless:
                    check_values(trained.model(number, base))
            except ArraysMismatchError as error:
                self.summands[place] = Summand(reason=str(error), outcome=messages.REFUSED)
                continue
            if request.bound:
                update, longer = request.counted(trained.model(number, base), base, weight)
            else:
                update = trained.update(number, base, memory)
            squares += weight * square_of(update) if request.squares else 0.0
            total += np.multiply(weight, update, out=memory)
            self.summands[place] = Summand({messages.TRAIN_LOSS: loss}, bounded=longer)
        return BlockSum(total, squares, [summand for summand in self.summands if summand is not None])

    def _built(self) -> Iterator[tuple[int, LocalTask]]:
        """Yield the tasks that can be done, with their places in the block."""
        for place, asked in enumerate(self.asked):
            try:
                yield place, self.shared.task(asked)
            except Exception as error:  # an engine answers with an error, whatever a task raised
                text = str(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {error}"
                self.summands[place] = Summand(reason=messages.last_line(text))
