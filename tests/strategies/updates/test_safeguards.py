"""What one client can do to the model at most, in rounds and without, by hand and by the worst that it can send."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from strategies import AsyncFedAvg, AsynchronousStrategy, FedAvg, FedBuff, FedFix, RunError
from strategies.clients.client_state import ClientState
from strategies.clients.roster import Client
from strategies.clock import VirtualClock, WallClock
from strategies.events.tasks import TaskTable
from strategies.flower import messages
from strategies.testing import MemoryGrid
from strategies.updates.safeguards import Bounds, Safeguards, capped_sizes, clip_to_mean

LOGGER = "flwr.strategies"


@pytest.fixture
def go(model, train_config):
    """Run a strategy on a grid, from w = 1; return the values of w after every aggregation, and the strategy."""

    def run(
        kind: Any,
        grid: Any,
        rounds: int = 1,
        *,
        lr: float = 0.5,
        state: Any = None,
        states: list[Any] | None = None,
        **options: Any,
    ) -> tuple[list[float], Any]:
        values: list[float] = []

        def observe(progress: Any) -> None:
            values.append(float(progress.arrays["w"].numpy()[0]))
            if states is not None:
                states.append(strategy.state())

        strategy = kind(
            kind.Config(
                **{"safeguards": "on", "min_clients": 1, "eval_every": 1, "server_lr": 1.0} | options
            ),
            observer=observe,
        )
        if state is not None:
            strategy.restore(state)
        strategy.start(grid, model(1.0), num_rounds=rounds, timeout=5.0, train_config=train_config(1, lr))
        return values, strategy

    return run


# Where they are on --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "clock", "on"),
    [
        ("auto", VirtualClock, False),
        ("auto", WallClock, True),
        ("on", VirtualClock, True),
        ("off", WallClock, False),
    ],
)
def test_auto_is_on_in_real_time(mode, clock, on):
    assert FedAvg(FedAvg.Config(safeguards=mode), clock=clock()).session.safeguards.active is on


# Sizes --------------------------------------------------------------------------------------------


def test_sizes_by_hand():
    assert capped_sizes([1, 2, 5], 2.0, 0).tolist() == [1, 2, 4]  # twice the median, 2
    assert capped_sizes([1, 2, 5], 0.0, 3).tolist() == [1, 2, 3]
    assert capped_sizes([1, 2, 10**12], 0.0, 0).tolist() == [1, 2, 1e12]
    assert capped_sizes([], 5.0, 0).tolist() == []
    assert capped_sizes([0, 0, 0, 4, 100], 1.0, 0).tolist() == [0, 0, 0, 4, 52]  # the median of those told
    assert capped_sizes([0, 0], 1.0, 0).tolist() == [0, 0]
    assert capped_sizes([1, 2, 5, 9], 1.0, 4).tolist() == [1, 2, 3, 3]  # 4 at most, and then their median


@given(
    st.lists(st.integers(1, 2**63 - 1), min_size=3, max_size=30), st.floats(1, 10), st.integers(1, 2**63 - 1)
)
def test_a_liar_counts_no_more_than_so_many_typical_ones(honest, ratio, lie):
    # Of 2f + 1 or more clients, f liars can't move the median beyond the honest sizes.
    capped = capped_sizes([*honest, lie], ratio, 0)
    assert capped[-1] <= ratio * max(honest) * (1 + 1e-9)
    assert (
        capped[-1] / capped.sum()
        <= ratio * max(honest) / (ratio * max(honest) + min(honest) * len(honest)) + 1e-9
    )


def test_a_client_that_says_it_has_a_trillion_examples(federation, go, caplog):
    # From w = 1 the updates are (1, 0.5, −1). Sizes 1, 2, 10^12 count as 1, 2, 2·2: p = (1, 2, 4)/7.
    grid = federation(sizes=(1, 2, 10**12))
    with caplog.at_level(logging.WARNING, LOGGER):
        values, _ = go(FedAvg, grid, 3, norm_ratio_bound=0.0)
    assert values[1] == pytest.approx(1 + (1 * 1 + 2 * 0.5 - 4 * 1) / 7, rel=1e-14)
    said = [r.getMessage() for r in caplog.records if "says it has" in r.getMessage()]
    assert said == [
        "client 2 says it has 1000000000000 examples: it counts with 4 (size_ratio_bound, examples_bound)"
    ]
    unguarded, _ = go(FedAvg, federation(sizes=(1, 2, 10**12)), safeguards="off")
    assert unguarded[1] == pytest.approx(0.0, abs=1e-9)  # client 2's model alone


def test_sizes_of_clients_that_tell_them_with_their_replies(federation, go):
    values, _ = go(FedAvg, federation(sizes=(1, 2, 10**12), describes=False), norm_ratio_bound=0.0)
    assert values[1] == pytest.approx(1 + (1 * 1 + 2 * 0.5 - 4 * 1) / 7, rel=1e-14)


@pytest.mark.parametrize("size", [-5, 0, float("nan"), float("inf"), 1.7e308, [5, 5]])
def test_a_size_that_is_none_leaves_out_that_client_alone(size, federation, go, caplog):
    # Without client 1: (1·1 − 5·1) / 6 from p = (1, 5)/6.
    with caplog.at_level(logging.WARNING, LOGGER):
        values, _ = go(FedAvg, federation(sizes=(1, size, 5)), safeguards="off")
    assert values[1] == pytest.approx(1 - 4 / 6, rel=1e-14)
    assert any("can't take part: num-examples = " in record.getMessage() for record in caplog.records)


def liar(described: int, replied: int) -> ClientApp:
    """Return a client of w = 3 that says one size in its description and another in its replies."""
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Any) -> Message:
        metrics = {"partition-id": context.node_config["partition-id"], "num-examples": described}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    @app.train()
    def train(message: Message, context: Any) -> Message:
        content = {
            "arrays": ArrayRecord({"w": Array(np.array([3.0]))}),
            "metrics": MetricRecord({"num-examples": replied}),
        }
        return Message(RecordDict(content), reply_to=message)  # type: ignore[arg-type]

    return app


@pytest.mark.parametrize(("replied", "counts"), [(30, True), (7, True), (31, False), (10**12, False)])
def test_a_reply_may_not_say_more_than_the_description(replied, counts, go, caplog):
    grid = MemoryGrid(liar(30, replied), [{"partition-id": 0}])
    with caplog.at_level(logging.WARNING, LOGGER), nullcontext() if counts else pytest.raises(RunError):
        values, _ = go(FedAvg, grid, safeguards="on")
        assert values == [1.0, 3.0]
    assert ("it described itself with 30" in caplog.text) is not counts


@pytest.mark.parametrize("kind", [FedAvg, FedBuff])
@pytest.mark.parametrize(("replied", "more"), [(30, False), (31, True), (10**12, True)])
def test_without_safeguards_it_counts_as_described(replied, more, kind, federation, model, caplog):
    def says(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == messages.TRAIN and context.node_config["partition-id"] == 0:
            reply.content.metric_records["metrics"]["num-examples"] = replied
        return reply

    with caplog.at_level(logging.WARNING, LOGGER):
        plain, beside = (
            kind(**({"buffer_size": 2} if kind is FedBuff else {})).start(
                federation(sizes=(30, 20, 50), mods=mods), model(1.0), num_rounds=4
            )
            for mods in ([], [says])
        )
    assert plain.arrays["w"].data == beside.arrays["w"].data
    told = [r.getMessage() for r in caplog.records if "described itself" in r.getMessage()]
    assert len(told) == more
    assert not more or f"says num-examples = {replied}, and described itself with 30" in told[0]
    assert "left out" not in caplog.text


# Weights ------------------------------------------------------------------------------------------


class Observed(AsynchronousStrategy):
    """A scheme with weights by the periods that were observed."""

    def ready(self, arrived: int) -> bool:
        return arrived >= 1


def observed(aggregations: int, **members: tuple[int, int]) -> list[float]:
    """Return the periods of clients that contributed so often since so many aggregations."""
    strategy = Observed()
    strategy.session.run.aggregations = aggregations
    for index, (contributions, since) in enumerate(members.values()):
        client = Client(index + 1, index, 1, MetricRecord())
        strategy.session.task_table.members[index] = ClientState(
            client, contributions=contributions, since=since
        )
    return strategy.contribution_periods(np.ones(len(members))).tolist()


def test_a_newcomers_period_counts_from_when_it_came():
    # The 53rd aggregation; three contribute to every other, P = 2, a newcomer was there for 3. Observed: 53/26 and
    # 3/1; with one contribution at the mean period, 162/79, the newcomer's is (3 + 162/79) / 2.
    periods = observed(52, a=(26, 0), b=(26, 0), c=(26, 0), newcomer=(1, 50))
    assert periods == pytest.approx([53 / 26] * 3 + [(3 + 162 / 79) / 2], rel=1e-12)
    assert periods[3] < 3
    # Before: (52 + 1) / 1 = 53, from before it came.


@given(
    st.integers(1, 200),
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 50), st.just(0)), min_size=1, max_size=6),
)
def test_a_newcomers_first_contribution_counts_for_what_it_was_there(there, before, others):
    members = {f"c{i}": other for i, other in enumerate(others)} | {"new": (1, before + 1)}
    assert observed(before + there, **members)[-1] <= there


def test_what_came_while_a_client_was_dropped_is_not_held_against_it():
    member = ClientState(Client(1, 0, 1, MetricRecord()), contributions=5, since=0)
    member.drop(10)
    member.count_again(60)
    assert (member.since, member.misses, member.dropped) == (50, 0, False)
    member.count_again(70)  # it wasn't away
    assert member.since == 50


def test_a_newcomer_to_a_buffered_run_weighs_no_more_than_those_like_it(
    federation, add_node, model, train_config, monkeypatch
):
    """The run that went from 0.96 to 0.10: FedBuff in real time, a device that comes at aggregation 50."""
    monkeypatch.setattr("strategies.events.event_stream.REFRESH_EVERY", 0.05)
    grid = federation(centres=(3.0, 2.0, -1.0), sizes=(1, 1, 1))
    for partition in range(3):
        grid.node(partition).delay = 0.01
    shares: dict[int, list[float]] = {}

    def observe(progress: Any) -> None:
        if progress.aggregation == 50:
            add_node(grid, 0, 3, 77).delay = 0.01
        shares[progress.aggregation] = progress.clients.get("weight", [])

    strategy = FedBuff(
        FedBuff.Config(buffer_size=2, arrival_weight_bound=0.0, client_weights="uniform"),
        clock=WallClock(),
        observer=observe,
        should_stop=lambda: 3 in task_table().members and task_table().members[3].contributions > 9,
    )

    def task_table() -> TaskTable:
        return strategy.session.task_table

    strategy.start(grid, model(1.0), num_rounds=100_000, timeout=30.0, train_config=train_config(1, 0.1))
    there = [weights for weights in shares.values() if len(weights) == 4 and weights[3]]
    assert strategy.session.task_table.members[3].contributions > 9
    # The others' are near p P = ¼ · 4/2; 53 periods from before it came would have made the newcomer's 13.
    assert max(weights[3] for weights in there) < 3.0


@pytest.mark.parametrize("bound", [2.0, 1.0])
def test_a_slow_clients_contribution_has_a_ceiling(bound, federation, go, caplog):
    # F80, three clients: τ = 0.2, 0.6, 1; Σ 1/τ = 23/3; d = τ Σ 1/τ / 3 = (0.51, 1.53, 2.56).
    grid = federation(sizes=(1, 1, 1))
    with caplog.at_level(logging.WARNING, LOGGER):
        _, strategy = go(AsyncFedAvg, grid, 8, lr=0.1, arrival_weight_bound=bound)
    tau = np.array([0.2, 0.6, 1.0])
    unbounded = tau * (1 / tau).sum() / 3
    weights = np.array(list(strategy.session.contribution_weights.current.weight.values()))
    assert weights == pytest.approx(np.minimum(unbounded, bound), rel=1e-12)
    # What is minimised is said: q ∝ d / P, with P = τ Σ 1/τ.
    q = weights / (tau * (1 / tau).sum())
    assert strategy.session.contribution_weights.total_variation() == pytest.approx(
        0.5 * np.abs(q / q.sum() - 1 / 3).sum(), rel=1e-9
    )
    assert [r.getMessage() for r in caplog.records if "is slow" in r.getMessage()] == [
        f"client 2 is slow: its contributions would count 2.56 times, and count {bound:g} times "
        "(arrival_weight_bound); the objective that is minimised is no longer quite the federated one"
    ]
    assert "this run minimised" in caplog.text


def test_the_ceiling_holds_for_weights_of_ones_own(federation, go):
    class Heavy(Observed):
        def weigh(self, contributions: Any) -> list[float]:
            return [100.0] * len(contributions)

    values, strategy = go(Heavy, federation(), 1, norm_ratio_bound=0.0)
    assert values[1] == 1 + 2.0 * 1.0  # client 0's update of 1, twice
    assert strategy.session.task_table.members[0].weight == 2.0


# Norms --------------------------------------------------------------------------------------------


def test_an_update_far_longer_than_usual_is_shortened(federation, go):
    # Five alike, and one at 10^6: norms 1, 1, 1, 1, 5·10^5 (from w = 1, lr ½); at most 1.5 times the median.
    grid = federation(centres=(3.0, 3.0, 3.0, 3.0, 1e6 + 1), sizes=(1, 1, 1, 1, 1))
    values, strategy = go(FedAvg, grid)
    assert values[1] == pytest.approx(1 + (4 * 1 + 1.5) / 5, rel=1e-12)
    assert strategy.session.safeguards.norms.norms == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 5e5}


def test_f_liars_of_more_than_twice_as_many(federation, go):
    # Two of five, about size and length: (1, 1, 1, 10^12, 10^12) count as (1, 1, 1, 2, 2), 4/7 of all;
    # their updates of 5·10^5 count as 0.75, so that twice the size times that is 1.5 times the median norm.
    grid = federation(centres=(3.0, 3.0, 3.0, 1e6 + 1, 1e6 + 1), sizes=(1, 1, 1, 10**12, 10**12))
    values, strategy = go(FedAvg, grid)
    assert list(strategy.session.client_weights().values()) == pytest.approx([1 / 7] * 3 + [2 / 7] * 2)
    assert values[1] == pytest.approx(1 + (3 * 1 + 2 * 2 * 0.75) / 7, rel=1e-12)


def test_what_a_method_keeps_of_a_client_is_near_the_others_by_hand():
    clients = [Client(index + 1, index, 1, MetricRecord()) for index in range(3)]
    safeguards = Safeguards("on", Bounds(size_ratio=2.0, memory_ratio=1.5), lambda: False)
    assert safeguards.furthest(clients, [1.0, 2.0, 40.0]) == [3.0, 3.0, 3.0]
    assert safeguards.furthest(clients, [1.0, 2.0, 40.0], 1.0) == [2.0, 2.0, 2.0]
    safeguards.sizes(clients, [1, 1, 10**12])  # counts as 2, and so half as far
    assert safeguards.furthest(clients, [1.0, 2.0, 40.0]) == [3.0, 3.0, 1.5]
    assert safeguards.furthest(clients[:2], [1.0, 40.0]) == [np.inf] * 2  # either may be the liar
    assert (
        Safeguards("off", safeguards.bounds, lambda: True).furthest(clients, [1.0, 2.0, 40.0]) == [np.inf] * 3
    )
    assert clip_to_mean(np.array([4.0, 0.0]), np.array([1.0, 0.0]), 1.5).tolist() == [2.5, 0.0]
    assert clip_to_mean(np.array([2.0, 0.0]), np.array([1.0, 0.0]), 1.5).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedBuff])
def test_in_runs_without_rounds_too_from_the_first_arrival_on(kind, federation, go):
    # F0: all arrive at once, in client order, the liar first: it waits until the norms of three are known.
    grid = federation(centres=(1e6 + 1, 3.0, 3.0, 3.0, 3.0), sizes=(1, 1, 1, 1, 1))
    more = {"buffer_size": 5} if kind is FedBuff else {}
    values, strategy = go(kind, grid, 5, time_scenario="F0", client_weights="uniform", **more)
    assert max(map(abs, values)) < 100
    assert strategy.session.task_table.members[0].contributions >= 1


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedBuff, FedFix])
def test_two_liars_of_ten_that_answer_first_are_bounded_from_their_first_update_on(kind, federation, go):
    # Honest updates are 1. The liars' sizes count as 2, so that theirs are at most 1.5 / 2, with weights of P_i 2/12;
    # P_i is 10 where each arrival makes a model, and 1 where one model is all that is asked for.
    grid = federation(centres=(-1e6,) * 2 + (3.0,) * 8, sizes=(10**12,) * 2 + (1,) * 8)
    more, first = {
        AsyncFedAvg: ({}, -10 * 2 / 12 * 0.75),
        FedBuff: ({"buffer_size": 2}, -2 * 2 / 12 * 0.75),
        FedFix: ({"fedfix_interval": 1.0}, -2 * 2 / 12 * 0.75 + 8 / 12),
    }[kind]
    values, strategy = go(kind, grid, 1, time_scenario="F0", **more)
    assert values[1] == pytest.approx(1 + first, rel=1e-9)
    assert strategy.session.task_table.members[0].contributions == 1


def test_a_bound_of_ones_own_comes_in_place_of_it(federation, go):
    grid = federation(centres=(3.0, 3.0, 3.0, 3.0, 1e6 + 1), sizes=(1, 1, 1, 1, 1))
    values, _ = go(FedAvg, grid, update_norm_bound=10.0)
    assert values[1] == pytest.approx(1 + (4 * 1 + 10) / 5, rel=1e-12)


def test_an_update_norm_bound_bounds_what_moves_the_model(federation, go):
    # d = 2 for client 0's update of norm 1, bounded by S = 0.5: not 2 · 0.5, but 0.5.
    class Heavy(Observed):
        def weigh(self, contributions: Any) -> list[float]:
            return [2.0] * len(contributions)

    values, _ = go(Heavy, federation(), 1, update_norm_bound=0.5, safeguards="off")
    assert values[1] == 1.5


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg, FedBuff])
def test_a_resumed_run_goes_on_with_the_norms_it_knew(kind, federation, model, train_config):
    def start(rounds: int, state: Any = None) -> tuple[list[float], list[Any]]:
        grid = federation(centres=(3.0, 2.0, -1.0, 50.0), sizes=(1, 2, 5, 2), node_ids=[1, 2, 3, 4])
        values: list[float] = []
        states: list[Any] = []

        def observe(progress: Any) -> None:
            values.append(float(progress.arrays["w"].numpy()[0]))
            states.append(strategy.state())

        more = {"buffer_size": 2} if kind is FedBuff else {}
        strategy = kind(kind.Config(safeguards="on", **more), observer=observe)
        if state is not None:
            strategy.restore(state)
        strategy.start(grid, model(1.0), num_rounds=rounds, timeout=5.0, train_config=train_config(1, 0.1))
        return values, states

    whole, states = start(8)
    rest, _ = start(8, states[4])
    assert rest == whole[5:]
    assert states[4]["norms-of"]


@pytest.mark.parametrize("begins", [0, 100])
def test_whoever_answers_long_before_the_others_waits_for_a_while_only(begins, federation, go, tmp_path):
    # F99: client 0 answers after 10 ms, the next after 340 ms: it waits ten times as long as its task took, whenever
    # that began.
    (tmp_path / "there.csv").write_text("".join(f"{client},{begins},999\n" for client in range(4)))
    there = {"availability": f"trace:{tmp_path / 'there.csv'}", "aggregation_weights": "identical"}
    values, strategy = go(
        AsyncFedAvg, federation([3.0] * 4, [1] * 4), 60, time_scenario="F99", lr=0.01, server_lr=0.1, **there
    )
    assert len(values) == 61
    assert [member.contributions for member in strategy.session.task_table.members.values()] == [58, 1, 1, 0]
    assert strategy.session.scheduler.now() == pytest.approx(begins + 0.11 + 57 * 0.01)
    assert not strategy.session.task_table.held_replies


def test_a_buffer_is_filled_by_those_that_were_held_back_too(federation, go):
    # As without safeguards: the model waits for the slowest of three, and 99 times as long for no other.
    values, strategy = go(FedBuff, federation(sizes=(1, 1, 1)), 5, time_scenario="F99", buffer_size=3, lr=0.1)
    assert (
        values
        == go(
            FedBuff,
            federation(sizes=(1, 1, 1)),
            5,
            time_scenario="F99",
            buffer_size=3,
            lr=0.1,
            safeguards="off",
        )[0]
    )
    assert strategy.session.scheduler.now() == 5.0


def test_of_what_was_held_back_no_more_counts_than_was_asked_for(federation, go):
    # F0: of three answers at once each would make a model, when the third says which norms are usual.
    values, strategy = go(AsyncFedAvg, federation(), 1, time_scenario="F0", aggregation_weights="identical")
    assert values == [1.0, 2.0]  # client 0's update of 1
    assert strategy.session.aggregations == 1
    assert [member.contributions for member in strategy.session.task_table.members.values()] == [1, 0, 0]


def test_work_that_is_held_back_when_the_others_have_gone_for_good_counts(federation, go, tmp_path):
    (tmp_path / "there.csv").write_text("0,0,99\n1,0,0.5\n2,0,0.5\n")
    there = {"availability": f"trace:{tmp_path / 'there.csv'}", "time_scenario": "F0"}
    _, strategy = go(AsyncFedAvg, federation(), 5, lr=0.1, **there)
    assert [member.contributions for member in strategy.session.task_table.members.values()] == [5, 0, 0]
    assert strategy.session.scheduler.now() == 11 + 4


@pytest.mark.parametrize("kind", [AsyncFedAvg, FedBuff])
@pytest.mark.parametrize("seconds", [(3, 2, 1, 3.5), (0.3, 0.1, 5, 5)], ids=["enough", "patience over"])
def test_a_run_goes_on_in_the_midst_of_what_was_held_back(kind, seconds, federation, go, tmp_path):
    (tmp_path / "times.csv").write_text("".join(f"{i},{each}\n" for i, each in enumerate(seconds)))
    grid = partial(federation, (3.0, 2.0, -1.0, 50.0), (1, 2, 5, 2), node_ids=[1, 2, 3, 4])
    options = {"time_scenario": f"trace:{tmp_path / 'times.csv'}", "lr": 0.1}
    options |= {"buffer_size": 1} if kind is FedBuff else {}
    states: list[Any] = []
    whole, strategy = go(kind, grid(), 9, states=states, **options)
    for done, state in enumerate(states):
        rest, again = go(kind, grid(), 9, state=state, **options)
        assert rest == whole[done + 1 :]
        assert again.session.scheduler.now() == strategy.session.scheduler.now()
    assert [len(state["tasks-under-way"]) for state in states[1:-1]] == [4] * 8


@pytest.mark.parametrize("kind", [FedAvg, AsyncFedAvg, FedBuff, FedFix])
@pytest.mark.parametrize("size", [1, 2])
def test_an_honest_client_with_many_examples_is_shortened_and_reports_say_how_much_less_it_counts(
    kind, size, federation, go
):
    # Updates are alike. That of a client with twice the median size is at most 1.5 / 2 of the median: from p = 2/6 it
    # counts 1.5/5.5, and the others from 1/6 1/5.5.
    grid = federation(centres=(3.0,) * 5, sizes=(1, 1, 1, 1, size))
    more = {FedBuff: {"buffer_size": 5}, FedFix: {"fedfix_interval": 1.0}}.get(kind, {})
    values, strategy = go(kind, grid, 5, time_scenario="F0", lr=1e-6, **more)
    told = strategy.session.run.result.train_metrics_clientapp
    distance, shares = (
        told[5].get("weights-distance", 0.0),
        strategy.session.client_columns()["expected-share"],
    )
    parts = [1.0] * 4 + [1.5 if size == 2 else 1.0]
    assert shares == pytest.approx([part / sum(parts) for part in parts], rel=1e-4)
    assert distance == pytest.approx(4 * (1 / 5.5 - 1 / 6) if size == 2 else 0.0, rel=1e-4, abs=1e-12)
    if kind is FedAvg:
        assert values[1] - 1 == pytest.approx(2e-6 * sum(parts) / (4 + size), rel=1e-2)
        assert ("weights-distance" in told[5]) == (size == 2)


def test_a_federation_that_is_alike_is_left_alone(federation, go):
    grid = {mode: federation(sizes=(1, 1, 1)) for mode in ("on", "off")}
    on, off = (go(FedAvg, grid[mode], 5, safeguards=mode)[0] for mode in ("on", "off"))
    assert on == off


@pytest.mark.parametrize("more", [{}, {"update_norm_bound": 0.9}])
def test_under_central_privacy_one_client_moves_the_model_by_no_more_than_the_noise_is_for(
    more, federation, go
):
    """Of 21 clients one changes, and with it which norm is the median: 0.02, or 1, which is S."""

    def moved_to(last: float) -> float:
        # From w = 1 at lr ½ client i's update is (centre − 1) / 2.
        grid = federation(centres=(*[1.04] * 10, *[3.0] * 10, 1 + 2 * last), sizes=(1,) * 21)
        private = {"dp": "central", "dp_clipping_norm": 1.0, "dp_noise_multiplier": 1e-9}
        values, strategy = go(FedAvg, grid, client_weights="uniform", **private, **more)
        told.append(strategy)
        return values[-1]

    told: list[Any] = []
    near, none, far = moved_to(0.02), moved_to(0.0), moved_to(1.0)
    for value in (near, far):  # the sensitivity S/n is to a client's update in place of none
        assert abs(value - none) <= (1 + 1e-6) / 21
    assert {account.clipped for strategy in told for _, account in strategy.session.client_stats.items()} == {
        0
    }


def test_under_central_privacy_nobody_is_told_how_many_updates_were_too_long(federation, model, train_config):
    def told(**options: Any) -> set[str]:
        strategy = FedAvg(client_weights="uniform", safeguards="on", min_available_nodes=1, **options)
        result = strategy.start(
            federation(), model(1.0), num_rounds=1, timeout=5.0, train_config=train_config(1, 0.5)
        )
        return set(result.train_metrics_clientapp[1])

    for bound in ({}, {"update_norm_bound": 0.1}):
        assert "clipped-updates" in told(**bound)
        assert "clipped-updates" not in told(dp="central", dp_noise_multiplier=0.1, **bound)


def test_sizes_of_clients_outside_a_round_tell_what_is_usual():
    safeguards, clients = (
        FedAvg(FedAvg.Config(safeguards="on")).session.safeguards,
        [Client(i + 1, i, 10.0, MetricRecord()) for i in range(20)],
    )
    liar = replace(clients[3], num_examples=10.0**12)
    drawn = [clients[0], liar]
    assert safeguards.sizes(drawn, [10.0, 10.0**12], clients) == [10.0, 20.0]
    unknown = [replace(client, num_examples=None) for client in clients]
    assert safeguards.sizes(drawn, [10.0, 30.0], unknown) == [10.0, 30.0]  # twice the median of both is 40
