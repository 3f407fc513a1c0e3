"""The graph of a secure sum: its degrees, its bounds by simulation, and the terms that can't be."""

import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components

from strategies.secure.graph import Terms, core_of, graph_of, terms_for, usual_neighbours


@pytest.mark.parametrize(("number", "k"), [(3, 2), (6, 5), (9, 4), (50, 12)])
def test_each_has_k_neighbours_and_is_theirs(number: int, k: int) -> None:
    graph = graph_of(range(100, 100 + number), k, np.random.default_rng(0))
    assert all(len(set(near)) == k and list(near) == sorted(near) for near in graph.values())
    assert all(each in graph[other] and other != each for each, near in graph.items() for other in near)
    rows = np.array([[other in graph[each] for other in sorted(graph)] for each in sorted(graph)])
    assert connected_components(rows)[0] == 1


def test_few_clients_mask_with_nearly_all_and_many_with_few() -> None:
    assert [usual_neighbours(number) for number in (3, 4, 5, 30)] == [2, 3, 4, 22]
    assert [usual_neighbours(number) for number in (10, 100, 1000)] == [
        8,
        60,
        166,
    ]  # as in docs/secure-sums.md
    assert terms_for(10) == Terms(8, 5)


def test_a_third_may_go_of_300_clients() -> None:
    number, rng = 300, np.random.default_rng(1)
    k, t = terms_for(number)
    assert k < number - 1
    for _ in range(50):
        graph = graph_of(range(number), k, rng)
        stayed = set(rng.permutation(number)[number // 3 :].tolist())
        assert core_of(graph, stayed, t) == stayed
        assert all(len(stayed.intersection(graph[each])) >= t for each in range(number))


def test_the_core_is_found_by_taking_out_whoever_has_too_few() -> None:
    line = {0: (1,), 1: (0, 2), 2: (1, 3), 3: (2, 4, 5), 4: (3, 5), 5: (3, 4)}
    assert core_of(line, set(line), 2) == {3, 4, 5}
    assert core_of(line, {0, 1, 2, 3, 4}, 2) == set()


@pytest.mark.parametrize(
    ("number", "keys", "said"),
    [
        (2, (), "secure_sums: 2 clients in a sum; allowed are 3 or more"),
        (3, (0, 4), r"secure_threshold = 4: each of 3 clients in a sum has 2 neighbours; .* or 2 to 2"),
        (9, (4, 2), r"secure_threshold = 2: each of 9 clients .* has 4 neighbours; .* or 3 to 4"),
        (5, (5, 0), r"secure_neighbours = 5: 5 clients are in a sum; .* or 2 to 4"),
    ],
)
def test_terms_that_cant_be_are_one_line(number: int, keys: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        terms_for(number, *keys)
    assert "\n" not in str(raised.value)
