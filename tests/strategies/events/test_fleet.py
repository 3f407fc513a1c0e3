"""Devices with profiles that come and go: schedules by an independent simulation, losses, and what is minimised."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from strategies import ACE, AsyncFedAvg, FedAvg, FedBuff, FedFix, RunError
from strategies.clients.client_statistics import LOST
from strategies.clock import WallClock
from strategies.flower import messages
from tests.selection import only
from tests.strategies.events.fleet_reference import Reference
from tests.strategies.events.runs import (
    CENTRES,
    KINDS,
    SIZES,
    Event,
    P,
    Record,
    bits,
    replay,
    text_of,
)

pytestmark = pytest.mark.timeout(600)

# Speeds in examples a second and links, so that clients of 1, 2, 3 and 4 examples take about a second; the model is
# one float64 with its header, BYTES long.
SPEEDS, LINKS, LATENCY = (1.7, 4.1, 3.3, 12.9), ((8e3, 4e3), (9e4, 8e4), (3e3, 2e3), (8e3, 8e3)), 0.037
PERIOD = 7.3
STRETCHES = [[(0.0, 4.41), (6.03, PERIOD)], [(1.13, 2.9), (3.77, 6.61)], [(0.0, PERIOD)], [(2.21, 5.17)]]


@pytest.fixture
def fleet(tmp_path, model):
    """Return the options of a fleet of four, from files."""
    rows = (
        f"{i},{s},{down},{up},{LATENCY}" for i, (s, (down, up)) in enumerate(zip(SPEEDS, LINKS, strict=True))
    )
    (tmp_path / "devices.csv").write_text("\n".join(rows))
    stays = (f"{i},{a},{b},{PERIOD}" for i, own in enumerate(STRETCHES) for a, b in own)
    (tmp_path / "there.csv").write_text("client,start,end,period\n" + "\n".join(stays))
    return {
        "time_scenario": f"profile:{tmp_path / 'devices.csv'}",
        "availability": f"trace:{tmp_path / 'there.csv'}",
    }


def seconds(arrays: ArrayRecord) -> list[float]:
    size = sum(len(array.data) for array in arrays.values())
    return [
        n / speed + 8 * size / down + 8 * size / up + LATENCY
        for n, speed, (down, up) in zip(SIZES, SPEEDS, LINKS, strict=True)
    ]


def events_of(run: Record) -> list[Event]:
    """Return time and staleness of the contributions: what is sent is done, in turn; what is lost isn't sent."""
    versions: dict[int, list[int]] = {}
    for request in run.grid.requests():
        config = request.content.config_records["config"]
        versions.setdefault(config[messages.CLIENT], []).append(config["server-round"] - 1)
    events, before = [], [0.0] * len(versions)
    for p in run.seen[1:]:
        after = p.clients["participation"]
        came = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
        events.append((p.time, {i: p.aggregation - 1 - versions[i][int(before[i])] for i in came}))
        assert p.metrics["staleness-max"] == max(events[-1][1].values())
        before = after
    return events


def reference(arrays: ArrayRecord, scheme: str, number: int, **options: Any) -> Reference:
    found = Reference(seconds(arrays), STRETCHES, PERIOD)
    found.run(scheme, number, **options)
    return found


# ---- Schedules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "number"), [("async", 60), ("fedbuff", 30), ("fedfix", 40)])
def test_a_run_is_the_independent_simulations(federation, start, model, fleet, scheme, number):
    expected = reference(model(1.0), scheme, number)
    run = start(scheme, federation(CENTRES, SIZES), number, lr=0.05, **fleet)
    assert [came for _, came in events_of(run)] == [came for _, came in expected.aggregations]
    assert [t for t, _ in events_of(run)] == pytest.approx([t for t, _ in expected.aggregations], rel=1e-9)
    weights = run.seen[-1].clients["weight"]
    assert run.values == pytest.approx(replay(expected.aggregations, weights, 0.05), rel=1e-9)
    assert len({tuple(came) for _, came in expected.aggregations}) > 3
    # What is lost is told, never worked on, and no miss of the client's.
    until = expected.aggregations[-1][0]
    lost = [who for t, who in expected.lost if t <= until + 1e-9]
    assert len(lost) > 3
    told = run.seen[-1].clients
    assert sum(m or 0 for m in run.metric("lost-tasks")) == sum(run.metric("failures")) == len(lost)
    client_stats = run.strategy.session.client_stats
    assert [client_stats[i].lost for i in range(4)] == [lost.count(i) for i in range(4)]
    assert told["importance"] == pytest.approx(P.tolist())
    spans = [s for s in run.strategy.session.timeline.take() if s.outcome == LOST]
    assert [(s.client, s.ended) for s in spans] == [
        (who, pytest.approx(t)) for t, who in expected.lost if t <= until + 1e-9
    ]
    tasks = {
        (
            m.content.config_records["config"][messages.CLIENT],
            m.content.config_records["config"][messages.TASK],
        )
        for m in run.grid.requests()
    }
    assert len(tasks) == len(run.grid.requests())
    handed_out = sum(member.tasks for member in run.strategy.session.task_table.members.values())
    under_way = [t for t in run.strategy.session.task_table.tasks.values() if t.dropped_out]
    assert len(tasks) == handed_out - len(lost) - len(under_way)


def test_a_task_that_ends_as_its_client_goes_is_done(federation, start, there):
    # F0: 1 s each. Client 0 is there for 2 s of 5: two tasks; client 1 for 1.5 s: one, and one that is lost at 1.5 s.
    run = start("async", federation([4.0, 0.0], [1, 1]), 6, **there("0,0,2,5\n1,0,1.5,5\n"))
    came = [(t, list(who)) for t, who in events_of(run)]
    assert came == [(1, [0]), (1, [1]), (2, [0]), (6, [0]), (6, [1]), (7, [0])]
    assert [run.strategy.session.client_stats[i].lost for i in (0, 1)] == [0, 2]


def test_lost_tasks_are_said_once(federation, start, fleet, caplog):
    start("async", federation(CENTRES, SIZES), 30, lr=0.05, **fleet)
    assert text_of(caplog).count("clients go away while they work") == 1
    assert "is dropped" not in text_of(caplog)


def test_a_round_takes_whom_it_finds_and_waits_for_the_slowest_or_until_it_goes(
    federation, start, model, fleet
):
    run = start("fedavg", federation(CENTRES, SIZES), 12, lr=0.1, server_lr=1.0, **fleet)
    took, look = seconds(model(1.0)), Reference([], STRETCHES, PERIOD)
    now, value = 0.0, 1.0
    for progress in run.seen[1:]:
        there = {i: stays for i in range(4) if (stays := look.end_of_stay(i, now)) is not None}
        assert there  # client 2 always is
        done = [i for i, stays in there.items() if now + took[i] <= stays + 1e-9]
        now += max(min(took[i], stays - now) for i, stays in there.items())
        weights = P[done] / P[done].sum() if done else []
        value += sum(w * 0.1 * (CENTRES[i] - value) for i, w in zip(done, weights, strict=True))
        assert progress.time == pytest.approx(now)
        assert progress.metrics["participants"] == len(done)
        assert progress.metrics.get("lost-tasks", 0) == progress.metrics["failures"] == len(there) - len(done)
        assert float(progress.arrays["w"].numpy()[0]) == pytest.approx(value, rel=1e-9)
    assert sum(p.metrics.get("lost-tasks", 0) for p in run.seen[1:]) >= 3
    assert len(run.grid.requests()) == sum(p.metrics["participants"] for p in run.seen[1:])


def test_a_round_waits_until_somebody_comes(federation, start, there):
    run = start("fedavg", federation([4.0, 0.0], [1, 1]), 4, **there("0,3,5,10\n1,4,6,10\n"))
    assert [p.time for p in run.seen] == [0.0, 4.0, 5.0, 6.0, 14.0]
    assert run.grid.asked() == [0, 0, 1, 1, 0]


# ---- What ends a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fedavg", *KINDS])
def test_when_all_have_gone_for_good_the_run_ends_with_what_it_has(federation, start, there, caplog, scheme):
    run = start(
        scheme, federation([4.0, 0.0, 1.0], [1, 1, 1]), 50, lr=0.1, **there("0,0,3.5\n1,0,2.5\n2,1,4.2\n")
    )
    assert 2 <= run.seen[-1].aggregation < 12
    assert "the run ends" in text_of(caplog)


@pytest.mark.parametrize("scheme", KINDS)
def test_clients_that_never_stay_for_a_task_end_the_run_with_a_reason(federation, start, there, scheme):
    with pytest.raises(RunError, match="no client is there for as long as its task takes"):
        start(
            scheme,
            federation([4.0, 0.0, 1.0], [1, 1, 1]),
            5,
            limit=240,
            **there("0,0,0.5,1\n1,0.5,1,1\n2,0,0.3,1\n"),
        )


def test_rounds_whose_clients_never_stay_for_a_task_end_with_that_reason(federation, start, there):
    with pytest.raises(RunError, match=r"the last reason was 'it went away before its task was done'$"):
        start("fedavg", federation([4.0, 0.0], [1, 1]), 3, **there("0,0,0.5,1\n1,0,0.3,1\n"))


@pytest.mark.parametrize("scheme", KINDS)
def test_nor_does_a_client_that_always_fails_keep_such_a_run_going(federation, start, there, scheme):
    # It is dropped, and asked again for ever.
    grid = federation([4.0, 0.0], [1, 1])
    grid.spoil(0, "raise")
    with pytest.raises(RunError, match="no client is there for as long as its task takes"):
        start(scheme, grid, 5, limit=5.0, **there("0,0,1,1\n1,0,0.5,1\n"))


def test_a_buffer_that_is_never_full_ends_a_run_with_who_waits(federation, start, there):
    with pytest.raises(RunError, match="no client but those whose contributions wait is there for as"):
        start("fedbuff", federation([4.0, 0.0], [1, 1]), 5, buffer_size=2, **there("0,0,1,1\n1,0,0.5,1\n"))


@pytest.mark.parametrize("scheme", ["fedavg", *KINDS])
def test_a_time_budget_ends_a_run_before_somebody_comes(federation, start, there, scheme):
    run = start(
        scheme,
        federation([4.0, 0.0, 1.0], [1, 1, 1]),
        50,
        lr=0.1,
        time_budget=20.0,
        **there("0,0,2,50\n1,0,2,50\n2,0,2,50\n"),
    )
    assert run.seen[-1].time <= 2.0


def test_a_run_that_is_over_before_its_first_model_says_so(federation, model, train_config, caplog):
    # F80: tasks of 0.2, 0.6 and 1 s. ACE waits for all three.
    made = {}
    for budget in (0.9, 1.1):
        caplog.clear()
        strategy = ACE(time_budget=budget, fraction_evaluate=0.0)
        grid = federation([4.0, 0.0, 1.0], [1, 1, 1])
        strategy.start(grid, model(1.0), num_rounds=9, train_config=train_config(1, 0.01))
        made[budget] = strategy.session.aggregations
        assert "no model is made until all 3 clients that count have answered once" in text_of(caplog)
        said = "the run is over, at 0.6 s, before its first model was made: 2 contributions wait for it"
        assert (said in text_of(caplog)) == (budget < 1)
    assert made[0.9] == 0 < made[1.1]


def test_ace_waits_for_nobody_who_never_answers(federation, model, train_config, there):
    # Tasks take a second. Client 0 is there for less; or its first answer can't be read, and then it goes for good.
    for stay, first in ((0.1, 1.0), (1.5, 1.5)):
        seen: list[Any] = []
        grid = federation([4.0, 0.0, 1.0], [1, 1, 1])
        grid.spoil(0, "nan")
        strategy = ACE(**there(f"0,0,{stay}\n1,0,99\n2,0,99\n"), fraction_evaluate=0.0, observer=seen.append)
        strategy.start(grid, model(1.0), num_rounds=3, train_config=train_config(1, 0.1))
        assert [p.time for p in seen[1:]] == [first, first + 1, first + 1]


def test_why_a_run_ends_whose_work_waits_in_vain_is_said(federation, model, train_config, there, caplog):
    rows = there("0,0,99\n1,0,0.5\n2,0,0.5\n")
    held_replies = {"safeguards": "on", "time_budget": 0.9}  # F80: .2, .6 and 1 s
    for strategy, texts in (
        (
            FedBuff(buffer_size=2, **rows),
            ["nobody else comes any more, from 99 s on: the run ends", "1 contributions wait for it"],
        ),
        (
            AsyncFedAvg(**held_replies),
            ["at 0.6 s, before its first model was made: 2 contributions wait for it"],
        ),
    ):
        strategy.start(
            federation([4.0, 0.0, 1.0], [1, 1, 1]),
            model(1.0),
            num_rounds=9,
            train_config=train_config(1, 0.1),
        )
        assert strategy.session.aggregations == 0
        assert not [text for text in texts if text not in text_of(caplog)]


# ---- Failure within a task ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["fedavg", *KINDS])
def test_so_many_tasks_fail_at_times_spread_over_them(federation, start, scheme):
    run = start(
        scheme,
        federation([4.0, 0.0, 1.0], [1, 1, 1], messages=False),
        150,
        lr=0.05,
        time_scenario="F0",
        task_failure=0.3,
        eval_every=150,
    )
    client_stats = [run.strategy.session.client_stats[i] for i in range(3)]
    ended, lost = sum(a.accepted + a.lost for a in client_stats), sum(a.lost for a in client_stats)
    assert lost / ended == pytest.approx(0.3, abs=4 * (0.21 / ended) ** 0.5)
    spans = [s for s in run.strategy.session.timeline.take() if s.outcome == LOST]
    parts = np.array([s.ended - s.began for s in spans])
    assert parts.mean() == pytest.approx(0.5, abs=4 * (1 / 12 / len(parts)) ** 0.5)
    assert 0 < parts.min() < parts.max() < 1


# ---- What is minimised --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", only([*KINDS], 1))
def test_by_the_law_weights_are_unbiased_and_what_is_observed_comes_near_that(
    federation, start, fleet, scheme
):
    options: dict[str, Any] = {**fleet, "eval_every": 600, "arrival_weight_bound": 0.0}
    grids = [federation([0.0] * 4, SIZES, messages=False) for _ in range(2)]
    law = start(scheme, grids[0], 600, lr=0.001, limit=240, **options)
    last = law.seen[-1].clients
    assert last["expected-share"] == pytest.approx(P.tolist(), rel=1e-9)
    assert last["observed-share"] == pytest.approx(P.tolist(), rel=0.08)
    observed = start(
        scheme,
        grids[1],
        600,
        lr=0.001,
        limit=240,
        aggregation_weights="observed",
        **options,
    )
    assert observed.strategy.observes_periods
    assert not law.strategy.observes_periods
    # An interval in which nothing came is no aggregation: but for that factor.
    weights = [np.array(told["weight"]) for told in (observed.seen[-1].clients, last)]
    assert weights[0] / weights[0].sum() == pytest.approx(weights[1] / weights[1].sum(), rel=0.12)


def test_tasks_that_last_many_slots_are_weighed_by_how_often_they_come(federation, start, tmp_path):
    (tmp_path / "devices.csv").write_text(
        "0,100,1e12,1e12,0\n1,100,1e12,1e12,0\n"
    )  # tasks of 200 s and 400 s
    run = start(
        "async",
        federation([1.0, -1.0], [20000, 40000], messages=False),
        300,
        lr=0.001,
        client_weights="uniform",
        eval_every=300,
        time_scenario=f"profile:{tmp_path / 'devices.csv'}",
        availability="bernoulli:0.5,1",
    )
    last = run.seen[-1].clients
    assert last["expected-share"] == pytest.approx([0.5, 0.5], rel=1e-9)
    assert last["observed-share"] == pytest.approx([0.5, 0.5], rel=0.02)


def test_with_the_same_weight_for_all_who_is_seldom_there_counts_less_and_that_is_told(
    federation, start, fleet, caplog
):
    run = start(
        "async",
        federation([0.0] * 4, SIZES, messages=False),
        500,
        lr=0.001,
        limit=240,
        aggregation_weights="identical",
        eval_every=500,
        **fleet,
    )
    last = run.seen[-1]
    assert last.clients["expected-share"] == pytest.approx(last.clients["observed-share"], rel=0.05)
    assert last.metrics["weights-distance"] > 0.1
    assert "this run minimised Σ q_i f_i" in text_of(caplog)


def test_who_is_never_there_for_a_task_weighs_nothing_and_that_is_told(federation, start, there):
    run = start(
        "async",
        federation([4.0, 0.0, 1.0], [1, 1, 2]),
        30,
        lr=0.01,
        **there("0,0,5,5\n1,0,2.5,5\n2,0,0.5,5\n"),
    )
    last = run.seen[-1].clients
    assert last["weight"][2] == last["expected-share"][2] == 0.0
    assert last["expected-share"][:2] == pytest.approx([0.5, 0.5])
    assert run.metric("weights-distance")[-1] == pytest.approx(0.5)


def test_rounds_tell_the_share_that_clients_have_over_a_period(federation, start, there):
    run = start(
        "fedavg",
        federation([4.0, 0.0], [1, 3]),
        200,
        lr=0.01,
        eval_every=200,
        **there("0,0,100,100\n1,0,50,100\n"),
    )
    last = run.seen[-1].clients
    # Half of the time 1/4 and 3/4, half of it client 0 alone.
    assert last["expected-share"] == pytest.approx([0.625, 0.375], rel=0.03)
    assert last["observed-share"] == pytest.approx([0.625, 0.375], rel=1e-9)


# ---- Many, and who is drawn ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_forecasts")
@pytest.mark.parametrize("devices", [20, pytest.param(1000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("scheme", ["fedavg", "async", "fedbuff"])
def test_many_devices_come_to_the_same_bits_twice(federation, start, scheme, devices):
    centres = np.linspace(-3, 3, devices).tolist()
    options: dict[str, Any] = {
        "time_scenario": "lognormal:0.8,2",
        "availability": "diurnal:0.3,40",
        "seed": 5,
        "lr": 0.01,
        "limit": 240,
        "eval_every": 1000,
        "task_failure": 0.05,
    } | (
        {"concurrency": devices // 5, "aggregation_weights": "identical"}
        if scheme != "fedavg"
        else {"participation": "uniform", "fraction_train": 0.2}
    )
    number = 12 if scheme == "fedavg" else 60
    sizes = [3] * devices
    runs = [start(scheme, federation(centres, sizes, seed=seed), number, **options) for seed in (0, 1)]
    assert bits(runs[0]) == bits(runs[1])
    assert [p.time for p in runs[0].seen] == [p.time for p in runs[1].seen]
    assert runs[0].seen[-1].time > 1
    assert sum(p.metrics.get("lost-tasks", 0) for p in runs[0].seen) > 3
    other = start(scheme, federation(centres, sizes), number, **options | {"seed": 6})
    assert bits(other) != bits(runs[0])


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedBuff, FedFix])
def test_the_list_of_the_free_is_who_is_free_at_every_draw(federation, model, train_config, kind):
    draws = []

    class Watched(kind):  # type: ignore[misc]
        def select_idle(self, free: Any) -> Any:
            there = [
                m
                for m in self.session.task_table.members.values()
                if m.is_available and not self.session.task_table.busy(m)
            ]
            free = [m for m in there if m.again or not m.dropped]
            expected = sorted(m.client.index for m in free if self.trains_while_waiting or not m.waiting)
            assert self.session.task_table.free == expected
            there = {
                i
                for i in self.session.task_table.members
                if self.session.scheduler.is_available(self.session.task_table.members[i].client)
            }
            assert set(expected) <= there
            chosen = list(super().select_idle(free))
            draws.append(len(chosen))
            at_work = len(self.session.task_table.tasks) + len(chosen)
            assert at_work <= 3
            assert at_work == 3 or len(chosen) == len(expected)
            return chosen

    grid = federation([0.0] * 8, [1, 2, 3, 4, 5, 6, 7, 8])
    grid.spoil(7, "raise")
    strategy = Watched(
        time_scenario="lognormal:0.5,10",
        availability="diurnal:0.6,4",
        task_failure=0.1,
        concurrency=3,
        **({"buffer_size": 3} if kind is FedBuff else {}),
    )
    strategy.start(grid, model(1.0), num_rounds=60, timeout=10.0, train_config=train_config(1, 0.01))
    assert strategy.session.aggregations == 60
    assert sum(draws) > 60
    assert strategy.session.task_table.members[7].tasks > 3  # it was dropped, and is asked again
    assert strategy.session.task_table.dispatched == sum(
        m.tasks for m in strategy.session.task_table.members.values()
    )


# ---- What is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"availability": "sometimes"}, "availability = 'sometimes': must be always, "),
        (
            {"availability": "diurnal:0.5", "participation": "paired"},
            "participation = 'paired' with availability = 'diurnal:0.5': the scheme says",
        ),
        ({"time_scenario": "zipf:1"}, "time_scenario = 'zipf:1': S of zipf must be above 1"),
    ],
)
def test_what_cant_be_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        FedAvg(**options)


def test_a_loop_around_the_strategy_in_which_no_time_passes_is_refused(federation, model):
    strategy = FedAvg(availability="diurnal:0.5", fraction_evaluate=0.0)
    with pytest.raises(
        RunError, match=r"availability = 'diurnal:0\.5', task_failure = 0: virtual time doesn't pass"
    ):
        strategy.configure_train(1, model(1.0), {}, federation())


def test_in_real_time_nobody_goes_away_by_a_law(federation, start):
    run = start(
        "async", federation(), 6, clock=WallClock(), availability="bernoulli:0.01,1000", task_failure=0.9
    )
    assert run.seen[-1].aggregation == 6


def test_an_app_that_tells_no_sizes_has_no_task_times(federation, model, train_config):
    strategy = FedAvg(time_scenario="lognormal:1", fraction_evaluate=0.0)
    with pytest.raises(RunError, match="doesn't say how many examples it has"):
        strategy.start(
            federation(describes=False),
            model(1.0),
            num_rounds=2,
            timeout=5.0,
            train_config=train_config(1, 0.1),
        )


# ---- Rounds that close early, of those that are there -------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "key", "value"),
    [
        ("uniform", "over_select", 0.5),
        ("md", "round_deadline", 0.8),
        pytest.param("md", "over_select", 0.5, marks=pytest.mark.thorough),
        pytest.param("uniform", "round_deadline", 0.8, marks=pytest.mark.thorough),
    ],
)
def test_a_share_of_those_that_are_there_is_asked_where_rounds_close_early(
    federation, model, train_config, scheme, key, value
):
    told, options = [], {key: value}

    clients, fraction = 60, 0.2
    strategy = FedAvg(
        participation=scheme,
        fraction_train=fraction,
        time_scenario="lognormal:0.3,10",
        seed=5,
        availability="diurnal:0.5,6,0.1",
        fraction_evaluate=0.0,
        client_weights="uniform",
        **options,
    )
    collect = strategy.session.collector.collect

    def noted(current: Any, *arguments: Any) -> Any:
        there = sum(strategy.session.scheduler.is_available(client) for client in strategy.session.clients)
        selection = strategy.session.selection
        needed, _ = selection.replies_needed([1.0])
        told.append((there, selection.number_to_draw(), needed, len(current.clients)))
        return collect(current, *arguments)

    strategy.session.collector.collect = noted
    strategy.start(
        federation([0.0] * clients, [2] * clients),
        model(1.0),
        num_rounds=25,
        timeout=10.0,
        train_config=train_config(1, 0.01),
    )
    assert len({there for there, *_ in told}) > 10
    assert min(there for there, *_ in told) < 12
    for there, drawn, needed, asked in told:
        wanted = max(1, round(fraction * there))
        over = options.get("over_select", 0.0)
        assert drawn == int(np.ceil((1 + over) * wanted - 1e-9))
        assert needed == (wanted if over else np.inf)
        assert asked <= drawn
