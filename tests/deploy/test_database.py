"""A SuperLink's database with large messages: deleting one is quick, and meanwhile other requests wait."""

import os
import sqlite3

import pytest
from flwr.supercore import sql_mixin

from fedapp.deploy.superlink import DATABASE
from strategies.flower.internals import database_settings

SIZE = 20 << 20  # bytes


@pytest.fixture
def database(monkeypatch, tmp_path):
    """A database that is opened as the SuperLink's."""
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)
    assert database_settings(DATABASE)
    connection = sqlite3.connect(tmp_path / "database", isolation_level=None)
    sql_mixin._set_sqlite_pragmas(connection, None)
    yield connection
    connection.close()


def test_what_is_deleted_isnt_written_first(database, tmp_path):
    database.execute("CREATE TABLE messages (content BLOB)")
    database.execute("INSERT INTO messages VALUES (?)", [os.urandom(SIZE)])
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.execute("DELETE FROM messages")
    assert (tmp_path / "database-wal").stat().st_size < SIZE / 10


def test_a_request_waits_for_the_database_nearly_as_long_as_its_client_waits_for_it(database):
    assert database.execute("PRAGMA busy_timeout").fetchone() == (25_000,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)  # Flower's own
