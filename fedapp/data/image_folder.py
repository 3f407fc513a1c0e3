"""A folder of images by class.

No message quotes a value that is in the data: it may be told to the server.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.arrays import join_rows
from fedapp.data.dataset import Array, RawData, Split
from fedapp.data.errors import DataError, path_error
from fedapp.data.pictures import picture_pixels
from fedapp.data.tables import read_table, table_groups
from fedapp.data.targets import number_of_classes
from fedapp.sorting import natural_key, naturally_sorted

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm")

METADATA, FILE_NAME = "metadata.csv", "file_name"
"""The table that says more of a folder's images, and its column of their paths: the Hub's names for both."""


def image_files(root: Path) -> list[Path]:
    """Return the files that a folder of images is read from: the images, sorted, and the table of their ids."""
    table = [root / METADATA] if (root / METADATA).is_file() else []
    return images_below(root) + table


def images_below(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders in it, sorted by path as people sort."""
    files = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGES)
    return sorted(files, key=lambda file: natural_key(file.as_posix()))


def image_folder_data(root: Path, group_column: str) -> RawData:
    """Read a folder of images by class, CLASS/*.png and so on; or such folders `train` and, optionally, `test`.

    Natural ids stand in a table ROOT/metadata.csv, with the images' paths from ROOT in a column `file_name` and the
    ids in the column that is named.

    The classes are the folders' names, sorted; names that are all whole numbers are the labels themselves. Images
    have one size, and are all grey (1, H, W) or all in colour (3, H, W), uint8.

    Raises
    ------
    DataError
        If there are no class folders, one has no image, an image can't be read or is unlike the first, or test
        has a class that train hasn't.
    """
    parts = _parts_of(root)
    names, numbered = _classes_of(parts)
    labels = {name: int(name) if numbered else place for place, name in enumerate(names)}
    groups, group_names = _groups_of(root, group_column) if group_column else (None, ())
    splits: list[Split] = []
    for part in parts:
        files = {file: labels[name] for name in _class_names(part) for file in _images(part / name)}
        x = _pixels_of([*files], splits[0].x.shape[1:] if splits else None)
        ids = None if groups is None else _ids_of(root, [*files], groups)
        splits.append(Split(x, np.array([*files.values()], np.int64), ids))
    y, ids, num_train = join_rows(splits)
    classes = () if numbered else tuple(names)
    count = len(names) if classes else number_of_classes(y, partial(path_error, root))
    blocks: list[Array] = [split.x for split in splits]
    return RawData(blocks, y, ids, num_train, count, "image", 1 / 255, classes, group_names=group_names)


def _parts_of(root: Path) -> list[Path]:
    """Return the folders of the training images and, where there is one, of the test images."""
    if not (root / "train").is_dir():
        return [root]
    return [root / "train", root / "test"] if (root / "test").is_dir() else [root / "train"]


def _classes_of(parts: list[Path]) -> tuple[list[str], bool]:
    """Return the names of the class folders, sorted, and whether they are whole numbers: the labels themselves."""
    names = _class_names(parts[0])
    numbered = all(name.isascii() and name.isdigit() for name in names)
    if numbered:
        for name, twin in _twins(names):
            raise path_error(parts[0], f"has the folders {name} and {twin}, which are the same label")
    for part in parts[1:]:
        if unknown := sorted(set(_class_names(part)) - set(names)):
            raise path_error(part, f"has the class {unknown[0]!r}, which {parts[0].name} hasn't")
    return names, numbered


def _pixels_of(files: list[Path], shape: tuple[int, ...] | None) -> Array:
    """Read images of one shape, that of the first where None is given, as one array."""
    shape = read_image(files[0]).shape if shape is None else shape
    x = np.empty((len(files), *shape), np.uint8)
    for row, file in enumerate(files):
        pixels = read_image(file)
        if pixels.shape != shape:
            raise path_error(
                file, f"is an image of shape {pixels.shape}, the first one's is {shape}; they must match"
            )
        x[row] = pixels
    return x


def _groups_of(root: Path, group_column: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the natural id of every image that a folder's table names, by its path, and the ids' names."""
    file = root / METADATA
    if not file.is_file():
        raise path_error(root, f"has no {METADATA}, for the column {group_column!r} that group-column names")
    table = read_table(file)
    if missing := [name for name in (FILE_NAME, group_column) if name not in table.column_names]:
        found = ", ".join(table.column_names[:8])
        raise path_error(
            file,
            f"needs the columns {FILE_NAME!r} and {group_column!r}, has no {missing[0]!r} (found: {found})",
        )
    ids, names = table_groups(file, group_column, table.column(group_column))
    return dict(zip(map(str, table.column(FILE_NAME).to_pylist()), ids.tolist(), strict=True)), names


def _ids_of(root: Path, files: list[Path], groups: dict[str, int]) -> Array:
    names = [file.relative_to(root).as_posix() for file in files]
    if missing := sum(name not in groups for name in names):
        raise path_error(root / METADATA, f"says nothing of {missing} of {len(names)} images; all are needed")
    return np.array([groups[name] for name in names], np.int64)


def _twins(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield names of folders that are the same whole number, such as 1 and 01."""
    seen: dict[int, str] = {}
    for name in names:
        if (twin := seen.setdefault(int(name), name)) != name:
            yield twin, name


def _class_names(folder: Path) -> list[str]:
    names = naturally_sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
    )
    if not names:
        raise path_error(folder, "has no folders, one for each class with its images; at least one is needed")
    return names


def _images(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGES)
    if not files:
        raise path_error(folder, f"has no images; allowed: {', '.join(IMAGES)}")
    return files


def read_image(file: Path) -> Any:
    """Read an image as uint8, channels first: (1, H, W) if it is grey, else (3, H, W); none of more than 8 bits."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            if (pixels := picture_pixels(image)) is None:
                raise path_error(file, f"has more than 8 bits a pixel (mode {image.mode}); 8 are needed")
            return pixels
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise path_error(file, "can't be read as an image") from None
