"""Rows that the table can never take are left out and handed back; all others arrive once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, prepared, query
from tests.integration.sink_kit import SCHEMA, rows

from onceflow.core.errors import BadRow, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow, RejectedRows, SinkWriter
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import PostgresSink

LENIENT = [OnBadRow.DROP, OnBadRow.DEAD_LETTER]


def _job(url: str, policy: OnBadRow = OnBadRow.DEAD_LETTER, **settings: Any) -> Job:
    sink = PostgresSink(url, table="ledger", create=True, commit_mode="two_phase", **settings)
    return Job(sink, on_bad_row=policy).check()


def _written(job: Job, batches: Sequence[pa.RecordBatch]) -> tuple[list[int], list[str]]:
    """Write and commit `batches`; return the ids rejected and why."""
    writer = job.writer()
    rejected: list[RejectedRows] = []
    for batch in batches:
        writer.write(batch)
        rejected += writer.rejected()
    committable = writer.pre_commit(CheckpointId(1))
    rejected += writer.rejected()
    if committable is not None:
        assert job.committer().commit(committable) == Committed()
        assert committable.rows == len(ids_in(job.sink.url))
    assert list(writer.rejected()) == [], "each is handed back once"
    found: list[tuple[int, str]] = []
    for one in rejected:
        assert one.rows.schema.equals(SCHEMA)
        found += zip(one.rows.column("id").to_pylist(), one.reasons, strict=True)
    found.sort()
    return [number for number, _ in found], [reason for _, reason in found]


@pytest.mark.parametrize("policy", LENIENT)
@pytest.mark.parametrize("by_key", [False, True])
def test_rows_that_the_server_refuses_are_left_out_one_by_one(
    postgres_database: str, policy: OnBadRow, by_key: bool
) -> None:
    settings: dict[str, Any] = {"primary_key": ("id",), "write_mode": "upsert"} if by_key else {}
    with _job(postgres_database, policy, **settings) as job:
        query(postgres_database, "ALTER TABLE ledger ADD CONSTRAINT round CHECK (id % 100 <> 7)")
        ids, reasons = _written(job, [rows(range(start, start + 500)) for start in (0, 500, 1000)])
    expected = [number for number in range(1500) if number % 100 == 7]
    assert ids == expected
    assert all("constraint round" in reason for reason in reasons)
    assert ids_in(postgres_database) == sorted(set(range(1500)) - set(expected))
    assert prepared(postgres_database) == []


_PARENT = (
    "CREATE TABLE parent (id bigint PRIMARY KEY); "
    "INSERT INTO parent SELECT generate_series(0, 9) EXCEPT SELECT 3; "
    "ALTER TABLE ledger ADD FOREIGN KEY (id) REFERENCES parent"
)
_TRIGGER = (
    "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "IF NEW.id = 3 THEN RAISE EXCEPTION 'three is not liked'; END IF; RETURN NEW; END $$; "
    "CREATE TRIGGER stop BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION stop()"
)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("ALTER TABLE ledger ADD CHECK (id <> 3)", "ledger_id_check"),
        ("ALTER TABLE ledger ADD UNIQUE (account)", "ledger_account_key"),
        (_PARENT, "ledger_id_fkey"),
        (_TRIGGER, "three is not liked"),
        ("ALTER TABLE ledger ADD CHECK (1 / (id - 3) < 5)", "division by zero"),
    ],
    ids=["check", "unique", "foreign key", "trigger", "expression"],
)
def test_every_kind_of_refusal_is_a_rejected_row(
    postgres_database: str, statement: str, expected: str
) -> None:
    with _job(postgres_database) as job:
        query(postgres_database, statement)
        number = 7 if "UNIQUE" in statement else 3
        ids, reasons = _written(job, [rows([0, 1, 2, number, 4])])
    assert ids == [number]
    assert expected in reasons[0]
    assert ids_in(postgres_database) == [0, 1, 2, 4]


def test_rows_that_do_not_fit_are_rejected_with_column_and_value(postgres_database: str) -> None:
    with _job(postgres_database) as job:
        query(postgres_database, "ALTER TABLE ledger ALTER amount TYPE smallint")
        query(postgres_database, "ALTER TABLE ledger ALTER account TYPE varchar(6)")
        long = pa.record_batch(
            [pa.array([9], pa.int64()), pa.array(["acct-12"]), pa.array([0], pa.int64())],
            schema=SCHEMA,
        )
        nul = pa.record_batch(
            [pa.array([8], pa.int64()), pa.array(["a\0"]), pa.array([0], pa.int64())], schema=SCHEMA
        )
        ids, reasons = _written(job, [rows([1, 4000, 2, 5000]), long, nul])
    assert ids == [8, 9, 4000, 5000]
    for reason, part in zip(reasons, ("NUL", "over 6 letters", "40000", "50000"), strict=True):
        assert part in reason
        assert "of its batch" not in reason
    assert ids_in(postgres_database) == [1, 2]


def test_checkpoint_of_bad_rows_alone_prepares_nothing(postgres_database: str) -> None:
    with _job(postgres_database) as job:
        query(postgres_database, "ALTER TABLE ledger ADD CHECK (id < 0)")
        ids, _ = _written(job, [rows([1, 2])])
        assert ids == [1, 2]
        assert prepared(postgres_database) == []
        writer = job.writer()
        writer.write(rows([-1]))
        committable = writer.pre_commit(CheckpointId(2))
        assert committable is not None
        assert committable.rows == 1


def test_rows_between_rejected_ones_survive_the_crash_that_follows(postgres_database: str) -> None:
    with _job(postgres_database) as job:
        query(postgres_database, "ALTER TABLE ledger ADD CHECK (id <> 2)")
        writer = job.writer()
        writer.write(rows([1, 2, 3]))
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        writer.close()
        job.check(2)
        assert job.committer(2).commit(committable) == Committed()
    assert ids_in(postgres_database) == [1, 3]


def test_bad_rows_that_fail_the_job_still_do(postgres_database: str) -> None:
    with _job(postgres_database, OnBadRow.FAIL, table_column="account") as job:
        query(postgres_database, 'CREATE TABLE "acct-1" (id bigint CHECK (id < 0), amount bigint)')
        writer = job.writer()
        with pytest.raises(BadRow, match=r"acct-1_id_check"):
            writer.write(rows([1]))
            writer.pre_commit(CheckpointId(1))
        with pytest.raises(SinkError, match="failed before"):
            writer.write(rows([2]))
    assert prepared(postgres_database) == []


def test_what_is_no_rows_fault_fails_the_writer_and_rejects_nothing(postgres_database: str) -> None:
    with _job(postgres_database) as job:
        writer = job.writer()
        query(postgres_database, "DROP TABLE ledger")
        writer.write(rows([1, 2]))
        with pytest.raises(PreCommitFailed, match="does not exist"):
            writer.pre_commit(CheckpointId(1))
        assert list(writer.rejected()) == []


def _nulls(writer: SinkWriter, job: Job) -> list[tuple[Any, ...]]:
    committable = writer.pre_commit(CheckpointId(1))
    assert committable is not None
    job.committer().commit(committable)
    return query(job.sink.url, "SELECT id, account, amount FROM ledger ORDER BY id")


@pytest.mark.parametrize("policy", list(OnBadRow))
def test_values_that_do_not_fit_become_null_where_the_user_says_so(
    postgres_database: str, policy: OnBadRow
) -> None:
    with _job(postgres_database, policy, overflow="null") as job:
        query(postgres_database, "ALTER TABLE ledger ALTER amount TYPE smallint")
        query(postgres_database, "ALTER TABLE ledger ALTER account TYPE varchar(6)")
        writer = job.writer()
        writer.write(rows([1, 4000]))
        writer.write(
            pa.record_batch(
                [pa.array([9], pa.int64()), pa.array(["acct-12"]), pa.array([5], pa.int64())],
                schema=SCHEMA,
            )
        )
        assert list(writer.rejected()) == []
        assert _nulls(writer, job) == [(1, "acct-1", 10), (9, None, 5), (4000, "acct-3", None)]


def test_value_for_a_column_that_takes_no_null_is_a_bad_row_all_the_same(
    postgres_database: str,
) -> None:
    with _job(postgres_database, overflow="null") as job:
        query(postgres_database, "ALTER TABLE ledger ALTER id TYPE smallint")
        ids, reasons = _written(job, [rows([1, 40_000])])
    assert ids == [40_000]
    assert "column 'id'" in reasons[0]


def test_row_with_an_unknown_operation_or_table_is_rejected(postgres_database: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("op", pa.string()), ("t", pa.string())])
    sink = PostgresSink(
        postgres_database, table="ledger", create=False, write_mode="upsert", primary_key=("id",),
        operation_column="op", table_column="t",
    )  # fmt: skip
    query(postgres_database, "CREATE TABLE ledger (id bigint PRIMARY KEY)")
    with Job(sink, schema=schema, on_bad_row=OnBadRow.DROP) as job:
        writer = job.check().writer()
        batch = pa.record_batch(
            [
                pa.array([1, 2, 3, None, 5], pa.int64()),
                pa.array(["c", "boom", "c", "c", "c"]),
                pa.array([None, None, "absent", None, "a.b.c"]),
            ],
            schema=schema,
        )
        writer.write(batch)
        rejected = [
            (number, reason)
            for one in writer.rejected()
            for number, reason in zip(one.rows.column("id").to_pylist(), one.reasons, strict=True)
        ]
        committable = writer.pre_commit(CheckpointId(1))
        assert committable is not None
        job.committer().commit(committable)
    by_id = dict(rejected)
    assert set(by_id) == {2, 3, 5, None}
    assert "'boom'" in by_id[2]
    assert "table absent does not exist" in by_id[3]
    assert "'a.b.c'" in by_id[5]
    assert "'id' is null" in by_id[None]
    assert ids_in(postgres_database) == [1]


def test_ledger_mode_rejects_what_does_not_fit_and_says_what_it_cannot_reject(
    postgres_database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = PostgresSink(postgres_database, table="ledger", create=True, commit_mode="ledger")
    staging = FileStagingArea.in_directory(str(tmp_path), "job.ledger")
    with Job(sink, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        job.check()
        query(postgres_database, "ALTER TABLE ledger ALTER amount TYPE smallint")
        ids, reasons = _written(job, [rows([1, 4000, 2])])
    assert ids == [4000]
    assert "40000" in reasons[0]
    assert "a row that the server refuses" in caplog.text
    assert ids_in(postgres_database) == [1, 2]
