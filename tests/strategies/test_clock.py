"""Virtual time jumps and never runs backwards; wall time passes by itself."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.clock import RESOLUTION, VirtualClock, WallClock


def test_virtual_clock_refuses_to_run_backwards():
    clock = VirtualClock()
    clock.wait_until(2.0)
    with pytest.raises(ValueError, match=r"can't run backwards: now 2\.0 s, asked for 1\.5 s"):
        clock.wait_until(1.5)
    assert clock.now() == 2.0


def test_virtual_clock_takes_due_times_within_the_resolution_as_equal():
    clock = VirtualClock(start=2.0)
    clock.wait_until(2.0 - RESOLUTION / 2)
    assert clock.now() == 2.0  # and not a nanosecond earlier
    with pytest.raises(ValueError, match="backwards"):
        clock.wait_until(2.0 - 2 * RESOLUTION)


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_virtual_clock_follows_any_ascending_deadlines(deadlines):
    clock = VirtualClock()
    assert clock.now() == 0.0
    for deadline in sorted(deadlines):
        clock.wait_until(deadline)
        assert clock.now() == deadline


def test_wall_clock_advances_and_waits_until_a_deadline_that_has_not_passed(monkeypatch):
    clock, began = WallClock(), time.monotonic()
    assert clock.now() >= 0
    clock.wait_until(0.05)
    assert clock.now() >= 0.05
    assert time.monotonic() - began >= 0.05 - 1e-3
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waited {seconds} s"))
    clock.wait_until(0.0)


def test_clocks_say_which_they_are():
    assert (VirtualClock().name, WallClock().name) == ("virtual", "wall")
