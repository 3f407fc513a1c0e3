"""The vectorized engine: a Grid in this process that trains many clients at once.

Training requests wait until a reply is pulled that isn't there yet; then all waiting requests are trained together
(``fedapp.training.trainer``). What a task needs is known when its request is pushed, so an asynchronous run in
virtual time trains in large batches too: the order of its events follows from the task times alone.

All clients' data are kept in one pair of tensors on the device, and a model that many requests share is copied there
once. Everything else is as in the sequential engine, whose results it reproduces up to rounding.

Rounds of methods that don't look at single updates are done without messages (``fedapp.engine.summing``), and so are
the tasks of asynchronous runs (``fedapp.engine.direct``).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedapp import federation
from fedapp.client.handlers import CANNOT_TAKE_PART, USER_ERRORS
from fedapp.client.personal import (
    fine_tuning_task,
    keep_trained,
    own_arrays_task,
    personal_task,
    shared_arrays_task,
)
from fedapp.client.request import LocalData, local_data, read_config, record_of, sent_model, trains_own_first
from fedapp.client.scoring import scored_reply
from fedapp.client.training import (
    ClientTensors,
    StateOf,
    local_task,
    own_tensors,
    tested_tensors,
    trained_reply,
)
from fedapp.config import RunConfig
from fedapp.engine import summing
from fedapp.engine.direct import DirectTasks, together
from fedapp.engine.sequential import SequentialGrid
from fedapp.engine.shared_rows import can_share
from fedapp.federation.rows import Rows, RowsOf, all_rows
from fedapp.names import VECTORIZED
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Trained, Trainer
from strategies.flower import messages
from strategies.flower.arrays import Layout
from strategies.flower.grids import Work, WorkRequest
from strategies.flower.internals import APP_RAISED
from strategies.flower.messages import EVALUATE, TRAIN
from strategies.updates.client_compression import compressed
from strategies.updates.sums import BlockSum, SumRequest, blocks

# Bytes of models that one call of pull_messages trains: bounds memory, and the wait after Ctrl-C.
PULL_BUDGET = 256 << 20


# A request to train, its client's context, its task, and the task that trains the client's personal model, if any.
_Read = tuple[Message, Context, LocalTask, LocalTask | None]


class VectorizedGrid(SequentialGrid):
    """A Grid whose nodes live in this process and train together.

    Parameters
    ----------
    client_app : ClientApp
        The app that answers all requests but those to train and to evaluate.
    num_supernodes : int
        Number of nodes; node i + 1 has partition i.
    trainer : Trainer, optional
        Says how to train, and on how many threads.
    rows_of : callable
        Returns the rows of all clients; by default all are read at once.
    """

    engine = VECTORIZED

    def __init__(
        self,
        client_app: ClientApp,
        num_supernodes: int,
        trainer: Trainer | None = None,
        rows_of: RowsOf = all_rows,
    ) -> None:
        super().__init__(client_app, num_supernodes)
        self.rows_of = rows_of
        self._known = _Known(rows_of)
        self.trainer = trainer or Trainer()
        # The block of each request that was pushed with others, by message id.
        self._block_of: dict[str, tuple[str, int]] = {}
        self._direct = DirectTasks(self.contexts, self.trainer, rows_of, PULL_BUDGET)

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the replies that are there; if one is missing, first work on waiting requests."""
        wanted = self._names(reply_to_message_ids, message_ids)
        if len(wanted) == 1:  # an asynchronous loop, which asks for one reply at a time and sums no blocks
            self._block_of.clear()
        if any(message_id not in self._replies for message_id in wanted):
            self._direct.train_all()  # in the order in which they came
            kind = self._queue[0].metadata.message_type if self._queue else ""
            if kind == messages.TRAIN:
                self._train()
            elif kind == messages.EVALUATE:
                self._evaluate()
            else:
                return super().pull_messages(wanted)
        return [self._replies.pop(message_id) for message_id in wanted if message_id in self._replies]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages; return their ids. Requests of one kind that come together are worked on in blocks."""
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for kind in (TRAIN, EVALUATE):
            asked = [message for message in messages if message.metadata.message_type == kind]
            if len(asked) <= 1:
                continue
            size = Layout.of(sent_model(asked[0])).size
            for number, places in enumerate(blocks(len(asked), size)):
                own = [asked[place].metadata.message_id for place in places]
                self._block_of |= dict.fromkeys(own, (asked[0].metadata.message_id, number))
        return ids

    def _groups(self, requests: Sequence[Message]) -> list[list[int]]:
        """Return the places of requests that are worked on together: of one block, or some that are in no block."""
        found: dict[object, list[int]] = {}
        for place, request in enumerate(requests):
            found.setdefault(self._block_of.pop(request.metadata.message_id, None), []).append(place)
        if others := found.pop(None, []):
            size = Layout.of(sent_model(requests[others[0]])).size
            found |= {part: others[part.start : part.stop] for part in together(len(others), size)}
        return list(found.values())

    def work_on(self, pairs: Sequence[tuple[Message, Context]]) -> list[tuple[Message, Context]]:
        """Return the replies to requests of one kind, worked on together, and the contexts after the work."""
        for request, context in pairs:
            self.contexts[context.node_id] = context
            self._queue.append(request)
            self._block_of[request.metadata.message_id] = ("", 0)
        while self._queue:
            if self._queue[0].metadata.message_type == TRAIN:
                self._train()
            else:
                self._evaluate()
        self._block_of.clear()
        return [
            (self._replies.pop(request.metadata.message_id), self.contexts[context.node_id])
            for request, context in pairs
        ]

    def can_sum(self, request: SumRequest) -> bool:
        """Tell whether a round's tasks can be trained and summed without messages."""
        return can_share(request, self.contexts)

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        """Yield the sums of a round's blocks of clients."""
        return summing.sums(request, self.contexts, self.trainer, self.rows_of)

    def can_work(self, request: WorkRequest) -> bool:
        """Tell whether tasks can be done without messages."""
        return can_share(request, self.contexts)

    def hand_out(self, request: WorkRequest) -> Sequence[str]:
        """Accept the tasks; return an id for each task."""
        return self._direct.hand_out(request)

    def work(self, task_id: str) -> Work | None:
        """Return a task's result, only once, or None if it isn't done yet."""
        return self._direct.work(task_id)

    def _train(self) -> None:
        """Answer the training requests at the head of the queue, and train their clients' personal models."""
        state_of = _states()
        read: list[_Read] = []
        for request, context in self._waiting(messages.TRAIN):
            with self._answered(request):
                known = self._known
                task = local_task(request, context, known.tensors, state_of, known.data)
                asks_for_own = messages.PERSONAL in record_of(request)
                own_task = personal_task(request, context, task) if asks_for_own else None
                read.append((request, context, task, own_task))
        groups = self._groups([request for request, *_ in read])
        read, before = self._own_arrays_first(read, groups)
        tasks = [*(task for _, _, task, _ in read), *(task for _, _, _, task in read)]
        # A personal model is never stacked with models that are sent.
        beside = [[place + len(read) for place in group] for group in groups]
        found = self._trained(tasks, [*groups, *beside])
        trained, personal = found[: len(read)], found[len(read) :]
        for (request, context, task, _), result, own, first in zip(
            read, trained, personal, before, strict=True
        ):
            assert result is not None
            with self._answered(request):
                arrays, loss = _sound(result)
                if first is not None:
                    arrays = {**_sound(first)[0], **arrays}
                reply = trained_reply(request, context, task, arrays, loss)
                if own is not None:
                    keep_trained(request, context, _sound(own)[0])
                self._answer(request, compressed(request, reply, context))

    def _own_arrays_first(
        self, read: list[_Read], groups: Sequence[Sequence[int]]
    ) -> tuple[list[_Read], list[Trained | Exception | None]]:
        """Train clients' own arrays first where the config says so; return what is left to train, and the results."""
        configs = [read_config(request)[1] for request, *_ in read]
        if not any(map(trains_own_first, configs)):
            return read, [None] * len(read)
        first = [
            own_arrays_task(task, config) if trains_own_first(config) else None
            for (_, _, task, _), config in zip(read, configs, strict=True)
        ]
        trained = self._trained(first, groups)
        left = [
            each
            if found is None or isinstance(found, Exception)
            else (each[0], each[1], shared_arrays_task(each[0], each[2], found[0]), each[3])
            for each, found in zip(read, trained, strict=True)
        ]
        return left, trained

    def _evaluate(self) -> None:
        """Evaluate for the requests at the head of the queue; models that are fitted for it are trained together."""
        state_of = _states()
        read: list[tuple[Message, Context, LocalTask | None]] = []
        for request, context in self._waiting(messages.EVALUATE):
            with self._answered(request):
                read.append(
                    (request, context, fine_tuning_task(request, context, self._known.tensors, state_of))
                )
        groups = self._groups([request for request, *_ in read])
        for (request, context, _), tuned in zip(
            read, self._trained([task for *_, task in read], groups), strict=True
        ):
            with self._answered(request):
                arrays = None if tuned is None else _sound(tuned)[0]
                ways = state_of, shared_tests, self._known.copied
                self._answer(request, scored_reply(request, context, arrays, *ways))

    def _trained(
        self, tasks: Sequence[LocalTask | None], groups: Sequence[Sequence[int]]
    ) -> list[Trained | Exception | None]:
        """Train the tasks that aren't None, each with its group; a task that raises has the exception as result."""
        places = [place for place, task in enumerate(tasks) if task is not None]
        number = {place: n for n, place in enumerate(places)}
        together = [[number[place] for place in group if place in number] for group in groups]
        trained: list[Trained | Exception | None] = [None] * len(tasks)
        found = self.trainer.train([task for task in tasks if task is not None], [g for g in together if g])
        for place, one in zip(places, found, strict=True):
            trained[place] = one
        return trained

    def _waiting(self, kind: str) -> Iterator[tuple[Message, Context]]:
        """Take requests of a kind from the head of the queue, as many as are worked on at once."""
        size, block = 0, None
        while self._queue and self._queue[0].metadata.message_type == kind:
            block, before = self._block_of.get(self._queue[0].metadata.message_id), block
            if size >= PULL_BUDGET and (block is None or block != before):
                return
            request = self._queue.popleft()
            size += messages.total_bytes(request)
            yield request, self.contexts[request.metadata.dst_node_id]

    @contextmanager
    def _answered(self, request: Message) -> Iterator[None]:
        """Answer a request with what its work raises."""
        try:
            yield
        except USER_ERRORS as error:
            self._answer(request, Message(Error(CANNOT_TAKE_PART, str(error)), reply_to=request))
        except Exception as error:  # an engine answers with an error, whatever the app raised
            reason = f"{type(error).__name__}: {error}"
            self._answer(request, Message(Error(APP_RAISED, reason), reply_to=request))

    def _answer(self, request: Message, reply: Message) -> None:
        self._replies[request.metadata.message_id] = reply


class _Known:
    """The rows of all clients under one config, looked up once, and the rows of each client.

    Parameters
    ----------
    rows_of : callable
        Returns the rows of all clients.
    """

    def __init__(self, rows_of: RowsOf) -> None:
        self._rows_of = rows_of
        self._config: RunConfig | None = None
        self._rows: dict[torch.device, tuple[Rows, list[int]]] = {}
        self._data: dict[int, LocalData] = {}

    def _begin(self, config: RunConfig) -> None:
        if config is not self._config:
            self._config, self._rows, self._data = config, {}, {}

    def data(self, config: RunConfig, record: ConfigRecord, context: Context) -> LocalData:
        """Return a client's rows."""
        self._begin(config)
        if (data := self._data.get(context.node_id)) is None:
            data = self._data[context.node_id] = local_data(config, record, context)
        return data

    def tensors(self, config: RunConfig, data: LocalData, device: torch.device) -> ClientTensors:
        """Return the inputs and labels of all clients, and where this one's rows begin in them."""
        if data.partition_id is None or data.num_partitions is None:
            return own_tensors(config, data, device)
        self._begin(config)
        if device not in self._rows:
            rows = self._rows_of(config, data.num_partitions, device, data.dataset.moments)
            offsets = federation.partition_of(config, data.num_partitions).client_offsets
            self._rows[device] = rows, offsets.tolist()
        rows, starts = self._rows[device]
        begin = starts[data.partition_id]
        rows.need(begin, begin + len(data.rows))
        return rows.x, rows.y, begin

    def copied(self, config: RunConfig, data: LocalData, device: torch.device) -> ClientTensors:
        """Return a client's own inputs and labels alone: where they lie decides the last bits of its score."""
        x, y, begin = self.tensors(config, data, device)
        own = slice(begin, begin + len(data.rows))
        return x[own].clone(), y[own].clone(), 0


def _sound(trained: Trained | Exception) -> Trained:
    """Return a task's result; raise the exception if the task raised one."""
    if isinstance(trained, Exception):
        raise trained
    return trained


def _states() -> StateOf:
    """Return a function that copies models to a device, and a model that many requests share only once."""
    states: dict[tuple[int, torch.device], dict[str, Tensor]] = {}

    def state_of(arrays: ArrayRecord, device: torch.device) -> dict[str, Tensor]:
        if (key := (id(arrays), device)) not in states:
            states[key] = federation.to_state(arrays, device)
        return states[key]

    return state_of


def shared_tests(config: RunConfig, data: LocalData, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a client's test rows, as slices of the tensors of all clients."""
    if data.partition_id is None or data.num_partitions is None:
        return tested_tensors(config, data, device)
    partition = federation.partition_of(config, data.num_partitions)
    x, y = federation.held_out_tensors(config, data.num_partitions, device, data.dataset.moments)
    own = slice(*partition.test_offsets[data.partition_id : data.partition_id + 2].tolist())
    return x[own], y[own]
