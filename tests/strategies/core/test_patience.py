"""How long a round waits for a reply, alone and by hand: M is the time after which half of the clients answered."""

import pytest

from strategies.core.reply_timeouts import ReplyTimeouts

TOOK = {0: 10.0, 1: 12.0, 2: 30.0, 3: 11.0}  # with one missing, the third of five comes after 12 s


def limit(patience: ReplyTimeouts, client: int = 4) -> float:
    limits = patience.limits(TOOK, [client])
    assert limits is not None
    return limits[client].seconds


@pytest.mark.parametrize(
    ("took", "missing", "expected"),
    [
        ({}, [0], None),
        ({}, [], None),
        ({0: 1.0}, [1, 2], None),  # less than half have answered: the network may be slow for all
        ({0: 1.0}, [1], 60.0),
        ({0: 8.0}, [1], 80.0),
        (TOOK, [4], 120.0),
    ],
)
def test_a_client_that_nothing_is_known_of_has_ten_times_the_median_and_a_minute(took, missing, expected):
    limits = ReplyTimeouts().limits(took, missing)
    assert (None if limits is None else [each.seconds for each in limits.values()]) == (
        None if expected is None else [expected] * len(missing)
    )


def test_one_that_has_never_answered_has_two_and_a_half_times_the_median():
    patience = ReplyTimeouts()
    patience.missed(4, 0)
    assert limit(patience) == 30.0
    assert patience.limits({0: 0.1}, [4])[4].seconds == 5.0  # type: ignore[index]


def test_one_that_is_always_four_times_slower_has_its_own_time():
    patience = ReplyTimeouts()
    assert limit(patience) > 48.0  # its first reply is in time
    patience.answered(4, 48.0)
    assert limit(patience) == 2.5 * 48.0


def test_a_late_reply_says_what_a_client_takes():
    patience = ReplyTimeouts()
    patience.missed(4, 0)
    patience.answered(4, 1000.0, late=True)
    assert limit(patience) == 2 * 12.0 + 60 * 12.0  # not 2.5 times as long


def test_one_that_became_slower_has_its_last_time_and_one_that_recovers_its_mean():
    patience = ReplyTimeouts()
    for seconds in (12.0, 12.0, 40.0):
        patience.answered(4, seconds)
    assert limit(patience) == 2.5 * 40.0
    patience.answered(4, 12.0)
    assert limit(patience) == 2.5 * 19.0


def test_who_misses_again_and_again_rests_ever_longer_until_it_is_in_time():
    patience, asked = ReplyTimeouts(), []
    for number in range(16):
        if not patience.is_backing_off(4, number):
            asked.append(number)
            patience.missed(4, number)
            patience.answered(4, 100.0, late=True)
    assert asked == [0, 1, 3, 7, 15]
    patience.answered(4, 100.0)
    assert not patience.is_backing_off(4, 16)


def test_what_a_round_waits_beyond_the_others_is_taken_from_a_budget_that_lateness_does_not_refill():
    patience, waited = ReplyTimeouts(), []
    for _ in range(40):  # M = 12 s: each time as late as it is awaited
        waited.append(limit(patience))
        patience.charge({**TOOK, 4: waited[-1]}, [], waited[-1])
        patience.answered(4, waited[-1])
    assert waited[:3] == [120.0, 300.0, 24 + 720 - (120 - 24 - 3) - (300 - 24 - 3)]
    assert waited[3:] == pytest.approx([27.0] * 37)  # 2 M, and what a round adds
    assert sum(waited) < 40 * 2.25 * 12 + 720
    for _ in range(60):
        patience.charge({**TOOK, 4: 12.0}, [], 30.0)
    assert limit(patience) > 4 * 27.0  # who is in time has its budget again


def test_what_is_known_is_saved_and_restored():
    patience = ReplyTimeouts()
    assert patience.state("usual") == {}
    patience.answered(3, 7.0)
    patience.missed(4, 5)
    patience.missed(4, 6)
    patience.charge({0: 1.0, 1: 1.0}, [4], 11.25)
    again = ReplyTimeouts.restored(patience.state("usual"), "usual")
    assert again.state("usual")["usual"][-2:].tolist() == [[3, 7, 1, 7, 0, 0, 0], [4, 0, 0, 0, 2, 8, 9]]
    assert (again.is_backing_off(4, 7), limit(again), limit(again, 3)) == (True, 30.0, 30.0)
    assert ReplyTimeouts.restored({}, "usual").state("usual") == {}
