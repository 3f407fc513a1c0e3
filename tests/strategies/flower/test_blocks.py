"""Arithmetic block by block: the values of whole vectors, of more than one block and of a part of one."""

import math
import warnings

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies.flower.arrays import (
    BLOCK,
    ArraysMismatchError,
    Layout,
    add_weighted,
    clip_update,
    distance,
)

SIZES = [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


@pytest.mark.parametrize("size", SIZES)
def test_a_weighted_update_is_added_to_the_same_bits(size):
    rng = np.random.default_rng(size)
    total, update = rng.normal(size=size), rng.normal(size=size)
    expected = total + 0.3 * update
    add_weighted(total, 0.3, update)
    assert np.array_equal(total, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_distance_is_that_of_the_exact_sum(size, dtype):
    rng = np.random.default_rng(size)
    model, base = rng.normal(size=size), rng.normal(size=size).astype(dtype)
    exact = math.sqrt(math.fsum((model - base) ** 2))
    assert distance(model, base) == pytest.approx(exact, rel=1e-14)
    if size <= BLOCK:
        assert distance(model, base) == float(np.linalg.norm(model - base))


def test_an_update_of_several_blocks_is_shortened_to_the_bound():
    rng = np.random.default_rng(0)
    base, update = rng.normal(size=2 * BLOCK + 3), rng.normal(size=2 * BLOCK + 3)
    model = base + update
    assert clip_update(model, base, 2.0)
    assert model - base == pytest.approx(update * (2.0 / np.linalg.norm(update)), abs=1e-12)
    assert not clip_update(model, base, 2.1)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e200])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 6])
def test_a_wrong_value_is_seen_in_any_block(at, value):
    values = np.ones(2 * BLOCK + 7, dtype=np.float64)
    record = ArrayRecord({"w": Array(values)})
    assert np.array_equal(Layout.of(record).to_vector(record), values.astype(np.float64))
    values[at] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ArraysMismatchError):
            Layout.of(record).to_vector(ArrayRecord({"w": Array(values)}))
