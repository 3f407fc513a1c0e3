"""The SuperLink's database, read where this machine has it: what each device works on, and a copy of all of it.

Its tables are Flower 1.41's own. It may be in use: readers don't hold it up.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from fedapp.deploy.plan import DeployError

# A message and its reply are deleted as soon as the ServerApp has fetched the reply.
_TASKS = """
SELECT ins.dst_node_id, ins.run_id, ins.message_type, ins.delivered_at
FROM message_ins AS ins LEFT JOIN message_res AS res ON res.reply_to_message_id = ins.message_id
WHERE res.message_id IS NULL AND ins.created_at + ins.ttl > ?
ORDER BY ins.delivered_at DESC, ins.created_at
"""


def tasks(database: Path) -> dict[str, str]:
    """Return the task that each node works on or is to begin, by the node's number; idle nodes are left out.

    Raises
    ------
    DeployError
        If the database can't be read.
    """
    doing: dict[str, str] = {}
    with _open(database) as connection:
        for node, run, kind, delivered in connection.execute(_TASKS, [datetime.now(UTC).timestamp()]):
            begun = f"since {datetime.fromisoformat(delivered):%H:%M:%SZ}" if delivered else "not fetched yet"
            doing.setdefault(_unsigned(node), f"{kind} of run {_unsigned(run)}, {begun}")
    return doing


def copy(database: Path, file: Path) -> int:
    """Copy the database into a new file that only its owner may read, and return how many nodes are in it.

    Raises
    ------
    DeployError
        If there is no such database, the copy isn't sound, or the file is there already or can't be written.
    """
    with _open(database) as source:
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise DeployError(f"{file}: can't be made ({error.strerror})") from None
        try:
            with closing(sqlite3.connect(file)) as made:
                source.backup(made)
                return _checked(made)
        except sqlite3.Error as error:
            file.unlink()
            if error.sqlite_errorname in _UNWRITTEN:
                raise DeployError(f"{file}: can't be written ({error})") from None
            raise


# The copy's errors: the database itself is only read.
_UNWRITTEN = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC")


@contextmanager
def _open(database: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise DeployError(f"{database}: can't be read as a SuperLink's database ({error})") from None


def _checked(made: sqlite3.Connection) -> int:
    made.execute("PRAGMA journal_mode = DELETE")  # one file, with nothing beside it
    if (said := made.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
        raise sqlite3.DatabaseError(f"the copy isn't sound: {said}")
    return int(made.execute("SELECT count(*) FROM node WHERE status != 'unregistered'").fetchone()[0])


def _unsigned(number: int) -> str:
    """Return an unsigned number of 64 bits, which SQLite keeps as a signed one, as text."""
    return str(number % 2**64)
