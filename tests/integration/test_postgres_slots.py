"""The slot of a source of changes on a real Postgres: its measurements, and warnings about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.rows import TupleRow

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import CopyProgress, ReaderContext, SourceProgress, SourceReader
from onceflow.integration.conformance.processes import eventually
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources import PostgresChanges

_CONTEXT = ReaderContext("job", "t", 0, 1, AttemptId(1))
_OPTIONS = {
    "wal_level": "logical",
    "max_replication_slots": "3",
    "max_wal_senders": "3",
    "max_wal_size": "32MB",
    "max_slot_wal_keep_size": "128MB",
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(_OPTIONS) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        yield connection
        for (name,) in connection.execute("SELECT pubname FROM pg_publication").fetchall():
            connection.execute(f'DROP PUBLICATION "{name}"'.encode())
        unused = "SELECT FROM pg_replication_slots WHERE active"
        assert eventually(lambda: not connection.execute(unused).fetchall(), 60)
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        connection.execute("DROP TABLE t")


def _source(server: EmbeddedPostgres, **options: Any) -> PostgresChanges:
    given: dict[str, Any] = {"table": "t", **options}
    return PostgresChanges(server.url, **given).bind("job", "t")


def _poll(reader: SourceReader) -> int:
    batch = reader.poll(0.05)
    return batch.num_rows if isinstance(batch, pa.RecordBatch) else 0


def _measure(source: PostgresChanges, reader: SourceReader) -> SourceProgress:
    progress = source.measure(reader.snapshot())
    assert progress is not None
    return progress


def test_the_first_copy_and_the_distance_are_measured(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 25) i")
    source = _source(server, chunk_rows=10, batch_rows=10)
    assert source.measure([]) is None
    reader = source.reader(source.splits(), _CONTEXT)
    began = _measure(source, reader)
    # Without statistics the server has no estimate.
    assert began.copies == (CopyProgress("public.t", 0, 0),)
    assert (began.lag_s, began.warnings) == (None, ())
    database.execute("ANALYZE t")
    assert eventually(lambda: _poll(reader) > 0, 60)
    assert _measure(source, reader).copies == (CopyProgress("public.t", 10, 1, 25, 3),)
    assert eventually(lambda: _poll(reader) >= 0 and not _measure(source, reader).copies, 60)
    database.execute("INSERT INTO t VALUES (26, repeat('x', 100000))")
    assert eventually(lambda: _poll(reader) == 1, 60)
    behind = _measure(source, reader)
    assert behind.lag_s is not None
    assert 0 <= behind.lag_s < 3600
    database.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(27, 999) i")
    further = _measure(source, reader)
    assert further.lag_bytes is not None
    assert further.retained_bytes is not None
    assert 100_000 < further.lag_bytes <= further.retained_bytes
    # The reader has the row, but no checkpoint is decided.
    assert further.retained_from == began.retained_from

    def move() -> bool:
        _poll(reader)
        reader.commit(reader.snapshot())
        return _measure(source, reader).retained_from != began.retained_from

    assert eventually(move, 60)
    reader.close()


def test_a_slot_is_warned_about_before_the_server_gives_it_up(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    source = _source(server, first_copy="none")
    splits = source.splits()

    def fill(segments: int) -> str:
        for at in range(segments):
            database.execute("INSERT INTO t VALUES (%s) ON CONFLICT DO NOTHING", [at])
            database.execute("SELECT pg_switch_wal()")
        progress = source.measure(splits)
        assert progress is not None
        return "; ".join(f"{warning.state}: {warning.text}" for warning in progress.warnings)

    assert fill(0) == ""
    early = fill(4)
    assert early.startswith(f"extended: slot {source.slot_name} makes the server keep ")
    assert "more than max_wal_size, up to 128 MB" in early
    # The quarter that should be left has two segments, so a step of one meets it.
    assert eventually(lambda: fill(1).startswith("nearly lost: "), 60)
    assert "max_slot_wal_keep_size is 128 MB" in fill(0)
    fill(4)
    database.execute("CHECKPOINT")
    assert eventually(lambda: fill(0).startswith("lost: "), 60)
    assert "(wal_removed)" in fill(0)
    database.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    assert fill(0) == f"missing: slot {source.slot_name} does not exist any more"
