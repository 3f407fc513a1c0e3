"""Data from a function of one's own, module:function, called where the data are: on the server and on each device.

No message quotes a value that is in the data: it may be told to the server. What the function raised stands in the
log of the machine that it ran on.
"""

import hashlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedapp.data.arrays import array_data, array_splits
from fedapp.data.dataset import DataColumns, RawData, Targets
from fedapp.data.errors import DataError
from fedapp.data.facts.maker import maker_of
from fedapp.data.given.returned import is_hugging_face_form, is_of_rows, is_pair_of_datasets, named_arrays
from fedapp.data.hugging_face import hugging_face_data, is_hugging_face
from fedapp.data.pictures import ImageForm
from fedapp.own import OwnPartError, file_digest, imported, source_files

log = logging.getLogger("fedapp.data")

GIVEN = ("num_clients", "seed", "data_path")
"""What a function may take, by these names."""

_COLUMN_KEYS = {
    "inputs": "input-column",
    "label": "label-column",
    "group": "group-column",
    "drop": "drop-column",
    "image_size": "image-size",
    "image_mode": "image-mode",
}


def load_function(name: str) -> Callable[..., Any]:
    """Import module:function.

    Raises
    ------
    DataError
        If it isn't there, isn't a function, or needs more than it is given.
    """
    try:
        function = imported("dataset", name)
    except OwnPartError as error:
        raise DataError(str(error)) from error
    if not callable(function):
        raise DataError(f"dataset = {name!r}: is of type {type(function).__name__}; a function is needed")
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise DataError(
            f"dataset = {name!r}: doesn't tell what it takes; a function of Python is needed"
        ) from None
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [
        p.name
        for p in parameters
        if p.kind not in optional and p.default is p.empty and (p.name not in GIVEN or _by_place(p))
    ]
    if needed:
        raise DataError(
            f"dataset = {name!r}: the function needs {', '.join(needed)}; it is given {', '.join(GIVEN)}, by name"
        )
    return function


def _by_place(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.POSITIONAL_ONLY


def arguments_of(
    function: Callable[..., Any], name: str, num_clients: int, seed: int, data_path: str
) -> dict[str, Any]:
    """Return those of `num_clients`, `seed` and `data_path` that a function takes.

    Raises
    ------
    DataError
        If there is a data-path and the function takes none: it would be ignored.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters if not _by_place(p)}
    given = {"num_clients": num_clients, "seed": seed, "data_path": data_path}
    found = {key: value for key, value in given.items() if takes_all or key in taken}
    if data_path and "data_path" not in found:
        raise DataError(f"data-path = {data_path!r}: {name} takes no data_path; allowed is an empty one")
    return found


def digest_of(function: Callable[..., Any], name: str) -> str:
    """Return a digest of the function's source: its module's file, those beside that, and those that it imports.

    Files that are imported count as they were then.
    """
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
        called = f"{function.__module__}:{function.__qualname__}"
    except (TypeError, AttributeError, OSError):
        # No function but something that can be called, or a notebook's class.
        file, called = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None), name
    digest = hashlib.sha256(called.encode())
    for path in sorted({*Path(file or "").parent.glob("*.py"), *source_files(name)}):
        digest.update(f"{path.name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


def function_data(
    function: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any],
    columns: DataColumns,
    targets: Targets | None,
) -> RawData:
    """Call a function and turn what it returns into arrays.

    Raises
    ------
    DataError
        If it raises an error, or returns something else than ``fedapp.data.given.returned.RETURNS``.
    """

    def problem(reason: str) -> DataError:
        return DataError(f"dataset = {name!r}: what the function returned {reason}")

    try:
        found = function(**arguments)
        made_by = maker_of(found)
        digest_of(function, name)  # modules that the call has imported are digested as they are now
        if is_pair_of_datasets(found) and all(map(is_hugging_face, found)):
            found = dict(zip(("train", "test"), found, strict=True))
        elif not is_hugging_face_form(found):
            there = DataColumns()
            if is_of_rows(found):  # whose rows may have natural ids and images
                there = DataColumns(
                    group=columns.group, image_size=columns.image_size, image_mode=columns.image_mode
                )
            _no_columns(name, columns, there)
            found = named_arrays(found, problem, there.group, ImageForm.of(there))
    except DataError:
        raise
    except Exception as error:
        log.exception("%s raised an error", name)
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"dataset = {name!r}: the function raised {type(error).__name__} ({Path(place.filename).name}, line "
            f"{place.lineno}); the log says more where it ran"
        ) from error
    if is_hugging_face_form(found):
        return hugging_face_data(
            found, columns, targets, lambda reason: DataError(f"dataset = {name!r}: {reason}")
        )
    return replace(array_data(array_splits(found, targets, problem), problem), made_by=made_by)


def _no_columns(name: str, columns: DataColumns, there: DataColumns) -> None:
    """Refuse columns, and a form of images, other than those that are ``there``."""
    for attribute, key in _COLUMN_KEYS.items():
        if (value := getattr(columns, attribute)) != getattr(there, attribute):
            what = "images" if key.startswith("image") else "data with columns"
            raise DataError(f"{key} = {value!r}: {name} returned no {what}")
