"""What came of each client's work: counted alike by every strategy, told where clients are devices, and kept."""

from typing import Any

import numpy as np
import pytest

from strategies import AsyncFedAvg, FedAvg, FedBuff
from strategies.clients.client_statistics import OUTCOMES, ClientRecord, ClientStatistics
from strategies.clock import VirtualClock, WallClock
from strategies.flower import messages
from strategies.flower.grids import DEPLOYMENT


@pytest.fixture
def start(federation, model, train_config):
    """Run a strategy on devices, whose replies are as ``spoil`` makes them; return it and what it told."""

    def run(kind: Any, *, rounds: int = 3, spoil: Any = None, timeout: float = 0.2, **options: Any) -> Any:
        grid = federation(node_ids=[10, 20, 30], num_partitions=3)
        grid.engine = DEPLOYMENT
        if spoil is not None:
            spoil(grid)
        told: list[Any] = []
        # In virtual time, so that replies come in one order.
        strategy = kind(kind.Config(**options), clock=VirtualClock(), observer=told.append)
        strategy.start(
            grid, model(1.0), num_rounds=rounds, timeout=timeout, train_config=train_config(1, 0.1)
        )
        return strategy, told

    return run


def faults(grid: Any) -> None:
    """The second says that it can't, and the third sends what isn't finite."""
    grid.spoil(1, "raise")
    grid.spoil(2, "nan")


def test_every_outcome_has_a_count():
    for outcome in OUTCOMES:
        account = ClientRecord()
        account.record(outcome, clipped=True)
        assert vars(account) == {**vars(ClientRecord()), outcome: 1, "clipped": 1}


def test_columns_are_by_index_with_zeros_between():
    client_stats = ClientStatistics()
    client_stats[2].tasks += 4
    client_stats[2].record("accepted")
    columns = client_stats.columns(least=4)
    assert set(columns) == {
        "participation",
        "tasks",
        "late",
        "failed",
        "refused",
        "discarded",
        "clipped",
        "bytes",
        "lost",
    }
    assert columns["tasks"] == [0, 0, 4, 0]
    assert columns["participation"] == [0, 0, 1, 0]
    assert ClientStatistics().columns()["tasks"] == []


@pytest.mark.parametrize(
    ("kind", "options", "faulty"),
    [
        (FedAvg, {}, 4),
        # Dropped after three misses in a row.
        (AsyncFedAvg, {"time_scenario": "F0"}, 3),
        (FedBuff, {"time_scenario": "F0", "buffer_size": 1}, 3),
    ],
)
def test_failed_and_refused_are_told_apart(kind, options, faulty, start):
    strategy, told = start(kind, rounds=4, spoil=faults, **options)
    client_stats = {index: vars(account) for index, account in strategy.session.client_stats.items()}
    assert client_stats[0].pop("bytes") == told[-1].clients["bytes"][0] > 0
    client_stats[0].pop("weight")
    # Task times are (.2, .6, 1) in F80, and all 1 in F0; what failed or was refused took its time for nothing.
    times = (1.0, 1.0, 1.0) if options else (0.2, 0.6, 1.0)
    took = [(account.pop("seconds"), account.pop("wasted")) for account in client_stats.values()]
    assert np.array(took) == pytest.approx(
        np.array([[4 * times[0], 0], [faulty * times[1]] * 2, [faulty * times[2]] * 2])
    )
    last = told[-1].clients
    assert last["device-seconds"] == [seconds for seconds, _ in took]
    assert last["wasted-seconds"] == [wasted for _, wasted in took]
    assert told[-1].metrics["device-seconds"] == pytest.approx(sum(last["device-seconds"]))
    assert told[-1].metrics["wasted-seconds"] == pytest.approx(sum(last["wasted-seconds"]))
    nothing = {
        name: value for name, value in vars(ClientRecord()).items() if name not in ("seconds", "wasted")
    }
    assert {**client_stats[0], "tasks": 0, "bytes": 0, "weight": 0.0} == {**nothing, "accepted": 4}
    assert client_stats[1] == {**nothing, "tasks": faulty, "failed": faulty}
    assert client_stats[2] == {**nothing, "tasks": faulty, "refused": faulty}
    assert (last["participation"], last["failed"], last["refused"]) == (
        [4, 0, 0],
        [0, faulty, 0],
        [0, 0, faulty],
    )
    assert len({len(column) for column in last.values()}) == 1


def test_a_synchronous_round_counts_who_was_asked_and_who_was_late(start):
    strategy, told = start(FedAvg, spoil=lambda grid: grid.lose(1))
    assert told[-1].clients["tasks"] == [3, 3, 3]
    assert told[-1].clients["participation"] == [3, 0, 3]
    assert told[-1].clients["late"] == [0, 3, 0]
    assert [progress.clients["tasks"] for progress in told[1:]] == [[n] * 3 for n in (1, 2, 3)]
    assert strategy.session.busy_clients() == []


def test_what_was_shortened_is_counted_by_client(start):
    # From w = 1 a step of 0.1 gives Δ = (0.2, 0.1, −0.2); the bound is 0.15.
    _, told = start(FedAvg, rounds=1, update_norm_bound=0.15)
    assert told[-1].clients["clipped"] == [1, 0, 1]
    assert told[-1].metrics[messages.CLIPPED] == 2


def test_work_that_is_too_old_is_no_failure(start):
    class Choosy(AsyncFedAvg):
        def accept(self, contribution: Any) -> bool:
            return contribution.client.index != 1

    strategy, told = start(Choosy, rounds=6, time_scenario="F0")
    account = dict(strategy.session.client_stats.items())[1]
    assert account.discarded > 0
    assert account.accepted == account.failed == account.late == account.refused == 0
    assert told[-1].clients["discarded"] == [0, account.discarded, 0]


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_in_a_simulation_no_outcomes_are_told(kind, federation, model, train_config):
    told: list[Any] = []
    strategy = kind(observer=told.append)
    strategy.start(federation(), model(1.0), num_rounds=2, timeout=5.0, train_config=train_config(1, 0.1))
    assert all("tasks" not in progress.clients for progress in told)
    assert (
        sum(account.accepted for _, account in strategy.session.client_stats.items()) > 0
    )  # it counts all the same


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_a_resumed_run_counts_on(kind, federation, model, train_config):
    states: list[Any] = []

    def go(rounds: int, state: Any = None) -> Any:
        grid = federation(node_ids=[10, 20, 30], num_partitions=3)
        grid.engine = DEPLOYMENT
        strategy = kind(observer=lambda progress: states.append(strategy.state()))
        if state is not None:
            strategy.restore(state)
        strategy.start(grid, model(1.0), num_rounds=rounds, timeout=5.0, train_config=train_config(1, 0.1))
        return strategy

    go(2)
    kept = ClientStatistics()
    kept.restore(states[-1])
    before = sum(account.accepted for _, account in kept.items())
    again = go(5, states[-1])
    assert sum(account.accepted for _, account in again.session.client_stats.items()) > before > 0
    # Seconds are real here, and go on, too.
    assert again.session.client_stats.costs()["device-seconds"] > kept.costs()["device-seconds"] > 0
    # A new run begins with none.
    client_stats = [go(2).session.client_stats for _ in range(2)]
    counts = [{**each.columns(), "weight": each.column("weight", each.size)} for each in client_stats]
    assert counts[0] == counts[1]


def test_a_round_that_is_cut_off_leaves_no_trace(federation, model, train_config):
    grid = federation(node_ids=[10, 20, 30], num_partitions=3)
    grid.engine = DEPLOYMENT
    grid.lose(2)
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += len(grid.requests()) == 6  # all of the second round are asked, one doesn't answer
        return asked > 3

    strategy = FedAvg(should_stop=should_stop)
    strategy.start(grid, model(1.0), num_rounds=5, timeout=0.05, train_config=train_config(1, 0.1))
    assert strategy.session.aggregations == 1
    assert [account.tasks for _, account in strategy.session.client_stats.items()] == [1, 1, 1]


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg])
def test_who_is_at_work_is_known_while_the_run_waits(kind, federation, model, train_config):
    grid = federation(node_ids=[10, 20, 30], num_partitions=3)
    grid.engine = DEPLOYMENT
    grid.lose(1)
    seen: set[tuple[int, ...]] = set()

    def should_stop() -> bool:
        seen.add(tuple(sorted(strategy.session.busy_clients())))
        return False

    strategy = kind(clock=WallClock(), should_stop=should_stop)
    strategy.start(grid, model(1.0), num_rounds=2, timeout=0.1, train_config=train_config(1, 0.1))
    assert (1,) in seen or (0, 1, 2) in seen
    assert any(1 in working for working in seen)
    assert () in seen
