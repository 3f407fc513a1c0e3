"""The event loop with devices that come, go and fail: nobody who is there is left out."""

import sys
from types import FrameType
from typing import Any

import pytest

from studies.benchmarks.event_loop_scale import OPTIONS, make_fleet, measure


@pytest.mark.parametrize("strategy", OPTIONS)
def test_a_fleet_with_churn_is_served_to_the_end_and_nobody_starves(strategy):
    given = {"buffer_size": 10} if strategy == "fedbuff" else {}
    report = measure(strategy, 120, 8, size=10, failures=0.05, **given)
    assert report.virtual_hours == pytest.approx(8, abs=0.5)
    assert report.aggregations > 4
    assert report.errors > 0.03 * report.arrivals  # the failures, and the devices that left
    assert report.starved == []
    assert report.fairness[2] < 1.05  # no device does more than it has time for


def test_a_fleet_has_newcomers_and_devices_that_leave():
    fleet = make_fleet(100, 24, seed=1)
    assert [device.absences[0][0] == 0 for device in fleet[-10:] if device.absences] == [True] * 10
    assert sum(bool(device.absences) for device in fleet[:90]) > 10
    for device in fleet:
        times = [time for absence in device.absences for time in absence]
        assert times == sorted(times)
    gone = fleet[-1]
    away = sum(min(back, 86400) - min(left, 86400) for left, back in gone.absences) / 3600
    assert gone.hours_there(86400) == pytest.approx(24 - away)


def calls_per_arrival(devices: int) -> float:
    """Return the function calls of a run for each arrival and error: unlike seconds, the same on any machine."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        report = measure("async-fedavg", devices, 0.7, size=1)
    finally:
        sys.setprofile(before)
    return calls / (report.arrivals + report.errors)


def test_an_arrival_costs_the_same_however_many_clients_there_are():
    assert calls_per_arrival(480) < 1.25 * calls_per_arrival(60)
