"""The event queue alone: by due time, those that are due together by client, then first come, first served."""

from hypothesis import given
from hypothesis import strategies as st

from strategies.clock import RESOLUTION
from strategies.events.event_queue import EventQueue
from strategies.timing.availability import NEVER


def emptied(queue: EventQueue) -> list:
    return [queue.pop()[1] for _ in range(len(queue))]


def test_equal_within_the_clocks_resolution_comes_by_client() -> None:
    queue = EventQueue()
    assert queue.next_due() == NEVER
    for due, client, item in (
        (2.0, 0, "late"),
        (1.0, 5, "b"),
        (1.0 + RESOLUTION / 2, 1, "a"),
        (1.0, 5, "c"),
        (1.0 + 3 * RESOLUTION, 0, "d"),
    ):
        queue.push(due, client, item)
    assert (len(queue), queue.next_due()) == (5, 1.0)
    assert sorted(item for _, item in queue) == ["a", "b", "c", "d", "late"]
    assert queue.pop() == (1.0 + RESOLUTION / 2, "a")
    assert emptied(queue) == ["b", "c", "d", "late"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3))))
def test_any_events_come_in_order(events: list[tuple[int, int]]) -> None:
    queue = EventQueue()
    for number, (due, client) in enumerate(events):
        queue.push(due, client, (due, client, number))
    assert emptied(queue) == sorted((due, client, number) for number, (due, client) in enumerate(events))
