"""A writer of a database keeps several tables, changes by key and staged rows in their order."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.failing_once import Calls
from tests.unit.sinks.sql_committer_kit import SCHEMA, LossySession, Target
from tests.unit.sinks.sql_writer_kit import (
    Preparing,
    context,
    ids,
    refuse_multiples_of_7,
    rejected_by,
    rows_of,
    two_phase,
)

from onceflow.clients.sql.session import (
    Session,
)
from onceflow.clients.sqlite import connection
from onceflow.core.errors import (
    BadRow,
    SinkError,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.sinks.sql import row_loader
from onceflow.sinks.sql.writer import SqlStagedWriter


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setattr(connection, "SQLiteSession", LossySession)
    return Target(tmp_path / "rows.db", Calls())


@pytest.fixture
def target_with_check(target: Target) -> Target:
    return refuse_multiples_of_7(target)


@pytest.mark.parametrize("on_bad_row", [OnBadRow.FAIL, OnBadRow.DROP])
def test_tables_are_written_in_one_order_after_those_to_which_they_refer(
    target: Target, monkeypatch: pytest.MonkeyPatch, on_bad_row: OnBadRow
) -> None:
    target.write(
        "CREATE TABLE c (id INTEGER PRIMARY KEY); CREATE TABLE b (id INTEGER PRIMARY KEY);"
        "CREATE TABLE a (id INTEGER PRIMARY KEY REFERENCES c (id))"
    )
    written: list[tuple[str, int]] = []
    put = row_loader.OpenTransaction.put

    def note(
        destination: row_loader.OpenTransaction, table: Any, batches: Iterable[pa.RecordBatch]
    ) -> int:
        written.append((table.name.name, put(destination, table, batches)))
        return written[-1][1]

    monkeypatch.setattr(row_loader.OpenTransaction, "put", note)
    schema = pa.schema([*SCHEMA, ("table", pa.string())])
    target.sink = replace(target.sink, table_column="table")
    writer, transactions = two_phase(target, schema, on_bad_row=on_bad_row)
    with closing(writer):
        for number, table in ((2, "a"), (3, "b"), (2, "c"), (4, "c")):
            writer.write(pa.record_batch([[number], [table]], schema=schema))
        assert written == []
        (committable,) = writer.pre_commit(CheckpointId(1))
    assert committable.rows == 4
    assert written == [("b", 1), ("c", 2), ("a", 1)]
    assert transactions.waits == ["ordered", "waited"], "the foreign key of one table"


@pytest.mark.parametrize("limit", ["_CHUNK_ROWS", "_CHUNK_BYTES"])
def test_rows_that_are_many_are_sent_before_the_barrier(
    target: Target, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(row_loader, limit, 3 if limit == "_CHUNK_ROWS" else 24)
    writer, transactions = two_phase(target, on_bad_row=OnBadRow.DROP)
    begun: list[int] = []
    with closing(writer):
        for numbers in ((1, 2), (3,), (4,), (5,)):
            writer.write(ids(*numbers))
            begun.append(rows_in(transactions))
        assert begun == [0, 3, 3, 3]
        assert writer.pre_commit(CheckpointId(1))[0].rows == 5
        writer.write(ids(6))
        assert writer.pre_commit(CheckpointId(2))[0].rows == 1
    assert target.ids() == [1, 2, 3, 4, 5, 6]


def rows_in(transactions: Preparing) -> int:
    """Return how many rows the writer's open transaction sees."""
    return int(transactions.session.query("SELECT count(*) FROM rows")[0][0])


KEYED = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), ("v", pa.string()), ("op", pa.string())]
)


def changes(*rows: tuple[int, str | None, str]) -> pa.RecordBatch:
    return pa.record_batch([list(column) for column in zip(*rows, strict=True)], schema=KEYED)


@pytest.fixture
def target_with_key(target: Target) -> Target:
    target.write("DROP TABLE rows; CREATE TABLE rows (id INTEGER PRIMARY KEY, v TEXT)")
    target.write("INSERT INTO rows VALUES (1, 'old'), (2, 'old'), (3, 'old')")
    target.sink = replace(
        target.sink, write_mode="upsert", primary_key=("id",), operation_column="op"
    )
    return target


def test_changes_by_key_wait_for_the_barrier_and_for_earlier_transactions(
    target_with_key: Target,
) -> None:
    writer, transactions = two_phase(target_with_key, KEYED)
    with closing(writer):
        writer.write(changes((1, "a", "u"), (2, None, "d"), (4, "b", "c"), (1, "c", "u")))
        assert transactions.begun == [], "an open upsert would lock its row"
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert committable.rows == 3
        assert transactions.waits == ["ordered", "waited"], "a delete waits, an upsert does not"
        writer.write(changes((4, "d", "u")))
        assert writer.pre_commit(CheckpointId(2))[0].rows == 1
        assert writer.pre_commit(CheckpointId(3)) == ()
    assert transactions.waits == ["ordered", "waited"]
    assert rows_of(target_with_key, "SELECT * FROM rows ORDER BY id") == [
        (1, "c"),
        (3, "old"),
        (4, "d"),
    ]


def test_rows_without_some_of_their_values_wait_for_earlier_transactions(
    target_with_key: Target,
) -> None:
    texts = [("v", pa.string()), ("w", pa.string()), ("lacks", pa.list_(pa.string()))]
    schema = pa.schema([*SCHEMA, *texts])
    target_with_key.write("ALTER TABLE rows ADD COLUMN w TEXT; UPDATE rows SET w = 'kept'")
    target_with_key.sink = replace(
        target_with_key.sink, operation_column=None, unchanged_column="lacks"
    )
    writer, transactions = two_phase(target_with_key, schema)
    with closing(writer):
        writer.write(
            pa.record_batch([[1, 2], ["a", "b"], [None, "x"], [["w"], None]], schema=schema)
        )
        assert writer.pre_commit(CheckpointId(1))[0].rows == 2
    assert transactions.waits == ["ordered", "waited"]
    expected = [(1, "a", "kept"), (2, "b", "x"), (3, "old", "kept")]
    assert rows_of(target_with_key, "SELECT * FROM rows ORDER BY id") == expected


def test_deletes_of_tables_that_refer_come_before_all_others(target: Target) -> None:
    target.write(
        "CREATE TABLE a (id INTEGER PRIMARY KEY, v INTEGER);"
        "CREATE TABLE b (id INTEGER PRIMARY KEY, v INTEGER REFERENCES a (id));"
        "INSERT INTO a VALUES (1, 0); INSERT INTO b VALUES (5, 1)"
    )
    target.sink = replace(
        target.sink,
        table="a",
        write_mode="upsert",
        primary_key=("id",),
        operation_column="op",
        table_column="table",
    )
    schema = pa.schema([*SCHEMA, ("v", pa.int64()), ("op", pa.string()), ("table", pa.string())])
    writer, _ = two_phase(target, schema)
    with closing(writer):
        columns = [[1, 5, 2, 6], [None, None, 0, 2], ["d", "d", "c", "c"], ["a", "b", "a", "b"]]
        writer.write(pa.record_batch(columns, schema=schema))
        assert writer.pre_commit(CheckpointId(1))[0].rows == 4
    assert rows_of(target, "SELECT * FROM a") == [(2, 0)]
    assert rows_of(target, "SELECT * FROM b") == [(6, 2)]


# --- staged rows ---------------------------------------------------------------------------------


def open_staged_writer(target: Target, schema: pa.Schema = SCHEMA, **given: Any) -> SqlStagedWriter:
    return SqlStagedWriter(target.sink.settings, context(target, schema, **given))


def test_a_staged_row_was_accepted_by_the_server_before_its_decision(
    target_with_check: Target,
) -> None:
    writer = open_staged_writer(target_with_check, on_bad_row=OnBadRow.DROP)
    with closing(writer):
        writer.write(ids(*range(1, 8)))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert committable.rows == 6
        assert rejected_by(writer) == [7]
        writer.write(ids(14))
        assert writer.pre_commit(CheckpointId(2)) == ()
    writer = open_staged_writer(target_with_check)
    writer.write(ids(7))
    with pytest.raises(BadRow, match="CHECK constraint failed"):
        writer.pre_commit(CheckpointId(3))
    with closing(target_with_check.committer(1)) as committer:
        committer.commit(committable)
    assert target_with_check.ids() == [1, 2, 3, 4, 5, 6]


def test_a_staged_writer_holds_no_session_between_barriers(
    target_with_check: Target, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Session] = []
    begin = LossySession.__init__

    def note(session: LossySession, server: sqlite3.Connection) -> None:
        begin(session, server)
        opened.append(session)

    def count() -> int:
        return sum(session.is_open for session in opened)

    monkeypatch.setattr(LossySession, "__init__", note)
    target_with_check.write("CREATE TABLE other (id INTEGER NOT NULL)")
    target_with_check.sink = replace(target_with_check.sink, table_column="table")
    schema = pa.schema([*SCHEMA, ("table", pa.string())])
    writer = open_staged_writer(target_with_check, schema)
    assert (len(opened), count()) == (1, 0)
    for opens, table in ((1, None), (2, "other"), (2, "other")):
        writer.write(pa.record_batch([[1], [table]], schema=schema))
        assert (len(opened), count()) == (opens, 0)
    writer.pre_commit(CheckpointId(1))
    assert len(opened) > 2, "the server was asked"
    assert count() == 0
    writer.close()
    assert "only the commit, after the decision, finds" not in caplog.text
    open_staged_writer(target_with_check, schema, on_bad_row=OnBadRow.DROP).close()
    assert "only the commit, after the decision, finds" in caplog.text
    with pytest.raises(SinkError, match="the writer is closed"):
        writer.write(ids(1))


def test_staged_changes_are_applied_as_they_were_given(target_with_key: Target) -> None:
    with (
        closing(open_staged_writer(target_with_key, KEYED)) as writer,
        closing(target_with_key.committer(1)) as committer,
    ):
        writer.write(changes((1, "a", "u"), (2, None, "d"), (4, "b", "c"), (1, "c", "u")))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert committable.rows == 3
        committer.commit(committable)
        assert writer.pre_commit(CheckpointId(2)) == ()
    assert rows_of(target_with_key, "SELECT * FROM rows ORDER BY id") == [
        (1, "c"),
        (3, "old"),
        (4, "b"),
    ]


def test_a_staged_row_that_closing_abandons_is_not_left_behind(target: Target) -> None:
    writer = open_staged_writer(target)
    writer.write(ids(1))
    writer.close()
    assert target.sound_area.transactions() == []


def test_an_update_of_no_row_breaks_no_constraint(target_with_check: Target) -> None:
    target_with_check.write("DROP TABLE rows")
    target_with_check.write("CREATE TABLE rows (id INTEGER PRIMARY KEY, v TEXT CHECK (v <> 'bad'))")
    target_with_check.sink = replace(
        target_with_check.sink, write_mode="update", primary_key=("id",)
    )
    schema = pa.schema(list(KEYED)[:2])
    with closing(open_staged_writer(target_with_check, schema)) as writer:
        writer.write(pa.record_batch([[1], ["bad"]], schema=schema))
        assert writer.pre_commit(CheckpointId(1))[0].rows == 1
    target_with_check.sink = replace(target_with_check.sink, write_mode="upsert")
    with closing(open_staged_writer(target_with_check, schema)) as writer:
        writer.write(pa.record_batch([[1], ["bad"]], schema=schema))
        with pytest.raises(BadRow, match="CHECK constraint failed"):
            writer.pre_commit(CheckpointId(2))
