"""Labels and targets as they are found, and what they become: classes, or numbers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fedapp.data.dataset import Array, Dataset, IntArray, RawData, Targets
from fedapp.data.errors import DataError
from fedapp.data.partition import Partition
from fedapp.names import IGNORED

Problem = Callable[[str], DataError]
"""Makes the error to raise from what is wrong: it names the key, its value and where the data are from."""


def read_targets(found: Mapping[str, Array], targets: Targets | None, problem: Problem) -> list[Array]:
    """Return classes, int64 (n,) or, of each position of a row, (n, ...) each, or numbers, float32 (n, M, ...) each.

    Parameters
    ----------
    found : mapping of str to array
        Labels of each part of the data, by what an error calls them: (n,), or (n, ...) for several.
    targets : {"classes", "numbers"}, optional
        "classes": whole numbers of any type, such as 1.0. None: those of a type of whole numbers are classes, and all
        else, and several columns of flags, is numbers.
    problem : callable
        Makes an error from what is wrong.

    Raises
    ------
    DataError
        If they aren't numbers, not finite, or for classes not whole or below 0.
    """
    for name, values in found.items():
        if values.dtype.kind not in "biuf":
            names = "" if targets == "numbers" else ", or names for classes alone,"
            raise problem(f"{name} has type {values.dtype}; numbers{names} are needed")
        if values.ndim == 0 or 0 in values.shape[1:]:
            raise problem(
                f"{name} has shape {values.shape}; (N,), or (N, ...) for several of a row, is needed"
            )
    whole = all(values.dtype.kind in ("biu" if _columns(values) == 1 else "iu") for values in found.values())
    as_classes = targets == "classes" or (targets is None and whole)
    read = [(_classes if as_classes else _numbers)(name, values, problem) for name, values in found.items()]
    if len({values.shape[1:] for values in read}) > 1:
        shapes = [f"{_described(values)} a row in {name}" for name, values in zip(found, read, strict=True)]
        raise problem(f"has {' and '.join(shapes)}; they must match")
    return read


def number_of_classes(y: IntArray, problem: Problem) -> int:
    """Return the number of classes of labels that are whole numbers from 0; 0 of targets that are numbers.

    Raises
    ------
    DataError
        If the largest label of rows is far beyond the number of different labels: such labels are identifiers. Labels
        per position aren't checked, as they may be tokens, of which a small text has few.
    """
    if y.dtype.kind == "f":
        return 0
    labels = np.unique(y)
    labels = labels[labels != IGNORED]
    if not len(labels):
        raise problem(f"has no label but {IGNORED}, which doesn't count; at least one is needed")
    count, seen = int(labels[-1]) + 1, len(labels)
    if y.ndim == 1 and count > max(1000, 10 * seen):
        raise problem(
            f"has the label {count - 1}, but {seen} different ones; labels are whole numbers from 0, or names"
        )
    return count


def check_counted(dataset: Dataset, partition: Partition) -> None:
    """Refuse training or test rows of which every position has the label -100: nothing can be learnt or measured.

    The dataset has a label for each position, y (N, T).

    Raises
    ------
    DataError
        Naming the dataset.
    """
    for what, rows in (("training", partition.client_indices), ("test", partition.test_indices)):
        if bool((dataset.y[rows] == IGNORED).all()):
            raise DataError(
                f"dataset = {dataset.name!r}: its {what} rows have no label but {IGNORED}, which doesn't count; at "
                "least one is needed"
            )


def as_numbers(raw: RawData, name: str) -> RawData:
    """Return a named dataset whose targets are numbers, float32 (N, 1); those of named datasets are classes.

    Raises
    ------
    DataError
        If they can't be: classes that have names, and characters, are no numbers.
    """
    if raw.y.dtype.kind == "f":
        return raw
    if raw.classes or raw.kind == "text":
        what = "characters" if raw.kind == "text" else "names"
        raise DataError(f"dataset = {name!r}: its targets are {what}; the loss needs numbers")
    return replace(raw, y=raw.y.astype(np.float32)[:, None], num_classes=0)


def _columns(values: Array) -> int:
    return math.prod(values.shape[1:])


def _described(values: Array) -> str:
    what = "labels" if values.dtype.kind == "i" else "numbers"
    return f"{values.shape[1] if values.ndim == 2 else values.shape[1:]} {what}"


def _classes(name: str, values: Array, problem: Problem) -> IntArray:
    if values.dtype.kind == "f" and not np.array_equal(values, np.floor(values)):
        raise problem(
            f"{name} has type {values.dtype} with values that aren't whole; whole numbers or names are needed for "
            "classes"
        )
    if _columns(values) == 1:
        values = values.ravel()
    several = values.ndim > 1
    if bool(((values < 0) & (values != IGNORED) if several else values < 0).any()):
        or_ignored = f", or {IGNORED} where a position doesn't count," if several else ""
        raise problem(f"{name} has a label below 0; whole numbers from 0{or_ignored} are needed")
    return values.astype(np.int64)


def _numbers(name: str, values: Array, problem: Problem) -> Array:
    with np.errstate(over="ignore"):
        numbers = (values[:, None] if values.ndim == 1 else values).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise problem(f"{name} has values that are not finite in float32; all must be finite")
    return numbers
