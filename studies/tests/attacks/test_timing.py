"""Devices that lie about their times, on scikit-learn's digits."""

import pytest

from strategies import clock
from studies.attacks.problem import pictures
from studies.attacks.timing import LIES, result


@pytest.mark.parametrize("method", ["async-fedavg", "fedbuff", "fedfix"])
def test_a_lie_about_time_costs_at_most_fifteen_points(method):
    data, machine = pictures(""), clock.time
    honest, _, share = result(method, "honest", data, reverses=False)
    assert share == pytest.approx(0.2, abs=0.03)
    for lie in set(LIES) - {"honest"}:
        accuracy, _, share = result(method, lie, data, reverses=True)
        assert accuracy > honest - 15, lie
        assert share <= 0.23, lie
    assert clock.time is machine
