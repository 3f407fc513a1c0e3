"""Tables in CSV or Parquet: which columns are inputs, labels and natural ids.

No message quotes a value that is in the data: it may be told to the server.
"""

import logging
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedapp.data.arrays import ranked
from fedapp.data.dataset import INDICATES, Array, DataColumns, IntArray, Missing, RawData, Targets
from fedapp.data.errors import path_error
from fedapp.data.targets import Problem, number_of_classes, read_targets
from fedapp.sorting import natural_key

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("fedapp.data")

TABLES = (".csv", ".parquet")
MOST_TEXTS = 1000  # most columns of 0 and 1 that one column of texts may become

# What a table's row numbers are called by pandas, and by Hugging Face's reader of CSV; in CSV they have no name.
_ROW_NUMBERS = re.compile(r"|__index_level_\d+__|Unnamed: \d+")


def table_data(path: Path, columns: DataColumns, targets: Targets | None) -> RawData:
    """Read a table: columns of labels, maybe one of natural ids, and inputs, which are numbers, in their order.

    Labels are whole numbers from 0, or names: then the classes are those names, sorted. Other numbers, or several
    columns, are targets as they are. Inputs are kept as float32, not scaled. A folder has a table for each natural
    client.

    Raises
    ------
    DataError
        If the file can't be read, has none of these columns, cells that are empty, or inputs that aren't finite
        numbers.
    """
    table, owners, group_names = _table_of_clients(path) if path.is_dir() else (read_table(path), None, ())
    problem = partial(path_error, path)
    inputs, labels, remarks = columns_of(table.column_names, columns, problem)
    if table.num_rows == 0:
        raise path_error(path, "has no rows; at least one is needed")
    if columns.missing == "drop":
        used = [*inputs, *labels, *([columns.group] if columns.group else [])]
        kept = np.flatnonzero(~np.any([_is_empty(table.column(name)) for name in used], axis=0))
        if not len(kept):
            raise path_error(path, "has an empty cell in every row; missing = 'drop' leaves none")
        log.info(
            "data: %d of %d rows have an empty cell and are left out",
            table.num_rows - len(kept),
            table.num_rows,
        )
        table, owners = table.take(kept), None if owners is None else owners[kept]
    found = [_inputs(path, name, table.column(name), columns) for name in inputs]
    x = np.column_stack([values for values, _, _ in found])
    y, classes = _labels(path, [(name, table.column(name)) for name in labels], targets)
    groups = owners
    if columns.group:
        groups, group_names = table_groups(path, columns.group, table.column(columns.group))
    count = len(classes) if classes else number_of_classes(y, problem)
    named = tuple(name for _, names, _ in found for name in names)
    encoded = tuple(
        (name, texts) for name, (_, _, texts) in zip(inputs, found, strict=True) if texts is not None
    )
    return RawData(
        [x], y, groups, len(y), count, "vector", 1.0, classes, named, (), remarks, group_names, encoded
    )


def tables_in(folder: Path) -> list[Path]:
    """Return the tables that lie in a folder, sorted, one for each client; beside folders, such as classes', none."""
    files = sorted(folder.iterdir(), key=lambda file: natural_key(file.name))
    if any(file.is_dir() and file.name[0] != "." for file in files):
        return []
    return [file for file in files if file.suffix.lower() in TABLES]


def _table_of_clients(folder: Path) -> tuple["pyarrow.Table", IntArray, tuple[str, ...]]:
    """Return the rows of all tables in a folder, the table that each row is from, (N,), and the tables' names."""
    import pyarrow

    files = tables_in(folder)
    tables = [read_table(file) for file in files]
    for file, table in zip(files, tables, strict=True):
        if unlike := sorted({*table.column_names} ^ {*tables[0].column_names}):
            raise path_error(
                file, f"has other columns than {files[0].name}, such as {unlike[0]!r}; all need the same"
            )
    try:
        joined = pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException:  # its message may quote a value
        raise path_error(
            folder, "has tables with a column of texts in one and of numbers in another; they must match"
        ) from None
    stems = [file.stem for file in files]
    names = stems if len(set(stems)) == len(stems) else [file.name for file in files]
    return joined, np.repeat(np.arange(len(tables)), [table.num_rows for table in tables]), tuple(names)


def _is_empty(column: "pyarrow.ChunkedArray") -> Array:
    """Tell which cells have no value, (N,); a blank text in a file of text is one, too."""
    empty: Array = column.is_null(nan_is_null=True).to_numpy()
    if (names := _names(column)) is not None:
        empty = empty | (names == "")
    return empty


def _inputs(
    path: Path, name: str, column: "pyarrow.ChunkedArray", columns: DataColumns
) -> tuple[Array, list[str], tuple[str, ...] | None]:
    """Return a column of inputs as M columns of numbers (N, M), their names, and a column of texts' texts."""
    if not columns.encode or (texts := _names(column)) is None:
        return _numbers(path, name, column, missing=columns.missing)[:, np.newaxis], [name], None
    empty = _is_empty(column)
    if columns.missing == "refuse":
        _check_filled(path, name, int(empty.sum()))
    values, (ranks,) = ranked([texts[~empty]])
    if len(values) > MOST_TEXTS:
        raise path_error(
            path, f"column {name!r} has {len(values)} different texts; encode allows {MOST_TEXTS}"
        )
    # An empty cell's text may be "None", which another cell can hold in earnest.
    found = np.zeros((len(texts), len(values)), np.float32)
    found[np.flatnonzero(~empty), ranks] = 1
    return found, [f"{name}{INDICATES}{value}" for value in values], values


class ChosenColumns(NamedTuple):
    """Names of the columns of inputs and of labels, and remarks on how they were chosen."""

    inputs: list[str]
    labels: list[str]
    remarks: tuple[str, ...] = ()


def columns_of(names: list[str], columns: DataColumns, problem: Problem) -> ChosenColumns:
    """Choose the columns of inputs and of labels among those that there are.

    Raises
    ------
    DataError
        If a column that is asked for isn't there, is there twice, or is to be two things.
    """
    labels = _listed(columns.label, names)
    group = [columns.group] if columns.group else []
    inputs = _listed(columns.inputs, names)
    numbers: list[str] = []
    if not inputs:
        left = [name for name in names if name not in (*labels, *group)]
        numbers = [name for name in left if _ROW_NUMBERS.fullmatch(name)]
        inputs = [name for name in left if name not in numbers]
    _check_present(
        names, columns, {"label-column": labels, "group-column": group, "input-column": inputs}, problem
    )
    _check_disjoint(columns, inputs, labels, group, problem)
    if not numbers:
        return ChosenColumns(inputs, labels)
    shown = ", ".join(name or "without a name" for name in numbers)
    said = f"the column {shown} is taken for row numbers and is no input; input-column says what is"
    return ChosenColumns(inputs, labels, (said,))


def _check_present(
    names: list[str], columns: DataColumns, wanted: dict[str, list[str]], problem: Problem
) -> None:
    """Refuse columns of keys, ``wanted``, that aren't among the names, or names that are there twice."""
    shown = [name if name.isprintable() else repr(name) for name in names[:8]]
    found = ", ".join(shown) + (f", … ({len(names)})" if len(names) > 8 else "")
    for key, listed in wanted.items():
        if missing := [name for name in listed if name not in names]:
            by_default = missing == ["label"] and columns == DataColumns()
            which = "" if by_default else f"; {key} names it"
            raise problem(f"needs a column {missing[0]!r} and others, each name once (found: {found}){which}")
    if not wanted["label-column"] or not wanted["input-column"] or len(set(names)) < len(names):
        raise problem(f"needs a column {columns.label!r} and others, each name once (found: {found})")


def _check_disjoint(
    columns: DataColumns, inputs: list[str], labels: list[str], group: list[str], problem: Problem
) -> None:
    """Refuse a column that is named twice, by one key or by two."""
    for key, text, listed in (
        ("label-column", columns.label, labels),
        ("input-column", columns.inputs, inputs),
    ):
        if len(set(listed)) < len(listed):
            raise problem(f"needs each column once; {key} = {text!r} names one twice")
    other = {*labels, *group}
    both = [name for name in inputs if name in other] or [name for name in labels if name in group]
    if both:
        raise problem(
            f"column {both[0]!r} is to be two things; input-column = {columns.inputs!r}, label-column = "
            f"{columns.label!r} and group-column = {columns.group!r} must differ"
        )


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
        raise path_error(path, "has names of columns that aren't UTF-8; UTF-8 is needed") from None
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


def table_groups(path: Path, name: str, column: "pyarrow.ChunkedArray") -> tuple[IntArray, tuple[str, ...]]:
    """Return natural ids (N,), numbers as they are, names by their rank; and the names, () of numbers."""
    from pyarrow import types

    _check_filled(path, name, column.null_count)
    if types.is_integer(column.type):
        return np.asarray(column.to_numpy().astype(np.int64)), ()
    names = _names(column)
    if names is None:
        raise path_error(path, f"column {name!r} has type {column.type}; whole numbers or names are needed")
    _check_filled(path, name, int((np.char.strip(names) == "").sum()))
    found, (ranks,) = ranked([names])
    return ranks, found


def _numbers(path: Path, name: str, column: "pyarrow.ChunkedArray", missing: Missing = "refuse") -> Array:
    from pyarrow import types

    if missing == "mean" and types.is_null(column.type):
        return np.full(len(column), np.nan, np.float32)
    if missing != "mean":
        _check_filled(path, name, column.null_count)
    if not _holds_numbers(column):
        raise path_error(
            path,
            f"column {name!r} has type {column.type}; numbers are needed (encode = true makes columns of 0 and 1 of "
            "texts)",
        )
    with np.errstate(over="ignore"):
        values: Array = column.to_numpy().astype(
            np.float32
        )  # flags and whole numbers with a gap: objects, None is NaN
    if not np.all(np.isfinite(values) | (np.isnan(values) & (missing == "mean"))):
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
        classes, (y,) = ranked([names])
        return y, classes
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
            path,
            f"column {name!r} has {empty} empty cells; all must be filled (missing = 'drop' leaves out their rows, "
            "'mean' fills in numbers)",
        )
