"""A client's sums over its own inputs, from which the mean and deviation over all clients are computed."""

import math
from collections.abc import Iterator

import numpy as np

from fedapp.data.dataset import Array, Dataset, IntArray
from fedapp.data.errors import DataError
from fedapp.data.moments import Sums

_LARGEST = 1.01 * float(np.finfo(np.float32).max)
_BLOCK = 2**18  # numbers converted to float64 at a time


def sums_of(dataset: Dataset, rows: IntArray) -> Sums:
    """Return the sums of some rows' inputs: per value of a vector, channel of an image or feature of a series.

    Raises
    ------
    DataError
        If the inputs are text, there are no rows, or values are too large to be squared.
    """
    dataset.require_values()
    if len(rows) == 0:
        raise DataError("normalize = 'standardize': there are no training rows")
    block = max(1, _BLOCK // math.prod(dataset.input_shape))

    def blocks() -> Iterator[Array]:
        for start in range(0, len(rows), block):
            x = dataset.prepared(dataset.x[rows[start : start + block]])
            yield x.swapaxes(1, 2) if dataset.kind == "series" else x  # the features in axis 1

    return Sums.of(blocks())


def same_size(sums: Sums, dataset: Dataset) -> bool:
    """Tell whether sums have one entry per feature of a dataset's inputs, and values that real inputs can give."""
    if not sums.count.shape == sums.total.shape == sums.squares.shape == (dataset.num_features,):
        return False
    # A NaN fails each of these comparisons.
    counts = np.all((sums.count >= 0) & (sums.count < _LARGEST) & (sums.count == np.floor(sums.count)))
    if not counts or sums.count.max() == 0:
        return False
    number = np.maximum(sums.count, 1)
    within = np.abs(sums.total / number) <= _LARGEST, sums.squares / number <= _LARGEST**2
    return bool(all(np.all(each) for each in within) and sums.squares.min() >= 0)
