"""The protocol between a process that Flower started and the worker, on a Unix socket of their user.

Each frame is a letter, a length (8 bytes, big endian), and content of that length. Messages and contexts are Flower's
own protobuf, everything else is text or JSON; there is no pickle.

    process                                     worker
    HELLO    {"sources": …, "folder": …}
                                                ACCEPTED, or REFUSED and why
    MESSAGE, CONTEXT
                                                WAITING while others are before it, WORKING, every few seconds
                                                LOG, MESSAGE, CONTEXT; or FAILED and why

Whoever closes the connection gives the task up. Only the process answers to Flower, so nothing can count twice.
"""

import json
import os
import socket
import struct
from typing import Any

HELLO, ACCEPTED, REFUSED = b"h", b"a", b"r"
MESSAGE, CONTEXT, LOG = b"m", b"c", b"l"
WAITING, WORKING, FAILED = b"w", b"k", b"f"

# Most bytes of a frame: of a message or context the most that protobuf can hold, of any other frame 1 MiB.
LONGEST_MESSAGE = 2**31 - 1
LONGEST_WORD = 1 << 20

_HEAD = struct.Struct(">cQ")
_CREDENTIALS = struct.Struct("3i")  # process, user, group

Frame = tuple[bytes, bytes]


class WorkerError(Exception):
    """A worker can't be had for a message; the text is one line."""


def send(connection: socket.socket, kind: bytes, content: bytes = b"") -> None:
    """Send a frame."""
    connection.sendall(_HEAD.pack(kind, len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> Frame:
    """Return the next frame's letter and content.

    Raises
    ------
    WorkerError
        If it is longer than such a frame may be, or the other end has closed the connection.
    """
    kind, length = _HEAD.unpack(_exactly(connection, _HEAD.size))
    most = LONGEST_MESSAGE if kind in (MESSAGE, CONTEXT) else LONGEST_WORD
    if length > most:
        raise WorkerError(f"a frame {kind!r} of {length} bytes; at most {most} are allowed")
    return kind, bytes(_exactly(connection, length))


def expect(connection: socket.socket, kind: bytes) -> bytes:
    """Return the content of the next frame; raise WorkerError if it isn't of this kind."""
    there, content = receive(connection)
    if there != kind:
        raise WorkerError(f"a frame {there!r} in place of {kind!r}")
    return content


def from_json(content: bytes, kind: type) -> Any:
    """Return the value of a frame of JSON; raise WorkerError if it isn't of this type."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise WorkerError(f"a frame that holds no {kind.__name__}")
    return value


def check_user(connection: socket.socket) -> None:
    """Raise WorkerError if the process at the other end is another user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise WorkerError(f"the process at the other end belongs to user {user}, not to {os.geteuid()}")


def _exactly(connection: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise WorkerError("the connection was closed")
        rest = rest[count:]
    return content
