"""The ends of the intervals between aggregations, by hand."""

import pytest

from strategies.clock import RESOLUTION, VirtualClock
from strategies.timing.scheduler import NEVER, RealTimeScheduler


def scheduler() -> RealTimeScheduler:
    made = RealTimeScheduler(VirtualClock(), "F0", 0, 0.0)
    made.clock.wait_until(10.0)
    made.begin()
    return made


def test_an_interval_of_another_length_begins_where_the_last_one_ended():
    pace = scheduler()
    assert (pace.tick(None), pace.tick(4.0), pace.tick(2.0)) == (NEVER, 14.0, 12.0)
    for end in (12.0, 14.0):
        pace.clock.wait_until(end)
        pace.count_interval(2.0)
    assert pace.tick(2.0) == 16.0
    assert pace.tick(5.0) == 19.0  # 14 + 5
    pace.clock.wait_until(19.0)
    pace.count_interval(5.0)
    assert (pace.tick(5.0), pace.tick(1.0)) == (24.0, 20.0)


def test_a_resumed_run_knows_where_the_last_interval_ended():
    pace, other = scheduler(), scheduler()
    for end, interval in ((12.0, 2.0), (14.0, 2.0), (17.0, 3.0)):
        pace.clock.wait_until(end)
        pace.count_interval(interval)
    other.restore(pace.state())
    assert [other.tick(interval) for interval in (3.0, 0.5)] == [20.0, 17.5]
    assert [pace.tick(interval) for interval in (3.0, 0.5)] == [20.0, 17.5]


@pytest.mark.parametrize("interval", [2.0, 3.0])
def test_intervals_that_were_missed_are_not_made_up_for(interval):
    pace = scheduler()
    pace.clock.wait_until(12.0)
    pace.count_interval(2.0)
    pace.clock.wait_until(30.0)
    pace.count_interval(interval)
    assert pace.tick(interval) == 30.0 + interval


@pytest.mark.parametrize("interval", [2.5, 0.3, 0.1, 1 / 3, 7e-4])
@pytest.mark.parametrize("until", [10.2, 11.0, 12.3, 13.1])
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
