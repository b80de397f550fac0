"""Mistakes that other readers of Postgres changes have made in public; docs/internals/proofs.md."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import (
    CONTEXT,
    CREATE_TABLE,
    open_database,
    read_rows,
    source_of,
    wait_until,
)

from onceflow.core.errors import ConfigError, OffsetOutOfRange, SourceUnavailable
from onceflow.core.spi import SourceReader, Split
from onceflow.integration.servers.postgres import EmbeddedPostgres

_MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with open_database(server, CREATE_TABLE) as connection:
        yield connection


def _confirmed(database: psycopg.Connection[TupleRow]) -> str:
    rows = database.execute("SELECT confirmed_flush_lsn::text FROM pg_replication_slots").fetchall()
    return str(rows[0][0])


def _position(split: Split) -> str:
    return split.position.decode().partition('"lsn":"')[2].partition('"')[0]


def test_each_restart_begins_with_the_first_transaction_after_its_position(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """Others left out the first transaction, or sent the last one a second time."""
    source = source_of(server, first_copy="none")
    positions = [source.splits()]
    with contextlib.closing(source.reader(positions[0], CONTEXT)) as reader:
        for number in range(3):
            database.execute("INSERT INTO t VALUES (%s, 'x')", [number])
            assert [row["id"] for row in read_rows(reader, 1)] == [number]
            positions.append(reader.snapshot())
    for done, position in enumerate(positions[:-1]):
        with contextlib.closing(source.reader(position, CONTEXT)) as reader:
            assert [row["id"] for row in read_rows(reader, 3 - done)] == list(range(done, 3))


def test_a_late_decision_moves_the_slot_to_its_own_position_and_not_to_what_was_read_since(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        read_rows(reader, 1)
        decided = reader.snapshot()
        database.execute("INSERT INTO t VALUES (2, 'x')")
        read_rows(reader, 1)
        reader.commit(decided)
        wait_until(lambda: _poll(reader) and _confirmed(database) == _position(decided[0]))
    with contextlib.closing(source.reader(decided, CONTEXT)) as reader:
        assert [row["id"] for row in read_rows(reader, 1)] == [2]


def _poll(reader: SourceReader) -> bool:
    """Poll, so that the reader answers the server; always true."""
    reader.poll(0.05)
    return True


def test_generated_columns_that_a_publication_sends_are_left_out(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    if database.info.server_version < 180000:
        pytest.skip("publications of this server send no generated columns")
    database.execute("ALTER TABLE t ADD twice int GENERATED ALWAYS AS (id * 2) STORED")
    database.execute("CREATE PUBLICATION p FOR TABLE t WITH (publish_generated_columns = stored)")
    database.execute("INSERT INTO t VALUES (1, 'x')")
    source = source_of(server, publication="p")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        assert read_rows(reader, 1) == [{"id": 1, "v": "x", "_op": "r"}]
        database.execute("INSERT INTO t VALUES (2, 'y')")
        assert read_rows(reader, 1) == [{"id": 2, "v": "y", "_op": "c"}]


def test_a_publication_does_not_make_the_server_refuse_updates(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """With the whole row as identity, Postgres 18 requires that generated columns are published."""
    if database.info.server_version < 180000:
        pytest.skip("this server does not require it")
    database.execute("ALTER TABLE t ADD twice int GENERATED ALWAYS AS (id * 2) STORED")
    database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    database.execute("CREATE PUBLICATION p FOR TABLE t")
    with pytest.raises(ConfigError, match=r"would refuse every UPDATE.*SET \(publish_generated"):
        source_of(server, publication="p").splits()
    database.execute("DROP PUBLICATION p")
    source = source_of(server, first_copy="none")
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        database.execute("UPDATE t SET v = 'y'")
        database.execute("DELETE FROM t")
        rows = [(row["_op"], row["v"]) for row in read_rows(reader, 3)]
    assert rows == [("c", "x"), ("u", "y"), ("d", "y")]
    database.execute("ALTER TABLE t ADD thrice int GENERATED ALWAYS AS (id * 3) VIRTUAL")
    with pytest.raises(ConfigError, match="would refuse every UPDATE.*IDENTITY DEFAULT, or USING"):
        source_of(server).validate()


def test_a_server_that_hangs_ends_the_attempt(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """Others waited for ever, and looked alive."""
    source = source_of(server, first_copy="none", statement_timeout_s=2.0)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute("INSERT INTO t VALUES (1, 'x')")
        read_rows(reader, 1)
        server.pause()
        try:
            with pytest.raises(SourceUnavailable, match="has sent nothing for"):
                read_rows(reader, 1)
        finally:
            server.unpause()


def test_a_promoted_standby_is_refused_by_name(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """A standby that was behind lacks changes that were read, and its slot may have moved."""
    source = source_of(server, first_copy="none")
    (split,) = source.splits()
    text = split.position.decode()
    assert '"timeline":1' in text
    earlier = Split(split.id, text.replace('"timeline":1', '"timeline":7').encode())
    with pytest.raises(OffsetOutOfRange, match="was on timeline 7 and is on 1"):
        source.discover([earlier])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_rows_in_one_transaction_need_little_memory(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = source_of(server, first_copy="none", transaction_rows_max=20_000)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        database.execute(
            "INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(1, 50000) i"
        )
        _count_rows(reader, 50_000)
        before = _memory_bytes()
        database.execute(
            "INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(50001, 1050000) i"
        )
        most = _count_rows(reader, 1_000_000)
        assert most - before < 150 * _MEGABYTE


def _count_rows(reader: SourceReader, count: int) -> int:
    """Read `count` rows; return the largest memory of this process between two batches."""
    deadline = time.monotonic() + 600
    most = rows = 0
    while rows < count:
        assert time.monotonic() < deadline, rows
        batch: Any = reader.poll(0.05)
        if isinstance(batch, pa.RecordBatch):
            rows += batch.num_rows
            most = max(most, _memory_bytes())
    assert rows == count
    return most


def _memory_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
