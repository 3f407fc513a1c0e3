"""Rounds in real time that don't wait for ever, on a Grid in memory whose seconds pass at once."""

import logging
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from strategies import FedAvg, Progress, clock
from strategies.clock import WallClock
from strategies.flower import messages

USUAL, NEVER = 10.0, float("inf")  # seconds until a reply


@pytest.fixture(autouse=True)
def passes_at_once(monkeypatch):
    """Let the machine's clock jump to the end of every sleep."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 1e-3)

    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


@pytest.fixture
def go(federation, model, train_config):
    """Run FedAvg with five clients, of which the last takes ``last`` seconds; return its reports and the grid."""

    def run(
        last: float = NEVER,
        *,
        rounds: int = 4,
        timeout: float = 3600.0,
        evaluates: bool = False,
        after: Callable[[int, Any], None] = lambda number, grid: None,
        **options: Any,
    ) -> Any:
        grid = federation([0.0] * 5, [1] * 5)
        for index in range(5):
            grid.node(index).delay = USUAL if index < 4 else last
        reports = list[Progress]()

        def observe(progress: Progress) -> None:
            reports.append(progress)
            after(progress.aggregation, grid)

        own = {"fraction_evaluate": float(evaluates), "client_weights": "uniform", **options}
        strategy = FedAvg(clock=WallClock(), observer=observe, **own)
        strategy.start(
            grid, model(0.1), num_rounds=rounds, timeout=timeout, train_config=train_config(1, 0.1)
        )
        strategy.seconds = [b.time - a.time for a, b in pairwise(reports)]
        strategy.asked = [sorted(grid.asked(messages.TRAIN, number)) for number in range(1, rounds + 1)]
        strategy.round_metrics = lambda name: [report.metrics.get(name, 0) for report in reports[1:]]
        return strategy, grid

    return run


FOUR, FIVE = [0, 1, 2, 3], [0, 1, 2, 3, 4]


# A reply that is due after 10 s is seen at the next poll, after 10.4 s.


def test_one_that_never_answers_costs_the_first_round_ten_times_the_usual_and_the_others_nothing(go, caplog):
    with caplog.at_level(logging.WARNING):
        strategy, grid = go(evaluates=True)
    assert strategy.asked == [FIVE, FOUR, FOUR, FOUR]
    assert strategy.seconds == pytest.approx([114.0, 21.0, 21.0, 21.0], abs=1.0)
    assert [grid.asked(messages.EVALUATE, n) for n in (1, 4)] == [FOUR, FOUR]
    assert (strategy.round_metrics("late-updates"), strategy.round_metrics("failures")) == (
        [1, 0, 0, 0],
        [0] * 4,
    )
    assert strategy.round_metrics("participants") == [4] * 4
    assert (strategy.session.client_stats[4].late, strategy.session.busy_clients()) == (1, [4])
    assert [line for line in caplog.messages if "left out" in line] == [
        f"round 1: left out client 4 (node {grid.node(4).node_id}): no reply within 104 s: "
        "a round waits 10 times as long as half of the clients took"
    ]


def test_one_that_never_answers_is_asked_again_after_the_timeout_and_costs_at_most_three_times_the_usual(go):
    strategy, _ = go(rounds=25, timeout=150.0)
    again = [number for number, asked in enumerate(strategy.asked) if asked == FIVE]
    assert len(again) == 3
    assert max(strategy.seconds[1:]) <= 3 * USUAL
    assert again[2] - again[1] > again[1] - again[0] > 1


@pytest.mark.parametrize("times", [4, 9])
def test_one_that_is_always_slower_counts_in_every_round(go, times):
    strategy, _ = go(times * USUAL, rounds=6)
    assert strategy.asked == [FIVE] * 6
    assert strategy.round_metrics("participants") == [5] * 6
    assert strategy.round_metrics("late-updates") == [0] * 6


def test_one_that_answers_ever_later_stretches_a_run_to_two_and_a_half_times_at_most(go):
    """Each time 2.4 times later, so that it never misses a round; then always as late as it is awaited."""

    def later(number: int, grid: Any) -> None:
        if number:
            grid.node(4).delay *= 2.4

    honest, _ = go(USUAL, rounds=60)
    late, _ = go(USUAL, rounds=60, after=later)
    assert sum(late.seconds) <= 2.5 * sum(honest.seconds)
    silent, _ = go(rounds=60)
    assert sum(silent.seconds) <= 2.5 * sum(honest.seconds)


def test_one_that_is_far_slower_counts_as_soon_as_a_late_reply_has_said_so(go):
    strategy, _ = go(30 * USUAL, rounds=25)
    back = strategy.asked.index(FIVE, 1)
    assert strategy.asked == [FIVE] + [FOUR] * (back - 1) + [FIVE] + strategy.asked[back + 1 :]
    assert strategy.round_metrics("participants")[: back + 1] == [4] * back + [5]
    assert sum(strategy.round_metrics("late-updates")[: back + 1]) == 1
    size = strategy.round_metrics("bytes-wasted")
    assert size[0] > 0
    assert size[0] == size[back - 1]  # the request, and the reply that was dropped


def test_one_that_recovers_counts_again(go):
    def recover(number: int, grid: Any) -> None:
        grid.node(4).delay = USUAL * (number in (0, 3, 4, 5)) or NEVER

    strategy, _ = go(USUAL, rounds=16, timeout=60.0, after=recover)
    # Asked in round 2, it doesn't answer; the next time, it does.
    assert strategy.round_metrics("participants")[:2] == [5, 4]
    assert strategy.asked[2] == FOUR


def test_a_round_in_which_hardly_anybody_has_answered_waits_for_all(go):
    def slow(number: int, grid: Any) -> None:
        for index in (2, 3, 4):
            grid.node(index).delay = 50 * USUAL if number == 1 else USUAL

    strategy, _ = go(USUAL, after=slow)
    assert strategy.round_metrics("participants") == [5] * 4
    assert strategy.seconds == pytest.approx([10, 500, 10, 10], abs=2.0)


def test_an_evaluation_does_not_wait_for_ever_either(go, caplog):
    def lose(number: int, grid: Any) -> None:
        grid.lose(4, category="evaluate")

    with caplog.at_level(logging.WARNING):
        strategy, _ = go(USUAL, evaluates=True, after=lose)
    assert "1 of 5 haven't answered in time" in caplog.text
    assert strategy.seconds == pytest.approx([114, 21, 21, 21], abs=1.0)
    assert strategy.asked == [FIVE, FOUR, FOUR, FOUR]  # it is at work on the evaluation


@pytest.mark.parametrize("scheme", ["fixed:4", "paired"])
def test_a_client_without_which_no_round_can_be_drawn_is_asked_all_the_same(go, scheme):
    def away(number: int, grid: Any) -> None:
        grid.node(4).delay = NEVER if number == 1 else USUAL

    strategy, _ = go(USUAL, rounds=4, timeout=100.0, participation=scheme, after=away)
    assert all(4 in asked for asked in strategy.asked)
    assert (
        strategy.round_metrics("participants")[1]
        < strategy.round_metrics("participants")[0]
        == strategy.round_metrics("participants")[3]
    )


def test_without_safeguards_a_round_waits_until_the_timeout(go):
    strategy, _ = go(safeguards="off", rounds=2, timeout=500.0)
    assert strategy.seconds == pytest.approx([500.0, 500.0], abs=1.0)
    assert strategy.round_metrics("failures") == [1, 1]


def test_what_clients_usually_take_is_kept_for_a_run_that_goes_on(go):
    strategy, _ = go(30 * USUAL, rounds=1)
    rows = strategy.state()[f"usual-times-{messages.TRAIN}"].tolist()
    assert [(row[0], row[2], row[4]) for row in rows] == [
        (0, 1, 0),
        (1, 1, 0),
        (2, 1, 0),
        (3, 1, 0),
        (4, 0, 1),
    ]
    again = FedAvg()
    again.restore(strategy.state())
    assert again.session.pending.state()[f"usual-times-{messages.TRAIN}"].tolist() == rows
