"""Devices that lie about their times, on scikit-learn's digits."""

import pytest

from strategies import clock
from studies.attacks.problem import pictures
from studies.attacks.timing import LIES, result


@pytest.mark.parametrize("method", ["async-fedavg", "fedbuff", "fedfix"])
def test_a_lie_about_time_costs_at_most_fifteen_points(method):
    data, machine = pictures(""), clock.time
    honest, _, share = result(method, "honest", data, sends="as others")
    assert share == pytest.approx(0.2, abs=0.03)
    for lie in set(LIES) - {"honest"}:
        accuracy, _, share = result(method, lie, data)
        assert accuracy > honest - 15, lie
        assert share <= 0.23, lie
    assert clock.time is machine


@pytest.mark.parametrize("method", ["async-fedavg", "fedasync"])  # not rennala: docs/protection.md
def test_an_update_of_any_length_that_is_there_at_once_costs_at_most_fifteen_points(method):
    data = pictures("")
    honest, _, _ = result(method, "honest", data, sends="as others")
    accuracy, _, _ = result(method, "20 times as fast", data, sends="a million times as long")
    assert accuracy > honest - 15
