"""The ends of the intervals between aggregations, by hand."""

import pytest

from strategies.clock import RESOLUTION, VirtualClock
from strategies.timing.scheduler import NEVER, RealTimeScheduler


def scheduler() -> RealTimeScheduler:
    made = RealTimeScheduler(VirtualClock(), "F0", 0, 0.0)
    made.clock.wait_until(10.0)
    made.begin()  # the clock begins anew, too
    assert made.now() == 0.0
    return made


def test_an_interval_of_another_length_begins_where_the_last_one_ended():
    pace = scheduler()
    assert (pace.tick(None), pace.tick(4.0), pace.tick(2.0)) == (NEVER, 4.0, 2.0)
    for end in (2.0, 4.0):
        pace.clock.wait_until(end)
        pace.count_interval(2.0)
    assert pace.tick(2.0) == 6.0
    assert pace.tick(5.0) == 9.0  # 4 + 5
    pace.clock.wait_until(9.0)
    pace.count_interval(5.0)
    assert (pace.tick(5.0), pace.tick(1.0)) == (14.0, 10.0)


def test_a_resumed_run_knows_where_the_last_interval_ended():
    pace, other = scheduler(), scheduler()
    for end, interval in ((2.0, 2.0), (4.0, 2.0), (7.0, 3.0)):
        pace.clock.wait_until(end)
        pace.count_interval(interval)
    other.restore(pace.state())
    assert [other.tick(interval) for interval in (3.0, 0.5)] == [10.0, 7.5]
    assert [pace.tick(interval) for interval in (3.0, 0.5)] == [10.0, 7.5]


@pytest.mark.parametrize("interval", [2.0, 3.0])
def test_intervals_that_were_missed_are_not_made_up_for(interval):
    pace = scheduler()
    pace.clock.wait_until(2.0)
    pace.count_interval(2.0)
    pace.clock.wait_until(20.0)
    pace.count_interval(interval)
    assert pace.tick(interval) == 20.0 + interval


@pytest.mark.parametrize("interval", [2.5, 0.3, 0.1, 1 / 3, 7e-4])
@pytest.mark.parametrize("until", [0.2, 1.0, 2.3, 3.1])
@pytest.mark.parametrize("budget", [0.0, 2.05])
def test_passing_over_intervals_counts_as_many_as_one_after_the_other(interval, until, budget):
    ticks = []
    for passes in (False, True):
        pace = scheduler()
        pace.budget = budget
        while (end := pace.tick(interval)) + RESOLUTION < until and not pace.over(end):
            pace.clock.wait_until(end)
            pace.count_interval(interval)
            if passes:
                pace.pass_over(interval, until)
        ticks.append((pace.ticks, pace.now(), pace.tick(interval)))
    assert ticks[0] == ticks[1]
