"""The reference engine: clients one after the other in this process, without Ray, slow start-up or other magic.

It is the simplest Grid that there can be: what the other engines compute must equal what it computes. Good for a
debugger, for tests, and for runs too small to pay for Ray's start.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from uuid import uuid4

from flwr.app import ConfigRecord, Error, Message
from flwr.clientapp import ClientApp

from fedapp import client_app as fedapp_client
from fedapp.engine.nodes import Nodes, descriptions
from fedapp.names import SEQUENTIAL
from strategies.flower.grids import Description, asked_ids
from strategies.flower.internals import APP_RAISED, be_the_server, give_id
from strategies.flower.local_grid import LocalGrid

# Longest time that one call of pull_messages works (seconds), so that a run can be interrupted between clients.
SLICE = 0.2


class SequentialGrid(LocalGrid):
    """A Grid whose nodes live in this process; a message is worked on when its reply is pulled.

    Parameters
    ----------
    client_app : ClientApp
        The app that every node runs.
    num_supernodes : int
        Number of nodes; node i + 1 has partition i, and its own ``Context``, which persists.
    """

    engine = SEQUENTIAL

    def __init__(self, client_app: ClientApp, num_supernodes: int) -> None:
        be_the_server()
        self.client_app = client_app
        self.contexts = Nodes(num_supernodes)
        self._queue: deque[Message] = deque()
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages; return their ids."""
        ids = []
        for message in messages:
            give_id(message, str(uuid4()))
            self._queue.append(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Work on queued messages for a while, in the order of pushing; return the replies that are asked for."""
        wanted = self._names(reply_to_message_ids, message_ids)
        end = time.monotonic() + SLICE
        while self._queue and time.monotonic() < end:
            message = self._queue.popleft()
            self._replies[message.metadata.message_id] = self._work(message)
        return [self._replies.pop(name) for name in wanted if name in self._replies]

    def _names(
        self, reply_to_message_ids: Iterable[str] | None, message_ids: Iterable[str] | None
    ) -> list[str]:
        """Return the ids of the requests whose replies are to be pulled: by default of all that were pushed."""
        ids = asked_ids(reply_to_message_ids, message_ids)
        waiting = [message.metadata.message_id for message in self._queue]
        return [*waiting, *self._replies] if ids is None else ids

    def descriptions(self, node_ids: Sequence[int], config: ConfigRecord) -> Mapping[int, Description]:
        """Return the descriptions of this app's clients whose rows are known here; {} with another ClientApp."""
        return descriptions(node_ids, config, self.contexts) if self.client_app is fedapp_client.app else {}

    def _work(self, message: Message) -> Message:
        try:
            return self.client_app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # an engine answers with an error, whatever the app raised
            return Message(Error(APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)
