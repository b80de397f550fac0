"""Tables whose columns get other types while a job writes to them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.sql.databases import Database, MariaDB, MySQL, Postgres, SqlJob

from onceflow.core.errors import BadRow, OnceflowError, PreCommitFailed
from onceflow.core.protocol.committables import Committed, RetryLater
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow, SinkWriter
from onceflow.core.storage import FileStagingArea

_SAID = "column 'v' was .* when the rows were converted, and is "


@dataclass(frozen=True)
class Change:
    """A type of a column, and one of which the server makes other values without an error."""

    before: str
    after: str
    type: pa.DataType
    value: Any


_NUMBER, _MOMENT = 2**53 + 1, datetime(2024, 3, 31, 1, 59, 59, 999_999)
_OF_MYSQL = {
    "number": Change("bigint", "double", pa.int64(), _NUMBER),
    "moment": Change("datetime(6)", "datetime", pa.timestamp("us"), _MOMENT),
}
_CHANGES = {
    "postgres": {
        "number": Change("bigint", "double precision", pa.int64(), _NUMBER),
        "moment": Change("timestamp(6)", "timestamp(0)", pa.timestamp("us"), _MOMENT),
    },
    "mysql": _OF_MYSQL,
    "mariadb": _OF_MYSQL,
}


@pytest.fixture(params=["number", "moment"])
def change(request: pytest.FixtureRequest, database: Database) -> Change:
    return _CHANGES[database.name][request.param]


@pytest.fixture(params=["insert", "upsert"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options by which rows are written."""
    by_key = {"write_mode": "upsert", "primary_key": ("id",)}
    return by_key if request.param == "upsert" else {}


def _schema(change: Change) -> pa.Schema:
    return pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", change.type)])


def _row(number: int, change: Change) -> pa.RecordBatch:
    values = [pa.array([number]), pa.array([change.value], change.type)]
    return pa.RecordBatch.from_arrays(values, schema=_schema(change))


def _create(database: Database, change: Change) -> None:
    database.query(f"CREATE TABLE altered (id bigint PRIMARY KEY, v {change.before})")


def _write_and_commit(job: SqlJob, writer: SinkWriter, number: int, change: Change) -> None:
    """Write a row with the id `number` and commit it as the checkpoint of that number."""
    writer.write(_row(number, change))
    (committable,) = writer.pre_commit(CheckpointId(number))
    assert job.committer().commit(committable) == Committed()


def test_a_column_that_gets_another_type_between_checkpoints_alters_no_value(
    database: Database, change: Change, options: dict[str, Any]
) -> None:
    _create(database, change)
    sink = database.sink(table="altered", commit_mode="two_phase", **options)
    with SqlJob(sink, schema=_schema(change)) as job:
        writer = job.check().writer()
        _write_and_commit(job, writer, 1, change)
        database.retype("v", change.after, "altered")
        writer.write(_row(2, change))
        with pytest.raises(PreCommitFailed, match=_SAID):
            writer.pre_commit(CheckpointId(2))
        assert database.prepared() == []
        database.retype("v", change.before, "altered")
        _write_and_commit(job, job.writer(first_checkpoint=2), 2, change)
    assert database.query("SELECT v FROM altered WHERE id = 2") == [(change.value,)]


def test_staged_rows_wait_until_a_column_has_its_type_again(
    database: Database, change: Change, options: dict[str, Any], staging: FileStagingArea
) -> None:
    _create(database, change)
    sink = database.sink(table="altered", commit_mode="ledger", **options)
    with SqlJob(sink, schema=_schema(change), staging=staging) as job:
        writer, committer = job.check().writer(), job.committer()
        for number in (1, 2):
            writer.write(_row(number, change))
            (committable,) = writer.pre_commit(CheckpointId(number))
            if number == 1:
                assert committer.commit(committable) == Committed()
        database.retype("v", change.after, "altered")
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "when the rows were converted, and is" in outcome.reason
        # The next try has looked at the table, and says what a person has to change.
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert outcome.until_fixed
        database.retype("v", change.before, "altered")
        assert committer.commit(committable) == Committed()
    assert database.query("SELECT v FROM altered WHERE id = 2") == [(change.value,)]


@pytest.mark.parametrize("kind", [MySQL, MariaDB], indirect=True)
@pytest.mark.parametrize("options", ["insert", "upsert"], indirect=True)
def test_a_column_without_a_default_that_is_added_under_a_job_is_not_filled_by_the_server(
    database: Database, options: dict[str, Any]
) -> None:
    """MySQL's LOAD DATA puts 0 into it and says nothing; other statements are refused."""
    change = _CHANGES[database.name]["number"]
    _create(database, change)
    sink = database.sink(table="altered", commit_mode="two_phase", **options)
    with SqlJob(sink, schema=_schema(change)) as job:
        writer = job.check().writer()
        _write_and_commit(job, writer, 1, change)
        database.query("ALTER TABLE altered ADD known int NULL, ADD needed int NOT NULL")
        writer.write(_row(2, change))
        refused = "its new column 'needed' is NOT NULL without a|'needed' doesn't have a default"
        with pytest.raises(OnceflowError, match=refused):
            writer.pre_commit(CheckpointId(2))
        database.query("ALTER TABLE altered MODIFY needed int NOT NULL DEFAULT 7")
        _write_and_commit(job, job.writer(first_checkpoint=2), 2, change)
    assert database.query("SELECT needed FROM altered WHERE id = 2") == [(7,)]


def test_a_table_that_is_replaced_by_a_view_gets_no_row(database: Database) -> None:
    """Rows that the view does not show would go into another table, and nobody would be told."""
    change = _CHANGES[database.name]["number"]
    _create(database, change)
    upsert = {"write_mode": "upsert", "primary_key": ("id",)}
    sink = database.sink(table="altered", commit_mode="two_phase", **upsert)
    with SqlJob(sink, schema=_schema(change)) as job:
        writer = job.check().writer()
        _write_and_commit(job, writer, 1, change)
        database.query("ALTER TABLE altered RENAME TO moved")
        database.query("CREATE VIEW altered AS SELECT * FROM moved WHERE id < 2")
        writer.write(_row(2, change))
        with pytest.raises(PreCommitFailed, match="has changed since the rows were converted"):
            writer.pre_commit(CheckpointId(2))
    assert database.ids_in("moved") == [1]


_KEYED = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("v", pa.string())])
_CASELESS = "utf8mb4_general_ci"
_KEY_CHANGES = {
    "dropped": ("DROP PRIMARY KEY", ("a", "2"), [("a", "1")]),
    "widened": ("DROP PRIMARY KEY, ADD PRIMARY KEY (id, v)", ("a", "2"), [("a", "1")]),
    "added": ("ADD UNIQUE by_v (v)", ("b", "1"), [("a", "1")]),
    "caseless": (f"MODIFY id varchar(9) COLLATE {_CASELESS}", ("A", "2"), [("a", "1")]),
}
"""Each alteration, a row whose change then meets another row or none, and what must be left."""


def _keyed_row(key: str, value: str) -> pa.RecordBatch:
    return pa.record_batch([[key], [value]], schema=_KEYED)


@pytest.fixture(params=sorted(_KEY_CHANGES))
def key_change(request: pytest.FixtureRequest) -> tuple[str, tuple[str, str], list[Any]]:
    return _KEY_CHANGES[request.param]


@pytest.mark.parametrize("kind", [MySQL, MariaDB], indirect=True)
def test_a_key_that_is_altered_between_checkpoints_changes_no_other_row(
    database: Database, key_change: tuple[str, tuple[str, str], list[Any]]
) -> None:
    """ON DUPLICATE KEY goes by each unique index, and adds a row where there is none."""
    alteration, row, left = key_change
    database.query(_CREATE_KEYED)
    with SqlJob(_keyed_sink(database, "two_phase"), schema=_KEYED) as job:
        writer = job.check().writer()
        writer.write(_keyed_row("a", "1"))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
        database.query(f"ALTER TABLE altered {alteration}")
        writer.write(_keyed_row(*row))
        with pytest.raises(PreCommitFailed, match="was altered: "):
            writer.pre_commit(CheckpointId(2))
    assert database.query("SELECT id, v FROM altered") == left


@pytest.mark.parametrize("kind", [MySQL, MariaDB], indirect=True)
def test_staged_rows_wait_while_their_key_is_altered(
    database: Database,
    key_change: tuple[str, tuple[str, str], list[Any]],
    staging: FileStagingArea,
) -> None:
    alteration, row, left = key_change
    database.query(_CREATE_KEYED)
    sink = _keyed_sink(database, "ledger")
    with SqlJob(sink, schema=_KEYED, staging=staging) as job:
        writer, committer = job.check().writer(), job.committer()
        writer.write(_keyed_row("a", "1"))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert committer.commit(committable) == Committed()
        writer.write(_keyed_row(*row))
        (committable,) = writer.pre_commit(CheckpointId(2))
        database.query(f"ALTER TABLE altered {alteration}")
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert "was altered: " in outcome.reason
        # The next try has looked at the table, and says what a person has to change.
        outcome = committer.commit(committable)
        assert isinstance(outcome, RetryLater)
        assert outcome.until_fixed
        assert database.query("SELECT id, v FROM altered") == left
        database.query("DROP TABLE altered", _CREATE_KEYED)
        assert committer.commit(committable) == Committed()
    assert database.query("SELECT id, v FROM altered") == [row]


_CREATE_KEYED = (
    "CREATE TABLE altered (id varchar(9) COLLATE utf8mb4_bin PRIMARY KEY,"
    " v varchar(9) COLLATE utf8mb4_bin) CHARACTER SET utf8mb4"
)


def _keyed_sink(database: Database, mode: str) -> Any:
    key = {"write_mode": "upsert", "primary_key": ("id",)}
    return database.sink(table="altered", commit_mode=mode, **key)


@pytest.mark.parametrize("kind", [Postgres], indirect=True)
def test_a_key_that_gets_another_collation_between_checkpoints_changes_no_other_row(
    database: Database,
) -> None:
    database.query("CREATE TABLE altered (id text PRIMARY KEY, v text)")
    # Not every build has ICU, by which CREATE COLLATION makes such collations.
    database.query(
        'CREATE COLLATION caseless FROM "C"',
        "UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'caseless'",
    )
    with SqlJob(_keyed_sink(database, "two_phase"), schema=_KEYED) as job:
        writer = job.check().writer()
        writer.write(_keyed_row("a", "1"))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
        database.query("ALTER TABLE altered ALTER id TYPE text COLLATE caseless")
        writer.write(_keyed_row("A", "2"))
        with pytest.raises(PreCommitFailed, match="was altered: key column 'id' compares text"):
            writer.pre_commit(CheckpointId(2))


@pytest.mark.parametrize("policy", [OnBadRow.DROP, OnBadRow.FAIL])
def test_a_value_is_taken_once_its_column_was_widened_under_the_job(
    database: Database, mode: str, policy: OnBadRow, staging: FileStagingArea
) -> None:
    """The error that left such rows out said so: widen the column."""
    database.query("CREATE TABLE altered (id varchar(9) NOT NULL, v varchar(3))")
    sink = database.sink(table="altered", commit_mode=mode)
    with SqlJob(sink, schema=_KEYED, staging=staging, on_bad_row=policy) as job:
        writer = job.check().writer()
        if policy is OnBadRow.DROP:
            writer.write(_keyed_row("a", "longer"))
            assert writer.pre_commit(CheckpointId(1)) == ()
            (rejected,) = writer.take_rejected()
            assert "Widen the column" in rejected.reasons[0]
        database.retype("v", "varchar(9)", "altered")
        with pytest.raises(OnceflowError, match="was altered: column 'v', for which rows") as told:
            writer.write(_keyed_row("b", "longer"))
            writer.pre_commit(CheckpointId(2))
        assert not isinstance(told.value, BadRow)
        committable = job.prepare(2, _keyed_row("b", "longer"))
        assert job.committer().commit(committable) == Committed()
    assert database.query("SELECT id, v FROM altered") == [("b", "longer")]


def test_a_null_is_taken_once_its_column_allows_it_under_the_job(
    database: Database, mode: str, staging: FileStagingArea
) -> None:
    database.query("CREATE TABLE altered (id varchar(9) NOT NULL, v varchar(3) NOT NULL)")
    sink = database.sink(table="altered", commit_mode=mode)
    row = pa.record_batch([["b"], pa.array([None], pa.string())], schema=_KEYED)
    with SqlJob(sink, schema=_KEYED, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        writer.write(row)
        assert writer.pre_commit(CheckpointId(1)) == ()
        assert [len(one.reasons) for one in writer.take_rejected()] == [1]
        database.query(
            "ALTER TABLE altered ALTER v DROP NOT NULL"
            if isinstance(database, Postgres)
            else "ALTER TABLE altered MODIFY v varchar(3) NULL"
        )
        writer.write(row)
        with pytest.raises(PreCommitFailed, match="was altered: column 'v', for which rows"):
            writer.pre_commit(CheckpointId(2))
        assert job.committer().commit(job.prepare(2, row)) == Committed()
    assert database.query("SELECT id, v FROM altered") == [("b", None)]
