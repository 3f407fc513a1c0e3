"""The line of progress: its form, when it comes, and that it comes while a run waits."""

import logging
import re
from itertools import pairwise
from pathlib import Path

import pytest
from flwr.app import ArrayRecord

from fedapp.logs import is_shown
from fedapp.server import progress
from fedapp.server.progress import EVERY, MINUTE, Heartbeat, HowFar, Sparingly, progress_line
from fedapp.server.record import Entry
from strategies import Progress

LOGGER = "flwr.fedapp"
LINE = re.compile(
    r"progress: aggregation (\d+) of (\d+), (\d+) of (\d+) devices at work(?:, (\d+:\d\d:\d\d) left)?"
)


class Clock:
    """Real time, as a test has it pass."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, LOGGER)
    return lambda: [text for text in caplog.messages if text.startswith("progress: ")]


def noted(aggregation: int) -> Entry:
    return Entry.of(Progress(aggregation, 0.0, ArrayRecord(), {}, evaluated=False))


@pytest.mark.parametrize(
    ("seconds", "ending"),
    [
        (None, "at work"),
        (250, "at work, 0:04:10 left"),
        (0.4, "at work, 0:00:00 left"),
        (59.6, "at work, 0:01:00 left"),
        (100 * 3600 + 61, "at work, 100:01:01 left"),
    ],
)
def test_the_line_that_others_read(seconds, ending):
    line = progress_line(12, 100, 3, 5, seconds)
    assert line == f"progress: aggregation 12 of 100, 3 of 5 devices {ending}"
    assert LINE.fullmatch(line)


def test_it_comes_when_it_is_due_and_only_then(clock, lines):
    beat = Heartbeat(100, lambda: HowFar(12, 3, 5), Sparingly(clock))
    should_stop = beat.watching(lambda: False)
    assert not any(should_stop() for _ in range(1000))
    assert lines() == []  # a fast run has none
    for _ in range(3):
        clock.seconds += EVERY
        should_stop()
        should_stop()
    assert lines() == ["progress: aggregation 12 of 100, 3 of 5 devices at work"] * 3


def test_a_pipe_gets_a_line_a_minute_and_the_log_all(clock, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    beat = Heartbeat(100, lambda: HowFar(12, 3, 5), Sparingly(clock))
    for _ in range(12):
        clock.seconds += EVERY
        beat.refresh()
    at = [EVERY * (number + 1) for number, record in enumerate(caplog.records) if is_shown(record)]
    assert len(caplog.records) == 12
    assert at == [20, 80, 140, 200]
    assert min(later - earlier for earlier, later in pairwise(at)) >= MINUTE
    assert is_shown(logging.makeLogRecord({"msg": "any other line"}))


def test_whether_the_run_is_to_end_is_still_told(clock):
    beat = Heartbeat(1, lambda: HowFar(0, 0, 0), Sparingly(clock))
    assert beat.watching(lambda: True)() is True


def test_the_rest_takes_as_long_as_what_was_seen(clock):
    beat = Heartbeat(10, lambda: HowFar(0, 0, 0), Sparingly(clock))
    assert beat.seconds_left() is None
    beat.record(noted(2))  # resumed, or its first: nothing was seen yet
    assert beat.seconds_left() is None
    clock.seconds += 30
    beat.record(noted(5))
    assert beat.seconds_left() == 50  # 10 s each, five to come
    clock.seconds += 4
    assert beat.seconds_left() == 46
    clock.seconds += 1000  # one that takes long doesn't make the rest shorter
    assert beat.seconds_left() == 40
    beat.record(noted(10))
    assert beat.seconds_left() == 0


def test_no_more_is_left_than_the_time_budget(clock):
    beat = Heartbeat(10, lambda: HowFar(0, 0, 0), Sparingly(clock), lambda: 12.0)
    assert beat.seconds_left() == 12
    beat.record(noted(0))
    clock.seconds += 10
    beat.record(noted(1))
    assert beat.seconds_left() == 12


@pytest.mark.parametrize("strategy", ["fedavg", "async-fedavg"])
def test_a_run_that_waits_for_a_device_says_so(strategy, go, lines, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    go(strategy=strategy, clock="wall", server_lr=0.5)
    found = [LINE.fullmatch(line) for line in lines()]
    assert all(found)
    at_work = {(match[3], match[4]) for match in found if match}
    assert ("3", "3") in at_work
    numbers = [int(match[1]) for match in found if match]
    assert numbers == sorted(numbers)
    assert numbers[-1] == 3
    assert any(match and match[5] for match in found)


def test_a_terminal_has_its_bar_instead(go, lines, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    path: Path = go()
    assert lines() == []
    assert (path / "metrics.jsonl").read_text().count("\n") == 4
