"""Mean and deviation of inputs, put together from clients' sums: what pooling the rows gives, to rounding."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.data import DataError, Dataset
from fedapp.data.direction import client_direction, principal_direction
from fedapp.data.moments import Moments, Sums
from fedapp.data.standardize import same_size, sums_of


def dataset(x: np.ndarray, kind: str = "vector", scale: float = 1.0) -> Dataset:
    return Dataset("own", x, np.zeros(len(x), np.int64), None, len(x), 1, kind, scale)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.floats(-1e6, 1e6),
    st.floats(0.1, 1e3),
    st.integers(0, 2**32 - 1),
)
def test_sums_of_clients_give_what_pooled_rows_give(sizes, mean, deviation, seed):
    x = (mean + deviation * np.random.default_rng(seed).normal(size=(sum(sizes), 3))).astype(np.float32)
    data, ends = dataset(x), np.cumsum([0, *sizes])
    parts = [sums_of(data, np.arange(a, b)) for a, b in pairwise(ends)]
    found, pooled = Sums.merged(parts).moments(), x.astype(np.float64)
    assert found.mean == pytest.approx(pooled.mean(axis=0), rel=1e-12, abs=1e-9 * deviation)
    expected = pooled.std(axis=0)
    constant = expected <= np.finfo(np.float32).eps * np.abs(pooled.mean(axis=0))
    assert found.std == pytest.approx(np.where(constant, 1.0, expected), rel=1e-9)
    # The order of the clients is nothing but rounding.
    again = Sums.merged(parts[::-1]).moments()
    assert again.std == pytest.approx(found.std, rel=1e-9)


@pytest.mark.parametrize("block", [1, 7, 10**6])
def test_rows_are_summed_some_at_a_time(block, monkeypatch):
    monkeypatch.setattr("fedapp.data.standardize._BLOCK", 3 * block)
    x = (5 + np.random.default_rng(1).normal(size=(40, 3))).astype(np.float32)
    rows = np.r_[0:17, 20:40]
    found = sums_of(dataset(x), rows)
    own = x[rows].astype(np.float64)
    assert found.count.tolist() == [37] * 3
    assert found.total == pytest.approx(own.sum(axis=0), rel=1e-14)
    assert found.squares == pytest.approx(own.var(axis=0) * 37, rel=1e-12)


def test_images_have_them_per_channel_and_as_the_model_scales_them():
    x = np.random.default_rng(0).integers(0, 256, (50, 3, 8, 8)).astype(np.uint8)
    data = dataset(x, "image", 1 / 255)
    rows = np.arange(5, 45)
    found = sums_of(data, rows).moments()
    inputs = data.inputs(rows).astype(np.float64)
    assert found.mean == pytest.approx(inputs.mean(axis=(0, 2, 3)), rel=1e-12)
    assert found.std == pytest.approx(inputs.std(axis=(0, 2, 3)), rel=1e-12)


def test_standardized_inputs_have_mean_0_and_deviation_1_and_constant_ones_are_0():
    x = (1e4 + 50 * np.random.default_rng(0).normal(size=(300, 4))).astype(np.float32)
    x[:, 1], x[:, 2] = np.float32(0.1), 0
    data = dataset(x)
    moments = sums_of(data, np.arange(300)).moments()
    assert moments.std[1:3] == (1.0, 1.0)
    known = Dataset(**{**vars(data), "moments": moments})
    inputs = known.inputs(np.arange(300), "standardize").astype(np.float64)
    assert inputs.mean(axis=0) == pytest.approx(0, abs=1e-4)
    assert inputs.std(axis=0) == pytest.approx([1, 0, 0, 1], abs=1e-4)
    m = client_direction(known, np.arange(200), "standardize")
    assert np.abs(m @ principal_direction(inputs[:200])) == pytest.approx(1, abs=1e-9)


def test_what_can_not_be_standardized():
    text = dataset(np.zeros((3, 80), np.uint8), "text")
    for ask in (lambda: sums_of(text, np.arange(3)), lambda: text.inputs([0], "standardize")):
        with pytest.raises(
            DataError, match="normalize = 'standardize': dataset 'own' is text; allowed for images"
        ):
            ask()
    with pytest.raises(DataError, match="the mean and deviation of 'own' over all clients aren't known"):
        dataset(np.zeros((3, 2), np.float32)).inputs([0], "standardize")
    with pytest.raises(DataError, match="there are no training rows"):
        sums_of(dataset(np.zeros((3, 2), np.float32)), np.arange(0))


@pytest.mark.parametrize(
    ("count", "total", "squares"),
    [
        (0, [0, 0], [0, 0]),
        (-3, [1, 1], [1, 1]),
        (3, [1], [1]),
        (3, [1, 1, 1], [1, 1, 1]),
        (3, [1, 1], [1]),
        (3, [np.nan, 0], [1, 1]),
        (3, [0, 0], [np.inf, 1]),
        (3, [0, 0], [-1, 1]),
        (3, [1e300, 0], [1, 1]),
        (3, [0, 0], [1e300, 1]),
        (np.nan, [0, 0], [1, 1]),
        (2.5, [0, 0], [1, 1]),
    ],
)
def test_sums_that_no_inputs_have(count, total, squares):
    data = dataset(np.ones((3, 2), np.float32))
    assert same_size(sums_of(data, np.arange(3)), data)
    assert not same_size(
        Sums(np.full(2, count, float), np.array(total, float), np.array(squares, float)), data
    )


def test_moments_can_be_compared_and_hashed():
    assert hash(Moments((1.0,), (2.0,))) == hash(Moments((1.0,), (2.0,)))
    with pytest.raises(ValueError, match="needs the sums of at least one"):
        Sums.merged([])
