"""A worker that dies, hangs or isn't there, and one whose process dies: every message gets its one answer."""

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedapp.client_app import app
from fedapp.worker import asking
from fedapp.worker.asking import VARIABLE, ExpiredError
from fedapp.worker.command import main
from fedapp.worker.listening import listening
from fedapp.worker.protocol import WorkerError
from strategies.flower import messages
from strategies.flower.internals import context_to_bytes, message_to_bytes
from tests.fedapp.client.asking import context_of
from tests.fedapp.worker.conftest import ROOT, RunningWorker

ODD = str(Path(__file__).parent / "odd.py")
SECONDS = 60.0  # in which what a test waits for has to happen


def begun(running: RunningWorker, message: Message) -> None:
    """Wait until a worker has begun a task."""
    deadline = time.monotonic() + SECONDS
    while f"begins {message.metadata.message_id}\n" not in running.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Tasks that fail -------------------------------------------------------------------------------------------------


def test_a_task_that_fails_in_the_worker_is_done_by_its_own_process(
    start_worker, request_to, use, own_work, caplog
):
    running, failed = start_worker(ODD), []
    use(running.path)
    for deed, reason in (
        ("raise", "ValueError: two lines of a reason"),
        ("", ""),  # it goes on
        ("die", "the connection was closed"),
    ):
        caplog.clear()
        request = request_to(messages.DESCRIBE, config={"deed": deed})
        failed += [request.metadata.message_id] if deed else []
        reply = app(request, context_of())
        assert own_work == failed
        assert reply.has_content()
        assert reply.metadata.reply_to_message_id == request.metadata.message_id
        line = f"No worker for this message, its own process works: {running.path}: {reason}"
        assert caplog.messages == ([line] if deed else [])
    assert "Traceback" in running.log.read_text()
    assert running.process.wait(SECONDS) == 9


def test_a_worker_that_says_nothing_is_given_up(tmp_path, request_to, use, own_work, monkeypatch, caplog):
    monkeypatch.setattr(asking, "PATIENCE", 0.2)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        use(tmp_path / "mute")
        assert app(request_to(messages.DESCRIBE), context_of()).has_content()
    assert len(own_work) == 1
    assert caplog.messages == [
        f"No worker for this message, its own process works: {tmp_path / 'mute'}: it has said nothing for 0.2 s"
    ]


@pytest.mark.thorough
def test_a_busy_worker_s_queue_is_left_after_a_while_and_no_task_is_done_twice(
    start_worker, request_to, use, own_work, monkeypatch, caplog, tmp_path
):
    running = start_worker(ODD)
    use(running.path)
    monkeypatch.chdir(tmp_path)
    first, second = request_to(messages.DESCRIBE, config={"deed": "wait"}), request_to(messages.DESCRIBE)
    replies: list[Message] = []
    thread = threading.Thread(target=lambda: replies.append(app(first, context_of())))
    thread.start()
    try:
        begun(running, first)
        monkeypatch.setattr(asking, "LONGEST_QUEUE", -1.0)
        assert app(second, context_of()).has_content()
    finally:
        (tmp_path / "go").touch()
        thread.join(SECONDS)
    assert own_work == [second.metadata.message_id]
    assert "it has been busy for -1 s" in caplog.text
    assert [reply.metadata.reply_to_message_id for reply in replies] == [first.metadata.message_id]
    monkeypatch.setattr(asking, "LONGEST_QUEUE", SECONDS)
    assert app(
        request_to(messages.DESCRIBE), context_of()
    ).has_content()  # what was before it in the queue is over
    assert second.metadata.message_id not in running.log.read_text()


@pytest.mark.thorough
def test_a_task_that_hangs_ends_with_its_time_to_live_and_the_worker_goes_on(
    start_worker, request_to, use, own_work, monkeypatch
):
    running = start_worker(ODD)
    use(running.path)
    hanging = request_to(messages.DESCRIBE, config={"deed": "hang"})
    known = asking._expiry
    monkeypatch.setattr(asking, "_expiry", lambda message: 0.0 if message is hanging else known(message))
    with pytest.raises(ExpiredError, match="time to live is over"):  # Flower makes an error reply of it
        app(hanging, context_of())
    assert app(request_to(messages.DESCRIBE), context_of()).has_content()
    assert own_work == []
    assert "A task was given up by who asked for it" in running.log.read_text()
    assert running.process.poll() is None


def process_that_asks(folder: Path, message: Message, path: Path) -> subprocess.Popen[bytes]:
    """Start what Flower would, with a message."""
    (folder / "message").write_bytes(message_to_bytes(message))
    (folder / "context").write_bytes(context_to_bytes(context_of()))
    code = (
        "from pathlib import Path; from fedapp.client_app import app; from strategies.flower import internals as f;"
        "app(f.message_from_bytes(Path('message').read_bytes()), f.context_from_bytes(Path('context').read_bytes()))"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(path)}
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=variables)


@pytest.mark.thorough
@pytest.mark.parametrize("deed", ["hang", pytest.param("hang deaf", marks=pytest.mark.thorough)])
def test_a_process_that_is_killed_takes_its_task_along(
    deed, start_worker, request_to, use, own_work, tmp_path
):
    running = start_worker(ODD, GRACE="2.0")
    hanging = request_to(messages.DESCRIBE, config={"deed": deed})
    process = process_that_asks(tmp_path, hanging, running.path)
    try:
        begun(running, hanging)
    finally:
        process.kill()
        process.wait()
    use(running.path)
    if deed == "hang":
        assert app(request_to(messages.DESCRIBE), context_of()).has_content()
        assert own_work == []
        assert "given up" in running.log.read_text()
    else:  # code that never comes back: the worker ends, and its unit starts another
        assert running.process.wait(SECONDS) == os.EX_SOFTWARE
        assert "doesn't end: the worker ends itself" in running.log.read_text()
        assert app(request_to(messages.DESCRIBE), context_of()).has_content()
        assert len(own_work) == 1


# Sockets ---------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_socket_is_its_user_s_alone_and_gone_afterwards(start_worker):
    running = start_worker()
    status = running.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_ISSOCK(status.st_mode)
    running.end()
    assert running.process.returncode == 0
    assert not running.path.exists()


@pytest.mark.thorough
def test_what_a_killed_worker_left_is_replaced_and_a_living_one_is_left_alone(
    start_worker, request_to, use, own_work, capsys
):
    first = start_worker()
    command = [sys.executable, "-m", "fedapp.worker.command", "--socket", str(first.path)]
    done = subprocess.run(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.endswith(f"error: {first.path}: can't be listened on (another worker does)\n")
    first.process.kill()
    first.process.wait()
    assert first.path.exists()
    use(start_worker().path)
    assert app(request_to(messages.DESCRIBE), context_of()).has_content()
    assert own_work == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file", "it is there already, and no socket"), ("no/where", "No such file"), ("x" * 120, "too long")],
)
def test_a_socket_that_cannot_be_made_is_one_line(name, reason, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(WorkerError, match=reason) as caught, listening(tmp_path / name):
        pass
    assert str(caught.value).startswith(f"{tmp_path / name}: can't be listened on (")
    assert (tmp_path / "file").read_text() == "kept"


def test_without_a_socket_the_command_says_what_is_missing(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SystemExit, match=r"error: FEDAPP_WORKER, --socket: one of them has to name"):
        main([])


OTHER_USER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.setuid(65534)
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_s_socket_is_not_trusted(tmp_path, request_to, use, own_work, caplog):
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OTHER_USER, str(tmp_path / "s")], **pipes) as other:
        assert other.stdout
        assert other.stdout.readline() == b"ready\n"
        use(tmp_path / "s")
        assert app(request_to(messages.DESCRIBE), context_of()).has_content()
        other.kill()
    assert len(own_work) == 1
    assert "the process at the other end belongs to user 65534, not to 0" in caplog.text
