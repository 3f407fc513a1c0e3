"""How a run prepares its inputs: what preparation.json says, and what turns new rows into a model's inputs.

A number becomes float32, an empty one the fill; a column of categories becomes a column of 0 and 1 for each; images
are uint8, channels first. Then inputs are multiplied by the scale, the mean is subtracted, and they are divided by
the deviation. The lines of PyTorch and pandas in docs/model.md do the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedapp.data.dataset import Array, DataColumns, Dataset, Missing, Normalize, Targets
from fedapp.data.errors import DataError
from fedapp.data.moments import Moments
from fedapp.names import Form, Part

if TYPE_CHECKING:
    import pyarrow

PREPARATION = "preparation.json"

_CHARACTERS = "fedapp.data.shakespeare.encode"  # what makes token ids of a text
_FAR = 20  # deviations from the mean from which on a number is hardly of the training rows' kind
_NAMED = 8  # most columns, texts or files that a message lists


class Column(NamedTuple):
    """A column of a table: its name; the texts that it may hold, in the order of their inputs, of categories.

    ``fill`` is what an empty number becomes; None: a row with an empty cell can't be predicted. An empty cell of
    categories is 0 in all their inputs, if the run was trained on rows with empty cells.
    """

    name: str
    categories: tuple[str, ...] | None = None
    fill: float | None = None


@dataclass(frozen=True)
class Preparation:
    """How a run prepares its inputs, and what its model's outputs are.

    Attributes
    ----------
    kind : str
        image, vector, text or parts, as `Dataset.kind`.
    dtype : str
        uint8 or float32: the type of inputs before they are scaled.
    shape : tuple of int
        Shape of one input, images channels first.
    columns : tuple of Column
        The table's columns that are inputs, in the model's order; () where inputs have no names.
    scale : float
        What inputs are multiplied by.
    normalize : bool or str
        Value of the key `normalize`, which ``mean`` and ``deviation`` follow from.
    mean, deviation : tuple of float
        What is subtracted, and what is divided by, of each value of a vector or channel of an image; () for neither.
    missing : str
        Value of the key `missing`: how rows with an empty cell were treated in training.
    targets : {"classes", "numbers"}
    target_columns : tuple of str
        Names of the columns of labels, or of numbers; () where they have none.
    classes : tuple of str
        Names of the classes, in the order of the model's outputs; () where they are numbers from 0.
    outputs : int
        Number of the model's outputs.
    target_shape : tuple of int
        Shape of one row's targets; () for a class.
    parts : tuple of str
        Name, type and shape of each of several inputs of a row.
    made_by : str
        The function, collate function or tokenizer that made the inputs before they are scaled, by its name, "" where
        there is none: its part of the preparation isn't known here.
    reading : mapping
        The keys by which files are read, such as `decimal`.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    columns: tuple[Column, ...]
    scale: float
    normalize: Normalize
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    missing: Missing
    targets: Targets
    target_columns: tuple[str, ...]
    classes: tuple[str, ...]
    outputs: int
    target_shape: tuple[int, ...]
    parts: tuple[str, ...]
    made_by: str
    reading: Mapping[str, Any]

    @classmethod
    def of(
        cls, dataset: Dataset, normalize: Normalize, columns: DataColumns, made_by: str = ""
    ) -> "Preparation":
        """Return the preparation of a dataset that is read and normalized as the run's config says."""
        mean, deviation = _moments_of(dataset, normalize)
        return cls(
            kind=dataset.kind,
            dtype=str(dataset.x.dtype),
            shape=dataset.input_shape,
            columns=_columns_of(dataset, mean, columns.missing),
            scale=dataset.scale,
            normalize=normalize,
            mean=mean,
            deviation=deviation,
            missing=columns.missing,
            targets=dataset.targets,
            target_columns=_labels_of(dataset, columns),
            classes=dataset.classes,
            outputs=dataset.num_outputs if dataset.has_classes else 0,
            target_shape=tuple(map(int, dataset.y.shape[1:])),
            parts=tuple(map(str, dataset.parts)),
            made_by=made_by or (_CHARACTERS if dataset.kind == "text" else ""),
            reading=asdict(columns),
        )

    @property
    def form(self) -> Form:
        """What the model is made for."""
        return tuple(map(Part.read, self.parts)) or self.shape

    @property
    def moments(self) -> Moments | None:
        """Mean and deviation; None where inputs aren't standardized."""
        return Moments(self.mean, self.deviation) if self.mean else None

    @property
    def columns_read(self) -> DataColumns:
        """How files are read; keys that another version has aren't among them."""
        known = {field.name for field in fields(DataColumns)}
        return DataColumns(**{key: value for key, value in self.reading.items() if key in known})

    def prepared(self, x: Array) -> Array:
        """Return inputs (N, *shape) as the model gets them: scaled and normalized; NaN is the mean."""
        number = np.zeros(len(x), np.int64)
        like = Dataset("", x, number, None, 0, 1, self.kind, self.scale, moments=self.moments)
        return like.prepared(x, "standardize" if self.mean else False)

    def to_json(self) -> str:
        """Return the content of preparation.json."""
        content = asdict(self) | {"columns": [_told(column) for column in self.columns]}
        if self.kind == "image":  # for who reads the file
            channels, height, width = self.shape
            content["image"] = {
                "height": height,
                "width": width,
                "mode": "grey" if channels == 1 else "colour",
            }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, run_dir: Path) -> "Preparation":
        """Read a run's preparation.json.

        Raises
        ------
        OSError, ValueError, KeyError, TypeError
            If it isn't there, or has another form.
        """
        content = json.loads((run_dir / PREPARATION).read_text("utf-8"))
        found = {each.name: _frozen(content[each.name]) for each in fields(cls)}
        found["columns"] = tuple(
            Column(
                each["name"],
                _frozen(each["categories"]) if each["kind"] == _CATEGORIES else None,
                each["fill"],
            )
            for each in content["columns"]
        )
        return cls(**found)


class Prepared(NamedTuple):
    """New rows as a model gets them.

    Attributes
    ----------
    x : array (N, *shape)
    known : bool array (N,)
        Whether a row can be predicted: one with an empty cell can't, unless the run was trained on such rows.
    remarks : list of str
        Lines that say which cells were empty, or hold a text that the model doesn't know.
    """

    x: Array
    known: Array
    remarks: list[str]


def check_columns(preparation: Preparation, names: Sequence[str], source: str) -> None:
    """Raise `DataError` unless each column that the model was trained on is there once."""
    wanted = [column.name for column in preparation.columns]
    if lacking := [name for name in wanted if list(names).count(name) != 1]:
        raise DataError(
            f"{source}: needs the columns that the model was trained on, each once; it has not: {_listed(lacking)} "
            f"(found: {_listed(names)})"
        )


def prepared_table(preparation: Preparation, table: "pyarrow.Table", source: str) -> Prepared:
    """Prepare the rows of a table, whose columns may be in any order.

    Raises
    ------
    DataError
        If the table hasn't all columns, each once, has no rows, or texts where numbers are needed.
    """
    check_columns(preparation, table.column_names, source)
    if table.num_rows == 0:
        raise DataError(f"{source}: has no rows; at least one is needed")
    parts: list[Array] = []
    remarks: list[str] = []
    gaps = np.zeros(table.num_rows, bool)
    empty: dict[str, int] = {}
    for column in preparation.columns:
        cells = table.column(column.name)
        read = _numbers if column.categories is None else _indicators
        values, missing = read(column, cells, source, remarks)
        parts.append(values)
        gaps |= missing
        if missing.any():
            empty[column.name] = int(missing.sum())
    filled = preparation.missing == "mean"
    if empty:
        where = ", ".join(f"{name}: {number}" for name, number in list(empty.items())[:_NAMED])
        where += ", …" if len(empty) > _NAMED else ""
        what = (
            "filled in as in training"
            if filled
            else "without a prediction, as the run was trained on full rows (missing = 'mean' trains on gaps)"
        )
        remarks.append(f"{int(gaps.sum())} of {len(gaps)} rows have an empty cell ({where}): {what}")
    known = np.ones(len(gaps), bool) if filled else ~gaps
    x = preparation.prepared(np.concatenate(parts, axis=1))
    if preparation.normalize == "standardize":
        remarks += _far_from_training(preparation, x)
    return Prepared(x, known, remarks)


def _far_from_training(preparation: Preparation, x: Array) -> list[str]:
    """Return a line for each column of numbers with cells (N, D) that seem to be in another unit, or mistyped."""
    places = np.cumsum([0] + [len(each.categories or (0,)) for each in preparation.columns])
    found = []
    for place, column in zip(places.tolist(), preparation.columns, strict=False):
        far = int((np.abs(x[:, place]) > _FAR).sum())
        if column.categories is None and far:
            found.append(
                f"column {column.name}: {far} of {len(x)} cells are more than {_FAR} deviations from the mean in "
                f"training, {preparation.mean[place]:.4g}"
            )
    return found


def prepared_arrays(preparation: Preparation, x: Array, source: str) -> Prepared:
    """Prepare arrays of inputs (N, *shape), as the run's data had them.

    Raises
    ------
    DataError
        If they have another shape or type, or values that aren't finite.
    """
    shape, dtype = (len(x) if x.ndim else 0, *preparation.shape), preparation.dtype
    if x.shape != shape or not len(x):
        raise DataError(
            f"{source}: has inputs of shape {x.shape}; (N, {', '.join(map(str, shape[1:]))}) is needed"
        )
    if x.dtype.kind not in "biuf" or (dtype == "uint8") != (x.dtype == np.uint8):
        raise DataError(f"{source}: has inputs of type {x.dtype}; {dtype}, as in training, is needed")
    x = x if dtype == "uint8" else x.astype(np.float32)
    if not np.isfinite(x).all():
        raise DataError(f"{source}: has inputs that aren't finite in float32; all must be")
    return Prepared(preparation.prepared(x), np.ones(len(x), bool), [])


_NUMBER, _CATEGORIES = "number", "categories"


def _told(column: Column) -> dict[str, Any]:
    if column.categories is None:
        return {"name": column.name, "kind": _NUMBER, "fill": column.fill}
    return {
        "name": column.name,
        "kind": _CATEGORIES,
        "categories": list(column.categories),
        "fill": column.fill,
    }


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _moments_of(dataset: Dataset, normalize: Normalize) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what is subtracted and divided by: of "symmetric" a half of each, as [0, 1] becomes [-1, 1]."""
    if normalize == "standardize":
        dataset.require_moments()
        assert dataset.moments is not None
        return dataset.moments.mean, dataset.moments.std
    if normalize == "symmetric":
        halves = (0.5,) * dataset.input_shape[0]
        return halves, halves
    return (dataset.mean, dataset.std) if normalize else ((), ())


def _columns_of(dataset: Dataset, mean: Sequence[float], missing: Missing) -> tuple[Column, ...]:
    """Return the table's columns that a dataset's inputs were made of; () where inputs have no names."""
    if dataset.kind != "vector":
        return ()
    encoded, found, place = dict(dataset.encoded), [], 0
    firsts = {f"{name}={texts[0]}" if texts else "": name for name, texts in encoded.items()}
    while place < len(dataset.columns):
        name = dataset.columns[place]
        if name in firsts:
            texts = encoded[firsts[name]]
            found.append(Column(firsts[name], texts))
            place += len(texts)
            continue
        found.append(Column(name, None, mean[place] if missing == "mean" else None))
        place += 1
    return tuple(found)


def _labels_of(dataset: Dataset, columns: DataColumns) -> tuple[str, ...]:
    """Return the names of the columns of labels, where data have columns."""
    if not dataset.columns:
        return ()
    width = 1 if dataset.targets == "classes" else int(dataset.y.shape[1])
    return tuple(name.strip() for name in columns.label.split(",")) if width > 1 else (columns.label,)


def _numbers(
    column: Column, cells: "pyarrow.ChunkedArray", source: str, remarks: list[str]
) -> tuple[Array, Array]:
    """Return a column of numbers (N, 1), filled in, and which cells are empty, (N,)."""
    from pyarrow import types

    if types.is_null(cells.type):
        values = np.full(len(cells), np.nan, np.float32)
    elif any(kind(cells.type) for kind in (types.is_integer, types.is_floating, types.is_boolean)):
        with np.errstate(over="ignore"):
            values = cells.to_numpy().astype(np.float32)
    else:
        raise DataError(
            f"{source}: column {column.name!r} has type {cells.type}; numbers are needed, as in training"
        )
    if np.isinf(values).any():
        raise DataError(
            f"{source}: column {column.name!r} has values that are not finite in float32; all must be"
        )
    missing = np.isnan(values)
    return np.where(missing, np.float32(0 if column.fill is None else column.fill), values)[:, None], missing


def _indicators(
    column: Column, cells: "pyarrow.ChunkedArray", source: str, remarks: list[str]
) -> tuple[Array, Array]:
    """Return a column of 0 and 1 for each category, (N, K), and which cells are empty, (N,)."""
    import pyarrow

    try:
        texts = np.asarray(cells.cast(pyarrow.string()).to_pylist(), dtype=object)
    except pyarrow.ArrowException:
        raise DataError(
            f"{source}: column {column.name!r} has type {cells.type}; texts are needed, as in training"
        ) from None
    missing = np.array([text is None or text == "" for text in texts], bool)
    categories = column.categories or ()
    places = {text: place for place, text in enumerate(categories)}
    found = np.array([places.get(text, -1) for text in texts], np.int64)
    values = np.zeros((len(texts), len(categories)), np.float32)
    values[np.flatnonzero(found >= 0), found[found >= 0]] = 1
    if (new := (found < 0) & ~missing).any():
        remarks.append(
            f"column {column.name}: {int(new.sum())} of {len(texts)} cells hold a text that the model doesn't know "
            f"({_listed(dict.fromkeys(texts[new].tolist()))}): they count as none of its {len(categories)} categories"
        )
    return values, missing


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    shown = [repr(name) for name in list(names)[:_NAMED]]
    return ", ".join(shown) + (f", … ({len(names)})" if len(names) > _NAMED else "")
