"""Files named in the value of a parameter, such as ``trace:FILE``: reading them, and errors about them.

No error message quotes the contents of a file: a wrong name may lead to a confidential file.
"""

import csv
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Row = TypeVar("Row")

# Pattern of a number in the value of such a parameter.
NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?"


class NamedFile:
    """A file that ``parameter = "kind:FILE"`` names.

    Parameters
    ----------
    parameter, kind, name : str
        Name of the parameter, kind of the file, and path of the file.

    Raises
    ------
    ValueError
        If the file doesn't exist.
    """

    def __init__(self, parameter: str, kind: str, name: str) -> None:
        self._said = f"{parameter} = '{kind}:{name[:200]}'"
        try:
            self.path = Path(name).expanduser()
            self.path.exists()  # a name may be too long
        except (OSError, RuntimeError, ValueError) as error:
            raise self.wrong(f"can't be found ({getattr(error, 'strerror', None) or error})") from None
        if not self.path.is_file():
            raise self.wrong("is no file")

    def wrong(self, reason: str) -> ValueError:
        """Return an error that names the parameter, the file and the reason."""
        return ValueError(f"{self._said}: {reason}")

    def rows(self, *headers: Sequence[str]) -> list[tuple[int, list[str]]]:
        """Return the rows of a CSV with their line numbers, without empty rows and without one of the headers."""
        try:
            with self.path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file)
                rows = [(reader.line_num, row) for row in reader if row]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise self.wrong(f"can't be read ({error})") from None
        if rows and [cell.strip() for cell in rows[0][1]] in [list(header) for header in headers]:
            del rows[0]
        return rows

    def read_rows(
        self, headers: Sequence[Sequence[str]], read: Callable[[list[str]], Row], must: str
    ) -> Iterator[tuple[int, Row]]:
        """Yield the line numbers of a CSV's rows and what ``read`` makes of them.

        Raises
        ------
        ValueError
            If ``read`` raises one, or an IndexError: that the row ``must`` be otherwise.
        """
        for number, row in self.rows(*headers):
            try:
                found = read(row)
            except (ValueError, IndexError):
                raise self.wrong(f"row {number} must be {must}") from None
            yield number, found

    def entries(self) -> list[Any] | None:
        """Return the values of a dict in a JSON or ``pickle`` file, in its order; None for a CSV.

        A pickle may hold dicts, lists, numbers and strings only, so that loading it can't run code.
        """
        try:
            with self.path.open("rb") as file:
                begin = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
                if begin not in (b"\x80", b"{"):
                    return None
                file.seek(0)
                content = file.read()
            found = json.loads(content) if begin == b"{" else _Plain(BytesIO(content)).load()
        except (OSError, ValueError, EOFError, RecursionError, pickle.UnpicklingError, MemoryError):
            raise self.wrong("can't be read as JSON, or as a pickle of dicts, lists and numbers") from None
        except (IndexError, KeyError, AttributeError, TypeError, OverflowError):  # an invalid pickle
            raise self.wrong("can't be read as a pickle of dicts, lists and numbers") from None
        if not isinstance(found, dict) or not found:
            raise self.wrong("must be a dict with an entry for each device")
        return list(found.values())

    def by_client(self, found: Mapping[int, Row], num_clients: int) -> list[Row]:
        """Return what was found of each client, by its index; raise ValueError if the file has nothing of one."""
        missing = sorted(set(range(num_clients)) - found.keys())
        if missing:
            raise self.wrong(f"has no row for client {missing[0]}; there are {num_clients} clients, from 0")
        return [found[client] for client in range(num_clients)]


class _Plain(pickle.Unpickler):
    """An unpickler of plain values, which refuses all classes and functions."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError("not plain")


def numbers(cells: Sequence[str]) -> Iterator[float]:
    """Yield the cells of a row as numbers; ValueError if a cell isn't a number."""
    return (float(cell) for cell in cells)
