"""The worker: one task at a time, in the main thread, with data and model kept from one to the next.

Connections wait in threads of their own, which send signs of life. Closing a connection gives its task up: the work
is interrupted at its next Python instruction, or, if that takes more than a minute, the worker ends, and its systemd
unit starts a new one.
"""

import gc
import json
import logging
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from flwr.app import Context, Message

from fedapp.worker import protocol
from fedapp.worker.listening import BACKLOG, listening
from fedapp.worker.protocol import WorkerError
from fedapp.worker.sources import digest_of_sources
from strategies.flower import internals as flower_internals
from strategies.flower import messages

log = logging.getLogger("flwr.fedapp")

HEARTBEAT = 5.0  # seconds between two signs of life
LOOK = 0.5  # seconds between two checks whether the other end still waits
GRACE = 60.0  # seconds that a task that was given up has to end
IDLE = 3600.0  # seconds without a task after which data and models are dropped
MOST_LINES = 100  # most lines of a task's log that go back with its reply


Line = tuple[str, int, str]  # a logger's name, a level, and a text
Handle = Callable[[Message, Context], Message]


class GivenUp(BaseException):
    """The connection of the task under way was closed; a BaseException, which ``except Exception`` doesn't catch."""


class Errand:
    """A task: its message and context as bytes, and its outcome."""

    def __init__(self, connection: socket.socket, folder: str) -> None:
        self.connection, self.folder = connection, folder
        self.message = protocol.expect(connection, protocol.MESSAGE)
        self.context = protocol.expect(connection, protocol.CONTEXT)
        self.begun = self.given_up = False
        self.done = threading.Event()
        self.failure = ""
        self.lines: list[Line] = []
        self.answer = b"", b""  # the reply and the context

    def wanted(self) -> bool:
        """Tell whether the other end still waits: it keeps the connection open and sends nothing."""
        return not self.given_up and not select.select([self.connection], [], [], 0)[0]


class Worker:
    """Serves on a Unix socket until SIGTERM, SIGINT, or until its own sources have changed.

    Parameters
    ----------
    path : Path
        The socket.
    handle : callable, optional
        Works on a message; by default as a client of this app, in the folder of who asks.
    """

    def __init__(self, path: Path, handle: Handle | None = None) -> None:
        self.path, self._handle = path, handle
        self.sources = digest_of_sources()  # before modules of the app are imported, whose files could change
        self._jobs: queue.Queue[Errand | None] = queue.Queue()
        self._current: Errand | None = None  # only while it can be interrupted
        self._ending = self._outdated = False
        self._data: tuple[object, ...] | None = (
            None  # run, node and data of the tensors and models that are kept
        )
        self._main = threading.get_ident()
        self._places = threading.Semaphore(BACKLOG)

    def serve(self) -> None:
        """Work, in the main thread."""
        signal.signal(signal.SIGUSR1, self._break_off)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        with listening(self.path) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            if (handle := self._handle) is None:
                from fedapp.client import handlers  # takes seconds, in which connections are told to wait

                handle = handlers.handle
            log.info("Worker of process %d on %s", os.getpid(), self.path)
            while (job := self._next()) is not None:
                self._work(job, handle)

    def _next(self) -> Errand | None:
        """Wait for a task; None at the end."""
        # In short waits: a signal that comes just before a wait doesn't end the wait.
        since = time.monotonic()
        while not self._ending:
            with suppress(queue.Empty):
                return self._jobs.get(timeout=LOOK)
            if time.monotonic() > since + IDLE:
                self._forget()
                since = time.monotonic()
        return None

    # ---- Work ----------------------------------------------------------------------------------------------------

    def _work(self, job: Errand, handle: Handle) -> None:
        """Do a task; whatever happens in it, the worker goes on."""
        job.begun, begun = True, time.monotonic()
        try:
            with _collected(job.lines):
                kind, job.answer = self._answer(job, handle)
            log.info("Answered %s in %.1f s", kind, time.monotonic() - begun)
        except SystemExit:
            job.failure = "it was told to end"
            raise
        except GivenUp:
            log.warning("A task was given up by who asked for it")
            self._forget()
        except Exception as error:  # its own process tries again, with nothing kept
            log.exception("A task failed")
            job.failure = messages.clean(f"{type(error).__name__}: {error}".replace("\n", " "))
            self._forget()
        finally:
            job.done.set()

    def _answer(self, job: Errand, handle: Handle) -> tuple[str, tuple[bytes, bytes]]:
        """Return the message's type, and its reply and context."""
        message = flower_internals.message_from_bytes(job.message)
        context = flower_internals.context_from_bytes(job.context)
        job.message = b""
        if self._handle is None:
            os.chdir(job.folder)  # relative paths are relative to the SuperNode's
            if (data := _data_of(context)) != self._data:
                self._forget()
                self._data = data
        self._current = job  # from here on it can be broken off
        try:
            if not job.wanted():
                raise GivenUp
            reply = handle(message, context)
        finally:
            self._current = None
        answer = flower_internals.message_to_bytes(reply), flower_internals.context_to_bytes(context)
        return message.metadata.message_type, answer

    def _forget(self) -> None:
        """Drop the data and models that a client keeps from task to task."""
        if self._handle is not None:
            return
        from fedapp.client.training import forget

        self._data = None
        forget()
        gc.collect()

    def _break_off(self, number: int, frame: FrameType | None) -> None:
        if self._current is not None and self._current.given_up:
            raise GivenUp

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ending = True
        if self._current is not None:
            raise SystemExit

    # ---- Connections ---------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # no file is free, for now
                time.sleep(LOOK)
                continue
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, WorkerError):  # a process whose connection breaks works itself
            connection.settimeout(HEARTBEAT * 6)
            protocol.check_user(connection)
            hello = protocol.from_json(protocol.expect(connection, protocol.HELLO), dict)
            if reason := self._objection(hello):
                try:
                    protocol.send(connection, protocol.REFUSED, reason.encode())
                finally:  # not before: this thread ends with the main thread
                    if self._outdated:
                        self._jobs.put(None)
                return
            if not self._places.acquire(blocking=False):
                protocol.send(connection, protocol.REFUSED, b"too many wait for it")
                return
            try:
                self._serve(connection, str(hello.get("folder", "/")))
            finally:
                self._places.release()

    def _objection(self, hello: dict[str, Any]) -> str:
        """Return why a process with this HELLO isn't served; empty if the worker serves it."""
        now = digest_of_sources()
        if now != self.sources:
            log.warning("The app that this worker runs has changed on disk: it ends, to be started anew")
            self._outdated = True
            return "its app has changed on disk since it started: it ends"
        if hello.get("sources") != now:
            return "it runs another version of the app than this message's bundle, or other libraries"
        return ""

    def _serve(self, connection: socket.socket, folder: str) -> None:
        protocol.send(connection, protocol.ACCEPTED)
        job = Errand(connection, folder)
        self._jobs.put(job)
        try:
            self._wait(connection, job)
        except (OSError, WorkerError):
            self._give_up(job)
            return
        if job.failure:
            protocol.send(connection, protocol.FAILED, job.failure.encode())
            return
        protocol.send(connection, protocol.LOG, json.dumps(job.lines).encode())
        for kind, content in zip((protocol.MESSAGE, protocol.CONTEXT), job.answer, strict=True):
            protocol.send(connection, kind, content)

    def _wait(self, connection: socket.socket, job: Errand) -> None:
        """Send signs of life until the task is done; WorkerError or OSError if the connection is closed."""
        due = 0.0
        while not job.done.wait(LOOK):
            if not job.wanted():
                raise WorkerError("the connection was closed")
            if time.monotonic() >= due:
                protocol.send(connection, protocol.WORKING if job.begun else protocol.WAITING)
                due = time.monotonic() + HEARTBEAT

    def _give_up(self, job: Errand) -> None:
        job.given_up = True
        if job is self._current:
            signal.pthread_kill(self._main, signal.SIGUSR1)
        while not job.done.wait(GRACE):
            if job.begun:
                log.error("A task that was given up doesn't end: the worker ends itself")
                os._exit(os.EX_SOFTWARE)


def _data_of(context: Context) -> tuple[object, ...]:
    """Return the key of kept data and models: the run, the node and its config, and its data file as it is now."""
    path = context.node_config.get("data-path")
    try:
        status = os.stat(str(path)) if path else None
    except OSError:
        status = None
    file = None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
    return context.run_id, context.node_id, tuple(sorted(context.node_config.items())), file


class _Collector(logging.Handler):
    def __init__(self, lines: list[Line]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < MOST_LINES:
            self.lines.append((record.name, record.levelno, messages.clean(record.getMessage())))


@contextmanager
def _collected(lines: list[Line]) -> Iterator[None]:
    """Collect the lines that Flower and the app log, for the log of the process that asked."""
    collector, logger = _Collector(lines), logging.getLogger("flwr")
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
