"""Rows with the largest labels and token ids, to detect embeddings and output layers that are too small."""

from collections.abc import Iterator

import numpy as np

from fedapp.data.dataset import Dataset, IntArray

_BLOCK = 2**20  # values that are looked at at a time
_FIRST = 256  # rows by which columns of whole numbers, which may be tokens, are found
_EACH = 64  # up to this number of columns, each may have an embedding of its own


def extreme_rows(dataset: Dataset, rows: IntArray) -> IntArray:
    """Return, among some rows, those with the largest label and the largest and least whole number of the inputs.

    Only columns of whole numbers count, and only of inputs that aren't scaled: such numbers may be tokens. Of up to
    64 such columns, the largest and least number of each is sought; of more, those of each input.
    """
    found = {int(rows[0])}
    if dataset.targets == "classes":
        tops = np.asarray(dataset.y[rows]).reshape(len(rows), -1).max(1)
        found.add(int(rows[tops.argmax()]))
    if dataset.scale != 1.0 and dataset.kind != "text":
        return np.array(sorted(found))
    columns = np.flatnonzero(_whole(_flat(dataset, rows[:_FIRST])).all(0))
    if not len(columns):
        return np.array(sorted(found))
    most, least = np.full(len(columns), -np.inf), np.full(len(columns), np.inf)
    at_most, at_least = np.zeros((2, len(columns)), np.int64)
    for some in _blocks(dataset, rows):
        values = _flat(dataset, some)[:, columns]
        high, low = values.argmax(0), values.argmin(0)
        order = np.arange(len(columns))
        above, below = values[high, order] > most, values[low, order] < least
        most[above], at_most[above] = values[high, order][above], some[high][above]
        least[below], at_least[below] = values[low, order][below], some[low][below]
    for places in _together(dataset, columns):
        found |= {int(at_most[places][most[places].argmax()]), int(at_least[places][least[places].argmin()])}
    return np.array(sorted(found))


def _together(dataset: Dataset, columns: IntArray) -> Iterator[IntArray]:
    """Yield the places in ``columns`` of each group of columns that may share an embedding."""
    if len(columns) <= _EACH:
        yield from (np.array([place]) for place in range(len(columns)))
        return
    sizes = [int(np.prod(part.shape)) for part in dataset.parts] or [int(np.prod(dataset.input_shape))]
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        if len(places := np.flatnonzero((columns >= end - size) & (columns < end))):
            yield places


def _blocks(dataset: Dataset, rows: IntArray) -> Iterator[IntArray]:
    step = max(_BLOCK // max(int(np.prod(dataset.input_shape)), 1), 1)
    yield from (rows[start : start + step] for start in range(0, len(rows), step))


def _flat(dataset: Dataset, rows: IntArray) -> np.ndarray:
    return np.asarray(dataset.x[rows]).reshape(len(rows), -1)


def _whole(values: np.ndarray) -> np.ndarray:
    return np.asarray(values == np.trunc(values))
