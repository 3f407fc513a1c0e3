"""Task times of F-X and exponential (Fraboni et al. 2023, section 5.1), of half-normal, and of trace files."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.timing.time_scenario import TimeScenario

# ---- F-X --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        # From 1 − 80/100 = 0.2 to 1, in C − 1 equal steps: 0.8/3 = 4/15 for four clients, 0.2 for five.
        (2, [0.2, 1.0]),
        (4, [0.2, 7 / 15, 11 / 15, 1.0]),
        (5, [0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_f80_by_hand(clients, expected):
    scenario = TimeScenario("F80", clients)
    np.testing.assert_allclose(scenario.means, expected, rtol=1e-12)
    # Fixed: every task of a client takes its mean.
    assert [
        scenario.task_time(i, k) for k in (1, 2, 77) for i in range(clients)
    ] == 3 * scenario.means.tolist()


def test_f0_makes_all_alike():
    assert TimeScenario("F0", 4).means.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_single_client_is_the_last_one():
    assert TimeScenario("F80", 1).means.tolist() == [1.0]


@given(x=st.integers(0, 99), clients=st.integers(2, 200))
def test_times_rise_evenly_from_the_fastest_to_one(x, clients):
    times = TimeScenario(f"F{x}", clients).means
    assert times.shape == (clients,)
    assert times[0] == pytest.approx(1 - x / 100)
    assert times[-1] == 1.0
    assert times.min() > 0
    np.testing.assert_allclose(np.diff(times), x / 100 / (clients - 1), atol=1e-12)


def test_a_client_that_joins_later_is_as_slow_as_the_slowest():
    assert TimeScenario("F80", 3).task_time(3, 1) == 1.0


@pytest.mark.parametrize(
    "scenario",
    [
        "",
        "F",
        "80",
        "f80",
        "F100",
        "F-5",
        "F8.5",
        "F80 ",
        "F80:F0",
        "Exponential",
        "exponential:80",
        "exponential:F100",
        "exponential:exponential",
        "uniform",
        "trace",
    ],
)
def test_other_scenarios_are_refused_with_key_value_and_what_is_allowed(scenario):
    with pytest.raises(ValueError, match="time_scenario = ") as error:
        TimeScenario(scenario, 5)
    if scenario != "trace":  # a trace without a file is one whose file can't be read
        allowed = (
            "allowed are F0 to F99, exponential or half-normal, alone or with :F0 to :F99, trace:FILE, profile:FILE, "
            "lognormal:S, zipf:S, pareto:S (and SPEED,DOWN,UP,LATENCY after a comma)"
        )
        assert str(error.value) == f"time_scenario = {scenario!r}: {allowed}"


# ---- Exponential ------------------------------------------------------------------------------------------------


def test_exponential_has_the_means_of_f80_or_of_the_one_named():
    assert TimeScenario("exponential", 4).means.tolist() == TimeScenario("F80", 4).means.tolist()
    assert TimeScenario("exponential:F0", 4).means.tolist() == [1.0] * 4
    assert TimeScenario("exponential:F40", 3).means.tolist() == pytest.approx([0.6, 0.8, 1.0])


@pytest.mark.parametrize("name", ["exponential", "exponential:F0"])
def test_exponential_times_have_mean_and_deviation_tau(name):
    scenario = TimeScenario(name, 2, seed=3)
    for client, tau in enumerate(scenario.means):
        times = np.array([scenario.task_time(client, task) for task in range(1, 4001)])
        # Of Exp(τ): mean τ, deviation τ, P(T > τ) = 1/e. The mean of 4000 deviates by τ/√4000 = 0.016 τ; 5 of that.
        assert times.min() > 0
        assert times.mean() == pytest.approx(tau, rel=0.08)
        assert times.std() == pytest.approx(tau, rel=0.12)
        assert (times > tau).mean() == pytest.approx(np.exp(-1), abs=0.04)


def test_exponential_times_follow_from_seed_client_and_task_alone():
    one, other = TimeScenario("exponential", 5, seed=1), TimeScenario("exponential", 5, seed=1)
    keys = [(client, task) for client in range(5) for task in range(1, 6)]
    times = {key: one.task_time(*key) for key in keys}
    assert {
        key: other.task_time(*key) for key in reversed(keys)
    } == times  # in whatever order they are asked for
    assert len(set(times.values())) == len(keys)  # and all are draws of their own
    assert TimeScenario("exponential", 5, seed=2).task_time(0, 1) != times[0, 1]


# ---- Half-normal -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["half-normal", "half-normal:F0"])
def test_half_normal_times_have_mean_tau_and_its_quantiles(name):
    scenario = TimeScenario(name, 2, seed=3)
    assert scenario.means.tolist() == TimeScenario("F0" if ":" in name else "F80", 2).means.tolist()
    for client, tau in enumerate(scenario.means):
        times = np.array([scenario.task_time(client, task) for task in range(1, 4001)])
        assert times.min() > 0
        # |N(0, s²)|, s = τ √(π/2): mean τ, deviation τ √(π/2 − 1) = 0.756 τ, P(T > s) = 0.3173.
        assert times.mean() == pytest.approx(tau, rel=0.06)
        assert times.std() == pytest.approx(tau * (np.pi / 2 - 1) ** 0.5, rel=0.06)
        assert (times > tau * (np.pi / 2) ** 0.5).mean() == pytest.approx(0.3173, abs=0.04)
        law = scenario.distribution(client)
        assert law.mean() == pytest.approx(tau, rel=1e-3)
        assert np.quantile(law, 0.9) == pytest.approx(np.quantile(times, 0.9), rel=0.06)


# ---- Trace files ------------------------------------------------------------------------------------------------

Write = Callable[[str], str]


@pytest.fixture
def trace(tmp_path):
    """Write a trace file and return the scenario's name."""

    def write(text: str) -> str:
        (tmp_path / "times.csv").write_text(text, encoding="utf-8")
        return f"trace:{tmp_path / 'times.csv'}"

    return write


@pytest.mark.parametrize("header", ["", "client,seconds\n", "client, seconds\n"])
def test_a_clients_rows_are_its_tasks_in_turn_and_again_from_the_first(trace, header):
    scenario = TimeScenario(trace(f"{header}0,0.5\n1,2\n0,1.5\n\n0,1.0\n2,1e-3\n"), 2)
    assert [scenario.task_time(0, task) for task in range(1, 8)] == [0.5, 1.5, 1.0, 0.5, 1.5, 1.0, 0.5]
    assert [scenario.task_time(1, task) for task in (1, 2, 3)] == [2.0, 2.0, 2.0]
    # (0.5 + 1.5 + 1) / 3 = 1; client 2's row is one too many and is not used.
    assert scenario.means.tolist() == [1.0, 2.0]


def test_a_trace_in_the_home_folder(trace, tmp_path, monkeypatch):
    trace("0,0.25\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TimeScenario("trace:~/times.csv", 1).means.tolist() == [0.25]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0,0.5\n2,1\n", "has no row for client 1; there are 3 clients, from 0"),
        ("", "has no row for client 0; there are 3 clients, from 0"),
        ("client,seconds\n", "has no row for client 0; there are 3 clients, from 0"),
        ("seconds,client\n0,1\n", "row 1 must be client,seconds with seconds > 0"),
        ("0,1\nclient,seconds\n", "row 2 must be client,seconds with seconds > 0"),
        ("0\n", "row 1 must be client,seconds with seconds > 0"),
        ("0,1,2\n", "row 1 must be client,seconds with seconds > 0"),
        ("0,1\n0,0\n", "row 2 must be client,seconds with seconds > 0"),
        ("0,-1\n", "row 1 must be client,seconds with seconds > 0"),
        ("0,nan\n", "row 1 must be client,seconds with seconds > 0"),
        ("0,inf\n", "row 1 must be client,seconds with seconds > 0"),
        ("0,fast\n", "row 1 must be client,seconds with seconds > 0"),
        ("0.5,1\n", "row 1 must be client,seconds with seconds > 0"),
        ("-1,1\n", "row 1 must be client,seconds with seconds > 0"),
    ],
)
def test_a_bad_trace_is_refused_with_its_file_and_the_reason(trace, text, reason):
    name = trace(text)
    with pytest.raises(ValueError, match="time_scenario") as error:
        TimeScenario(name, 3)
    assert str(error.value) == f"time_scenario = {name!r}: {reason}"


def test_a_row_is_numbered_as_in_the_file_empty_lines_included(trace):
    with pytest.raises(ValueError, match=r"row 4 must be client,seconds"):
        TimeScenario(trace("client,seconds\n\n0,1\n0,x\n"), 1)


def test_a_file_saved_by_a_spreadsheet_has_a_byte_order_mark(trace):
    assert TimeScenario(trace("\ufeffclient,seconds\n0,0.5\n"), 1).means.tolist() == [0.5]
    assert TimeScenario(trace("\ufeff0,0.5\r\n0,1.5\r\n"), 1).means.tolist() == [1.0]


def test_a_trace_that_cant_be_read_is_refused(tmp_path):
    (tmp_path / "binary.csv").write_bytes(b"0,\xff\xfe\n")
    reasons = {"missing.csv": "is no file", "": "is no file", "binary.csv": r"can't be read \("}
    for name, reason in reasons.items():
        path = tmp_path / name
        with pytest.raises(ValueError, match=rf"time_scenario = 'trace:{path}': {reason}") as error:
            TimeScenario(f"trace:{path}", 3)
        assert error.value.__suppress_context__ or error.value.__context__ is None


def test_a_large_trace_field_is_refused_like_any_other(trace):
    with pytest.raises(ValueError, match=r"time_scenario = 'trace:"):
        TimeScenario(trace("0," + "1" * 200_000), 1)  # longer than the csv module's limit


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.floats(1e-6, 1e6)), min_size=1, max_size=20), data=st.data()
)
def test_any_trace_gives_back_its_rows_in_order(rows, data, tmp_path_factory):
    rows += [(client, 1.0) for client in range(4)]  # each has one at least
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_text("".join(f"{client},{seconds!r}\n" for client, seconds in rows))
    scenario, client = TimeScenario(f"trace:{path}", 4), data.draw(st.integers(0, 3))
    own = [seconds for index, seconds in rows if index == client]
    assert [scenario.task_time(client, task + 1) for task in range(2 * len(own))] == 2 * own
    assert scenario.means[client] == pytest.approx(np.mean(own))


@pytest.mark.parametrize("name", ["F80", "F0", "exponential", "half-normal:F30", "trace"])
@pytest.mark.parametrize("clients", [[], [0, 2, 1], [1, 3, 7]])
def test_times_of_several_are_those_of_each(name, clients, trace):
    if name == "trace":
        name = trace("0,1\n0,2\n1,3\n2,4\n")
    scenario = TimeScenario(name, 3, seed=5)
    assert scenario.task_times(clients, 2) == [scenario.task_time(client, 2) for client in clients]


@pytest.mark.parametrize("name", ["trace", "exponential:F50", "half-normal", "F80"])
def test_what_is_known_of_a_client_that_joins_later_is_what_its_tasks_take(name, trace):
    if name == "trace":
        name = trace("0,5\n1,1\n2,2\n")  # the slowest isn't the last
    scenario = TimeScenario(name, 3)
    taken = [scenario.task_time(3, task) for task in (1, 2, 9)]
    assert taken == [scenario.means.max()] * 3
    assert scenario.mean(3) == taken[0]
    assert scenario.distribution(3).tolist() == taken[:1]
