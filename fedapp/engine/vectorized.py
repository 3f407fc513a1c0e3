"""The vectorized engine: a Grid in this process that trains many clients at once.

Training requests wait until a reply is asked for that isn't there; then all that wait are trained together
(``fedapp.training.trainer``). What a task needs is known when its request is pushed, so an asynchronous run in
virtual time trains in large batches too: the order of its events follows from the task times alone.

All clients' data are kept in one pair of tensors on the device, and a model that many requests share is copied there
once. Everything else is as in the sequential engine, whose results it reproduces up to rounding.
"""

from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, Error, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedapp import federation
from fedapp.client.handlers import CANNOT_TAKE_PART, USER_ERRORS
from fedapp.client.local_data import LocalData
from fedapp.client.training import ClientTensors, local_task, own_tensors, trained_reply
from fedapp.config import RunConfig
from fedapp.engine.sequential import CLIENT_APP_RAISED, SequentialGrid
from fedapp.training.task import LocalTask
from fedapp.training.trainer import Trainer
from strategies import messages
from strategies.compression import compressed

# Bytes of models that one call of pull_messages trains: bounds memory, and the wait after Ctrl-C.
PULL_BUDGET = 256 << 20


class VectorizedGrid(SequentialGrid):
    """A Grid whose nodes live in this process and train together.

    Parameters
    ----------
    client_app : ClientApp
        The app, for all requests but training.
    num_supernodes : int
        Number of nodes; node i + 1 has partition i.
    trainer : Trainer, optional
        Says how to train, and on how many threads.
    """

    engine = "vectorized"

    def __init__(self, client_app: ClientApp, num_supernodes: int, trainer: Trainer | None = None) -> None:
        super().__init__(client_app, num_supernodes)
        self.trainer = trainer or Trainer()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; if one is missing, work on what waits first."""
        wanted = list(message_ids)
        if any(message_id not in self._replies for message_id in wanted):
            if self._queue and self._queue[0].metadata.message_type == messages.TRAIN:
                self._train()
            else:
                return super().pull_messages(wanted)
        return [self._replies.pop(message_id) for message_id in wanted if message_id in self._replies]

    def _train(self) -> None:
        """Train what waits at the head of the queue."""
        requests: list[Message] = []
        tasks: list[LocalTask] = []
        states: dict[int, dict[str, Tensor]] = {}
        size = 0

        def state_of(arrays: ArrayRecord, device: torch.device) -> dict[str, Tensor]:
            if id(arrays) not in states:
                states[id(arrays)] = federation.to_state(arrays, device)
            return states[id(arrays)]

        while self._queue and self._queue[0].metadata.message_type == messages.TRAIN and size < PULL_BUDGET:
            request = self._queue.popleft()
            try:
                context = self.contexts[request.metadata.dst_node_id]
                task = local_task(request, context, shared_tensors, state_of)
            except USER_ERRORS as error:
                self._answer(request, Message(Error(CANNOT_TAKE_PART, str(error)), reply_to=request))
                continue
            except Exception as error:  # an engine answers with an error, whatever the app raised
                reason = f"{type(error).__name__}: {error}"
                self._answer(request, Message(Error(CLIENT_APP_RAISED, reason), reply_to=request))
                continue
            requests.append(request)
            tasks.append(task)
            size += messages.total_bytes(request)
        for request, task, trained in zip(requests, tasks, self.trainer.train(tasks), strict=True):
            context = self.contexts[request.metadata.dst_node_id]
            reply = trained_reply(request, context, task, *trained)
            self._answer(request, compressed(request, reply, context))

    def _answer(self, request: Message, reply: Message) -> None:
        self._replies[request.metadata.message_id] = reply


def shared_tensors(config: RunConfig, data: LocalData, device: torch.device) -> ClientTensors:
    """Return the inputs and labels of all clients, and where this one's rows begin in them."""
    if data.partition_id is None or data.num_partitions is None:
        return own_tensors(config, data, device)
    partition = federation.partition_of(config, data.num_partitions)
    x, y = federation.training_tensors(config, data.num_partitions, device, data.dataset.moments)
    return x, y, int(partition.client_offsets[data.partition_id])
