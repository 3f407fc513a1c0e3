"""Values of the run config from Python: keys with underscores, and arrays, classes and functions as their values."""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any
from uuid import uuid4

import numpy as np

from fedapp.api.errors import UnknownKeyError
from fedapp.config import ConfigError, RunConfig, Value, defaults
from fedapp.data import DataError
from fedapp.data.arrays import check_unmasked
from fedapp.data.dataset import DataColumns
from fedapp.data.errors import handed_over_dir
from fedapp.data.facts.maker import MADE_BY, maker_of
from fedapp.data.given.returned import is_hugging_face_form, is_of_rows, named_arrays, stream_reason
from fedapp.data.hugging_face import returning
from fedapp.data.parts import all_separated, whole_name
from fedapp.data.pictures import AS_IT_IS, ImageForm
from fedapp.meant import CLIENTS_BY, clients_as
from fedapp.own import register
from fedapp.report.files import without_digest

# Keys that take a callable object; a model's key takes a class or a function that makes a model.
_CALLABLES = ("loss", "metrics", "dataset")
_SEVERAL = ("metrics", "input-column", "label-column", "drop-column", "missing-values")  # lists of texts
# Keys that take a mapping.
MAPPINGS = ("dataset", "optimizer-options")
_PAIR = ("x_train", "y_train")
_ARRAYS = (*_PAIR, "x_test", "y_test", "group_train", "group_test")
# Keys that a file of arrays is made by: it has the natural ids, and the images in their form.
_IN_THE_FILE = ("group-column", "image-size", "image-mode")


def load_config(keys: Mapping[str, Any]) -> RunConfig:
    """Return the run config of keys and values that are given in Python.

    Raises
    ------
    TypeError
        If there is no such key.
    ConfigError
        If a value isn't allowed.
    """
    try:
        return RunConfig.load(as_values(keys))
    except ConfigError as error:
        raise in_python_names(error) from None


def in_python_names(error: ValueError) -> Exception:
    """Return an error with the keys' Python names, and names of parts without digests.

    An unknown key becomes an UnknownKeyError, which is a TypeError.
    """
    text = str(error)
    if not text.startswith("unknown key"):
        renamed = without_digest(clients_as(text, "num_clients"))
        return type(error)(renamed) if renamed != text else error
    text = text.replace(CLIENTS_BY, "num_clients=N")
    return UnknownKeyError(re.sub(r"'[a-z0-9-]+'", lambda name: name[0].replace("-", "_"), text))


def as_values(keys: Mapping[str, Any]) -> dict[str, Value]:
    """Return keys and values as the run config has them.

    Raises
    ------
    ConfigError
        If an object can't be a key's value.
    """
    values: dict[str, Value] = {}
    for name, given in keys.items():
        key = _key(name)
        if key == "dataset":
            values |= _dataset_values(given, keys)
        else:
            values[key] = as_value(key, given)
    if is_divided(keys.get("dataset")) and "partitioner" in keys:
        values["partitioner"] = as_value("partitioner", keys["partitioner"])
    if values.get("dataset") == "npz" and not isinstance(keys.get("dataset"), str):
        for key in _IN_THE_FILE:
            values.pop(key, None)
    return values


def _dataset_values(given: Any, keys: Mapping[str, Any]) -> dict[str, Value]:
    """Return the keys that data given in Python are, with their values."""
    if reason := stream_reason(given):
        raise ConfigError(f"dataset: {reason}")
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given,)
    if all(map(is_hugging_face_form, pair)):
        return {"dataset": register(returning(given))}
    if is_divided(given):
        return {"partitioner": "natural"} | _file_of_arrays(_joined(given), keys)
    if hasattr(given, "to_parquet"):
        return _file_of_table(given, keys)
    if not isinstance(given, str) and not callable(given):
        return _file_of_arrays(given, keys)
    return {"dataset": as_value("dataset", given)}


def is_divided(given: object) -> bool:
    """Tell whether data are a list with a pair (x, y) for each client."""
    return (
        isinstance(given, list)
        and bool(given)
        and all(isinstance(each, tuple) and len(each) == 2 for each in given)
    )


def _joined(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return clients' rows as one, with the client of each row as its natural client."""
    clients = [
        {
            name: _array(name, value)
            for name, value in all_separated(dict(zip(_PAIR, pair, strict=True))).items()
        }
        for pair in pairs
    ]
    first = clients[0]
    for client, arrays in enumerate(clients):
        if arrays.keys() != first.keys():
            raise ConfigError(f"dataset: client {client} has other inputs than client 0; they must match")
        y = arrays[_PAIR[1]]
        for name, x in arrays.items():
            if name != _PAIR[1] and (x.shape[:1] != y.shape[:1] or x.shape[1:] != first[name].shape[1:]):
                raise ConfigError(
                    f"dataset: client {client} has inputs {x.shape} and labels {y.shape}; as many rows of both are "
                    f"needed, and inputs like those of client 0, {first[name].shape}"
                )
    found = {name: np.concatenate([arrays[name] for arrays in clients]) for name in first}
    sizes = [len(arrays[_PAIR[1]]) for arrays in clients]
    return {**found, "group_train": np.repeat(np.arange(len(pairs)), sizes)}


def as_value(key: str, given: Any) -> Value:
    """Return one value as the run config has it: classes and functions by name, several metrics or columns as a list.

    Raises
    ------
    ConfigError
        If the object can't be the key's value.
    """
    if isinstance(given, np.generic):
        given = given.item()
    if isinstance(given, os.PathLike):
        given = os.fspath(given)
    if isinstance(given, str | bool | int | float):
        return given
    if _key(key) in _SEVERAL and isinstance(given, list | tuple):
        return ",".join(str(as_value(key, each)) for each in given)
    if _key(key) == "optimizer-options" and isinstance(given, Mapping):
        return " ".join(f"{option}={_in_toml(option, value)}" for option, value in given.items())
    if isinstance(given, type) or (callable(given) and (hasattr(given, "__qualname__") or key in _CALLABLES)):
        return register(given)
    what = (
        "a class, or a function that returns a new one, not"
        if key == "model"
        else "a value, a class or a function, not"
    )
    raise ConfigError(f"{key} = {str(given)[:60]}: must be {what} a {type(given).__name__}")


def _key(name: str) -> str:
    return name.replace("_", "-")


def _in_toml(option: str, value: Any) -> str:
    """Return an option of an optimizer as it stands in a text of the run config."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return f"[{','.join(_in_toml(option, each) for each in value)}]"
    if not isinstance(value, bool | int | float):
        raise ConfigError(
            f"optimizer-options: {option} is a {type(value).__name__}; must be a number or a flag"
        )
    return str(value).lower()


def _file_of_table(given: Any, keys: Mapping[str, Any]) -> dict[str, Value]:
    """Save a DataFrame in the cache, in a file named by its digest, so that other processes find it."""
    _refuse_path(keys)
    given, content = _with_plain_columns(given), BytesIO()
    try:
        given.to_parquet(content, index=False)
    except (ValueError, TypeError, OverflowError, NotImplementedError) as error:  # also Arrow's
        reason = "; ".join(map(str, reversed(error.args)))
        raise ConfigError(f"dataset: the table has a column that no file holds ({reason})") from None
    path = handed_over_dir() / f"{hashlib.sha256(content.getbuffer()).hexdigest()[:20]}.parquet"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid4().hex}.parquet")
        temporary.write_bytes(content.getbuffer())
        temporary.replace(path)
    return {"dataset": "files", "data-path": str(path)}


def _with_plain_columns(table: Any) -> Any:
    """Return a table without types that a file hasn't: intervals and periods are texts, long doubles float64.

    Raises
    ------
    ConfigError
        If a column holds complex numbers.
    """
    import pandas as pd

    if not isinstance(table, pd.DataFrame) or not table.columns.is_unique:
        return table  # columns that have one name are refused where the table is read
    found = {}
    for name, column in table.items():
        kind = column.dtype
        if isinstance(kind, pd.CategoricalDtype) and isinstance(kind.categories.dtype, pd.IntervalDtype):
            found[name] = column.cat.rename_categories(column.cat.categories.astype(str))
        elif isinstance(kind, pd.IntervalDtype | pd.PeriodDtype):
            found[name] = column.astype(str).where(column.notna(), None)
        elif isinstance(kind, pd.SparseDtype):
            found[name] = column.sparse.to_dense()
        elif kind == np.longdouble:
            found[name] = column.astype(np.float64)
        elif isinstance(kind, np.dtype) and kind.kind == "c":
            raise ConfigError(
                f"dataset: column {name!r} holds complex numbers; real ones are needed, such as its real and its "
                "imaginary part in columns of their own"
            )
    return table.assign(**found) if all(isinstance(name, str) for name in found) else table


def _refuse_path(keys: Mapping[str, Any]) -> None:
    if "data_path" in keys or "data-path" in keys:
        raise ConfigError("data-path: isn't read where dataset is arrays or a table")


def _file_of_arrays(given: Any, keys: Mapping[str, Any]) -> dict[str, Value]:
    """Save arrays in the cache, in a file named by their digest, so that other processes find them."""
    _refuse_path(keys)
    made_by = {
        key: str(keys.get(key.replace("-", "_"), keys.get(key, defaults()[key]))) for key in _IN_THE_FILE
    }
    config = RunConfig.load(dict(made_by))  # which checks them
    form = ImageForm.of(DataColumns(image_size=config.image_size, image_mode=config.image_mode))
    path = handed_over_dir() / f"{_digest(arrays := _arrays(given, config.group_column, form))}.npz"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{uuid4().hex}.npz")
        np.savez(temporary, **arrays)  # type: ignore[arg-type]
        temporary.replace(path)
    return {"dataset": "npz", "data-path": str(path)}


def _arrays(given: Any, group: str, form: ImageForm) -> dict[str, np.ndarray]:
    """Return arrays by their names in an npz.

    ``group`` names the column of natural ids in a dataset's rows, and ``form`` is what their images become.
    """
    if form != AS_IT_IS and not is_of_rows(given):
        raise ConfigError(
            "image-size and image-mode: arrays have no images of PIL, whose form these keys set"
        )
    if group and not is_of_rows(given):
        raise ConfigError(
            f"group-column = {group!r}: arrays have no columns; group_train and group_test of a mapping have the "
            "natural ids of their rows"
        )
    if isinstance(given, Mapping):
        if unknown := [name for name in given if whole_name(name) not in _ARRAYS]:
            raise ConfigError(
                f"dataset: {unknown[0]!r} is none of its arrays; allowed are {', '.join(_ARRAYS)}"
            )
        named = dict(given)
    elif is_of_rows(given):
        named = named_arrays(given, lambda reason: DataError(f"dataset: what is given {reason}"), group, form)
    elif isinstance(given, tuple) and len(given) in (2, 4):
        named = dict(zip(_ARRAYS, given, strict=False))
    else:
        raise ConfigError(
            f"dataset: is a {type(given).__name__}; must be a name, (x, y), (x, y, x_test, y_test), a "
            f"list with (x, y) of each client, a mapping with {' and '.join(_PAIR)}, a DataFrame, a torch Dataset or "
            "DataLoader, a Dataset or DatasetDict of Hugging Face, or a function that returns one of these"
        )
    arrays = {name: _array(name, value) for name, value in all_separated(named).items()}
    return {**arrays, **({MADE_BY: np.array(made_by)} if (made_by := maker_of(given)) else {})}


def _array(name: str, value: Any) -> np.ndarray:
    """Return an array, or a tensor or a table's column as one; float64 as float32, in which models are trained."""
    check_unmasked(name, value, lambda reason: DataError(f"dataset: {reason}"))
    try:
        if hasattr(value, "toarray"):  # sparse rows, of scipy
            value = value.toarray()
        found = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"dataset: {name} is no array ({error})") from None
    if found.dtype == object and found.size and all(isinstance(each, str) for each in found.flat):
        found = found.astype(str)  # a table's column of texts
    kinds, needed = {
        "x": ("biuf", "numbers"),
        "y": ("biufU", "numbers or texts"),
        "g": ("iuU", "whole numbers or texts"),
    }[name[0]]
    if found.dtype.kind not in kinds:
        holds = {"U": "texts", "O": "objects"}.get(found.dtype.kind, f"{found.dtype} values")
        raise ConfigError(f"dataset: {name} holds {holds}; {needed} are needed")
    with np.errstate(over="ignore"):  # values that aren't finite are refused where the file is read
        return found.astype(np.float32) if found.dtype == np.float64 else found


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    content = hashlib.sha256()
    for name, array in arrays.items():
        content.update(f"{name} {array.dtype} {array.shape}".encode())
        content.update(np.ascontiguousarray(array).data)
    return content.hexdigest()[:20]
