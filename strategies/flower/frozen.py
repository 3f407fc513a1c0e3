"""Frozen arrays: what of a model never changes, and is sent to a client only where the client doesn't have it.

A request to train or to evaluate has the arrays that change, and in its fields a digest of those that don't
(``messages.FROZEN``). A client that doesn't have arrays of this digest, built by itself or kept from before, answers
with an error (``messages.NEEDS_FROZEN``). The request is then sent once more, with the frozen arrays in a record
``messages.FROZEN`` beside the model, and the client keeps them. Strategies see the reply to the second request as
that to the first.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from strategies.flower import messages
from strategies.flower.grids import GridAround
from strategies.flower.internals import as_reply_to


@dataclass
class FrozenArrays:
    """The frozen arrays of a run's model.

    Attributes
    ----------
    digest : str
        Of their names, types, shapes and values.
    make : callable
        Returns the record in which they are sent; called once, and only if a client needs them.
    bytes_sent : int
        Bytes of the requests that were sent once more, since they were last counted.
    """

    digest: str
    make: Callable[[], ArrayRecord]
    bytes_sent: int = 0

    @cached_property
    def record(self) -> ArrayRecord:
        """The record in which they are sent."""
        return self.make()

    def take_bytes(self) -> int:
        """Return the bytes that were sent since the last call."""
        size, self.bytes_sent = self.bytes_sent, 0
        return size


class FrozenGrid(GridAround):
    """A Grid that names the frozen arrays in each request, and sends them to the nodes that need them.

    Parameters
    ----------
    grid : Grid
        The Grid that sends the messages to the nodes.
    frozen : FrozenArrays
        The run's.
    config_key : str
        Name of the record of fields.
    """

    def __init__(self, grid: Grid, frozen: FrozenArrays, config_key: str = messages.CONFIG) -> None:
        self.grid, self.frozen, self._config_key = grid, frozen, config_key
        self._sent: dict[str, Message] = {}  # requests that haven't been answered, by id
        self._again: dict[str, str] = {}  # by the id of a request, that of the one in its place

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return the ids of those that could be stored."""
        outgoing = [self._naming(message) for message in messages]
        stored = list(self.grid.push_messages(outgoing))
        now = time.time()
        self._sent = {name: each for name, each in self._sent.items() if _expiry(each) > now}
        self._sent |= {each.metadata.message_id: each for each in outgoing if _has_model(each)}
        return stored

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, but for those that ask for frozen arrays."""
        asked = {self._again.get(name, name): name for name in message_ids}
        found = []
        for reply in self.grid.pull_messages(list(asked)):
            name = asked.get(reply.metadata.reply_to_message_id, "")
            request = self._sent.pop(name, None)
            first = self._again.pop(name, None) is None
            if first and request is not None and _needs_frozen(reply) and self._send_again(name, request):
                continue
            found.append(reply if first else as_reply_to(reply, name))
        return found

    def _naming(self, message: Message) -> Message:
        """Return a message whose fields name the frozen arrays, if it has a model."""
        if _has_model(message):
            fields = message.content.get(self._config_key)
            known = fields if isinstance(fields, ConfigRecord) else {}
            message.content[self._config_key] = ConfigRecord({**known, messages.FROZEN: self.frozen.digest})
        return message

    def _send_again(self, name: str, request: Message) -> bool:
        """Send a request once more, with the frozen arrays; return True if it could be stored."""
        content = RecordDict({**request.content, messages.FROZEN: self.frozen.record})
        old = request.metadata
        again = Message(content, old.dst_node_id, old.message_type, ttl=old.ttl, group_id=old.group_id)
        if not list(self.grid.push_messages([again])):
            return False
        self._again[name], self._sent[name] = again.metadata.message_id, request
        self.frozen.bytes_sent += messages.total_bytes(again)
        return True


def _has_model(message: Message) -> bool:
    return message.metadata.message_type in (messages.TRAIN, messages.EVALUATE)


def _needs_frozen(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == messages.NEEDS_FROZEN


def _expiry(message: Message) -> float:
    return message.metadata.created_at + message.metadata.ttl
