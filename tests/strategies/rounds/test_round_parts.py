"""Parts of the loop of rounds alone: the size of a round, and who of its clients is there."""

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from strategies import FedAvg
from strategies.clients.client_metrics import MetricsMean
from strategies.clients.client_statistics import ACCEPTED, ClientStatistics
from strategies.core.config import SynchronousConfig
from strategies.flower import messages
from strategies.rounds.round import Round
from strategies.rounds.selection import Selection, present
from strategies.timing.availability import NEVER
from tests.strategies.parts import begun, client, population

THREE = [client(index) for index in range(3)]


def selection_of(**options: Any) -> Selection:
    """Return the selection among ten clients, of equal sizes."""
    run = begun([client(index) for index in range(10)], SynchronousConfig(**options))
    return Selection(SynchronousConfig(**options), run, population(run), FedAvg.capabilities)


def test_a_round_waits_where_all_clients_that_are_named_are_at_work():
    named = selection_of(participation="fixed:1,2,30", round_deadline=1.0)
    free = [client(index) for index in (0, 3)]
    assert named.waits_for([1, 2], free)
    assert not named.waits_for([1], [*free, client(2)])
    assert not named.waits_for([30], free)  # which isn't connected: the draw says so
    assert not selection_of(round_deadline=1.0).waits_for([1], free)


def test_free_clients_have_their_share_of_the_weight_of_all_that_are_present():
    drawn = selection_of(round_deadline=1.0)
    assert drawn.share_beside([]) == 1.0
    assert drawn.share_beside([1, 2]) == pytest.approx(0.8)


def test_of_l_needed_clients_so_many_more_are_asked():
    # L = round(0.4 · 10) = 4; ⌈1.3 · 4⌉ = 6
    both = selection_of(participation="uniform", fraction_train=0.4, over_select=0.3)
    assert both.number_to_draw() == 6
    assert both.replies_needed([0.1, 0.9]) == (4, [1, 1])
    deadline = selection_of(participation="uniform", fraction_train=0.4, round_deadline=1.0)
    assert deadline.number_to_draw() == 4
    assert deadline.replies_needed([0.5]) == (inf, [1])
    assert selection_of(participation="uniform", fraction_train=0.4).number_to_draw() is None


def test_one_that_is_drawn_twice_counts_for_two():
    drawn = selection_of(
        participation="md", fraction_train=0.4, round_deadline=1.0
    )  # 4 draws, d_i = counts / 4
    assert drawn.replies_needed([0.25, 0.5, 0.25]) == (inf, [1, 2, 1])


def test_the_weight_of_work_that_does_not_count_is_credited_to_the_rest():
    weight_by_client = {0: 0.125, 1: 0.25, 2: 0.625}
    outcomes = {0: ACCEPTED, 1: ACCEPTED, 2: messages.FAILED}
    client_stats = ClientStatistics()
    cohort = Round(1, np.zeros(1), ArrayRecord(), np.zeros(1), THREE, None, MetricsMean())
    cohort.weight_by_client, cohort.outcomes = weight_by_client, outcomes
    cohort.record_weights(client_stats)
    assert client_stats.column("weight", 3) == pytest.approx([1 / 3, 2 / 3, 0])


def scheduler(there: set[int], next_available: dict[int, float], over: float = NEVER) -> Any:
    now = [0.0]
    clock = SimpleNamespace(wait_until=lambda due: now.__setitem__(0, due))
    return SimpleNamespace(
        always=False,
        clock=clock,
        now=lambda: now[0],
        is_available=lambda c: c.index in there or next_available.get(c.index, NEVER) <= now[0],
        next_available=lambda c, at: at if c.index in there else next_available.get(c.index, NEVER),
        over=lambda at: at > over,
    )


def test_those_that_are_there_and_the_next_that_comes():
    anyone = lambda index: True  # noqa: E731
    assert [c.index for c in present(scheduler({1}, {}), THREE, anyone, wait=True)] == [1]
    waiting = scheduler(set(), {0: 9.0, 2: 4.0})
    assert present(waiting, THREE, anyone, wait=False) == []
    assert [c.index for c in present(waiting, THREE, anyone, wait=True)] == [2]
    assert waiting.now() == 4.0
    wanted = scheduler(set(), {0: 9.0, 2: 4.0})
    assert [c.index for c in present(wanted, THREE, lambda index: index == 0, wait=True)] == [0, 2]


@pytest.mark.parametrize(
    ("next_available", "over", "said"), [({}, NEVER, "no client is there any more"), ({1: 5.0}, 3.0, "")]
)
def test_nobody_is_waited_for_for_ever(next_available, over, said, caplog):
    assert present(scheduler(set(), next_available, over), THREE, lambda index: True, wait=True) == []
    assert said in caplog.text
