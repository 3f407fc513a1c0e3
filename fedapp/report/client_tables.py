"""What a run knows of its clients: ``clients.parquet``, ``tasks.parquet``, ``away.parquet``, written and read back.

- ``clients.parquet`` has the clients' numbers, evaluation by evaluation;
- ``tasks.parquet`` has when each task of a client began and ended, of the last 200,000 tasks of a run;
- ``away.parquet`` has when clients weren't available, of the last 100,000 such times of a run.

While a run goes, every evaluation is added to ``clients.arrows``, and ended tasks to ``tasks.arrows``, which takes
the same time however long the run is. What a kill leaves behind can be read up to the last piece that is whole. The
parquet files are made of the growing ones now and then, and for good when the run ends.
"""

import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import ipc, parquet

from fedapp.report.files import replacing

_ROWS = 1 << 17  # least rows of a row group of the parquet file


class GrowingTable:
    """Writes a run's table; a folder has one writer.

    Attributes
    ----------
    path, parquet : Path
        The growing .arrows file, and the .parquet file that is made of it.
    rows : int
        Number of rows of the growing file.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self.path, self.parquet = run_dir / f"{name}.arrows", run_dir / f"{name}.parquet"
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                _write(table, file)
        except OSError:
            os.truncate(self.path, size)  # no torn rows on a full disk
            raise
        self.rows += len(table)

    def replace(self, table: pa.Table) -> None:
        """Replace all rows by these; a kill at any moment leaves either all former rows or all new ones."""
        if len(table):
            with replacing(self.path) as new, new.open("wb") as file:
                _write(table, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            self.path.unlink(missing_ok=True)
        self.parquet.unlink(missing_ok=True)  # the growing file is read in place of it
        self.rows = len(table)

    def sync(self) -> int:
        """Flush the growing file to the disk; return its number of rows."""
        if self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())
        return self.rows

    def publish(self, *, last: bool = False) -> None:
        """Write the parquet file of all rows so far; ``last``: remove the growing file."""
        if not self.path.exists():
            return
        schema = pa.unify_schemas([piece.schema for piece in _pieces(self.path)])
        with (
            replacing(self.parquet) as new,
            parquet.ParquetWriter(new, schema, compression="zstd") as writer,
        ):
            for piece in _grouped(_pieces(self.path), schema):
                writer.write_table(piece)
        if last:
            self.path.unlink()


def read_growing(run_dir: Path, name: str) -> pa.Table | None:
    """Return a run's table, oldest rows first; None if there is none.

    Raises
    ------
    ValueError
        If it is damaged; the text names the file.
    """
    if (growing := run_dir / f"{name}.arrows").is_file():
        pieces = list(_pieces(growing))
        if pieces:
            return pa.concat_tables(pieces, promote_options="default")
    path = run_dir / f"{name}.parquet"
    return _read(path) if path.is_file() else None


def _read(path: Path) -> pa.Table:
    try:
        return parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} can't be read ({reason})") from None


def _write(table: pa.Table, file: BinaryIO) -> None:
    with ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def _pieces(path: Path) -> Iterator[pa.Table]:
    """Yield the tables that were written one by one, up to the first that isn't whole."""
    with path.open("rb") as file:
        while file.tell() < path.stat().st_size:
            try:
                with ipc.open_stream(file) as stream:
                    yield stream.read_all()
            except (pa.ArrowInvalid, OSError, EOFError):
                return


def _grouped(pieces: Iterator[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield pieces together as row groups."""
    waiting: list[pa.Table] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(map(len, waiting)) >= _ROWS:
            yield _as(waiting, schema)
            waiting = []
    if waiting:
        yield _as(waiting, schema)


def _as(pieces: list[pa.Table], schema: pa.Schema) -> pa.Table:
    table = pa.concat_tables(pieces, promote_options="default")
    rows = len(table)
    return pa.table(
        {
            field.name: table[field.name] if field.name in table.column_names else pa.nulls(rows, field.type)
            for field in schema
        },
        schema=schema,
    )


WALL = "wall-seconds"
CLIENTS = "clients"

# The first columns; the others are numbers.
_HEAD = {
    "aggregation": pa.int64(),
    "time": pa.float64(),
    "client": pa.int64(),
    "name": pa.string(),
    "rows": pa.string(),
}

# Names of columns in a strategy's metrics → names in the file.
_NAMES = {
    "participation": "work",
    "weight": "contribution-weight",
    "importance": "weight",
    "expected-share": "expected",
    "observed-share": "observed",
}
_BACK = {name: theirs for theirs, name in _NAMES.items()}


class ClientsFile:
    """Writes a run's rows; a folder has one writer.

    Parameters
    ----------
    rows : str
        The rows of a client on which its metrics are measured: ``train`` or ``test``.
    """

    def __init__(self, run_dir: Path, rows: str = "train") -> None:
        self.run_dir, self.rows = run_dir, rows
        self._table = GrowingTable(run_dir, CLIENTS)

    def append(
        self, aggregation: int, time: float, clients: Mapping[str, Sequence[float]], names: Mapping[int, str]
    ) -> None:
        """Add an evaluation: columns by client index, in a strategy's words; a client with no numbers has no row."""
        size = max(map(len, clients.values()), default=0)
        columns = {_NAMES.get(name, name): _padded(values, size) for name, values in clients.items()}
        columns = {name: values for name, values in columns.items() if name not in _HEAD}
        if not columns:
            return
        empty = np.all([np.isnan(each) for each in columns.values()], axis=0)
        there = np.flatnonzero(~empty)
        head = {
            "aggregation": pa.array(np.full(len(there), aggregation), _HEAD["aggregation"]),
            "time": pa.array(np.full(len(there), time), _HEAD["time"]),
            "client": pa.array(np.asarray(there, np.int64)),
            "name": pa.array([names.get(int(index)) for index in there], _HEAD["name"]),
            "rows": pa.array([self.rows] * len(there), _HEAD["rows"]),
        }
        rest = {name: pa.array(values[there], from_pandas=True) for name, values in columns.items()}
        if len(there):
            self._table.write(pa.table(head | rest))

    def cut(self, rows: int) -> None:
        """Keep the first ``rows`` rows, of a run that goes on from a checkpoint; it writes the later rows again.

        Raises
        ------
        ValueError
            If there are fewer.
        """
        kept = read_clients(self.run_dir).slice(0, rows)
        if len(kept) < rows:
            raise ValueError(
                f"{self._table.parquet} has lost rows since the checkpoint: {len(kept)} of {rows} are there"
            )
        self._table.replace(kept)

    def sync(self) -> int:
        """Flush the rows to the disk; return their number."""
        return self._table.sync()

    def publish(self, *, last: bool = False) -> None:
        """Write clients.parquet of all rows so far; ``last``: remove clients.arrows."""
        self._table.publish(last=last)


def read_clients(run_dir: Path) -> pa.Table:
    """Return a run's rows, oldest first; an empty table if there are none.

    An incomplete last piece, which a killed run leaves, is left out.
    """
    table = read_growing(run_dir, CLIENTS)
    return pa.table({name: pa.array([], kind) for name, kind in _HEAD.items()}) if table is None else table


def by_evaluation(run_dir: Path) -> dict[int, dict[str, list[Any]]]:
    """Return the strategy's columns, by client index, for each aggregation that has rows; names as in the strategy.

    ``name`` has the names of devices, "" for a client without one.
    """
    table = read_clients(run_dir)
    ends = np.flatnonzero(np.diff(column(table, "aggregation"), append=-1)) + 1
    found, start = {}, 0
    for end in ends.tolist() if len(table) else []:
        found[int(table["aggregation"][start].as_py())] = _told(table.slice(start, end - start))
        start = end
    return found


# What numpy.load raises for a file that is cut off or has other bytes.
_DAMAGED = (OSError, ValueError, EOFError, RuntimeError, BadZipFile, zlib.error)


def names_of_clients(run_dir: Path) -> dict[int, str]:
    """Return the names of a run's clients by index: natural ids, or the last names of devices; {} without any."""
    named: dict[int, str] = {}
    if (path := run_dir / "partition.npz").is_file():
        with suppress(*_DAMAGED), np.load(path) as stored:
            if "client_names" in stored:
                named = dict(enumerate(stored["client_names"].tolist()))
    try:
        told = read_clients(run_dir).select(["client", "name"])
    except ValueError:  # it is damaged, which is said where its numbers are read
        return named
    told = told.filter(pc.is_valid(told["name"]))
    return named | dict(zip(told["client"].to_pylist(), told["name"].to_pylist(), strict=True))


def last_clients(run_dir: Path) -> dict[str, list[Any]]:
    """Return the strategy's columns, by client index, at the last evaluation; {} without rows."""
    return next(reversed(by_evaluation(run_dir).values()), {})


def column(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column of numbers (rows,); NaN where there is none."""
    if name not in table.column_names:
        return np.full(len(table), np.nan)
    return np.asarray(table[name].to_numpy(), dtype=np.float64)


def _told(rows: pa.Table) -> dict[str, list[Any]]:
    clients = column(rows, "client").astype(int)
    size = int(clients.max()) + 1
    told: dict[str, list[Any]] = {}
    names = rows["name"].to_pylist()
    if any(names):
        told["name"] = [""] * size
        for client, name in zip(clients, names, strict=True):
            told["name"][client] = name or ""
    for name in rows.column_names:
        if name not in (*_HEAD, WALL) and not np.isnan(values := column(rows, name)).all():
            filled = np.full(size, np.nan)
            filled[clients] = values
            told[_BACK.get(name, name)] = filled.tolist()
    return told


def _padded(values: Sequence[float], size: int) -> NDArray[np.float64]:
    padded = np.full(size, np.nan)
    padded[: len(values)] = values
    return padded


# A task: client, begin and end by the run's clock, begin and end by the machine's clock, outcome, and the seconds of
# the run's clock that the model and the reply took.
TaskSpan = tuple[int, float, float, float, float, str, float | None, float | None]

TASKS = "tasks"
MOST_TASKS = 200_000

# Most tasks that wait to be written; and by how many tasks the file may exceed MOST_TASKS.
_WAITING, _SLACK = 10_000, 100_000

_TASKS_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),  # number of the task in the run, in the order in which tasks ended
        ("client", pa.int32()),
        ("began", pa.float64()),  # seconds of the run's clock
        ("ended", pa.float64()),
        ("wall-began", pa.float64()),  # seconds of the machine since the run began
        ("wall-ended", pa.float64()),
        ("outcome", pa.string()),
        ("receiving", pa.float64()),  # seconds by the run's clock; null where they aren't known
        ("sending", pa.float64()),
    ]
)


class TasksFile:
    """Writes a run's tasks; a folder has one writer."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._table = GrowingTable(run_dir, TASKS)
        self._waiting: list[TaskSpan] = []
        self.ended = 0  # tasks so far, including those that are no longer kept

    def add(self, spans: Sequence[TaskSpan]) -> None:
        """Add tasks, in the order in which they ended."""
        self._waiting.extend(spans)
        if len(self._waiting) >= _WAITING:
            self._write()

    def sync(self) -> int:
        """Flush all tasks to the disk; return how many have ended so far."""
        self._write()
        self._table.sync()
        return self.ended

    def cut(self, ended: int) -> None:
        """Keep the first ``ended`` tasks, of a run that goes on from a checkpoint; it writes the later tasks again.

        Raises
        ------
        ValueError
            If there are fewer.
        """
        table = read_tasks(self.run_dir)
        there = int(table["number"][-1].as_py()) + 1 if len(table) else 0
        if there < ended:
            raise ValueError(
                f"{self._table.parquet} has lost rows since the checkpoint: {there} of {ended} are there"
            )
        self._waiting.clear()
        self._table.replace(pc.filter(table, pc.less(table["number"], ended)))
        self.ended = ended

    def publish(self, *, last: bool = False) -> None:
        """Write tasks.parquet of all tasks so far; ``last``: remove tasks.arrows."""
        self._write(trim=last)
        self._table.publish(last=last)

    def _write(self, *, trim: bool = False) -> None:
        if self._waiting:
            numbers = range(self.ended, self.ended + len(self._waiting))
            columns = [list(numbers), *map(list, zip(*self._waiting, strict=True))]
            self._table.write(pa.table(columns, schema=_TASKS_SCHEMA))
            self.ended += len(self._waiting)
            self._waiting.clear()
        if self._table.rows > MOST_TASKS + (0 if trim else _SLACK):
            self._table.replace(read_tasks(self.run_dir))


def read_tasks(run_dir: Path) -> pa.Table:
    """Return a run's last 200,000 tasks in the order in which they ended.

    ``outcome`` is the task's outcome: ``accepted``, ``late``, ``failed``, ``refused``, ``discarded`` (too old),
    ``lost`` (the device went, or came back without it), or ``under way``, where it hadn't ended when the run did.
    ``receiving`` and ``sending`` are null where they aren't known.
    """
    table = read_growing(run_dir, TASKS)
    if table is None:
        return _TASKS_SCHEMA.empty_table()
    return table.slice(max(0, len(table) - MOST_TASKS))


AWAY = "away.parquet"
MOST_ABSENCES = 100_000

Stretch = tuple[float, float]
# A function that returns, between two times of the run's clock, the clients and when each was away.
AwayFn = Callable[[float, float], Iterable[tuple[int, Iterator[Stretch]]]]

_AWAY_COLUMNS = {"client": pa.int32(), "began": pa.float64(), "ended": pa.float64()}


class Away(NamedTuple):
    """When clients were away, [began, ended) by the run's clock, between ``since`` and ``until``."""

    client: NDArray[np.int32]
    began: NDArray[np.float64]
    ended: NDArray[np.float64]
    since: float
    until: float


def last_away(away: AwayFn, until: float) -> Away:
    """Return when clients were away, up to ``until``.

    Of more than ``MOST_ABSENCES`` absences only those of the last stretch of time are returned.
    """
    since = 0.0
    while True:
        clients, begins, ends = array("i"), array("d"), array("d")
        asked, most = 0, MOST_ABSENCES
        for client, stretches in away(since, until):
            asked += 1
            most = max(MOST_ABSENCES, asked)  # each client may have one, however short the time is
            for began, ended in islice(stretches, most + 1):
                clients.append(client)
                begins.append(began)
                ends.append(ended)
            if len(clients) > most:
                break
        else:
            return Away(np.array(clients, np.int32), np.array(begins), np.array(ends), since, until)
        # A shorter time, in which somewhat fewer absences than MOST_ABSENCES are expected.
        share = asked / sum(1 for _ in away(until, until))
        since = until - 0.8 * (until - since) * share * most / len(clients)


def write_away(run_dir: Path, away: Away) -> None:
    """Write ``away.parquet`` in place of what there was."""
    told = {"since": repr(float(away.since)), "until": repr(float(away.until))}
    schema = pa.schema(list(_AWAY_COLUMNS.items()), metadata=told)
    with replacing(run_dir / AWAY) as new:
        parquet.write_table(pa.table(list(away[:3]), schema=schema), new, compression="zstd")


def read_away(run_dir: Path) -> Away | None:
    """Return when a run's clients were away; None if that isn't on record."""
    path = run_dir / AWAY
    if not path.is_file():
        return None
    table = _read(path)
    told = table.schema.metadata
    client, began, ended = (table[name].to_numpy() for name in _AWAY_COLUMNS)
    return Away(client, began, ended, float(told[b"since"]), float(told[b"until"]))
