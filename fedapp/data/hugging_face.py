"""Any data in Hugging Face's form: from the hub, from a folder, or as a function of one's own returns them.

No message quotes a value that is in the data: it may be told to the server.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapp.data.arrays import array_data, join_rows, ranked
from fedapp.data.cells import number_remarks
from fedapp.data.dataset import Array, DataColumns, RawData, Split, Targets
from fedapp.data.errors import PREFIX, DataError, one_line
from fedapp.data.parts import check_whole
from fedapp.data.pictures import ImageForm, picture_pixels
from fedapp.data.tables import ChosenColumns, columns_of
from fedapp.data.targets import Problem, number_of_classes, read_targets

if TYPE_CHECKING:
    from datasets import Dataset as HFDataset


_BATCH = 1000


def load_hugging_face(
    name: str, folder: Path | None, columns: DataColumns, targets: Targets | None
) -> RawData:
    """Download data, or find them in the Hugging Face cache or a folder, and read them.

    Parameters
    ----------
    name : str
        hf:NAME or hf:NAME:CONFIG.
    folder : Path, optional
        A local copy: of `save_to_disk`, or what `datasets.load_dataset` reads.
    columns : DataColumns
    targets : {"classes", "numbers"}, optional

    Raises
    ------
    DataError
        If the data can't be had, or the columns aren't there or don't hold what they should.
    """
    import datasets

    where = f"the folder {str(folder)!r}" if folder else "the Hugging Face hub"
    try:
        if folder is None:
            repository, _, config = name.removeprefix(PREFIX).partition(":")
            found = datasets.load_dataset(repository, config or None)
        elif any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(str(folder))
    except Exception as error:  # the hub's clients raise a dozen unrelated types
        advice = "" if folder else "; give a local copy with data-path"
        reason = type(error).__name__ if folder else one_line(error)
        raise DataError(f"dataset = {name!r}: can't be had from {where} ({reason}){advice}") from error
    return hugging_face_data(
        found, columns, targets, lambda reason: DataError(f"dataset = {name!r}: {reason}")
    )


def is_hugging_face(found: object) -> bool:
    """Tell whether an object is a Dataset or DatasetDict of `datasets`, without importing that."""
    return any(
        kind.__module__.startswith("datasets.") and kind.__name__ in ("Dataset", "DatasetDict")
        for kind in type(found).__mro__
    )


def hugging_face_data(
    found: "HFDataset | Mapping[str, HFDataset]",
    columns: DataColumns,
    targets: Targets | None,
    problem: Problem,
) -> RawData:
    """Turn a Dataset, or a DatasetDict with `train` and maybe `test`, into arrays.

    Inputs: images (decoded; all grey or all in colour, of one size), lists of numbers, or several columns of numbers.
    Labels: ClassLabel, whole numbers from 0, names, or numbers.

    Raises
    ------
    DataError
        If a column isn't there or doesn't hold what it should.
    """
    splits = _splits(found, problem)
    features = splits[0].features
    names = list(features)
    chosen = columns_of(names, _chosen(features, columns), problem)
    inputs, labels, remarks = chosen
    x = [_inputs(split, inputs, ImageForm.of(columns), problem) for split in splits]
    y, classes = _labels(splits, labels, targets, problem)
    groups, group_names = (
        _group_ids(splits, columns.group, problem) if columns.group else ([None] * len(splits), ())
    )
    if len({block.shape[1:] for block in x}) > 1 or len({block.dtype for block in x}) > 1:
        raise problem("has inputs of another shape or type in test than in train; they must match")
    rows = [Split(*parts, classes, (), group_names) for parts in zip(x, y, groups, strict=True)]
    named = tuple(inputs) if len(inputs) > 1 else ()
    if x[0].dtype == np.uint8 and x[0].ndim == 4:
        all_y, ids, num_train = join_rows(rows)
        count = len(classes) or number_of_classes(all_y, problem)
        return RawData(
            x, all_y, ids, num_train, count, "image", 1 / 255, classes, named, (), remarks, group_names
        )
    raw = array_data(rows, problem)
    if x[0].ndim == 2:
        remarks += _number_remarks(splits, chosen, columns, targets=y[0].dtype.kind == "f")
    return replace(raw, columns=named, remarks=(*remarks, *raw.remarks))


def _number_remarks(
    splits: "list[HFDataset]", chosen: ChosenColumns, columns: DataColumns, *, targets: bool
) -> tuple[str, ...]:
    """Return remarks on inputs, and on ``targets`` that are numbers, that are hardly measurements."""

    def numbers(names: list[str]) -> Iterator[tuple[str, Array]]:
        for name in names:
            cells = [each.select_columns([name]).with_format("arrow")[:].column(name) for each in splits]
            yield name, np.concatenate([np.asarray(part.to_numpy()) for part in cells])

    single = [name for name in chosen.inputs if not _is_list(splits[0].features[name])]
    found = number_remarks(numbers(single), named=bool(columns.inputs), of_files=False)
    return found + (number_remarks(numbers(chosen.labels), named=True, of_files=False) if targets else ())


def returning(given: Any) -> Callable[[], Any]:
    """Return a dataset function that returns data given in Python; it has the name by which the data were loaded."""
    first = given[0] if isinstance(given, tuple) else given
    split = next(iter(first.values())) if isinstance(first, Mapping) else first
    named = split.info.dataset_name or split.info.builder_name or type(first).__name__

    def dataset() -> Any:
        return given

    dataset.__qualname__ = f"<{re.sub(r'[^0-9A-Za-z-]+', '-', named)}>"
    dataset.returns_given = True  # type: ignore[attr-defined]
    return dataset


def inputs_alone(found: "HFDataset", columns: DataColumns, problem: Problem) -> Array:
    """Return the inputs of a Dataset's rows (N, …), which need no labels, chosen as for training.

    Raises
    ------
    DataError
        If the columns aren't there or don't hold what they should.
    """
    split = _splits(found, problem)[0]
    names = [name.strip() for name in _chosen(split.features, columns).inputs.split(",") if name.strip()]
    if not names or any(name not in split.features for name in names):
        wanted = ", ".join(names) or "one of images or of lists of numbers"
        raise problem(f"has the columns {', '.join(split.features)}; the input column is needed: {wanted}")
    return _inputs(split, names, ImageForm.of(columns), problem)


def _splits(found: Any, problem: Problem) -> "list[HFDataset]":
    """Return the training split and, where there is one, the test split; none that is empty."""
    parts: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {"train": found}
    if len(parts) == 1:
        parts = {"train": next(iter(parts.values()))}
    if "train" not in parts:
        raise problem(f"has the splits {', '.join(parts)}; train, and maybe test, are needed")
    chosen = [parts[part] for part in ("train", "test") if part in parts]
    if any(split.num_rows == 0 for split in chosen):
        raise problem("has no rows in train or test; at least one is needed")
    if any(list(split.features) != list(chosen[0].features) for split in chosen):
        raise problem("has other columns in test than in train; they must match")
    if any(split.format["type"] == "custom" for split in chosen):
        raise problem(
            "has a transform (set_transform), which wouldn't be applied; map does it once, or return a torch Dataset"
        )
    return [split.with_format(None) for split in chosen]  # images of one for PyTorch are tensors


def _chosen(features: Mapping[str, Any], columns: DataColumns) -> DataColumns:
    """Choose the inputs where none are named: the only image, or the only list of numbers, or all numbers."""
    if columns.inputs:
        return columns
    taken = {*columns.label.split(","), columns.label, columns.group}
    left = {name: feature for name, feature in features.items() if name not in taken}
    for wanted in (_is_image, _is_list):
        if len(fitting := [name for name, feature in left.items() if wanted(feature)]) == 1:
            return replace(columns, inputs=fitting[0])
    return columns


def _is_image(feature: Any) -> bool:
    return type(feature).__name__ == "Image"


def _is_list(feature: Any) -> bool:
    return isinstance(feature, list) or type(feature).__name__ in (
        "Sequence",
        "List",
        "LargeList",
        "Array2D",
        "Array3D",
    )


def _inputs(split: "HFDataset", names: list[str], form: ImageForm, problem: Problem) -> Array:
    features = split.features
    if len(names) == 1 and _is_image(features[names[0]]):
        return _images(split, names[0], form, problem)
    if len(names) == 1:
        x = _column(split, names[0], problem)
        if x.ndim > 1:  # such as the ids of words
            check_whole(f"column {names[0]!r}", x, problem)
        return x[:, None].astype(np.float32) if x.ndim == 1 else x
    columns = [_column(split, name, problem) for name in names]
    if any(column.ndim != 1 for column in columns):
        listed = ", ".join(name for name, column in zip(names, columns, strict=True) if column.ndim != 1)
        raise problem(f"column {listed} holds lists; input-column must name it alone, or leave it out")
    return np.column_stack(columns).astype(np.float32)


def _column(split: "HFDataset", name: str, problem: Problem) -> Array:
    """Return a column of numbers, or of lists of them that are equally long."""
    feature = split.features[name]
    try:
        values = split.select_columns([name]).with_format("numpy")[:][name]
        column = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError):
        column = np.empty(0, object)
    if column.dtype.kind == "O" and column.size and isinstance(column.flat[0], np.ndarray):
        column = _stacked(name, column, problem)
    if column.dtype.kind not in "biuf" or len(column) != split.num_rows:
        kind = getattr(feature, "dtype", None) or type(feature).__name__
        raise problem(
            f"column {name!r} has type {kind}; images, numbers, or lists of them that are equally long, all "
            "filled, are needed"
        )
    if column.dtype.kind == "i" and _is_of_bytes(feature):  # bytes are scaled
        column = column.astype(np.uint8)
    with np.errstate(over="ignore"):
        if column.dtype.kind == "f" and not np.isfinite(column.astype(np.float32)).all():
            raise problem(
                f"column {name!r} has empty cells, or values that are not finite in float32; all must be finite"
            )
    return column


def _stacked(name: str, column: Array, problem: Problem) -> Array:
    """Return a column of lists (N,) as one array (N, …)."""
    shapes = {np.shape(value) for value in column.flat}
    if len(shapes) == 1:
        return np.stack(list(column.flat))
    lengths = sorted({shape[0] if shape else 0 for shape in shapes})
    raise problem(
        f"column {name!r} has lists of {lengths[0]} to {lengths[-1]} values; they must be equally long (a function "
        "that returns a torch DataLoader can pad them by its collate_fn)"
    )


def _is_of_bytes(feature: Any) -> bool:
    """Tell whether a column holds uint8, itself or in lists and arrays."""
    while isinstance(feature, list) or hasattr(feature, "feature"):
        feature = feature[0] if isinstance(feature, list) else feature.feature
    return getattr(feature, "dtype", "") == "uint8"


def _images(split: "HFDataset", name: str, form: ImageForm, problem: Problem) -> Array:
    x = np.empty(0, np.uint8)
    row = 0
    for batch in split.select_columns([name]).iter(batch_size=_BATCH):
        for picture in batch[name]:
            pixels = None if picture is None else picture_pixels(picture, form)
            if pixels is None:
                raise problem(f"column {name!r} has an image that is empty or of more than 8 bits a pixel")
            if row == 0:  # one array from the start: a list of batches would need the memory twice
                x = np.empty((split.num_rows, *pixels.shape), np.uint8)
            if pixels.shape != x.shape[1:]:
                raise problem(
                    f"column {name!r} has an image of shape {pixels.shape}, the first one's is {x.shape[1:]}; "
                    "image-size and image-mode make them alike"
                )
            x[row] = pixels
            row += 1
    return x


_PARTS = ("train", "test")  # names of the splits in messages


def _labels(
    splits: "list[HFDataset]", names: list[str], targets: Targets | None, problem: Problem
) -> tuple[list[Array], tuple[str, ...]]:
    """Return the labels of each split, and the names of the classes, () if they have none."""
    if len(names) == 1 and targets != "numbers":
        found = _class_labels(splits, names[0], problem)
        if found is not None:
            return found
    arrays = {}
    for part, split in zip(_PARTS, splits, strict=False):
        columns = [_column(split, name, problem) for name in names]
        single = len(names) == 1
        what = f"column{'' if single else 's'} {', '.join(map(repr, names))} of {part}"
        arrays[what] = columns[0] if single else np.column_stack(columns).astype(np.float64)
    return read_targets(arrays, targets, problem), ()


def _class_labels(
    splits: "list[HFDataset]", name: str, problem: Problem
) -> tuple[list[Array], tuple[str, ...]] | None:
    """Return the labels of a column of classes with names, or of texts; None of another column."""
    feature = splits[0].features[name]
    if len({_kind_of_label(split.features[name]) for split in splits}) > 1:
        raise problem(f"column {name!r} has labels of another type in test than in train; they must match")
    if type(feature).__name__ == "ClassLabel":
        found = {
            f"column {name!r} of {part}": _column(split, name, problem)
            for part, split in zip(_PARTS, splits, strict=False)
        }
        own = [split.features[name].names for split in splits]
        read = zip(own, read_targets(found, "classes", problem), strict=True)
        return [_as_train_has_them(own[0], *each, problem) for each in read], tuple(own[0])
    if getattr(feature, "dtype", "") in ("string", "large_string"):
        classes, y = ranked([_texts(split, name, problem, blank=True) for split in splits])
        return list(y), classes
    return None


def _kind_of_label(feature: Any) -> str:
    if type(feature).__name__ == "ClassLabel":
        return "numbers with names"
    return "names" if getattr(feature, "dtype", "") in ("string", "large_string") else "numbers"


def _as_train_has_them(wanted: list[str], own: list[str], y: Array, problem: Problem) -> Array:
    """Return labels by the numbers that the training split has for their names."""
    if len(y) and y.max() >= len(own):
        raise problem(f"has the label {y.max()}, but names for {len(own)}")
    if unknown := sum(name not in wanted for name in own):
        raise problem(f"has {unknown} classes in test whose names train lacks; train must name them all")
    return np.array([wanted.index(name) for name in own], np.int64)[y]


def _texts(split: "HFDataset", name: str, problem: Problem, *, blank: bool = False) -> Array:
    """Return a text column; ``blank`` allows blank entries, as a character to predict may be one."""
    values = split[name][:]
    if any(value is None or not (str(value) if blank else str(value).strip()) for value in values):
        raise problem(f"column {name!r} has empty cells; all must be filled")
    return np.asarray(values, dtype=str)


def _group_ids(
    splits: "list[HFDataset]", name: str, problem: Problem
) -> tuple[list[Array | None], tuple[str, ...]]:
    """Return the natural ids of each split, and their names: () where they are numbers."""
    ids, feature = [_texts(split, name, problem) for split in splits], splits[0].features[name]
    if type(feature).__name__ == "ClassLabel":
        ids = [np.array(feature.names)[part.astype(np.int64)] for part in ids]
    elif getattr(feature, "dtype", "").startswith(("int", "uint")):
        return [part.astype(np.int64) for part in ids], ()
    names, ranks = ranked(ids)
    return list(ranks), names
