"""Parts of the loop of rounds alone: the size of a round, and who of its clients is there."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strategies.clients.accounts import ACCEPTED, Accounts
from strategies.clients.client_metrics import MetricsMean
from strategies.flower import messages
from strategies.rounds.deadline import RoundSize
from strategies.rounds.participation import Participation
from strategies.rounds.round import Round
from strategies.rounds.selection import present
from strategies.timing.availability import NEVER
from tests.strategies.parts import client, run_of

THREE = [client(index) for index in range(3)]


def test_of_l_needed_clients_so_many_more_are_asked():
    # L = round(0.4 · 10) = 4; ⌈1.3 · 4⌉ = 6
    size = RoundSize(run_of(), lambda: Participation("uniform", 0.4), 0.3)
    assert (size.to_ask(10), size.needed(10)) == (6, 4)
    assert size.worth([0.1, 0.9], 10) == [1, 1]
    alone = RoundSize(run_of(), lambda: Participation("uniform", 0.4), 0.0)
    assert (alone.to_ask(10), alone.needed(10)) == (4, float("inf"))


def test_one_that_is_drawn_twice_counts_for_two():
    size = RoundSize(run_of(), lambda: Participation("md", 0.4), 0.0)  # four draws, d_i = counts / 4
    assert size.worth([0.25, 0.5, 0.25], 10) == [1, 2, 1]


def test_the_weight_of_work_that_does_not_count_is_credited_to_the_rest():
    worth = {0: 0.125, 1: 0.25, 2: 0.625}
    outcomes = {0: ACCEPTED, 1: ACCEPTED, 2: messages.FAILED}
    accounts = Accounts()
    Round(1, np.zeros(1), THREE, None, MetricsMean(), worth=worth, outcomes=outcomes).credit(accounts)
    assert accounts.column("weight", 3) == pytest.approx([1 / 3, 2 / 3, 0])


def pace(there: set[int], comes: dict[int, float], over: float = NEVER) -> Any:
    now = [0.0]
    clock = SimpleNamespace(wait_until=lambda due: now.__setitem__(0, due))
    return SimpleNamespace(
        always=False,
        clock=clock,
        now=lambda: now[0],
        there=lambda c: c.index in there or comes.get(c.index, NEVER) <= now[0],
        comes=lambda c, at: at if c.index in there else comes.get(c.index, NEVER),
        over=lambda at: at > over,
    )


def test_those_that_are_there_and_the_next_that_comes():
    anyone = lambda index: True  # noqa: E731
    assert [c.index for c in present(pace({1}, {}), THREE, anyone, wait=True)] == [1]
    waiting = pace(set(), {0: 9.0, 2: 4.0})
    assert present(waiting, THREE, anyone, wait=False) == []
    assert [c.index for c in present(waiting, THREE, anyone, wait=True)] == [2]
    assert waiting.now() == 4.0
    wanted = pace(set(), {0: 9.0, 2: 4.0})
    assert [c.index for c in present(wanted, THREE, lambda index: index == 0, wait=True)] == [0, 2]


@pytest.mark.parametrize(
    ("comes", "over", "said"), [({}, NEVER, "no client is there any more"), ({1: 5.0}, 3.0, "")]
)
def test_nobody_is_waited_for_for_ever(comes, over, said, caplog):
    assert present(pace(set(), comes, over), THREE, lambda index: True, wait=True) == []
    assert said in caplog.text
