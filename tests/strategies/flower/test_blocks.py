"""Arithmetic block by block: the values of whole vectors, of more than one block and of a part of one."""

import math
import warnings

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from strategies.flower.arrays import (
    BLOCK,
    CHUNK,
    ArraysMismatchError,
    Layout,
    ModelView,
    chunks,
    clip_update,
    distance,
    sum_of_squares,
)

SIZES = [0, 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]


def test_a_vector_is_read_from_several_arrays_chunk_by_chunk():
    rng = np.random.default_rng(0)
    sizes = {"a": 5, "none": 0, "b": CHUNK, "c": 1, "d": 2 * CHUNK + 3}
    whole = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    record = ArrayRecord({name: Array(values) for name, values in whole.items()})
    layout = Layout.of(record)
    model, read = ModelView(layout, layout.flat(record)), np.empty(layout.size)
    for place in chunks(layout.size):
        assert place.stop - place.start <= CHUNK
        model.read(place, read[place])
    expected = np.concatenate(list(whole.values()), dtype=np.float64)
    assert np.array_equal(read, expected)
    assert np.array_equal(model.to_vector(), expected)
    assert model.square() == pytest.approx(float(expected @ expected), rel=1e-6)


def test_squares_of_whole_numbers_dont_wrap_around():
    assert sum_of_squares(np.array([2**30, -3], dtype=np.int32), 1.0) == 2.0**60 + 10
    assert sum_of_squares(np.array([True, True, False])) == 2.0
    assert sum_of_squares(np.array([300.0], dtype=np.float16)) == 90000.0  # the square overflows float16


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
