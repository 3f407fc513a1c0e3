"""Datasets in one `.npz` file with x_train, y_train and, optionally, x_test, y_test and natural ids."""

import lzma
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from fedapp.data.dataset import Array, IntArray, Kind, RawData, Split
from fedapp.data.errors import DataError, one_line, path_error

_UNREADABLE = (OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError)
_CORRUPT = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)


def read_npz(path: Path) -> list[Split]:
    """Read and check the training split and, where the file has one, the test split.

    Arrays: x_train, y_train; x_test, y_test (both or neither); group_train, group_test or writer_train,
    writer_test (ids of natural clients, optional). Inputs come back as uint8 or float32, axes as in the file.

    Raises
    ------
    DataError
        If the file is missing, isn't a readable npz, or holds arrays that don't fit together.
    """
    if not path.is_file():
        raise path_error(path, "no such file; an npz file with x_train and y_train is needed")
    if not zipfile.is_zipfile(path):
        raise path_error(
            path, "is not an npz file (a zip of arrays, as numpy.savez writes it), or is damaged"
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _read_splits(path, arrays)
    except DataError:
        raise
    except (*_UNREADABLE, *_CORRUPT) as error:
        raise path_error(path, f"can't be read as an npz file ({one_line(error)})") from error


def npz_data(path: Path) -> RawData:
    """Read a user's own dataset: uint8 inputs are scaled by 1/255, others are kept as float32.

    (N, D) inputs are vectors; (N, H, W) and (N, C, H, W) are images, and so is (N, H, W, C) where the last
    axis, but not the second, has size 1 or 3. Labels are 0 … num_classes - 1, the largest one found.

    Raises
    ------
    DataError
        As for `read_npz`.
    """
    splits = read_npz(path)
    shape = splits[0].x.shape
    if len(shape) not in (2, 3, 4):
        raise path_error(
            path, f"x_train has shape {shape}; allowed: (N, D), (N, H, W), (N, C, H, W), (N, H, W, C)"
        )
    y, groups, num_train = join_rows(splits)
    kind: Kind = "vector" if len(shape) == 2 else "image"
    blocks = [split.x if kind == "vector" else channels_first(split.x) for split in splits]
    scale = 1 / 255 if blocks[0].dtype == np.uint8 else 1.0
    return RawData(blocks, y, groups, num_train, count_of(path, y), kind, scale)


def count_of(path: Path, y: IntArray) -> int:
    """Return the number of classes of labels that are whole numbers from 0.

    Raises
    ------
    DataError
        If there are so many more than labels occur that they must be something else, such as identifiers.
    """
    count, seen = int(y.max()) + 1, len(np.unique(y))
    if count > max(1000, 10 * seen):
        raise path_error(
            path,
            f"has the label {count - 1}, but {seen} different ones; labels are whole numbers from 0, or names",
        )
    return count


def join_rows(splits: list[Split]) -> tuple[IntArray, IntArray | None, int]:
    """Return labels (N,), natural ids (N,) or None, and the number of training rows of one or two splits."""
    y = np.concatenate([split.y for split in splits]).astype(np.int64)
    ids = [split.groups for split in splits if split.groups is not None]
    groups = np.concatenate(ids).astype(np.int64) if len(ids) == len(splits) else None
    return y, groups, len(splits[0].y)


def channels_first(x: Array) -> Array:
    """View images (N, H, W), (N, H, W, C) or (N, C, H, W) as (N, C, H, W)."""
    if x.ndim == 3:
        return x[:, np.newaxis]
    trailing = x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    return x.transpose(0, 3, 1, 2) if trailing else x


def _read_splits(path: Path, arrays: NpzFile) -> list[Split]:
    for key in ("x_train", "y_train"):
        if key not in arrays:
            raise path_error(
                path, f"has no array {key}; x_train and y_train are needed (found: {_names(arrays)})"
            )
    if ("x_test" in arrays) != ("y_test" in arrays):
        missing = "y_test" if "x_test" in arrays else "x_test"
        raise path_error(path, f"has no array {missing}; x_test and y_test are allowed only together")
    splits = [_read_split(path, arrays, part) for part in ("train", "test") if f"x_{part}" in arrays]
    train, test = splits[0], splits[-1]
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        described = [f"rows of shape {split.x.shape[1:]} and type {split.x.dtype}" for split in (train, test)]
        raise path_error(path, f"x_train has {described[0]}, x_test {described[1]}; they must match")
    if (train.groups is None) != (test.groups is None):
        raise path_error(path, "natural ids are given for only one of train and test; give both or neither")
    return splits


def _read_split(path: Path, arrays: NpzFile, part: str) -> Split:
    x = _as_inputs(path, f"x_{part}", arrays[f"x_{part}"])
    y = _as_integers(path, f"y_{part}", arrays[f"y_{part}"], len(x), f"x_{part}")
    if y.min() < 0:
        raise path_error(path, f"y_{part} has the label {y.min()}; labels must be integers >= 0")
    key = next((key for key in (f"group_{part}", f"writer_{part}") if key in arrays), None)
    groups = None if key is None else _as_integers(path, key, arrays[key], len(x), f"x_{part}")
    return Split(x, y, groups)


def _as_inputs(path: Path, key: str, x: Array) -> Array:
    if x.ndim < 2 or x.size == 0:
        raise path_error(
            path, f"{key} has shape {x.shape}; at least one row and one value per row are needed"
        )
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "biuf":
        raise path_error(path, f"{key} has type {x.dtype}; uint8, another integer type or floats are allowed")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise path_error(path, f"{key} has values that are not finite in float32; all must be finite")
    return x


def _as_integers(path: Path, key: str, values: Array, num_rows: int, inputs: str) -> IntArray:
    if values.dtype.kind not in "iu":
        raise path_error(path, f"{key} has type {values.dtype}; integers are needed")
    if values.ndim != 1:
        raise path_error(path, f"{key} has shape {values.shape}; one value per row, shape (N,), is needed")
    if len(values) != num_rows:
        raise path_error(path, f"{inputs} has {num_rows} rows, {key} has {len(values)}; they must match")
    return values.astype(np.int64)


def _names(arrays: NpzFile) -> str:
    return ", ".join(sorted(arrays.files)) or "none"
