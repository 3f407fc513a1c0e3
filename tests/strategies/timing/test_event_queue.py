"""The event queue alone: by due time, those due together by client, then first come, first served."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.clock import RESOLUTION
from strategies.timing.event_queue import EventQueue


def drain(queue: EventQueue) -> list[tuple[float, Any]]:
    return [queue.pop() for _ in range(len(queue))]


def test_items_come_by_due_time():
    queue = EventQueue()
    for due, client, item in [(2.0, 0, "late"), (0.5, 2, "first"), (1.0, 1, "then")]:
        queue.push(due, client, item)
    assert queue.next_due() == 0.5
    assert drain(queue) == [(0.5, "first"), (1.0, "then"), (2.0, "late")]
    assert queue.next_due() == float("inf")
    assert len(queue) == 0


@pytest.mark.parametrize("seed", range(5))
def test_equal_due_times_come_in_client_order_whatever_the_order_of_pushing(seed):
    # .1 + .2 is a bit more than .3; half a nanosecond is equal too, two nanoseconds aren't.
    entries = [(0.3, 3), (0.1 + 0.2, 1), (0.3 + 5e-10, 0), (0.3, 2), (0.3 + 2e-9, 4), (0.3 - 2e-9, 5)]
    random.Random(seed).shuffle(entries)
    queue = EventQueue()
    for due, client in entries:
        queue.push(due, client, client)
    assert [client for _, client in drain(queue)] == [5, 0, 1, 2, 3, 4]


def test_two_items_of_one_client_that_are_due_at_once_come_first_in_first_out():
    queue = EventQueue()
    for item in "abc":
        queue.push(1.0, 7, item)
    assert [item for _, item in drain(queue)] == ["a", "b", "c"]


# A grid of half nanoseconds makes ties, near ties and chains of near ties.
ENTRIES = st.lists(st.tuples(st.integers(0, 8).map(lambda k: 1 + k * 5e-10), st.integers(0, 9)), max_size=15)


@given(entries=ENTRIES, wait=st.lists(st.integers(0, 3), max_size=15), data=st.data())
def test_no_item_is_ever_lost_or_given_twice(entries, wait, data):
    queue, given_out = EventQueue(), []
    for number, (due, client) in enumerate(entries):
        queue.push(due, client, number)
        for _ in range(min(wait[number] if number < len(wait) else 0, len(queue))):  # pops in between
            given_out.append(queue.pop())
    given_out += drain(queue)
    assert sorted(item for _, item in given_out) == list(range(len(entries)))
    assert all(due == entries[item][0] for due, item in given_out)


@given(
    entries=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), unique_by=lambda e: e[1]),
    data=st.data(),
)
def test_the_order_is_by_time_then_client_and_does_not_depend_on_pushing(entries, data):
    shuffled = data.draw(st.permutations(entries))
    orders = []
    for some in (entries, shuffled):
        queue = EventQueue()
        for step, client in some:
            queue.push(1 + step * 5e-10, client, client)
        orders.append(drain(queue))
    assert orders[0] == orders[1]
    # No item comes before one that is due more than a nanosecond earlier.
    times = [due for due, _ in orders[0]]
    assert all(later > earlier - 1.0001e-9 for i, earlier in enumerate(times) for later in times[i:])


class Plain:
    """The queue by its definition: of all that are due within RESOLUTION of the earliest, the least client's."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, int]] = []

    def push(self, due: float, client: int, item: int) -> None:
        self.entries.append((due, client, item))

    def pop(self) -> tuple[float, int]:
        last = min(self.entries)[0] + RESOLUTION
        found = min((entry for entry in self.entries if entry[0] <= last), key=lambda entry: entry[1:])
        self.entries.remove(found)
        return found[0], found[2]


# Also what is due before everything that is in the queue already.
STEPS = st.lists(
    st.none() | st.tuples(st.integers(0, 8).map(lambda k: 1 + k * 5e-10), st.integers(0, 9)), max_size=40
)


@given(steps=STEPS)
def test_it_gives_what_its_definition_gives_whenever_items_are_added(steps):
    queue, plain = EventQueue(), Plain()
    for item, step in enumerate(steps):
        if step is not None:
            queue.push(*step, item)
            plain.push(*step, item)
        elif plain.entries:
            assert queue.next_due() == min(plain.entries)[0]
            assert queue.pop() == plain.pop()
        assert len(queue) == len(plain.entries)
    assert sorted(queue) == sorted((due, item) for due, _, item in plain.entries)
    assert drain(queue) == [plain.pop() for _ in range(len(plain.entries))]


def test_items_that_are_due_together_are_compared_n_log_n_times():
    # The number of comparisons, not the time: n log n of them, not n² / 2 = 8 million.
    class Client(int):
        compared = 0

        def __lt__(self, other: int) -> bool:
            Client.compared += 1
            return int(self) < int(other)

    queue = EventQueue()
    for client in range(4000):
        queue.push(1.0, Client(client), client)
    assert [item for _, item in drain(queue)] == list(range(4000))
    assert Client.compared < 400_000
