"""A source of the changes of one Postgres table for tests, and functions that read it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.rows import TupleRow

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import ReaderContext, SourceReader
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges

CREATE_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
CONTEXT = ReaderContext("job", "t", 0, 1, AttemptId(1))
_TIMEOUT_S = 90
_ACTIVE = "SELECT FROM pg_replication_slots WHERE active"


def source_of(server: EmbeddedPostgres, **options: Any) -> PostgresChanges:
    """Return a source of table t that belongs to a job."""
    given: dict[str, Any] = {"table": "t", **options}
    return PostgresChanges(server.url, **given).bind("job", "t")


def follow_advice(
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    error: Exception,
    **options: Any,
) -> PostgresChanges:
    """Do what `error` says, and nothing else. Return the source of the job with another name.

    `options` are those of the job that has ended. The target is taken to be empty.
    """
    text = str(error)
    for statement in re.findall(r"\((SELECT pg_drop_replication_slot\('\w+'\))\)", text):
        wait_until(lambda: not database.execute(_ACTIVE).fetchall())
        database.execute(statement.encode())
    assert "empty the target" in text.lower()
    if "give slot= another name" in text:
        options["slot"] = "another"
    begun, _, advice = text.rpartition("start the job under another name")
    assert begun, text
    given: dict[str, Any] = {"table": "t", **options, **dict(re.findall(r"(\w+)='(\w+)'", advice))}
    return PostgresChanges(server.url, **given).bind("other", "t")


def read_rows(reader: SourceReader, count: int) -> list[dict[str, Any]]:
    """Return the next rows, at least `count` of them."""
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + _TIMEOUT_S
    while len(rows) < count:
        assert time.monotonic() < deadline, rows
        batch = reader.poll(0.05)
        if isinstance(batch, pa.RecordBatch):
            rows += batch.to_pylist()
    return rows


def read_to_error(reader: SourceReader) -> None:
    """Read until the reader raises; decide each position, as checkpoints do."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        reader.poll(0.05)
        reader.commit(reader.snapshot())
    raise AssertionError("the reader goes on")


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds. Fails after 90 s."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def open_database(
    server: EmbeddedPostgres, *statements: str
) -> Generator[psycopg.Connection[TupleRow]]:
    """Yield a connection after `statements`. Drop all slots, publications and tables at the end."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
        yield connection
        drop_slots(connection)
        # All tables at once: some are partitions of others.
        tables = connection.execute(
            "SELECT string_agg(oid::regclass::text, ', ') FROM pg_class"
            " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p')"
        ).fetchall()
        if tables[0][0] is not None:
            connection.execute(f"DROP TABLE {tables[0][0]} CASCADE".encode())


def drop_slots(database: psycopg.Connection[TupleRow]) -> None:
    """Drop all publications, and all slots as soon as they are free."""
    database.execute(
        "DO $$ DECLARE p text; BEGIN FOR p IN SELECT pubname FROM pg_publication LOOP"
        " EXECUTE format('DROP PUBLICATION %I', p); END LOOP; END $$"
    )
    wait_until(lambda: not database.execute(_ACTIVE).fetchall())
    database.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
