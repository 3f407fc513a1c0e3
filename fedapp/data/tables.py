"""Tables in CSV or Parquet: which columns are inputs, labels and natural ids.

No message quotes a value that is in the data: it may be told to the server.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedapp.data.arrays import ranked
from fedapp.data.cells import (
    Texts,
    holds_dates,
    holds_numbers,
    no_dates,
    not_categories,
    not_numbers,
    number_remarks,
    texts_of,
    with_plain_numbers,
    without_missing,
)
from fedapp.data.csv_files import read_csv
from fedapp.data.dataset import AUTO, INDICATES, Array, DataColumns, IntArray, Missing, RawData, Targets
from fedapp.data.errors import path_error
from fedapp.data.targets import Problem, number_of_classes, read_targets
from fedapp.sorting import natural_key

if TYPE_CHECKING:
    import pyarrow

PARQUET = ".parquet"
TABLES = (".csv", ".tsv", PARQUET)
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
    table, owners, group_names, remarks = whole_table(path, columns)
    problem = partial(path_error, path)
    chosen = columns_of(table.column_names, columns, problem)
    if table.num_rows == 0:
        raise path_error(path, "has no rows; at least one is needed")
    table, owners, more = _filled_rows(path, table, owners, chosen, columns)
    found = [_inputs(path, name, table.column(name), columns) for name in chosen.inputs]
    x = np.column_stack([values for values, _, _ in found])
    y, classes = _labels(path, [(name, table.column(name)) for name in chosen.labels], targets)
    groups = owners
    if columns.group:
        groups, group_names = table_groups(path, columns.group, table.column(columns.group))
    count = len(classes) if classes else number_of_classes(y, problem)
    names = tuple(name for _, names, _ in found for name in names)
    encoded = tuple(
        (name, texts) for name, (_, _, texts) in zip(chosen.inputs, found, strict=True) if texts is not None
    )
    remarks = (*remarks, *chosen.remarks, *more, *_number_remarks(table, chosen, columns, y))
    return RawData(
        [x], y, groups, len(y), count, "vector", 1.0, classes, names, (), remarks, group_names, encoded
    )


def whole_table(
    path: Path, columns: DataColumns
) -> tuple["pyarrow.Table", IntArray | None, tuple[str, ...], tuple[str, ...]]:
    """Return the rows of a table, or of a folder of tables with the table of each, (N,), and their names; remarks."""
    if path.is_dir():
        table, owners, names, remarks = _table_of_clients(path, columns)
    else:
        (table, remarks), owners, names = read_table(path, columns), None, ()
    table, more = with_cells(table, columns)
    return table, owners, names, (*remarks, *more)


def with_cells(table: "pyarrow.Table", columns: DataColumns) -> tuple["pyarrow.Table", tuple[str, ...]]:
    """Return a table whose cells are numbers, or empty, as the keys decimal and missing-values say, and remarks."""
    if columns.decimal != AUTO:
        table = with_plain_numbers(table, columns.decimal)
    return without_missing(table, columns.missing_values) if columns.missing_values else (table, ())


def _filled_rows(
    path: Path, table: "pyarrow.Table", owners: IntArray | None, chosen: "ChosenColumns", columns: DataColumns
) -> tuple["pyarrow.Table", IntArray | None, tuple[str, ...]]:
    """Return the rows without an empty cell in the columns that must be filled, and a remark that counts the others.

    With missing = "mean" these columns are the labels and the natural ids, which are never filled in.
    """
    if columns.missing == "refuse":
        return table, owners, ()
    needed = [*chosen.labels, *([columns.group] if columns.group else [])]
    if columns.missing == "drop":
        needed = [*chosen.inputs, *needed]
    empty = {name: is_empty(table.column(name)) for name in needed}
    kept = np.flatnonzero(~np.any(list(empty.values()), axis=0))
    if not len(kept):
        raise path_error(path, f"has an empty cell in every row; missing = {columns.missing!r} leaves none")
    if len(kept) == table.num_rows:
        return table, owners, ()
    where = ", ".join(f"{name}: {int(cells.sum())}" for name, cells in empty.items() if cells.any())
    remark = (
        f"{table.num_rows - len(kept)} of {table.num_rows} rows have an empty cell ({where}) and are left out"
    )
    return table.take(kept), None if owners is None else owners[kept], (remark,)


def _number_remarks(
    table: "pyarrow.Table", chosen: "ChosenColumns", columns: DataColumns, y: Array
) -> tuple[str, ...]:
    """Return remarks on inputs, and on targets that are numbers, that are hardly measurements."""
    numbers = (
        (name, table.column(name).to_numpy()) for name in chosen.inputs if _is_measured(table.column(name))
    )
    found = number_remarks(numbers, named=bool(columns.inputs))
    if y.dtype.kind == "f":
        found += number_remarks(((name, y[:, place]) for place, name in enumerate(chosen.labels)), named=True)
    return found


def tables_in(folder: Path) -> list[Path]:
    """Return the tables that lie in a folder, sorted, one for each client; beside folders, such as classes', none."""
    files = [each for each in folder.iterdir() if each.name[0] != "."]  # not ._a.csv of macOS
    if any(file.is_dir() for file in files):
        return []
    tables = [file for file in files if file.suffix.lower() in TABLES]
    return sorted(tables, key=lambda file: natural_key(file.name))


def _table_of_clients(
    folder: Path, columns: DataColumns
) -> tuple["pyarrow.Table", IntArray, tuple[str, ...], tuple[str, ...]]:
    """Return all tables' rows, the table that each row is from, (N,), the tables' names, and remarks."""
    import pyarrow

    files = tables_in(folder)
    tables, remarks = zip(*(read_table(file, columns) for file in files), strict=True)
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
    owners = np.repeat(np.arange(len(tables)), [table.num_rows for table in tables])
    return joined, owners, tuple(names), tuple(dict.fromkeys(chain(*remarks)))


def is_empty(column: "pyarrow.ChunkedArray") -> Array:
    """Tell which cells have no value, (N,); a blank text in a file of text is one, too."""
    empty: Array = column.is_null(nan_is_null=True).to_numpy()
    if (names := texts_of(column)) is not None:
        empty = empty | (names == "")
    return empty


def _inputs(
    path: Path, name: str, column: "pyarrow.ChunkedArray", columns: DataColumns
) -> tuple[Array, list[str], tuple[str, ...] | None]:
    """Return a column of inputs as M columns of numbers (N, M), their names, and a column of texts' texts."""
    if (texts := texts_of(column)) is None:
        return _numbers(path, name, column, missing=columns.missing)[:, np.newaxis], [name], None
    empty = is_empty(column)
    if columns.missing == "refuse":
        _check_filled(path, name, int(empty.sum()))
    described = Texts.of(texts[~empty])
    refused = not_categories(name, described) if columns.encode else not_numbers(name, described)
    named = name in listed_columns(columns.inputs, [name])
    if refused and not (columns.encode and named):
        raise path_error(path, refused)
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
    labels = listed_columns(columns.label, names)
    group = [columns.group] if columns.group else []
    dropped = listed_columns(columns.drop, names)
    inputs = listed_columns(columns.inputs, names)
    numbers: list[str] = []
    if not inputs:
        left = [name for name in names if name not in (*labels, *group, *dropped)]
        numbers = [name for name in left if _ROW_NUMBERS.fullmatch(name)]
        inputs = [name for name in left if name not in numbers]
    chosen = {"label-column": labels, "group-column": group, "input-column": inputs, "drop-column": dropped}
    _check_present(names, columns, chosen, problem)
    _check_disjoint(columns, chosen, problem)
    if not numbers:
        return ChosenColumns(inputs, labels)
    shown = ", ".join(name or "without a name" for name in numbers)
    said = f"the column {shown} is taken for row numbers and is no input; input-column says what is"
    return ChosenColumns(inputs, labels, (said,))


def _check_present(
    names: list[str], columns: DataColumns, chosen: dict[str, list[str]], problem: Problem
) -> None:
    """Refuse columns, chosen by keys, that aren't among the names, and names that are there twice."""
    shown = [name if _is_plain(name) else repr(name) for name in names[:8]]
    found = ", ".join(shown) + (f", … ({len(names)})" if len(names) > 8 else "")
    for key, listed in chosen.items():
        if missing := [name for name in listed if name not in names]:
            by_default = missing == ["label"] and columns == DataColumns()
            which = "" if by_default else f"; {key} names it"
            raise problem(f"needs a column {missing[0]!r} and others, each name once (found: {found}){which}")
    if not chosen["label-column"] or not chosen["input-column"] or len(set(names)) < len(names):
        raise problem(f"needs a column {columns.label!r} and others, each name once (found: {found})")


def _is_plain(name: str) -> bool:
    """Tell whether a name can stand in a list without quotation marks."""
    return name.isprintable() and name == name.strip() and "," not in name


def _check_disjoint(columns: DataColumns, chosen: dict[str, list[str]], problem: Problem) -> None:
    """Refuse a column that is named twice, by one key or by two."""
    texts = {
        "label-column": columns.label,
        "group-column": columns.group,
        "input-column": columns.inputs,
        "drop-column": columns.drop,
    }
    keys_of: dict[str, list[str]] = {}
    for key, listed in chosen.items():
        if len(set(listed)) < len(listed):
            raise problem(f"needs each column once; {key} = {texts[key]!r} names one twice")
        for name in listed:
            keys_of.setdefault(name, []).append(key)
    for name, keys in keys_of.items():
        if len(keys) > 1:
            stated = " and ".join(f"{key} = {texts[key]!r}" for key in keys)
            raise problem(f"column {name!r} is to be two things; {stated} must differ")


def listed_columns(text: str, names: Sequence[str]) -> list[str]:
    """Take a list of columns apart; a name among those that there are may itself have commas, or blanks around it."""
    parts, found, start = text.split(",") if text else [], list[str](), 0
    while start < len(parts):
        ends = range(len(parts), start, -1)
        joined = {end: ",".join(parts[start:end]) for end in ends}
        end = next((end for end in ends if joined[end] in names), start + 1)
        found.append(joined[end] if joined[end] in names else joined[end].strip())
        start = end
    return found


def read_table(path: Path, columns: DataColumns) -> tuple["pyarrow.Table", tuple[str, ...]]:
    """Read a table from a CSV or Parquet file, and say what was assumed of it; DataError if it isn't one.

    Columns of categories have their values, and decimals of a database are float64.
    """
    import pyarrow
    from pyarrow import parquet

    remarks: tuple[str, ...] = ()
    try:
        if path.stat().st_size == 0:
            raise path_error(path, "is empty")
        if path.suffix.lower() == PARQUET:
            table = parquet.read_table(path)
        else:
            table, remarks = read_csv(path, columns)
        return _with_plain_types(table), remarks
    except pyarrow.ArrowException as error:
        # What follows in Arrow's own message is the row itself.
        where = re.search(r"(Row #\d+: )?Expected \d+ columns, got \d+", str(error))
        reason = where[0] if where else type(error).__name__
        raise path_error(path, f"can't be read as {path.suffix.lower()[1:]} ({reason})") from None
    except OSError as error:
        raise path_error(path, f"can't be read ({error.strerror or type(error).__name__})") from None


def _with_plain_types(table: "pyarrow.Table") -> "pyarrow.Table":
    import pyarrow
    from pyarrow import types

    for place, field in enumerate(table.schema):
        kind = field.type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if types.is_decimal(kind):
            kind = pyarrow.float64()
        if types.is_string_view(kind):
            kind = pyarrow.string()
        if kind != field.type:
            table = table.set_column(place, field.name, table.column(place).cast(kind))
    return table


def table_groups(path: Path, name: str, column: "pyarrow.ChunkedArray") -> tuple[IntArray, tuple[str, ...]]:
    """Return natural ids (N,), numbers as they are, names by their rank; and the names, () of numbers."""
    import pyarrow
    from pyarrow import types

    _check_filled(path, name, int(is_empty(column).sum()), filled_in=False)
    if types.is_floating(column.type):  # whole numbers that pandas has written beside an empty cell
        with suppress(pyarrow.ArrowInvalid):
            column = column.cast(pyarrow.int64())
    if types.is_integer(column.type):
        return np.asarray(column.to_numpy().astype(np.int64)), ()
    names = texts_of(column)
    if names is None:
        raise path_error(path, f"column {name!r} has type {column.type}; whole numbers or names are needed")
    _check_filled(path, name, int((np.char.strip(names) == "").sum()), filled_in=False)
    found, (ranks,) = ranked([names])
    return ranks, found


def _numbers(path: Path, name: str, column: "pyarrow.ChunkedArray", missing: Missing = "refuse") -> Array:
    from pyarrow import types

    if missing == "mean" and types.is_null(column.type):
        return np.full(len(column), np.nan, np.float32)
    if missing != "mean":
        _check_filled(path, name, column.null_count)
    if holds_dates(column):
        raise path_error(path, no_dates(name))
    if not holds_numbers(column):
        raise path_error(path, f"column {name!r} has type {column.type}; numbers are needed")
    with np.errstate(over="ignore"):
        # Flags and whole numbers with a gap are objects, whose None becomes NaN.
        values: Array = column.to_numpy().astype(np.float32)
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
        _check_filled(path, name, column.null_count, filled_in=False)
    (name, column), single = found[0], len(found) == 1
    if single and targets != "numbers" and (names := texts_of(column)) is not None:
        _check_filled(
            path, name, int((names == "").sum()), filled_in=False
        )  # a blank may be a character to foretell
        classes, (y,) = ranked([names])
        return y, classes
    for label, values in found:
        if not holds_numbers(values):
            needed = "whole numbers or names" if single and targets != "numbers" else "numbers"
            raise path_error(path, f"column {label!r} has type {values.type}; {needed} are needed")
    if single:
        found_labels = column.to_numpy()
    else:
        found_labels = np.column_stack([values.to_numpy().astype(np.float64) for _, values in found])
    name = f"column {name!r}" if single else f"columns {', '.join(repr(label) for label, _ in found)}"
    return read_targets({name: found_labels}, targets, partial(path_error, path))[0], ()


def _is_measured(column: "pyarrow.ChunkedArray") -> bool:
    """Tell whether a column holds numbers other than flags."""
    from pyarrow import types

    return holds_numbers(column) and not types.is_boolean(column.type)


def _check_filled(path: Path, name: str, empty: int, *, filled_in: bool = True) -> None:
    """Refuse cells without a value; ``filled_in``: whether there is a key that fills them in."""
    if empty:
        how = "'drop' leaves out their rows, 'mean' fills in numbers"
        if not filled_in:
            how = "'drop' or 'mean' leaves out their rows"
        raise path_error(
            path, f"column {name!r} has {empty} empty cells; all must be filled (missing = {how})"
        )
