"""A folder of images by class.

No message quotes a value that is in the data: it may be told to the server.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from fedapp.data.arrays import join_rows
from fedapp.data.dataset import Array, DataColumns, RawData, Split
from fedapp.data.errors import DataError, brief, path_error
from fedapp.data.pictures import AS_IT_IS, ImageForm, picture_pixels
from fedapp.data.tables import read_table, table_groups
from fedapp.data.targets import number_of_classes
from fedapp.sorting import natural_key, naturally_sorted

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm")

METADATA, FILE_NAME = "metadata.csv", "file_name"
"""The table that says more of a folder's images, and its column of their paths: the Hub's names for both."""

_NAMED = 20  # most files that an error lists


def image_files(root: Path) -> list[Path]:
    """Return the files that a folder of images is read from: the images, sorted, and the table of their ids."""
    table = [root / METADATA] if (root / METADATA).is_file() else []
    return images_below(root) + table


def images_below(folder: Path) -> list[Path]:
    """Return the images in a folder and the folders in it, sorted by path as people sort; none that is hidden."""
    files = (
        file for file in folder.rglob("*") if is_image(file) and not _is_hidden(file.relative_to(folder))
    )
    return sorted(files, key=lambda file: natural_key(file.as_posix()))


def image_folder_data(root: Path, columns: DataColumns) -> RawData:
    """Read a folder of images by class, CLASS/*.png and so on; or such folders `train` and, optionally, `test`.

    Natural ids stand in a table ROOT/metadata.csv, with the images' paths from ROOT in a column `file_name` and the
    ids in the column that is named.

    The classes are the folders' names, sorted; names that are all whole numbers are the labels themselves. Images
    have one size, and are all grey (1, H, W) or all in colour (3, H, W), uint8, or are made so (`ImageForm`).

    Raises
    ------
    DataError
        If there are no class folders or images, images can't be read or are unlike each other, or test has a class
        that train hasn't.
    """
    parts = _parts_of(root)
    names, numbered = _classes_of(parts)
    labels = {name: int(name) if numbered else place for place, name in enumerate(names)}
    groups, group_names = _groups_of(root, columns) if columns.group else (None, ())
    scan = ImageScan(root, ImageForm.of(columns))
    splits: list[Split] = []
    for part in parts:
        files = {file: labels[name] for name in _class_names(part) for file in _images(part / name)}
        if not files:
            raise path_error(
                part, f"has no images in the folders of its classes; allowed: {', '.join(IMAGES)}"
            )
        ids = None if groups is None else _ids_of(root, [*files], groups)
        splits.append(Split(scan.read([*files]), np.array([*files.values()], np.int64), ids))
    if problem := scan.problem():
        raise path_error(root, problem)
    y, ids, num_train = join_rows(splits)
    classes = () if numbered else tuple(names)
    count = len(names) if classes else number_of_classes(y, partial(path_error, root))
    blocks: list[Array] = [split.x for split in splits]
    remarks = _left_out(root, parts)
    return RawData(blocks, y, ids, num_train, count, "image", 1 / 255, classes, (), (), remarks, group_names)


class ImageScan:
    """Images of a folder as they are read: their sizes and modes, and which of them can't be used.

    Attributes
    ----------
    sizes : Counter of (int, int)
        Number of images of each height and width.
    modes : Counter of str
        Number of grey images and of those in colour.
    damaged : list of str
        Images that can't be read, by their paths in the folder.
    deep : list of str
        Images of more than 8 bits a pixel.
    """

    def __init__(self, root: Path, form: ImageForm = AS_IT_IS) -> None:
        self.root, self.form = root, form
        self.sizes: Counter[tuple[int, int]] = Counter()
        self.modes: Counter[str] = Counter()
        self.damaged: list[str] = []
        self.deep: list[str] = []

    def read(self, files: list[Path]) -> Array:
        """Read images, uint8 (N, C, H, W); rows of images that have another shape than the first aren't filled."""
        x = np.empty((len(files), 0, 0, 0), np.uint8)
        for row, file in enumerate(files):
            if (pixels := self._pixels(file)) is None:
                continue
            if not x.size:
                x = np.empty((len(files), *pixels.shape), np.uint8)
            if pixels.shape == x.shape[1:]:
                x[row] = pixels
        return x

    def problem(self) -> str:
        """Say why the images can't be trained on together, in one line; "" if they can."""
        found = []
        for listed, what in ((self.damaged, "can't be read"), (self.deep, "have more than 8 bits a pixel")):
            if listed:
                more = ", …" if len(listed) > _NAMED else ""
                found.append(f"{len(listed)} images {what}: {', '.join(map(repr, listed[:_NAMED]))}{more}")
        if len(self.sizes) > 1:
            shown = [f"{height}x{width} ({count})" for (height, width), count in self.sizes.most_common(4)]
            more = f", … ({len(self.sizes)} sizes)" if len(self.sizes) > 4 else ""
            found.append(
                f"images have the sizes {', '.join(shown)}{more}, height x width; image-size scales them to one"
            )
        if len(self.modes) > 1:
            found.append(
                f"{self.modes['grey']} images are grey and {self.modes['colour']} in colour; image-mode = 'grey' or "
                "'colour' makes them alike"
            )
        return "; ".join(found)

    def _pixels(self, file: Path) -> Array | None:
        """Read an image, and count it."""
        name = file.relative_to(self.root).as_posix()
        try:
            pixels = read_image(file, self.form)
        except DataError:
            self.damaged.append(name)
            return None
        if pixels is None:
            self.deep.append(name)
            return None
        self.sizes[pixels.shape[1], pixels.shape[2]] += 1
        self.modes["grey" if len(pixels) == 1 else "colour"] += 1
        return pixels


def read_image(file: Path, form: ImageForm = AS_IT_IS) -> Array | None:
    """Read an image as uint8, channels first: (1, H, W) if it is grey, else (3, H, W); None of more than 8 bits.

    Raises
    ------
    DataError
        If it can't be read.
    """
    from PIL import Image

    try:
        with Image.open(file) as image:
            pixels: Array | None = picture_pixels(image, form)
            return pixels
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise path_error(file, "can't be read as an image") from None


def _left_out(root: Path, parts: list[Path]) -> tuple[str, ...]:
    """Return remarks on folders of classes without images, and on files that aren't read."""
    images = {part / name: _images(part / name) for part in parts for name in _class_names(part)}
    found = []
    if empty := [folder.relative_to(root).as_posix() for folder, files in images.items() if not files]:
        found.append(f"the class folders {brief(empty)} have no images")
    used = {root / METADATA, *chain(*images.values())}
    if elsewhere := [file.relative_to(root).as_posix() for file in image_files(root) if file not in used]:
        found.append(
            f"{len(elsewhere)} images lie elsewhere than in the folders of classes and are left out, such as "
            f"{elsewhere[0]!r}"
        )
    if others := [file.suffix.lower() for folder in images for file in folder.iterdir() if _is_other(file)]:
        shown = ", ".join(f"{suffix} ({count})" for suffix, count in Counter(others).most_common(4))
        found.append(f"{len(others)} files in the folders of classes are no images that are read: {shown}")
    return tuple(found)


def _is_other(file: Path) -> bool:
    return file.is_file() and file.suffix.lower() not in IMAGES and file.name[0] != "."


def is_image(file: Path) -> bool:
    """Tell whether a file is an image by its name: not one that macOS keeps beside it, ``._1.png``."""
    return file.suffix.lower() in IMAGES and file.name[0] != "."


def _is_hidden(path: Path) -> bool:
    return any(part[0] == "." for part in path.parts)


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


def _groups_of(root: Path, columns: DataColumns) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the natural id of every image that a folder's table names, by its path, and the ids' names."""
    file, group_column = root / METADATA, columns.group
    if not file.is_file():
        raise path_error(root, f"has no {METADATA}, for the column {group_column!r} that group-column names")
    table, _ = read_table(file, columns)
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
    return sorted(file for file in folder.iterdir() if is_image(file))
