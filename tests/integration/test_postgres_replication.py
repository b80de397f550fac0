"""A replication stream from a real Postgres: what it receives, and when its slot moves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import drop_slots

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.connection import endpoint_of
from onceflow.clients.postgres.replication import (
    Changes,
    ReplicationStream,
    StreamRefused,
    parse_lsn,
)
from onceflow.clients.sql.session import DatabaseAccess
from onceflow.integration.servers.postgres import EmbeddedPostgres


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    # The server drops a silent client after a second.
    with EmbeddedPostgres({"wal_level": "logical", "wal_sender_timeout": "1s"}) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        connection.execute("CREATE PUBLICATION p FOR TABLE t")
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        yield connection
        # The server notices only later that a connection was closed.
        drop_slots(connection)
        connection.execute("DROP TABLE t")


def _slot(connection: psycopg.Connection[TupleRow]) -> int:
    row = connection.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 's'"
    ).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def _open(server: EmbeddedPostgres, lsn: int, status_interval_s: float = 0.2) -> ReplicationStream:
    endpoint = endpoint_of(DatabaseAccess(url=server.url), lock_timeout_s=5)
    stream = ReplicationStream.open(endpoint, "test", status_interval_s=status_interval_s)
    stream.start("s", "p", lsn, timeout_s=30)
    return stream


def _read_transaction(stream: ReplicationStream) -> tuple[list[pgoutput.Row], int]:
    rows: list[pgoutput.Row] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        message = stream.receive(0.1)
        decoded = pgoutput.decode(message.data) if isinstance(message, Changes) else None
        if isinstance(decoded, pgoutput.Insert):
            rows.append(decoded.new)
        elif isinstance(decoded, pgoutput.TransactionCommit):
            return rows, decoded.end_lsn
    raise AssertionError("no transaction came")


def test_the_slot_moves_only_to_what_was_acknowledged(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    start = _slot(database)
    stream = _open(server, start)
    ends: list[int] = []
    for number in range(3):
        database.execute("INSERT INTO t VALUES (%s, 'x')", [number])
        rows, end = _read_transaction(stream)
        assert rows == [(number.to_bytes(4), b"x")]
        ends.append(end)
    # Several keepalives and statuses pass meanwhile.
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        stream.receive(0.1)
    assert _slot(database) == start
    stream.acknowledge(ends[1])
    stream.acknowledge(ends[0])
    deadline = time.monotonic() + 30
    while _slot(database) != ends[1] and time.monotonic() < deadline:
        stream.receive(0.1)
    assert _slot(database) == ends[1]
    stream.close()
    again = _reopen(server, ends[1])
    assert _read_transaction(again)[0] == [((2).to_bytes(4), b"x")]
    again.close()


def _reopen(server: EmbeddedPostgres, lsn: int) -> ReplicationStream:
    """Return a stream as soon as the server has seen that the last one ended."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return _open(server, lsn)
        except StreamRefused:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_reader_that_does_not_read_keeps_its_connection(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """The server waits for the reader; it does not drop it after wal_sender_timeout."""
    stream = _open(server, _slot(database))
    database.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 30000) i")
    time.sleep(3)
    assert len(_read_transaction(stream)[0]) == 30000
    stream.close()


def test_a_second_reader_of_a_slot_is_refused(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    stream = _open(server, _slot(database))
    with pytest.raises(StreamRefused, match="is active for PID"):
        _open(server, _slot(database))
    stream.close()
