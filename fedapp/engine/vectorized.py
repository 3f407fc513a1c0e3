"""The vectorized engine: a Grid in this process that trains many clients at once.

Training requests wait until a reply is asked for that isn't there; then all that wait are trained together
(``fedapp.training.trainer``). What a task needs is known when its request is pushed, so an asynchronous run in
virtual time trains in large batches too: the order of its events follows from the task times alone.

All clients' data are kept in one pair of tensors on the device, and a model that many requests share is copied there
once. Everything else is as in the sequential engine, whose results it reproduces up to rounding.

Rounds of methods that don't look at single updates are done without messages (``fedapp.engine.summing``).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedapp import federation
from fedapp.client.handlers import CANNOT_TAKE_PART, USER_ERRORS
from fedapp.client.local_data import LocalData
from fedapp.client.personal import fine_tuning_task, keep_trained, personal_task
from fedapp.client.request import sent_model
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
from fedapp.engine.sequential import CLIENT_APP_RAISED, SequentialGrid
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Trainer
from strategies import messages
from strategies.arrays import Layout
from strategies.compression import compressed
from strategies.messages import TRAIN
from strategies.sums import BlockSum, SumRequest, blocks

# Bytes of models that one call of pull_messages trains: bounds memory, and the wait after Ctrl-C.
PULL_BUDGET = 256 << 20


class VectorizedGrid(SequentialGrid):
    """A Grid whose nodes live in this process and train together.

    Parameters
    ----------
    client_app : ClientApp
        The app, for all requests but training and evaluation.
    num_supernodes : int
        Number of nodes; node i + 1 has partition i.
    trainer : Trainer, optional
        Says how to train, and on how many threads.
    """

    engine = "vectorized"

    def __init__(self, client_app: ClientApp, num_supernodes: int, trainer: Trainer | None = None) -> None:
        super().__init__(client_app, num_supernodes)
        self.trainer = trainer or Trainer()
        self._block_of: dict[str, tuple[str, int]] = {}  # of requests that came with others, by message id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; if one is missing, work on what waits first."""
        wanted = list(message_ids)
        if any(message_id not in self._replies for message_id in wanted):
            kind = self._queue[0].metadata.message_type if self._queue else ""
            if kind == messages.TRAIN:
                self._train()
            elif kind == messages.EVALUATE:
                self._evaluate()
            else:
                return super().pull_messages(wanted)
        return [self._replies.pop(message_id) for message_id in wanted if message_id in self._replies]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages; return their ids. Training requests that come together are trained in blocks."""
        messages = list(messages)
        ids = list(super().push_messages(messages))
        asked = [message for message in messages if message.metadata.message_type == TRAIN]
        if len(asked) > 1:
            size = Layout.of(sent_model(asked[0])).size
            for number, places in enumerate(blocks(len(asked), size)):
                own = [asked[place].metadata.message_id for place in places]
                self._block_of |= dict.fromkeys(own, (ids[0], number))
        return ids

    def _groups(self, requests: Sequence[Message], beside: int) -> list[Sequence[int]]:
        """Return the places of requests, and of so many tasks after them, that are trained together."""
        found: dict[object, list[int]] = {}
        for place, request in enumerate(requests):
            found.setdefault(self._block_of.pop(request.metadata.message_id, None), []).append(place)
        return [*found.values(), range(len(requests), len(requests) + beside)]

    def can_sum(self, request: SumRequest) -> bool:
        """Tell whether a round's tasks can be trained and summed without messages."""
        return summing.can_sum(request, self.contexts)

    def sums(self, request: SumRequest) -> Iterator[BlockSum]:
        """Yield the sums of a round's blocks of clients."""
        return summing.sums(request, self.contexts, self.trainer)

    def _train(self) -> None:
        """Train what waits at the head of the queue, and clients' own models beside it."""
        state_of = _states()
        read: list[tuple[Message, Context, LocalTask, LocalTask | None]] = []
        for request, context in self._waiting(messages.TRAIN):
            with self._answered(request):
                task = local_task(request, context, shared_tensors, state_of)
                read.append((request, context, task, personal_task(request, context, task)))
        own = [task for _, _, _, task in read if task is not None]
        tasks = [*(task for _, _, task, _ in read), *own]
        trained = self.trainer.train(tasks, self._groups([request for request, *_ in read], len(own)))
        personal = iter(trained[len(read) :])
        for (request, context, task, beside), (arrays, loss) in zip(read, trained, strict=False):
            with self._answered(request):
                if beside is not None:
                    keep_trained(request, context, next(personal)[0])
                reply = trained_reply(request, context, task, arrays, loss)
                self._answer(request, compressed(request, reply, context))

    def _evaluate(self) -> None:
        """Evaluate for the requests at the head of the queue; models that are fitted for it are trained together."""
        state_of = _states()
        read: list[tuple[Message, Context, LocalTask | None]] = []
        for request, context in self._waiting(messages.EVALUATE):
            with self._answered(request):
                read.append((request, context, fine_tuning_task(request, context, shared_tensors, state_of)))
        tuned = iter(self.trainer.train([task for _, _, task in read if task is not None]))
        for request, context, task in read:
            with self._answered(request):
                arrays = None if task is None else next(tuned)[0]
                self._answer(request, scored_reply(request, context, arrays, state_of, shared_tests))

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
            self._answer(request, Message(Error(CLIENT_APP_RAISED, reason), reply_to=request))

    def _answer(self, request: Message, reply: Message) -> None:
        self._replies[request.metadata.message_id] = reply


def _states() -> StateOf:
    """Return what copies models to a device, one that many requests share once."""
    states: dict[tuple[int, torch.device], dict[str, Tensor]] = {}

    def state_of(arrays: ArrayRecord, device: torch.device) -> dict[str, Tensor]:
        if (key := (id(arrays), device)) not in states:
            states[key] = federation.to_state(arrays, device)
        return states[key]

    return state_of


def shared_tensors(config: RunConfig, data: LocalData, device: torch.device) -> ClientTensors:
    """Return the inputs and labels of all clients, and where this one's rows begin in them."""
    if data.partition_id is None or data.num_partitions is None:
        return own_tensors(config, data, device)
    partition = federation.partition_of(config, data.num_partitions)
    x, y = federation.training_tensors(config, data.num_partitions, device, data.dataset.moments)
    return x, y, int(partition.client_offsets[data.partition_id])


def shared_tests(config: RunConfig, data: LocalData, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a client's test rows, as parts of those of all clients."""
    if data.partition_id is None or data.num_partitions is None:
        return tested_tensors(config, data, device)
    partition = federation.partition_of(config, data.num_partitions)
    x, y = federation.held_out_tensors(config, data.num_partitions, device, data.dataset.moments)
    own = slice(*partition.test_offsets[data.partition_id : data.partition_id + 2].tolist())
    return x[own], y[own]
