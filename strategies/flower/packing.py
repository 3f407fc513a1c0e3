"""Packing of a model into one array, for messages between a server of this library and devices that support it.

Flower sends every array of a message, and every chunk of an array, as an object of its own, which costs the SuperLink
three requests on its way. So on devices a record of arrays is packed into one, whose bytes contain all
that a reader needs:

    length of the head (8 bytes, big endian) | head: JSON, [name, dtype, shape] of each array | their values in order

Server and client agree in the handshake: the request for a description asks whether the client supports packed
arrays, and the server packs its messages to the clients that do; a client packs its reply to a packed message. A
client that doesn't report support, such as another Flower app, gets ordinary records, and so does every client of a
simulation.

A strategy sees neither: ``packing`` puts a Grid that packs around the device's own, and a ClientApp that is to
understand it takes ``unpack_arrays`` among its mods::

    app = ClientApp(mods=[unpack_arrays])
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable
from math import inf, prod
from typing import ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from strategies.flower import messages
from strategies.flower.arrays import ArraysMismatchError, npy_header
from strategies.flower.grids import DEPLOYMENT, GridAround, asked_ids, engine_of, pulled_from
from strategies.flower.internals import bounded_pulls, with_content, with_error

PACKED = "strategies.packed"  # serialisation type, and name, of an array that holds a whole record
READS_PACKED = "reads-packed"  # in the config of a request for a description, and in the answer's metrics

# Error code of a reply in place of one that can't be unpacked (Flower's own codes are below 100).
NOT_PACKED = 102
# Error code of a reply in place of one that has more bytes than was asked for.
TOO_LARGE = 104

MOST_HEAD = 1 << 20  # bytes: a model of some ten thousand arrays
_LENGTH = 8  # bytes of the head's length
_MOST_DIMENSIONS = 32
# By name: bool, integers, floats and complex numbers in this machine's byte order.
_DTYPES = {str(dtype): dtype for dtype in map(np.dtype, np.typecodes["All"]) if dtype.kind in "biufc"}

_Entry = tuple[str, np.dtype, tuple[int, ...]]


# ---- Records -----------------------------------------------------------------------------------------------


def pack_record(record: ArrayRecord) -> ArrayRecord:
    """Return a record of one array with the bytes of all arrays; the same record if packing is impossible or useless.

    ``unpack_record`` returns it to the last byte.
    """
    values = [_values(array) for array in record.values()]
    head = json.dumps([[name, array.dtype, list(array.shape)] for name, array in record.items()]).encode()
    if len(record) < 2 or len(head) > MOST_HEAD or any(value is None for value in values):
        return record
    data = with_head(head, *(value for value in values if value is not None))
    return ArrayRecord({PACKED: Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)})


def is_packed(record: object) -> bool:
    """Return True if ``pack_record`` has made the record."""
    return isinstance(record, ArrayRecord) and [array.stype for array in record.values()] == [PACKED]


def unpack_record(record: ArrayRecord) -> ArrayRecord:
    """Return the record that was packed.

    Raises
    ------
    ArraysMismatchError
        If the bytes are no packed record; the bytes are validated before any are copied.
    """
    (array,) = record.values()
    body, entries = read_head(array.data)
    sizes = [dtype.itemsize * prod(shape) for _, dtype, shape in entries]
    if sum(sizes) != len(body):
        raise ArraysMismatchError(f"its packed arrays take {len(body)} bytes, by their head {sum(sizes)}")
    unpacked, start = ArrayRecord(), 0
    for (name, dtype, shape), size in zip(entries, sizes, strict=True):
        text, header = npy_header(dtype, shape)
        data = b"".join([header, body[start : start + size]])
        unpacked[name] = Array(dtype=text, shape=shape, stype="numpy.ndarray", data=data)
        start += size
    return unpacked


def with_head(head: bytes, *values: bytes | memoryview) -> bytes:
    """Return values after a head of at most ``MOST_HEAD`` bytes."""
    return b"".join([len(head).to_bytes(_LENGTH, "big"), head, *values])


def _values(array: Array) -> memoryview | None:
    """Return the bytes of an array's values; None if ``unpack_record`` couldn't tell the array from them."""
    if (dtype := _DTYPES.get(array.dtype)) is None or array.stype != "numpy.ndarray":
        return None
    _, header = npy_header(dtype, tuple(array.shape))
    if not array.data.startswith(header) or len(array.data) - len(header) != dtype.itemsize * prod(
        array.shape
    ):
        return None
    return memoryview(array.data)[len(header) :]


def read_head(data: bytes) -> tuple[memoryview, list[_Entry]]:
    """Return the bytes of the values, and the name, dtype and shape of each array."""
    length = int.from_bytes(data[:_LENGTH], "big")
    if len(data) < _LENGTH + length:
        raise ArraysMismatchError(f"its packed arrays take {len(data)} bytes, too few for their head")
    if length > MOST_HEAD:
        raise ArraysMismatchError(f"its packed arrays have a head of {length} bytes; allowed are {MOST_HEAD}")
    try:
        head = json.loads(data[_LENGTH : _LENGTH + length])
        entries = [_entry(*entry) for entry in head]
        if len({name for name, _, _ in entries}) < len(entries):
            raise ValueError("a name is there twice")
    except (TypeError, ValueError, RecursionError) as error:
        raise ArraysMismatchError(f"its packed arrays have a head that can't be read: {error}") from None
    return memoryview(data)[_LENGTH + length :], entries


def _entry(name: object, dtype: object, shape: object) -> _Entry:
    """Return the head's entry of one array; TypeError or ValueError if the entry is invalid."""
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError("each array has a name, a type and a shape")
    if dtype not in _DTYPES:
        raise ValueError(f"an array's type is {messages.clean(dtype, messages.LONGEST_NAME)!r}")
    if len(shape) > _MOST_DIMENSIONS or any(
        type(size) is not int or not 0 <= size <= messages.LARGEST for size in shape
    ):
        raise ValueError(f"a shape is a list of at most {_MOST_DIMENSIONS} whole numbers of 0 or more")
    return name, _DTYPES[dtype], tuple(shape)


# ---- The server's side -------------------------------------------------------------------------------------


def packing(grid: Grid, most_bytes: Callable[[], float] = lambda: inf) -> Grid:
    """Return a Grid that packs the records sent to devices; ``grid`` itself in a simulation.

    ``most_bytes`` returns the most bytes of a reply: on devices a larger reply isn't read to its end.
    """
    if engine_of(grid) != DEPLOYMENT or isinstance(grid, PackingGrid):
        return grid
    return PackingGrid(grid, most_bytes)


class AgreeingGrid(GridAround):
    """A Grid that asks each node, in the request for its description, whether it reads a form of models.

    Attributes
    ----------
    form : str
        Name of the form, in the config of the request and in the metrics of the answer.
    """

    form: ClassVar[str]

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._readers: set[int] = set()  # ids of the nodes that read the form
        # The node that is asked, by the id of the request for its description.
        self._asked: dict[str, int] = {}

    @abstractmethod
    def prepared(self, message: Message, *, reads: bool) -> Message:
        """Return a message as it is sent to its node, which may read the form."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages as their nodes read them; return the ids of the messages that could be stored."""
        prepared = [
            self._asking(message)
            if asks_for_description(message)
            else self.prepared(message, reads=message.metadata.dst_node_id in self._readers)
            for message in messages
        ]
        pushed = list(self.grid.push_messages(prepared))
        self._asked |= {
            message.metadata.message_id: message.metadata.dst_node_id
            for message in prepared
            if asks_for_description(message)
        }
        return pushed

    def _asking(self, message: Message) -> Message:
        content = RecordDict(dict(message.content.items()))
        for name, config in message.content.config_records.items():
            content[name] = ConfigRecord({**config, self.form: True})
        return with_content(message, content)

    def note_answer(self, reply: Message) -> None:
        """Note whether the node of a reply with content reads the form, if the reply is a description."""
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is not None and messages.metrics_of(reply).get(self.form) == 1:
            self._readers.add(asked)


class PackingGrid(AgreeingGrid):
    """A Grid that sends packed models to the nodes that support them, and unpacks their replies.

    Parameters
    ----------
    grid : Grid
        The Grid that sends the messages to the nodes.
    most_bytes : callable
        Returns the most bytes of a reply.
    """

    form: ClassVar[str] = READS_PACKED

    def __init__(self, grid: Grid, most_bytes: Callable[[], float] = lambda: inf) -> None:
        super().__init__(grid)
        self._most_reply, self._pulls = most_bytes, bounded_pulls(grid, most_bytes)
        # By a record's name: the record that was sent last, and the same record packed.
        self._last: dict[str, tuple[ArrayRecord, ArrayRecord]] = {}

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Return the arrived replies, unpacked; an invalid one becomes an error reply with the reason."""
        pulled = pulled_from(self.grid, asked_ids(reply_to_message_ids, message_ids))
        lost = [] if self._pulls is None else self._pulls.lost(pulled)
        return [self._incoming(reply) for reply in (*pulled, *lost)]

    def prepared(self, message: Message, *, reads: bool) -> Message:
        """Return a message, packed for a node that reads packed models."""
        content = RecordDict(dict(message.content.items()))
        for name, record in messages.array_records(message).items() if reads else ():
            content[name] = self._packed(name, record)
        return with_content(message, content)

    def _packed(self, name: str, record: ArrayRecord) -> ArrayRecord:
        """Pack a record; many nodes are sent the same model, which is packed once."""
        if name not in self._last or self._last[name][0] is not record:
            self._last[name] = record, pack_record(record)
        return self._last[name][1]

    def _incoming(self, reply: Message) -> Message:
        if not reply.has_content():
            return self._refused(reply)
        self.note_answer(reply)
        try:
            self._check_size(reply)
            return _unpacked(reply)
        except ArraysMismatchError as error:
            return with_error(reply, NOT_PACKED, str(error))

    def _refused(self, reply: Message) -> Message:
        """Return an error reply; if the reply was too large to be read to its end, with that as the reason."""
        request = reply.metadata.reply_to_message_id
        most = None if self._pulls is None else self._pulls.refused.pop(request, None)
        if most is None:
            return reply
        return with_error(reply, TOO_LARGE, f"its reply takes more than {most} bytes, and isn't read further")

    def _check_size(self, reply: Message) -> None:
        """Raise ArraysMismatchError if a reply is larger than allowed, before it is unpacked."""
        if (size := messages.size_of(reply)) > (most := self._most_reply()):
            raise ArraysMismatchError(f"its reply takes {size} bytes; allowed are {most}")


# ---- The client's side -------------------------------------------------------------------------------------


def unpack_arrays(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Unpack the models that a ClientApp receives, and pack the models of its replies; a mod for Flower."""
    packed = message.has_content() and any(map(is_packed, messages.array_records(message).values()))
    reply = call_next(_unpacked(message) if packed else message, context)
    if not reply.has_content():
        return reply
    if packed:
        for name, record in messages.array_records(reply).items():
            reply.content[name] = pack_record(record)
    else:
        offer_to_read(READS_PACKED, message, reply)
    return reply


def offer_to_read(form: str, message: Message, reply: Message) -> None:
    """Say in a description with content that this client reads a form of models, if the server asks for it."""
    configs = message.content.config_records.values() if asks_for_description(message) else ()
    if any(config.get(form) for config in configs):
        messages.metrics_of(reply)[form] = 1


def asks_for_description(message: Message) -> bool:
    return message.metadata.message_type == messages.DESCRIBE


def _unpacked(message: Message) -> Message:
    """Return a message in which no record is packed."""
    records = messages.array_records(message)
    packed = {name: unpack_record(record) for name, record in records.items() if is_packed(record)}
    return with_content(message, RecordDict({**message.content, **packed})) if packed else message
