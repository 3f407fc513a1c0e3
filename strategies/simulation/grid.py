"""The Grid of a simulation in processes of this machine."""

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from strategies.flower.errors import RunError
from strategies.flower.exchange import arriving
from strategies.flower.grids import asked_ids
from strategies.flower.internals import RUN_ID, be_the_server, give_id
from strategies.flower.local_grid import LocalGrid
from strategies.simulation.pool import Pool, Source, tasks_of

# Seconds that one look for replies may last, so that a run can be stopped between two replies.
SLICE = 0.2

Config = Mapping[str, Any]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source_of(app: ClientApp) -> Source:
    """Return how another process gets a ClientApp: where it is imported from, or else as cloudpickle writes it.

    Raises
    ------
    RunError
        If the app is no module's, and cloudpickle isn't there.
    """
    for module, content in list(sys.modules.items()):
        if module not in ("__main__", "__mp_main__"):
            for name, value in list(getattr(content, "__dict__", {}).items()):
                if value is app:
                    return module, name
    for package in ("cloudpickle", "ray.cloudpickle"):
        try:
            written: bytes = importlib.import_module(package).dumps(app)
        except ImportError:
            continue
        return written
    raise RunError(
        "the ClientApp is in no module that another process could import: write it into a module of its own, or "
        "install cloudpickle, by which an app of a notebook, of a script or of a function goes to other processes"
    )


class ProcessGrid(LocalGrid):
    """A Grid of clients that run in worker processes of this machine; node i + 1 has partition i.

    The processes start when the Grid is made, and end when it is closed, or at the end of a ``with`` statement.

    Parameters
    ----------
    app : ClientApp
        The app that every client runs.
    num_clients : int
        Number of clients.
    run_config : mapping, optional
        The run config that clients find in their contexts.
    node_config : callable, optional
        Returns the node config of a client, by its index, beside ``partition-id`` and ``num-partitions``.
    workers : int
        Number of processes; 0: as many as there are cores.
    progress : callable
        Called at each reply with the number of messages that have been answered, and of those that were pushed,
        since no message was under way.

    Raises
    ------
    ValueError
        If there is no client, or a negative number of workers.
    RunError
        If no other process can get the app.
    """

    engine = "processes"

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        *,
        run_config: Config | None = None,
        node_config: Callable[[int], Config] | None = None,
        workers: int = 0,
        progress: Callable[[int, int], None] = lambda answered, pushed: None,
    ) -> None:
        for name, number, least in (("num_clients", num_clients, 1), ("workers", workers, 0)):
            if number < least:
                raise ValueError(f"{name} = {number}: must be {least} or more")
        be_the_server()
        self.client_app, self.num_clients = app, num_clients
        self._run_config, self._node_config, self._progress = dict(run_config or {}), node_config, progress
        self._pushed: dict[str, int] = {}  # by message id, until the reply is pulled: the place in the order
        self._count = self._done = self._asked = 0
        self._replies: dict[str, Message] = {}
        number = min(workers or cores(), num_clients)
        self.pool = Pool(source_of(app), number, self._new_context, max(cores() // number, 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self.pool.close()

    def context(self, node_id: int) -> Context:
        """Return a client's context, as it is after the client's last reply."""
        return self.pool.context(node_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(range(1, self.num_clients + 1))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have the clients work on messages; return their ids."""
        messages = list(messages)
        if self._done == self._asked:
            self._done = self._asked = 0
        self._asked += len(messages)
        for message in messages:
            if not 1 <= message.metadata.dst_node_id <= self.num_clients:
                raise ValueError(f"no node has the id {message.metadata.dst_node_id}")
            give_id(message, uuid4().hex)
            self._pushed[message.metadata.message_id] = self._count = self._count + 1
        self.pool.push(tasks_of(messages))
        return [message.metadata.message_id for message in messages]

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the replies that are there, in the order of pushing; if there is none, wait a moment for one."""
        ids = asked_ids(reply_to_message_ids, message_ids)
        wanted = [name for name in (self._pushed if ids is None else ids) if name in self._pushed]
        if wanted:
            self._look(0.0 if any(name in self._replies for name in wanted) else SLICE)
        there = sorted((name for name in wanted if name in self._replies), key=self._pushed.__getitem__)
        for name in there:
            del self._pushed[name]
        return [self._replies.pop(name) for name in there]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies that come within ``timeout`` seconds, in the order of the messages; None: all."""
        messages = list(messages)
        replies = [reply for _, reply in arriving(self, messages, math.inf if timeout is None else timeout)]
        places = {message.metadata.message_id: place for place, message in enumerate(messages)}
        return sorted(replies, key=lambda reply: places[reply.metadata.reply_to_message_id])

    def _look(self, timeout: float) -> None:
        """Take what the workers have answered, and wait for an answer for ``timeout`` seconds at most."""
        for reply in self.pool.work(timeout):
            self._done += 1
            self._replies[reply.metadata.reply_to_message_id] = reply
            self._progress(self._done, self._asked)

    def _new_context(self, node_id: int) -> Context:
        partition = node_id - 1
        own = {} if self._node_config is None else dict(self._node_config(partition))
        config = {"partition-id": partition, "num-partitions": self.num_clients, **own}
        return Context(RUN_ID, node_id, config, RecordDict(), dict(self._run_config))
