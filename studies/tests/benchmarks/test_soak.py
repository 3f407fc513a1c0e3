"""What a soak tells: thirds of memory, stuck tasks, shares; and (slow) a short soak of a real SuperLink."""

import json

import pyarrow as pa
import pytest

from studies.benchmarks import soak
from studies.benchmarks.light_devices import task_seconds
from studies.benchmarks.soak import Look, summarise

MEAN = 100.0  # seconds of a task

CLIENTS = {"observed-share": [0.3, 0.7], "importance": [0.25, 0.75]}


def look(seconds: float, superlink: float, server_app: float) -> Look:
    memory = {"SuperLink": superlink, "ServerApp": server_app}
    return Look(seconds, memory, {"SuperLink": seconds / 4, "ServerApp": seconds / 50})


def tasks(*rows: tuple[int, float, float, str]) -> pa.Table:
    return pa.Table.from_pylist(
        [dict(zip(("client", "began", "ended", "outcome"), row, strict=True)) for row in rows]
    )


def test_the_devices_task_times_are_spread_round_their_mean():
    times = [task_seconds(MEAN, index, 3) for index in range(3)]
    assert times == [75, 100, 125]
    assert task_seconds(MEAN, 0, 1) == 75


def test_the_figures_are_of_the_thirds_the_tasks_and_the_last_evaluation():
    # Medians of the thirds: 100 and 104 MiB, 500 and 530.
    memory = [(100, 500), (90, 480), (300, 510), *[(50, 50)] * 3, (104, 540), (103, 530), (200, 520)]
    looks = [look(60.0 * place, *each) for place, each in enumerate(memory)]
    found = summarise(
        looks,
        tasks((0, 0, 80, "accepted"), (1, 10, 150, "accepted"), (1, 400, 480, "under way")),
        CLIENTS,
        MEAN,
    )
    assert (found.devices, found.minutes, found.updates, found.longest) == (2, 8, 2, 140)
    assert found.memory == {"SuperLink": (100, 104), "ServerApp": (500, 530)}
    assert found.cpu == pytest.approx({"SuperLink": 0.25, "ServerApp": 0.02})
    assert found.shares == pytest.approx((0.7 / 0.75, 0.3 / 0.25))
    assert found.problems() == [
        "ServerApp: 530 MiB in the last third, 500 in the first",
        "shares of devices are 0.93 to 1.20 of their due",
    ]
    assert (
        "SuperLink: 100 MiB in the first third, 104 in the last (+4.0 %), 250 CPU ms a second" in found.text()
    )


def test_tasks_that_are_late_lost_or_never_end_are_named():
    rows = [
        (0, 0, 269, "accepted"),  # 2 × 75 + 120 s are allowed
        (0, 0, 271, "accepted"),
        (1, 0, 371, "under way"),  # 2 × 125 + 120
        (1, 0, 50, "failed"),
    ]
    looks = [look(place, 1, 1) for place in range(9)]
    assert summarise(looks, tasks(*rows), CLIENTS, MEAN).stuck == [
        "client 0: a task of 271 s, accepted",
        "client 1: a task of 371 s, under way",
        "client 1: a task of 50 s, failed",
    ]


@pytest.mark.slow
def test_a_short_soak_of_a_real_superlink(tmp_path, capsys):
    """Its figures are there; whether they are good takes longer."""
    path = tmp_path / "soak.json"
    try:
        soak.main(["--devices", "3", "--minutes", "2", "--task-seconds", "6", "--json", str(path)])
    except SystemExit as problems:
        print(problems)
    found = json.loads(path.read_text())
    assert (found["devices"], found["updates"] > 5) == (3, True)
    assert found["memory"]["SuperLink"][0] > 50
    assert found["memory"]["ServerApp"][1] > 100
    assert capsys.readouterr().out.startswith("3 devices, ")
