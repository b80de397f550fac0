"""Several tables in one transaction, tables and columns that come to be while the job runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, prepared, query
from tests.integration.sink_kit import SCHEMA, rows

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.committables import Aborted, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import PostgresSink

ROUTED = pa.schema([("id", pa.int64()), ("value", pa.string()), ("to", pa.string())])
_Mode = Literal["two_phase", "ledger"]
MODES: list[_Mode] = ["two_phase", "ledger"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> _Mode:
    found: _Mode = request.param
    return found


@pytest.fixture
def job(postgres_database: str, tmp_path: Path, mode: _Mode) -> Iterator[Job]:
    """Rows name their table in the column `to`; without a name they go to `main`."""
    query(postgres_database, "CREATE SCHEMA other")
    for table in ("main", "a", "other.b"):
        query(postgres_database, f"CREATE TABLE {table} (id bigint, value text)")
    sink = PostgresSink(postgres_database, table="main", table_column="to", commit_mode=mode)
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(sink, schema=ROUTED, staging=staging) as job:
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


def test_rows_of_all_tables_are_seen_together(job: Job, postgres_database: str) -> None:
    writer = job.writer()
    writer.write(_rows((1, None), (2, "a"), (3, "other.b"), (4, "a")))
    writer.write(_rows((5, "other.b"), (6, "main")))
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    assert committable.rows == 6
    for table in ("main", "a", "other.b"):
        assert ids_in(postgres_database, table) == []
    assert job.committer().commit(committable) == Committed()
    assert ids_in(postgres_database, "main") == [1, 6]
    assert ids_in(postgres_database, "a") == [2, 4]
    assert ids_in(postgres_database, "other.b") == [3, 5]
    assert prepared(postgres_database) == []


def test_rows_of_all_tables_are_gone_together(job: Job, postgres_database: str) -> None:
    writer = job.writer()
    writer.write(_rows((1, None), (2, "a")))
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    assert job.committer().abort(committable) == Aborted()
    assert ids_in(postgres_database, "main") == ids_in(postgres_database, "a") == []


def test_unknown_table_stops_the_job_by_name_and_says_how_to_create_it(
    job: Job, postgres_database: str
) -> None:
    writer = job.writer()
    writer.write(_rows((1, "a")))
    with pytest.raises(ConfigError, match=r"table absent.*CREATE TABLE absent") as failure:
        writer.write(_rows((2, "absent")))
        writer.pre_commit(CheckpointId(1))
    assert '"to"' not in str(failure.value), "the column that names the table is not written"
    assert ids_in(postgres_database, "a") == []


def test_table_that_does_not_take_the_rows_is_named(job: Job, postgres_database: str) -> None:
    query(postgres_database, "CREATE TABLE narrow (id bigint)")
    with pytest.raises(ConfigError, match=r"narrow.*no column 'value'"):
        job.writer().write(_rows((1, "narrow")))


@pytest.fixture
def creating(postgres_database: str, tmp_path: Path, mode: _Mode) -> Iterator[Job]:
    sink = PostgresSink(
        postgres_database, table="main", table_column="to", commit_mode=mode, create=True,
        primary_key=("id",),
    )  # fmt: skip
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(sink, schema=ROUTED, staging=staging) as job:
        yield job.check()


def test_new_table_is_created_at_once_whatever_is_prepared(
    creating: Job, postgres_database: str
) -> None:
    """It is locked by nobody, so nobody is waited for; a crash leaves it empty."""
    writer = creating.writer()
    writer.write(_rows((1, "first")))
    first = writer.pre_commit(CheckpointId(1))
    assert first is not None
    writer.write(_rows((2, "first"), (3, "second")))
    second = writer.pre_commit(CheckpointId(2))
    assert second is not None
    assert ids_in(postgres_database, "second") == []
    for committable in (first, second):
        assert creating.committer().commit(committable) == Committed()
    assert ids_in(postgres_database, "first") == [1, 2]
    assert ids_in(postgres_database, "second") == [3]
    keys = "SELECT count(*) FROM pg_index WHERE indisprimary AND indrelid = 'second'::regclass"
    assert query(postgres_database, keys) == [(1,)]


def test_subtasks_that_meet_a_new_table_at_once_share_it(
    creating: Job, postgres_database: str
) -> None:
    writers = [creating.writer(subtask=subtask, parallelism=4) for subtask in range(4)]

    def write(subtask: int) -> None:
        writers[subtask].write(_rows(*((subtask * 10 + n, f"new{n}") for n in range(5))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    for writer in writers:
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        assert creating.committer().commit(committable) == Committed()
    for n in range(5):
        assert ids_in(postgres_database, f"new{n}") == [n, 10 + n, 20 + n, 30 + n]


def test_changes_of_several_tables_are_kept_apart(
    postgres_database: str, tmp_path: Path, mode: _Mode
) -> None:
    sink = PostgresSink(
        postgres_database, table="main", table_column="to", commit_mode=mode, create=True,
        primary_key=("id",), write_mode="upsert", tombstones=True,
    )  # fmt: skip
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(sink, schema=ROUTED, staging=staging) as job:
        writer = job.check().writer()
        for checkpoint, batch in enumerate(
            (
                _rows((1, "x"), (1, "y"), (2, "x")),
                pa.record_batch(
                    [pa.array([1, 2]), pa.array([None, "new"]), pa.array(["x", "y"])], schema=ROUTED
                ),
            ),
            1,
        ):
            writer.write(batch)
            committable = writer.pre_commit(CheckpointId(checkpoint))
            assert committable is not None
            assert job.committer().commit(committable) == Committed()
    assert query(postgres_database, "SELECT * FROM x ORDER BY id") == [(2, "v2")]
    assert query(postgres_database, "SELECT * FROM y ORDER BY id") == [(1, "v1"), (2, "new")]


def _wider(schema: pa.Schema = SCHEMA) -> pa.Schema:
    return schema.append(pa.field("note", pa.string())).append(pa.field("at", pa.timestamp("us")))


def _wide_rows(number: int) -> pa.RecordBatch:
    batch = rows([number])
    return batch.append_column(pa.field("note", pa.string()), pa.array(["n"])).append_column(
        pa.field("at", pa.timestamp("us")), pa.array([0], pa.timestamp("us"))
    )


def _evolving(url: str, **settings: Any) -> PostgresSink:
    return PostgresSink(url, table="ledger", evolve=True, commit_mode="two_phase", **settings)


def test_columns_are_added_at_the_check_as_nullable_ones(postgres_database: str) -> None:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check().committer().commit(job.prepare(1, [1]))
    with Job(_evolving(postgres_database), schema=_wider()) as job:
        writer = job.check(2).writer(2)
        assert query(
            postgres_database,
            "SELECT attname::text, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute "
            "WHERE attrelid = 'ledger'::regclass AND attnum > 3 ORDER BY attnum",
        ) == [("note", "text", False), ("at", "timestamp without time zone", False)]
        writer.write(_wide_rows(2))
        committable = writer.pre_commit(CheckpointId(2))
        assert committable is not None
        assert job.committer(2).commit(committable) == Committed()
        job.check(3)
    assert query(postgres_database, "SELECT id, note FROM ledger ORDER BY id") == [
        (1, None),
        (2, "n"),
    ]


def test_missing_column_is_an_error_unless_it_may_be_added(postgres_database: str) -> None:
    sink = PostgresSink(postgres_database, table="ledger", create=True)
    with Job(sink) as job:
        job.check()
    with Job(sink, schema=_wider()) as job, pytest.raises(ConfigError, match="no column 'note'"):
        job.check(2)


def test_columns_wait_for_recovery_while_something_is_prepared(
    postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A prepared transaction holds its lock on the table, which ALTER TABLE would wait for."""
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        decided = job.check().prepare(1, [1])
    caplog.set_level(logging.INFO, "onceflow.sinks.postgres")
    with Job(_evolving(postgres_database), schema=_wider()) as job:
        job.check(2)
        assert "columns are added after recovery" in caplog.text
        columns = (
            "SELECT count(*) FROM pg_attribute WHERE attrelid = 'ledger'::regclass AND attnum > 0"
        )
        assert query(postgres_database, columns) == [(3,)]
        assert job.committer(2).commit(decided) == Committed()
        with ThreadPoolExecutor(3) as pool:
            writers = list(pool.map(partial(job.writer, 2, parallelism=3), range(3)))
        assert query(postgres_database, columns) == [(5,)]
        writers[0].write(_wide_rows(2))
        committable = writers[0].pre_commit(CheckpointId(2))
        assert committable is not None
        assert job.committer(2).commit(committable) == Committed()
    assert ids_in(postgres_database) == [1, 2]


def test_writer_gives_up_adding_columns_when_the_table_stays_locked(postgres_database: str) -> None:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check().prepare(1, [1])
    with Job(_evolving(postgres_database, lock_timeout_s=0.3), schema=_wider()) as job:
        job.check(2)
        with pytest.raises(SinkError, match="lock timeout"):
            job.writer(2)


def test_type_that_has_no_column_is_refused_by_name(postgres_database: str) -> None:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        job.check()
    nested = SCHEMA.append(pa.field("deep", pa.struct([("x", pa.int64())])))
    sink = _evolving(postgres_database)
    with Job(sink, schema=nested) as job, pytest.raises(ConfigError, match="column 'deep'"):
        job.check(2)
