"""Runs whose rounds close early, beside a reference in float64 that tries every time at which a round may close."""

import logging
from itertools import permutations
from math import ceil
from typing import Any

import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import (
    Ditto,
    FedAMP,
    FedAvg,
    FedBuff,
    Mifa,
    Progress,
    RunError,
    streams,
)
from strategies.flower import messages
from tests.strategies.rounds import deadline_reference
from tests.strategies.rounds.deadline_reference import Draws, Made, as_trace

CENTRES, SIZES = (3.0, 2.0, -1.0, 0.5, 7.0), (1, 2, 5, 3, 4)
ROUNDS, LR = 5, 0.3


@pytest.fixture
def go(federation, model, train_config, tmp_path):
    """Run a strategy; return its reports, the models by round, and itself with its grid in ``.grid``."""

    def run(times: Any, *, kind: Any = FedAvg, spoilt: Any = (), rounds: int = ROUNDS, **options: Any) -> Any:
        clients = len(times)
        (tmp_path / "trace.csv").write_text(as_trace(times))
        grid = federation(CENTRES[:clients], SIZES[:clients])
        for client in spoilt:
            grid.spoil(client, "nan")
        reports: list[Progress] = []
        own = {
            "client_weights": "uniform",
            "fraction_evaluate": 0.0,
            "time_scenario": f"trace:{tmp_path}/trace.csv",
        }
        strategy = kind(observer=reports.append, **{**own, **options})
        strategy.grid = grid
        strategy.start(grid, model(0.1), num_rounds=rounds, timeout=5.0, train_config=train_config(2, LR))
        return reports[1:], [float(each.arrays["w"].numpy()[0]) for each in reports[1:]], strategy

    return run


def trained(client: int, w: float) -> float:
    for _ in range(2):
        w = w - LR * (w - CENTRES[client])
    return w


def all_of_them(free: list[int], number: int) -> dict[int, float]:
    return {client: 1 / len(free) for client in free}


def uniform(clients: int, needed: int, over: float) -> Draws:
    def draw(free: list[int], number: int) -> dict[int, float]:
        if not free:
            return {}
        asked = min(ceil((1 + over) * needed), len(free))
        places = streams.generator(0, "participants", number).choice(len(free), asked, replace=False)
        return {free[place]: 1 / len(free) * len(free) / asked for place in sorted(places.tolist())}

    return draw


def check(run: tuple[list[Progress], list[float], Any], expected: list[Made]) -> None:
    reports, models, _ = run
    assert [report.time for report in reports] == pytest.approx([made.time for made in expected], abs=1e-9)
    assert models == pytest.approx([made.model for made in expected], rel=1e-12)
    counts = [(report.metrics["participants"], report.metrics["late-updates"]) for report in reports]
    assert counts == [(len(made.counted), len(made.late)) for made in expected]


@pytest.mark.parametrize("deadline", [0.5, 1.0, 2.5, 9.0])
def test_every_order_of_three_clients_with_a_deadline(go, deadline, thorough):
    orders = list(permutations([1.0, 2.0, 3.5]))
    for order in orders if thorough else orders[::2]:
        times = [[one] for one in order]
        expected = deadline_reference.run(
            trained,
            lambda c, n, t=times: t[c][0],
            all_of_them,
            clients=3,
            rounds=ROUNDS,
            model=0.1,
            deadline=deadline,
        )
        if not any(made.counted for made in expected):
            assert deadline == 0.5
            with pytest.raises(
                RunError, match=r"no client's work was accepted .*not done when round 5 closed"
            ):
                go(times, round_deadline=deadline)
            continue
        check(go(times, round_deadline=deadline), expected)


@pytest.mark.parametrize(("needed", "over"), [(1, 1.0), (2, 0.5), (1, 2.0), (2, 1.0)])
def test_every_order_of_four_clients_of_which_the_first_count(go, needed, over, thorough):
    orders = sorted(set(permutations([1.0, 2.0, 3.5, 3.5])))
    for order in orders if thorough else orders[needed::3]:
        times = [[one] for one in order]
        expected = deadline_reference.run(
            trained,
            lambda c, n, t=times: t[c][0],
            uniform(4, needed, over),
            clients=4,
            rounds=ROUNDS,
            model=0.1,
            needed=needed,
        )
        own = {"participation": "uniform", "fraction_train": needed / 4, "over_select": over}
        check(go(times, **own), expected)


@pytest.mark.parametrize("needed", [1, 2, 3])
def test_all_clients_are_asked_and_the_round_goes_on_after_k_of_n(go, needed):
    for order in ([1.0, 2.0, 3.5, 3.5], [3.5, 1.0, 9.0, 2.0]):
        times = [[one] for one in order]
        expected = deadline_reference.run(
            trained,
            lambda c, n, t=times: t[c][0],
            all_of_them,
            clients=4,
            rounds=ROUNDS,
            model=0.1,
            needed=needed,
        )
        check(go(times, over_select=4 / needed - 1), expected)


def test_who_counts_of_k_of_n_and_who_is_late(go):
    # Of 4 clients the first 2 count: 0 and 1 in round 1, until 2 s. Clients 2 and 3 are at work until 5 s and 9 s.
    reports, _, strategy = go([[1.0], [2.0], [5.0], [9.0]], over_select=1.0, rounds=4)
    assert [report.time for report in reports] == [2.0, 4.0, 6.0, 8.0]
    assert [report.metrics["participants"] for report in reports] == [2, 2, 2, 2]
    assert [report.metrics["late-updates"] for report in reports] == [2, 0, 0, 1]
    client_stats = dict(strategy.session.client_stats.items())
    assert [client_stats[i].accepted for i in range(4)] == [4, 4, 0, 0]
    assert [client_stats[i].late for i in range(4)] == [0, 0, 2, 1]


@settings(max_examples=settings.default.max_examples // 3)
@given(
    times=st.lists(
        st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0]) | st.floats(0.2, 3), min_size=5, max_size=5),
        min_size=5,
        max_size=5,
    ),
    needed=st.sampled_from([1, 2, 3]),
    over=st.sampled_from([0.5, 1.0, 2.0]),
    deadline=st.sampled_from([0.0, 0.7, 1.2, 2.0]),
    failed=st.sets(st.integers(0, 4), max_size=2),
)
def test_any_times_of_five_clients_some_of_which_fail(go, times, needed, over, deadline, failed):
    expected = deadline_reference.run(
        trained,
        lambda c, n: times[c][(n - 1) % 5],
        uniform(5, needed, over),
        clients=5,
        rounds=ROUNDS,
        model=0.1,
        needed=needed,
        deadline=deadline,
        failed=sorted(failed),
    )
    own = {
        "participation": "uniform",
        "fraction_train": needed / 5,
        "over_select": over,
        "round_deadline": deadline,
    }
    if not any(made.counted for made in expected):
        with pytest.raises(RunError, match="no client"):
            go(times, spoilt=failed, **own)
        return
    check(go(times, spoilt=failed, **own), expected)


def test_who_is_certain_to_be_dropped_is_not_sent_anything(go):
    reports, _, strategy = go([[1.0], [2.0], [5.0]], round_deadline=3.0)
    # Client 2 is at work on the first round's task until 5 s, so that it is drawn in rounds 1 and 4 alone.
    assert [strategy.grid.asked(messages.TRAIN, number) for number in range(1, 6)] == [[0, 1]] * 5
    assert [report.time for report in reports] == [3.0, 5.0, 8.0, 10.0, 13.0]
    assert [report.metrics["late-updates"] for report in reports] == [1, 0, 1, 0, 1]
    assert [report.metrics["dropped-updates"] for report in reports] == [1, 0, 1, 0, 1]
    size = len(reports[0].arrays["w"].data)
    assert [report.metrics["bytes-down"] for report in reports] == [size * n for n in (3, 2, 3, 2, 3)]
    assert [report.metrics["bytes-wasted"] for report in reports] == [size, 0, size, 0, size]
    client_stats = dict(strategy.session.client_stats.items())
    assert (client_stats[2].tasks, client_stats[2].late, client_stats[2].accepted) == (3, 3, 0)
    spans = [(span.began, span.ended) for span in strategy.session.timeline.take() if span.outcome == "late"]
    assert spans == [(0.0, 5.0), (5.0, 10.0), (10.0, 15.0)]


class Repeatable(FedAvg):
    """Its noise comes from the seed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.run_options.deterministic_noise = True


NEVER_LATE: list[dict[str, Any]] = [
    {},
    {"client_weights": "samples"},
    {"participation": "md", "fraction_train": 0.6},
    {"participation": "uniform", "fraction_train": 0.6},
    {"participation": "flower", "fraction_train": 0.6},
    {"participation": "fixed:1,3"},
    {"server_optimizer": "adam", "server_lr": 0.1},
    {"aggregation_rule": "median", "faulty_clients": 1},
    {"dp": "central", "dp_noise_multiplier": 0.1},
]


@pytest.mark.parametrize("options", NEVER_LATE)
def test_a_deadline_that_all_keep_changes_no_bit(go, options):
    times = [[1.0, 2.0], [2.0], [0.7], [1.1], [1.5]]
    before = go(times, kind=Repeatable, **options)
    after = go(times, kind=Repeatable, round_deadline=50.0, **options)
    assert before[1] == after[1]
    assert [report.time for report in before[0]] == [report.time for report in after[0]]
    assert [dict(r.arrays)["w"].data for r in before[0]] == [dict(r.arrays)["w"].data for r in after[0]]
    assert [r.metrics["bytes-down"] for r in before[0]] == [r.metrics["bytes-down"] for r in after[0]]


def test_work_that_is_dropped_is_done_where_clients_keep_something(go):
    reports, _, strategy = go([[1.0], [2.0], [5.0]], kind=Ditto, round_deadline=3.0, rounds=2)
    assert strategy.grid.asked(messages.TRAIN, 1) == [0, 1, 2]
    assert [report.metrics["participants"] for report in reports] == [2, 2]
    size = len(reports[0].arrays["w"].data)
    assert [report.metrics["bytes-up"] for report in reports] == [2 * size, 2 * size]
    assert dict(strategy.session.client_stats.items())[2].late == 1


def test_nobody_trains_dropped_work_where_the_server_keeps_the_models(go):
    _, _, strategy = go([[1.0], [2.0], [5.0]], kind=FedAMP, round_deadline=3.0, rounds=2)
    assert strategy.grid.asked(messages.TRAIN, 1) == [0, 1]


def test_a_round_waits_for_those_alone_that_may_be_drawn(go, tmp_path):
    # Client 0 is always there, and never drawn. A round begins at 3.5, when client 1 comes, who is done at 4.5.
    path = tmp_path / "there.csv"
    path.write_text("client,start,end,period\n0,0,10,10\n1,3.5,4.6,10\n2,6,8,10\n")
    options = {"participation": "fixed:1,2", "round_deadline": 1.0, "availability": f"trace:{path}"}
    _, _, strategy = go([[1.0]] * 3, rounds=80, **options)
    shares = strategy.session.client_columns()
    assert "expected-share" not in shares
    assert shares["observed-share"] == pytest.approx([0.0, 1 / 3, 2 / 3], abs=0.03)
    go([[1.0]] * 3, kind=Mifa, rounds=6, **options)  # nobody is waited for in vain


def test_a_late_task_is_late_also_if_it_is_lost_afterwards(go, tmp_path):
    path = tmp_path / "there.csv"
    path.write_text("client,start,end\n0,0,99\n1,0,99\n2,0,2\n")
    options = {"round_deadline": 1.5, "availability": f"trace:{path}"}
    reports, _, strategy = go([[1.0], [1.0], [3.0]], rounds=4, **options)
    first = reports[0].metrics
    assert (first.get("lost-tasks", 0), first["failures"], first["late-updates"]) == (0, 0, 1)
    account = dict(strategy.session.client_stats.items())[2]
    assert (account.late, account.lost) == (1, 0)
    for name in ("lost-tasks", "failures"):
        assert sum(report.metrics.get(name, 0) for report in reports) == 0
    assert sum(report.metrics["dropped-updates"] for report in reports) == 1
    sent = len(reports[0].arrays["w"].data)
    assert sum(report.metrics["bytes-wasted"] for report in reports) == sent


def test_shares_are_observed_where_everybody_is_soon_away_for_good(go, tmp_path, caplog):
    path = tmp_path / "there.csv"
    path.write_text("client,start,end\n0,0,5\n1,0,5\n2,0,5\n")
    options = {"round_deadline": 1.5, "availability": f"trace:{path}"}
    reports, _, strategy = go([[1.0], [1.0], [3.0]], rounds=9, **options)
    assert [report.time for report in reports] == [1.5, 2.5, 3.5, 5.0]  # then nobody is there
    weights = [account.weight for _, account in sorted(strategy.session.client_stats.items())]
    assert weights[0] == weights[1] > weights[2] == 0.0
    assert "their distance is 0.333" in caplog.text


# ---- What is minimised ------------------------------------------------------------------------------------------


def test_shares_of_rounds_that_close_early_are_observed_and_not_foretold(go, caplog):
    times = [[1.0], [2.0], [5.0], [1.5]]  # client 3 is in time in each round, and client 2 never
    with caplog.at_level(logging.WARNING):
        reports, _, strategy = go(times, round_deadline=3.0)
    shares = strategy.session.client_columns()
    assert "expected-share" not in shares
    assert "weights-distance" not in reports[-1].metrics
    assert shares["observed-share"] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    said = "this run counted its clients by Σ q_i f_i, not the federated Σ p_i f_i: their distance is 0.250"
    assert caplog.text.count(said) == 1


def test_rounds_end_within_the_time_budget(go):
    reports, _, _ = go([[1.0], [2.0], [5.0]], round_deadline=3.0, time_budget=9.0)
    assert [report.time for report in reports if report.aggregation][:3] == [3.0, 5.0, 8.0]
    assert reports[-1].time == 8.0


def test_a_replacement_past_the_time_budget_ends_the_run(go):
    own = {"participation": "uniform", "fraction_train": 0.5, "over_select": 1.0, "time_budget": 6.0}
    reports, _, strategy = go([[1.0], [2.0], [3.0], [4.0]], spoilt=[0], **own)
    # Rounds need clients 1 and 2, and 1 and 2 again; the third would need until 9 s, as client 3 is late.
    assert strategy.session.aggregations == 2
    assert reports[-1].time == 6.0


# ---- Loops around it ----------------------------------------------------------------------------------------------


def by_flowers_loop(strategy: Any, grid: Any, arrays: ArrayRecord, config: Any) -> ArrayRecord:
    """Run rounds as Flower's own ``Strategy.start`` does: it waits for all replies."""
    for number in (1, 2, 3):
        requests = list(strategy.configure_train(number, arrays, config, grid))
        arrays = strategy.aggregate_train(number, list(grid.send_and_receive(requests)))[0] or arrays
    return arrays


@pytest.mark.parametrize("given", [{"round_deadline": 0.7}, {"participation": "uniform", "over_select": 3.0}])
def test_a_loop_around_it_waits_for_all_replies(given, federation, model, train_config):
    with pytest.raises(
        RunError, match=r"waits for all replies of a round before any counts; call the strategy's own start"
    ):
        by_flowers_loop(FedAvg(**given), federation(), model(0.1), train_config(2, LR))


def test_rounds_have_deadlines_and_asynchronous_methods_none():
    with pytest.raises(TypeError, match="round_deadline"):
        FedBuff(round_deadline=1.0)
