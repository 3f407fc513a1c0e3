"""What is no answer, and what is no question: neither end takes it, and a message still gets its one answer."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.client_app import app
from fedapp.worker import protocol
from fedapp.worker.sources import digest_of_sources
from strategies.flower import messages
from strategies.flower.internals import context_to_bytes, give_id, message_to_bytes
from tests.fedapp.client.asking import context_of

SECONDS = 60.0  # in which what a test waits for has to happen


def frame(kind: bytes, content: bytes = b"", length: int | None = None) -> bytes:
    return kind + struct.pack(">Q", len(content) if length is None else length) + content


ACCEPTED, LOG = frame(protocol.ACCEPTED), frame(protocol.LOG, b"[]")
GARBAGE = {
    "nothing": (b"", "the connection was closed"),
    "noise": (b"\xff" * 300, "a frame b'\\xff' of 18446744073709551615 bytes; at most 1048576"),
    "half a frame": (ACCEPTED + protocol.LOG + b"\0\0", "the connection was closed"),
    "a message too long": (ACCEPTED + LOG + frame(protocol.MESSAGE, b"", 2**31), "of 2147483648 bytes"),
    "too long a word": (frame(protocol.REFUSED, b"", 2**20 + 1), "of 1048577 bytes; at most 1048576"),
    "a refusal of many lines": (frame(protocol.REFUSED, b"no\nreally\x1b[2J"), "no really�[2J"),
    "no protobuf": (
        ACCEPTED + LOG + frame(protocol.MESSAGE, b"\xff\xff") + frame(protocol.CONTEXT),
        "DecodeError",
    ),
    "an empty message": (ACCEPTED + LOG + frame(protocol.MESSAGE) + frame(protocol.CONTEXT), "ValueError"),
    "no log": (ACCEPTED + frame(protocol.LOG, b"{}"), "the connection was closed"),
    "an order of its own": (ACCEPTED + frame(protocol.MESSAGE), "a frame b'm' that has no place here"),
}


@contextlib.contextmanager
def answering(path: Path, sent: bytes) -> Iterator[None]:
    """Be a worker that answers one message with these bytes, whatever it is."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, protocol.WorkerError):
            connection.settimeout(SECONDS)
            protocol.expect(connection, protocol.HELLO)
            rest = sent
            if sent.startswith(ACCEPTED):
                connection.sendall(ACCEPTED)
                protocol.expect(connection, protocol.MESSAGE)
                protocol.expect(connection, protocol.CONTEXT)
                rest = sent[len(ACCEPTED) :]
            connection.sendall(rest)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(SECONDS)


def assert_one_line(caplog: pytest.LogCaptureFixture, path: Path, reason: str = "") -> None:
    [line] = caplog.messages
    assert line.startswith(f"No worker for this message, its own process works: {path}: ")
    assert reason in line
    assert "\n" not in line


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_in_place_of_an_answer_is_one_line_and_the_process_works(
    case, tmp_path, request_to, use, own_work, caplog
):
    sent, reason = GARBAGE[case]
    path = tmp_path / "w.sock"
    use(path)
    context = context_of()
    with answering(path, sent):
        assert app(request_to(messages.DESCRIBE), context).has_content()
    assert len(own_work) == 1
    assert_one_line(caplog, path, reason)
    assert not context.state


@pytest.fixture
def an_answer(request_to, use):
    """All that a worker sends in answer to a message with the id 'another'."""
    use("")
    other = request_to(messages.DESCRIBE)
    give_id(other, "another")
    reply = message_to_bytes(app(other, context_of()))
    return (
        ACCEPTED
        + LOG
        + frame(protocol.MESSAGE, reply)
        + frame(protocol.CONTEXT, context_to_bytes(context_of()))
    )


def test_an_answer_to_another_message_is_not_taken(tmp_path, request_to, use, an_answer, own_work, caplog):
    use(tmp_path / "w.sock")
    request = request_to(messages.DESCRIBE)
    with answering(tmp_path / "w.sock", an_answer):
        reply = app(request, context_of())
    assert reply.metadata.reply_to_message_id == request.metadata.message_id
    assert own_work == [request.metadata.message_id]
    assert_one_line(caplog, tmp_path / "w.sock", "its reply is to another message")


@given(data=st.data())
def test_a_torn_answer_is_taken_whole_or_not_at_all(data, tmp_path, request_to, use, an_answer, own_work):
    at = data.draw(st.integers(len(ACCEPTED), len(an_answer) - 1))
    torn = data.draw(st.sampled_from([an_answer[:at], an_answer[:at] + b"\xff" + an_answer[at + 1 :]]))
    path = tmp_path / "w.sock"
    path.unlink(missing_ok=True)
    use(path)
    request = request_to(messages.DESCRIBE)
    give_id(request, "another")
    own_work.clear()
    with answering(path, torn):
        reply = app(request, context_of())
    assert reply.metadata.reply_to_message_id == "another"
    assert len(own_work) <= 1
    assert len(own_work) == 1 or len(torn) == len(an_answer)


# Questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xff" * 100,
        frame(protocol.MESSAGE, b"x"),
        frame(protocol.HELLO, b"no json"),
        frame(protocol.HELLO, b"[" * 100_000),
        frame(protocol.HELLO, b"", 2**40),
        frame(protocol.HELLO, json.dumps({"sources": 7}).encode()),
    ],
)
def test_no_bytes_stop_a_worker(sent, worker, request_to, use, only_the_worker):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(worker.path))
        connection.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    use(worker.path)
    assert app(request_to(messages.DESCRIBE), context_of()).has_content()


@pytest.mark.parametrize("message", [b"\xff\xff", b"", b"\0" * 1000])
def test_a_task_that_cannot_be_read_fails_and_the_worker_goes_on(
    message, worker, request_to, use, only_the_worker
):
    hello = {"sources": digest_of_sources(), "folder": "/"}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(worker.path))
        connection.settimeout(SECONDS)
        protocol.send(connection, protocol.HELLO, json.dumps(hello).encode())
        assert protocol.receive(connection) == (protocol.ACCEPTED, b"")
        protocol.send(connection, protocol.MESSAGE, message)
        protocol.send(connection, protocol.CONTEXT, b"")
        kinds = [protocol.receive(connection)[0]]
        while kinds[-1] in (protocol.WAITING, protocol.WORKING):
            kinds.append(protocol.receive(connection)[0])
    assert kinds[-1] == protocol.FAILED
    use(worker.path)
    assert app(request_to(messages.DESCRIBE), context_of()).has_content()
