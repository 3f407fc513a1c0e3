"""Datasets in one `.npz` file with x_train, y_train and, optionally, x_test, y_test and natural ids."""

import lzma
import zipfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fedapp.data.arrays import array_data, array_splits
from fedapp.data.dataset import RawData, Split, Targets
from fedapp.data.errors import DataError, one_line, path_error
from fedapp.data.facts.maker import MADE_BY

_UNREADABLE = (OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError)
_CORRUPT = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)


def read_npz(path: Path, targets: Targets | None = "classes") -> list[Split]:
    """Read and check the training split and, where the file has one, the test split.

    The arrays are those of `fedapp.data.arrays.array_splits`. Inputs come back as uint8 or float32, axes as in the
    file.

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
            return array_splits(arrays, targets, partial(path_error, path))
    except DataError:
        raise
    except (*_UNREADABLE, *_CORRUPT) as error:
        raise path_error(path, f"can't be read as an npz file ({one_line(error)})") from error


def npz_data(path: Path, targets: Targets | None = None) -> RawData:
    """Read a user's own dataset, as `fedapp.data.arrays.array_data` says.

    Raises
    ------
    DataError
        As for `read_npz`.
    """
    raw = array_data(read_npz(path, targets), partial(path_error, path))
    with np.load(path, allow_pickle=False) as arrays:
        return replace(raw, made_by=str(arrays[MADE_BY])) if MADE_BY in arrays else raw
