"""Tests the sinks of all lake formats: one commit for each checkpoint, whatever happens."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from tests.integration.lake_sink_kit import SCHEMA, DeltaJob, IcebergJob, MakeLakeJob, one
from tests.support.lake_faults import CommitFaults, FaultyDeltaTable

from onceflow.core.errors import BadRow, ConfigError, Fenced
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow


@pytest.fixture(params=[IcebergJob, DeltaJob], ids=["iceberg", "delta"])
def make_job(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeLakeJob:
    monkeypatch.setattr(deltalake, "DeltaTable", FaultyDeltaTable)
    return partial(request.param, tmp_path)


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("refused", committables.Committed()),
        ("unanswered", committables.Unknown),
        ("made, not answered", committables.AlreadyCommitted()),
        ("made, called failed", committables.AlreadyCommitted()),
    ],
)
def test_commit_whose_reply_is_lost_or_wrong_is_made_once(
    fault: str, answer: object, make_job: MakeLakeJob
) -> None:
    job = make_job().open()
    prepared = job.prepare(1, one(1))
    CommitFaults.fault = fault
    outcome = job.commit(1, prepared)
    assert CommitFaults.fault == ""
    assert outcome == answer or type(outcome) is answer, outcome
    assert job.commit(1, prepared) == (
        committables.Committed()
        if isinstance(outcome, committables.Unknown)
        else committables.AlreadyCommitted()
    )
    assert job.ids() == [1]
    with job.committer() as committer:
        assert committer.in_doubt() == []


def test_commit_that_another_writer_overtakes_is_made_on_top_of_that_one(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    prepared = job.prepare(1, one(1))
    CommitFaults.between.append(lambda: job.append(one(7)))
    assert job.commit(1, prepared) == committables.Committed()
    assert job.ids() == [1, 7]


@pytest.mark.parametrize("older_first", [False, True])
def test_two_drivers_that_commit_one_checkpoint_make_one_version(
    older_first: bool, make_job: MakeLakeJob
) -> None:
    """The one that comes second finds the other's record, also between its look and its commit."""
    job = make_job().open()
    prepared = job.prepare(1, one(1))
    job.open(attempt=2)
    inner, outer = (1, 2) if older_first else (2, 1)
    outcomes: list[object] = []
    CommitFaults.between.append(lambda: outcomes.append(job.commit(1, prepared, attempt=inner)))
    outcomes.append(job.commit(1, prepared, attempt=outer))
    assert outcomes == [committables.Committed(), committables.AlreadyCommitted()]
    assert job.ids() == [1]


def test_commits_that_a_driver_gathered_leave_out_what_another_one_has_committed(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    first, second = job.prepare(1, one(1)), job.prepare(2, one(2))
    assert job.commit(1, first) == committables.Committed()
    assert job.commit(2, first, second) == committables.Committed()
    assert job.ids() == [1, 2]


def test_an_older_attempt_and_another_job_are_refused_by_name(make_job: MakeLakeJob) -> None:
    job = make_job().open(attempt=2)
    with pytest.raises(Fenced, match="attempt 2 of the same job has claimed it"):
        job.open(attempt=2)
    with pytest.raises(ConfigError, match="belongs to decision log 'log-1'"):
        job.open(attempt=3, log_id="log-2")


def test_claims_tell_what_was_committed_before_each_attempt(make_job: MakeLakeJob) -> None:
    job = make_job().open()
    assert job.commit(4, job.prepare(4, one(1))) == committables.Committed()
    job.open(attempt=2)
    record = job.sink.target_record(job.context(2))
    assert (record.attempt, record.through) == (2, 4)
    assert [(claim.attempt, claim.checkpoint) for claim in record.claims] == [(1, 0), (2, 4)]


def test_history_of_the_job_that_others_expire_is_no_loss(make_job: MakeLakeJob) -> None:
    """Also where it held the only version of the checkpoint, and where an outcome is in doubt."""
    job = make_job().open()
    committed = job.prepare(1, one(1))
    CommitFaults.fault = "made, not answered"
    assert job.commit(1, committed) == committables.AlreadyCommitted()
    job.append(one(7))
    job.expire()
    assert job.commit(1, committed) == committables.AlreadyCommitted()
    job.open(attempt=2)
    assert job.sink.target_record(job.context(2)).through == 1
    prepared = job.prepare(2, one(2), attempt=2, first_checkpoint=2)
    assert job.commit(2, prepared, attempt=2) == committables.Committed()
    assert job.ids() == [1, 2, 7]


def test_a_table_that_was_dropped_and_created_anew_gets_no_rows_of_the_old_one(
    make_job: MakeLakeJob,
) -> None:
    job = make_job().open()
    prepared = job.prepare(1, one(1))
    job.drop()
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, committables.RetryLater), outcome
    assert job.missing in outcome.reason
    outcome = job.open(attempt=2).commit(1, prepared, attempt=2)
    assert isinstance(outcome, committables.Lost), outcome
    assert job.replaced in outcome.reason
    assert job.ids() == []


def test_data_files_that_somebody_deleted_are_lost_by_name(make_job: MakeLakeJob) -> None:
    job = make_job().open()
    prepared = job.prepare(1, one(1))
    (file,) = job.data_files()
    file.unlink()
    outcome = job.commit(1, prepared)
    assert isinstance(outcome, committables.Lost), outcome
    assert outcome.reason.endswith(f"{file.name} is gone")


def test_aborted_files_are_deleted_and_committed_ones_never(make_job: MakeLakeJob) -> None:
    job = make_job().open()
    aborted, committed = job.prepare(1, one(1)), job.prepare(1, one(2), subtask=1)
    assert job.commit(1, committed) == committables.Committed()
    # As after a crash between the commit and its last step.
    again = job.prepare(1, one(2), subtask=1)
    with job.committer() as committer:
        assert committer.abort(aborted) == committables.Aborted()
        assert committer.abort(again) == committables.Aborted()
        assert committer.abort(committed) == committables.AlreadyCommitted()
        assert committer.in_doubt() == []
    assert job.ids() == [2]
    assert len(job.data_files()) == 1


def test_descriptions_of_committed_files_are_forgotten_by_the_next_start(
    make_job: MakeLakeJob,
) -> None:
    """A driver died between its commit and its last step."""
    job = make_job().open()
    committed, later = job.prepare(1, one(1)), job.prepare(2, one(2))
    description = next(batch for _, batch in job.staging.read(committed.transaction) or ())
    assert job.commit(1, committed) == committables.Committed()
    staged = job.staging.open()
    staged.write(description)
    staged.seal(committed.transaction)
    with job.committer(attempt=2) as committer:
        assert [one.transaction for one in committer.in_doubt()] == [later.transaction]
    assert job.staging.transactions() == [later.transaction]
    assert job.ids() == [1]


def test_rows_that_the_table_can_never_take_fail_or_are_set_aside_by_name(
    make_job: MakeLakeJob,
) -> None:
    schema = pa.schema([("id", pa.int64()), ("price", pa.decimal128(20, 3))])
    table = pa.schema([pa.field("id", pa.int64(), nullable=False), ("price", pa.decimal128(6, 2))])
    make_job(schema=table).open()
    job = make_job(schema=schema).open(attempt=2)
    rows: list[dict[str, Any]] = [
        {"id": 1, "price": Decimal("1.500")},
        {"id": None, "price": Decimal(1)},
        {"id": 3, "price": Decimal("99999.000")},
        {"id": 4, "price": Decimal("0.001")},
    ]
    with pytest.raises(
        BadRow, match="column 'id' is required in the table, and the row has a null"
    ):
        job.prepare(1, rows)
    with pytest.raises(BadRow, match=r"column 'price' is decimal128\(6, 2\).*99999.000'\) is not"):
        job.prepare(1, rows[2:])
    writer = job.writer(on_bad_row=OnBadRow.DROP)
    writer.write(job.batch(rows))
    (committable,) = writer.pre_commit(CheckpointId(1))
    rejected = writer.take_rejected()
    writer.close()
    assert committable.rows == 1
    assert sum(len(some.reasons) for some in rejected) == 3
    assert job.commit(1, committable) == committables.Committed()
    assert job.rows() == [{"id": 1, "price": Decimal("1.50")}]


def test_rows_without_columns_are_refused_at_start(make_job: MakeLakeJob) -> None:
    job = make_job(pa.schema([]))
    with pytest.raises(ConfigError, match="the rows have no columns, so there is nothing to write"):
        job.open()
    assert job.data_files() == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([("id", pa.int64()), ("v", pa.string()), ("w", pa.int32())], "has no column 'w'.*evolve"),
        ([("v", pa.string())], "requires column 'id'"),
        (
            [("id", pa.string()), ("v", pa.string())],
            "column 'id': the table has (long|int64), but",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused_at_start(
    columns: list[Any], message: str, make_job: MakeLakeJob
) -> None:
    job = make_job().open()
    with pytest.raises(ConfigError, match=message):
        job.sink.validate(job.context(), pa.schema(columns))


def test_a_table_evolves_by_new_columns(make_job: MakeLakeJob) -> None:
    job = make_job().open()
    assert job.commit(1, job.prepare(1, one(1))) == committables.Committed()
    new = pa.schema([*SCHEMA, pa.field("w", pa.float64())])
    job = make_job(schema=new, evolve=True).open(attempt=2)
    prepared = job.prepare(2, [{"id": 2, "v": None, "w": 0.5}], attempt=2, first_checkpoint=2)
    assert job.commit(2, prepared, attempt=2) == committables.Committed()
    assert job.rows() == [{"id": 1, "v": "v1", "w": None}, {"id": 2, "v": None, "w": 0.5}]
