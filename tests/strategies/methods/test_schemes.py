"""When each asynchronous scheme aggregates and with which weights, without a loop."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import AsyncFedAvg, FedBuff, FedFix, Progress, RunError, VirtualClock, WallClock
from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.methods import async_fedavg, fedfix
from strategies.methods.shared.buffer_schedule import BufferSchedule, counts_of
from strategies.timing.scheduler import TaskEnd
from strategies.timing.virtual_scheduler import make_scheduler

# ---- Periods P_i: aggregations from one contribution of a client to its next -------------------------------


def test_async_fedavg_counts_everyones_arrivals_by_hand():
    # Σ 1/τ = 1/.5 + 1/1 + 1/2 = 3.5: P = 3.5 τ = (1.75, 3.5, 7). In 2 s there are 4 + 2 + 1 = 7 arrivals.
    assert async_fedavg.contribution_periods(np.array([0.5, 1.0, 2.0])).tolist() == [1.75, 3.5, 7.0]
    assert async_fedavg.contribution_periods(np.array([0.3])).tolist() == [
        1.0
    ]  # exactly: the limit of local SGD


def test_fedfix_counts_intervals_by_hand():
    # ⌈.2/.5⌉, ⌈.5/.5⌉, ⌈.51/.5⌉, ⌈1/.5⌉, ⌈1.2/.5⌉
    times = np.array([0.2, 0.5, 0.51, 1.0, 1.2])
    assert fedfix.contribution_periods(times, 0.5).tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_whole_ratio_is_not_rounded_up():
    assert 0.6 / 0.2 < 3 < (0.1 + 0.2) / 0.1  # 2.9999999999999996 and 3.0000000000000004: the trap
    assert fedfix.contribution_periods(np.array([0.6]), 0.2).tolist() == [3.0]
    assert fedfix.contribution_periods(np.array([0.1 + 0.2]), 0.1).tolist() == [3.0]
    assert fedfix.contribution_periods(np.array([0.6 * (1 + 5e-10)]), 0.2).tolist() == [
        3.0
    ]  # within a relative 1e-9
    assert fedfix.contribution_periods(np.array([0.6 * (1 + 2e-9)]), 0.2).tolist() == [4.0]  # and no further
    assert fedfix.contribution_periods(np.array([1e-12]), 0.5).tolist() == [1.0]  # never none


@given(interval=st.floats(1e-3, 1e3), whole=st.integers(1, 10_000), part=st.floats(0.001, 0.999))
def test_fedfix_periods_of_any_ratio(interval, whole, part):
    assert fedfix.contribution_periods(
        np.array([whole * interval, (whole + part) * interval]), interval
    ).tolist() == [
        whole,
        whole + 1,
    ]


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20).map(np.array))
def test_async_periods_share_out_every_arrival(times):
    periods = async_fedavg.contribution_periods(times)
    assert (1 / periods).sum() == pytest.approx(1)  # every aggregation is by one client
    np.testing.assert_allclose(periods, times * (1 / times).sum(), rtol=1e-12)  # eq. 36


# ---- FedBuff's schedule ------------------------------------------------------------------------------------


def participation_counts(task_time, clients, buffer_size, number):
    """Return how often each client contributes; all are always there, and task k of i takes task_time(i, k)."""

    def outlook(client, task, when):
        return TaskEnd(when + task_time(client, task), lost=False)

    return counts_of(outlook, lambda client, when: when, clients, buffer_size, number)[0]


def test_participation_counts_by_hand():
    # C = 3, τ = (1, 2, 3), m = 2. "0@1": client 0 arrives at 1.
    #   0@1 1@2        → aggregation 1 at 2, 0 and 1 again: due 3 and 4
    #   2@3 comes with 0@3, in client order 0, 2 → 2 at 3: due 0@4, 2@6
    #   0@4 1@4        → 3 at 4: due 0@5, 1@6
    #   0@5 1@6        → 4 at 6 (1@6 before 2@6): due 0@7, 1@8
    #   2@6 0@7        → 5 at 7: due 0@8, 2@10
    #   0@8 1@8        → 6 at 8: due 0@9, 1@10
    taus = [1.0, 2.0, 3.0]
    expected = [[0, 0, 0], [1, 1, 0], [2, 1, 1], [3, 2, 1], [4, 3, 1], [5, 3, 2], [6, 4, 2]]
    for number, counts in enumerate(expected):
        assert participation_counts(lambda i, _: taus[i], 3, 2, number).tolist() == counts


def test_participation_counts_take_the_time_of_each_task():
    # m = 1, C = 2: client 0 takes 1, 5, 5, …; client 1 always 2. Arrivals: 0@1, 1@2, 1@4, 0@6 and 1@6, 1@8.
    asked = []

    def seconds(client: int, task: int) -> float:
        asked.append((client, task))
        return 2.0 if client else (1.0 if task == 1 else 5.0)

    assert [participation_counts(seconds, 2, 1, n).tolist() for n in (1, 2, 3, 4, 5, 6)] == [
        [1, 0],
        [1, 1],
        [1, 2],
        [2, 2],
        [2, 3],
        [2, 4],
    ]
    asked.clear()
    participation_counts(seconds, 2, 1, 3)
    assert sorted(asked) == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]  # each task once, from 1


@given(data=st.data(), taus=st.lists(st.floats(0.01, 10), min_size=1, max_size=8), number=st.integers(0, 40))
def test_every_aggregation_has_m_contributions(data, taus, number):
    m = data.draw(st.integers(1, len(taus)))
    counts = participation_counts(lambda i, _: taus[i], len(taus), m, number)
    assert counts.sum() == m * number
    assert counts.max(initial=0) <= number  # a client is in an aggregation once
    if m == len(taus):
        assert (counts == number).all()


def test_a_buffers_schedule_is_simulated_anew_only_for_other_clients_and_loads(monkeypatch):
    # F0, m = 2 of 4 clients: each is in every second aggregation. Of three, all due together, the first is in each.
    scheduler = make_scheduler(VirtualClock(), "F0", 0, 0.0)
    members = [ClientState(Client(index + 1, index, 5, {})) for index in range(4)]
    scheduler.register_clients([member.client for member in members])
    played: list[int] = []
    monkeypatch.setattr(
        scheduler, "simulate_schedule", lambda simulate: played.append(1) or simulate(scheduler)
    )
    schedule = BufferSchedule()
    for size in (5, 6, 7):  # how many examples a client has changes nothing
        members[0].client = replace(members[0].client, num_examples=size)
        assert schedule.contribution_periods(scheduler, members, 2, 12).tolist() == [2.0] * 4
    assert len(played) == 1
    assert schedule.contribution_periods(scheduler, members[1:], 2, 12).tolist() == [1.0, 2.0, 2.0]
    assert schedule.contribution_periods(scheduler, members, 4, 12).tolist() == [1.0] * 4
    assert schedule.contribution_periods(scheduler, members, 4, 24).tolist() == [1.0] * 4
    assert len(played) == 4
    scheduler.uses_device_profiles = True  # task times follow from loads
    schedule.contribution_periods(scheduler, members, 4, 24)
    assert len(played) == 5


# ---- When --------------------------------------------------------------------------------------------------


def test_async_fedavg_aggregates_at_every_arrival():
    assert [AsyncFedAvg().ready(n) for n in (0, 1, 2)] == [False, True, True]
    assert AsyncFedAvg().interval is None


@pytest.mark.parametrize("periods", ["expected", "of-mean"])
def test_fedfix_weighs_by_the_mean_number_of_intervals_of_random_times(
    federation, model, train_config, periods
):
    seen: list[Progress] = []
    strategy = FedFix(
        fedfix_interval=0.5,
        fedfix_periods=periods,
        time_scenario="exponential:F0",
        observer=seen.append,
        eval_every=4000,
    )
    grid = federation([0.0] * 3, [1, 2, 5], messages=False)
    strategy.start(grid, model(1.0), num_rounds=4000, train_config=train_config(1, 0.0))
    p, last = np.array([0.125, 0.25, 0.625]), seen[-1].clients
    # P(T > k Δt) = e^(−k Δt/τ), τ = 1: E⌈T/Δt⌉ = 1/(1 − e^(−.5)) = 2.541, and ⌈1/.5⌉ = 2.
    expected = 1 / (1 - np.exp(-0.5)) if periods == "expected" else 2.0
    assert last["weight"] == pytest.approx(p * expected, rel=1e-3)
    assert last["observed-share"] == pytest.approx(p, abs=0.01)


def test_fedfix_is_unbiased_by_random_times_of_unequal_clients(federation, model, train_config):
    shares = {}
    for periods in ("expected", "of-mean"):
        seen: list[Progress] = []
        times = {"time_scenario": "exponential:F80", "fedfix_interval": "auto", "eval_every": 4000}
        strategy = FedFix(fedfix_periods=periods, observer=seen.append, **times)
        grid = federation([0.0] * 4, [1, 1, 1, 1], messages=False)
        strategy.start(grid, model(1.0), num_rounds=4000, train_config=train_config(1, 0.0))
        shares[periods] = np.array(seen[-1].clients["observed-share"])
    assert np.abs(shares["expected"] - 0.25).max() < 0.01
    assert np.abs(shares["of-mean"] - 0.25).max() > 0.04


def test_fedfix_aggregates_by_the_clock_only():
    strategy = FedFix(FedFix.Config(fedfix_interval=0.25))
    assert strategy.interval == 0.25
    assert not any(strategy.ready(n) for n in (0, 1, 1000))


def test_an_interval_by_itself_is_the_upper_median_of_the_task_times():
    assert fedfix.interval_of("auto", np.array([3.0, 0.5, 1.0])) == 1.0
    assert fedfix.interval_of("auto", np.array([2.0, 4.0, 1.0, 3.0])) == 3.0
    assert fedfix.interval_of(0.25, np.array([2.0, 4.0])) == 0.25
    assert (
        FedFix(fedfix_interval="auto").predict_num_aggregations(np.array([0.2, 0.6, 1.0]), 40.0) == 67
    )  # ⌈40 / .6⌉
    # Tasks of 1 s: only every second interval of .5 s, and every tenth of .1 s, has arrivals.
    for interval, number in ((0.5, 40), (0.1, 40), (1.0, 40), (2.0, 20)):
        assert FedFix(fedfix_interval=interval).predict_num_aggregations(np.ones(3), 40.0) == number
    # Of 12 intervals those with a multiple of 2 or 3: 2, 3, 4, 6, 8, 9, 10, 12.
    assert FedFix(fedfix_interval=0.5).predict_num_aggregations(np.array([1.0, 1.5]), 6.0) == 8
    with pytest.raises(ValueError, match=r"^fedfix_interval = 'never': must be a number > 0, or auto$"):
        FedFix(fedfix_interval="never")


@pytest.mark.parametrize(("scenario", "interval"), [("F80", 0.6), ("F0", 1.0)])
def test_the_run_with_an_interval_by_itself_is_the_one_with_that_number(
    federation, model, scenario, interval
):
    seen: dict[float | str, list[Any]] = {}
    for asked in ("auto", interval):
        strategy = FedFix(
            fedfix_interval=asked,
            time_scenario=scenario,
            eval_every=1,
            observer=lambda p, asked=asked: seen.setdefault(asked, []).append(
                (p.time, p.arrays["w"].numpy().tobytes())
            ),
        )
        for _ in range(2):  # a second run begins anew
            seen[asked] = []
            strategy.start(federation(), model(1.0), num_rounds=7)
        assert strategy.interval == pytest.approx(interval, rel=1e-15)
    assert [bits for _, bits in seen["auto"]] == [bits for _, bits in seen[interval]]
    assert [time for time, _ in seen["auto"]] == pytest.approx(
        [time for time, _ in seen[interval]], rel=1e-15
    )
    assert len({bits for _, bits in seen["auto"]}) == 8


def test_on_devices_the_interval_follows_the_observed_task_times(federation, model):
    grid = federation()
    for client, delay in enumerate((0.02, 0.05, 0.1)):
        grid.node(client).delay = delay
    strategy = FedFix(fedfix_interval="auto", clock=WallClock())
    assert strategy.interval == 1.0  # until a client has answered
    strategy.start(grid, model(1.0), num_rounds=6)
    task_table = strategy.session.task_table
    means = [m.seconds / m.answers for m in task_table.members.values() if m.answers]
    assert len(means) == 3
    assert min(means) < strategy.interval < 1.0  # a stand-in would be 1
    times = strategy.session.scheduler.times(task_table.active_clients, task_table.members.values())
    weights = strategy.session.contribution_weights.current
    p = np.array(list(strategy.session.client_weights().values()))
    expected = p * fedfix.contribution_periods(times, strategy.interval)
    assert list(weights.weight.values()) == pytest.approx(np.minimum(expected, 2.0).tolist())


SHORT = "fedfix_interval = {} s is short: even the fastest client works for "


@pytest.mark.parametrize(("interval", "said"), [(0.5, False), (0.1, False), (0.09, True), (0.02, True)])
def test_fedfix_says_when_every_task_takes_several_intervals(federation, model, interval, said, caplog):
    # F80: τ = (.2, .6, 1)
    FedFix(fedfix_interval=interval, server_lr=1.0).start(federation(), model(1.0), num_rounds=3)
    assert caplog.text.count(SHORT.format(interval)) == said
    assert not said or "with server_lr = 1 the model may swing" in caplog.text
    assert not said or "as long as most clients work, here 0.6 s" in caplog.text
    FedFix(fedfix_interval=interval).start(federation(), model(1.0), num_rounds=3)
    assert caplog.text.count(SHORT.format(interval)) == said  # by itself its step is as short as d_i are long


@pytest.mark.parametrize(("delay", "interval", "said"), [(0.1, 0.01, True), (0.0, 0.2, False)])
def test_on_devices_it_does_so_once_it_knows(federation, model, delay, interval, said, caplog):
    grid = federation()
    for node in grid.nodes.values():
        node.delay = delay
    FedFix(fedfix_interval=interval, server_lr=1.0, clock=WallClock()).start(grid, model(1.0), num_rounds=2)
    assert caplog.text.count(SHORT.format(interval)) == said


# ---- Weights and shares as the strategies report them ------------------------------------------------------

SHARES = {  # C = 3, sizes 1, 2, 5: p = (.125, .25, .625); F80: τ = (.2, .6, 1)
    # Σ 1/τ = 5 + 5/3 + 1 = 23/3; d = 23/3 τ p = 23/3 (.025, .15, .625)
    ("async", "time-based"): ([0.575 / 3, 1.15, 14.375 / 3], [0.125, 0.25, 0.625]),
    # q ∝ 1/τ = (5, 5/3, 1) = (15, 5, 3) / 3
    ("async", "identical"): ([1, 1, 1], [15 / 23, 5 / 23, 3 / 23]),
    # ⌈τ / .5⌉ = (1, 2, 2)
    ("fedfix", "time-based"): ([0.125, 0.5, 1.25], [0.125, 0.25, 0.625]),
    # m = 2. 0@.2 1@.6 → .6; 0@.8 2@1 → 1; 1@1.2 and 0@1.2 → 1.2; 0@1.4 1@1.8 → 1.8; 0@2 2@2 → 2; 0@2.2 1@2.4 → 2.4.
    # In 6 aggregations: counts (6, 4, 2), P = (1, 1.5, 3), d = (.125, .375, 1.875).
    ("fedbuff", "time-based"): ([0.125, 0.375, 1.875], [0.125, 0.25, 0.625]),
    # d = 1/2, q ∝ counts (6, 4, 2)
    ("fedbuff", "identical"): ([0.5, 0.5, 0.5], [1 / 2, 1 / 3, 1 / 6]),
}


def make(scheme: str, weights: str, observer: Callable[[Progress], None], **options: Any) -> Any:
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "async": (AsyncFedAvg, {}),
        "fedfix": (FedFix, {"fedfix_interval": 0.5}),
        "fedbuff": (FedBuff, {"buffer_size": 2}),
    }
    kind, own = kinds[scheme]
    options = {"eval_every": 1} | options
    return kind(kind.Config(aggregation_weights=weights, **own, **options), observer=observer)


@pytest.mark.parametrize(("scheme", "weights"), SHARES)
def test_weights_and_expected_shares_by_hand(federation, model, train_config, scheme, weights):
    seen: list[Progress] = []
    strategy = make(scheme, weights, seen.append)
    strategy.start(federation(), model(1.0), num_rounds=6, train_config=train_config(1, 0.01))
    d, q = SHARES[scheme, weights]
    assert len(seen) == 7
    for progress in seen[1:]:  # in virtual time they are the same from the first aggregation on
        assert progress.clients["weight"] == pytest.approx(d, rel=1e-12)
        assert progress.clients["expected-share"] == pytest.approx(q, rel=1e-12)
        assert progress.clients["importance"] == [0.125, 0.25, 0.625]


@pytest.mark.parametrize("scenario", ["F80", "F0", "F33", "exponential", "exponential:F0"])
@pytest.mark.parametrize("kind", ["samples", "uniform"])
@pytest.mark.parametrize("scheme", ["async", "fedfix", "fedbuff"])
def test_time_based_weights_are_unbiased(federation, model, train_config, scheme, kind, scenario):
    seen: list[Progress] = []
    strategy = make(
        scheme, "time-based", seen.append, client_weights=kind, time_scenario=scenario, eval_every=20
    )
    grid = federation([0.0] * 5, [1, 2, 3, 4, 10])
    strategy.start(grid, model(1.0), num_rounds=20, train_config=train_config(1, 0.01))
    p = [0.05, 0.1, 0.15, 0.2, 0.5] if kind == "samples" else [0.2] * 5
    assert seen[-1].clients["expected-share"] == pytest.approx(p, rel=1e-9)
    assert seen[-1].clients["importance"] == pytest.approx(p, rel=1e-12)


# ---- Configs -----------------------------------------------------------------------------------------------


def test_a_buffer_larger_than_the_federation_is_refused_before_any_task(federation, model, train_config):
    grid = federation()
    with pytest.raises(ValueError, match=r"^buffer_size = 4: there are 3 clients, must be at most that$"):
        FedBuff(FedBuff.Config(buffer_size=4)).start(grid, model(1.0), train_config=train_config())
    assert grid.asked() == []


@pytest.mark.parametrize(("size", "said"), [(2, 0), (3, 1)])
def test_a_buffer_of_all_clients_is_said_to_be_fedavg(size, said, federation, model, caplog):
    with caplog.at_level(logging.INFO, "flwr.strategies"):
        FedBuff(buffer_size=size).start(federation(), model(1.0), num_rounds=2)
    assert caplog.text.count("waits for all of them, and no work is stale, as in FedAvg") == said


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedFix, FedBuff])
def test_flowers_round_hooks_are_refused(kind, federation, model, train_config):
    with pytest.raises(RunError, match="has no rounds"):
        kind().configure_train(1, model(1.0), train_config(), federation())
    with pytest.raises(RunError, match="has no rounds"):
        kind().aggregate_train(1, [])
