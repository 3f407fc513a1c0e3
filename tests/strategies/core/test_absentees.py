"""Clients that are away and go on counting, alone: who they are, for how long, and what is saved of them."""

import numpy as np

from strategies.clients.client_statistics import ClientStatistics
from strategies.core.population import ABSENCE, AbsentClients
from tests.strategies.parts import client, run_of

THREE = [client(0, 4), client(1, None), client(2, 6)]


def absentees(worked: tuple[int, ...] = (0, 1)) -> AbsentClients:
    client_stats = ClientStatistics()
    for index in worked:
        client_stats[index].accepted += 1
    return AbsentClients(run_of(THREE), client_stats)


def indices(part: AbsentClients, here: list) -> list[int]:
    return [each.index for each in part.active_clients(here)]


def test_of_those_that_are_away_only_those_count_whose_work_has_counted():
    part = absentees()
    assert part.active_clients(THREE) is THREE
    part.refresh(here := THREE[2:])
    assert indices(part, here) == [0, 1, 2]
    part = absentees(worked=())
    part.refresh(here)
    assert indices(part, here) == [2]


def test_one_that_comes_back_counts_once_and_one_that_stays_away_for_long_no_longer():
    part = absentees()
    part.refresh(THREE[1:])
    part.refresh(THREE)
    assert indices(part, THREE) == [0, 1, 2]
    part.refresh(THREE[1:])
    part._run.aggregations = ABSENCE - 1
    part.refresh(THREE[1:])
    assert indices(part, THREE[1:]) == [0, 1, 2]
    part._run.aggregations = ABSENCE
    part.refresh(THREE[1:])
    assert indices(part, THREE[1:]) == [1, 2]


def test_a_state_has_index_size_and_since_when_one_is_away():
    part = absentees()
    part._run.aggregations = 4
    part.refresh(THREE[1:])
    part._run.clients = THREE[1:]
    rows = part.state()["counting"]
    assert np.array_equal(rows, [[0, 4, 5], [1, np.nan, 0]], equal_nan=True)
    again = absentees()
    again.restore({"aggregations": 4, "counting": rows})
    assert [(c.index, c.num_examples) for c in again.active_clients([])] == [(0, 4), (1, None)]
