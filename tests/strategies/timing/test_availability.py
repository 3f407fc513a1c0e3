"""Who is there when: stretches of time, laws, and how often clients contribute by them."""

import itertools
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strategies.timing.availability import Always, Availability, ByStretches, Stretches, make_availability
from strategies.timing.cycles import Cycle, over_time


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes) -> str:
        (tmp_path / "there").write_bytes(content.encode() if isinstance(content, str) else content)
        return f"trace:{tmp_path / 'there'}"

    return write


def turns(found: Availability, client: int, end: float) -> list[float]:
    """Return every time before the end at which a client comes or goes."""
    times, now = [], 0.0
    while (now := found.changes(client, now)) < end:
        times.append(now)
    return times


@pytest.mark.parametrize(
    "text", ["always", "diurnal:0.3,40", "diurnal:1,40", "bernoulli:0.3,2", "bernoulli:1", "trace:FILE"]
)
def test_who_is_away_is_who_is_not_there(written, text):
    name = written("0,3,7\n0,7,9\n1,0,4,10\n1,8,10,10\n2,0,10,10\n")
    found = make_availability(name if text == "trace:FILE" else text, 3, 1)
    since, until = 11.3, 95.9
    times = np.linspace(since, until, 4999)[1:-1]
    for client in range(3):
        gone = list(found.absences(client, since, until))
        assert all(since <= begins < ends <= until for begins, ends in gone)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(gone))
        away = [any(begins <= time < ends for begins, ends in gone) for time in times]
        assert away == [not found.is_available(client, time) for time in times]


# ---- Stretches ----------------------------------------------------------------------------------------------------

whole = st.lists(st.tuples(st.integers(0, 23), st.integers(1, 12)), max_size=6)


@given(whole, st.booleans(), st.integers(24, 30))
def test_stretches_are_what_a_table_of_seconds_says(pairs, periodic, period):
    stretches = [(a, min(a + length, period)) for a, length in pairs]
    found = ByStretches(
        [Stretches([(float(a), float(b)) for a, b in stretches], period if periodic else None)]
    )
    table = [any(a <= second < b for a, b in stretches) for second in range(period)]
    table = table * 3 if periodic else table + [False] * 2 * period
    for second, available in enumerate(table):
        assert found.is_available(0, float(second)) == found.is_available(0, second + 0.5) == available
    expected = [float(t) for t in range(1, len(table)) if table[t] != table[t - 1]]
    assert turns(found, 0, float(len(table) - 1) + 0.5) == expected
    for second, available in enumerate(table[:period]):
        comes = next((t for t in range(second, len(table)) if table[t]), math.inf)
        assert found.next_available(0, float(second)) == comes
        if available:
            gone = next((t for t in range(second, len(table)) if not table[t]), math.inf)
            assert found.leaves(0, second + 0.25) == gone


@given(st.floats(0.01, 1e6), st.floats(0, 1), st.floats(0.01, 1), st.integers(0, 40))
def test_a_turn_is_always_later_however_far_the_clock(period, start, share, number):
    begin, end = start * period, min(start * period + share * period, period)
    if not begin < end:
        return
    found = ByStretches([Stretches([(begin, end)], period)])
    now = number * 1000 * period
    for _ in range(6):
        later = found.changes(0, now)
        assert later > now
        if later == math.inf:
            return
        assert later - now <= 1.001 * period
        now = later


@pytest.mark.parametrize(
    "pairs", [[(1, 1)], [(2, 1)], [(-1, 1)], [(0, math.inf)], [(0, 11)], [(math.nan, 1)]]
)
def test_what_is_no_stretch_is_refused(pairs):
    with pytest.raises(ValueError, match="start < end"):
        Stretches(pairs, 10.0)


# ---- Files --------------------------------------------------------------------------------------------------------


def test_a_csv_says_by_client_when_it_is_there_and_whether_that_comes_again(written):
    found = make_availability(
        written("client,start,end,period\n0,2,4,10\n1,0,3\n0,8,10,10\n1,7,8\n2,0,5,5\n9,1,2\n"), 3, 0
    )
    assert turns(found, 0, 25.0) == [2, 4, 8, 10, 12, 14, 18, 20, 22, 24]
    assert turns(found, 1, 99.0) == [3, 7, 8]
    assert found.next_available(1, 8.0) == math.inf
    assert turns(found, 2, 99.0) == []
    assert found.is_available(2, 1e9)
    assert (found.horizon, found.repeats) == (10.0, False)


@pytest.mark.parametrize(
    "write", [pickle.dumps, lambda found: json.dumps(found).encode()], ids=["pickle", "json"]
)
def test_fedscales_traces_are_periodic_and_taken_in_turn(written, write):
    # As in its README: seconds at which the device becomes active, and inactive; the trace then begins again.
    found = {
        3: {"duration": 5, "active": [0, 60], "inactive": [30, 90], "finish_time": 100, "model": "a phone"},
        1: {"duration": 5, "active": [10], "inactive": [200], "finish_time": 150, "model": "another"},
    }
    available = make_availability(written(write(found)), 3, 0)
    assert turns(available, 0, 200.0) == turns(available, 2, 200.0) == [30, 60, 90, 100, 130, 160, 190]
    assert turns(available, 1, 320.0) == [10, 150, 160, 300, 310]  # over at the end of its trace
    assert available.horizon == 150


ROW = (
    "must be client,start,end in seconds, 0 <= start < end, and perhaps the client's period, the same in all its "
    "rows and at least end"
)
ENTRY = "entry 1 must have active and inactive, as many seconds each, active < inactive, and finish_time"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("0,0,1\n", "has no row for client 1; there are 2 clients, from 0"),
        *(
            (f"0,0,1\n{row}\n", f"row 2 {ROW}")
            for row in (
                "1,1,1",
                "1,2,1",
                "1,-1,1",
                "1,a,1",
                "x,0,1",
                "1,0",
                "1,0,1,2,3",
                "1,0,3,2",
                "0,2,3,9",
                "-1,0,1",
                "1,0,inf",
                "1,secret,1",
            )
        ),
        *(
            (json.dumps({"1": entry}), ENTRY)
            for entry in (
                {"active": [0], "inactive": [1, 2], "finish_time": 9},
                {"active": [5], "inactive": [1], "finish_time": 9},
                {"active": [0], "inactive": [1]},
                3,
                {"active": ["a"], "inactive": [1], "finish_time": 9},
                {"active": [0], "inactive": [1], "finish_time": 0},
            )
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(written, content, reason):
    name = written(content)
    with pytest.raises(ValueError, match="availability") as error:
        make_availability(name, 2, 0)
    assert str(error.value) == f"availability = {name!r}: {reason}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Always",
        "diurnal",
        "diurnal:0",
        "diurnal:1.5",
        "diurnal:0.5,0",
        "bernoulli:0",
        "bernoulli:1.1",
        "bernoulli:1e-9",
        "bernoulli:0.9999999",
        "bernoulli:0.5,0",
        "bernoulli:0.5,1,2",
        "trace:/no/such",
        "sometimes",
    ],
)
def test_what_is_no_availability_is_refused(text):
    with pytest.raises(ValueError, match=f"^availability = '{text}': "):
        make_availability(text, 3, 0)


# ---- Laws ---------------------------------------------------------------------------------------------------------


@given(st.floats(0.05, 0.95), st.integers(0, 20), st.floats(0, 1))
def test_diurnal_clients_are_there_once_a_period_for_their_share(share, client, spread):
    found = make_availability(f"diurnal:{share:.3f},1000,{spread:.3f}", 3, 1)
    share = float(f"{share:.3f}")
    times = turns(found, client, 10_000.0)
    available = [b - a for a, b in itertools.pairwise(times) if found.is_available(client, a)]
    assert len(available) >= 9
    np.testing.assert_allclose(available, share * 1000, rtol=1e-6)
    # About as often before midnight as after it, where the draws are as narrow as 0: exactly.
    if spread < 5e-4:
        middle = [(a + share * 500) % 1000 for a in times if found.is_available(client, a)]
        np.testing.assert_allclose(np.minimum(middle, np.subtract(1000, middle)), 0, atol=1e-6)


def test_the_fleet_of_a_diurnal_law_comes_and_goes():
    found = make_availability("diurnal:0.25", 400, 0)  # a day, ± 3 hours
    shares = [
        np.mean([found.is_available(client, hour * 3600.0) for client in range(400)]) for hour in range(24)
    ]
    assert np.mean(shares) == pytest.approx(0.25, abs=0.01)
    assert shares[0] > 0.6  # within ± 3 h of their middle: P(|z| < 1) = 0.68
    assert max(shares[9:16]) < 0.05


def test_bernoulli_clients_are_there_in_so_many_slots_independently():
    found = make_availability("bernoulli:0.3,2", 3, 0)
    slots = np.array(
        [[found.is_available(client, 2.0 * slot + 0.5) for slot in range(4000)] for client in range(3)]
    )
    assert slots.mean(axis=1) == pytest.approx([0.3] * 3, abs=4 * (0.21 / 4000) ** 0.5)
    assert abs(np.corrcoef(slots[0, :-1], slots[0, 1:])[0, 1]) < 4 / 4000**0.5
    assert abs(np.corrcoef(slots[0], slots[1])[0, 1]) < 4 / 4000**0.5
    assert all(
        found.is_available(1, 2.0 * slot) == found.is_available(1, 2.0 * slot + 1.99) for slot in range(50)
    )
    expected = [2.0 * slot for slot in range(1, 600) if slots[2, slot] != slots[2, slot - 1]]
    assert turns(found, 2, 1199.0) == expected
    assert found.leaves(0, 0.0) == math.inf  # who began a task ends it
    assert turns(make_availability("bernoulli:1", 3, 0), 0, 99.0) == []
    for share in (0.002, 0.4, 0.998):  # some stay for longer than what is drawn at once
        found = make_availability(f"bernoulli:{share}", 3, 0)
        available = [found.is_available(1, slot) for slot in range(6000)]
        changes = [slot for slot in range(1, 6000) if available[slot] != available[slot - 1]]
        assert [turn for turn in turns(found, 1, 6000.0) if turn < 6000] == changes


# ---- How often clients contribute ----------------------------------------------------------------------------


def played(found: Availability, interval: float | None, time: float, end: float) -> int:
    """Count the tasks that a client ends, second by second of a hundredth, in the plainest way."""
    step, done, left, waits = 100, 0, 0, False
    for tick in range(round(end * step)):
        now = tick / step
        if left:
            left -= 1
            if not left:
                done, waits = done + 1, interval is not None
        available = found.is_available(0, now)
        if left and not available:
            left = 0
        if waits and interval and tick % round(interval * step) == 0:
            waits = False
        if available and not left and not waits:
            left = round(time * step)
    return done


@given(
    st.lists(st.tuples(st.integers(0, 18), st.integers(1, 8)), min_size=1, max_size=4),
    st.integers(1, 60),
    st.sampled_from([None, 0.5, 1.0, 2.5]),
)
@example([(8, 8), (17, 1)], 1, 2.5)  # back before the aggregation that it waits for
@example([(0, 1), (2, 18)], 1, 2.5)  # and so over the end of a period
def test_a_cycle_is_what_a_clock_in_small_steps_counts(pairs, tenths, interval):
    found = ByStretches([Stretches([(float(a), float(min(a + n, 20))) for a, n in pairs], 20.0)])
    time = tenths / 10
    cycle = Cycle(found, 0, interval, time).of_fixed()
    if found.changes(0, 0.0) == math.inf:  # always there
        assert cycle == (time if interval is None else math.ceil(time / interval - 1e-9) * interval)
        return
    number = played(found, interval, time, 60.0) - played(
        found, interval, time, 40.0
    )  # a period's, in the long run
    assert cycle == (20.0 / number if number else math.inf)


def test_a_cycle_of_drawn_tasks_is_the_mean_of_those_played():
    assert Cycle(Always(), 0, None, 2.0).of_drawn(
        lambda task, when: (when + 2.0, task % 2 == 0)
    ) == pytest.approx(4.0)
    found = make_availability("bernoulli:0.5,1", 1, 3)
    # Tasks of 1 s at most begin with a slot in which the client is there: one in every two.
    cycle = Cycle(found, 0, None, 1.0).of_fixed()
    assert cycle == pytest.approx(2.0, rel=4 / 512**0.5)


def mean_of_many(found: Availability, interval: float | None, time: float, tasks: int) -> float:
    """Return the mean seconds between beginnings of tasks that end whoever goes, one after the other."""
    began = now = found.next_available(0, 0.0)
    for _ in range(tasks):
        now += time
        now = now if interval is None else math.ceil(now / interval - 1e-9) * interval
        now = found.next_available(0, now)
    return (now - began) / tasks


@pytest.mark.parametrize("time", [0.03, 1.0, 7.5, 200.0, 300.0, 400.0, 1500.0])
@pytest.mark.parametrize(("share", "interval"), [(0.5, None), (0.05, None), (0.5, 2.5)])
def test_a_task_may_outlast_many_slots_of_bernoulli(share, interval, time):
    # Its wait has a deviation of 1 / share slots at most: 512 tell the mean so well, 32 where it is little of it.
    found = make_availability(f"bernoulli:{share},1", 1, 5)
    mean = mean_of_many(found, interval, time, 100_000 if time < 1 else 4000)
    sure = 5 * (0.002 + 1 / share / mean / 512**0.5)
    assert Cycle(found, 0, interval, time).of_fixed() == pytest.approx(mean, rel=min(sure, 0.4))

    def ends(task: int, when: float) -> tuple[float, bool]:
        return when + time, False

    assert Cycle(found, 0, interval, time).of_drawn(ends) == pytest.approx(mean, rel=min(sure, 0.4))


@pytest.mark.parametrize(
    ("stretches", "time", "cycles"),
    [
        # In its stretch client 1 does three tasks of 10 s, client 0 five.
        ([((0, 50), 100), ((0, 35), 70)], 10.0, [20.0, 70 / 3]),
        ([((0, 10), 24), ((0, 20), 40)], 8.0, [24.0, 20.0]),
    ],
)
def test_a_cycle_is_counted_over_the_clients_own_period(stretches, time, cycles):
    found = ByStretches([Stretches([pair], period) for pair, period in stretches])
    assert [Cycle(found, place, None, time).of_fixed() for place in (0, 1)] == pytest.approx(
        cycles, rel=1e-12
    )
    drawn = [Cycle(found, place, None, time).of_drawn(until_it_goes(found, place, time)) for place in (0, 1)]
    assert drawn == pytest.approx(cycles, rel=1e-9)


def until_it_goes(found: Availability, place: int, time: float) -> Callable[[int, float], tuple[float, bool]]:
    def ends(task: int, when: float) -> tuple[float, bool]:
        leaves = found.leaves(place, when)
        return (leaves, True) if when + time > leaves + 1e-9 else (when + time, False)

    return ends


@pytest.mark.parametrize("interval", [0.7, 1.9, 7.3, 33.0])
def test_of_a_client_whose_period_is_no_whole_number_of_intervals_too(interval):
    # Client 1's is far longer, and says nothing of how often client 0 comes.
    found = ByStretches([Stretches([(1.0, 4.0), (6.5, 9.0)], 10.0), Stretches([(0.0, 50.0)], 86_400.0)])
    number = played(found, interval, 0.6, 7000.0) - played(found, interval, 0.6, 70.0)
    assert Cycle(found, 0, interval, 0.6).of_fixed() == pytest.approx(6930.0 / number, rel=0.01)


def test_a_task_that_begins_with_a_period_is_one_of_that_period():
    # Five periods are 73 intervals, and 5 · 7.3 + 2.21 is more than 2.21 + 36.5 to a computer, or less.
    found = ByStretches([Stretches([(2.21, 5.17)], 7.3)])
    assert Cycle(found, 0, 0.5, 0.595).of_fixed() == pytest.approx(7.3 / 3, rel=1e-9)


def test_tasks_of_drawn_times_are_as_many_where_a_client_is_there_for_a_moment_only():
    found = ByStretches([Stretches([(0.0, 2.0)], 100.0), Stretches([(0.0, 50.0)], 86_400.0)])
    lost = []

    def ends(task: int, when: float) -> tuple[float, bool]:  # every other takes 1 s, else it is lost
        lost.append(task % 2 == 0)
        return when + 1.0, lost[-1]

    assert Cycle(found, 0, None, 1.0).of_drawn(ends) == pytest.approx(100.0)
    assert lost.count(False) >= 512


def test_the_mean_share_over_a_period():
    # Client 0 always; client 1 in the first half, of which the last quarter is too short for its task of 5 s.
    found = ByStretches([Stretches([(0.0, 20.0)], 20.0), Stretches([(0.0, 10.0)], 20.0)])
    p = np.array([0.25, 0.75])

    def shares(those: Any) -> np.ndarray:
        return np.asarray(p[list(those)] / p[list(those)].sum())

    mean = over_time(found, [0, 1], [5.0, 5.0], shares)
    assert mean == pytest.approx([0.25 * 0.25 + 0.75 * 1.0, 0.25 * 0.75], rel=1e-12)


@pytest.mark.parametrize(
    "periods", [(100.0, 70.0, 70.0), (100.0, 70.0, 900.0), (86_400.0, 900.0, 61.3), (7.0, 7.0, 7.0)]
)
def test_the_mean_share_where_clients_have_periods_of_their_own(periods):
    # The first is there for half of its time, the second for all, the third for a third: all at times that have
    # nothing to do with each other, so that each pair is there as often as its parts say.
    parts, p = (0.5, 1.0, 1 / 3), np.array([0.2, 0.3, 0.5])
    found = ByStretches(
        [Stretches([(0.0, part * each)], each) for part, each in zip(parts, periods, strict=True)]
    )

    def shares(those: Any) -> np.ndarray:
        return np.asarray(p[list(those)] / p[list(those)].sum())

    mean = over_time(found, [0, 1, 2], [0.0, 0.0, 0.0], shares)
    expected = np.zeros(3)
    for first, third in itertools.product((True, False), repeat=2):
        available = [place for place, is_there in enumerate((first, True, third)) if is_there]
        if periods[0] == periods[2]:  # then the third is there only when the first is
            often = {(True, True): 1 / 3, (True, False): 1 / 6, (False, True): 0.0, (False, False): 0.5}[
                first, third
            ]
        else:
            often = 0.5 * (1 / 3 if third else 2 / 3)
        expected[available] += often * shares(available)
    assert mean == pytest.approx(expected, abs=0.005)
    assert mean.sum() == pytest.approx(1.0)
