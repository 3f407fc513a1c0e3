"""A user's own data in common formats: a table in CSV or Parquet, or a folder of images by class.

No message quotes a value that is in the data: it may be told to the server.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapp.data.dataset import Array, IntArray, RawData, Split
from fedapp.data.errors import DataError, path_error
from fedapp.data.npz import count_of, join_rows, npz_data

if TYPE_CHECKING:
    import pyarrow

LABEL = "label"
"""The column of a table that holds the labels."""

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm")
FORMATS = "a .npz, .csv or .parquet file, or a folder of images by class"


def own_data(path: Path) -> RawData:
    """Read a user's own dataset, whatever its format.

    Raises
    ------
    DataError
        If it is in none of the formats, or not as its format demands.
    """
    if path.is_dir():
        return image_folder_data(path)
    readers = {".npz": npz_data, ".csv": table_data, ".parquet": table_data}
    if path.suffix.lower() not in readers:
        raise path_error(path, f"is in no known format; allowed: {FORMATS}")
    return readers[path.suffix.lower()](path)


def files_of(path: Path) -> list[Path]:
    """Return the files that a dataset is read from, sorted."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)
    return [path]


# Tables ------------------------------------------------------------------------------------------------------


def table_data(path: Path) -> RawData:
    """Read a table: a column `label`, all others numbers, which are the inputs in their order.

    Labels are whole numbers from 0, or names: then the classes are those names, sorted. Inputs are kept as
    float32, not scaled.

    Raises
    ------
    DataError
        If the file can't be read, has no column `label` or no other, cells that are empty, or inputs that aren't
        finite numbers.
    """
    table = _read_table(path)
    columns = [name for name in table.column_names if name != LABEL]
    if (
        LABEL not in table.column_names
        or not columns
        or len(set(table.column_names)) < len(table.column_names)
    ):
        found = ", ".join(table.column_names[:8])
        raise path_error(path, f"needs a column {LABEL!r} and others, each name once (found: {found})")
    if table.num_rows == 0:
        raise path_error(path, "has no rows; at least one is needed")
    x = np.column_stack([_numbers(path, name, table.column(name)) for name in columns])
    y, classes = _labels(path, table.column(LABEL))
    count = len(classes) if classes else count_of(path, y)
    return RawData([x], y, None, len(y), count, "vector", 1.0, classes, tuple(columns))


def _read_table(path: Path) -> "pyarrow.Table":
    import pyarrow

    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path)
        from pyarrow import csv

        # Without threads, an error names the row.
        table = csv.read_csv(path, read_options=csv.ReadOptions(use_threads=False))
        table.column_names  # noqa: B018 - decodes them
        return table
    except UnicodeDecodeError:
        raise path_error(path, "has names of columns that aren't UTF-8") from None
    except pyarrow.ArrowException as error:
        # What follows in Arrow's own message is the row itself.
        where = re.search(r"(Row #\d+: )?Expected \d+ columns, got \d+", str(error))
        reason = where[0] if where else type(error).__name__
        raise path_error(path, f"can't be read as {path.suffix.lower()[1:]} ({reason})") from None
    except OSError as error:
        raise path_error(path, f"can't be read ({error.strerror or type(error).__name__})") from None


def _numbers(path: Path, name: str, column: "pyarrow.ChunkedArray") -> Array:
    from pyarrow import types

    _check_filled(path, name, column)
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        raise path_error(path, f"column {name!r} has type {column.type}; numbers are needed")
    with np.errstate(over="ignore"):
        values: Array = column.to_numpy().astype(np.float32)
    if not np.isfinite(values).all():
        raise path_error(
            path, f"column {name!r} has values that are not finite in float32; all must be finite"
        )
    return values


def _labels(path: Path, column: "pyarrow.ChunkedArray") -> tuple[IntArray, tuple[str, ...]]:
    from pyarrow import types

    _check_filled(path, LABEL, column)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        names, y = np.unique(np.asarray(column.to_pylist(), dtype=str), return_inverse=True)
        return y.astype(np.int64), tuple(names.tolist())
    if not types.is_integer(column.type):
        raise path_error(path, f"column {LABEL!r} has type {column.type}; whole numbers or names are needed")
    y = column.to_numpy().astype(np.int64)
    if y.min() < 0:
        raise path_error(path, f"column {LABEL!r} has a label below 0; whole numbers from 0 are needed")
    return y, ()


def _check_filled(path: Path, name: str, column: "pyarrow.ChunkedArray") -> None:
    if column.null_count:
        raise path_error(path, f"column {name!r} has {column.null_count} empty cells; all must be filled")


# Images ------------------------------------------------------------------------------------------------------


def image_folder_data(root: Path) -> RawData:
    """Read a folder of images by class, CLASS/*.png and so on; or such folders `train` and, optionally, `test`.

    The classes are the folders' names, sorted; names that are all whole numbers are the labels themselves. Images
    have one size, and are all grey (1, H, W) or all in colour (3, H, W), uint8.

    Raises
    ------
    DataError
        If there are no class folders, one has no image, an image can't be read or is unlike the first, or test
        has a class that train hasn't.
    """
    parts = [root / part for part in ("train", "test") if (root / part).is_dir()]
    parts = parts if parts and parts[0].name == "train" else [root]
    names = _class_names(parts[0])
    numbered = all(name.isascii() and name.isdigit() for name in names)
    if numbered:
        for name, twin in _twins(names):
            raise path_error(parts[0], f"has the folders {name} and {twin}, which are the same label")
    labels = {name: int(name) if numbered else place for place, name in enumerate(names)}
    splits: list[Split] = []
    for part in parts:
        if unknown := sorted(set(_class_names(part)) - set(names)):
            raise path_error(part, f"has the class {unknown[0]!r}, which {parts[0].name} hasn't")
        files = [(file, labels[name]) for name in _class_names(part) for file in _images(part / name)]
        first = splits[0].x[0] if splits else _pixels(files[0][0])
        x = np.empty((len(files), *first.shape), np.uint8)
        for row, (file, _) in enumerate(files):
            pixels = _pixels(file)
            if pixels.shape != first.shape:
                raise path_error(
                    file,
                    f"is an image of shape {pixels.shape}, the first one's is {first.shape}; they must match",
                )
            x[row] = pixels
        splits.append(Split(x, np.array([label for _, label in files], np.int64)))
    y, _, num_train = join_rows(splits)
    classes = () if numbered else tuple(names)
    count = len(names) if classes else count_of(root, y)
    blocks: list[Array] = [split.x for split in splits]
    return RawData(blocks, y, None, num_train, count, "image", 1 / 255, classes)


def _twins(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield names of folders that are the same whole number, such as 1 and 01."""
    seen: dict[int, str] = {}
    for name in names:
        if (twin := seen.setdefault(int(name), name)) != name:
            yield twin, name


def _class_names(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise path_error(folder, "has no folders, one for each class with its images; at least one is needed")
    return names


def _images(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGES)
    if not files:
        raise path_error(folder, f"has no images; allowed: {', '.join(IMAGES)}")
    return files


def _pixels(file: Path) -> Any:
    """Read an image as uint8, channels first: (1, H, W) if it is grey, else (3, H, W); none of more than 8 bits."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            if image.mode[0] in "IF":  # 16 or 32 bits, which would be cut off at 255
                raise path_error(file, f"has more than 8 bits a pixel (mode {image.mode}); 8 are needed")
            if image.mode in ("1", "L"):
                return np.asarray(image.convert("L"))[np.newaxis]
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise path_error(file, "can't be read as an image") from None
