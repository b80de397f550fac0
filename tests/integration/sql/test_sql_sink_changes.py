"""Rows changed by key: the table is what the stream's rows one by one would have made of it."""

from __future__ import annotations

import itertools
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.sink_kit import eventually
from tests.integration.sql.databases import Database, SqlJob

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow, SinkWriter
from onceflow.core.storage import FileStagingArea
from onceflow.sinks.sql.changes import ChangeBuffer

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("op", pa.string())])
BY_KEY: dict[str, Any] = {
    "table": "t", "write_mode": "upsert", "primary_key": ("id",), "operation_column": "op",
}  # fmt: skip

Change = tuple[int | None, str | None, str]
Make = Callable[..., SqlJob]


@dataclass(frozen=True)
class Dialect:
    """The messages of one database about keys and indexes."""

    drop_key: str
    add_key: str
    """What the user is told to run, as a regular expression."""
    partial_index: str | None
    """One that has only some of the rows."""
    unique_index: str
    """One over `id` that is no primary key."""
    many_keys: str
    """A table whose key has columns of several types."""
    ignoring_case: tuple[str, ...]
    """Make `name` of the table without a key one that takes A for a, and the key."""
    said_ignoring_case: str
    fix_case: Callable[[str], str]
    """Returns the statement by which the table is taken, of what an error said."""


_MYSQL = Dialect(
    drop_key="ALTER TABLE t DROP PRIMARY KEY",
    add_key=r"ALTER TABLE `\w+`\.`t` ADD UNIQUE \(`id`\)",
    partial_index=None,
    unique_index="CREATE UNIQUE INDEX exact ON t (id)",
    many_keys=(
        "CREATE TABLE t (day date, at datetime(6), name varchar(9) CHARACTER SET utf8mb4 COLLATE "
        "utf8mb4_bin, raw varbinary(9), price decimal(9,2), value bigint, "
        "PRIMARY KEY (day, at, name, raw, price)) COLLATE utf8mb4_general_ci"
    ),
    ignoring_case=("ALTER TABLE t MODIFY name varchar(99) NOT NULL, ADD PRIMARY KEY (name)",),
    said_ignoring_case="treats different texts as equal",
    fix_case=lambda said: said.rpartition("Run: ")[2],
)
DIALECTS = {
    "postgres": Dialect(
        drop_key="ALTER TABLE t DROP CONSTRAINT t_pkey",
        add_key=r'ALTER TABLE "public"\."t" ADD UNIQUE \("id"\)',
        partial_index="CREATE UNIQUE INDEX partly ON t (id) WHERE id > 0",
        unique_index="CREATE UNIQUE INDEX exact ON t (id) INCLUDE (name)",
        many_keys=(
            "CREATE TABLE t (day date, at timestamp, name varchar(9), raw bytea, "
            "price decimal(9,2), value bigint, PRIMARY KEY (day, at, name, raw, price))"
        ),
        ignoring_case=(
            "CREATE EXTENSION citext",
            "ALTER TABLE t ALTER name TYPE citext, ADD PRIMARY KEY (name)",
        ),
        said_ignoring_case="'name' compares text by rules other than byte equality",
        fix_case=lambda _: "ALTER TABLE t ALTER name TYPE text",
    ),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}


@pytest.fixture
def make(database: Database, staging: FileStagingArea, mode: str) -> Iterator[Make]:
    """Return what makes a checked job on the table `t`, in each commit mode."""
    jobs: list[SqlJob] = []
    database.query(
        "CREATE TABLE t (id bigint PRIMARY KEY, name varchar(99), note varchar(9) DEFAULT 'new')"
    )

    def made(schema: pa.Schema = SCHEMA, attempt: int = 1, **settings: Any) -> SqlJob:
        sink = database.sink(**{**BY_KEY, "commit_mode": mode, **settings})
        jobs.append(SqlJob(sink, schema=schema, staging=staging))
        return jobs[-1].check(attempt)

    yield made
    for job in jobs:
        job.__exit__(None, None, None)


def _rows(*changes: Change) -> pa.RecordBatch:
    turned = zip(*changes, strict=True)
    columns = [
        pa.array(list(column), field.type) for column, field in zip(turned, SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _commit(job: SqlJob, writer: SinkWriter, checkpoint: int) -> None:
    (committable,) = writer.pre_commit(CheckpointId(checkpoint))
    assert job.committer().commit(committable) == Committed()


def _table(database: Database, columns: str = "id, name") -> list[tuple[Any, ...]]:
    return database.query(f"SELECT {columns} FROM t ORDER BY id")


def test_upsert_puts_and_deletes_as_the_rows_say_and_only_at_the_commit(
    make: Make, database: Database
) -> None:
    job = make()
    database.query(
        "INSERT INTO t VALUES (1, 'old', 'kept'), (2, 'old', 'kept'), (3, 'old', 'kept')"
    )
    writer = job.writer()
    writer.write(_rows((1, "a", "u"), (4, "b", "c"), (2, None, "d"), (1, "c", "update")))
    writer.write(_rows((5, "x", "i"), (5, None, "delete"), (3, None, "d"), (3, "back", "r")))
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert _table(database) == [(1, "old"), (2, "old"), (3, "old")]
    assert job.committer().commit(committable) == Committed()
    assert _table(database, "*") == [(1, "c", "kept"), (3, "back", "new"), (4, "b", "new")]
    assert database.prepared() == []
    assert database.ledger_rows() == [str(committable.transaction)]


def test_ignore_keeps_the_first_row_of_a_key(make: Make, database: Database) -> None:
    job = make(write_mode="ignore")
    database.query("INSERT INTO t (id, name) VALUES (1, 'old'), (3, 'old')")
    writer = job.writer()
    writer.write(_rows((1, "a", "c"), (2, "first", "c"), (2, "second", "c"), (3, None, "d")))
    writer.write(_rows((3, "again", "c"), (3, "ignored", "c")))
    _commit(job, writer, 1)
    assert _table(database) == [(1, "old"), (2, "first"), (3, "again")]


def test_update_changes_rows_that_are_there_and_adds_none(make: Make, database: Database) -> None:
    job = make(write_mode="update")
    database.query("INSERT INTO t (id, name) VALUES (1, 'old'), (2, 'old')")
    writer = job.writer()
    writer.write(_rows((1, "a", "u"), (9, "b", "c"), (2, None, "d"), (2, "c", "u")))
    _commit(job, writer, 1)
    assert _table(database) == [(1, "a")]


def test_tombstones_delete(make: Make, database: Database) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    job = make(schema, tombstones=True, operation_column=None)
    database.query("INSERT INTO t (id, name) VALUES (1, 'old'), (2, 'old')")
    writer = job.writer()
    writer.write(
        pa.RecordBatch.from_arrays([pa.array([1, 3]), pa.array([None, "x"])], schema=schema)
    )
    _commit(job, writer, 1)
    assert _table(database) == [(2, "old"), (3, "x")]


@pytest.mark.parametrize("kind_of_names", [pa.string(), pa.dictionary(pa.int8(), pa.string())])
def test_changes_keep_their_order_whichever_of_its_names_a_table_is_called(
    make: Make, database: Database, kind_of_names: pa.DataType
) -> None:
    """The default, the name, and the name with its schema: one table, whose last change stays."""
    names = (None, "t", f"{database.schema}.t")
    pairs = list(itertools.product(names, repeat=2))
    job = make(SCHEMA.append(pa.field("goes_to", kind_of_names)), table_column="goes_to")
    changes = [
        (number, "old" if step == 0 else "new", "u", pair[step])
        for number, pair in enumerate(pairs)
        for step in (0, 1)
    ]
    ids, values, operations, tables = zip(*changes, strict=True)
    columns = [pa.array(ids), pa.array(values), pa.array(operations)]
    columns.append(pa.array(tables, pa.string()).cast(kind_of_names))
    writer = job.writer()
    writer.write(pa.record_batch(columns, names=[*SCHEMA.names, "goes_to"]))
    _commit(job, writer, 1)
    assert _table(database) == [(number, "new") for number in range(len(pairs))]


@pytest.mark.parametrize("write_mode", ["upsert", "ignore", "update"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_changes_make_the_table_that_they_make_one_by_one(
    make: Make, database: Database, write_mode: str, seed: int
) -> None:
    sys.stdout.write(f"seed {seed}\n")
    chance = random.Random(seed)
    job = make(write_mode=write_mode)
    expected = dict.fromkeys(range(0, 40, 2), "old")
    values = ", ".join(f"({key}, 'old')" for key in expected)
    database.query(f"INSERT INTO t (id, name) VALUES {values}")
    writer, committer = job.writer(), job.committer()
    for checkpoint in range(1, 8):
        for _ in range(chance.randrange(1, 4)):
            changes = [
                (chance.randrange(40), str(chance.random()), chance.choice("cud"))
                for _ in range(chance.randrange(1, 60))
            ]
            writer.write(_rows(*changes))
            for key, name, op in changes:
                if op == "d":
                    expected.pop(key, None)
                elif write_mode == "upsert" or (write_mode == "ignore") == (key not in expected):
                    expected[key] = name
        for committable in writer.pre_commit(CheckpointId(checkpoint)):
            assert committer.commit(committable) == Committed()
        assert dict(_table(database)) == expected


def test_replay_after_a_crash_leaves_the_same_table(make: Make, database: Database) -> None:
    job = make()
    job.writer().write(_rows((1, "lost", "c")))
    writer = job.writer()
    writer.write(_rows((1, "a", "c"), (2, "b", "c")))
    assert len(writer.pre_commit(CheckpointId(1))) == 1
    writer.close()
    job.check(2)
    committer = job.committer(2)
    for committable in committer.in_doubt():
        committer.abort(committable)
    writer = job.writer(2)
    writer.write(_rows((1, "a", "c"), (2, "b", "c")))
    _commit(job, writer, 1)
    assert _table(database) == [(1, "a"), (2, "b")]
    assert database.prepared() == []


def test_key_columns_alone_may_be_the_whole_row(make: Make, database: Database) -> None:
    schema = pa.schema([("id", pa.int64()), ("op", pa.string())])
    job = make(schema)
    database.query("INSERT INTO t (id, name) VALUES (1, 'old'), (2, 'old')")
    writer = job.writer()
    batch = pa.record_batch([pa.array([1, 2, 3]), pa.array(["u", "d", "c"])], schema=schema)
    writer.write(batch)
    _commit(job, writer, 1)
    assert _table(database) == [(1, "old"), (3, None)]


def test_null_key_and_unknown_operation_are_bad_rows(make: Make) -> None:
    job = make()
    with pytest.raises(BadRow, match="'id' is null"):
        job.writer().write(_rows((None, "a", "c")))
    with pytest.raises(BadRow, match="'op' says none"):
        job.writer().write(_rows((1, "a", "x")))


def test_rows_are_routed_by_the_key_unless_they_are_inserted(
    make: Make, database: Database
) -> None:
    assert make().sink.routing_key() == ("id",)
    assert database.sink(table="t", primary_key=("id",)).routing_key() == ()


def test_another_unique_index_never_changes_another_keys_row(
    make: Make, database: Database
) -> None:
    """ON DUPLICATE KEY UPDATE alone would put the row over whichever row it meets."""
    job = make()
    database.query(
        "ALTER TABLE t ADD UNIQUE (name)",
        "INSERT INTO t (id, name) VALUES (1, 'taken'), (2, 'old')",
    )
    job.check(2)
    writer = job.writer(2)
    writer.write(_rows((2, "new", "u"), (3, "other", "c")))
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert job.committer(2).commit(committable) == Committed()
    assert _table(database) == [(1, "taken"), (2, "new"), (3, "other")]
    refused = database.said_of_duplicate("taken")
    writer.write(_rows((4, "taken", "c")))
    if job.sink.commit_mode == "two_phase":
        with pytest.raises(BadRow, match=re.escape(refused)):
            writer.pre_commit(CheckpointId(2))
    else:
        (committable,) = writer.pre_commit(CheckpointId(2))
        outcome = job.committer(2).commit(committable)
        assert isinstance(outcome, RetryLater)
        assert refused in outcome.reason
    assert _table(database) == [(1, "taken"), (2, "new"), (3, "other")]


def test_ignore_leaves_duplicates_out_and_hides_no_other_error(
    make: Make, database: Database
) -> None:
    job = make(write_mode="ignore")
    database.query(
        "ALTER TABLE t ADD CONSTRAINT short CHECK (CHAR_LENGTH(name) < 9)",
        "INSERT INTO t (id, name) VALUES (1, 'old')",
    )
    writer = job.writer()
    writer.write(_rows((1, "new", "c"), (2, "much too long", "c")))
    if job.sink.commit_mode == "two_phase" or database.name == "postgres":
        with pytest.raises(BadRow, match=re.escape(database.said_of_violation("short"))):
            writer.pre_commit(CheckpointId(1))
    else:
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert isinstance(job.committer().commit(committable), RetryLater)
    assert _table(database) == [(1, "old")]


def test_keys_of_several_columns_and_types_find_their_rows(database: Database) -> None:
    schema = pa.schema(
        [
            ("day", pa.date32()),
            ("at", pa.timestamp("us")),
            ("name", pa.string()),
            ("raw", pa.binary()),
            ("price", pa.decimal128(9, 2)),
            ("value", pa.int64()),
        ]
    )
    database.query(DIALECTS[database.name].many_keys)
    for attempt, write_mode in enumerate(("upsert", "update", "ignore"), 1):
        sink = database.sink(
            table="t", write_mode=write_mode, primary_key=tuple(schema.names[:-1]), tombstones=True
        )
        with SqlJob(sink, schema=schema) as job:
            writer = job.check(attempt).writer(attempt)
            for number, values in enumerate(([1, 2], [3, None])):
                days = pa.array([20_000, 20_000], pa.date32())
                times = pa.array([1, 2], pa.timestamp("us"))
                prices = (
                    pa.array([1, 1], pa.int64())
                    .cast(pa.decimal128(21, 2))
                    .cast(pa.decimal128(9, 2))
                )
                columns = [days, times, pa.array(["a'\\", "A"]), pa.array([b"\xff", b"'"]), prices]
                batch = [*columns, pa.array(values, pa.int64())]
                writer.write(pa.RecordBatch.from_arrays(batch, schema=schema))
                (committable,) = writer.pre_commit(CheckpointId(2 * attempt + number))
                assert job.committer(attempt).commit(committable) == Committed()
            assert database.query("SELECT name, value FROM t") == [("a'\\", 3)]


def test_table_without_the_unique_index_is_told_the_statement(
    make: Make, database: Database
) -> None:
    job, dialect = make(), DIALECTS[database.name]
    database.query(dialect.drop_key)
    wider = "CREATE UNIQUE INDEX wider ON t (id, name)"
    for attempt, index in enumerate((None, dialect.partial_index, wider), 2):
        if index is not None:
            database.query(index)
        with pytest.raises(ConfigError, match=dialect.add_key):
            job.check(attempt)
    database.query(dialect.unique_index)
    job.check(5)


def test_the_statement_for_a_missing_index_works_in_a_table_with_another_primary_key(
    make: Make, database: Database
) -> None:
    job = make()
    database.query(DIALECTS[database.name].drop_key, "ALTER TABLE t ADD PRIMARY KEY (note)")
    with pytest.raises(ConfigError, match="no unique index over exactly") as failure:
        job.check(2)
    database.query(str(failure.value).rpartition("Run: ")[2])
    job.check(3)


def test_key_that_ignores_case_is_refused_with_what_fixes_it(
    make: Make, database: Database
) -> None:
    make()
    dialect = DIALECTS[database.name]
    database.query(dialect.drop_key, *dialect.ignoring_case)
    with pytest.raises(ConfigError, match=dialect.said_ignoring_case) as failure:
        make(attempt=2, primary_key=("name",))
    database.query(dialect.fix_case(str(failure.value)))
    make(attempt=3, primary_key=("name",))


@pytest.fixture
def two_phase(database: Database) -> Iterator[SqlJob]:
    database.query("CREATE TABLE t (id bigint PRIMARY KEY, name varchar(99))")
    sink = database.sink(**BY_KEY, commit_mode="two_phase")
    with SqlJob(sink, schema=SCHEMA) as job:
        yield job.check()


def test_violated_constraint_is_a_bad_row_and_changes_nothing(
    two_phase: SqlJob, database: Database
) -> None:
    """In ledger mode it is met at the commit: see test_sql_sink_ledger."""
    database.query("ALTER TABLE t ADD CONSTRAINT short CHECK (CHAR_LENGTH(name) < 5)")
    writer = two_phase.writer()
    writer.write(_rows((1, "fine", "c"), (2, "too long", "c")))
    with pytest.raises(BadRow, match=re.escape(database.said_of_violation("short"))):
        writer.pre_commit(CheckpointId(1))
    assert _table(database) == []
    assert database.prepared() == []


@pytest.mark.parametrize(
    "write_mode", ["upsert", "update", pytest.param("ignore", marks=pytest.mark.slow)]
)
def test_a_check_makes_a_bad_row_or_is_named_by_the_commit_until_it_accepts_the_row(
    database: Database, staging: FileStagingArea, mode: str, write_mode: str
) -> None:
    """Before a decision, ledger mode knows no constraint that an update violates."""
    database.query(
        "CREATE TABLE t (id bigint PRIMARY KEY, name varchar(99),"
        " CONSTRAINT short CHECK (CHAR_LENGTH(name) < 5))"
    )
    is_update = write_mode == "update"
    if is_update:
        database.query("INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    sink = database.sink(**{**BY_KEY, "commit_mode": mode, "write_mode": write_mode})
    with SqlJob(sink, schema=SCHEMA, staging=staging, on_bad_row=OnBadRow.DEAD_LETTER) as job:
        writer = job.check().writer()
        writer.write(_rows((1, "fine", "c"), (2, "too long", "c")))
        (committable,) = writer.pre_commit(CheckpointId(1))
        rejected = [reason for part in writer.take_rejected() for reason in part.reasons]
        untouched = [(2, "old")] if is_update else []
        if mode == "two_phase" or not is_update:
            assert len(rejected) == 1
            assert "short" in rejected[0]
            assert job.committer().commit(committable) == Committed()
            assert _table(database) == [(1, "fine"), *untouched]
            return
        assert rejected == []
        for _ in range(2):
            outcome = job.committer().commit(committable)
            assert isinstance(outcome, RetryLater)
            assert database.said_of_violation("short") in outcome.reason
            assert outcome.until_fixed
        database.query("ALTER TABLE t DROP CONSTRAINT short")
        assert job.committer().commit(committable) == Committed()
        assert _table(database) == [(1, "fine"), (2, "too long")]


def test_pre_commit_waits_for_the_rows_of_the_last_checkpoint_and_goes_on_after_its_commit(
    two_phase: SqlJob, database: Database
) -> None:
    writer = two_phase.writer()
    writer.write(_rows((1, "first", "c")))
    (first,) = writer.pre_commit(CheckpointId(1))
    writer.write(_rows((1, "second", "u")))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(writer.pre_commit, CheckpointId(2))
        database.await_lock_wait()
        assert not second.done()
        assert database.prepared() == [str(first.transaction)]
        assert two_phase.committer().commit(first) == Committed()
        (committable,) = second.result(60)
    assert _table(database) == [(1, "first")]
    assert committable is not None
    assert two_phase.committer().commit(committable) == Committed()
    assert _table(database) == [(1, "second")]


@pytest.mark.usefixtures("two_phase")
def test_pre_commit_that_waits_too_long_says_for_which_transaction(database: Database) -> None:
    timeout_s = database.lock_timeout_s
    sink = database.sink(**BY_KEY, commit_mode="two_phase", lock_timeout_s=timeout_s)
    with SqlJob(sink, schema=SCHEMA) as job:
        writer = job.check(2).writer(2)
        writer.write(_rows((1, "first", "c")))
        (first,) = writer.pre_commit(CheckpointId(1))
        writer.write(_rows((1, "second", "u")))
        with pytest.raises(PreCommitFailed) as failure:
            writer.pre_commit(CheckpointId(2))
        waited = f"for {timeout_s:g} s"
        for part in ("checkpoint 2", waited, str(first.transaction), "lock_timeout_s"):
            assert part in str(failure.value)
        assert database.prepared() == [str(first.transaction)]
        assert job.committer(2).commit(first) == Committed()


def test_writer_of_changes_that_loses_its_connection_between_barriers_goes_on(
    two_phase: SqlJob, database: Database
) -> None:
    """Nothing of them is at the server before the barrier."""
    writer = two_phase.writer()
    writer.write(_rows((1, "a", "c")))
    # The server ends the check's a moment after they were closed.
    eventually(lambda: len(database.sessions()) == 1)
    database.end_sessions()
    eventually(lambda: database.sessions() == [])
    writer.write(_rows((2, "b", "c")))
    _commit(two_phase, writer, 1)
    assert _table(database) == [(1, "a"), (2, "b")]


def test_more_changes_than_fit_into_memory_are_applied_once(
    two_phase: SqlJob, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[object] = []
    opened: Any = tempfile.TemporaryFile

    def open_counted(**given: Any) -> Any:
        files.append(given)
        return opened(**given)

    defaults: Any = ChangeBuffer.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "memory_bytes_max", 50_000)
    monkeypatch.setattr(tempfile, "TemporaryFile", open_counted)
    writer = two_phase.writer()
    for start in range(0, 40_000, 5_000):
        numbers = range(start, start + 10_000)
        writer.write(_rows(*((number, f"acct-{number % 7}", "u") for number in numbers)))
    _commit(two_phase, writer, 1)
    assert len(files) > 3, "they did not fit"
    assert database.ids_in("t") == list(range(45_000))


_PARTIAL = pa.schema([*SCHEMA, ("note", pa.string()), ("_unchanged", pa.list_(pa.string()))])


def _partial(*rows: tuple[int, str | None, str, str | None, list[str] | None]) -> pa.RecordBatch:
    turned = zip(*rows, strict=True)
    columns = [
        pa.array(list(column), field.type) for column, field in zip(turned, _PARTIAL, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_PARTIAL)


def test_values_that_a_change_did_not_send_stay_for_each_row_its_own(
    make: Make, database: Database
) -> None:
    database.query("ALTER TABLE t ADD other int DEFAULT 7")
    database.query(
        "INSERT INTO t VALUES (1, 'n1', 'o1', 1), (2, 'n2', 'o2', 2), (3, 'n3', 'o3', 3),"
        " (4, 'n4', 'o4', 4), (5, 'n5', 'o5', 5)"
    )
    job = make(_PARTIAL, unchanged_column="_unchanged")
    writer = job.writer()
    writer.write(
        _partial(
            (1, None, "u", "x", ["name"]),
            (2, "y", "u", None, ["note"]),
            (3, None, "u", None, ["name", "note"]),
            (4, None, "u", None, ["note"]),
            (5, "early", "u", "x", None),
        )
    )
    # Coalesced: the value of `name` is one of this checkpoint, and not the table's.
    writer.write(_partial((5, None, "u", "late", ["name"]), (6, "c", "c", "c", [])))
    writer.write(_partial((6, None, "u", "d", ["name"]), (1, None, "d", None, None)))
    writer.write(_partial((1, "back", "c", "z", None), (1, None, "u", "zz", ["name"])))
    _commit(job, writer, 1)
    assert _table(database, "*") == [
        (1, "back", "zz", 7),
        (2, "y", "o2", 2),
        (3, "n3", "o3", 3),
        (4, None, "o4", 4),
        (5, "early", "late", 5),
        (6, "c", "d", 7),
    ]


def test_a_missing_row_whose_values_were_not_sent_is_refused_and_never_written_with_nulls(
    make: Make, database: Database, mode: str
) -> None:
    job = make(_PARTIAL, unchanged_column="_unchanged")
    database.query("INSERT INTO t VALUES (1, 'n', 'o'), (2, 'n', 'o')")
    writer = job.writer()
    writer.write(_partial(*((key, None, "u", "x", ["name"]) for key in (1, 2, 3))))
    refused = r"no row with the key \{'id': 3\}.*Insert the row"
    if mode == "two_phase":
        with pytest.raises(BadRow, match=refused):
            writer.pre_commit(CheckpointId(1))
        assert _table(database) == [(1, "n"), (2, "n")]
        return
    (committable,) = writer.pre_commit(CheckpointId(1))
    outcome = job.committer().commit(committable)
    assert isinstance(outcome, RetryLater)
    assert re.search(refused, outcome.reason)
    assert outcome.until_fixed
    # As the error says: the row is inserted, and the decided rows are committed after it.
    database.query("INSERT INTO t VALUES (3, 'from the source', 'o')")
    assert job.committer().commit(committable) == Committed()
    assert _table(database, "id, name, note")[-1] == (3, "from the source", "x")


def test_an_unchanged_column_must_be_a_written_column(make: Make) -> None:
    """Without the check, the sink would write null into a column that was renamed before it."""
    job = make(_PARTIAL, unchanged_column="_unchanged")
    for name in ("renamed", "id"):
        writer = job.writer()
        with pytest.raises(BadRow, match=f"names '{name}', which is not among"):
            writer.write(_partial((1, None, "u", "x", [name])))


def test_a_column_that_may_not_be_null_may_be_left_as_it_is(make: Make, database: Database) -> None:
    database.query("INSERT INTO t VALUES (1, 'n', 'o')")
    is_postgres = database.name == "postgres"
    database.query(
        "ALTER TABLE t ALTER name SET NOT NULL"
        if is_postgres
        else "ALTER TABLE t MODIFY name varchar(99) NOT NULL"
    )
    job = make(_PARTIAL, unchanged_column="_unchanged")
    writer = job.writer()
    writer.write(_partial((1, None, "u", "x", ["name"])))
    _commit(job, writer, 1)
    assert _table(database, "id, name, note") == [(1, "n", "x")]
    with pytest.raises(BadRow, match="NOT NULL"):
        job.writer().write(_partial((1, None, "u", "x", None)))
