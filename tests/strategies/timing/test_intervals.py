"""The ends of the intervals between aggregations, by hand."""

import pytest

from strategies.clock import RESOLUTION, VirtualClock
from strategies.timing.scheduler import NEVER, RealTimeScheduler


def new_scheduler() -> RealTimeScheduler:
    made = RealTimeScheduler(VirtualClock(), "F0", 0, 0.0)
    made.clock.wait_until(10.0)
    made.begin()  # the clock begins anew, too
    assert made.now() == 0.0
    return made


def test_an_interval_of_another_length_begins_where_the_last_one_ended():
    scheduler = new_scheduler()
    assert (scheduler.tick(None), scheduler.tick(4.0), scheduler.tick(2.0)) == (NEVER, 4.0, 2.0)
    for end in (2.0, 4.0):
        scheduler.clock.wait_until(end)
        scheduler.count_interval(2.0)
    assert scheduler.tick(2.0) == 6.0
    assert scheduler.tick(5.0) == 9.0  # 4 + 5
    scheduler.clock.wait_until(9.0)
    scheduler.count_interval(5.0)
    assert (scheduler.tick(5.0), scheduler.tick(1.0)) == (14.0, 10.0)


def test_a_resumed_run_knows_where_the_last_interval_ended():
    scheduler, other = new_scheduler(), new_scheduler()
    for end, interval in ((2.0, 2.0), (4.0, 2.0), (7.0, 3.0)):
        scheduler.clock.wait_until(end)
        scheduler.count_interval(interval)
    other.restore(scheduler.state())
    assert [other.tick(interval) for interval in (3.0, 0.5)] == [10.0, 7.5]
    assert [scheduler.tick(interval) for interval in (3.0, 0.5)] == [10.0, 7.5]


@pytest.mark.parametrize("interval", [2.0, 3.0])
def test_intervals_that_were_missed_are_not_made_up_for(interval):
    scheduler = new_scheduler()
    scheduler.clock.wait_until(2.0)
    scheduler.count_interval(2.0)
    scheduler.clock.wait_until(20.0)
    scheduler.count_interval(interval)
    assert scheduler.tick(interval) == 20.0 + interval


@pytest.mark.parametrize("interval", [2.5, 0.3, 0.1, 1 / 3, 7e-4])
@pytest.mark.parametrize("until", [0.2, 1.0, 2.3, 3.1])
@pytest.mark.parametrize("budget", [0.0, 2.05])
def test_passing_over_intervals_counts_as_many_as_one_after_the_other(interval, until, budget):
    ticks = []
    for passes in (False, True):
        scheduler = new_scheduler()
        scheduler.budget = budget
        while (end := scheduler.tick(interval)) + RESOLUTION < until and not scheduler.over(end):
            scheduler.clock.wait_until(end)
            scheduler.count_interval(interval)
            if passes:
                scheduler.pass_over(interval, until)
        ticks.append((scheduler.ticks, scheduler.now(), scheduler.tick(interval)))
    assert ticks[0] == ticks[1]
