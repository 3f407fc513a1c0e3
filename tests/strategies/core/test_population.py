"""What each client counts, p_i, alone: by size, alike, with a size that isn't known, and with some that are away."""

from types import SimpleNamespace
from typing import Any

import pytest

from strategies.core.population import Population
from tests.strategies.parts import client, run_of, safeguards

ALL = SimpleNamespace(sizes=lambda clients, sizes, others: list(sizes))


def population(kind: str, *sizes: int | None, absent: Any = None) -> Population:
    clients = [client(index, size) for index, size in enumerate(sizes)]
    return Population(run_of(clients), None, ALL, kind, absent=absent)  # type: ignore[arg-type]


def test_by_size_and_alike():
    assert population("samples", 1, 2, 5).client_weights() == {0: 0.125, 1: 0.25, 2: 0.625}
    assert population("uniform", 1, 2, 5, 8).client_weights() == dict.fromkeys(range(4), 0.25)
    assert population("samples").client_weights() == {}


def test_a_size_that_is_not_known_counts_as_the_mean_of_the_others():
    # sizes 2, ?, 4: the mean is 3 of 9
    assert population("samples", 2, None, 4).client_weights() == pytest.approx({0: 2 / 9, 1: 3 / 9, 2: 4 / 9})
    assert population("samples", None, None).client_weights() == {0: 0.5, 1: 0.5}


def test_a_lie_about_the_size_makes_no_other_count_more():
    part = population("samples", 100, 100, 100, 10**12, None)
    part.safeguards = safeguards("on", size_ratio=5.0)
    assert part.client_weights() == pytest.approx({0: 0.1, 1: 0.1, 2: 0.1, 3: 0.5, 4: 0.2})


def test_those_that_are_away_share_too():
    absent = SimpleNamespace(active_clients=lambda clients: [*clients, client(2, 5)])
    assert population("samples", 1, 2, absent=absent).client_weights() == {0: 0.125, 1: 0.25, 2: 0.625}


def test_safeguards_bound_the_sizes():
    part = population("samples", 1, 2, 50)
    part.safeguards = SimpleNamespace(sizes=lambda clients, sizes, others: [min(size, 5) for size in sizes])  # type: ignore[assignment]
    assert part.client_weights() == {0: 0.125, 1: 0.25, 2: 0.625}
