"""Several inputs of a row, a dict or tuple of arrays, as one row of numbers.

In an npz file they are the arrays x_train.NAME, and x_train.0, x_train.1, … of a tuple. Stored, sent and standardized
is one float32 array (N, D), each row's inputs one after the other; ``fedapp.training.parts`` takes them apart again
where a model is called.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedapp.data.dataset import Array
from fedapp.data.targets import Problem
from fedapp.names import Dtype, Part

# The type that a model gets, by NumPy's kind of the type that an input has.
_DTYPES: dict[str, Dtype] = {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}

_WHOLE = 2**24  # float32 represents every whole number up to this one


def separated(name: str, value: Any) -> dict[str, Any] | None:
    """Return a dict or a tuple of arrays by their names in an npz file; None of what is one array.

    A tuple is one of inputs if it has arrays of as many rows each; else it is one of rows, as a list is.
    """
    if isinstance(value, Mapping):
        return {f"{name}.{key}": part for key, part in value.items()}
    if isinstance(value, tuple) and len(value) > 1 and all(hasattr(part, "shape") for part in value):
        lengths = {tuple(part.shape)[:1] for part in value}
        if len(lengths) == 1 and lengths != {()} and lengths != {(len(value),)}:
            return {f"{name}.{place}": part for place, part in enumerate(value)}
    return None


def all_separated(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by their names in an npz file, of which inputs may be dicts or tuples."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        parts = separated(name, value) if name.startswith("x_") else None
        found |= {name: value} if parts is None else parts
    return found


def whole_name(name: str) -> str:
    """Return the name of an array without that of one of several inputs."""
    return name.partition(".")[0] if name.startswith("x_") else name


def joined(arrays: Mapping[str, Any], problem: Problem) -> tuple[Mapping[str, Any], tuple[Part, ...]]:
    """Return arrays with several inputs as one, float32 (N, D), and what they are; () where there is one.

    Flags stay flags for the model and whole numbers int64, but pictures, uint8 of three axes or more, are scaled to
    [0, 1].

    Raises
    ------
    DataError
        If a name can't be a keyword, inputs have different numbers of rows, another type, values that float32 doesn't
        have, or train and test have other ones.
    """
    several = [name for name in arrays if whole_name(name) != name]
    if not several:
        return arrays, ()
    found = {name: arrays[name] for name in arrays if name not in several}
    described: dict[str, tuple[Part, ...]] = {}
    for whole in dict.fromkeys(map(whole_name, several)):
        own = {name.partition(".")[2]: arrays[name] for name in several if whole_name(name) == whole}
        if whole in found:
            raise problem(
                f"has an array {whole} and {whole}.{next(iter(own))}; one input or several are allowed"
            )
        found[whole], described[whole] = _one(whole, own, problem)
    first, *others = described.values()
    if any(other != first for other in others) or len(described) != sum(
        name.startswith("x_") for name in found
    ):
        listed = " and ".join(
            f"{whole} has {', '.join(map(str, parts))}" for whole, parts in described.items()
        )
        raise problem(f"has other inputs in train than in test: {listed}; they must match")
    return found, first


def check_whole(key: str, x: Array, problem: Problem) -> None:
    """Refuse whole numbers that float32, which inputs become, would round to others: ids are no measurements."""
    if x.dtype.kind in "iu" and x.size and (x.max() > _WHOLE or x.min() < -_WHOLE):
        raise problem(
            f"{key} has whole numbers beyond {_WHOLE}, which float32, the type of inputs, doesn't tell apart; "
            "smaller ones, or floats, are needed"
        )


def _check_input(called: str, value: Array, first: Array, problem: Problem) -> None:
    """Refuse one of several inputs that has no numbers, no values, other rows than the first, or too large ids."""
    if value.dtype.kind not in "biuf":
        raise problem(f"{called} has type {value.dtype}; numbers or flags are needed")
    if value.ndim == 0 or value.size == 0:
        raise problem(f"{called} has shape {value.shape}; at least one row and one value per row are needed")
    if len(value) != len(first):
        raise problem(f"{called} has {len(value)} rows, the first input {len(first)}; they must match")
    check_whole(called, value, problem)


def _one(whole: str, own: Mapping[str, Array], problem: Problem) -> tuple[Array, tuple[Part, ...]]:
    by_place = set(own) == set(map(str, range(len(own))))
    parts: list[Part] = []
    columns: list[Array] = []
    for name in sorted(own, key=int) if by_place else own:
        value, called = np.asarray(own[name]), f"{whole}.{name}"
        if not (by_place or name.isidentifier()):
            raise problem(f"has the input {name!r}; a name that can be a keyword of Python is needed")
        _check_input(called, value, columns[0] if columns else value, problem)
        is_picture = value.dtype == np.uint8 and value.ndim > 2
        kind: Dtype = "float32" if is_picture else _DTYPES[value.dtype.kind]
        parts.append(Part("" if by_place else name, kind, value.shape[1:]))
        with np.errstate(over="ignore"):
            numbers = value.reshape(len(value), math.prod(value.shape[1:])).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise problem(f"{called} has values that are not finite in float32; all must be finite")
        columns.append(numbers / np.float32(255) if is_picture else numbers)
    return np.concatenate(columns, axis=1), tuple(parts)
