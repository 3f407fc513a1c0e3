"""FedCompass against its rules in float64, on a schedule by hand, at its limits, and with clients that fail."""

import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord

from strategies import FedAvg, FedCompass, messages
from strategies.clock import WallClock
from strategies.events.arrival_groups import ArrivalGroups
from strategies.timing.time_scenario import TimeScenario

CENTRES, SIZES, GAMMA = (4.0, 0.0, -2.0, 6.0, 1.0), (1, 2, 3, 4, 2), 0.05
P, C = np.array(SIZES) / sum(SIZES), len(SIZES)


def sent_steps(grid: Any) -> list[tuple[int, int]]:
    """Return client and local steps of the tasks, in the order in which they were sent."""
    fields = [request.content.config_records["config"] for request in grid.requests()]
    return [(each[messages.CLIENT], each[messages.STEPS]) for each in fields]


# ---- The rules in a second way: timers, a dict of groups and updates of their own, in float64 ----------------------


def reference(
    task_time: Callable[[int, int], float],
    number: int,
    *,
    least: int,
    most: int,
    slack: float,
    s: Callable[[int], float] = lambda delay: 1.0,
    eta: float = 1.0,
) -> tuple[list[float], list[tuple[int, int]]]:
    """Return the models 0 to ``number``, and client and steps of each task in order."""
    models, tasks, heap, groups = [1.0], [], [], {}
    speed, count, home = dict[int, float](), [0] * C, dict[int, Any]()
    late: list[tuple[int, float, int]] = []  # client, Δ, version

    def send(i: int, steps: int, now: float, group: Any) -> None:
        count[i], home[i] = count[i] + 1, group
        tasks.append((i, steps))
        due = now + task_time(i, count[i]) * steps / most
        heapq.heappush(heap, (round(due, 8), 0, i, due, now, steps, len(models) - 1))

    def whole(steps: float) -> int:
        return math.floor(steps + 1e-7)

    def assign(i: int, now: float) -> None:
        best = None
        for name, group in groups.items():
            steps = whole((group["expected"] - now) / speed[i])
            if least <= steps <= most and (best is None or steps >= best[0]):
                best = steps, name
        if best is not None:
            groups[best[1]]["at work"].add(i)
            send(i, best[0], now, best[1])
            return
        steps = -1
        for group in groups.values():
            if now < group["latest"]:
                fastest = min(speed[j] for j in [*group["at work"], *group["here"]])
                wanted = whole((group["latest"] + fastest * most - now) / speed[i])
                steps = max(steps, wanted) if wanted <= most else steps
        steps = most if steps < 0 else max(steps, least)
        name, latest = object(), now + slack * steps * speed[i]
        groups[name] = {"expected": now + steps * speed[i], "latest": latest, "at work": {i}, "here": {}}
        heapq.heappush(heap, (round(latest, 8), 1, len(tasks), name))
        send(i, steps, now, name)

    def move(came: list[tuple[int, float, int]]) -> None:
        n = len(models) - 1
        models.append(models[-1] + eta * sum(P[i] * s(n - version) * delta for i, delta, version in came))

    def aggregate(name: Any, now: float) -> None:
        group = groups[name]
        move([*late, *((i, *what) for i, what in group["here"].items())])
        late.clear()
        free, group["here"] = sorted(group["here"], key=lambda i: (speed[i], i)), {}
        group["expected"] = group["latest"] = 0.0
        if not group["at work"]:
            del groups[name]
        for i in free:
            assign(i, now)

    for i in range(C):
        send(i, most, 0.0, None)
    while len(models) <= number:
        what = heapq.heappop(heap)
        if what[1] == 1:  # a timer
            if what[3] in groups and groups[what[3]]["here"]:
                aggregate(what[3], what[0])
            continue
        _, _, i, now, began, steps, version = what
        w = models[version]
        for _ in range(steps):
            w += GAMMA * (CENTRES[i] - w)
        delta, each = w - models[version], (now - began) / steps
        speed[i] = 0.1 * speed[i] + 0.9 * each if i in speed else each
        if (name := home[i]) is None:
            move([(i, delta, version)])
            assign(i, now)
        elif round(now, 8) > round(groups[name]["latest"], 8):
            groups[name]["at work"].remove(i)
            if not groups[name]["at work"] and not groups[name]["here"]:
                del groups[name]
            late.append((i, delta, version))
            assign(i, now)
        else:
            groups[name]["at work"].remove(i)
            groups[name]["here"][i] = delta, version
            if not groups[name]["at work"]:
                aggregate(name, now)
    return models, tasks


@pytest.mark.parametrize("scenario", ["F80", "half-normal", "exponential:F60"])
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, {"least": 4, "most": 20, "slack": 1.2}),
        (
            {
                "min_local_steps": 1,
                "max_local_steps": 7,
                "group_slack": 1.0,
                "staleness_discount": "polynomial:0.5",
                "server_lr": 0.5,
            },
            {"least": 1, "most": 7, "slack": 1.0, "s": lambda delay: (1 + delay) ** -0.5, "eta": 0.5},
        ),
    ],
)
def test_a_run_is_its_papers_rule(go, scenario, options, rule):
    expected, tasks = reference(TimeScenario(scenario, C, 3).task_time, 40, **rule)
    models, grid, _ = go(FedCompass, 40, time_scenario=scenario, seed=3, **options)
    for client in range(C):  # those that are sent together are in another order
        sent, wanted = ([each for i, each in of if i == client] for of in (sent_steps(grid), tasks))
        assert abs(len(sent) - len(wanted)) <= 1  # those after the last aggregation are not sent
        assert all(one == other for one, other in zip(sent, wanted, strict=False))
    assert models == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert len({steps for _, steps in tasks}) > 2


def test_a_schedule_of_ten_clients_by_hand(go, federation, tmp_path):
    # Q_min = 2, Q_max = 10, λ = 1.2. A step of clients 0 to 4 takes 1 s, of clients 5 to 7 takes 2 s, of clients 8
    # and 9 takes 5 s; but the third task of client 8 takes 7.5 s a step, and its fourth 7.25 s.
    path = tmp_path / "times.csv"
    seconds = [10.0] * 5 + [20.0] * 3 + [50.0] * 2
    rows = [f"{client},{each}" for client, each in enumerate(seconds) if client != 8]
    path.write_text(
        "\n".join(["client,seconds", *rows, *(f"8,{each}" for each in (50, 50, 75, 72.5, *[72.5] * 20))])
    )
    fast, middle = [*range(5)], [5, 6, 7]
    expected = [
        *((i, 10) for i in range(10)),  # 0 s: all begin with Q_max steps
        # 10 s: client 0 founds a group, T_expected = 20, T_latest = 22; (20 − 10) / 1 = 10 steps of the others fit.
        *((i, 10) for i in fast),
        # 20 s: the group is complete; so is the next one's T_expected = 30. Clients 5 to 7: (30 − 20) / 2 = 5 steps.
        *((i, 10) for i in fast),
        *((i, 5) for i in middle),
        # 30 s and 40 s: clients 0 to 7 arrive together.
        *([*((i, 10) for i in fast), *((i, 5) for i in middle)] * 2),
        # 50 s: again; and clients 8 and 9: (60 − 50) / 5 = 2 steps.
        *((i, 10) for i in fast),
        *((i, 5) for i in middle),
        (8, 2),
        (9, 2),
        # 60 s: all ten arrive together. T_expected = 70, T_latest = 72; client 8 will need until 75.
        *((i, 10) for i in fast),
        *((i, 5) for i in middle),
        (8, 2),
        (9, 2),
        # 72 s: the group goes on without client 8. T_expected = 82, T_latest = 84.
        *((i, 10) for i in fast),
        *((i, 5) for i in middle),
        (9, 2),
        # 75 s: client 8, at 0.1 × 5 + 0.9 × 7.5 = 7.25 s a step: (82 − 75) / 7.25 < 1 step. It founds a group, with
        # (84 + 10 × 1 − 75) / 7.25 = 2.6 steps: T_expected = 75 + 2 × 7.25 = 89.5, T_latest = 92.4.
        (8, 2),
        # 82 s: the nine, and the late update of client 8. (89.5 − 82) / 1 = 7.5, / 2 = 3.75, / 5 = 1.5 steps: client
        # 9 founds a group, with (92.4 + 10 − 82) / 5 = 4.08 steps.
        *((i, 7) for i in fast),
        *((i, 3) for i in middle),
        (9, 4),
    ]
    # Ten aggregations of one client each, as speeds aren't known: of the fast at 10 s, the middle at 20 s, and 8 and
    # 9 at 50 s. The groups' are at 20, 30, 40, 50, 60, 72, 82 and 89.5 s.
    times, contributions = [], []

    def observe(progress: Any) -> None:
        times.append(progress.time)
        contributions.append(progress.metrics.get("contributions"))

    grid = federation([1.0] * 10, [1] * 10)
    strategy = FedCompass(
        observer=observe,
        fraction_evaluate=0.0,
        eval_every=1,
        time_scenario=f"trace:{path}",
        min_local_steps=2,
        max_local_steps=10,
    )
    strategy.start(
        grid,
        ArrayRecord({"w": Array(np.zeros(1, np.float32))}),
        num_rounds=18,
        timeout=5.0,
        train_config=ConfigRecord({"lr": 0.01}),
    )
    assert sent_steps(grid) == expected
    assert times[1:] == [*[10] * 5, 20, *[20] * 3, 30, 40, 50, 50, 50, 60, 72, 82, 89.5]
    assert contributions[1:] == [*[1] * 5, 5, *[1] * 3, 8, 8, 8, 1, 1, 10, 9, 10, 9]


def test_without_slack_all_who_come_at_the_latest_time_are_taken(federation):
    # Ten steps take .5 s and 1 s. At .5 s client 0 is aggregated alone, and founds a group with T_expected = T_latest
    # = 1; at 1 s it founds another, for 1.5, and client 1, alone until then, joins with 5 steps. From then on both
    # come at the same instant, the latest one.
    contributions, grid = [], federation([1.0, 2.0], [1, 1])
    strategy = FedCompass(
        observer=lambda progress: contributions.append(progress.metrics.get("contributions")),
        fraction_evaluate=0.0,
        eval_every=1,
        time_scenario="F50",
        min_local_steps=1,
        max_local_steps=10,
        group_slack=1.0,
    )
    start = ArrayRecord({"w": Array(np.zeros(1, np.float32))})
    strategy.start(grid, start, num_rounds=14, timeout=5.0, train_config=ConfigRecord({"lr": 0.01}))
    assert contributions[1:] == [1, 1, 1, *[2] * 11]
    assert sent_steps(grid) == [(0, 10), (1, 10), (0, 10), *[(0, 10), (1, 5)] * 11]


# ---- Exact limits --------------------------------------------------------------------------------------------------


def test_with_equal_speeds_it_goes_in_rounds_of_fedavg_bit_for_bit(go):
    # C aggregations of one client each, then the group of all, whose clients began with different models; from then
    # on all clients begin together.
    models, grid, _ = go(FedCompass, C + 1 + 6, time_scenario="F0")
    rounds, _, _ = go(FedAvg, 6, start=float(models[C + 1]), steps=20)
    assert models[C + 1 :].tolist() == rounds.tolist()
    assert {steps for _, steps in sent_steps(grid)} == {20}


def test_steps_that_take_longer_make_the_same_models_later(go):
    options = {"time_scenario": "F80", "max_local_steps": 20}
    models, grid, strategy = go(FedCompass, 60, **options)
    slower, other, later = go(FedCompass, 60, timed_local_steps=5, **options)
    assert models.tolist() == slower.tolist()
    assert sent_steps(grid) == sent_steps(other)
    assert later.session.scheduler.now() == pytest.approx(4 * strategy.session.scheduler.now())


def test_of_one_client_it_is_local_training_bit_for_bit(go, federation):
    one, _, _ = go(FedCompass, 8, grid=federation([4.0], [3]))
    other, _, _ = go(FedAvg, 8, grid=federation([4.0], [3]), steps=20)
    assert one.tolist() == other.tolist()


# ---- Clients that fail, come and go, and what is reported ----------------------------------------------------------


def test_steps_are_within_their_bounds_and_groups_arrive_together(go):
    _, grid, strategy = go(FedCompass, 120, time_scenario="F80", server_lr=0.1)
    steps = [each for _, each in sent_steps(grid)]
    assert min(steps) >= 4
    assert max(steps) == 20
    shares = strategy.session.client_columns()
    assert sum(shares["expected-share"]) == pytest.approx(1)
    assert shares["expected-share"] == pytest.approx(shares["observed-share"], abs=0.02)


def test_a_client_that_fails_is_dropped_and_no_group_waits_for_it(go, federation):
    grid = federation(CENTRES, SIZES)
    grid.spoil(3, "raise")
    models, _, strategy = go(FedCompass, 60, grid=grid, server_lr=0.5)
    assert strategy.session.task_table.members[3].dropped
    assert len(models) == 61
    assert np.isfinite(models).all()


@pytest.mark.parametrize(
    "options", [{"concurrency": 2}, {"task_failure": 0.3}, {"availability": "bernoulli:0.6"}]
)
def test_few_places_and_tasks_that_are_lost(go, options):
    models, grid, _ = go(FedCompass, 60, server_lr=0.3, **options)
    assert len(models) == 61
    assert set(grid.asked()) == set(range(C))
    assert models[-1] == pytest.approx(P @ CENTRES, abs=2.0)


@pytest.mark.parametrize("seed", range(3))
def test_with_few_places_a_run_goes_on_where_all_work_came_too_late_for_its_group(federation, model, seed):
    options = {"time_scenario": "exponential", "group_slack": 1.0, "concurrency": 2}
    result = FedCompass(seed=seed, **options).start(federation(), model(1.0), num_rounds=12)
    assert max(result.train_metrics_clientapp) == 12


def test_in_real_time_by_observed_speeds(go, federation):
    grid = federation(CENTRES, SIZES)
    for client in range(C):
        grid.node(client).delay = 0.01 * (client + 1)
    models, _, strategy = go(FedCompass, 15, grid=grid, clock=WallClock(), server_lr=0.3)
    assert len(models) == 16
    assert set(strategy.groups.speeds) == set(range(C))
    assert strategy.groups.speeds[4] > strategy.groups.speeds[0]


def test_how_long_a_run_is_follows_from_its_groups():
    # Equal speeds: C aggregations of one client at 1 s, then one of all in each second.
    assert FedCompass().predict_num_aggregations(np.ones(C), 40.0) == C + 39
    assert FedCompass(timed_local_steps=5).predict_num_aggregations(np.ones(C), 160.0) == C + 39


# ---- The groups by themselves --------------------------------------------------------------------------------------


def test_groups_saved_and_restored_go_on_alike():
    groups = ArrivalGroups(2, 10, 1.2)
    for client, due in enumerate((10.0, 20.0, 50.0)):
        groups.assign(client, 0.0)
        assert groups.arrive(client, due)
        groups.assign(client, due)
    again = ArrivalGroups(2, 10, 1.2)
    again.restore(groups.state())
    assert again.state() == groups.state()
    assert again.arrive(0, 20.0) == groups.arrive(0, 20.0)
    assert again.due(20.0) == groups.due(20.0)
