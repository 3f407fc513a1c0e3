"""When a round closes and whose replies are in: every order of replies of up to five clients, and any times."""

from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import FedAvg
from strategies.clients.weights import rescale
from strategies.rounds.deadline import closing_time, number_needed, number_to_ask
from strategies.rounds.participation import Participation
from tests.strategies.rounds.deadline_reference import SAME, closes_at, in_time_of


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("deadline", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
def test_every_order_of_replies(clients, deadline):
    # Times 1, 2 and 3 in every order, ties among them; L from 1 to all; any one client's reply invalid, or none.
    for times in product((1.0, 2.0, 3.0), repeat=clients):
        for needed, failed in product([*range(1, clients + 1), inf], [(), *((c,) for c in range(clients))]):
            due = {client: 10.0 + time for client, time in enumerate(times)}
            closed = closing_time(due, 10.0, deadline=deadline, needed=needed, failed=failed)
            at = closes_at(due, 10.0, deadline, needed, failed)
            expected = in_time_of(due, at, needed, failed)
            assert (closed.at, closed.in_time) == (at, expected)
            assert closed.late == sorted(set(due) - set(expected))


@given(
    due=st.dictionaries(st.integers(0, 9), st.floats(0.1, 5) | st.sampled_from([1.0, 1 + 4e-10]), max_size=8),
    deadline=st.just(0.0) | st.floats(0.1, 5),
    needed=st.integers(1, 8) | st.just(inf),
    failed=st.sets(st.integers(0, 9), max_size=3),
    busy=st.lists(st.floats(0.1, 5), max_size=3),
)
def test_any_times(due, deadline, needed, failed, busy):
    closed = closing_time(due, 0.0, deadline=deadline, needed=needed, failed=failed, busy=busy)
    assert closed.at == pytest.approx(closes_at(due, 0.0, deadline, needed, failed, busy), abs=2 * SAME)
    # Nobody is both, nobody who is in time came after one who is late, and never more count than are needed.
    assert sorted([*closed.in_time, *closed.late]) == sorted(due)
    assert len(set(closed.in_time) - failed) <= needed
    slowest = max((due[client] for client in closed.in_time), default=0.0)
    assert all(due[client] >= slowest - SAME for client in closed.late)
    assert closed.at <= (deadline or inf)
    if not closed.late and due:
        assert closed.at == pytest.approx(slowest, abs=SAME)


def test_equal_times_are_taken_in_the_order_of_the_clients():
    due = {4: 1.0, 2: 1.0 + 5e-10, 0: 1.0 + 9e-10, 1: 2.0}
    assert closing_time(due, 0.0, needed=2).in_time == [0, 2]
    assert closing_time({3: 1.0 + 9e-10}, 0.0, deadline=1.0).in_time == [3]
    assert closing_time({3: 1.0 + 2e-9}, 0.0, deadline=1.0) == (1.0, [], [3])


def test_a_client_that_was_drawn_twice_counts_for_two():
    due = {0: 1.0, 1: 2.0, 2: 3.0}
    assert closing_time(due, 0.0, needed=3, multiplicities={0: 1, 1: 2, 2: 1}) == (2.0, [0, 1], [2])


def test_a_round_for_which_nobody_is_free_closes_when_the_first_is():
    assert closing_time({}, 5.0, deadline=2.0, busy=[9.0, 6.5]).at == 6.5
    assert closing_time({}, 5.0, deadline=1.0, busy=[9.0, 6.5]).at == 6.0
    assert closing_time({}, 5.0, busy=[9.0]).at == 9.0
    assert closing_time({}, 5.0).at == 5.0


@pytest.mark.parametrize(
    ("needed", "over", "asked"),
    [(10, 0.3, 13), (10, 0.1, 11), (3, 0.5, 5), (7, 0.0, 7), (1, 0.01, 2), (100, 0.07, 107), (50, 0.1, 55)],
)
def test_how_many_are_asked(needed, over, asked):
    assert number_to_ask(needed, over) == asked


def test_weights_are_shared_over_those_that_count():
    assert rescale([0.1, 0.3], 1.0) == pytest.approx([0.25, 0.75], rel=1e-15)
    assert rescale([], 1.0) == []
    assert rescale([0.0], 1.0) == [0.0]


def test_any_number_may_be_drawn():
    p, rng = np.full(5, 0.2), np.random.default_rng(0)
    scheme = Participation.parse("uniform", 0.4)
    assert len(scheme.draw(p, rng, 4).clients) == 4
    assert len(scheme.draw(p, rng, 9).clients) == 5
    drawn = Participation.parse("md", 0.4).draw(p, rng, 9)
    assert sum(drawn.weights) == pytest.approx(1)
    assert np.allclose(np.array(drawn.weights) * 9, np.round(np.array(drawn.weights) * 9))


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (FedAvg, {"round_deadline": -1.0}, r"round_deadline = -1.0: must be a number >= 0"),
    (FedAvg, {"over_select": -0.5}, r"over_select = -0.5: must be a number in \[0, 100\]"),
]


@pytest.mark.parametrize(
    ("kind", "options", "text"), REFUSED, ids=[str(options) for _, options, _ in REFUSED]
)
def test_what_cannot_be_is_refused(kind, options, text):
    with pytest.raises(ValueError, match=text):
        kind(**options)


def test_more_than_all_clients_cannot_be_asked():
    strategy = FedAvg(over_select=0.5, participation="uniform", fraction_train=0.9)
    with pytest.raises(ValueError, match=r"over_select = 0.5: all 4 clients are asked without it"):
        strategy.check(4)
    strategy.check(20)
    FedAvg(over_select=0.5, participation="md", fraction_train=1.0).check(4)


def test_of_all_clients_a_round_goes_on_with_fewer():
    assert [number_needed(n, 0.25) for n in (1, 4, 5, 9, 10)] == [1, 3, 4, 7, 8]
    assert [number_needed(n, n / 3 - 1) for n in range(3, 50)] == [
        3
    ] * 47  # whatever the rounding of n / (1 + o)
    FedAvg(over_select=0.25).check(1)
