"""The side of the process that Flower started: it asks the worker, and works itself if the worker has no answer.

Imported for every message, so it imports only Flower, which is loaded anyway, and the standard library.
"""

import json
import logging
import os
import socket
import time

from flwr.app import Context, Error, Message, RecordDict

from fedapp.worker import protocol
from fedapp.worker.protocol import WorkerError
from fedapp.worker.sources import digest_of_sources
from strategies.flower import internals as flower_internals
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")

VARIABLE = "FEDAPP_WORKER"  # environment variable with the path of the worker's socket

# Seconds until a worker that says nothing is taken for dead. A living one says something every few seconds.
PATIENCE = 60.0
# Seconds that a message waits for earlier messages; after that its own process works, as without a worker.
LONGEST_QUEUE = 60.0


class ExpiredError(Exception):
    """Nobody waits for a message's reply any more."""


def ask_worker(message: Message, context: Context) -> Message | None:
    """Return the worker's reply; None, and a line in the log that says why, if there is none.

    Without a worker in the environment there is no line either. The context's state becomes what the work made of it.

    Raises
    ------
    ExpiredError
        If the message's time to live ends before the worker's work.
    """
    if not (path := os.environ.get(VARIABLE)):
        return None
    try:
        return _answer(path, message, context)
    except ExpiredError:
        raise
    except Exception as error:  # whatever a worker does, the message gets its answer
        log.warning("No worker for this message, its own process works: %s: %s", path, _reason(error))
        return None


def ask_region(message: Message, context: Context, path: str) -> Message:
    """Return the reply of the region whose run is on a socket; an error reply that says why, if there is none.

    Raises
    ------
    ExpiredError
        If the message's time to live ends before the region's work.
    """
    try:
        return _answer(path, message, context)
    except ExpiredError:
        raise
    except Exception as error:  # nobody else can answer for the region's devices
        text = f"relay = {path!r}: the region's run doesn't answer: {_reason(error)}"
        log.warning("%s", text)
        return Message(Error(flower_internals.APP_RAISED, text), reply_to=message)


def _answer(path: str, message: Message, context: Context) -> Message:
    """Return the reply from a socket; the context's state becomes what the work made of it."""
    reply, context.state = _ask(path, message, context)
    return reply


def _reason(error: Exception) -> str:
    """Return the cause of an error in one line."""
    if isinstance(error, TimeoutError):
        return f"it has said nothing for {PATIENCE:g} s"
    text = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
    return messages.clean(text.replace("\n", " "))


def _ask(path: str, message: Message, context: Context) -> tuple[Message, RecordDict]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(path)
        protocol.check_user(connection)
        hello = {"sources": digest_of_sources(), "folder": os.getcwd()}
        protocol.send(connection, protocol.HELLO, json.dumps(hello).encode())
        kind, content = protocol.receive(connection)
        if kind != protocol.ACCEPTED:
            raise WorkerError(content.decode("utf-8", "replace"))
        protocol.send(connection, protocol.MESSAGE, flower_internals.message_to_bytes(message))
        protocol.send(connection, protocol.CONTEXT, flower_internals.context_to_bytes(context))
        lines = _wait(connection, message)
        reply = flower_internals.message_from_bytes(protocol.expect(connection, protocol.MESSAGE))
        after = flower_internals.context_from_bytes(protocol.expect(connection, protocol.CONTEXT))
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        raise WorkerError("its reply is to another message")
    for name, level, text in protocol.from_json(lines, list):
        logging.getLogger(str(name)).log(int(level), "%s", text)
    return reply, after.state


def _wait(connection: socket.socket, message: Message) -> bytes:
    """Return what the work wrote into the log, once it is done."""
    begun = time.monotonic()
    while True:
        kind, content = protocol.receive(connection)
        if kind == protocol.LOG:
            return content
        if kind == protocol.FAILED:
            raise WorkerError(content.decode("utf-8", "replace"))
        if kind not in (protocol.WAITING, protocol.WORKING):
            raise WorkerError(f"a frame {kind!r} that has no place here")
        if kind == protocol.WAITING and time.monotonic() > begun + LONGEST_QUEUE:
            raise WorkerError(f"it has been busy for {LONGEST_QUEUE:g} s")
        if time.time() > _expiry(message):
            raise ExpiredError("the message's time to live is over")


def _expiry(message: Message) -> float:
    return message.metadata.created_at + message.metadata.ttl
