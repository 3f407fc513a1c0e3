"""A link has its delay, its rate and its cuts; what a run showed is told by round; and (slow) a model over links."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from studies.benchmarks.slow_link import __main__ as slow_link
from studies.benchmarks.slow_link.__main__ import Case, Watch, summarise
from studies.benchmarks.slow_link.link import LOOPBACK, Link

MBIT = 8.0  # a megabyte a second
DELAY = 0.05


@contextmanager
def echo() -> Iterator[int]:
    """Send back what comes, on a port."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    while data := connection.recv(1 << 16):
                        connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def there_and_back(port: int, data: bytes) -> tuple[bytes, float]:
    """Send data, and return what comes back and the seconds that it took."""
    began, parts = time.monotonic(), []
    with socket.create_connection((LOOPBACK, port)) as connection:
        sender = threading.Thread(
            target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR))
        )
        sender.start()
        while part := connection.recv(1 << 16):
            parts.append(part)
        sender.join()
    return b"".join(parts), time.monotonic() - began


def test_a_link_delays_what_passes_and_counts_it():
    with echo() as port, Link(port, DELAY, MBIT) as link:
        data, seconds = there_and_back(link.port, b"there")
        assert data == b"there"
        assert seconds >= 2 * DELAY
        assert (link.up.passed, link.down.passed) == (5, 5)


def test_a_link_has_its_rate_and_loses_nothing():
    sent = bytes(range(256)) * 4000  # a megabyte, a second each way at the same time
    with echo() as port, Link(port, DELAY, MBIT) as link:
        data, seconds = there_and_back(link.port, sent)
        assert data == sent
        assert 0.9 <= seconds < 10
        assert (link.up.passed, link.down.passed) == (len(sent), len(sent))


def test_nothing_passes_a_link_that_is_cut_until_it_is_joined():
    with echo() as port, Link(port, 0.0, MBIT) as link:
        link.cut(1.0)
        data, seconds = there_and_back(link.port, b"there")
        assert data == b"there"
        assert seconds >= 0.9


def test_a_connection_to_nobody_ends_and_the_link_goes_on():
    with echo() as port:
        pass
    with Link(port, 0.0, MBIT) as link:
        for _ in range(2):
            with socket.create_connection((LOOPBACK, link.port)) as connection:
                assert connection.recv(1) == b""


def test_bytes_and_seconds_are_told_by_round():
    watch = Watch(SimpleNamespace(), [], Path())  # type: ignore[arg-type]
    watch.seen = [
        {"time": 10.0, "round": 0},
        {"time": 30.0, "round": 1, "participants": 2, "failures": 0},
        {"time": 35.0, "round": 2, "participants": 1, "failures": 1},
        {"time": 36.0, "error": 0.5},
    ]
    watch.passed = [([1, 2], [0, 0]), ([11, 12], [5, 6]), ([31, 42], [5, 16]), ([31, 42], [5, 16])]
    found = summarise(Case(values=1), watch, [])
    assert found.round_seconds == [20.0, 5.0]
    assert found.down == [[10, 10], [20, 30]]
    assert found.up == [[5, 6], [0, 10]]
    assert found.replies == [2, 1]
    assert found.error == 0.5


def test_warnings_and_errors_of_a_log_are_told_once_without_colours():
    log = "\x1b[92mINFO \x1b[0m: a\n\x1b[93mWARNING \x1b[0m:   b\nWARNING : b\nERROR : c, 0.31 seconds\n"
    assert slow_link.told(log) == ["WARNING : b", "ERROR : c, … seconds"]


def row_of(path: Path, *options: str) -> dict:
    slow_link.main([*options, "--json", str(path)])
    return json.loads(path.read_text())[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "down", "up"),
    [
        ((), 8e6, 8e6),
        (("--compression", "int8", "--compression-down", "int8"), 2e6, 2e6),
    ],
)
def test_a_model_passes_a_slow_link_exactly_and_once_each_way(tmp_path, options, down, up):
    row = row_of(tmp_path / "rows.json", "--values", "2000000", "--rounds", "2", *options)
    assert row["replies"] == [2, 2]
    for way, size in (("down", down), ("up", up)):
        for sent in row[way]:
            assert all(size <= each <= 1.05 * size + 1e5 for each in sent), row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_frozen_values_pass_a_slow_link_in_the_first_round_alone(tmp_path):
    row = row_of(tmp_path / "rows.json", "--values", "4000000", "--adapters", "0.01", "--rounds", "2")
    first, second = row["down"]
    assert row["error"] == 0
    assert all(8e6 <= each <= 8.6e6 for each in first), row
    assert all(1.6e5 <= each <= 4e5 for each in second), row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_download_goes_on_after_its_link_was_cut(tmp_path):
    options = ("--values", "4000000", "--rounds", "1", "--fault", "cut-down", "--seconds", "10")
    row = row_of(tmp_path / "rows.json", *options)
    assert row["replies"] == [2]
    assert row["error"] == 0
    assert row["down"][0][0] <= 1.05 * 16e6 + 1e5, row  # what had passed wasn't sent again
