"""A worker of a simulation: a process that loads the ClientApp once, and answers one message after the other.

``strategies/simulation/pool.py`` starts this file as a script, so that a worker imports Flower's messages and the
app, and nothing else. Worker and pool send each other pickles:

    pool → worker   once: sys.path, sys.argv and the app's source; then, in any order,
                    - the size of a file of shared records, followed by the file's descriptor
                    - a message, with empty records in place of the shared ones, and its client's context
    worker → pool   once: the traceback of what failed while the app was loaded, "" if nothing did; then for a message
                    - a reply and the context after it, or the exception's text and its traceback
"""

import importlib
import mmap
import os
import pickle
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from flwr.app import ArrayRecord, Context, Message


def main(number: int) -> None:
    """Work until the pool closes the connection, whose file descriptor has this number."""
    pool = Connection(number)
    sys.path[:], sys.argv[:], source = pickle.loads(pool.recv_bytes())
    try:
        app = load_app(source)
    except Exception:
        pool.send_bytes(pickle.dumps(traceback.format_exc()))
        return
    pool.send_bytes(pickle.dumps(""))
    shared: dict[str, ArrayRecord] = {}
    while True:
        command = pickle.loads(pool.recv_bytes())
        if isinstance(command, int):
            shared = read_shared(recv_handle(pool), command)
        else:
            pool.send_bytes(answer(app, shared, *command))


def load_app(source: tuple[str, str] | bytes) -> Any:
    """Return the ClientApp: an attribute of a module, or what cloudpickle has written."""
    if isinstance(source, bytes):
        return pickle.loads(source)
    module, name = source
    return getattr(importlib.import_module(module), name)


def read_shared(descriptor: int, size: int) -> dict[str, ArrayRecord]:
    """Return the records of a file that all workers read."""
    try:
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory:
            records: dict[str, ArrayRecord] = pickle.loads(memory)
            return records
    finally:
        os.close(descriptor)


def answer(app: Any, shared: Mapping[str, ArrayRecord], pickled: bytes, kept: bytes) -> bytes:
    """Return the app's reply to a message, and the context after it; or the exception."""
    try:
        message: Message = pickle.loads(pickled)
        context: Context = pickle.loads(kept)
        for name, record in shared.items():
            if name in message.content:  # in its place; the arrays themselves are the same for all clients
                message.content[name] = ArrayRecord(dict(record))
        reply = app(message, context)
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__}, not a Message")
        return pickle.dumps((reply, pickle.dumps(context, protocol=5)), protocol=5)
    except Exception as error:
        return pickle.dumps((f"{type(error)}:<'{error}'>", traceback.format_exc()))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except (EOFError, OSError):  # the simulation is over
        os._exit(0)
