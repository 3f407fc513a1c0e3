"""The noise of a tree: which nodes a model has, what a checkpoint keeps, and its limits; by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import FedAvg, FedBuff, streams
from strategies.core.conflicts import ConflictError
from strategies.updates.pipeline import Noise
from strategies.updates.tree_noise import TreeNoise

Make = Callable[..., Any]
SIZE = 4
PRIVATE = {"client_weights": "uniform", "dp": "central", "dp_clipping_norm": 0.5}


def rng_of(number: int) -> np.random.Generator:
    return streams.generator(7, "central-noise", number)


def noises(restart: int, rounds: int, weights: dict[int, float] | None = None) -> np.ndarray:
    """Return the model's noise after each round (rounds, D), with z = 2, S = 3, and d = 1 unless given."""
    tree, model, after = TreeNoise(restart, rng_of), np.zeros(SIZE), []
    for number in range(1, rounds + 1):
        tree(model, Noise(2.0, 3.0), (weights or {}).get(number, 1.0), number)
        after.append(model.copy())
    return np.array(after)


def node(number: int, weight: float = 1.0) -> np.ndarray:
    """Return the noise of the node that is complete after a round: z S d times a normal vector of that round."""
    return np.asarray(rng_of(number).normal(0.0, 2.0 * (3.0 * weight), SIZE))


def test_a_model_has_the_noise_of_the_nodes_that_its_rounds_binary_digits_name():
    found = noises(0, 8)
    covering = {1: [1], 2: [2], 3: [2, 3], 4: [4], 5: [4, 5], 6: [4, 6], 7: [4, 6, 7], 8: [8]}
    for number, nodes in covering.items():
        np.testing.assert_allclose(found[number - 1], sum(node(last) for last in nodes), rtol=0, atol=1e-12)


def test_after_a_restart_the_former_trees_noise_stays():
    found = noises(3, 7)
    covering = {3: [2, 3], 4: [2, 3, 4], 5: [2, 3, 5], 6: [2, 3, 5, 6], 7: [2, 3, 5, 6, 7]}
    for number, nodes in covering.items():
        np.testing.assert_allclose(found[number - 1], sum(node(last) for last in nodes), rtol=0, atol=1e-12)


def test_a_node_has_the_noise_of_its_largest_weight():
    found = noises(0, 4, {1: 0.5, 2: 0.25, 3: 2.0, 4: 1.0})
    np.testing.assert_allclose(found[1], node(2, 0.5), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[2], node(2, 0.5) + node(3, 2.0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[3], node(4, 2.0), rtol=0, atol=1e-12)


@given(restart=st.integers(0, 9), should_stop=st.integers(1, 20), missed=st.sets(st.integers(2, 20)))
def test_it_goes_on_from_a_checkpoint_also_past_rounds_without_a_model(restart, should_stop, missed):
    def model(stop: int) -> np.ndarray:
        tree, total = TreeNoise(restart, rng_of), np.zeros(SIZE)
        for number in [number for number in range(1, 22) if number not in missed]:
            if number > stop:
                state, tree, stop = tree.state(), TreeNoise(restart, rng_of), 99
                tree.restore(state)
            tree(total, Noise(1.0, 1.0), 1.0, number)
        return total

    np.testing.assert_array_equal(model(should_stop), model(99))


def trained(grid: Any, model: Make, config: Any, rounds: int = 5, **options: Any) -> np.ndarray:
    strategy = FedAvg(seed=3, **options)
    strategy.run_options.deterministic_noise = True
    result = strategy.start(grid, model(1.0), num_rounds=rounds, train_config=config)
    return np.asarray(result.arrays["w"].numpy())


def test_a_tree_of_one_round_is_the_gaussian_mechanism_bit_for_bit(federation, model, train_config):
    values = [
        trained(federation(), model, train_config(), **PRIVATE, **own)
        for own in ({"dp_mechanism": "tree", "dp_restart": 1}, {}, {"dp_mechanism": "tree"})
    ]
    np.testing.assert_array_equal(values[0], values[1])
    assert values[2] != values[1]


@pytest.mark.parametrize("restart", [0, 2])
def test_without_noise_it_is_fedavg_with_clipping_bit_for_bit(restart, federation, model, train_config):
    silent = {**PRIVATE, "dp_noise_multiplier": 0.0, "dp_mechanism": "tree", "dp_restart": restart}
    clipped = {"client_weights": "uniform", "update_norm_bound": 0.5}
    private = trained(federation(), model, train_config(), **silent)
    np.testing.assert_array_equal(private, trained(federation(), model, train_config(), **clipped))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"participation": "poisson", "fraction_train": 0.5}, "participation"),
        ({"participation": "uniform", "fraction_train": 0.5}, "participation"),
        ({"dp_clipping_norm": 0.0}, "dp_clipping_norm"),
        ({"round_deadline": 3.0}, "round_deadline"),
    ],
)
def test_rounds_of_which_nobody_knows_who_takes_part_are_refused(options, key):
    with pytest.raises(ConflictError) as caught:
        FedAvg(**{**PRIVATE, "dp_mechanism": "tree", **options})
    assert caught.value.keys == ("dp", "dp_mechanism", key)


def test_without_rounds_there_is_no_tree():
    with pytest.raises(TypeError, match="dp_mechanism"):
        FedBuff(**PRIVATE, dp_mechanism="tree")
