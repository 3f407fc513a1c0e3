"""CSV files: their encoding, the sign between columns and that of decimals, where these are sure or given.

No message quotes a value that is in the data: it may be told to the server.
"""

import codecs
import csv
import re
from collections.abc import Sequence
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fedapp.data.cells import is_marker, texts_of, with_plain_numbers
from fedapp.data.dataset import AUTO, Array, DataColumns
from fedapp.data.errors import path_error

if TYPE_CHECKING:
    import pyarrow

TAB = "tab"
"""The value of the key `separator` that stands for a tabulator."""

_SEPARATORS = (",", ";", "\t", "|")
_MARKS = {  # of Unicode, at the beginning of a file; the longer ones first
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}

# What Western European texts have beyond ASCII, where they have it. Bytes of another encoding, read as Windows-1252,
# give other signs, or these beside other ones: Polish "płeć" gives "p³eæ", Czech "počet" gives "poèet".
_LETTERS = "àáâãäåæçèéêëìíîïñòóôõöøùúûüœß"
_WESTERN = re.compile(
    "|".join(
        (
            r"[\x00-\x7f]+",
            rf"(?<![{_LETTERS}])([áâäåçéëíîïóôöúüß]|[èø](?![aeiouy])|æ(?=[a-z])|à|[ìòù](?![a-z])|ñ(?=[aeiou])|ê(?=[tmls])"
            rf"|ã(?=[oe])|õ(?=e)|œ(?=u))(?![{_LETTERS}])",
            "[äöü]ß|éé|ç(ão|õe)|ñ[áéíó]",
            r"(?<=[a-z])[’…](?=[\w\s]|$)|(?<=m)[²³]|°(?![a-z]{2})|µ(?=[glm])|[±§€…·\xa0]|(?<=[\s\d])–(?=[\s\d])",
            r"(?<!\w)[«¿¡“„‘](?=[\s\w])|(?<=[\w.,!?\s])[»”“](?!\w)",
        )
    ),
    re.IGNORECASE,
)
_BLOCK = 1 << 20  # bytes that are checked at once
_SAMPLE = 1 << 16  # bytes, and rows, by which the sign between columns is found
_ROWS = 100

# Numbers with a decimal comma, and maybe points before each three digits.
_WITH_COMMA = re.compile(r"[+-]?(\d*|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?")
_WHOLE = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+)")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")


def read_csv(path: Path, columns: DataColumns) -> tuple["pyarrow.Table", tuple[str, ...]]:
    """Read a CSV file, and say what was assumed of it, in a line.

    Raises
    ------
    DataError
        If its encoding or the sign between its columns is neither sure nor given, or isn't what is given.
    pyarrow.ArrowException
        If it isn't a table.
    """
    encoding, separator = _form_of(path, columns)
    assumed = ["as Windows-1252"] if columns.csv_encoding == AUTO and encoding == "cp1252" else []
    if columns.separator == AUTO and separator != ",":
        sign = "tabulators" if separator == "\t" else repr(separator)
        assumed.append(f"with {sign} between columns")
    decimal = "." if columns.decimal == AUTO else columns.decimal
    table = _read(path, encoding, separator, decimal)
    if columns.decimal == AUTO and any(map(_has_decimal_comma, map(texts_of, table.columns))):
        decimal = ","
        table = _read(path, encoding, separator, decimal)
        assumed.append("with decimal commas")
        table = with_plain_numbers(table, decimal)
    table = _with_whole_codes(table, path, columns)
    if not assumed:
        return table, ()
    return table, (
        f"CSV is read {', '.join(assumed)}; the keys csv-encoding, separator and decimal can say otherwise",
    )


def read_texts(path: Path, columns: DataColumns, names: Sequence[str]) -> "pyarrow.Table":
    """Return columns of a CSV file, which are there, as the texts that the file has; empty cells have none.

    Raises
    ------
    DataError, pyarrow.ArrowException
        As `read_csv`.
    """
    return _read(path, *_form_of(path, columns), ".", as_texts=names)


def _form_of(path: Path, columns: DataColumns) -> tuple[str, str]:
    """Return the encoding and the sign between columns, as given or as the file tells."""
    encoding = _encoding_of(path) if columns.csv_encoding == AUTO else columns.csv_encoding
    if columns.separator == AUTO:
        return encoding, _separator_of(path, encoding)
    return encoding, "\t" if columns.separator == TAB else columns.separator


def _with_whole_codes(table: "pyarrow.Table", path: Path, columns: DataColumns) -> "pyarrow.Table":
    """Return a table whose natural ids are texts if they are codes that have zeros before their digits, as 007."""
    from pyarrow import compute, types

    name = columns.group
    if table.column_names.count(name) != 1 or not types.is_integer(table.column(name).type):
        return table
    texts = read_texts(path, columns, [name]).column(name)
    if not compute.any(compute.match_substring_regex(texts, r"^\s*0\d")).as_py():
        return table
    return table.set_column(table.column_names.index(name), name, texts)


def _read(
    path: Path, encoding: str, separator: str, decimal: str, as_texts: Sequence[str] = ()
) -> "pyarrow.Table":
    """Read a table, or of it those columns alone that are to be texts."""
    import pyarrow
    from pyarrow import csv as arrow_csv

    if codecs.lookup(encoding).name == "utf-8" and not _is_utf8(path):
        raise path_error(path, f"isn't {encoding}; csv-encoding = '{AUTO}', or its encoding, is needed")
    try:
        return arrow_csv.read_csv(
            path,
            # Without threads, an error names the row.
            read_options=arrow_csv.ReadOptions(use_threads=False, encoding=encoding),
            parse_options=arrow_csv.ParseOptions(delimiter=separator),
            convert_options=arrow_csv.ConvertOptions(
                decimal_point=decimal,
                include_columns=list(as_texts),
                column_types=dict.fromkeys(as_texts, pyarrow.string()),
                null_values=[""] if as_texts else None,
                strings_can_be_null=bool(as_texts),
            ),
        )
    except UnicodeError:
        raise path_error(path, f"can't be decoded as csv-encoding = {encoding!r}") from None


# ---- Encoding ---------------------------------------------------------------------------------------------------


def _encoding_of(path: Path) -> str:
    """Return the encoding by the mark at the beginning, or else UTF-8 or Windows-1252 where that is sure."""
    with path.open("rb") as file:
        head = file.read(4)
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    if _is_utf8(path):
        return "utf-8"
    try:
        western = not _WESTERN.sub("", path.read_bytes().decode("cp1252"))
    except UnicodeDecodeError:
        western = False
    if not western:
        raise path_error(
            path, "isn't UTF-8, and its encoding isn't sure; csv-encoding names it, such as cp1250 or latin-1"
        )
    return "cp1252"


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


# ---- Columns and decimals ---------------------------------------------------------------------------------------


def _separator_of(path: Path, encoding: str) -> str:
    """Return the sign between columns: the one that the header has, or that gives all rows as many columns."""
    with path.open(encoding=encoding, errors="replace", newline="") as file:
        sample = file.read(_SAMPLE)
    if len(sample) == _SAMPLE:
        sample = sample[: sample.rfind("\n") + 1]
    found = {separator: _widths(sample, separator) for separator in _SEPARATORS}
    in_header = [separator for separator, widths in found.items() if widths and widths[0] > 1]
    alike = [separator for separator in in_header if len(set(found[separator])) == 1]
    if len(in_header) < 2:
        return in_header[0] if in_header else ","
    if len(alike) != 1:
        raise path_error(
            path,
            f"has {' and '.join(map(repr, in_header))} in its first row, and which of them is between columns isn't "
            "sure; separator says it",
        )
    return alike[0]


def _widths(sample: str, separator: str) -> list[int]:
    """Return the number of columns of each of the first rows that aren't empty."""
    try:
        rows = list(islice(csv.reader(StringIO(sample, newline=""), delimiter=separator), _ROWS))
    except csv.Error:  # such as a cell that is too long
        return []
    return [len(row) for row in rows if row]


def _has_decimal_comma(texts: Array | None) -> bool:
    """Tell whether all cells are numbers, and a comma in one of them can't be one of thousands."""
    if texts is None:
        return False
    cells = [text.strip() for text in set(texts.tolist()) if text not in ("", "None") and not is_marker(text)]
    with_comma = [cell for cell in cells if _WITH_COMMA.fullmatch(cell)]
    if not all(_WHOLE.fullmatch(cell) for cell in cells if cell not in set(with_comma)):
        return False
    return any(not _THOUSANDS.fullmatch(cell) for cell in with_comma)
