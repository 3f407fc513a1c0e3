"""Clients by index: what a sequence holds when clients come and go, and how much of it is made anew."""

import pytest

from strategies import streams
from strategies.clients.by_index import BLOCK, ByIndex
from tests.strategies.parts import client


@pytest.mark.parametrize("number", [0, 1, BLOCK, 3 * BLOCK + 1])
def test_a_sequence_holds_the_clients_of_then_in_the_order_of_their_index(number):
    rng = streams.generator(1, "clients-that-come-and-go", number)
    expected = {index: client(index) for index in range(0, 2 * number, 2)}
    clients = ByIndex(expected.values())
    for _ in range(40):
        before, held = clients, list(clients)
        indices = rng.integers(0, 2 * number + 9, 60).tolist()
        changes = {index: client(index) if rng.random() < 0.6 else None for index in indices}
        expected = {index: each for index, each in (expected | changes).items() if each is not None}
        clients = clients.replaced(changes)
        assert list(clients) == [expected[index] for index in sorted(expected)]
        assert (len(clients), bool(clients), list(before)) == (len(expected), bool(expected), held)
        for place, index in enumerate(sorted(expected)):
            assert clients.find(index) == (place, expected[index])
            assert clients[place] is expected[index]
        absent = next(index for index in range(2 * number + 99) if index not in expected)
        assert clients.find(absent) == (sum(index < absent for index in expected), None)
    assert clients[-1:] == list(clients)[-1:]
    with pytest.raises(IndexError):
        clients[len(clients)]


def test_clients_that_come_one_after_the_other_are_in_blocks_that_stay_short():
    clients: ByIndex = ByIndex()
    for index in range(5 * BLOCK):
        clients = clients.replaced({index: client(index)})
    lengths = [len(block) for block in clients._blocks]
    assert sum(lengths) == 5 * BLOCK
    assert max(lengths) < 2 * BLOCK
    for index in range(5 * BLOCK):
        clients = clients.replaced({index: None})
    assert list(clients) == clients._blocks == []


@pytest.mark.parametrize("number", [10 * BLOCK, 100 * BLOCK])
@pytest.mark.parametrize("comes", [True, False])
def test_a_client_that_comes_or_goes_costs_one_block_however_many_others_there_are(number, comes):
    clients = ByIndex(client(index) for index in range(0, 2 * number, 2))
    index = number + 1 if comes else number
    after = clients.replaced({index: client(index) if comes else None})
    shared = {id(block) for block in clients._blocks}
    assert sum(len(block) for block in after._blocks if id(block) not in shared) == BLOCK + (
        1 if comes else -1
    )
