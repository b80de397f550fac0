"""Rows changed by key: the table is what the stream's rows one by one would have made of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.integration.mysql_sink_kit import (
    FLAVORS,
    Job,
    await_lock_wait,
    ids_in,
    ledger_rows,
    prepared,
    query,
)
from tests.integration.sink_kit import rows

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow, SinkWriter
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import MySQLSink

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("op", pa.string())])
MODES: list[Literal["two_phase", "ledger"]] = ["two_phase", "ledger"]

Change = tuple[int | None, str | None, str]
Make = Callable[..., Job]


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture(params=MODES)
def make(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Iterator[Make]:
    """Return what makes a checked job on the table `t`, in each commit mode."""
    jobs: list[Job] = []
    query(
        url,
        "CREATE TABLE t (id bigint PRIMARY KEY, name varchar(99), note varchar(9) DEFAULT 'new')",
    )

    def made(schema: pa.Schema = SCHEMA, attempt: int = 1, **settings: Any) -> Job:
        usual: dict[str, Any] = {
            "write_mode": "upsert", "primary_key": ("id",), "operation_column": "op",
        }  # fmt: skip
        sink = MySQLSink(url, table="t", commit_mode=request.param, **{**usual, **settings})
        staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
        jobs.append(Job(sink, schema=schema, staging=staging))
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


def _commit(job: Job, writer: SinkWriter, checkpoint: int) -> None:
    committable = writer.pre_commit(CheckpointId(checkpoint))
    assert committable is not None
    assert job.committer().commit(committable) == Committed()


def _table(url: str, columns: str = "id, name") -> list[tuple[Any, ...]]:
    return query(url, f"SELECT {columns} FROM t ORDER BY id")


def test_upsert_puts_and_deletes_as_the_rows_say_and_only_at_the_commit(make: Make) -> None:
    job = make()
    url = job.sink.url
    query(url, "INSERT INTO t VALUES (1, 'old', 'kept'), (2, 'old', 'kept'), (3, 'old', 'kept')")
    writer = job.writer()
    writer.write(_rows((1, "a", "u"), (4, "b", "c"), (2, None, "d"), (1, "c", "update")))
    writer.write(_rows((5, "x", "i"), (5, None, "delete"), (3, None, "d"), (3, "back", "r")))
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    assert _table(url) == [(1, "old"), (2, "old"), (3, "old")]
    assert job.committer().commit(committable) == Committed()
    assert _table(url, "*") == [(1, "c", "kept"), (3, "back", "new"), (4, "b", "new")]
    assert prepared(url) == []
    assert ledger_rows(url) == [str(committable.transaction)]


def test_ignore_keeps_the_first_row_of_a_key(make: Make) -> None:
    job = make(write_mode="ignore")
    query(job.sink.url, "INSERT INTO t (id, name) VALUES (1, 'old'), (3, 'old')")
    writer = job.writer()
    writer.write(_rows((1, "a", "c"), (2, "first", "c"), (2, "second", "c"), (3, None, "d")))
    writer.write(_rows((3, "again", "c"), (3, "ignored", "c")))
    _commit(job, writer, 1)
    assert _table(job.sink.url) == [(1, "old"), (2, "first"), (3, "again")]


def test_update_changes_rows_that_are_there_and_adds_none(make: Make) -> None:
    job = make(write_mode="update")
    query(job.sink.url, "INSERT INTO t (id, name) VALUES (1, 'old'), (2, 'old')")
    writer = job.writer()
    writer.write(_rows((1, "a", "u"), (9, "b", "c"), (2, None, "d"), (2, "c", "u")))
    _commit(job, writer, 1)
    assert _table(job.sink.url) == [(1, "a")]


def test_tombstones_delete(make: Make) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    job = make(schema, tombstones=True, operation_column=None)
    query(job.sink.url, "INSERT INTO t (id, name) VALUES (1, 'old'), (2, 'old')")
    writer = job.writer()
    writer.write(
        pa.RecordBatch.from_arrays([pa.array([1, 3]), pa.array([None, "x"])], schema=schema)
    )
    _commit(job, writer, 1)
    assert _table(job.sink.url) == [(2, "old"), (3, "x")]


@pytest.mark.parametrize("mode", ["upsert", "ignore", "update"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_changes_make_the_table_that_they_make_one_by_one(
    make: Make, mode: str, seed: int
) -> None:
    sys.stdout.write(f"seed {seed}\n")
    chance = random.Random(seed)
    job = make(write_mode=mode)
    expected = dict.fromkeys(range(0, 40, 2), "old")
    values = ", ".join(f"({key}, 'old')" for key in expected)
    query(job.sink.url, f"INSERT INTO t (id, name) VALUES {values}")
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
                elif mode == "upsert" or (mode == "ignore") == (key not in expected):
                    expected[key] = name
        committable = writer.pre_commit(CheckpointId(checkpoint))
        if committable is not None:
            assert committer.commit(committable) == Committed()
        assert dict(_table(job.sink.url)) == expected


def test_replay_after_a_crash_leaves_the_same_table(make: Make) -> None:
    job = make()
    job.writer().write(_rows((1, "lost", "c")))
    writer = job.writer()
    writer.write(_rows((1, "a", "c"), (2, "b", "c")))
    undecided = writer.pre_commit(CheckpointId(1))
    writer.close()
    assert undecided is not None
    job.check(2)
    committer = job.committer(2)
    for committable in committer.in_doubt():
        committer.abort(committable)
    writer = job.writer(2)
    writer.write(_rows((1, "a", "c"), (2, "b", "c")))
    _commit(job, writer, 1)
    assert _table(job.sink.url) == [(1, "a"), (2, "b")]
    assert prepared(job.sink.url) == []


def test_key_columns_alone_may_be_the_whole_row(make: Make) -> None:
    schema = pa.schema([("id", pa.int64()), ("op", pa.string())])
    job = make(schema)
    query(job.sink.url, "INSERT INTO t (id, name) VALUES (1, 'old'), (2, 'old')")
    writer = job.writer()
    batch = pa.record_batch([pa.array([1, 2, 3]), pa.array(["u", "d", "c"])], schema=schema)
    writer.write(batch)
    _commit(job, writer, 1)
    assert _table(job.sink.url) == [(1, "old"), (3, None)]


def test_null_key_and_unknown_operation_are_bad_rows(make: Make) -> None:
    job = make()
    with pytest.raises(BadRow, match="'id' is null"):
        job.writer().write(_rows((None, "a", "c")))
    with pytest.raises(BadRow, match="'op' says none"):
        job.writer().write(_rows((1, "a", "x")))


def test_rows_are_routed_by_the_key_unless_they_are_inserted(make: Make) -> None:
    assert make().sink.routing_key() == ("id",)
    assert MySQLSink("mysql://u@h/d", table="t", primary_key=("id",)).routing_key() == ()


def test_another_unique_index_never_changes_another_keys_row(make: Make) -> None:
    """ON DUPLICATE KEY UPDATE alone would put the row over whichever row it meets."""
    job = make()
    query(
        job.sink.url,
        "ALTER TABLE t ADD UNIQUE (name)",
        "INSERT INTO t (id, name) VALUES (1, 'taken'), (2, 'old')",
    )
    job.check(2)
    writer = job.writer(2)
    writer.write(_rows((2, "new", "u"), (3, "other", "c")))
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    assert job.committer(2).commit(committable) == Committed()
    assert _table(job.sink.url) == [(1, "taken"), (2, "new"), (3, "other")]
    writer.write(_rows((4, "taken", "c")))
    if job.sink.commit_mode == "two_phase":
        with pytest.raises(BadRow, match="Duplicate entry 'taken'"):
            writer.pre_commit(CheckpointId(2))
    else:
        committable = writer.pre_commit(CheckpointId(2))
        assert committable is not None
        outcome = job.committer(2).commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "Duplicate entry 'taken'" in outcome.reason
    assert _table(job.sink.url) == [(1, "taken"), (2, "new"), (3, "other")]


def test_ignore_leaves_duplicates_out_and_hides_no_other_error(make: Make) -> None:
    job = make(write_mode="ignore")
    query(
        job.sink.url,
        "ALTER TABLE t ADD CONSTRAINT short CHECK (CHAR_LENGTH(name) < 9)",
        "INSERT INTO t (id, name) VALUES (1, 'old')",
    )
    writer = job.writer()
    writer.write(_rows((1, "new", "c"), (2, "much too long", "c")))
    if job.sink.commit_mode == "two_phase":
        with pytest.raises(BadRow, match="short"):
            writer.pre_commit(CheckpointId(1))
    else:
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        assert isinstance(job.committer().commit(committable), RetryLater)
    assert _table(job.sink.url) == [(1, "old")]


def test_keys_of_several_columns_and_types_find_their_rows(url: str) -> None:
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
    query(
        url,
        "CREATE TABLE t (day date, at datetime(6), name varchar(9) CHARACTER SET utf8mb4 COLLATE "
        "utf8mb4_bin, raw varbinary(9), price decimal(9,2), value bigint, "
        "PRIMARY KEY (day, at, name, raw, price)) COLLATE utf8mb4_general_ci",
    )
    modes: tuple[Literal["upsert", "update", "ignore"], ...] = ("upsert", "update", "ignore")
    for attempt, mode in enumerate(modes, 1):
        sink = MySQLSink(
            url, table="t", write_mode=mode, primary_key=tuple(schema.names[:-1]), tombstones=True
        )
        with Job(sink, schema=schema) as job:
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
                committable = writer.pre_commit(CheckpointId(2 * attempt + number))
                assert committable is not None
                assert job.committer(attempt).commit(committable) == Committed()
            expected = {"upsert": [("a'\\", 3)], "update": [("a'\\", 3)], "ignore": [("a'\\", 3)]}
            assert query(url, "SELECT name, value FROM t") == expected[mode]


def test_table_without_the_unique_index_is_told_the_statement(make: Make) -> None:
    job = make()
    query(job.sink.url, "ALTER TABLE t DROP PRIMARY KEY")
    statement = r"ALTER TABLE `\w+`\.`t` ADD PRIMARY KEY \(`id`\)"
    with pytest.raises(ConfigError, match=statement):
        job.check(2)
    query(job.sink.url, "CREATE UNIQUE INDEX wider ON t (id, name)")
    with pytest.raises(ConfigError, match=statement):
        job.check(3)
    query(job.sink.url, "CREATE UNIQUE INDEX exact ON t (id)")
    job.check(4)


def test_key_that_ignores_case_is_refused_with_what_mends_it(make: Make) -> None:
    job = make()
    query(
        job.sink.url,
        "ALTER TABLE t DROP PRIMARY KEY",
        "ALTER TABLE t MODIFY name varchar(99) NOT NULL, ADD PRIMARY KEY (name)",
    )
    with pytest.raises(ConfigError, match="takes different text for equal") as failure:
        make(attempt=2, primary_key=("name",))
    query(job.sink.url, str(failure.value).rpartition("Run: ")[2])
    make(attempt=3, primary_key=("name",))


@pytest.fixture
def two_phase(url: str) -> Iterator[Job]:
    query(url, "CREATE TABLE t (id bigint PRIMARY KEY, name varchar(99))")
    sink = MySQLSink(
        url, table="t", write_mode="upsert", primary_key=("id",), operation_column="op",
        commit_mode="two_phase",
    )  # fmt: skip
    with Job(sink, schema=SCHEMA) as job:
        yield job.check()


def test_pre_commit_waits_for_the_rows_of_the_last_checkpoint_and_goes_on_after_its_commit(
    two_phase: Job,
) -> None:
    url, writer = two_phase.sink.url, two_phase.writer()
    writer.write(_rows((1, "first", "c")))
    first = writer.pre_commit(CheckpointId(1))
    assert first is not None
    writer.write(_rows((1, "second", "u")))
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(writer.pre_commit, CheckpointId(2))
        await_lock_wait(url)
        assert not second.done()
        assert prepared(url) == [str(first.transaction)]
        assert two_phase.committer().commit(first) == Committed()
        committable = second.result(20)
    assert _table(url) == [(1, "first")]
    assert committable is not None
    assert two_phase.committer().commit(committable) == Committed()
    assert _table(url) == [(1, "second")]


def test_pre_commit_that_waits_too_long_says_for_which_transaction(
    url: str, two_phase: Job
) -> None:
    sink = MySQLSink(
        url, table="t", write_mode="upsert", primary_key=("id",), operation_column="op",
        commit_mode="two_phase", lock_timeout_s=1,
    )  # fmt: skip
    with Job(sink, schema=SCHEMA) as job:
        writer = job.check(2).writer(2)
        writer.write(_rows((1, "first", "c")))
        first = writer.pre_commit(CheckpointId(1))
        assert first is not None
        writer.write(_rows((1, "second", "u")))
        with pytest.raises(PreCommitFailed) as failure:
            writer.pre_commit(CheckpointId(2))
        for part in ("checkpoint 2", "for 1 s", str(first.transaction), "lock_timeout_s"):
            assert part in str(failure.value)
        assert prepared(url) == [str(first.transaction)]
        assert job.committer(2).commit(first) == Committed()


def test_rows_of_several_tables_are_seen_together_or_not_at_all(make: Make) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("to", pa.string())])
    job = make(schema, operation_column=None, table_column="to", create=True)
    url, writer = job.sink.url, job.writer()
    batch = pa.record_batch([[1, 2, 3], ["a", "b", "c"], [None, "u", "t"]], schema=schema)
    writer.write(batch)
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    assert _table(url) == []
    assert job.committer().commit(committable) == Committed()
    assert _table(url) == [(1, "a"), (3, "c")]
    assert query(url, "SELECT id, name FROM u") == [(2, "b")]
    writer.write(batch)
    writer.close()
    assert ids_in(url, "u") == [2]


@pytest.mark.parametrize("mode", ["insert", "upsert"])
def test_new_table_is_created_at_once_whatever_is_prepared_or_open(
    url: str, mode: Literal["insert", "upsert"]
) -> None:
    """CREATE TABLE would end an ordinary transaction, and is refused within XA's."""
    schema = pa.schema([("id", pa.int64()), ("to", pa.string())])
    sink = MySQLSink(
        url, table="t", create=True, table_column="to", commit_mode="two_phase", write_mode=mode,
        primary_key=("id",),
    )  # fmt: skip

    def batch(ids: range, to: str) -> pa.RecordBatch:
        return pa.record_batch(
            [pa.array(ids, pa.int64()), pa.array([to] * len(ids))], schema=schema
        )

    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        writer.write(batch(range(3), "t"))
        first = writer.pre_commit(CheckpointId(1))
        # So many that inserts have begun to go in.
        writer.write(batch(range(100, 60_100), "t"))
        writer.write(batch(range(2), "fresh"))
        assert query(url, "SHOW TABLES LIKE 'fresh'") == [("fresh",)]
        second = writer.pre_commit(CheckpointId(2))
        assert first is not None
        assert second is not None
        assert prepared(url) == [str(first.transaction), str(second.transaction)]
        assert ids_in(url, "fresh") == []
        assert [job.committer().commit(one) for one in (first, second)] == [Committed()] * 2
    assert ids_in(url, "fresh") == [0, 1]
    assert query(url, "SELECT COUNT(*), COUNT(DISTINCT id) FROM t") == [(60_003, 60_003)]


def test_missing_columns_are_added_while_nothing_is_prepared(url: str) -> None:
    query(url, "CREATE TABLE ledger (id bigint)")
    sink = MySQLSink(url, table="ledger", evolve=True, commit_mode="two_phase")
    with Job(sink) as job, pytest.raises(ConfigError, match="no column 'account'"):
        Job(MySQLSink(url, table="ledger")).check()
    with Job(sink) as job:
        job.check(2)
        assert job.committer(2).commit(job.prepare(1, [1], attempt=2)) == Committed()
        left = job.prepare(2, [2], attempt=2)
        wider = pa.schema([*job.schema, ("extra", pa.date32())])
        with Job(sink, schema=wider) as later:
            later.check(3)
            columns = {row[0] for row in query(url, "SHOW COLUMNS FROM ledger")}
            assert "extra" not in columns, "the table is held by what is prepared"
            assert later.committer(3).commit(left) == Committed()
            writer = later.writer(3, first_checkpoint=3)
            writer.write(rows([3]).append_column("extra", pa.nulls(1, pa.date32())))
            committable = writer.pre_commit(CheckpointId(3))
            assert committable is not None
            assert later.committer(3).commit(committable) == Committed()
    assert query(url, "SELECT id, amount, extra FROM ledger ORDER BY id") == [
        (1, 10, None), (2, 20, None), (3, 30, None),
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [OnBadRow.DROP, OnBadRow.DEAD_LETTER])
def test_rows_that_are_refused_by_us_or_by_the_server_are_left_out_and_told(
    url: str, policy: OnBadRow
) -> None:
    query(
        url,
        "CREATE TABLE ledger (id bigint PRIMARY KEY, account varchar(6), amount bigint, "
        "CONSTRAINT even CHECK (amount <> 130))",
        "INSERT INTO ledger VALUES (5, 'there', 0)",
    )
    with Job(MySQLSink(url, table="ledger", commit_mode="two_phase"), on_bad_row=policy) as job:
        writer = job.check().writer()
        batch = rows(range(1, 200))
        accounts = ["far too long" if number == 20 else "fine" for number in range(1, 200)]
        batch = batch.set_column(1, "account", pa.array(accounts))
        writer.write(batch)
        committable = writer.pre_commit(CheckpointId(1))
        rejected = {
            number: reason
            for part in writer.rejected()
            for number, reason in zip(part.rows.column("id").to_pylist(), part.reasons, strict=True)
        }
        assert sorted(rejected) == [5, 13, 20]
        assert "Duplicate entry '5'" in rejected[5]
        assert "even" in rejected[13]
        assert "column 'account'" in rejected[20]
        assert "far too long" in rejected[20]
        assert committable is not None
        assert committable.rows == 196
        assert job.committer().commit(committable) == Committed()
        assert ids_in(url) == [number for number in range(1, 200) if number not in (13, 20)]
        writer.write(rows([5]))
        assert writer.pre_commit(CheckpointId(2)) is None, "of rejected rows nothing is prepared"
        assert [part.rows.num_rows for part in writer.rejected()] == [1]
    assert prepared(url) == []
