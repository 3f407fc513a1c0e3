"""Labels and targets as they are found, and what they become: classes, or numbers."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fedapp.data.dataset import Array, IntArray, RawData, Targets
from fedapp.data.errors import DataError

Problem = Callable[[str], DataError]
"""Makes the error to raise from what is wrong: it names the key, its value and where the data are from."""


def read_targets(found: Mapping[str, Array], targets: Targets | None, problem: Problem) -> list[Array]:
    """Return classes, int64 (n,) each, or numbers, float32 (n, M) each.

    Parameters
    ----------
    found : mapping of str to array
        Labels of each part of the data, by what an error calls them: (n,), or (n, M) for M columns.
    targets : {"classes", "numbers"}, optional
        None: whole numbers in one column are classes, all else is numbers.
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
        if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] == 0):
            raise problem(f"{name} has shape {values.shape}; (N,), or (N, M) for numbers, is needed")
    whole = all(values.dtype.kind in "biu" and _columns(values) == 1 for values in found.values())
    if targets == "classes" or (targets is None and whole):
        return [_classes(name, values, problem) for name, values in found.items()]
    widths = {name: _columns(values) for name, values in found.items()}
    if len(set(widths.values())) > 1:
        raise problem(
            f"has {' and '.join(f'{width} numbers a row in {name}' for name, width in widths.items())}; "
            "they must match"
        )
    return [_numbers(name, values, problem) for name, values in found.items()]


def number_of_classes(y: IntArray, problem: Problem) -> int:
    """Return the number of classes of labels that are whole numbers from 0; 0 of targets that are numbers.

    Raises
    ------
    DataError
        If there are so many more than labels occur that they must be something else, such as identifiers.
    """
    if y.dtype.kind == "f":
        return 0
    count, seen = int(y.max()) + 1, len(np.unique(y))
    if count > max(1000, 10 * seen):
        raise problem(
            f"has the label {count - 1}, but {seen} different ones; labels are whole numbers from 0, or names"
        )
    return count


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
    return 1 if values.ndim == 1 else int(values.shape[1])


def _classes(name: str, values: Array, problem: Problem) -> IntArray:
    if values.dtype.kind == "f":
        raise problem(f"{name} has type {values.dtype}; whole numbers or names are needed for classes")
    if _columns(values) != 1:
        raise problem(
            f"{name} has shape {values.shape}; one value per row, shape (N,), is needed for classes"
        )
    if len(values) and values.min() < 0:
        raise problem(f"{name} has a label below 0; whole numbers from 0 are needed")
    return values.ravel().astype(np.int64)


def _numbers(name: str, values: Array, problem: Problem) -> Array:
    with np.errstate(over="ignore"):
        numbers = values.reshape(len(values), -1).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise problem(f"{name} has values that are not finite in float32; all must be finite")
    return numbers
