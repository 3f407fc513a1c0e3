"""Real workers, in processes of their own, on sockets in the test's folder."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message
from flwr.supercore.task_identity import TaskIdentity

from fedapp.client import handlers
from fedapp.server import Experiment, prepare
from fedapp.worker.asking import VARIABLE
from strategies.flower.internals import give_id
from tests.fedapp.client.asking import CLIENTS, request_for

ROOT = Path(__file__).parents[3]
START = 120.0  # seconds in which a worker has to listen
NUMBERS = itertools.count()  # of messages


class RunningWorker:
    """A worker's process, its socket and its log."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self.path, self.log = folder / "w.sock", folder / "w.log"
        command = command or ("-m", "fedapp.worker.command")
        variables = {"PYTHONPATH": str(ROOT), **environment, VARIABLE: str(self.path)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, **variables},
                stdout=log,
                stderr=log,
            )

    def wait(self) -> "RunningWorker":
        """Wait until it listens."""
        deadline = time.monotonic() + START
        while True:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.path))
                return self
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


Start = Callable[..., RunningWorker]


def starting(folder: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(*command: str, **environment: str) -> RunningWorker:
            running = RunningWorker(folder, *command, **environment)
            stack.callback(running.end)
            return running.wait()

        yield start


@pytest.fixture
def start_worker(tmp_path):
    """Start workers that end with the test."""
    yield from starting(tmp_path)


@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    """A worker for all tests: one takes seconds to start."""
    for start in starting(tmp_path_factory.mktemp("worker")):
        yield start()


@pytest.fixture(scope="session")
def odd_worker(tmp_path_factory):
    """A worker whose handlers do what odd.py says."""
    for start in starting(tmp_path_factory.mktemp("odd")):
        yield start(str(Path(__file__).parent / "odd.py"))


@pytest.fixture(autouse=True)
def this_task(monkeypatch):
    """A message carries the identity of the process that builds it."""
    for name, value in (("_task_id", 1), ("_run_id", 2), ("_node_id", 3)):
        monkeypatch.setattr(TaskIdentity, name, value)


@pytest.fixture
def use(monkeypatch):
    """Let the app in this process hand its messages to the worker on a socket."""
    return lambda path: monkeypatch.setenv(VARIABLE, str(path))


@pytest.fixture
def experiment(configure):
    return prepare(configure(model="logistic", local_epochs=2, batch_size=32), CLIENTS)


@pytest.fixture
def request_to(experiment):
    """Build a request with an id, as one that has come through a SuperLink."""

    def build(kind: str, of: Experiment = experiment, **given: Any) -> Message:
        message = request_for(kind, of, **given)
        give_id(message, f"message-{next(NUMBERS)}")
        return message

    return build


@pytest.fixture
def only_the_worker(monkeypatch):
    """Let this process fail where it would do the work itself."""

    def refuse(*_: Any) -> Message:
        raise AssertionError("this process did the work itself")

    monkeypatch.setattr("fedapp.client.handlers.handle", refuse)


@pytest.fixture
def own_work(monkeypatch):
    """The ids of the messages that this process worked on itself."""
    done: list[str] = []
    real = handlers.handle

    def handle(message: Message, context: Context) -> Message:
        done.append(message.metadata.message_id)
        return real(message, context)

    monkeypatch.setattr(handlers, "handle", handle)
    return done
