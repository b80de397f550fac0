"""What a Postgres writer refuses: the row, table or name is named, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, prepared, query
from tests.integration.sink_kit import rows

from onceflow.core.errors import BadRow, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import PostgresSink


@pytest.fixture
def job(postgres_database: str) -> Iterator[Job]:
    with Job(PostgresSink(postgres_database, table="ledger", create=True)) as job:
        yield job.check()


@pytest.mark.parametrize("at", ["write", "pre_commit"])
def test_violated_constraint_names_itself_and_leaves_nothing(
    job: Job, postgres_database: str, at: str
) -> None:
    query(postgres_database, "ALTER TABLE ledger ADD CONSTRAINT positive CHECK (amount >= 0)")
    writer = job.writer()
    bad = pa.record_batch([[5], ["a"], [-1]], schema=job.schema)
    with pytest.raises(BadRow, match=r"constraint positive.*table|table ledger.*positive"):
        if at == "write":
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                writer.write(bad)
        else:
            writer.write(bad)
            writer.pre_commit(CheckpointId(1))
    assert ids_in(postgres_database) == []
    assert prepared(postgres_database) == []
    with pytest.raises(SinkError, match="failed before"):
        writer.write(rows([1]))
    with pytest.raises(PreCommitFailed, match="failed before"):
        writer.pre_commit(CheckpointId(2))


def test_duplicate_key_within_and_across_checkpoints_is_a_bad_row(
    postgres_database: str,
) -> None:
    sink = PostgresSink(postgres_database, table="keyed", create=True, primary_key=("id",))
    with Job(sink) as job:
        job.check()
        job.committer().commit(job.prepare(1, [1]))
        for ids in ([1], [2, 2]):
            writer = job.writer()
            writer.write(rows(ids))
            with pytest.raises(BadRow, match=r"keyed_pkey; Key \(id\)=\(\d\) already exists"):
                writer.pre_commit(CheckpointId(2))
    assert ids_in(postgres_database, "keyed") == [1]


def test_row_of_a_key_that_is_in_doubt_waits_no_longer_than_the_lock_timeout(
    postgres_database: str,
) -> None:
    sink = PostgresSink(
        postgres_database, table="keyed", create=True, primary_key=("id",), lock_timeout_s=0.3
    )
    with Job(sink) as job:
        job.check()
        job.prepare(1, [1])
        writer = job.writer()
        with pytest.raises(SinkError, match="lock timeout"):
            writer.write(rows([1]))
            writer.pre_commit(CheckpointId(2))


def test_table_dropped_under_a_writer_is_named(job: Job, postgres_database: str) -> None:
    writer = job.writer()
    query(postgres_database, "DROP TABLE ledger")
    with pytest.raises(SinkError, match=r'table ledger.*relation "public.ledger" does not exist'):
        writer.write(rows([1]))


def test_column_dropped_between_checkpoints_is_named(job: Job, postgres_database: str) -> None:
    writer = job.writer()
    writer.write(rows([1]))
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    job.committer().commit(committable)
    query(postgres_database, "ALTER TABLE ledger DROP COLUMN amount")
    with pytest.raises(SinkError, match='column "amount".*does not exist'):
        writer.write(rows([2]))
    assert ids_in(postgres_database) == [1]


def test_transaction_that_cannot_be_prepared_leaves_nothing_and_says_why(
    job: Job, postgres_database: str
) -> None:
    """A trigger that notifies makes PREPARE TRANSACTION fail."""
    query(
        postgres_database,
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_notify(''x'', ''y''); RETURN NEW; END'; "
        "CREATE TRIGGER tell BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION tell()",
    )
    writer = job.writer()
    writer.write(rows([1]))
    with pytest.raises(PreCommitFailed, match="NOTIFY"):
        writer.pre_commit(CheckpointId(1))
    assert prepared(postgres_database) == []
    assert ids_in(postgres_database) == []


def test_name_that_is_prepared_already_is_refused_at_once(job: Job, postgres_database: str) -> None:
    job.prepare(1, [1])
    writer = job.writer()
    writer.write(rows([2]))
    with pytest.raises(PreCommitFailed, match=r"job\.ledger/1/1/0/0 is prepared already"):
        writer.pre_commit(CheckpointId(1))
    assert prepared(postgres_database) == ["job.ledger/1/1/0/0"]


def test_name_that_was_committed_already_is_refused(job: Job, postgres_database: str) -> None:
    job.committer().commit(job.prepare(1, [1]))
    writer = job.writer()
    writer.write(rows([2]))
    with pytest.raises(PreCommitFailed, match=r"job\.ledger/1/1/0/0 was committed before"):
        writer.pre_commit(CheckpointId(1))
    assert ids_in(postgres_database) == [1]


def test_writer_of_an_older_attempt_prepares_nothing_more(job: Job, postgres_database: str) -> None:
    """The new attempt ends its session; had it not, the ledger row would have been refused."""
    idle, busy = job.writer(attempt=1, subtask=0), job.writer(attempt=1, subtask=1)
    busy.write(rows([1]))
    job.check(attempt=2)
    with pytest.raises(SinkError):
        for _ in range(1000):
            busy.write(rows(range(1000)))
    # An idle one finds its session gone, opens another, and is stopped by the fence.
    idle.write(rows([2]))
    with pytest.raises(Fenced, match="attempt 2"):
        idle.pre_commit(CheckpointId(1))
    assert prepared(postgres_database) == []
    assert ids_in(postgres_database) == []


def test_writer_whose_sink_was_never_checked_prepares_nothing(
    job: Job, postgres_database: str
) -> None:
    query(postgres_database, "DELETE FROM onceflow.onceflow_sinks")
    writer = job.writer()
    writer.write(rows([1]))
    with pytest.raises(PreCommitFailed, match="not in .*onceflow_sinks"):
        writer.pre_commit(CheckpointId(1))
    assert prepared(postgres_database) == []
