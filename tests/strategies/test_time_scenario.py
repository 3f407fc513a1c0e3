"""Task times τ_i of the scenarios F-X (002, section 5.1)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.time_scenario import fixed_task_times


def test_f80_of_five_clients_by_hand() -> None:
    # From 1 − 80/100 = 0.2 to 1 in four equal steps of 0.2.
    np.testing.assert_allclose(fixed_task_times("F80", 5), [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-12)


def test_f0_makes_all_alike() -> None:
    assert fixed_task_times("F0", 4).tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_single_client_is_the_last_one() -> None:
    assert fixed_task_times("F80", 1).tolist() == [1.0]


@settings(deadline=None)
@given(x=st.integers(0, 99), clients=st.integers(2, 200))
def test_times_rise_evenly_from_the_fastest_to_one(x: int, clients: int) -> None:
    times = fixed_task_times(f"F{x}", clients)
    assert times.shape == (clients,)
    assert times[0] == pytest.approx(1 - x / 100)
    assert times[-1] == 1.0
    assert times.min() > 0
    np.testing.assert_allclose(np.diff(times), x / 100 / (clients - 1), atol=1e-12)


@pytest.mark.parametrize("scenario", ["", "F", "80", "f80", "F100", "F-5", "F8.5", "F80 ", "exponential"])
def test_other_scenarios_are_refused_with_key_value_and_what_is_allowed(scenario: str) -> None:
    with pytest.raises(ValueError, match=r"allowed are F0 to F99") as error:
        fixed_task_times(scenario, 5)
    assert f"time-scenario = {scenario!r}" in str(error.value)
