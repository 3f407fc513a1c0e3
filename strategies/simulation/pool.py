"""A pool of worker processes on this machine, which run a ClientApp on messages (strategies/simulation/worker.py).

A message goes to one worker, the next one that is free. Records of arrays that several messages of one call have in
common, such as the global model, are written once, to memory that all workers read; a message itself is then small.
What a client keeps, its ``Context``, goes along with its message and comes back, so that a worker that dies takes
nothing but the message that it worked on: its client has crashed, and another worker is started in its place.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, MessageType, RecordDict

from strategies.flower.errors import RunError
from strategies.flower.internals import CRASHED, MESSAGE_UNAVAILABLE, UNKNOWN, with_content
from strategies.flower.messages import answer_to, array_records
from strategies.simulation import worker as worker_script

log = logging.getLogger("flwr.strategies")

Source = tuple[str, str] | bytes

# A worker whose last message took less than BRIEF seconds is sent the next one before it has answered, so that it
# needn't wait for the pool; a message of more bytes could fill the pipe while the worker writes its own.
BRIEF = 0.05
ENDING = 5.0  # seconds that a process whose connection is closed has to end by itself
SMALL = 32 * 1024

# The libraries that start a thread for each core, in every worker, read the number of their threads from these.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Shared:
    """Records of arrays in memory that all workers read.

    The memory has no name, so that it is freed with the last process that has it open, whatever ends that process.
    """

    def __init__(self, records: dict[str, ArrayRecord]) -> None:
        data = pickle.dumps(records, protocol=5)
        self.size = len(data)
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("strategies-model")
        else:  # not on Linux
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        with os.fdopen(os.dup(self.descriptor), "wb") as file:
            file.write(data)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)


@dataclass
class Task:
    """A message for a worker.

    Attributes
    ----------
    message : Message
        The message, for an error reply in place of the client's.
    pickled : bytes
        The message with empty records in place of the shared ones.
    shared : Shared, optional
        The records that it shares with other messages.
    """

    message: Message
    pickled: bytes
    shared: Shared | None

    @property
    def node_id(self) -> int:
        """The node that it is for."""
        return int(self.message.metadata.dst_node_id)

    @property
    def expired(self) -> bool:
        """Whether its time to live is over."""
        metadata = self.message.metadata
        return time.time() > metadata.created_at + metadata.ttl


def tasks_of(messages: Sequence[Message]) -> Iterator[Task]:
    """Yield the tasks of messages, whose common records of arrays are written once."""
    uses = Counter(id(record) for message in messages for record in array_records(message).values())
    written: dict[tuple[tuple[str, int], ...], Shared] = {}
    for message in messages:
        common = {name: record for name, record in array_records(message).items() if uses[id(record)] > 1}
        shared = None
        if common:
            key = tuple((name, id(record)) for name, record in common.items())
            shared = written[key] = written.get(key) or Shared(common)
        empty = {name: ArrayRecord() for name in common}
        small = with_content(message, RecordDict({**message.content, **empty}))
        yield Task(message, pickle.dumps(small, protocol=5), shared)


@dataclass
class _Worker:
    """A worker process, as the pool sees it.

    Attributes
    ----------
    ready : bool
        Whether it has loaded the app.
    tasks : deque of Task
        What it has been sent and hasn't answered; it works on the first.
    shared : Shared, optional
        The records that it was sent last.
    brief : bool
        Whether its last task was a short one.
    """

    process: "subprocess.Popen[bytes]"
    connection: "Connection[Any, Any]"
    ready: bool = False
    tasks: deque[Task] = field(default_factory=deque)
    shared: Shared | None = None
    brief: bool = False
    since: float = 0.0

    @classmethod
    def start(cls, source: Source, threads: int) -> "_Worker":
        """Start a process that loads the app."""
        ours, theirs = Pipe()
        few = {name: os.environ.get(name, str(threads)) for name in _THREADS}
        process = subprocess.Popen(
            [sys.executable, worker_script.__file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **few},
            start_new_session=True,  # so that Ctrl-C on a terminal is the pool's matter alone
        )
        theirs.close()
        ours.send_bytes(pickle.dumps((sys.path, sys.argv, source)))
        return cls(process, ours)

    def send(self, task: Task, context: bytes) -> None:
        """Send a task, after the records that it shares with others if the worker doesn't have them."""
        if task.shared is not None and task.shared is not self.shared:
            self.connection.send_bytes(pickle.dumps(task.shared.size))
            send_handle(self.connection, task.shared.descriptor, self.process.pid)
            self.shared = task.shared
        self.connection.send_bytes(pickle.dumps((task.pickled, context), protocol=5))
        if not self.tasks:
            self.since = time.monotonic()
        self.tasks.append(task)

    def done(self) -> Task:
        """Note that the first task is answered, and return it."""
        now = time.monotonic()
        self.brief, self.since = now - self.since < BRIEF, now
        return self.tasks.popleft()

    def has_ended(self, within: float) -> bool:
        """Wait up to some seconds for the process to end; it stays to be waited for by ``kill``."""
        end = time.monotonic() + within
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self.process.pid, how) is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True

    def kill(self) -> int:
        """End the process, and all that it has started; return its exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class Pool:
    """Worker processes that answer messages; to be closed.

    Parameters
    ----------
    source : tuple of str, or bytes
        The ClientApp: module and attribute, or as cloudpickle has written it.
    number : int
        Of workers.
    new_context : callable
        Returns the context of a client before its first message, given its node's id.
    threads : int
        Threads of numeric libraries in each worker, unless OMP_NUM_THREADS says otherwise.
    """

    def __init__(
        self, source: Source, number: int, new_context: Callable[[int], Context], threads: int = 1
    ) -> None:
        self._source, self._new_context, self._threads = source, new_context, threads
        self._contexts: dict[int, bytes] = {}  # pickled, by node
        self._queue: deque[Task] = deque()
        self._busy: set[int] = set()  # nodes whose message is with a worker
        self._logged: set[str] = set()
        self._workers: list[_Worker] = []
        for _ in range(number):
            self._workers.append(_Worker.start(source, threads))

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def context(self, node_id: int) -> Context:
        """Return a client's context after its last reply."""
        context: Context = pickle.loads(self._context(node_id))
        return context

    def push(self, tasks: Iterable[Task]) -> None:
        """Queue tasks, and send them to the workers that are free."""
        self._queue += tasks
        self._dispatch()

    def work(self, timeout: float) -> list[Message]:
        """Wait for answers, for ``timeout`` seconds at most; return the replies that have come, errors included.

        Raises
        ------
        RunError
            If a worker can't load the app.
        """
        replies = self._without_expired()
        workers = {worker.connection.fileno(): worker for worker in self._workers}
        for number in wait(list(workers), 0 if replies else timeout):
            worker = workers[number]  # type: ignore[index]
            try:
                answer = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                replies += self._lost(worker)
                continue
            if worker.ready:
                replies.append(self._answered(worker.done(), *answer))
            elif answer:
                raise RunError(f"the ClientApp can't be loaded in a process of its own:\n{answer}")
            worker.ready = True
        self._dispatch()
        return replies

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._queue.clear()

    def _context(self, node_id: int) -> bytes:
        if node_id not in self._contexts:
            self._contexts[node_id] = pickle.dumps(self._new_context(node_id), protocol=5)
        return self._contexts[node_id]

    def _dispatch(self) -> None:
        """Send queued tasks, to idle workers first; to a worker with brief tasks also the next one."""
        for most in (1, 2):
            for worker in self._workers:
                if not worker.ready or len(worker.tasks) >= most or (most == 2 and not worker.brief):
                    continue
                if (task := self._next(SMALL if most == 2 else sys.maxsize)) is None:
                    return
                self._busy.add(task.node_id)
                try:
                    worker.send(task, self._context(task.node_id))
                except OSError:  # it has died, which ``work`` notices: the task is another worker's
                    self._busy.discard(task.node_id)
                    self._queue.appendleft(task)

    def _next(self, largest: int) -> Task | None:
        """Return, and remove, the first queued task of at most so many bytes whose client isn't at work."""
        for place, task in enumerate(self._queue):
            if task.node_id not in self._busy:
                if len(task.pickled) + len(self._context(task.node_id)) > largest:
                    return None
                del self._queue[place]
                return task
        return None

    def _answered(self, task: Task, answer: Message | str, more: Any) -> Message:
        """Return the reply to a task, or an error reply with the text of Flower's simulation."""
        self._busy.discard(task.node_id)
        if isinstance(answer, Message):
            self._contexts[task.node_id] = more
            return answer_to(task.message, answer)
        last = more.strip().splitlines()[-1]
        # A traceback is in no reply. A query is one that an app needn't have a handler of.
        if last not in self._logged and not task.message.metadata.message_type.startswith(MessageType.QUERY):
            self._logged.add(last)
            log.error("node %d: the ClientApp raised an exception\n%s", task.node_id, more.rstrip())
        return Message(Error(UNKNOWN, answer), reply_to=task.message)

    def _lost(self, worker: _Worker) -> list[Message]:
        """Start another worker in place of one that has died; return an error reply to the task that it worked on."""
        worker.has_ended(within=ENDING)  # by itself, so that the exit code is its own
        code = worker.kill()
        if not worker.ready:
            raise RunError(f"a process ended while it loaded the ClientApp (exit code {code})")
        self._workers[self._workers.index(worker)] = _Worker.start(self._source, self._threads)
        self._busy -= {task.node_id for task in worker.tasks}
        if not worker.tasks:
            return []
        task = worker.tasks.popleft()
        self._queue.extendleft(reversed(worker.tasks))
        if task.expired:
            return [_expired(task)]
        reason = f"the process of its ClientApp ended while it worked (exit code {code})"
        return [Message(Error(CRASHED, reason), reply_to=task.message)]

    def _without_expired(self) -> list[Message]:
        """Drop queued tasks whose time to live is over, and end workers that still work on such a task."""
        for worker in self._workers:
            if worker.tasks and worker.tasks[0].expired:
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)  # ``work`` notices
        dropped = []
        while self._queue and self._queue[0].expired:
            dropped.append(_expired(self._queue.popleft()))
        return dropped


def _expired(task: Task) -> Message:
    return Message(Error(MESSAGE_UNAVAILABLE, "the message's time to live is over"), reply_to=task.message)
