"""Devices that lie about their times, on scikit-learn's digits."""

import pytest

from strategies import clock
from studies.attacks.problem import pictures
from studies.attacks.timing import LIES, result


@pytest.mark.parametrize("method", ["async-fedavg", "fedbuff", "fedfix"])
def test_a_lie_about_time_costs_at_most_fifteen_points(method):
    data, machine = pictures(""), clock.time
    honest = result(method, "honest", data, sends="as others")
    assert honest.share == pytest.approx(0.2, abs=0.03)
    for lie in set(LIES) - {"honest"}:
        found = result(method, lie, data)
        assert found.accuracy > honest.accuracy - 15, lie
        assert found.share <= 0.23, lie
    assert clock.time is machine


@pytest.mark.parametrize("method", ["async-fedavg", "delay-adaptive", "fedasync", "rennala"])
def test_an_update_of_any_length_that_is_there_at_once_costs_at_most_fifteen_points(method):
    data = pictures("")
    honest = result(method, "honest", data, sends="as others")
    found = result(method, "20 times as fast", data, sends="a million times as long")
    assert found.accuracy > honest.accuracy - 15
    assert found.share <= 0.23


@pytest.mark.parametrize("method", ["fadas", "fedasync"])
def test_of_honest_devices_of_unequal_speed_at_most_one_percent_is_discarded(method):
    found = result(method, "0.2 to 1 s", pictures(""), sends="as others", liars=5)
    assert found.discarded <= 0.01 * found.arrived


def test_a_late_burst_counts_no_more_than_usual_times_do():
    data = pictures("")
    usual = result("fadas", "honest", data)
    burst = result("fadas", "usual, then a burst", data)
    assert burst.share <= usual.share + 0.02
    assert burst.accuracy > usual.accuracy - 3
