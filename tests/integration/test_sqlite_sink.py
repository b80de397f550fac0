"""The SQLite sink: exactly once with a ledger in the same file, in every write mode and type."""

from __future__ import annotations

import pickle
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import ColumnFacts, TableName
from onceflow.core.errors import BadRow, ConfigError, Fenced, SinkError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, OnBadRow, SinkWriter, WriterContext
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import SQLiteSink
from onceflow.sinks.sql import row_loader
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sqlite.sink import SQLiteDialect

_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
_BERLIN = timezone(timedelta(hours=1))


class _Job:
    """The sink over a file, with rows staged in a directory."""

    def __init__(self, directory: Path, schema: pa.Schema = _SCHEMA, **settings: Any) -> None:
        self.path = directory / "target.db"
        self.schema = schema
        given: dict[str, Any] = {"table": "odd ü table", "create": True, **settings}
        self.sink = SQLiteSink(f"sqlite:///{self.path}", **given)
        self.staging = FileStagingArea.in_directory(str(directory / "staging"), "job.rows")

    def open(self, attempt: int = 1, log_id: str = "log-1") -> _Job:
        self.sink.open(self.context(attempt, log_id), self.schema)
        return self

    def context(self, attempt: int = 1, log_id: str = "log-1") -> CommitterContext:
        return CommitterContext("job", "rows", "job.rows", AttemptId(attempt), log_id, self.staging)

    def writer(self, on_bad_row: OnBadRow = OnBadRow.FAIL, subtask: int = 0) -> SinkWriter:
        return self.sink.writer(
            WriterContext(
                job="job",
                uid="rows",
                sink_id="job.rows",
                subtask=subtask,
                parallelism=2,
                attempt=AttemptId(1),
                first_checkpoint=CheckpointId(1),
                schema=self.schema,
                staging=self.staging,
                on_bad_row=on_bad_row,
            )
        )

    def committer(self) -> Committer:
        return self.sink.committer(self.context())

    def prepare(self, checkpoint: int, rows: Sequence[dict[str, Any]]) -> committables.Committable:
        writer = self.writer()
        writer.write(self.batch(rows))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable

    def write(self, checkpoint: int, rows: Sequence[dict[str, Any]]) -> None:
        assert self.committer().commit(self.prepare(checkpoint, rows)) == committables.Committed()

    def batch(self, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(list(rows), self.schema)

    def rows(self) -> list[tuple[Any, ...]]:
        return self.query('SELECT * FROM "odd ü table" ORDER BY 1')

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as db, db:
            return db.execute(statement).fetchall()


@pytest.fixture
def job(tmp_path: Path) -> _Job:
    return _Job(tmp_path, write_mode="upsert", primary_key=("id",), tombstones=True).open()


def test_rows_are_seen_when_they_are_decided_and_not_before(job: _Job) -> None:
    first = job.prepare(1, [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}])
    second = job.prepare(2, [{"id": 1, "v": "c"}])
    assert job.rows() == []
    committer = job.committer()
    assert [one.transaction for one in committer.in_doubt()] == [
        first.transaction,
        second.transaction,
    ]
    assert committer.commit(first) == committables.Committed()
    assert job.rows() == [(1, "a"), (2, "b")]
    assert committer.commit(second) == committables.Committed()
    assert committer.commit(first) == committables.AlreadyCommitted()
    assert job.rows() == [(1, "c"), (2, "b")]
    assert list(committer.in_doubt()) == []
    assert job.staging.transactions() == []


def test_aborted_rows_are_never_seen_and_vanished_ones_are_lost(job: _Job) -> None:
    gone, aborted = job.prepare(1, [{"id": 1, "v": "a"}]), job.prepare(2, [{"id": 2, "v": "a"}])
    job.staging.discard(gone.transaction)
    committer = job.committer()
    assert isinstance(committer.commit(gone), committables.Lost)
    assert committer.abort(aborted) == committables.Aborted()
    assert isinstance(committer.commit(aborted), committables.Lost)
    assert job.rows() == []


def test_a_tombstone_deletes_its_key(job: _Job) -> None:
    job.write(1, [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}])
    job.write(2, [{"id": 1, "v": None}, {"id": 3, "v": "c"}])
    assert job.rows() == [(2, "b"), (3, "c")]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("upsert", [(1, "new"), (2, "new")]),
        ("ignore", [(1, "old"), (2, "new")]),
        ("update", [(1, "new")]),
    ],
)
def test_changes_by_key_do_what_the_write_mode_says(
    tmp_path: Path, mode: str, expected: list[tuple[int, str]]
) -> None:
    job = _Job(tmp_path, write_mode=mode, primary_key=("id",)).open()
    job.query("INSERT INTO \"odd ü table\" VALUES (1, 'old')")
    job.write(1, [{"id": 1, "v": "new"}, {"id": 2, "v": "new"}])
    assert job.rows() == expected


def test_an_operation_column_says_what_a_row_does(tmp_path: Path) -> None:
    schema = pa.schema([*_SCHEMA, pa.field("op", pa.string())])
    job = _Job(
        tmp_path, schema, write_mode="upsert", primary_key=("id",), operation_column="op"
    ).open()
    job.write(1, [{"id": 1, "v": "a", "op": "c"}, {"id": 2, "v": "b", "op": "c"}])
    job.write(2, [{"id": 1, "v": None, "op": "d"}, {"id": 2, "v": "c", "op": "u"}])
    assert job.rows() == [(2, "c")]


def test_values_that_a_change_did_not_send_stay_and_a_missing_row_stops_the_commit(
    tmp_path: Path,
) -> None:
    lists = pa.field("_unchanged", pa.list_(pa.string()))
    schema = pa.schema([*_SCHEMA, pa.field("n", pa.int64()), lists])
    by_key = {"write_mode": "upsert", "primary_key": ("id",), "unchanged_column": "_unchanged"}
    job = _Job(tmp_path, schema, **by_key).open()
    job.write(1, [{"id": 1, "v": "a", "n": 1}, {"id": 2, "v": "b", "n": 2}])
    job.write(
        2,
        [
            {"id": 1, "n": 9, "_unchanged": ["v"]},
            {"id": 2, "v": "c", "_unchanged": ["n"]},
            {"id": 2, "_unchanged": ["n", "v"]},
        ],
    )
    expected = [(1, "a", 9), (2, "c", 2)]
    assert job.query('SELECT id, v, n FROM "odd ü table" ORDER BY id') == expected
    job.write(3, [{"id": 2, "_unchanged": ["n", "v"]}])
    absent = job.prepare(4, [{"id": 1, "v": "d", "n": 0}, {"id": 3, "_unchanged": ["n", "v"]}])
    outcome = job.committer().commit(absent)
    assert isinstance(outcome, committables.RetryLater)
    assert "no row with the key {'id': 3}" in outcome.reason
    assert job.query('SELECT id, v, n FROM "odd ü table" ORDER BY id') == expected


def test_a_row_whose_update_a_trigger_skips_is_not_missing(tmp_path: Path) -> None:
    schema = pa.schema([*_SCHEMA, pa.field("n", pa.int64()), ("_unchanged", pa.list_(pa.string()))])
    by_key = {"write_mode": "upsert", "primary_key": ("id",), "unchanged_column": "_unchanged"}
    job = _Job(tmp_path, schema, **by_key).open()
    job.write(1, [{"id": 1, "v": "a", "n": 1}, {"id": 2, "v": "b", "n": 2}])
    job.query(
        'CREATE TRIGGER z BEFORE UPDATE ON "odd ü table" WHEN NEW.n IS OLD.n'
        " BEGIN SELECT RAISE(IGNORE); END"
    )
    changes = [{"id": key, "n": n, "_unchanged": ["v"]} for key, n in ((1, 1), (2, 3))]
    job.write(2, changes)
    expected = [(1, "a", 1), (2, "b", 3)]
    assert job.query('SELECT id, v, n FROM "odd ü table" ORDER BY id') == expected


def test_a_check_of_an_update_is_named_by_the_commit_until_it_accepts_the_row(
    tmp_path: Path,
) -> None:
    """An update may find no row, so nothing is known before the decision."""
    job = _Job(tmp_path, table="t", write_mode="update", primary_key=("id",))
    columns = "(id INTEGER PRIMARY KEY, v TEXT"
    job.query(f"CREATE TABLE t {columns}, CONSTRAINT short CHECK (length(v) < 5))")
    job.query("INSERT INTO t VALUES (1, 'old')")
    committable = job.open().prepare(1, [{"id": 1, "v": "too long"}])
    for _ in range(2):
        outcome = job.committer().commit(committable)
        assert isinstance(outcome, committables.RetryLater)
        assert "CHECK constraint failed: short" in outcome.reason
        assert outcome.until_fixed
    assert job.query("SELECT * FROM t") == [(1, "old")]
    job.query(f"CREATE TABLE u {columns})")
    job.query("INSERT INTO u SELECT * FROM t")
    job.query("DROP TABLE t")
    job.query("ALTER TABLE u RENAME TO t")
    assert job.committer().commit(committable) == committables.Committed()
    assert job.query("SELECT * FROM t") == [(1, "too long")]


@pytest.mark.parametrize("settings", [{}, {"write_mode": "upsert", "primary_key": ("id",)}])
def test_a_row_that_a_check_refuses_is_a_bad_row_before_it_is_decided(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    job = _Job(tmp_path, table="t", **settings)
    job.query(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, w TEXT DEFAULT 'w',"
        " g INTEGER GENERATED ALWAYS AS (length(v)) NOT NULL,"
        " CONSTRAINT short CHECK (length(v || w) < 5))"
    )
    writer = job.open().writer(OnBadRow.DEAD_LETTER)
    given = {1: "fine", 2: "abc", 3: "", 4: None}
    writer.write(job.batch([{"id": number, "v": text} for number, text in given.items()]))
    (committable,) = writer.pre_commit(CheckpointId(1))
    rejected = {
        row["id"]: reason
        for part in writer.take_rejected()
        for row, reason in zip(part.rows.to_pylist(), part.reasons, strict=True)
    }
    assert rejected.keys() == {1, 4}
    assert "CHECK constraint failed: short" in rejected[1]
    assert "NOT NULL constraint failed: t.g" in rejected[4]
    assert job.committer().commit(committable) == committables.Committed()
    assert job.query("SELECT id, v FROM t ORDER BY id") == [(2, "abc"), (3, "")]


@pytest.mark.parametrize("clause", ["IGNORE", "REPLACE"])
@pytest.mark.parametrize("write_mode", ["insert", "upsert", "update"])
def test_a_conflict_clause_of_the_table_neither_drops_nor_replaces_a_row(
    tmp_path: Path, write_mode: str, clause: str
) -> None:
    key: dict[str, Any] = {} if write_mode == "insert" else {"primary_key": ("id",)}
    job = _Job(tmp_path, table="t", write_mode=write_mode, **key)
    job.query(f"CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT UNIQUE ON CONFLICT {clause})")
    job.query("INSERT INTO t VALUES (9, 'a')")
    if write_mode == "update":
        job.query("INSERT INTO t VALUES (1, 'old')")
    before = job.query("SELECT * FROM t ORDER BY id")
    outcome = job.open().committer().commit(job.prepare(1, [{"id": 1, "v": "a"}]))
    assert isinstance(outcome, committables.RetryLater)
    assert "UNIQUE constraint failed: t.v" in outcome.reason
    assert job.query("SELECT * FROM t ORDER BY id") == before


def test_rows_come_after_the_rows_of_other_tables_to_which_they_refer(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("parent", pa.int64()), ("to", pa.string())])
    job = _Job(tmp_path, schema, table="parents", table_column="to")
    job.query("CREATE TABLE parents (id INTEGER PRIMARY KEY, parent INTEGER)")
    job.query(
        "CREATE TABLE children (id INTEGER PRIMARY KEY, parent INTEGER REFERENCES parents (id))"
    )
    rows: list[dict[str, Any]] = [
        {"id": 1, "parent": None, "to": "parents"},
        {"id": 2, "parent": 1, "to": "children"},
    ]
    job.open().write(1, rows)
    assert job.query("SELECT * FROM children") == [(2, 1)]


def test_inserts_add_rows_and_a_key_that_is_there_stops_the_commit(tmp_path: Path) -> None:
    job = _Job(tmp_path, primary_key=("id",)).open()
    job.write(1, [{"id": 1, "v": "a"}])
    outcome = job.committer().commit(job.prepare(2, [{"id": 2, "v": "b"}, {"id": 1, "v": "c"}]))
    assert isinstance(outcome, committables.RetryLater)
    assert "UNIQUE constraint failed" in outcome.reason
    assert job.rows() == [(1, "a")], "all of a transaction or nothing"


def test_a_column_that_keeps_every_value_is_told_from_one_of_the_same_word_that_does_not(
    tmp_path: Path,
) -> None:
    """ANY of a STRICT table keeps text that looks like a number, ANY of another one does not."""
    job = _Job(tmp_path, create=False)
    job.query('CREATE TABLE "odd ü table" (id INTEGER PRIMARY KEY, v ANY) STRICT')
    job.open()
    committer = job.committer()
    assert committer.commit(job.prepare(1, [{"id": 1, "v": "001"}])) == committables.Committed()
    prepared = job.prepare(2, [{"id": 2, "v": "002"}])
    job.query('DROP TABLE "odd ü table"')
    job.query('CREATE TABLE "odd ü table" (id INTEGER PRIMARY KEY, v ANY)')
    outcome = committer.commit(prepared)
    assert isinstance(outcome, committables.RetryLater)
    assert "column 'v' was ANY of a STRICT table when" in outcome.reason
    assert job.rows() == []


@pytest.mark.parametrize("evolve", [False, True])
def test_a_column_whose_name_differs_in_case_alone_is_refused_with_its_name_in_the_table(
    tmp_path: Path, evolve: bool
) -> None:
    _Job(tmp_path).open()
    rows = pa.schema([_SCHEMA.field("id"), pa.field("V", pa.string())])
    with pytest.raises(ConfigError, match="it has column 'v', and the rows have 'V'") as told:
        _Job(tmp_path, rows, evolve=evolve).open(2)
    assert "evolve" not in str(told.value)


def test_columns_that_the_table_lacks_are_added(tmp_path: Path) -> None:
    _Job(tmp_path).open()
    wider = pa.schema([*_SCHEMA, pa.field("w", pa.float64()), pa.field("x", pa.string())])
    job = _Job(tmp_path, wider, evolve=True).open(2)
    job.write(1, [{"id": 1, "v": "a", "w": 0.5, "x": "y"}])
    assert job.rows() == [(1, "a", 0.5, "y")]


def test_values_keep_their_meaning_in_the_forms_that_sqlite_has(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("n", pa.int8()), ("u", pa.uint64()), ("b", pa.bool_()), ("f", pa.float32()),
            ("s", pa.dictionary(pa.int8(), pa.string())), ("o", pa.binary()),
            ("d", pa.date32()), ("t", pa.time64("ns")), ("w", pa.timestamp("ms")),
            ("i", pa.timestamp("ns", "Europe/Berlin")), ("m", pa.decimal128(30, 2)),
        ]
    )  # fmt: skip
    job = _Job(tmp_path, schema).open()
    job.write(
        1,
        [
            {
                "n": -8, "u": 2**63 - 1, "b": True, "f": 0.5, "s": "é\0", "o": b"\0\xff",
                "d": date(2024, 2, 29), "t": time(12, 0, 0, 5), "w": datetime(2024, 2, 29, 12),
                "i": datetime(2024, 2, 29, 12, tzinfo=_BERLIN),
                "m": Decimal("1234567890123456789012345678.50"),
            },
            dict.fromkeys(schema.names),
        ],
    )  # fmt: skip
    nulls, values = sorted(job.rows(), key=lambda row: row[0] is not None)
    assert nulls == (None,) * len(schema)
    assert values == (
        -8, 2**63 - 1, 1, 0.5, "é\0", b"\0\xff", "2024-02-29", "12:00:00.000005",
        "2024-02-29 12:00:00.000000", "2024-02-29 11:00:00.000000+00:00",
        "1234567890123456789012345678.50",
    )  # fmt: skip
    assert job.query('SELECT typeof(m), datetime(i) FROM "odd ü table" WHERE n') == [
        ("text", "2024-02-29 11:00:00")
    ]


@pytest.mark.parametrize(
    ("declared", "column", "said"),
    [
        ("INTEGER", pa.array([2**63], pa.uint64()), "9223372036854775808"),
        ("REAL", pa.array([float("nan")]), "would store null instead"),
        ("DATETIME", pa.array(["20240229"]), "would store a number instead"),
        ("DATETIME", pa.array(["\v20240229"]), "would store a number instead"),
        ("TIME", pa.array(["12\v"]), "would store a number instead"),
        ("TEXT", pa.array([1], pa.int64()).cast(pa.timestamp("ns")), "00:00:00.000000001"),
        ("TEXT NOT NULL", pa.array([None], pa.string()), "NOT NULL"),
    ],
)
def test_value_that_the_column_would_change_is_a_bad_row(
    tmp_path: Path, declared: str, column: pa.Array, said: str
) -> None:
    job = _Job(tmp_path, pa.schema([("v", column.type)]), create=False)
    job.query(f'CREATE TABLE "odd ü table" (v {declared})')
    writer = job.open().writer()
    with pytest.raises(BadRow, match=f"column 'v'.*{said}"):
        writer.write(pa.RecordBatch.from_arrays([column], schema=job.schema))


@pytest.mark.parametrize(
    ("declared", "kind"),
    [
        ("TEXT", pa.int64()),
        ("INTEGER", pa.string()),
        ("INTEGER", pa.float64()),
        ("DECIMAL(9, 2)", pa.decimal128(9, 2)),
        ("REAL", pa.int64()),
        ("BLOB", pa.string()),
        ("TEXT", pa.list_(pa.int64())),
    ],
)
def test_column_that_would_change_every_value_is_refused_at_the_start(
    tmp_path: Path, declared: str, kind: pa.DataType
) -> None:
    job = _Job(tmp_path, pa.schema([("v", kind)]), create=False)
    job.query(f'CREATE TABLE "odd ü table" (v {declared})')
    with pytest.raises(ConfigError, match="does not take it unchanged"):
        job.open()


def test_keys_need_a_unique_index_that_tells_them_apart(tmp_path: Path) -> None:
    job = _Job(tmp_path, create=False, write_mode="upsert", primary_key=("v",))
    job.query('CREATE TABLE "odd ü table" (id INTEGER, v TEXT)')
    with pytest.raises(ConfigError, match="no unique index over exactly") as failure:
        job.open()
    job.query('CREATE UNIQUE INDEX by_v ON "odd ü table" (v COLLATE NOCASE)')
    with pytest.raises(ConfigError, match="collation NOCASE"):
        job.open(2)
    job.query("DROP INDEX by_v")
    job.query(str(failure.value).rpartition("Run: ")[2])
    job.open(3)


def test_the_collation_binary_is_accepted_in_whatever_case_it_is_written(tmp_path: Path) -> None:
    job = _Job(tmp_path, create=False, write_mode="upsert", primary_key=("v",))
    job.query('CREATE TABLE "odd ü table" (id INTEGER, v TEXT COLLATE binary PRIMARY KEY)')
    rows = [{"id": 1, "v": "a"}, {"id": 2, "v": "A"}]
    assert job.open().committer().commit(job.prepare(1, rows)) == committables.Committed()
    assert job.query('SELECT id, v FROM "odd ü table" ORDER BY id') == [(1, "a"), (2, "A")]


def test_tombstones_of_rows_that_have_only_a_key_are_refused_before_a_row_is_deleted(
    tmp_path: Path,
) -> None:
    """All columns outside the key are null in each of them, so each would delete its key."""
    given = {"write_mode": "upsert", "primary_key": ("v",), "tombstones": True}
    job = _Job(tmp_path, pa.schema([("v", pa.string())]), **given)
    with pytest.raises(ConfigError, match="every row would be a delete.*operation_column="):
        job.open()
    assert job.query("SELECT name FROM sqlite_master WHERE name LIKE 'odd%'") == []
    schema = pa.schema([("v", pa.string()), ("op", pa.string())])
    by_operation = _Job(tmp_path, schema, **{**given, "operation_column": "op"})
    with pytest.raises(ConfigError, match="every row would be a delete"):
        by_operation.open(2)


@pytest.mark.parametrize("write_mode", ["upsert", "update"])
def test_changes_meet_only_the_row_of_their_key_though_the_column_ignores_case(
    tmp_path: Path, write_mode: str
) -> None:
    """The unique index tells "a" from "A", and a comparison with the column alone does not."""
    schema = pa.schema([("v", pa.string()), ("n", pa.int64()), ("op", pa.string())])
    by_key = {"primary_key": ("v",), "operation_column": "op", "write_mode": write_mode}
    job = _Job(tmp_path, schema, create=False, **by_key)
    job.query('CREATE TABLE "odd ü table" (v TEXT COLLATE NOCASE, n INTEGER)')
    job.query('CREATE UNIQUE INDEX by_v ON "odd ü table" (v COLLATE BINARY)')
    job.query("""INSERT INTO "odd ü table" VALUES ('a', 1), ('A', 2), ('b', 3), ('B', 4)""")
    rows: list[dict[str, Any]] = [{"v": "a", "op": "d"}, {"v": "b", "n": 9, "op": "u"}]
    assert job.open().committer().commit(job.prepare(1, rows)) == committables.Committed()
    kept = job.query('SELECT v, n FROM "odd ü table" ORDER BY n')
    assert kept == [("A", 2), ("B", 4), ("b", 9)]


def test_integer_key_of_a_column_of_floats_is_committed(tmp_path: Path) -> None:
    """The staged key is a float by then. A key of floats in the stream would be refused."""
    schema = pa.schema([("k", pa.int32()), ("v", pa.string()), ("op", pa.string())])
    by_key = {"primary_key": ("k",), "operation_column": "op", "write_mode": "upsert"}
    job = _Job(tmp_path, schema, create=False, **by_key)
    job.query('CREATE TABLE "odd ü table" (k REAL PRIMARY KEY, v TEXT)')
    job.query("""INSERT INTO "odd ü table" VALUES (1, 'old'), (2, 'old')""")
    rows: list[dict[str, Any]] = [
        {"k": 1, "v": "new", "op": "u"},
        {"k": 2, "op": "d"},
        {"k": 3, "v": "new", "op": "u"},
    ]
    assert job.open().committer().commit(job.prepare(1, rows)) == committables.Committed()
    kept = job.query('SELECT k, v FROM "odd ü table" ORDER BY k')
    assert kept == [(1.0, "new"), (3.0, "new")]


def test_views_and_missing_tables_are_refused_at_the_start(tmp_path: Path) -> None:
    job = _Job(tmp_path, create=False)
    with pytest.raises(ConfigError, match="does not exist in SQLite file"):
        job.open()
    job.query('CREATE VIEW "odd ü table" AS SELECT 1 AS id, 2 AS v')
    with pytest.raises(ConfigError, match="is a view"):
        job.open(2)


def test_rows_that_do_not_fit_are_left_out_where_that_is_asked_for(job: _Job) -> None:
    writer = job.writer(OnBadRow.DROP)
    writer.write(job.batch([{"id": 1, "v": "a"}, {"id": None, "v": "b"}]))
    (rejected,) = writer.take_rejected()
    assert rejected.rows.to_pylist() == [{"id": None, "v": "b"}]
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert committable.rows == 1


def test_other_jobs_and_older_attempts_are_refused(job: _Job) -> None:
    for attempt in (1, 0):
        with pytest.raises(Fenced):
            job.open(attempt)
    with pytest.raises(ConfigError, match="log"):
        job.open(9, log_id="log-2")
    job.open(2)


def test_committers_at_once_apply_each_transaction_once(job: _Job) -> None:
    todo = [job.prepare(number, [{"id": number, "v": "a"}]) for number in range(1, 21)]
    outcomes: list[object] = []

    def commit() -> None:
        committer = job.committer()
        outcomes.extend(committer.commit(committable) for committable in todo)

    threads = [threading.Thread(target=commit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count(committables.Committed()) == 20
    assert outcomes.count(committables.AlreadyCommitted()) == 40
    assert len(job.rows()) == 20


def test_file_that_another_program_locks_is_waited_for_and_asked_again(tmp_path: Path) -> None:
    job = _Job(tmp_path, lock_timeout_s=0.05).open()
    committable = job.prepare(1, [{"id": 1, "v": "a"}])
    with closing(sqlite3.connect(job.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        committer = job.committer()
        outcome = committer.commit(committable)
        assert isinstance(outcome, committables.RetryLater)
        assert "locked" in outcome.reason
        assert isinstance(committer.abort(committable), committables.RetryLater)
        other.rollback()
    assert committer.commit(committable) == committables.Committed()
    assert job.rows() == [(1, "a")]


def test_readers_see_the_last_commit_while_a_writer_is_at_work(job: _Job) -> None:
    job.write(1, [{"id": 1, "v": "a"}])
    with closing(sqlite3.connect(job.path)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute('DELETE FROM "odd ü table"')
        assert job.rows() == [(1, "a")]


def test_commit_is_on_the_disk_when_it_returns(job: _Job) -> None:
    session = job.sink.endpoint.connect("test")
    assert session.query("PRAGMA synchronous") == [(2,)]
    assert session.query("PRAGMA journal_mode") == [("wal",)]
    session.close()


@pytest.mark.parametrize("url", ["", ":memory:", "sqlite://", "sqlite:///", "postgresql://h/d"])
def test_url_that_names_no_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="absolute/path"):
        SQLiteSink(url, table="t")


def test_settings_that_a_file_does_not_have_are_refused(tmp_path: Path) -> None:
    path = f"sqlite:///{tmp_path}/a.db"
    with pytest.raises(ConfigError, match="relative"):
        SQLiteSink("sqlite:///a.db", table="t")
    with pytest.raises(ConfigError, match="password is given"):
        SQLiteSink(path, table="t", password="x")
    with pytest.raises(ConfigError, match="exactly once only"):
        SQLiteSink(path, table="t", delivery="at_least_once")
    with pytest.raises(ConfigError, match="commit_mode"):
        _Job(tmp_path, commit_mode="two_phase").open()


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target.db").write_bytes(b"something else entirely, and long enough" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        _Job(tmp_path).open()
    with pytest.raises(ConfigError, match="cannot be opened"):
        _Job(tmp_path / "no such directory").open()


def test_sink_pickles_and_prints_where_it_writes(job: _Job) -> None:
    again = pickle.loads(pickle.dumps(job.sink))
    assert again == job.sink
    assert str(job.path) in repr(again)


def test_rows_survive_a_kill_after_the_commit(job: _Job) -> None:
    """And a process that is killed in a transaction leaves nothing of it, and no lock."""
    program = (
        "import os, signal, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "db.execute('BEGIN IMMEDIATE'); "
        "db.execute('INSERT INTO \"odd ü table\" VALUES (9, 9)'); os.kill(os.getpid(), 9)"
    )
    job.write(1, [{"id": 1, "v": "a"}])
    done = subprocess.run([sys.executable, "-c", program, str(job.path)], timeout=60, check=False)
    assert done.returncode == -9
    job.write(2, [{"id": 2, "v": "b"}])
    assert job.rows() == [(1, "a"), (2, "b")]


def test_staging_is_required(tmp_path: Path) -> None:
    job = _Job(tmp_path)
    context = CommitterContext("job", "rows", "job.rows", AttemptId(1), "log-1", None)
    with pytest.raises((ConfigError, SinkError), match="checkpoint storage"):
        job.sink.open(context, _SCHEMA)


@pytest.mark.parametrize(
    "at",
    [
        pa.array([0, 2**58, 0]).view(pa.timestamp("us")),
        pa.array([0, -(2**58), 0]).view(pa.timestamp("us", "UTC")),
        pa.array([0, 2**30, 0], pa.int32()).view(pa.date32()),
    ],
    ids=str,
)
def test_an_instant_that_python_has_no_value_for_is_a_bad_row_and_never_another_text(
    tmp_path: Path, at: pa.Array
) -> None:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("at", at.type)])
    job = _Job(tmp_path, schema).open()
    rows = pa.record_batch([pa.array([0, 1, 2]), at], schema=schema)
    with pytest.raises(BadRow, match=r"column 'at'.*years 1 to 9999"):
        job.writer().write(rows)
    writer = job.writer(OnBadRow.DROP, subtask=1)
    writer.write(rows)
    (rejected,) = writer.take_rejected()
    assert rejected.rows.column("id").to_pylist() == [1]


def test_a_commit_looks_once_at_each_table_whose_rows_were_staged_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def read(
        dialect: SQLiteDialect, session: Session, name: TableName
    ) -> Mapping[str, ColumnFacts]:
        looked.append(name.name)
        return Dialect.read_column_facts(dialect, session, name)

    monkeypatch.setattr(row_loader, "_CHUNK_ROWS", 2)
    monkeypatch.setattr(SQLiteDialect, "read_column_facts", read)
    schema = _SCHEMA.append(pa.field("to", pa.string()))
    job = _Job(tmp_path, schema, table="a", table_column="to").open()
    writer = job.writer()
    for number in range(4):
        rows = [{"id": number, "v": "x", "to": to} for to in ("a", "b")]
        writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    (committable,) = writer.pre_commit(CheckpointId(1))
    writer.close()
    assert job.committer().commit(committable) == committables.Committed()
    assert sorted(looked) == ["a", "b"]
