"""What devices can do, and how long a task takes by its work and its bytes."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord
from hypothesis import given
from hypothesis import strategies as st

from strategies import RunError
from strategies.clients.roster import Client
from strategies.timing.device_profile import DeviceProfile
from strategies.timing.task_costs import TaskCost, TaskCosts
from strategies.timing.time_scenario import TimeScenario


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes, name: str = "devices") -> str:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return f"profile:{tmp_path / name}"

    return write


# ---- A file of one's own --------------------------------------------------------------------------------------


def test_the_parts_of_a_task_by_hand(written):
    device = DeviceProfile(written("0,50,2e6,1e6,0.5"), 1).device(0)
    load = TaskCost(300, 1_000_000, 250_000)
    assert device.timing(load) == (4.25, 6.0, 2.25)  # of the latency each way has half
    assert sum(device.timing(load)) == device.seconds(load)


@pytest.mark.parametrize(
    "header", ["", "client,speed,down,up,latency\n", "client, speed, down, up, latency, watts\n"]
)
def test_the_time_of_a_task_by_hand(written, header):
    # 300 examples at 50 a second: 6 s. 1,000,000 bytes are 8e6 bits: 4 s at 2 Mbit/s; 250,000 up at 1 Mbit/s: 2 s.
    rows = "1,100,4e6,1e6,0\n0,50,2e6,1e6,0.5\n7,1,1,1,1\n"
    scenario = TimeScenario(written(header + rows), 2)
    assert scenario.task_time(0, 1, TaskCost(300, 1_000_000, 250_000)) == pytest.approx(
        6 + 4 + 2 + 0.5, rel=1e-12
    )
    assert scenario.task_time(1, 9, TaskCost(300, 1_000_000, 250_000)) == pytest.approx(3 + 2 + 2, rel=1e-12)
    assert scenario.task_time(0, 1, TaskCost(0, 0, 0)) == 0.5
    assert scenario.slowness.tolist() == [1 / 50, 1 / 100]
    # One that joins later: the slowest speed, links and latency of those in the fleet.
    assert scenario.task_time(2, 1, TaskCost(300, 1_000_000, 250_000)) == pytest.approx(6 + 4 + 2 + 0.5)


def test_watts_may_be_said_of_some(written):
    devices = DeviceProfile(written("0,50,2e6,1e6,0.5,3.5\n1,50,2e6,1e6,0.5\n"), 2)
    assert [devices.device(client).watts for client in (0, 1, 2)] == [3.5, None, 3.5]


@given(
    st.tuples(*[st.floats(1e-3, 1e9)] * 3, st.floats(0, 1e3)),
    st.tuples(st.floats(0, 1e9), st.integers(0, 10**10), st.integers(0, 10**10)),
)
def test_time_grows_with_the_work_and_every_way(device, load):
    from strategies.timing.device_profile import Capacity

    one, more = Capacity(*device), TaskCost(*load)
    whole = one.seconds(more)
    parts = [load[0] / device[0], 8 * load[1] / device[1], 8 * load[2] / device[2], device[3]]
    assert whole == pytest.approx(sum(parts), rel=1e-12)


def test_a_profile_alone_has_no_task_times(written):
    with pytest.raises(ValueError, match="follow from their work and their bytes"):
        _ = TimeScenario(written("0,1,1,1,0\n"), 1).means


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("0,1,1,1,0\n", "has no row for client 1; there are 2 clients, from 0"),
        ("0,1,1,1,0\n1,1,1,1,0\n0,1,1,1,0\n", "row 3 is a second one for client 0"),
        *(
            (
                f"0,1,1,1,0\n{row}\n",
                "row 2 must be client,speed,down,up,latency and perhaps watts, with speed, down and up > 0",
            )
            for row in (
                "1,0,1,1,0",
                "1,1,0,1,0",
                "1,1,1,-1,0",
                "1,1,1,1",
                "1,1,1,1,0,1,1",
                "1,nan,1,1,0",
                "1,1,inf,1,0",
                "-1,1,1,1,0",
                "a,1,1,1,0",
                "1,1,1,1,-0.1",
                "1,secret,1,1,1",
                "1.5,1,1,1,0",
            )
        ),
        ("{}", "must be a dict with an entry for each device"),
        ("{not json", "can't be read as JSON, or as a pickle of dicts, lists and numbers"),
        (b"\x80\x04torn", "can't be read as JSON, or as a pickle of dicts, lists and numbers"),
        (pickle.dumps([1, 2]), "must be a dict with an entry for each device"),
        (
            pickle.dumps({1: {"computation": np.float64(3), "communication": 1.0}}),
            "can't be read as JSON, or as a pickle of dicts, lists and numbers",
        ),
        *(
            (
                json.dumps({"1": {"computation": 1, "communication": 1}, "2": entry}),
                "entry 2 must have computation and communication, both > 0",
            )
            for entry in (
                {"computation": 0, "communication": 1},
                {"computation": 1},
                5,
                None,
                {"computation": "x", "communication": 1},
                {"computation": float("inf"), "communication": 1},
            )
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_without_what_is_in_it(written, content, reason):
    name = written(content)
    with pytest.raises(ValueError, match="time_scenario") as error:
        TimeScenario(name, 2)
    assert str(error.value) == f"time_scenario = {name!r}: {reason}"


def test_a_pickle_runs_nothing(written, tmp_path):
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "was-here",)

    with pytest.raises(ValueError, match="can't be read"):
        TimeScenario(written(pickle.dumps({1: Trap()})), 1)
    assert not (tmp_path / "was-here").exists()


# ---- FedScale's ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write", [pickle.dumps, lambda found: json.dumps(found, indent=1).encode()], ids=["pickle", "json"]
)
def test_fedscales_capacities_are_milliseconds_forward_and_kilobits(written, write):
    found = {
        9: {"computation": 20.0, "communication": 2000.0},
        4: {"computation": 100, "communication": 500.0},
    }
    scenario = TimeScenario(written(write(found)), 3)
    # 50 examples, three times 20 ms each: 3 s; 1,000,000 and 500,000 bytes at 2 Mbit/s: 4 s and 2 s.
    assert scenario.task_time(0, 1, TaskCost(50, 1_000_000, 500_000)) == pytest.approx(3 + 4 + 2)
    assert scenario.task_time(1, 1, TaskCost(50, 1_000_000, 500_000)) == pytest.approx(15 + 16 + 8)
    assert scenario.task_time(2, 1, TaskCost(50, 1_000_000, 500_000)) == pytest.approx(3 + 4 + 2)  # in turn


# ---- APPFL's -----------------------------------------------------------------------------------------------------


def test_appfls_profiles_are_times_slower_and_megabits(written):
    found = {
        "Client1": {"compute_factor": 2.0, "bandwidth": 8.0},
        "Client2": {"compute_factor": 0.5, "bandwidth": 300},
    }
    scenario = TimeScenario(written(json.dumps(found).encode()), 3)
    # 50 examples at 100/2 a second: 1 s; 1,000,000 and 500,000 bytes at 8 Mbit/s: 1 s and 0.5 s.
    assert scenario.task_time(0, 1, TaskCost(50, 1_000_000, 500_000)) == pytest.approx(1 + 1 + 0.5)
    assert scenario.task_time(1, 1, TaskCost(50, 3_000_000, 0)) == pytest.approx(0.25 + 0.08)
    assert scenario.task_time(2, 1, TaskCost(50, 1_000_000, 500_000)) == pytest.approx(1 + 1 + 0.5)  # in turn


def test_an_appfl_profile_without_a_bandwidth_is_named(written):
    found = {
        "Client1": {"compute_factor": 2.0, "bandwidth": 8.0},
        "Client2": {"compute_factor": 2.0, "bandwidth": 0},
    }
    with pytest.raises(ValueError, match="entry 2 must have compute_factor and bandwidth, both > 0"):
        TimeScenario(written(json.dumps(found).encode()), 3)


# ---- Laws ---------------------------------------------------------------------------------------------------------


def factors(law: str, number: int = 4000) -> np.ndarray:
    devices = DeviceProfile(f"{law},1000,1e6,1e5,0.25", number, 3)
    found = [devices.device(client) for client in range(number)]
    assert all(device.latency == 0.25 and device.down == pytest.approx(10 * device.up) for device in found)
    return np.array([[1000 / device.speed, 1e6 / device.down] for device in found]).T


def test_lognormal_devices():
    for drawn in np.log(factors("lognormal:0.6")):
        assert drawn.mean() == pytest.approx(0, abs=4 * 0.6 / 4000**0.5)
        assert drawn.std() == pytest.approx(0.6, rel=4 / 8000**0.5)
    speed, link = factors("lognormal:0.6")
    assert abs(np.corrcoef(np.log(speed), np.log(link))[0, 1]) < 4 / 4000**0.5
    assert factors("lognormal:0", 5).tolist() == [[1.0] * 5] * 2


def test_pareto_devices():
    for drawn in factors("pareto:1.5"):
        assert drawn.min() >= 1
        assert drawn.max() <= 1000
        for x in (2.0, 5.0):
            share = x**-1.5
            assert (drawn > x).mean() == pytest.approx(share, abs=4 * (share / 4000) ** 0.5)


def test_zipf_devices():
    zeta = sum(k**-2.0 for k in range(1, 200_000))
    for drawn in factors("zipf:2"):
        whole = np.rint(drawn)
        np.testing.assert_allclose(drawn, whole, rtol=1e-12)
        assert whole.max() <= 1000
        for k in (1, 2, 3):
            share = k**-2.0 / zeta
            assert (whole == k).mean() == pytest.approx(share, abs=4 * (share / 4000) ** 0.5)


def test_a_device_is_the_same_in_any_fleet_of_a_seed_and_another_of_another():
    small, large = DeviceProfile("lognormal:1", 3, 5), DeviceProfile("lognormal:1", 900, 5)
    assert [large.device(client) for client in (800, 2, 0)] == [
        small.device(client) for client in (800, 2, 0)
    ]
    assert DeviceProfile("lognormal:1", 3, 6).device(0) != small.device(0)
    # By default: 100 examples a second, 20 and 5 Mbit/s, 0.1 s.
    assert DeviceProfile("lognormal:0", 1).device(0)[:4] == (100.0, 20e6, 5e6, 0.1)


@pytest.mark.parametrize(
    "law",
    [
        "lognormal:",
        "lognormal:x",
        "lognormal:-1",
        "lognormal:nan",
        "lognormal:1,2,3,4,5,6",
        "pareto:0",
        "zipf:1",
        "lognormal:1,0",
        "pareto:1,1,0",
        "zipf:2,1,1,0",
        "lognormal:1,,2",
    ],
)
def test_what_is_no_law_is_refused(law):
    with pytest.raises(ValueError, match=f"^time_scenario = '{law}': "):
        TimeScenario(law, 3)


# ---- What a task weighs -------------------------------------------------------------------------------------------


def client(num_examples: float | None) -> Client:
    return Client(1, 0, num_examples, MetricRecord())


def test_a_task_weighs_its_examples_and_the_bytes_that_it_was_sent():
    task_costs = TaskCosts()
    task_costs.model, task_costs.up = 100, 90
    assert task_costs.of(client(30)) == (30, 100, 90)
    task_costs.record(0, 150)
    task_costs.record(1, 120)
    assert task_costs.of_last(client(30)) == (30, 150, 90)
    assert task_costs.of(client(30)) == (30, 150, 90)  # what goes beside the model, at most so far
    again = TaskCosts()
    again.model, again.up = 100, 90
    again.restore(task_costs.state())
    assert again.of(client(30)) == (30, 150, 90)
    task_costs.work_of = lambda client: 7.5
    assert task_costs.of(client(None)).work == 7.5


def test_what_several_are_sent_is_noted_as_of_each():
    at_once, each = TaskCosts(), TaskCosts()
    for clients, down, parts in (([0, 1, 2], 150, [1.0, 0.5, 1.0]), ([1, 2], 120, [1.0, 0.25])):
        at_once.record_all(clients, down, parts)
        for index, part in zip(clients, parts, strict=True):
            each.record(index, down, part)
    for index in range(3):
        one = Client(1, index, 30, MetricRecord())
        assert at_once.of_last(one) == each.of_last(one)
    assert at_once.state() == each.state()


def test_without_a_size_nobody_knows_the_work():
    with pytest.raises(RunError, match=r"client 0 doesn't say how many examples it has \(query.describe\)"):
        TaskCosts().of(client(None))
