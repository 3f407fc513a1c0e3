"""Participation in turns: each client once in B rounds, always the same, and its d_i = p_i B."""

from collections import Counter

import numpy as np
import pytest

from strategies import FedAvg
from strategies.clock import WallClock
from strategies.core.conflicts import ConflictError
from strategies.flower.errors import RunError
from strategies.rounds.participation import Participation


def test_each_client_takes_part_in_its_turn(federation, model, train_config):
    # Δ_i = 1, .5, −1 and p_i = 1/8, 2/8, 5/8, as in test_round.py: clients 0 and 2 in rounds 1, 3, …, 1 in 2, 4, …
    grid = federation()
    strategy = FedAvg(participation="turns", fraction_train=0.5)
    first = strategy.start(grid, model(1.0), num_rounds=1, train_config=train_config())
    # 2 (1/8 · 1 − 5/8 · 1)
    np.testing.assert_allclose(first.arrays["w"].numpy(), [1 + 2 * (1 / 8 - 5 / 8)], rtol=1e-6)
    before = len(grid.asked())
    strategy.start(grid, model(1.0), num_rounds=6, train_config=train_config())
    assert Counter(grid.asked()[before:]) == {0: 3, 1: 3, 2: 3}
    assert [sorted(part) for part in (grid.asked()[before:][:2], grid.asked()[before:][2:3])] == [[0, 2], [1]]


def test_weights_of_a_pass_are_the_objectives():
    scheme, p = Participation.parse("turns", 0.25), np.arange(1, 11) / 55
    parts = [scheme.weigh(range(turn, 10, 4), p) for turn in range(4)]
    assert sorted(client for part in parts for client in part.clients) == list(range(10))
    assert sum(sum(part.weights) for part in parts) / 4 == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"fraction_train": 0.3}, {"fraction_train", "participation"}),
        ({"availability": "bernoulli:0.5"}, {"participation", "availability"}),
        ({"round_deadline": 2.0}, {"round_deadline", "participation"}),
        ({"over_select": 0.5}, {"over_select", "participation"}),
    ],
)
def test_what_breaks_the_order_is_refused(options, keys):
    with pytest.raises(ConflictError) as raised:
        FedAvg(**{"participation": "turns", "fraction_train": 0.5, **options})
    assert set(raised.value.keys) == keys


def test_there_are_as_many_clients_as_rounds_of_a_pass(federation, model):
    with pytest.raises(RunError, match=r"needs 4 clients or more, there are 3"):
        FedAvg(participation="turns", fraction_train=0.25).start(federation(), model(1.0), num_rounds=1)


@pytest.mark.parametrize(
    ("options", "asked", "ends"),
    [
        ({"participation": "turns", "fraction_train": 1 / 3}, [[0], [1], [], [0], [1]], None),
        (
            {"participation": "paired"},
            [[1, 2]],
            r"participation = 'paired': a round needs 2 clients, there is 1",
        ),
    ],
)
def test_a_device_that_leaves_misses_its_turn_and_a_pair_is_two(
    federation, model, train_config, options, asked, ends
):
    grid, rounds = federation(), []

    def leave(progress):
        rounds.append(sorted(grid.asked()[sum(map(len, rounds)) :]))
        if progress.aggregation == 1:
            for client in (2,) if ends is None else (0, 1):
                grid.node(client).present = False

    strategy = FedAvg(clock=WallClock(), client_weights="uniform", min_clients=1, observer=leave, **options)
    run = {"num_rounds": 5, "timeout": 5.0, "train_config": train_config()}
    if ends is None:
        strategy.start(grid, model(1.0), **run)
    else:
        with pytest.raises(RunError, match=ends):
            strategy.start(grid, model(1.0), **run)
    assert rounds[1:] == asked
