"""The model, and what clients add to it: whole numbers, so that their mean is exact in float32."""

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from strategies import streams

ARRAYS = 10
ADAPTERS = "adapters"  # the array that is trained where the others are frozen
# A prime number of values that repeat: no two pieces that Flower sends are alike, which it would send once.
PERIOD = 1_000_003
LARGEST = 127  # int8 has a code for each of them


def pattern(number: int) -> NDArray[np.float32]:
    """Return the values that a client adds, or for -1 those of the first model."""
    values = streams.generator(0, "large-model", number + 1).integers(-LARGEST, LARGEST + 1, PERIOD)
    values[:2] = -LARGEST, LARGEST
    return values.astype(np.float32)


def initial(values: int, adapters: float) -> ArrayRecord:
    """Return the first model; with ``adapters`` this share of its values is float32, the others float16."""
    trained = round(values * adapters)
    dtype = np.float16 if adapters else np.float32
    sizes = [len(part) for part in np.array_split(np.empty(values - trained, np.int8), ARRAYS)]
    first = pattern(-1)
    record = ArrayRecord({f"layer-{n}": filled(first, size, dtype) for n, size in enumerate(sizes)})
    if adapters:
        record[ADAPTERS] = filled(first, trained, np.float32)
    return record


def filled(values: NDArray[np.float32], size: int, dtype: type[np.floating]) -> Array:
    """Return an array of so many values, repeated."""
    found = np.empty(size, dtype)
    for start in range(0, size, PERIOD):
        part = found[start : start + PERIOD]
        part[:] = values[: len(part)]
    return Array(found)


def added(array: Array, values: NDArray[np.float32]) -> Array:
    """Return an array with values added, repeated."""
    found = array.numpy()
    found = found if found.flags.writeable else found.copy()
    for start in range(0, len(found), PERIOD):
        part = found[start : start + PERIOD]
        part += values[: len(part)]
    return Array(found)


def error_of(record: ArrayRecord, rounds: int, clients: int, adapters: bool) -> float:
    """Return the largest difference of a model's value from what it must be after so many rounds."""
    first, largest = pattern(-1), 0.0
    last = first + rounds * np.mean([pattern(number) for number in range(clients)], axis=0)
    for name, array in record.items():
        expected = last if name == ADAPTERS or not adapters else first
        found = array.numpy()
        for start in range(0, len(found), PERIOD):
            part = found[start : start + PERIOD]
            largest = max(largest, float(np.abs(part - expected[: len(part)]).max()))
    return largest
