"""What a function of one's own returns, as arrays by their names in an npz: arrays, a torch Dataset or DataLoader.

No message quotes a value that is in the data: it may be told to the server.
"""

from collections.abc import Callable, Mapping, MutableMapping
from copy import deepcopy
from typing import Any

import numpy as np

from fedapp.data.arrays import NAMES, check_unmasked
from fedapp.data.dataset import Array
from fedapp.data.errors import DataError
from fedapp.data.hugging_face import is_hugging_face
from fedapp.data.parts import all_separated, whole_name
from fedapp.data.pictures import AS_IT_IS, ImageForm, RowsOfImages, is_picture, pixels_of
from fedapp.data.targets import Problem

RETURNS = (
    "(x, y), (x_train, y_train, x_test, y_test), a dict of such arrays and group_train, a torch Dataset or "
    "DataLoader, a Dataset or DatasetDict of Hugging Face, or a pair of datasets for training and testing"
)

_READ_AGAIN = 8  # rows of a torch Dataset, at least, that are read twice


def is_hugging_face_form(found: Any) -> bool:
    """Tell whether this is a Dataset or DatasetDict of Hugging Face, or a dict of Datasets."""
    if isinstance(found, dict) and found:  # a DatasetDict is a dict too
        return all(map(is_hugging_face, found.values()))
    return is_hugging_face(found)


def is_of_rows(found: Any) -> bool:
    """Tell whether this is a torch Dataset or DataLoader, or what else has numbered rows, or a pair of them."""
    pair = found if is_pair_of_datasets(found) else (found,)
    return all(
        (hasattr(each, "__getitem__") or _is_loader(each))
        and hasattr(each, "__len__")
        and not (isinstance(each, str | Mapping) or _is_array(each))
        for each in pair
    )


def stream_reason(found: Any) -> str:
    """Say why rows that come one after the other can't be used; "" of any other object."""
    if _is_loader(found):
        found = found.dataset
    for kind in type(found).__mro__:
        if kind.__name__ in ("IterableDataset", "IterableDatasetDict"):
            needed = (
                "Dataset.from_list(list(…)) has all its rows"
                if kind.__module__.startswith("datasets")
                else "a Dataset with __getitem__ and __len__, or (x, y) of all its rows, is needed"
            )
            what = f"is an {kind.__name__}"
            return f"{what}, whose rows have no numbers by which they are divided over clients; {needed}"
    return ""


def is_pair_of_datasets(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2 and not any(map(_is_array, found))


def _is_loader(found: Any) -> bool:
    """Tell whether this is a DataLoader, by the two attributes that are read: ``dataset`` and ``collate_fn``."""
    return hasattr(found, "dataset") and hasattr(found, "collate_fn")


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or isinstance(value, list | tuple)


def named_arrays(
    found: Any, problem: Problem, group: str = "", form: ImageForm = AS_IT_IS
) -> dict[str, Array]:
    """Return arrays by their names in an npz.

    ``group`` names the column of natural ids in a dataset's rows, and ``form`` is what images of PIL in them become.
    """
    if reasons := list(filter(None, map(stream_reason, found if is_pair_of_datasets(found) else [found]))):
        raise problem(reasons[0])
    if isinstance(found, Mapping):
        if unknown := [key for key in found if whole_name(key) not in NAMES]:
            raise problem(f"is a dict with {', '.join(map(repr, unknown))}; allowed are {', '.join(NAMES)}")
        named = dict(found)
    elif is_pair_of_datasets(found):
        named = {}
        for part, rows in zip(("train", "test"), found, strict=True):
            named |= _part_of_rows(rows, part, group, form, problem)
    elif isinstance(found, tuple | list) and len(found) in (2, 4) and all(map(_is_array, found[1::2])):
        named = dict(zip(NAMES, found, strict=False))
    elif is_of_rows(found):
        named = _part_of_rows(found, "train", group, form, problem)
    else:
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise problem(f"is a {type(found).__name__}{size}; allowed are {RETURNS}")
    return {key: _array(value, key, problem) for key, value in all_separated(named).items()}


def _part_of_rows(rows: Any, part: str, group: str, form: ImageForm, problem: Problem) -> dict[str, Any]:
    """Return inputs, targets and, with the column ``group``, natural ids of a torch Dataset, or a DataLoader's batch.

    A DataLoader's ``collate_fn`` makes one batch of all its rows.
    """
    loader = rows if _is_loader(rows) else None
    source = rows if loader is None else loader.dataset
    if not _has_numbered_rows(source):
        if loader is not None:
            raise problem("is a DataLoader of a dataset without numbered rows; at least one is needed")
        raise problem(f"has a {type(rows).__name__} without length or numbered rows; allowed are {RETURNS}")
    if len(source) == 0:
        raise problem("is a dataset without rows; at least one is needed")
    if form != AS_IT_IS:
        if loader is not None:
            raise problem(
                "is a DataLoader, whose rows image-size and image-mode don't change; a Dataset is needed"
            )
        source = RowsOfImages(source, form, problem)
    read = _WithoutColumn(source, group) if group else source
    batch = _rows(read, problem) if loader is None else _collated(loader, read, problem)
    ids = {f"group_{part}": read.found(problem, batch)} if isinstance(read, _WithoutColumn) else {}
    x, y = batch if loader is None else _inputs_and_targets(batch, problem)
    return {f"x_{part}": x, f"y_{part}": y, **ids}


class _WithoutColumn:
    """Rows of a dataset without the column of natural ids, which are kept.

    A row is a mapping that has the column, or a pair (inputs, target) whose inputs are such a mapping. Other rows
    stay as they are.

    Attributes
    ----------
    ids : dict of int to id
        The natural ids of the rows that have been read, by row number.
    """

    def __init__(self, rows: Any, column: str) -> None:
        self.rows, self.column = rows, column
        self.ids: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        """Return a row without the column."""
        item = self.rows[row]
        if isinstance(item, Mapping):
            return self._without(row, item)
        if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Mapping):
            return self._without(row, item[0]), item[1]
        return item

    def _without(self, row: int, named: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.column not in named:
            return named
        self.ids[row] = named[self.column]
        return {name: value for name, value in named.items() if name != self.column}

    def found(self, problem: Problem, batch: Any = None) -> Array:
        """Return the natural ids of all rows (N,), which the rows have, or else the batch that was made of them.

        The column is taken out of the batch.
        """
        ids: Any = [self.ids[row] for row in range(len(self)) if row in self.ids]
        if not ids and (named := _mapping_of(batch)) is not None and self.column in named:
            ids = list(named.pop(self.column))
        if len(ids) != len(self):
            raise problem(
                f"has a natural id, group-column = {self.column!r}, in {len(ids)} of {len(self)} rows; all rows, or "
                "the batch that collate_fn makes, must be dicts, or have inputs in dicts, with this name"
            )
        return np.asarray([each.item() if hasattr(each, "item") else each for each in ids])


def _mapping_of(batch: Any) -> MutableMapping[str, Any] | None:
    """Return the dict of a batch's inputs; None where they have no names."""
    inputs = batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    return inputs if isinstance(inputs, MutableMapping) else None


def _rows(rows: Any, problem: Problem) -> tuple[Any, Any]:
    """Return inputs and targets of a torch Dataset, or whatever else has a length and pairs by number.

    Inputs may be several, in a dict or tuple.
    """
    if isinstance(first := rows[0], tuple | list) and len(first) == 2 and _are_several(first[0]):
        return _rows_of_several(rows, problem)
    x = y = np.empty(0)
    for row in range(len(rows)):
        item = rows[row]
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise problem(f"has rows of type {type(item).__name__}; (input, target) is needed")
        inputs, target = (pixels_or_array(value, problem) for value in item)
        if row == 0:  # one array from the start: a list of rows would need the memory twice
            x = np.empty((len(rows), *inputs.shape), inputs.dtype)
            y = np.empty((len(rows), *target.shape), target.dtype)
        for what, value, first in (("inputs", inputs, x), ("targets", target, y)):
            if value.shape != first.shape[1:]:
                by = "image-size and image-mode" if is_picture(item[0]) else "the collate_fn of a DataLoader"
                raise problem(
                    f"has {what} of shape {value.shape}, the first one's is {first.shape[1:]}; they must match, and "
                    f"{by} can make them alike"
                )
        if (inputs.dtype == np.uint8) != (x.dtype == np.uint8):  # only uint8 inputs are scaled
            raise problem(f"has inputs of type {inputs.dtype} and of type {x.dtype}; they must match")
        x, y = _wide_enough(x, inputs, problem), _wide_enough(y, target, problem)
        x[row], y[row] = inputs, target
    _check_read_again(rows, lambda row: (x[row], y[row]), problem)
    return x, y


def _has_numbered_rows(rows: Any) -> bool:
    from torch.utils.data import IterableDataset  # its __getitem__ raises an error

    return hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not isinstance(rows, IterableDataset)


def _check_read_again(rows: Any, first: Callable[[int], Any], problem: Problem) -> None:
    """Refuse rows that differ from those that ``first`` returns when they are read again."""
    for row in _some(rows):
        if not _is_same(first(row), rows[row], problem):
            raise problem(
                f"has a row {row} that differs when it is read again; rows are read once, so a random transform "
                "would be drawn once for the whole run: leave it out (the key augment changes images in training)"
            )


def _some(rows: Any) -> range:
    """Return the numbers of `_READ_AGAIN` rows or a few more, of all parts of the dataset."""
    return range(0, len(rows), max(1, len(rows) // _READ_AGAIN))


def _are_several(inputs: Any) -> bool:
    """Tell whether a row's inputs are several arrays, in a dict or tuple."""
    if isinstance(inputs, tuple):
        return len(inputs) > 1 and all(getattr(part, "shape", ()) != () for part in inputs)
    return isinstance(inputs, Mapping)


def _rows_of_several(rows: Any, problem: Problem) -> tuple[Any, Array]:
    """Return the inputs of all rows, in a dict by the names or places of the first row's, and the targets."""
    columns: dict[Any, list[Array]] = {}
    targets = []
    for row in range(len(rows)):
        inputs, target = rows[row]
        named = _named(inputs)
        if columns and set(named) != set(columns):
            raise problem(
                f"has a row with the inputs {', '.join(map(str, named))}, the first one's are "
                f"{', '.join(map(str, columns))}; they must match"
            )
        for name, value in named.items():
            columns.setdefault(name, []).append(pixels_or_array(value, problem))
        targets.append(pixels_or_array(target, problem))
    for name, values in {**columns, "the target": targets}.items():
        if unlike := next((value.shape for value in values if value.shape != values[0].shape), None):
            raise problem(
                f"has {name} of shape {unlike}, the first one's is {values[0].shape}; they must match, and a "
                "DataLoader's collate_fn can pad them"
            )
    _check_read_again(
        rows, lambda row: ({name: values[row] for name, values in columns.items()}, targets[row]), problem
    )
    return {str(name): np.stack(values) for name, values in columns.items()}, np.stack(targets)


def _named(several: Any) -> dict[Any, Any]:
    """Return what is in a dict, list or tuple by name or place."""
    return dict(several) if isinstance(several, Mapping) else dict(enumerate(several))


def _collated(loader: Any, rows: Any, problem: Problem) -> Any:
    """Return one batch of all rows, which ``collate_fn`` makes, for example by padding."""
    _check_sampler(loader, problem)
    found = [rows[row] for row in range(len(rows))]
    _check_read_again(rows, found.__getitem__, problem)

    def collated(chosen: list[Any]) -> Any:
        try:
            return loader.collate_fn(chosen)
        except Exception as error:
            raise problem(
                f"is a DataLoader whose collate_fn raises {type(error).__name__} for its rows; it must make one "
                "batch of all rows, for example by padding"
            ) from error

    # Copies, as a collate_fn may change the rows that it gets.
    first, again = (collated(deepcopy([found[row] for row in _some(rows)])) for _ in range(2))
    if not _is_same(first, again, problem):
        raise problem(
            "is a DataLoader whose collate_fn makes another batch of the same rows when it is called again; all rows "
            "are collated once, so what it draws, such as masks, would be drawn once for the whole run: leave it out"
        )
    return collated(found)


def _inputs_and_targets(batch: Any, problem: Problem) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch that a ``collate_fn`` has made."""
    if isinstance(batch, Mapping) and "labels" in batch:  # as collators of transformers make them
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise problem(
            f"is a DataLoader whose collate_fn makes a {type(batch).__name__}{size}; (inputs, targets), or a dict "
            "with labels, is needed"
        )
    inputs = batch[0]
    return tuple(inputs) if isinstance(inputs, list) and _are_several(tuple(inputs)) else inputs, batch[1]


def _check_sampler(loader: Any, problem: Problem) -> None:
    """Refuse a DataLoader that doesn't go through each row of its dataset once."""
    from torch.utils.data import RandomSampler, SequentialSampler

    sampler = loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:  # the user's own
        sampler = loader.batch_sampler
    is_shuffle = type(sampler) is RandomSampler and not sampler.replacement
    if not (is_shuffle or type(sampler) is SequentialSampler) or len(sampler) != len(loader.dataset):
        raise problem(
            f"is a DataLoader whose {type(sampler).__name__} doesn't count, as all rows of its dataset are read "
            "once; torch.utils.data.Subset chooses rows of a dataset"
        )


def _is_same(first: Any, again: Any, problem: Problem) -> bool:
    """Tell whether a row is equal when it is read again; NaNs count as equal here, and are refused later."""
    if isinstance(first, Mapping | list | tuple):
        if not isinstance(again, Mapping | list | tuple):
            return False
        first, again = _named(first), _named(again)
        return first.keys() == again.keys() and all(
            _is_same(value, again[name], problem) for name, value in first.items()
        )
    try:
        one, other = (pixels_or_array(value, problem) for value in (first, again))
    except DataError:  # what a DataLoader's collate_fn alone can read isn't compared
        return True
    if one.shape != other.shape:
        return False
    dtype = np.promote_types(one.dtype, other.dtype)
    one, other = one.astype(dtype), other.astype(dtype)
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def _wide_enough(rows: Array, value: Array, problem: Problem) -> Array:
    """Return rows with a type that also holds the values of another row."""
    if value.dtype == rows.dtype:
        return rows
    try:
        return rows.astype(np.promote_types(rows.dtype, value.dtype), copy=False)
    except TypeError:
        raise problem(f"has rows of type {rows.dtype} and of type {value.dtype}; they must match") from None


def pixels_or_array(value: Any, problem: Problem) -> Array:
    """Return the pixels of an image of PIL, or anything else as an array of numbers."""
    return pixels_of(value, problem) if is_picture(value) else _array(value, "a row", problem)


def _array(value: Any, key: str, problem: Problem) -> Array:
    try:
        tensor = value.detach().cpu() if hasattr(value, "detach") else value
        found = np.asarray(tensor)
        if found.dtype == object and found.size and all(isinstance(each, str) for each in found.flat):
            found = found.astype(str)  # a table's column of texts
    except (TypeError, ValueError, RuntimeError):
        found = np.empty(0, object)
    check_unmasked(key, value, problem)
    if found.dtype.kind not in "biufUcM":
        raise problem(f"has {key} of type {type(value).__name__}, which can't be an array of numbers")
    return found
