"""What a table or a folder of images holds, said before any training; and keys to begin with."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedapp.data.cells import (
    Texts,
    are_ids,
    holds_dates,
    holds_numbers,
    no_dates,
    not_categories,
    number_remarks,
    stand_ins,
    texts_of,
)
from fedapp.data.dataset import Array, DataColumns
from fedapp.data.errors import DataError
from fedapp.data.image_folder import IMAGES, images_below, read_image
from fedapp.data.tables import is_empty, tables_in, whole_table
from fedapp.sorting import naturally_sorted

if TYPE_CHECKING:
    import pyarrow

Keys = dict[str, Any]

# Names, in lower case, of columns that hold labels or natural ids as a rule.
_LABELS = (
    "label",
    "target",
    "class",
    "outcome",
    "diagnosis",
    "y",
    "response",
    "result",
    "event",
    "died",
    "death",
)
_SITES = (
    *("site", "hospital", "clinic", "center", "centre", "client", "institution", "station", "branch", "bank"),
    *("device", "user", "writer", "region", "school", "department", "location"),
)
_FEW = 50  # most different values of a column of classes
_MOST_SITES = 1000
_SHOWN = 4  # examples of a column's texts


@dataclass
class ColumnLook:
    """What a column of a table holds.

    Attributes
    ----------
    kind : str
        number, flag, text, date, or empty.
    gaps, distinct : int
        Number of empty cells, and of different values in the others.
    holds : str
        Least and largest number, or some of the texts.
    role : str
        label, site, dropped, or input.
    notes : list of str
        What is probably not meant.
    markers : list of str
        Texts and numbers that seem to stand for a missing value.
    """

    name: str
    kind: str
    gaps: int
    distinct: int
    holds: str
    role: str = "input"
    notes: list[str] = field(default_factory=list)
    markers: list[str] = field(default_factory=list)


@dataclass
class TableLook:
    """What a table holds, and keys to begin with."""

    rows: int
    columns: list[ColumnLook]
    classes: dict[str, int]
    sites: dict[str, int]
    keys: Keys
    notes: list[str]


class ImagesLook(NamedTuple):
    """What a folder of images holds.

    ``classes`` counts the images of each class, 0 of an empty folder, ``shapes`` those of each shape (C, H, W)
    """

    classes: dict[str, int]
    shapes: dict[tuple[int, ...], int]
    damaged: list[Path]
    turned: int
    keys: Keys


def is_folder_of_images(path: Path) -> bool:
    """Tell whether a folder is one of images, as the reader of `files` does."""
    return path.is_dir() and not tables_in(path)


def look_at_table(path: Path, columns: DataColumns) -> TableLook:
    """Describe a table, or a folder of tables of which each is a site.

    Parameters
    ----------
    columns : DataColumns
        What is given already: ``label`` and ``group`` are "" where the columns are to be guessed.

    Raises
    ------
    DataError
        If the table can't be read, or a column that is given isn't there.
    """
    table, owners, tables, notes = whole_table(path, columns)
    if not table.num_rows:
        raise DataError(f"{path}: has no rows; at least one is needed")
    if twice := [name for name, number in Counter(table.column_names).items() if number > 1]:
        raise DataError(f"{path}: has the column {twice[0]!r} twice; each name may be there once")
    found = [_look_at_column(name, table.column(name)) for name in table.column_names]
    label, group, guessed = _roles(found, columns, path, several=owners is not None)
    sites: dict[str, int] = {}
    if group:
        sites = _cell_counts(table.column(group))
    elif owners is not None:
        sites = dict(zip(tables, np.bincount(owners).tolist(), strict=True))
    classes = _classes(found, label, table)
    keys = _keys(path, found, label, group, classes, sites)
    return TableLook(table.num_rows, found, classes, sites, keys, [*notes, *guessed])


def look_at_images(root: Path) -> ImagesLook:
    """Describe a folder of images by class, or one with such folders in ``train`` and ``test``."""
    parts = [root / part for part in ("train", "test") if (root / part).is_dir()] or [root]
    classes: Counter[str] = Counter()
    shapes: Counter[tuple[int, ...]] = Counter()
    damaged: list[Path] = []
    turned = 0
    for part in parts:
        for folder in sorted(each for each in part.iterdir() if each.is_dir() and each.name[0] != "."):
            classes[folder.name] += 0
            for file in (each for each in images_below(folder) if each.parent == folder):
                pixels = None
                with suppress(DataError):
                    pixels = read_image(file)
                if pixels is None:
                    damaged.append(file)
                    continue
                shapes[pixels.shape] += 1
                classes[folder.name] += 1
                turned += _orientation(file) not in (None, 1)
    if not classes:
        raise DataError(f"{root}: has no folders, one for each class with its images ({', '.join(IMAGES)})")
    ordered = {name: classes[name] for name in naturally_sorted(classes)}
    return ImagesLook(ordered, dict(shapes.most_common()), damaged, turned, _image_keys(root, shapes))


def _orientation(file: Path) -> Any:
    from PIL import Image

    with Image.open(file) as image:
        return image.getexif().get(0x0112)


def _image_keys(root: Path, shapes: Counter[tuple[int, ...]]) -> Keys:
    """Return keys to begin with: one size and mode for all images, if they differ."""
    keys: Keys = {"dataset": "files", "data-path": str(root)}
    if len({shape[1:] for shape in shapes}) > 1:
        height, width = (int(np.median([shape[axis] for shape in shapes.elements()])) for axis in (1, 2))
        keys["image-size"] = f"{height}x{width}"
    if len({shape[0] for shape in shapes}) > 1:
        keys["image-mode"] = "colour"  # of which grey images lose nothing
    return {**keys, "model": "cnn", "normalize": "standardize", "partitioner": "dirichlet"}


def _look_at_column(name: str, column: "pyarrow.ChunkedArray") -> ColumnLook:
    """Describe a column; texts of which most are numbers are numbers beside what stands for a missing value."""
    empty = is_empty(column)
    gaps, filled = int(empty.sum()), column.filter(~empty)
    if not len(filled):
        return ColumnLook(name, "empty", gaps, 0, "", "dropped", [f"column {name!r} has no value"])
    if holds_dates(column):
        values = filled.to_numpy()
        return _dates(name, gaps, len(np.unique(values)), f"{values.min()!s:.10} to {values.max()!s:.10}")
    if holds_numbers(column):
        return _numbers(name, filled.to_numpy(), gaps)
    if (cells := texts_of(filled)) is None:
        return ColumnLook(
            name,
            str(column.type),
            gaps,
            0,
            "",
            "dropped",
            [f"column {name!r} holds neither numbers nor texts"],
        )
    texts = Texts.of(cells)
    shown = naturally_sorted(texts.values.tolist())
    if texts.are_dates:
        return _dates(name, gaps, len(shown), f"{shown[0]} to {shown[-1]}")
    if texts.share_of_numbers > 0.5:
        return _mostly_numbers(name, texts, gaps)
    holds = ", ".join(each if len(each) <= 20 else f"{each[:19]}…" for each in shown[:_SHOWN])
    look = ColumnLook(name, "text", gaps, len(shown), holds + ", …" * (len(shown) > _SHOWN))
    if said := not_categories(name, texts):
        look.role = "dropped"
        look.notes.append(said)
    return look


def _mostly_numbers(name: str, texts: Texts, gaps: int) -> ColumnLook:
    """Describe a column of numbers as one of these, and what its other cells hold as signs for a missing value."""
    values = np.array([float(value) for value in texts.values[texts.numbers].tolist()])
    look = _numbers(name, np.repeat(values, texts.counts[texts.numbers]), gaps)
    others = texts.values[~texts.numbers].tolist(), texts.counts[~texts.numbers].tolist()
    number = sum(others[1])
    said = ", ".join(f"{count} are {text!r}" for text, count in list(zip(*others, strict=True))[:_SHOWN])
    look.gaps += number
    look.markers += [text.strip() for text in others[0]]
    look.role = "input"
    look.notes.append(f"column {name!r}: {texts.filled - number} of {texts.filled} cells are numbers, {said}")
    return look


def _dates(name: str, gaps: int, distinct: int, holds: str) -> ColumnLook:
    return ColumnLook(name, "date", gaps, distinct, holds, "dropped", [no_dates(name)])


def _numbers(name: str, values: Array, gaps: int) -> ColumnLook:
    distinct = len(np.unique(values))
    if values.dtype.kind == "b":
        return ColumnLook(name, "flag", gaps, distinct, ", ".join(map(str, np.unique(values).tolist())))
    look = ColumnLook(name, "number", gaps, distinct, f"{values.min():.6g} to {values.max():.6g}")
    look.markers += stand_ins(values)
    look.notes += number_remarks([(name, values)], named=False)
    if distinct == 1:
        look.notes.append(f"column {name!r} has the same value in all rows")
    if distinct == 1 or are_ids(values):
        look.role = "dropped"
    return look


def _roles(
    found: list[ColumnLook], columns: DataColumns, path: Path, *, several: bool
) -> tuple[str, str, list[str]]:
    """Give each column its role; return the columns of labels and of natural ids, and what was guessed."""
    by_name = {each.name: each for each in found}
    for key, name in (("label-column", columns.label), ("group-column", columns.group)):
        if name and name not in by_name:
            raise DataError(f"{key} = {name!r}: {path} has no such column (found: {', '.join(by_name)})")
    notes = []
    group = columns.group
    if not group and not several:
        group = _likely_group(found)
        notes += [f"group-column = {group!r} is a guess from the column's name"] if group else []
    label = columns.label
    if not label:
        label = _likely_label([each for each in found if each.name != group])
        guess = f"label-column = {label!r} is a guess"
        notes.append(guess if label else "no column looks like labels: label-column names it")
    for name, role in ((label, "label"), (group, "site")):
        if name:
            by_name[name].role = role
    return label, group, notes


def _likely_group(found: list[ColumnLook]) -> str:
    """Return the first column whose name is usual for natural ids; "" if there is none."""
    for each in found:
        if each.name.lower() in _SITES and 2 <= each.distinct <= _MOST_SITES:
            return each.name
    return ""


def _likely_label(found: list[ColumnLook]) -> str:
    named = sorted(
        (_LABELS.index(each.name.lower()), each.name) for each in found if each.name.lower() in _LABELS
    )
    if named:
        return named[0][1]
    fits = [each for each in found if 2 <= each.distinct <= _FEW and each.kind in ("text", "flag")]
    last = found[-1] if found and found[-1].role == "input" else None
    return last.name if last else fits[-1].name if fits else ""


def _cell_counts(column: "pyarrow.ChunkedArray") -> dict[str, int]:
    counts = Counter(str(cell) for cell in column.to_pylist() if cell not in (None, ""))
    return {name: counts[name] for name in naturally_sorted(counts)}


def _classes(found: list[ColumnLook], label: str, table: "pyarrow.Table") -> dict[str, int]:
    """Return the number of rows of each class; {} if labels are numbers, or there are none."""
    look = next((each for each in found if each.name == label), None)
    if look is None or look.distinct > _FEW or look.kind == "date":
        return {}
    counts = _cell_counts(table.column(label))
    if look.kind != "number":
        return counts
    numbers = [float(name) for name in counts]
    whole = all(number == int(number) for number in numbers)
    return counts if whole and (min(numbers) >= 0 or len(numbers) == 2) else {}


def _keys(
    path: Path,
    found: list[ColumnLook],
    label: str,
    group: str,
    classes: dict[str, int],
    sites: dict[str, int],
) -> Keys:
    """Return keys to begin with."""
    keys: Keys = {"dataset": "files", "data-path": str(path)}
    if label:
        keys["label-column"] = label
    if group:
        keys["group-column"] = group
    keys |= _input_keys(found)
    keys["normalize"] = "standardize"
    if sites:
        keys |= {"partitioner": "natural", "test-on": "own"}
    if classes:
        keys["metrics"] = "auroc,accuracy" if len(classes) == 2 else "accuracy,f1-macro"
    elif label:
        keys["loss"] = "mse"
    return {**keys, "model": "logistic" if len(found) < 5 else "mlp"}


def _input_keys(found: list[ColumnLook]) -> Keys:
    """Return the keys that make numbers of the columns: which are left out, and what fills gaps."""
    inputs = [each for each in found if each.role == "input"]
    dropped = [each.name for each in found if each.role == "dropped"]
    markers = dict.fromkeys(marker for each in inputs for marker in each.markers)
    keys: Keys = {}
    if dropped:
        keys["drop-column"] = ",".join(dropped)
    if markers:
        keys["missing-values"] = ",".join(markers)
    if markers or any(each.gaps for each in found if each.role != "dropped"):
        keys["missing"] = "mean"
    if any(each.kind == "text" for each in inputs):
        keys["encode"] = True
    return keys
