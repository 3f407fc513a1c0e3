"""A run's model on new rows, prepared as the run prepared its own."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from fedapp.data import DataError
from fedapp.data.facts.preparation import (
    PREPARATION,
    Preparation,
    Prepared,
    check_columns,
    prepared_arrays,
    prepared_table,
)
from fedapp.data.parts import joined

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    from torch import nn

    from fedapp.config import RunConfig

MOST_CLASSES = 20  # most classes that have a column of probabilities each
_ROWS = 4096  # rows that go through the model at once


class Predictions(NamedTuple):
    """Predictions as a table, a row for each row or image, and what isn't as in training, a line each."""

    table: "pd.DataFrame"
    remarks: list[str]


def preparation_of(run: Path) -> Preparation:
    """Return how a run prepared its inputs; DataError where it isn't known."""
    try:
        return Preparation.read(run)
    except FileNotFoundError:
        raise DataError(
            f"{run}: has no {PREPARATION}, as it isn't a run's folder, or the run ended "
            "before its first round; resume = … writes it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run / PREPARATION}: can't be read ({type(error).__name__}: {error})") from None


def predictions(model: "nn.Module", preparation: Preparation, config: "RunConfig", data: Any) -> Predictions:
    """Predict new rows.

    Parameters
    ----------
    data : pandas.DataFrame, array, or path
        A table with the columns that the model was trained on, in any order, as a frame or a file (.csv, .tsv,
        .parquet), or as cells by column name, of one row, of several, or a list of rows; inputs as arrays (N, …), or
        in an .npz file as ``x``; a folder of images, or an image; a Dataset of Hugging Face, a torch Dataset or
        DataLoader, or (x, y), whose targets aren't looked at.

    Raises
    ------
    DataError
        If the data aren't of the form that the model was trained on.
    """
    positions = preparation.target_shape if preparation.targets == "classes" else preparation.target_shape[1:]
    if positions and preparation.targets == "numbers":
        raise DataError("the model has numbers for each position of a row; predict has one row for each row")
    rows, beside = _read(preparation, data)
    outputs, table, known = _outputs(model, rows.x), beside.reset_index(drop=True), rows.known
    if positions:
        outputs, table, known = _by_position(outputs, table, known, positions)
    if outputs.ndim != 2:
        raise DataError(f"the model's outputs have shape {outputs.shape}; predict needs (N, K)")
    for name, values in _told(preparation, config, outputs).items():
        free = name if name not in table.columns else f"predicted {name}"
        table[free] = values
        if not known.all():
            table[free] = table[free].where(known)
    return Predictions(table, rows.remarks)


def _by_position(
    outputs: Any, table: "pd.DataFrame", known: Any, positions: tuple[int, ...]
) -> tuple[Any, "pd.DataFrame", Any]:
    """Return outputs (N · positions, K) of rows with a class for each position, their table, and which are known.

    The table says which row and which position each is of, counted from 0.
    """
    import torch

    from fedapp.training.losses import classes_first

    each = int(np.prod(positions))
    try:
        whole = classes_first(torch.from_numpy(outputs), torch.empty((len(outputs), *positions)))
    except ValueError as error:
        raise DataError(f"the model's {error}") from None
    table = table.loc[np.repeat(np.arange(len(table)), each)].reset_index(drop=True)
    if "row" not in table.columns:
        table.insert(0, "row", np.repeat(np.arange(len(outputs)), each))
    for axis, places in enumerate(np.indices(positions)):
        name = "position" if len(positions) == 1 else f"position {axis}"
        table[name if name not in table.columns else f"predicted {name}"] = np.tile(
            places.ravel(), len(outputs)
        )
    return whole.movedim(1, -1).flatten(0, -2).numpy(), table, np.repeat(known, each)


def _read(preparation: Preparation, data: Any) -> tuple[Prepared, "pd.DataFrame"]:
    """Return new rows prepared, and what stands beside their predictions: columns that are no inputs, or files."""
    import pandas as pd

    if preparation.columns:
        data = _framed(data)
    if isinstance(data, pd.DataFrame):
        return _from_frame(preparation, data, "the table")
    if not isinstance(data, str | Path):
        return _from_object(preparation, data)
    path = Path(data).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.suffix.lower() == ".npz":
        x = _npz_inputs(preparation, path)
        return prepared_arrays(preparation, x, str(path)), pd.DataFrame(index=range(len(x)))
    if preparation.made_by:
        raise DataError(
            f"{path}: how {preparation.made_by} made the model's inputs isn't known here; an .npz file with inputs "
            "x, as it returns them, can be predicted"
        )
    if preparation.kind == "image":
        return _from_images(preparation, path)
    if not preparation.columns:
        shape = ", ".join(map(str, preparation.shape))
        raise DataError(
            f"{path}: the model's inputs have no column names; an .npz file with inputs x (N, {shape}) is needed"
        )
    from fedapp.data.csv_files import read_texts
    from fedapp.data.tables import PARQUET, TABLES, read_table

    if path.suffix.lower() not in TABLES:
        raise DataError(
            f"{path}: is no table; {' or '.join(TABLES)} is needed, as the model's inputs are columns"
        )
    columns = preparation.columns_read
    table, assumed = read_table(path, columns)
    rows = prepared_table(preparation, _cells(preparation, table), str(path))
    beside = table.select(_beside(preparation, table.column_names))
    if beside.num_columns and path.suffix.lower() != PARQUET:  # a patient's number may begin with zeros
        beside = read_texts(path, columns, beside.column_names)
    return rows._replace(remarks=[*assumed, *rows.remarks]), beside.to_pandas(integer_object_nulls=True)


def _from_object(preparation: Preparation, data: Any) -> tuple[Prepared, "pd.DataFrame"]:
    """Return the rows of arrays, or of what else a run takes as its data in Python."""
    import pandas as pd

    from fedapp.data.given.returned import is_of_rows, named_arrays, pixels_or_array
    from fedapp.data.hugging_face import inputs_alone, is_hugging_face

    def problem(reason: str) -> DataError:
        return DataError(f"the inputs: what is given {reason}")

    if is_hugging_face(data) and isinstance(data, Mapping):
        raise problem(f"is a DatasetDict with {', '.join(data)}; one of its splits is needed")
    if is_hugging_face(data):
        if preparation.columns:
            return _from_frame(preparation, data.to_pandas(), "the dataset")
        x: Any = inputs_alone(data, preparation.columns_read, problem)
    elif isinstance(data, Mapping):
        x = _joined(preparation, data, "the inputs")
    elif isinstance(data, tuple) or is_of_rows(data):
        named = named_arrays(data, problem)
        if any(name.endswith("_test") or "_test." in name for name in named):
            raise problem("has test rows beside others; one set of rows is needed")
        several = {
            name.removeprefix("x_train."): each for name, each in named.items() if name[:8] == "x_train."
        }
        x = _joined(preparation, several, "the inputs") if several else named["x_train"]
    else:
        x = pixels_or_array(data, problem)
    return prepared_arrays(preparation, x, "the inputs"), pd.DataFrame(index=range(len(x)))


def _framed(data: Any) -> Any:
    """Return a frame of a row of a frame, or of cells by column name, of a row each or of several; else the data."""
    import pandas as pd

    from fedapp.data.hugging_face import is_hugging_face

    if isinstance(data, pd.Series):
        return data.to_frame().T.infer_objects()
    if isinstance(data, Mapping) and not is_hugging_face(data):
        return pd.DataFrame([data] if all(np.ndim(cell) == 0 for cell in data.values()) else dict(data))
    if isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        return pd.DataFrame(data)
    return data


def _from_frame(
    preparation: Preparation, given: "pd.DataFrame", source: str
) -> tuple[Prepared, "pd.DataFrame"]:
    """Return the rows of a frame, and its other columns."""
    import pyarrow

    if not preparation.columns:
        raise DataError(f"{source}: the model's inputs have no column names; an array of inputs is needed")
    check_columns(preparation, list(given.columns), source)
    inputs = given[[column.name for column in preparation.columns]]
    try:
        table = pyarrow.Table.from_pandas(inputs, preserve_index=False)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{source}: has a column of mixed types ({reason}); numbers or texts are needed"
        ) from None
    beside = given[_beside(preparation, given.columns)].copy()
    beside.columns = beside.columns.map(str)
    return prepared_table(preparation, _cells(preparation, table), source), beside


def _beside(preparation: Preparation, names: Iterable[str]) -> list[str]:
    """Return the columns of a table that stand beside the predictions: those that are no inputs."""
    inputs = {column.name for column in preparation.columns}
    return [name for name in names if name not in inputs]


def _cells(preparation: Preparation, table: "pyarrow.Table") -> "pyarrow.Table":
    from fedapp.data.tables import with_cells

    return with_cells(table, preparation.columns_read)[0]


def _from_images(preparation: Preparation, path: Path) -> tuple[Prepared, "pd.DataFrame"]:
    """Return the images in a folder and its folders, or one image, and their paths from there."""
    import pandas as pd

    from fedapp.data.image_folder import images_below, read_image
    from fedapp.data.pictures import ImageForm

    form = ImageForm.of(preparation.columns_read)
    files = [path] if path.is_file() else images_below(path)
    if not files:
        raise DataError(f"{path}: has no images; at least one is needed")
    found, damaged, other = [], [], []
    for file in files:
        pixels = None
        with suppress(DataError):
            pixels = read_image(file, form)
        if pixels is None:
            damaged.append(file)
        if pixels is not None and pixels.shape != preparation.shape:
            other.append(file)
            pixels = None
        found.append(pixels)
    remarks = []
    if damaged:
        remarks.append(
            f"{len(damaged)} of {len(files)} images can't be read ({_files(damaged)}): without a prediction"
        )
    if other:
        channels, height, width = preparation.shape
        mode = "grey" if channels == 1 else "colour"
        remarks.append(
            f"{len(other)} of {len(files)} images aren't {height}x{width} in {mode}, as in training "
            f"({_files(other)}): without a prediction (image-size and image-mode train on any)"
        )
    known = np.array([pixels is not None for pixels in found])
    x = np.stack([np.zeros(preparation.shape, np.uint8) if pixels is None else pixels for pixels in found])
    root = path if path.is_dir() else path.parent
    names = pd.DataFrame({"file": [file.relative_to(root).as_posix() for file in files]})
    return Prepared(preparation.prepared(x), known, remarks), names


def _files(files: Sequence[Path]) -> str:
    return ", ".join(file.name for file in files[:4]) + (", …" if len(files) > 4 else "")


def _npz_inputs(preparation: Preparation, path: Path) -> Any:
    try:
        with np.load(path, allow_pickle=False) as stored:
            if preparation.parts:
                several = {name.removeprefix("x."): stored[name] for name in stored if name.startswith("x.")}
                return _joined(preparation, several, str(path))
            if "x" not in stored:
                raise DataError(f"{path}: has no array x; found: {', '.join(stored) or 'none'}")
            return stored["x"]
    except DataError:
        raise
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(f"{path}: can't be read as npz ({type(error).__name__})") from None


def _joined(preparation: Preparation, several: Mapping[str, Any], source: str) -> Any:
    """Return several inputs of each row by name, or by place, as one array (N, D)."""

    def problem(reason: str) -> DataError:
        return DataError(f"{source}: {reason}")

    named = {f"x_train.{name}": np.asarray(value) for name, value in several.items()}
    found, parts = joined(named, problem)
    if tuple(map(str, parts)) != preparation.parts:
        told = [", ".join(map(str, each)) or "none" for each in (parts, preparation.parts)]
        raise problem(f"has the inputs {told[0]}; {told[1]} are needed, in an .npz file as x.NAME")
    return found["x_train"]


def _outputs(model: "nn.Module", x: Any) -> Any:
    """Return the model's outputs (N, …), float64."""
    import torch

    with torch.no_grad():
        pieces = [model(torch.from_numpy(x[start : start + _ROWS])) for start in range(0, len(x), _ROWS)]
    if not all(isinstance(piece, torch.Tensor) for piece in pieces):
        raise DataError(f"the model returns a {type(pieces[0]).__name__}; predict needs a tensor (N, K)")
    return torch.cat(pieces).double().numpy()


def _told(preparation: Preparation, config: "RunConfig", outputs: Any) -> dict[str, Any]:
    """Return the columns of predictions: class and probability, a probability of each label, or numbers.

    Outputs that aren't as many as the targets, of a loss of the user's own, are told as they are.
    """
    number = outputs.shape[1]
    if preparation.targets == "numbers":
        names = preparation.target_columns or tuple(map(str, range(*preparation.target_shape or (1,))))
        if len(names) != number:
            return _as_they_are(outputs)
        if config.loss == "bce":
            return {f"probability {name}": _sigmoid(outputs[:, place]) for place, name in enumerate(names)}
        return {f"predicted {name}": outputs[:, place] for place, name in enumerate(names)}
    if number < max(2, len(preparation.classes)):
        return _as_they_are(outputs)
    shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    shares = shifted / shifted.sum(axis=1, keepdims=True)
    best = outputs.argmax(axis=1)
    names = (*preparation.classes, *map(str, range(len(preparation.classes), number)))
    told: dict[str, Any] = {
        "class": np.array(names, object)[best],
        "probability": shares[np.arange(len(best)), best],
    }
    if len(names) <= MOST_CLASSES:
        told |= {f"probability {name}": shares[:, place] for place, name in enumerate(names)}
    return told


def _as_they_are(outputs: Any) -> dict[str, Any]:
    if outputs.shape[1] == 1:
        return {"output": outputs[:, 0]}
    return {f"output {place}": values for place, values in enumerate(outputs.T)}


def _sigmoid(values: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * values))
