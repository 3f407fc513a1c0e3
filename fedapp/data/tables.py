"""Tables in CSV or Parquet: which columns are inputs, labels and natural ids.

No message quotes a value that is in the data: it may be told to the server.
"""

import logging
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedapp.data.dataset import Array, DataColumns, IntArray, RawData, Targets
from fedapp.data.errors import path_error
from fedapp.data.targets import Problem, number_of_classes, read_targets

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("fedapp.data")

# What a table's row numbers are called by pandas, and by Hugging Face's reader of CSV; in CSV they have no name.
_ROW_NUMBERS = re.compile(r"|__index_level_\d+__|Unnamed: \d+")


def table_data(path: Path, columns: DataColumns, targets: Targets | None) -> RawData:
    """Read a table: columns of labels, maybe one of natural ids, and inputs, which are numbers, in their order.

    Labels are whole numbers from 0, or names: then the classes are those names, sorted. Other numbers, or several
    columns, are targets as they are. Inputs are kept as float32, not scaled.

    Raises
    ------
    DataError
        If the file can't be read, has none of these columns, cells that are empty, or inputs that aren't finite
        numbers.
    """
    table = read_table(path)
    problem = partial(path_error, path)
    inputs, labels = columns_of(table.column_names, columns, problem)
    if table.num_rows == 0:
        raise path_error(path, "has no rows; at least one is needed")
    x = np.column_stack([_numbers(path, name, table.column(name)) for name in inputs])
    y, classes = _labels(path, [(name, table.column(name)) for name in labels], targets)
    groups = table_groups(path, columns.group, table.column(columns.group)) if columns.group else None
    count = len(classes) if classes else number_of_classes(y, problem)
    return RawData([x], y, groups, len(y), count, "vector", 1.0, classes, tuple(inputs))


def columns_of(names: list[str], columns: DataColumns, problem: Problem) -> tuple[list[str], list[str]]:
    """Return the columns of inputs and of labels; DataError if one that is asked for isn't there."""
    labels = _listed(columns.label, names)
    group = [columns.group] if columns.group else []
    inputs = _listed(columns.inputs, names) or _unnamed_left_out(names, (*labels, *group))
    shown = [name if name.isprintable() else repr(name) for name in names[:8]]
    found = ", ".join(shown) + (f", … ({len(names)})" if len(names) > 8 else "")
    for key, wanted in (("label-column", labels), ("group-column", group), ("input-column", inputs)):
        if missing := [name for name in wanted if name not in names]:
            which = "" if missing == ["label"] and columns == DataColumns() else f"; {key} names it"
            raise problem(f"needs a column {missing[0]!r} and others, each name once (found: {found}){which}")
    if not labels or not inputs or len(set(names)) < len(names):
        raise problem(f"needs a column {columns.label!r} and others, each name once (found: {found})")
    if both := [name for name in inputs if name in (*labels, *group)] or [
        name for name in labels if name in group
    ]:
        raise problem(
            f"column {both[0]!r} is to be two things; input-column = {columns.inputs!r}, label-column = "
            f"{columns.label!r} and group-column = {columns.group!r} must differ"
        )
    return inputs, labels


def _unnamed_left_out(names: list[str], taken: tuple[str, ...]) -> list[str]:
    """Return the columns that can be inputs where none are named: row numbers are none."""
    left = [name for name in names if name not in taken]
    if numbers := [name for name in left if _ROW_NUMBERS.fullmatch(name)]:
        shown = ", ".join(name or "without a name" for name in numbers)
        log.warning(
            "data: the column %s is taken for row numbers and is no input; input-column says what is", shown
        )
    return [name for name in left if name not in numbers]


def _listed(text: str, names: list[str]) -> list[str]:
    """Take a list of columns apart; a name may itself have commas."""
    if text in names or not text:
        return [text] if text else []
    return [name.strip() for name in text.split(",")]


def read_table(path: Path) -> "pyarrow.Table":
    """Read a table from a CSV or Parquet file; DataError if it isn't one."""
    import pyarrow

    try:
        _check_readable(path)
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


def _check_readable(path: Path) -> None:
    """Refuse files of which pyarrow's message says little."""
    if path.stat().st_size == 0:
        raise path_error(path, "is empty")
    with path.open("rb") as file:
        if path.suffix.lower() != ".parquet" and file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise path_error(path, "is UTF-16; UTF-8 is needed")


def table_groups(path: Path, name: str, column: "pyarrow.ChunkedArray") -> IntArray:
    """Return natural ids (N,): numbers as they are, names by their rank."""
    from pyarrow import types

    _check_filled(path, name, column.null_count)
    if types.is_integer(column.type):
        return np.asarray(column.to_numpy().astype(np.int64))
    names = _names(column)
    if names is None:
        raise path_error(path, f"column {name!r} has type {column.type}; whole numbers or names are needed")
    _check_filled(path, name, int((np.char.strip(names) == "").sum()))
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _numbers(path: Path, name: str, column: "pyarrow.ChunkedArray") -> Array:
    _check_filled(path, name, column.null_count)
    if not _holds_numbers(column):
        raise path_error(
            path,
            f"column {name!r} has type {column.type}; numbers are needed (pandas.get_dummies makes numbers of names)",
        )
    with np.errstate(over="ignore"):
        values: Array = column.to_numpy().astype(np.float32)
    if not np.isfinite(values).all():
        raise path_error(
            path, f"column {name!r} has values that are not finite in float32; all must be finite"
        )
    return values


def _labels(
    path: Path, found: list[tuple[str, "pyarrow.ChunkedArray"]], targets: Targets | None
) -> tuple[Array, tuple[str, ...]]:
    """Return labels (N,) and the names of the classes, () if they have none; or numbers (N, M)."""
    for name, column in found:
        _check_filled(path, name, column.null_count)
    (name, column), single = found[0], len(found) == 1
    if single and targets != "numbers" and (names := _names(column)) is not None:
        _check_filled(path, name, int((names == "").sum()))  # a blank may be a character to foretell
        classes, y = np.unique(names, return_inverse=True)
        return y.astype(np.int64), tuple(classes.tolist())
    for label, values in found:
        if not _holds_numbers(values):
            needed = "whole numbers or names" if single and targets != "numbers" else "numbers"
            raise path_error(path, f"column {label!r} has type {values.type}; {needed} are needed")
    if single:
        found_labels = column.to_numpy()
    else:
        found_labels = np.column_stack([values.to_numpy().astype(np.float64) for _, values in found])
    name = f"column {name!r}" if single else f"columns {', '.join(repr(label) for label, _ in found)}"
    return read_targets({name: found_labels}, targets, partial(path_error, path))[0], ()


def _holds_numbers(column: "pyarrow.ChunkedArray") -> bool:
    from pyarrow import types

    kinds = (types.is_integer, types.is_floating, types.is_boolean)  # flags are 0 and 1
    return any(kind(column.type) for kind in kinds)


def _names(column: "pyarrow.ChunkedArray") -> Any:
    """Return a column of names as an array of texts; None if it is something else."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        return np.asarray(column.to_pylist(), dtype=str)
    return None


def _check_filled(path: Path, name: str, empty: int) -> None:
    """Refuse cells without a value."""
    if empty:
        raise path_error(
            path, f"column {name!r} has {empty} empty cells; all must be filled (pandas: fillna, or dropna)"
        )
