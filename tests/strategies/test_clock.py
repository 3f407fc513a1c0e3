"""Virtual time jumps and never runs backwards; wall time passes by itself."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.clock import RESOLUTION, VirtualClock, WallClock


def test_virtual_clock_jumps_and_takes_no_real_time() -> None:
    clock, began = VirtualClock(), time.monotonic()
    assert clock.now() == 0.0
    clock.wait_until(86_400.0)
    assert clock.now() == 86_400.0
    assert time.monotonic() - began < 60.0


def test_virtual_clock_stands_still_until_it_is_told() -> None:
    clock = VirtualClock(start=5.0)
    time.sleep(0.002)
    assert clock.now() == 5.0
    clock.wait_until(5.0)
    assert clock.now() == 5.0


def test_virtual_clock_refuses_to_run_backwards() -> None:
    clock = VirtualClock()
    clock.wait_until(2.0)
    with pytest.raises(ValueError, match=r"can't run backwards: now 2\.0 s, asked for 1\.5 s"):
        clock.wait_until(1.5)
    assert clock.now() == 2.0


def test_virtual_clock_takes_due_times_within_the_resolution_as_equal() -> None:
    clock = VirtualClock(start=2.0)
    clock.wait_until(2.0 - RESOLUTION / 2)
    assert clock.now() == 2.0  # and not a nanosecond earlier
    with pytest.raises(ValueError, match="backwards"):
        clock.wait_until(2.0 - 2 * RESOLUTION)


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_virtual_clock_follows_any_ascending_deadlines(deadlines: list[float]) -> None:
    clock = VirtualClock()
    for deadline in sorted(deadlines):
        clock.wait_until(deadline)
        assert clock.now() == deadline


def test_wall_clock_starts_at_zero_and_advances() -> None:
    clock = WallClock()
    first = clock.now()
    assert 0 <= first < 1.0
    time.sleep(0.002)
    assert clock.now() >= first + 0.002


def test_wall_clock_waits_until_the_deadline() -> None:
    clock, began = WallClock(), time.monotonic()
    clock.wait_until(0.05)
    assert 0.05 <= clock.now() < 1.0
    assert time.monotonic() - began >= 0.05 - 1e-3


def test_wall_clock_returns_at_once_when_the_deadline_has_passed() -> None:
    clock = WallClock()
    clock.wait_until(0.01)
    before = clock.now()
    clock.wait_until(0.0)
    assert clock.now() - before < 0.5


def test_clocks_say_which_they_are() -> None:
    assert (VirtualClock().name, WallClock().name) == ("virtual", "wall")
