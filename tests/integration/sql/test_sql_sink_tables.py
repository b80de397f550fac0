"""Several tables in one transaction, tables and columns that come to be while the job runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.sink_kit import SCHEMA, rows
from tests.integration.sql.databases import Database, MariaDB, MySQL, SqlJob

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import Aborted, Committable, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.core.storage import FileStagingArea

ROUTED = pa.schema([("id", pa.int64()), ("value", pa.string()), ("to", pa.string())])
FAMILY = pa.schema([("id", pa.int64()), ("parent", pa.int64()), ("to", pa.string())])


@dataclass(frozen=True)
class Dialect:
    """The messages of one database about columns and locks."""

    text: str
    timestamp: str
    said_of_locked_table: str
    writes: tuple[str, ...]
    """What a user needs who writes to what is there, and makes nothing."""


_WRITES = "SELECT, INSERT, UPDATE, DELETE ON *"
_MYSQL = Dialect("longtext", "datetime", "Lock wait timeout exceeded", (_WRITES,))
DIALECTS = {
    "postgres": Dialect(
        "text",
        "timestamp without time zone",
        "lock timeout",
        (
            "ALL ON SCHEMA onceflow",
            "ALL ON ALL TABLES IN SCHEMA onceflow",
            "ALL ON ALL TABLES IN SCHEMA public",
        ),
    ),
    "mysql": replace(_MYSQL, writes=(_WRITES, "XA_RECOVER_ADMIN ON *.*")),
    "mariadb": _MYSQL,
}


@pytest.fixture
def other(database: Database) -> Iterator[str]:
    """Another schema of the server."""
    with database.new_schema("other") as other:
        database.query(f"CREATE SCHEMA {other}")
        yield other


@pytest.fixture
def job(database: Database, other: str, staging: FileStagingArea, mode: str) -> Iterator[SqlJob]:
    """Rows name their table in the column `to`; without a name they go to `main`."""
    for table in ("main", "a", f"{other}.b"):
        database.query(f"CREATE TABLE {table} (id bigint, value text)")
    sink = database.sink(table="main", table_column="to", commit_mode=mode)
    with SqlJob(sink, schema=ROUTED, staging=staging) as job:
        yield job.check()


def _rows(*given: tuple[int, str | None]) -> pa.RecordBatch:
    return pa.record_batch(
        [
            pa.array([number for number, _ in given], pa.int64()),
            pa.array([f"v{number}" for number, _ in given]),
            pa.array([table for _, table in given], pa.string()),
        ],
        schema=ROUTED,
    )


def test_rows_of_all_tables_are_seen_together_or_not_at_all(
    job: SqlJob, database: Database, other: str
) -> None:
    b = f"{other}.b"
    writer = job.writer()
    writer.write(_rows((1, None), (2, "a"), (3, b), (4, "a")))
    writer.write(_rows((5, b), (6, "main")))
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert committable.rows == 6
    for table in ("main", "a", b):
        assert database.ids_in(table) == []
    assert job.committer().commit(committable) == Committed()
    assert database.ids_in("main") == [1, 6]
    assert database.ids_in("a") == [2, 4]
    assert database.ids_in(b) == [3, 5]
    writer.write(_rows((7, None), (8, "a")))
    (committable,) = writer.pre_commit(CheckpointId(2))
    assert job.committer().abort(committable) == Aborted()
    writer.write(_rows((9, None), (10, "a")))
    writer.close()
    assert database.ids_in("main") == [1, 6]
    assert database.ids_in("a") == [2, 4]
    assert database.prepared() == []


def _families(*given: tuple[int, int | None, str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [dict(zip(FAMILY.names, row, strict=True)) for row in given], schema=FAMILY
    )


@pytest.mark.parametrize("settings", [{}, {"write_mode": "upsert", "primary_key": ("id",)}])
def test_rows_come_after_the_rows_of_other_tables_to_which_they_refer(
    database: Database, staging: FileStagingArea, mode: str, settings: dict[str, Any]
) -> None:
    """The names of the tables have the opposite order."""
    database.query(
        "CREATE TABLE z (id bigint PRIMARY KEY, parent bigint)",
        "CREATE TABLE m (id bigint PRIMARY KEY, parent bigint,"
        " FOREIGN KEY (parent) REFERENCES z (id))",
        "CREATE TABLE a (id bigint PRIMARY KEY, parent bigint,"
        " FOREIGN KEY (parent) REFERENCES m (id))",
    )
    if settings:
        settings = {**settings, "operation_column": "_op"}
    schema = FAMILY.append(pa.field("_op", pa.string())) if settings else FAMILY
    sink = database.sink(table="z", table_column="to", commit_mode=mode, **settings)
    with SqlJob(sink, schema=schema, staging=staging, on_bad_row=OnBadRow.DEAD_LETTER) as job:
        writer, committer = job.check().writer(), job.committer()

        def commit(checkpoint: int, operation: str, *tables: str) -> None:
            rows = _families(*((1, None if table == "z" else 1, table) for table in tables))
            if settings:
                rows = rows.append_column("_op", pa.array([operation] * len(tables)))
            writer.write(rows)
            (committable,) = writer.pre_commit(CheckpointId(checkpoint))
            assert not writer.take_rejected()
            assert committer.commit(committable) == Committed()

        commit(1, "c", "z", "m", "a")
        assert [database.ids_in(table) for table in ("z", "m", "a")] == [[1]] * 3
        if settings:
            commit(2, "d", "a", "m", "z")
            assert [database.ids_in(table) for table in ("z", "m", "a")] == [[]] * 3


@pytest.mark.parametrize("on_bad_row", [OnBadRow.FAIL, OnBadRow.DEAD_LETTER])
@pytest.mark.parametrize("table_column", ["to", None])
def test_a_row_refers_to_a_row_that_is_prepared_and_not_yet_committed(
    database: Database, table_column: str | None, on_bad_row: OnBadRow
) -> None:
    database.query(
        "CREATE TABLE t (id bigint PRIMARY KEY, parent bigint,"
        " FOREIGN KEY (parent) REFERENCES t (id))",
        "CREATE TABLE u (id bigint PRIMARY KEY, parent bigint,"
        " FOREIGN KEY (parent) REFERENCES t (id))",
    )
    columns = FAMILY.names if table_column else FAMILY.names[:2]
    sink = database.sink(table="t", table_column=table_column, commit_mode="two_phase")
    schema = pa.schema([FAMILY.field(name) for name in columns])
    with SqlJob(sink, schema=schema, on_bad_row=on_bad_row) as job:
        writer, committer = job.check().writer(), job.committer()
        writer.write(_families((1, None, "t")).select(columns))
        (first,) = writer.pre_commit(CheckpointId(1))

        def write_second() -> Committable:
            writer.write(_families((2, 1, "u"), (3, 1, "t")).select(columns))
            (second,) = writer.pre_commit(CheckpointId(2))
            return second

        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(write_second)
            database.await_lock_wait()
            assert committer.commit(first) == Committed()
            assert committer.commit(second.result(60)) == Committed()
        assert not writer.take_rejected()
    assert database.ids_in("t") == ([1, 3] if table_column else [1, 2, 3])


def test_unknown_table_stops_the_job_by_name_and_says_how_to_create_it(
    job: SqlJob, database: Database
) -> None:
    writer = job.writer()
    writer.write(_rows((1, "a")))
    with pytest.raises(ConfigError, match=r"table absent[^C]*CREATE TABLE absent") as failure:
        writer.write(_rows((2, "absent")))
        writer.pre_commit(CheckpointId(1))
    statement = str(failure.value).partition("CREATE TABLE absent")[2]
    assert "value" in statement
    assert not re.search(r"\bto\b", statement), "the column that names the table is not written"
    assert database.ids_in("a") == []


def test_table_that_does_not_take_the_rows_is_named(job: SqlJob, database: Database) -> None:
    database.query("CREATE TABLE narrow (id bigint)")
    with pytest.raises(ConfigError, match=r"narrow.*no column 'value'"):
        job.writer().write(_rows((1, "narrow")))


# -- tables that come to be ------------------------------------------------------------------------


def _creating(
    database: Database, staging: FileStagingArea, mode: str, write_mode: str = "insert"
) -> SqlJob:
    sink = database.sink(
        table="main", table_column="to", create=True, primary_key=("id",), commit_mode=mode,
        write_mode=write_mode, tombstones=write_mode == "upsert",
    )  # fmt: skip
    return SqlJob(sink, schema=ROUTED, staging=staging)


@pytest.mark.parametrize(
    ("mode", "write_mode"), [("two_phase", "insert"), ("two_phase", "upsert"), ("ledger", "insert")]
)
def test_new_table_is_created_at_once_whatever_is_prepared_or_open(
    database: Database, staging: FileStagingArea, mode: str, write_mode: str
) -> None:
    """It is locked by nobody, so nobody is waited for; a crash leaves it empty.

    In MySQL CREATE TABLE would end an ordinary transaction, and is refused within XA's.
    """
    with _creating(database, staging, mode, write_mode) as job:
        writer = job.check().writer()
        writer.write(_rows(*((number, None) for number in range(3)), (1, "first")))
        (first,) = writer.pre_commit(CheckpointId(1))
        # So many that inserts have begun to go in.
        writer.write(_rows(*((number, None) for number in range(100, 60_100))))
        writer.write(_rows((2, "first"), (3, "fresh"), (4, "fresh")))
        assert "fresh" in database.tables()
        (second,) = writer.pre_commit(CheckpointId(2))
        names = [str(first.transaction), str(second.transaction)]
        assert database.prepared() == (names if mode == "two_phase" else [])
        assert database.ids_in("fresh") == []
        assert [job.committer().commit(one) for one in (first, second)] == [Committed()] * 2
    assert database.ids_in("first") == [1, 2]
    assert database.ids_in("fresh") == [3, 4]
    found = database.query("SELECT COUNT(*), COUNT(DISTINCT id) FROM main")
    assert found == [(60_003, 60_003)]
    keys = (
        "SELECT COUNT(*) FROM information_schema.table_constraints WHERE table_name = 'fresh' "
        f"AND table_schema = '{database.schema}' AND constraint_type = 'PRIMARY KEY'"
    )
    assert database.query(keys) == [(1,)]


def test_subtasks_that_meet_a_new_table_at_once_share_it(
    database: Database, staging: FileStagingArea, mode: str
) -> None:
    with _creating(database, staging, mode) as job:
        job.check()
        writers = [job.writer(subtask=subtask, parallelism=4) for subtask in range(4)]

        def write(subtask: int) -> None:
            writers[subtask].write(_rows(*((subtask * 10 + n, f"new{n}") for n in range(5))))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        for writer in writers:
            (committable,) = writer.pre_commit(CheckpointId(1))
            assert job.committer().commit(committable) == Committed()
    for n in range(5):
        assert database.ids_in(f"new{n}") == [n, 10 + n, 20 + n, 30 + n]


def test_changes_of_several_tables_are_kept_apart(
    database: Database, staging: FileStagingArea, mode: str
) -> None:
    later = pa.record_batch(
        [pa.array([1, 2]), pa.array([None, "new"]), pa.array(["x", "y"])], schema=ROUTED
    )
    with _creating(database, staging, mode, "upsert") as job:
        writer = job.check().writer()
        for checkpoint, batch in enumerate((_rows((1, "x"), (1, "y"), (2, "x")), later), 1):
            writer.write(batch)
            (committable,) = writer.pre_commit(CheckpointId(checkpoint))
            assert job.committer().commit(committable) == Committed()
    assert database.query("SELECT * FROM x ORDER BY id") == [(2, "v2")]
    assert database.query("SELECT * FROM y ORDER BY id") == [(1, "v1"), (2, "new")]


# -- columns that come to be -----------------------------------------------------------------------


def _wider(schema: pa.Schema = SCHEMA) -> pa.Schema:
    return schema.append(pa.field("note", pa.string())).append(pa.field("at", pa.timestamp("us")))


def _wide_rows(number: int) -> pa.RecordBatch:
    batch = rows([number])
    return batch.append_column(pa.field("note", pa.string()), pa.array(["n"])).append_column(
        pa.field("at", pa.timestamp("us")), pa.array([0], pa.timestamp("us"))
    )


def _evolving(database: Database, schema: pa.Schema, **settings: Any) -> SqlJob:
    sink = database.sink(table="ledger", evolve=True, commit_mode="two_phase", **settings)
    return SqlJob(sink, schema=schema)


def test_columns_are_added_at_the_check_as_nullable_ones(database: Database) -> None:
    with database.job(table="ledger", create=True) as job:
        job.check().committer().commit(job.prepare(1, [1]))
    dialect = DIALECTS[database.name]
    with _evolving(database, _wider()) as job:
        writer = job.check(2).writer(2)
        added = [("note", dialect.text, True), ("at", dialect.timestamp, True)]
        assert database.columns()[3:] == added
        writer.write(_wide_rows(2))
        (committable,) = writer.pre_commit(CheckpointId(2))
        assert job.committer(2).commit(committable) == Committed()
        job.check(3)
    found = database.query("SELECT id, note FROM ledger ORDER BY id")
    assert found == [(1, None), (2, "n")]


def test_missing_column_is_an_error_unless_it_may_be_added(database: Database) -> None:
    sink = database.sink(table="ledger", create=True)
    with SqlJob(sink) as job:
        job.check()
    wider = SqlJob(sink, schema=_wider())
    with wider, pytest.raises(ConfigError, match="no column 'note'"):
        wider.check(2)


def test_columns_wait_for_recovery_while_something_is_prepared(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """A prepared transaction holds its lock on the table, which ALTER TABLE would wait for."""
    with database.job(table="ledger", create=True) as job:
        decided = job.check().prepare(1, [1])
    caplog.set_level(logging.INFO, "onceflow.sinks")
    with _evolving(database, _wider()) as job:
        job.check(2)
        assert "columns are added after recovery" in caplog.text
        assert len(database.columns()) == 3
        assert job.committer(2).commit(decided) == Committed()
        with ThreadPoolExecutor(3) as pool:
            writers = list(pool.map(partial(job.writer, 2, parallelism=3), range(3)))
        assert len(database.columns()) == 5
        writers[0].write(_wide_rows(2))
        (committable,) = writers[0].pre_commit(CheckpointId(2))
        assert job.committer(2).commit(committable) == Committed()
    assert database.ids_in() == [1, 2]


def test_writer_gives_up_adding_columns_when_the_table_stays_locked(database: Database) -> None:
    with database.job(table="ledger", create=True) as job:
        job.check().prepare(1, [1])
    with _evolving(database, _wider(), lock_timeout_s=database.lock_timeout_s) as job:
        job.check(2)
        with pytest.raises(SinkError, match=DIALECTS[database.name].said_of_locked_table):
            job.writer(2)


def test_type_that_has_no_column_is_refused_by_name(database: Database) -> None:
    with database.job(table="ledger", create=True) as job:
        job.check()
    nested = SCHEMA.append(pa.field("deep", pa.struct([("x", pa.int64())])))
    refused = _evolving(database, nested)
    with refused, pytest.raises(ConfigError, match="column 'deep'"):
        refused.check(2)


_WIDE = pa.schema([(f"c{number}", pa.int64()) for number in range(2000)])
_TEXTS = pa.schema([(f"c{number}", pa.string()) for number in range(1000)])
_SPACED = pa.schema([("ends in a space ", pa.int64())])


def test_a_table_of_too_many_columns_is_refused_at_the_start(database: Database) -> None:
    """Not a failure that another attempt may fix."""
    _require_no_table(database, _WIDE)


@pytest.mark.parametrize("kind", [MySQL, MariaDB], indirect=True)
@pytest.mark.parametrize("schema", [_TEXTS, _SPACED], ids=["long-row", "name"])
def test_a_table_that_the_server_creates_for_nobody_is_refused_at_the_start(
    database: Database, schema: pa.Schema
) -> None:
    """Neither such a failure nor a row that is bad: there is no row yet."""
    _require_no_table(database, schema)


def _require_no_table(database: Database, schema: pa.Schema) -> None:
    with (
        database.job(table="t", create=True) as job,
        pytest.raises(ConfigError, match="table t cannot be created"),
    ):
        replace(job, schema=schema).check()


@pytest.mark.parametrize("kind", [MySQL, MariaDB], indirect=True)
def test_rows_for_a_table_whose_name_is_too_long_are_left_out(database: Database) -> None:
    rows = pa.record_batch([[1, 2], ["a", "b"], [None, "t" * 65]], schema=ROUTED)
    sink = database.sink(table="t", create=True, table_column="to", commit_mode="two_phase")
    with SqlJob(sink, schema=ROUTED, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        writer.write(rows)
        (committable,) = writer.pre_commit(CheckpointId(1))
        (rejected,) = writer.take_rejected()
        assert rejected.rows["id"].to_pylist() == [2]
        assert job.committer().commit(committable) == Committed()
    assert database.ids_in("t") == [1]


@pytest.mark.parametrize("kind", [MySQL, MariaDB], indirect=True)
@pytest.mark.parametrize("evolve", [False, True])
def test_a_column_whose_name_differs_in_case_alone_is_refused_with_its_name_in_the_table(
    database: Database, evolve: bool
) -> None:
    database.query("CREATE TABLE ledger (ID bigint PRIMARY KEY, account text, amount bigint)")
    expected = "it has column 'ID', and the rows have 'id'"
    with (
        database.job(table="ledger", evolve=evolve) as job,
        pytest.raises(ConfigError, match=expected) as told,
    ):
        job.check()
    assert "evolve" not in str(told.value)


def test_a_start_that_is_refused_has_altered_no_table(database: Database) -> None:
    schema = SCHEMA.append(pa.field("note", pa.string()))
    deep = schema.append(pa.field("deep", pa.struct([("x", pa.int64())])))
    database.query("CREATE TABLE ledger (id bigint, account varchar(9), amount bigint)")
    database.query("CREATE TABLE narrow (id date, account varchar(9), amount bigint)")
    refusals = [("ledger", deep, "column 'deep'"), ("narrow", schema, "column 'id'")]
    for attempt, (table, rows_schema, reason) in enumerate(refusals, start=1):
        with SqlJob(database.sink(table=table, evolve=True), schema=rows_schema) as job:
            for ask in (job.sink.validate, job.sink.open):
                with pytest.raises(ConfigError, match=reason):
                    ask(job.committer_context(attempt), rows_schema)
        assert len(database.columns(table)) == 3


@pytest.mark.parametrize("wish", ["create", "evolve"])
def test_user_who_may_not_make_what_is_missing_is_told_the_statement(
    database: Database, wish: str
) -> None:
    with database.job(table="made_ready", create=True) as ready:
        ready.check()
    if wish == "evolve":
        database.query("CREATE TABLE ledger (id bigint)")
    with database.user(*DIALECTS[database.name].writes) as limited:
        sink = limited.sink(table="ledger", **{wish: True})
        with SqlJob(sink, sink_id="limited") as job, pytest.raises(ConfigError) as failure:
            job.check()
    said = str(failure.value)
    statement = said[said.rindex("CREATE TABLE" if wish == "create" else "ALTER TABLE") :]
    database.query(statement)
    assert database.query("SELECT id, account, amount FROM ledger") == []


def test_columns_are_added_beside_an_operation_that_has_none(
    database: Database, staging: FileStagingArea, mode: str
) -> None:
    database.query("CREATE TABLE ledger (id bigint PRIMARY KEY, account varchar(9))")
    sink = database.sink(
        table="ledger", evolve=True, write_mode="upsert", primary_key=("id",),
        operation_column="op", commit_mode=mode,
    )  # fmt: skip
    schema = SCHEMA.append(pa.field("op", pa.string()))
    with SqlJob(sink, schema=schema, staging=staging) as job:
        writer, committer = job.check().writer(), job.committer()
        for checkpoint, (operation, wanted) in enumerate((("c", [(1, 10)]), ("d", [])), 1):
            changes = rows([1]).append_column(schema.field("op"), pa.array([operation]))
            writer.write(changes)
            (committable,) = writer.pre_commit(CheckpointId(checkpoint))
            assert committer.commit(committable) == Committed()
            assert database.query("SELECT id, amount FROM ledger") == wanted
    assert [name for name, *_ in database.columns()] == ["id", "account", "amount"]
