"""Frozen arrays: what of a model never changes, and is sent to a client only where the client doesn't have it.

A request to train or to evaluate has the arrays that change, and in its fields a digest of those that don't
(``messages.FROZEN``). A client that doesn't have arrays of this digest answers with an error
(``messages.NEEDS_FROZEN``), and the request is sent once more, with them. Strategies see the reply to the second
request as that to the first.

Clients may be able to build the frozen arrays (``FrozenArrays``), or be sent them (``strategies/flower/kept.py``).
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from strategies.flower import messages
from strategies.flower.grids import GridAround
from strategies.flower.internals import as_reply_to


class Frozen(Protocol):
    """Frozen arrays, and how they come to clients."""

    def outgoing(self, message: Message) -> Message:
        """Return the message to send in place of one with a model, and note the bytes that were added to it."""
        ...

    def again(self, request: Message) -> RecordDict:
        """Return the content of a request that is sent once more, with the frozen arrays."""
        ...

    def incoming(self, reply: Message) -> Message:
        """Return the reply as strategies see it."""
        ...

    def note_sent(self, num_bytes: int) -> None:
        """Note the bytes of a request that was sent once more."""
        ...


@dataclass
class FrozenArrays:
    """The frozen arrays of a model that clients build by themselves, and ask for where they build another.

    Attributes
    ----------
    digest : str
        Digest of the arrays' names, types, shapes and values.
    make : callable
        Returns the record of the arrays, which is sent as ``messages.FROZEN`` beside the model; called once, and only
        if a client needs the arrays.
    config_key : str
        Name of the record of fields.
    bytes_sent : int
        Bytes of the requests that were sent once more, since they were last counted.
    """

    digest: str
    make: Callable[[], ArrayRecord]
    config_key: str = messages.CONFIG
    bytes_sent: int = 0

    @cached_property
    def record(self) -> ArrayRecord:
        """The record in which they are sent."""
        return self.make()

    def outgoing(self, message: Message) -> Message:
        """Name the frozen arrays in a message's fields."""
        name_in(message.content, self.config_key, {messages.FROZEN: self.digest})
        return message

    def again(self, request: Message) -> RecordDict:
        """Return a request's content with the frozen arrays beside the model."""
        return RecordDict({**request.content, messages.FROZEN: self.record})

    def incoming(self, reply: Message) -> Message:
        """Return the reply."""
        return reply

    def note_sent(self, num_bytes: int) -> None:
        """Note the bytes of a request that was sent once more."""
        self.bytes_sent += num_bytes

    def take_bytes(self) -> tuple[int, int]:
        """Return the bytes that were sent and received beside the travelling arrays since the last call."""
        size, self.bytes_sent = self.bytes_sent, 0
        return size, 0


class FrozenGrid(GridAround):
    """A Grid that names the frozen arrays in each request, and sends them to the nodes that need them.

    Parameters
    ----------
    grid : Grid
        The Grid that sends the messages to the nodes.
    frozen : Frozen
        The run's.
    """

    def __init__(self, grid: Grid, frozen: Frozen) -> None:
        self.grid, self.frozen = grid, frozen
        self._sent: dict[str, Message] = {}  # requests that haven't been answered, by id
        self._again: dict[str, str] = {}  # by the id of a request, that of the one in its place

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return the ids of those that could be stored."""
        given = list(messages)
        outgoing = [self.frozen.outgoing(each) if _has_model(each) else each for each in given]
        stored = list(self.grid.push_messages(outgoing))
        now = time.time()
        self._sent = {name: each for name, each in self._sent.items() if _expiry(each) > now}
        self._sent |= {each.metadata.message_id: each for each in given if _has_model(each)}
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
            seen = reply if request is None else self.frozen.incoming(reply)
            found.append(seen if first else as_reply_to(seen, name))
        return found

    def _send_again(self, name: str, request: Message) -> bool:
        """Send a request once more, with the frozen arrays; return True if it could be stored."""
        old = request.metadata
        content = self.frozen.again(request)
        again = Message(content, old.dst_node_id, old.message_type, ttl=old.ttl, group_id=old.group_id)
        if not list(self.grid.push_messages([again])):
            return False
        self._again[name], self._sent[name] = again.metadata.message_id, request
        self.frozen.note_sent(messages.total_bytes(again))
        return True


def name_in(content: RecordDict, config_key: str, fields: dict[str, str | list[str]]) -> None:
    """Add fields to a message's record of fields."""
    known = content.get(config_key)
    content[config_key] = ConfigRecord({**(known if isinstance(known, ConfigRecord) else {}), **fields})


def _has_model(message: Message) -> bool:
    return message.metadata.message_type in (messages.TRAIN, messages.EVALUATE)


def _needs_frozen(reply: Message) -> bool:
    return reply.has_error() and reply.error.code == messages.NEEDS_FROZEN


def _expiry(message: Message) -> float:
    return message.metadata.created_at + message.metadata.ttl
