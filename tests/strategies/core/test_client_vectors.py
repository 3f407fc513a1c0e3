"""A vector of each client, and what a method remembers, alone: rows, sums by hand, in memory and in a file, saved."""

import numpy as np
import pytest

from strategies.core.client_vectors import ClientVectors, pooled, squared_distances
from strategies.core.run_state import Memory


@pytest.mark.parametrize("limit", [4.0, 0.0])  # GiB: in memory, in a file
def test_rows_are_made_as_clients_come_and_begin_as_the_first_vector(limit):
    vectors = ClientVectors(np.array([1.0, 2.0]), 1, limit)
    vectors.put(7, np.array([3.0, 5.0]))
    assert vectors.get(2).tolist() == [1.0, 2.0]  # a second row, where there was one
    assert vectors.get(7).tolist() == [3.0, 5.0]
    assert vectors.clients == [7, 2]
    assert vectors.matrix.dtype == np.float32
    # 2 (3, 5) + 10 (1, 2), and of one without a row 100 (1, 2)
    assert vectors.weighted_sum({7: 2.0, 2: 10.0, 4: 100.0}).tolist() == [116.0, 230.0]


def test_one_that_never_put_a_vector_adds_nothing_where_they_begin_with_zero():
    vectors = ClientVectors(np.zeros(2), 3)
    vectors.put(1, np.array([1.0, -1.0]))
    assert vectors.weighted_sum({0: 5.0, 1: 0.5}).tolist() == [0.5, -0.5]
    assert vectors.clients == [1]  # nobody got a row for being asked about


def test_sums_and_distances_by_hand():
    models = np.array([[1, 2], [3, 4], [0, -1]], dtype=np.float32)
    assert pooled(np.array([[0.5, 2.0], [1.0, 0.0]]), models, [2, 0]).tolist() == [[2.0, 3.5], [0.0, -1.0]]
    # to (1, 2): 0, 2² + 2² = 8, 1² + 3² = 10; the second column left out: 0, 4, 1
    assert squared_distances(models, [0, 1, 2], [0], np.array([], dtype=int))[0] == pytest.approx([0, 8, 10])
    assert squared_distances(models, [0, 1, 2], [0], np.array([1]))[0] == pytest.approx([0, 4, 1])


def test_a_memory_comes_back_with_its_vectors():
    memory = Memory()
    memory["count"], memory["last"] = 3, np.array([1.0, 2.0])
    memory.client_vectors["c"] = ClientVectors(np.array([0.5, 0.0]), 2)
    memory.client_vectors["c"].put(4, np.array([9.0, 8.0]))
    again = Memory.restored(memory.state())
    assert (again["count"], again["last"].tolist()) == (3, [1.0, 2.0])
    assert again.client_vectors["c"].get(4).tolist() == [9.0, 8.0]
    assert again.client_vectors["c"].get(5).tolist() == [0.5, 0.0]
    assert again["last"] is not memory["last"]
    assert ClientVectors.restored({}, "c") is None
