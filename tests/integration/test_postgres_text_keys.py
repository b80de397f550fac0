"""Text keys whose order in the server's index is not the order of this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from onceflow.core.errors import BadRecord
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import ReaderContext, SourceReader
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges

_CONTEXT = ReaderContext("job", "t", 0, 1, AttemptId(1))


@pytest.fixture(scope="module")
def server() -> Generator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


def _read(reader: SourceReader) -> list[dict[str, Any]]:
    """Return the rows of the next batch."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        batch = reader.poll(0.05)
        if isinstance(batch, pa.RecordBatch):
            return batch.to_pylist()


@contextlib.contextmanager
def _other_database(server: EmbeddedPostgres, encoding: str) -> Generator[str]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        statement = f"CREATE DATABASE other ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
        connection.execute(statement.encode())
        try:
            yield server.database_url("other")
        finally:
            deadline = time.monotonic() + 60
            while connection.execute("SELECT FROM pg_replication_slots WHERE active").fetchall():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            )
            connection.execute("DROP DATABASE other WITH (FORCE)")


@pytest.mark.parametrize(("encoding", "in_chunks"), [("UTF8", True), ("WIN1252", False)])
def test_an_index_has_the_order_of_text_keys_only_where_their_bytes_have_that_of_python(
    server: EmbeddedPostgres, encoding: str, in_chunks: bool
) -> None:
    """In WIN1252, the byte of the euro sign is below that of é; in Python it is above."""
    with _other_database(server, encoding) as url:
        with psycopg.connect(url, autocommit=True) as other:
            other.execute('CREATE TABLE t (id text COLLATE "C" PRIMARY KEY)')
        table = PostgresChanges(url, table="t").described_tables["t"]
        assert table.has_chunks
        assert table.has_small_chunks is in_chunks


def _apply(target: dict[tuple[Any, ...], int], row: dict[str, Any]) -> None:
    """Apply a change; a change that counts up is neither lost nor applied twice."""
    key = (row["id"], row["n"])
    assert (key in target) == (row["_op"] == "u"), row
    assert row["_op"] != "u" or row["v"] == target[key] + 1, row
    target[key] = row["v"]


@pytest.mark.servers
def test_the_copy_of_keys_that_no_index_has_in_this_order_continues_after_each_row(
    server: EmbeddedPostgres,
) -> None:
    """The index has the euro sign before é. Rows change between any two rows of the copy."""
    with (
        _other_database(server, "WIN1252") as url,
        psycopg.connect(url, autocommit=True) as other,
    ):
        other.execute("CREATE TABLE t (n int, v int, id text, PRIMARY KEY (id, n))")
        for key in ("é", "€", "a", "'\\", ""):
            other.execute("INSERT INTO t VALUES (1, 0, %s), (2, 0, %s)", [key, key])
        source = PostgresChanges(url, table="t", batch_rows=1, chunk_rows=2).bind("job", "t")
        position = source.splits()
        target: dict[tuple[Any, ...], int] = {}
        is_copied = False
        steps = 0
        while not is_copied:
            with contextlib.closing(source.reader(position, _CONTEXT)) as reader:
                for row in _read(reader):
                    _apply(target, row)
                    is_copied = is_copied or row["_op"] != "r"
                position = reader.snapshot()
            steps += 1
            other.execute("UPDATE t SET v = v + 1")
        assert steps > 9
        other.execute("INSERT INTO t VALUES (0, 0, 'last')")
        with contextlib.closing(source.reader(position, _CONTEXT)) as reader:
            while ("last", 0) not in target:
                for row in _read(reader):
                    _apply(target, row)
        rows = other.execute("SELECT id, n, v FROM t").fetchall()
        assert target == {(key, n): v for key, n, v in rows}


@pytest.mark.parametrize("is_copied", [True, False], ids=["copied", "streamed"])
def test_a_text_that_is_not_utf_8_ends_the_job_by_name(
    server: EmbeddedPostgres, is_copied: bool
) -> None:
    """A database of the encoding SQL_ASCII accepts any bytes. The server sends them to no one."""
    with (
        _other_database(server, "SQL_ASCII") as url,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        # Messages of the other rows come together with the error.
        insert = (
            rb"INSERT INTO t SELECT n, CASE n WHEN 100 THEN E'\xe9' END"
            rb" FROM generate_series(1, 100) AS n"
        )
        if is_copied:
            connection.execute(insert)
        source = PostgresChanges(url, table="t").bind("job", "t")
        with contextlib.closing(source.reader(source.splits(), _CONTEXT)) as reader:
            if not is_copied:
                connection.execute(insert)
            with pytest.raises(BadRecord, match='invalid byte sequence for encoding "UTF8": 0xe9'):
                while True:
                    _read(reader)
