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
from tests.integration.postgres_sink_kit import Job, await_lock_wait, ledger_rows, prepared, query

from onceflow.core.errors import BadRow, ConfigError, PreCommitFailed
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import SinkWriter
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import PostgresSink

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("op", pa.string())])
MODES: list[Literal["two_phase", "ledger"]] = ["two_phase", "ledger"]

Change = tuple[int | None, str | None, str]
Make = Callable[..., Job]


@pytest.fixture(params=MODES)
def make(request: pytest.FixtureRequest, postgres_database: str, tmp_path: Path) -> Iterator[Make]:
    """Return what makes a checked job on the table `t`, in each commit mode."""
    jobs: list[Job] = []
    query(
        postgres_database,
        "CREATE TABLE t (id bigint PRIMARY KEY, name text, note text DEFAULT 'new')",
    )

    def made(schema: pa.Schema = SCHEMA, attempt: int = 1, **settings: Any) -> Job:
        usual: dict[str, Any] = {
            "write_mode": "upsert", "primary_key": ("id",), "operation_column": "op",
        }  # fmt: skip
        sink = PostgresSink(
            postgres_database, table="t", commit_mode=request.param, **{**usual, **settings}
        )
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
    query(job.sink.url, "INSERT INTO t VALUES (1, 'old'), (3, 'old')")
    writer = job.writer()
    writer.write(_rows((1, "a", "c"), (2, "first", "c"), (2, "second", "c"), (3, None, "d")))
    writer.write(_rows((3, "again", "c"), (3, "ignored", "c")))
    _commit(job, writer, 1)
    assert _table(job.sink.url) == [(1, "old"), (2, "first"), (3, "again")]


def test_update_changes_rows_that_are_there_and_adds_none(make: Make) -> None:
    job = make(write_mode="update")
    query(job.sink.url, "INSERT INTO t VALUES (1, 'old'), (2, 'old')")
    writer = job.writer()
    writer.write(_rows((1, "a", "u"), (9, "b", "c"), (2, None, "d"), (2, "c", "u")))
    _commit(job, writer, 1)
    assert _table(job.sink.url) == [(1, "a")]


def test_tombstones_delete(make: Make) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    job = make(schema, tombstones=True, operation_column=None)
    query(job.sink.url, "INSERT INTO t VALUES (1, 'old'), (2, 'old')")
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
    query(job.sink.url, "INSERT INTO t SELECT i, 'old' FROM generate_series(0, 38, 2) AS i")
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
    query(job.sink.url, "INSERT INTO t VALUES (1, 'old'), (2, 'old')")
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
    assert PostgresSink("postgresql://h/d", table="t", primary_key=("id",)).routing_key() == ()


def test_table_without_the_unique_index_is_told_the_statement(make: Make) -> None:
    job = make()
    query(job.sink.url, "ALTER TABLE t DROP CONSTRAINT t_pkey")
    statement = r"ALTER TABLE public\.t ADD PRIMARY KEY \(id\)"
    with pytest.raises(ConfigError, match=statement):
        job.check(2)
    query(job.sink.url, "CREATE UNIQUE INDEX partly ON t (id) WHERE id > 0")
    with pytest.raises(ConfigError, match=statement):
        job.check(3)
    query(job.sink.url, "CREATE UNIQUE INDEX wider ON t (id, name)")
    with pytest.raises(ConfigError, match=statement):
        job.check(4)
    query(job.sink.url, "CREATE UNIQUE INDEX exact ON t (id) INCLUDE (name)")
    job.check(5)


def test_key_that_ignores_case_is_refused(make: Make) -> None:
    job = make()
    query(job.sink.url, "CREATE EXTENSION citext")
    query(job.sink.url, "ALTER TABLE t DROP CONSTRAINT t_pkey, ALTER name TYPE citext")
    query(job.sink.url, "ALTER TABLE t ADD PRIMARY KEY (name)")
    with pytest.raises(ConfigError, match="'name' compares text otherwise than by its bytes"):
        make(attempt=2, primary_key=("name",))


def test_role_without_privileges_is_told_the_grant(make: Make, postgres_database: str) -> None:
    job = make()
    query(
        postgres_database,
        "DO $$ BEGIN CREATE ROLE clerk LOGIN; EXCEPTION WHEN duplicate_object THEN END $$",
    )
    query(postgres_database, "GRANT INSERT ON t TO clerk; GRANT ALL ON SCHEMA onceflow TO clerk")
    query(postgres_database, "GRANT ALL ON ALL TABLES IN SCHEMA onceflow TO clerk")
    sink = PostgresSink(
        postgres_database, user="clerk", table="t", write_mode="upsert", primary_key=("id",),
        operation_column="op", commit_mode=job.sink.commit_mode,
    )  # fmt: skip
    with Job(sink, schema=SCHEMA, staging=job.staging) as other:
        with pytest.raises(ConfigError, match="GRANT UPDATE, SELECT, DELETE ON") as failure:
            other.check(2)
        query(postgres_database, str(failure.value).rpartition("Run: ")[2])
        other.check(3)
    query(postgres_database, "REVOKE ALL ON t FROM clerk; REVOKE ALL ON SCHEMA onceflow FROM clerk")
    query(postgres_database, "REVOKE ALL ON ALL TABLES IN SCHEMA onceflow FROM clerk")


@pytest.fixture
def two_phase(postgres_database: str) -> Iterator[Job]:
    query(postgres_database, "CREATE TABLE t (id bigint PRIMARY KEY, name text)")
    sink = PostgresSink(
        postgres_database, table="t", write_mode="upsert", primary_key=("id",),
        operation_column="op", commit_mode="two_phase",
    )  # fmt: skip
    with Job(sink, schema=SCHEMA) as job:
        yield job.check()


def test_violated_constraint_is_a_bad_row_and_changes_nothing(two_phase: Job) -> None:
    """In ledger mode it is met at the commit: see test_postgres_sink_ledger."""
    url = two_phase.sink.url
    query(url, "ALTER TABLE t ADD CONSTRAINT short CHECK (length(name) < 5)")
    writer = two_phase.writer()
    writer.write(_rows((1, "fine", "c"), (2, "too long", "c")))
    with pytest.raises(BadRow, match="constraint short"):
        writer.pre_commit(CheckpointId(1))
    assert _table(url) == []
    assert prepared(url) == []


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
    postgres_database: str, two_phase: Job
) -> None:
    sink = PostgresSink(
        postgres_database, table="t", write_mode="upsert", primary_key=("id",),
        operation_column="op", commit_mode="two_phase", lock_timeout_s=0.3,
    )  # fmt: skip
    with Job(sink, schema=SCHEMA) as job:
        writer = job.check(2).writer(2)
        writer.write(_rows((1, "first", "c")))
        first = writer.pre_commit(CheckpointId(1))
        assert first is not None
        writer.write(_rows((1, "second", "u")))
        with pytest.raises(PreCommitFailed) as failure:
            writer.pre_commit(CheckpointId(2))
        for part in ("checkpoint 2", "0.3 s", str(first.transaction), "lock_timeout_s"):
            assert part in str(failure.value)
        assert prepared(postgres_database) == [str(first.transaction)]
        assert job.committer(2).commit(first) == Committed()


def test_names_keep_their_case_and_odd_characters(postgres_database: str) -> None:
    query(postgres_database, """CREATE TYPE "Mood %s {}" AS ENUM ('good', 'bad')""")
    query(
        postgres_database,
        'CREATE TABLE "Odd ""name"" %s {0}" ("Key %(a)s" bigint PRIMARY KEY, "{v}" "Mood %s {}")',
    )
    schema = pa.schema([("Key %(a)s", pa.int64()), ("{v}", pa.string())])
    sink = PostgresSink(
        postgres_database, table='Odd "name" %s {0}', write_mode="upsert",
        primary_key=("Key %(a)s",), tombstones=True, commit_mode="two_phase",
    )  # fmt: skip
    with Job(sink, schema=schema) as job:
        writer = job.check().writer()
        given: list[list[str | None]] = [["good", "good"], ["bad", None]]
        for checkpoint, values in enumerate(given, 1):
            columns = [pa.array([1, 2]), pa.array(values, pa.string())]
            writer.write(pa.record_batch(columns, schema=schema))
            _commit(job, writer, checkpoint)
    found = query(postgres_database, 'SELECT * FROM "Odd ""name"" %s {0}"')
    assert found == [(1, "bad")]


def test_column_privileges_are_enough(postgres_database: str) -> None:
    query(postgres_database, "CREATE TABLE t (id bigint PRIMARY KEY, name text, secret text)")
    query(
        postgres_database,
        "CREATE ROLE part LOGIN; GRANT INSERT (id, name), UPDATE (name), SELECT (id, name) ON t "
        "TO part; CREATE SCHEMA bookkeeping AUTHORIZATION part",
    )
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    sink = PostgresSink(
        postgres_database, user="part", table="t", write_mode="upsert", primary_key=("id",),
        ledger_schema="bookkeeping", commit_mode="two_phase",
    )  # fmt: skip
    try:
        with Job(sink, schema=schema) as job:
            writer = job.check().writer()
            for checkpoint in (1, 2):
                batch = pa.record_batch([pa.array([1]), pa.array([f"{checkpoint}"])], schema=schema)
                writer.write(batch)
                _commit(job, writer, checkpoint)
        assert query(postgres_database, "SELECT * FROM t") == [(1, "2", None)]
    finally:
        query(postgres_database, "DROP OWNED BY part CASCADE; DROP ROLE part")
