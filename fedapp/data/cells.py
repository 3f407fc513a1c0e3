"""What the cells of a table's columns hold: numbers, dates, ids, and what stands for a missing value.

No error quotes a value that is in the data, as it may be told to the server; but for texts that stand for a missing
value in most data, such as "?". The log of the machine with the data has the others.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedapp.data.dataset import Array
from fedapp.data.errors import brief

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger("fedapp.data")

# Texts that stand for a missing value in most data, in lower case; signs alone are such texts, too.
_MARKERS = {
    "na",
    "n/a",
    "n.a.",
    "nan",
    "null",
    "none",
    "nil",
    "missing",
    "unknown",
    "#n/a",
    "k.a.",
    "nd",
    "n.d.",
}

# Numbers that stand for a missing value in many data.
_SENTINELS = {float(sign * int("9" * digits)) for digits in range(1, 7) for sign in (1, -1)} | {
    -888.0,
    -777.0,
}

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(
    r"(\d{4}[-/.]\d{1,2}([-/.]\d{1,2})?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2}))([ T]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?Z?)?"
)
_FEW = 20  # rows, or different texts, from which on a column may be called one of ids
_MOSTLY = 0.9  # share of numbers from which on the other texts of a column are taken for slips
_FAR = 3  # a value is far from the others if it is further away than this many times their range


def texts_of(column: "pyarrow.ChunkedArray") -> Any:
    """Return a column of texts as an array (N,) with "None" in empty cells; None if it is something else."""
    from pyarrow import types

    if types.is_string(column.type) or types.is_large_string(column.type):
        return np.asarray(column.to_pylist(), dtype=str)
    return None


def holds_numbers(column: "pyarrow.ChunkedArray") -> bool:
    """Tell whether a column holds numbers, or flags, which are 0 and 1."""
    from pyarrow import types

    return any(kind(column.type) for kind in (types.is_integer, types.is_floating, types.is_boolean))


def holds_dates(column: "pyarrow.ChunkedArray") -> bool:
    """Tell whether a column has a type of dates or times."""
    from pyarrow import types

    return bool(types.is_temporal(column.type))


# ---- Missing values ---------------------------------------------------------------------------------------------


def without_missing(table: "pyarrow.Table", missing_values: str) -> tuple["pyarrow.Table", tuple[str, ...]]:
    """Return a table in which the cells that stand for a missing value are empty, and remarks.

    A column of texts of which nothing but numbers is left becomes one of numbers.

    Parameters
    ----------
    table : pyarrow.Table
    missing_values : str
        Texts and numbers with commas between them, ``"?,NA,-999"``.
    """
    markers = list(dict.fromkeys(filter(None, map(str.strip, missing_values.split(",")))))
    unused = set(markers)
    for place, name in enumerate(table.column_names):
        column, found = _emptied(table.column(place), markers)
        if found:
            table = table.set_column(place, name, column)
            unused -= found
    remarks = [f"missing-values: no cell is {marker!r}" for marker in markers if marker in unused]
    return table, tuple(remarks)


def _emptied(
    column: "pyarrow.ChunkedArray", markers: Sequence[str]
) -> tuple["pyarrow.ChunkedArray", set[str]]:
    """Return a column without the cells that stand for a missing value, and which of the markers it had."""
    import pyarrow
    from pyarrow import compute

    wanted: dict[str, str | float]
    is_text = texts_of(column) is not None
    if is_text:
        cells = compute.utf8_trim_whitespace(column)
        wanted = {marker: marker for marker in markers}
    elif holds_numbers(column):
        cells = column
        wanted = {marker: float(marker) for marker in markers if _NUMBER.fullmatch(marker)}
    else:
        return column, set()
    hits = {marker: compute.equal(cells, pyarrow.scalar(value)) for marker, value in wanted.items()}
    found = {marker for marker, hit in hits.items() if compute.any(hit).as_py()}
    for marker in found:
        column = compute.if_else(compute.fill_null(hits[marker], False), None, column)
    return (as_numbers(column) if found and is_text else column), found


def as_numbers(column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
    """Return a column of texts as whole numbers, or else as numbers, if all its texts are such; else as it is."""
    import pyarrow
    from pyarrow import compute

    trimmed = compute.utf8_trim_whitespace(column)
    for kind in (pyarrow.int64(), pyarrow.float64()):
        try:
            return compute.cast(trimmed, kind)
        except pyarrow.ArrowInvalid:  # a text that is no such number
            continue
    return column


def with_plain_numbers(table: "pyarrow.Table", decimal: str) -> "pyarrow.Table":
    """Return a table whose columns of texts are numbers if all are, by the sign of decimals, a point or a comma.

    The other sign may stand before each three digits.
    """
    from pyarrow import compute

    sign = "." if decimal == "," else ","
    number = re.compile(rf"[+-]?(\d+|\d{{1,3}}([{sign}]\d{{3}})+)?([{decimal}]\d+)?")
    for place, name in enumerate(table.column_names):
        column = table.column(place)
        if (texts := texts_of(column)) is None:
            continue
        cells = {text.strip() for text in texts.tolist()} - {"", "None"}
        if any(map(number.fullmatch, cells)) and all(
            number.fullmatch(cell) or is_marker(cell) for cell in cells
        ):
            plain = compute.replace_substring(compute.replace_substring(column, sign, ""), decimal, ".")
            table = table.set_column(place, name, as_numbers(plain))
    return table


# ---- Texts where numbers are needed -----------------------------------------------------------------------------


class Texts(NamedTuple):
    """What the filled cells of a column of texts hold.

    Attributes
    ----------
    values : array of str
        Different texts, sorted.
    counts : int array
        Number of cells with each of them.
    numbers : bool array
        Which of them are numbers.
    dates : bool array
        Which of them are dates.
    """

    values: Array
    counts: Array
    numbers: Array
    dates: Array

    @classmethod
    def of(cls, texts: Array) -> "Texts":
        """Describe the texts of the filled cells."""
        values, counts = np.unique(texts, return_counts=True)
        stripped = [value.strip() for value in values.tolist()]
        numbers = np.array([_NUMBER.fullmatch(text) is not None for text in stripped], bool)
        dates = np.array([_DATE.fullmatch(text) is not None for text in stripped], bool)
        return cls(values, counts, numbers, dates)

    @property
    def filled(self) -> int:
        """Number of filled cells."""
        return int(self.counts.sum())

    @property
    def are_dates(self) -> bool:
        """Whether all texts are dates."""
        return len(self.values) > 0 and bool((self.dates & ~self.numbers).all())

    @property
    def have_commas(self) -> bool:
        """Whether all texts are numbers with commas among their digits."""
        cells = [value for value in self.values.tolist() if not is_marker(value)]
        return any("," in cell for cell in cells) and all(
            re.fullmatch(r"\s*[+-]?[\d.,]+\s*", cell) for cell in cells
        )

    @property
    def are_ids(self) -> bool:
        """Whether each of many cells has a text of its own."""
        return self.filled == len(self.values) > _FEW

    @property
    def share_of_numbers(self) -> float:
        """Share of the filled cells that are numbers."""
        return float(self.counts[self.numbers].sum() / max(self.filled, 1))


def not_numbers(name: str, texts: Texts) -> str:
    """Return the sentence that says why a column of texts isn't one of numbers, and what to do."""
    if texts.are_dates:
        return no_dates(name)
    if texts.share_of_numbers > 0.5:
        return _mixed(name, texts)
    if texts.have_commas:
        return f"column {name!r} has numbers with commas; decimal = ',' or '.' says which sign is that of decimals"
    if texts.are_ids:
        return f"column {name!r} has a different text in each of {texts.filled} rows, as an id has; {_dropped(name)}"
    return f"column {name!r} has type string; numbers are needed (encode = true makes columns of 0 and 1 of texts)"


def not_categories(name: str, texts: Texts) -> str:
    """Return the sentence that says why a column of texts should hardly be encoded; "" if it may be."""
    if texts.are_dates or texts.are_ids or texts.have_commas or texts.share_of_numbers >= _MOSTLY:
        return not_numbers(name, texts)
    if len(texts.values) > max(_FEW, texts.filled / 2):
        return (
            f"column {name!r} has {len(texts.values)} different texts in {texts.filled} rows, each of which would be "
            f"an input; {_dropped(name)}, and input-column = A,B,… keeps it if it is one of these"
        )
    return ""


def no_dates(name: str) -> str:
    """Return the sentence that refuses a column of dates."""
    return f"column {name!r} holds dates or times; numbers, such as days or years, are needed, or {_dropped(name)}"


def _dropped(name: str) -> str:
    return f"drop-column = {name!r} leaves it out"


def _mixed(name: str, texts: Texts) -> str:
    """Say how many cells are no numbers; quote them only if they are known to stand for missing values."""
    others: list[str] = texts.values[~texts.numbers].tolist()
    number, total = int(texts.counts[~texts.numbers].sum()), texts.filled
    which = "the other is" if number == 1 else f"the other {number} are"
    if all(map(is_marker, others)):
        markers = list(dict.fromkeys(text.strip() for text in others))
        quoted = " or ".join(map(repr, markers[:3])) + (", …" if len(markers) > 3 else "")
        says = f"missing-values = {','.join(markers)!r} makes {'it' if number == 1 else 'them'} empty"
        return f"column {name!r}: {total - number} of {total} cells are numbers, {which} {quoted}; {says}"
    log.warning("data: column %r has texts among its numbers: %s", name, brief(others))
    what = "a text" if number == 1 else "texts"
    return (
        f"column {name!r}: {total - number} of {total} cells are numbers, {which} {what}; missing-values = A,B,… "
        "lists what stands for a missing value (the log says more where the data are)"
    )


def is_marker(text: str) -> bool:
    return text.strip().lower() in _MARKERS or not any(each.isalnum() for each in text)


# ---- Numbers that are hardly measurements -----------------------------------------------------------------------


def number_remarks(
    columns: Iterable[tuple[str, Array]], *, named: bool, of_files: bool = True
) -> tuple[str, ...]:
    """Return a line on columns of numbers (N,) that look like ids, and one for each with values far from the others.

    Parameters
    ----------
    columns : iterable of (str, array)
        Names and numbers as they are in the table; NaN is an empty cell.
    named : bool
        Whether the user named the inputs: then ids are meant.
    of_files : bool
        Whether the key `missing-values` is read.
    """
    ids: list[str] = []
    far: list[str] = []
    rows = 0
    for name, values in columns:
        numbers = values[~np.isnan(values)] if values.dtype.kind == "f" else values
        if numbers.dtype.kind not in "iuf" or len(numbers) == 0:
            continue
        if not named and are_ids(numbers):
            ids.append(name)
            rows = len(numbers)
        elif said := _far_values(numbers, of_files):
            far.append(f"column {name!r}: {said}")
    found = (
        [f"… and {len(far) - _FEW} columns more have values far from the others"] if len(far) > _FEW else []
    )
    if ids:
        has = "has" if len(ids) == 1 else "have"
        key = f"drop-column = {','.join(ids)!r} leaves {'it' if len(ids) == 1 else 'them'} out"
        found.append(
            f"column {brief(ids)} {has} a different whole number in each of {rows} rows, as ids have, and would be "
            f"trained on; {key if len(ids) < _FEW else 'drop-column leaves columns out'}"
        )
    return (*far[:_FEW], *found)


def are_ids(numbers: Array) -> bool:
    """Tell whether each of many cells has a whole number of its own."""
    if len(numbers) <= _FEW or (numbers.dtype.kind == "f" and not np.all(numbers == np.floor(numbers))):
        return False
    return len(np.unique(numbers)) == len(numbers)


def _far_values(numbers: Array, of_files: bool) -> str:
    """Say which values lie far from the others, as those that stand for a missing value do; "" for none."""
    values, counts, near = _near(numbers)
    if near.all():
        return ""
    outside = [f"{value:.10g}" for value in values[~near]]
    number, total = int(counts[~near].sum()), len(numbers)
    listed = " or ".join(outside[:4]) + (", …" if len(outside) > 4 else "")
    are, them = ("is", "it") if number == 1 else ("are", "them")
    says = (
        f"; missing-values = {','.join(outside)!r} makes {them} empty"
        if of_files and len(outside) <= 4
        else ""
    )
    others = f"{values[near].min():.10g} to {values[near].max():.10g}"
    return f"{number} of {total} cells {are} {listed}, far from the others ({others}){says}"


def stand_ins(numbers: Array) -> list[str]:
    """Return the values that lie far from the others and stand for a missing value in many data, such as -999."""
    values, _, near = _near(numbers)
    return [f"{value:.10g}" for value in values[~near].tolist() if value in _SENTINELS]


def _near(numbers: Array) -> tuple[Array, Array, Array]:
    """Return the different values, sorted, how often each is there, and whether it isn't far from the others."""
    nothing = np.zeros(0)
    ends = float(numbers.min()), float(numbers.max())
    low, high = np.percentile(numbers, (10, 90))
    if high - low > (ends[1] - ends[0]) / _FAR and not _SENTINELS.intersection(ends):
        # Without sorting: no value is far from nine tenths of the others.
        return nothing, nothing, np.ones(0, bool)
    values, counts = np.unique(numbers.astype(np.float64), return_counts=True)
    near = np.ones(len(values), bool)
    below = values < 0
    if below.any() and not below.all() and _SENTINELS.issuperset(values[below].tolist()):
        near &= ~below
    for _ in range(2):  # one at each end
        near &= ~_far_end(values, counts, near)
    return values, counts, near


def _far_end(values: Array, counts: Array, near: Array) -> Array:
    """Tell which of the sorted values lie beyond the widest gap of the near ones, if that is far."""
    none = np.zeros(len(values), bool)
    kept = np.flatnonzero(near)
    if len(kept) < 2:
        return none
    cut = int(np.argmax(np.diff(values[kept]))) + 1
    ends = kept[:cut], kept[cut:]
    few, many = sorted(ends, key=lambda end: int(counts[end].sum()))
    gap = values[kept[cut]] - values[kept[cut - 1]]
    far = gap > _FAR * (values[many].max() - values[many].min())
    are_sentinels = _SENTINELS.issuperset(values[few].tolist())
    if far and len(many) >= (2 if are_sentinels else 10):
        none[few] = True
    return none
