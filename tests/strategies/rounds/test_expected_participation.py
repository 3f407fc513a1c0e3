"""Rounds that close early, played through: small cases by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord

from strategies.clients.roster import Client
from strategies.rounds.expected_participation import Played, Rules, play
from strategies.rounds.participation import Draw
from strategies.timing.scheduler import Outlook


class Fixed:
    """Clients with a time each, that are there when a whole number of ``every`` seconds has passed; 0: always."""

    def __init__(self, *times: float, every: Sequence[int] = ()) -> None:
        self.times, self.every = times, every or [0] * len(times)

    def outlook(self, client: Client, task: int, when: float) -> Outlook:
        return Outlook(when + self.times[client.index], lost=False)

    def comes(self, client: Client, when: float) -> float:
        every = self.every[client.index]
        return when if not every else -(-when // every) * every


def played(
    *times: float,
    given: float = 1.0,
    every: Sequence[int] = (),
    look: Callable[[int, int], None] = lambda free, there: None,
    **rules: Any,
) -> Played:
    """Ask all that are free in every round, with weights that sum to ``given``."""
    clients = [Client(i + 1, i, 1, MetricRecord()) for i in range(len(times))]

    def draw(free: Any, p: Any, number: int, there: int) -> Draw:
        look(len(free), there)
        return Draw(tuple(range(len(free))), tuple(given * p))

    return play(
        Fixed(*times, every=every), clients, np.full(len(times), 1 / len(times)), draw, Rules(**rules)
    )


def test_the_halves_tell_what_is_known():
    # Shares of the first half are ½, ½, and of the second 2/6, 4/6: a quarter of 1/6 + 1/6.
    before = [np.array(weight, dtype=float) for weight in ((1, 0), (1, 1), (2, 2), (3, 5))]
    known = Played(np.array([3.0, 5.0]), np.zeros(2), np.zeros(2), before)
    assert known.error == pytest.approx(1 / 12)
    assert not known.sure


@pytest.mark.parametrize(("number", "rounds", "enough"), [(25_000, 20, True), (25_001, 1, False)])
def test_so_many_tasks_that_their_shares_would_take_minutes_are_not_played(number, rounds, enough):
    known = played(*[1.0] * number)
    assert known.asked.sum() == rounds * number
    assert known.enough == known.sure == enough


def test_a_few_clients_of_many_are_drawn_in_no_more_rounds_than_all_can_be_looked_at():
    clients = [Client(i + 1, i, 1, MetricRecord()) for i in range(100_000)]
    at = iter(range(100_000))

    def draw(free: Any, p: Any, number: int, there: int) -> Draw:
        return Draw((next(at),), (1.0,))

    known = play(Fixed(*[1.0] * 100_000), clients, np.full(100_000, 1e-5), draw, Rules())
    assert known.asked.sum() == 100  # 1e7 looks
    assert not known.sure


def test_whoever_is_at_work_is_there():
    looks: list[tuple[int, int]] = []
    played(1, 1, 3, deadline=1.0, late="next", look=lambda free, there: looks.append((free, there)))
    # The third works for three rounds, and is asked in the one after.
    assert looks[:4] == [(3, 3), (2, 3), (2, 3), (3, 3)]


def test_work_of_earlier_rounds_counts_in_one_that_asks_nobody():
    # One client, of three seconds: two rounds of a second ask nobody, and in the second of these it counts. It is
    # asked in rounds 1, 4 … 499 of 500, after which it is known well, and counts in 3, 6 … 498.
    alone = played(3, deadline=1.0, late="next")
    assert (alone.asked[0], alone.counted[0]) == (167, 166)
    assert alone.weight.tolist() == alone.counted.tolist()


def test_late_work_counts_beside_the_share_that_the_free_ones_have_of_those_that_are_there():
    # Client 1 takes three rounds of a second, and client 2 is there for the first of each three. Round 1 is of 0 and
    # 2, ½ each, and 2 of client 0 alone. In round 3 client 0's d is its half of those that are there, and that of
    # client 1 is still the third that it was drawn with: ½ to ⅓.
    mixed = played(1, 3, 1, every=(0, 0, 3), deadline=1.0, late="next")
    assert mixed.shares == pytest.approx([(0.5 + 1 + 0.6) / 3, 0.4 / 3, 0.5 / 3], abs=0.005)


def test_a_round_gives_the_weights_that_were_drawn():
    half = played(1, 1, given=0.5)
    assert half.counted.min() > 0
    assert half.weight == pytest.approx(0.25 * half.counted)


def test_what_is_done_as_its_round_closes_without_it_keeps_no_client_busy():
    # Both take a second and one closes the round, the first by its index: in every round, as both are free again.
    dropped = played(1, 1, needed=lambda there: 1)
    assert dropped.asked[0] == dropped.asked[1] == dropped.counted[0] == dropped.weight[0] > 0
    assert dropped.counted[1] == 0
    # Kept, the second's counts in the next round with half of it, and it is asked in the one after.
    kept = played(1, 1, needed=lambda there: 1, late="next")
    assert kept.counted[0] == 2 * kept.counted[1] > 0
    assert kept.shares == pytest.approx([0.75, 0.25])
