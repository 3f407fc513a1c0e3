"""A table that grows while a run goes: ``NAME.arrows``, of which ``NAME.parquet`` is made now and then.

What is added takes the same time however long the run is, and what a kill leaves behind can be read up to the last
piece that is whole.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pyarrow import ipc, parquet

from fedapp.report.replacing import replacing

_ROWS = 1 << 17  # of a row group


class GrowingTable:
    """Writes a run's table; a folder has one writer.

    Attributes
    ----------
    path, parquet : Path
        What grows, and what is made of it.
    rows : int
        How many rows what grows has.
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
        """Have these rows in place of all; a kill at any moment leaves all that there were, or these."""
        if len(table):
            with replacing(self.path) as new, new.open("wb") as file:
                _write(table, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            self.path.unlink(missing_ok=True)
        self.parquet.unlink(missing_ok=True)  # which isn't read while what grows is there
        self.rows = len(table)

    def sync(self) -> int:
        """Return how many rows there are, now on the disk to stay."""
        if self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())
        return self.rows

    def publish(self, *, last: bool = False) -> None:
        """Make the parquet file what there is so far; the ``last`` time nothing else stays."""
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
    """Return a run's table, oldest rows first; None if there is none."""
    if (growing := run_dir / f"{name}.arrows").is_file():
        pieces = list(_pieces(growing))
        if pieces:
            return pa.concat_tables(pieces, promote_options="default")
    path = run_dir / f"{name}.parquet"
    return parquet.read_table(path) if path.is_file() else None


def _write(table: pa.Table, file: BinaryIO) -> None:
    with ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def _pieces(path: Path) -> Iterator[pa.Table]:
    """Yield what was written at once, up to what isn't whole."""
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
