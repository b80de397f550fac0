"""Sinks of users whose rows wait in checkpoint storage write each row once, whatever fails.

The target is a dict in memory, with a proof of each transaction and a floor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pytest
from typing_extensions import override

from onceflow import connectors
from onceflow.core.errors import PreCommitFailed, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import CommitterContext, OnBadRow, SinkWriter, WriterContext
from onceflow.core.storage import FileStagingArea
from onceflow.core.storage.memory_storage import MemoryFiles
from onceflow.sinks.base.staged import StagedCommitter

SINK_ID = "job.rows"
SCHEMA = pa.schema([("id", pa.int64())])


@dataclass(frozen=True)
class Store(connectors.StagedSink):
    """A target in memory. Each of `failures` is raised by one call: before its work, or after."""

    applied: dict[TransactionId, list[int]] = field(default_factory=dict[TransactionId, list[int]])
    floor: list[int] = field(default_factory=lambda: [0])
    failures: list[str] = field(default_factory=list[str])
    written: list[int] = field(default_factory=list[int])

    @override
    def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        self._fail("before")
        if transaction in self.applied or transaction.checkpoint < self.floor[0]:
            return False
        ids = [number for batch in rows for number in batch.column("id").to_pylist()]
        self.applied[transaction] = ids
        self.written.extend(ids)
        self._fail("after")
        return True

    @override
    def is_applied(self, transaction: TransactionId) -> bool:
        self._fail("asked")
        return transaction in self.applied

    @override
    def forget(self, sink_id: str, before: CheckpointId) -> None:
        self._fail("forget")
        self.floor[0] = max(self.floor[0], before)
        for transaction in [known for known in self.applied if known.checkpoint < before]:
            del self.applied[transaction]

    @override
    def refusals(self, rows: pa.RecordBatch) -> Mapping[int, str]:
        ids = rows.column("id").to_pylist()
        return {row: "is negative" for row, number in enumerate(ids) if number < 0}

    def _fail(self, call: str) -> None:
        if self.failures and self.failures[0] == call:
            self.failures.pop(0)
            raise connectors.SinkError(f"no answer {call}")


class Job:
    """The sink, its staging area, and its committer."""

    def __init__(self) -> None:
        self.sink = Store()
        self.area = FileStagingArea(MemoryFiles(), "staged", SINK_ID)
        context = CommitterContext("job", "rows", SINK_ID, AttemptId(1), "log", self.area)
        committer = self.sink.committer(context)
        assert isinstance(committer, StagedCommitter)
        self.committer = committer

    def writer(self, on_bad_row: OnBadRow = OnBadRow.FAIL) -> SinkWriter:
        return self.sink.writer(
            WriterContext(
                job="job",
                uid="rows",
                sink_id=SINK_ID,
                subtask=0,
                parallelism=1,
                attempt=AttemptId(1),
                first_checkpoint=CheckpointId(1),
                schema=SCHEMA,
                staging=self.area,
                on_bad_row=on_bad_row,
            )
        )

    def stage(self, checkpoint: int) -> Committable:
        writer = self.writer()
        writer.write(pa.record_batch({"id": [checkpoint]}, schema=SCHEMA))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable

    @property
    def staged(self) -> list[int]:
        return [transaction.checkpoint for transaction in self.area.transactions()]


@pytest.fixture
def job() -> Job:
    return Job()


def refuse(self: MemoryFiles, path: str) -> None:
    raise StorageError("storage does nothing now")


def test_staged_rows_are_applied_once_and_discarded(job: Job) -> None:
    first = job.stage(1)
    assert job.committer.commit(first) == Committed()
    assert job.staged == []
    assert job.committer.commit(first) == AlreadyCommitted()
    # A process that died between both steps has left the rows.
    assert job.committer.commit(job.stage(1)) == AlreadyCommitted()
    assert job.staged == []
    assert job.sink.written == [1]


@pytest.mark.parametrize(("fails", "then"), [("before", Committed()), ("after", None)])
def test_a_target_that_does_not_answer_is_asked_again_and_has_each_row_once(
    job: Job, fails: str, then: Committed | None
) -> None:
    committable = job.stage(1)
    job.sink.failures.append(fails)
    outcome = job.committer.commit(committable)
    assert isinstance(outcome, RetryLater)
    assert not outcome.until_fixed
    assert job.staged == [1]
    assert job.committer.commit(committable) == (then or AlreadyCommitted())
    assert job.sink.written == [1]
    assert job.staged == []


def test_rows_that_are_gone_are_lost_unless_the_target_proves_or_has_forgotten_them(
    job: Job,
) -> None:
    first, second, third = (job.stage(checkpoint) for checkpoint in (1, 2, 3))
    for committable in (first, second, third):
        job.area.discard(committable.transaction)
    assert isinstance(job.committer.commit(second), Lost)
    job.sink.applied[second.transaction] = [2]
    assert job.committer.commit(second) == AlreadyCommitted()
    job.sink.floor[0] = 2
    assert job.committer.commit(first) == AlreadyCommitted()
    assert isinstance(job.committer.commit(third), Lost)
    assert job.sink.written == []


def test_rows_below_the_floor_that_are_staged_are_left_to_a_person_and_never_written(
    job: Job,
) -> None:
    committable = job.stage(1)
    job.sink.floor[0] = 2
    outcome = job.committer.commit(committable)
    assert isinstance(outcome, RetryLater)
    assert "'Storage that is behind its target'" in outcome.reason
    assert job.staged == [1]
    assert job.sink.written == []


def test_rows_that_another_committer_applies_and_discards_meanwhile_are_committed(
    job: Job,
) -> None:
    committable = job.stage(1)

    class Overtaken(Store):
        @override
        def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
            assert job.committer.commit(committable) == Committed()
            list(rows)
            raise AssertionError("the rows are gone")

        @override
        def is_applied(self, transaction: TransactionId) -> bool:
            return job.sink.is_applied(transaction)

    context = CommitterContext("job", "rows", SINK_ID, AttemptId(1), "log", job.area)
    assert Overtaken().committer(context).commit(committable) == AlreadyCommitted()
    assert job.sink.written == [1]


def test_an_unanswered_question_for_the_proof_decides_nothing(job: Job) -> None:
    committable = job.stage(1)
    job.area.discard(committable.transaction)
    job.sink.failures.append("asked")
    assert isinstance(job.committer.commit(committable), RetryLater)
    committable = job.stage(2)
    job.sink.failures.append("asked")
    assert isinstance(job.committer.abort(committable), RetryLater)
    assert job.staged == [2]


def test_rows_that_storage_cannot_read_now_are_committed_later(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    committable = job.stage(1)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFiles, "read_chunks", refuse)
        assert isinstance(job.committer.commit(committable), RetryLater)
    assert job.committer.commit(committable) == Committed()
    assert job.sink.written == [1]


def test_rows_that_a_target_stops_reading_are_closed_with_their_file(job: Job) -> None:
    taken: list[Iterator[pa.RecordBatch]] = []

    class Stopping(Store):
        @override
        def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
            next(rows)
            taken.append(rows)
            raise connectors.SinkError("full")

    context = CommitterContext("job", "rows", SINK_ID, AttemptId(1), "log", job.area)
    writer = job.writer()
    for number in (1, 2):
        writer.write(pa.record_batch({"id": [number]}, schema=SCHEMA))
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert isinstance(Stopping().committer(context).commit(committable), RetryLater)
    assert next(taken[0], None) is None, "the second batch is read after the commit"


def test_an_abort_discards_rows_and_says_if_they_are_committed(job: Job) -> None:
    first, second = job.stage(1), job.stage(2)
    job.committer.commit(first)
    first = job.stage(1)
    assert job.committer.abort(first) == AlreadyCommitted()
    assert job.committer.abort(second) == Aborted()
    assert job.staged == []
    assert isinstance(job.committer.commit(second), Lost)
    assert job.sink.written == [1]


def test_applied_rows_that_could_not_be_discarded_are_not_in_doubt_and_pruned_before_their_proof(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = job.stage(1), job.stage(2)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFiles, "delete", refuse)
        assert job.committer.commit(first) == Committed()
        assert job.committer.commit(first) == AlreadyCommitted()
        job.committer.prune(CheckpointId(2))
        assert first.transaction in job.sink.applied, "the proof outlives the rows"
    assert job.staged == [1, 2]
    in_doubt = [one.transaction for one in job.committer.in_doubt()]
    assert in_doubt == [second.transaction]
    job.committer.prune(CheckpointId(2))
    assert job.staged == [2]
    assert job.sink.applied == {}
    assert job.sink.floor == [2]


def test_the_floor_stays_below_rows_that_are_not_applied(job: Job) -> None:
    second, third = job.stage(2), job.stage(3)
    job.committer.prune(CheckpointId(4))
    assert job.sink.floor == [2]
    assert job.staged == [2, 3]
    assert job.committer.commit(second) == Committed()
    assert job.committer.commit(third) == Committed()
    job.committer.prune(CheckpointId(3))
    assert list(job.sink.applied) == [third.transaction]
    job.sink.failures.append("forget")
    job.committer.prune(CheckpointId(4))
    job.committer.prune(CheckpointId(4))
    assert job.sink.applied == {}


def test_later_rows_of_an_older_attempt_hide_no_rows_from_pruning(job: Job) -> None:
    """The area lists the transactions of one attempt after the other."""
    job.stage(5)
    for checkpoint in (2, 3):
        staged = job.area.open()
        staged.write(pa.record_batch({"id": [checkpoint]}, schema=SCHEMA))
        staged.seal(TransactionId(SINK_ID, 2, checkpoint, 0))
    job.sink.applied[TransactionId(SINK_ID, 2, 2, 0)] = [2]
    job.committer.prune(CheckpointId(4))
    assert job.staged == [5, 3]
    assert job.sink.floor == [3]


def test_rows_that_the_target_would_refuse_are_not_staged(job: Job) -> None:
    writer = job.writer(OnBadRow.DROP)
    writer.write(pa.record_batch({"id": [1, -1, 2]}, schema=SCHEMA))
    writer.write(pa.record_batch({"id": [-2]}, schema=SCHEMA))
    (committable,) = writer.pre_commit(CheckpointId(1))
    assert committable.rows == 2
    rejected = [row for part in writer.take_rejected() for row in part.rows.to_pylist()]
    assert rejected == [{"id": -1}, {"id": -2}]
    job.committer.commit(committable)
    assert job.sink.written == [1, 2]
    assert writer.pre_commit(CheckpointId(2)) == ()


def test_rows_that_storage_does_not_take_fail_the_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = job.writer()
    writer.write(pa.record_batch({"id": [1]}, schema=SCHEMA))

    def fail(self: MemoryFiles, path: str, chunks: object) -> int:
        raise StorageError("full")

    monkeypatch.setattr(MemoryFiles, "write", fail)
    with pytest.raises(PreCommitFailed, match="checkpoint 1 is not staged: full"):
        writer.pre_commit(CheckpointId(1))
    assert job.staged == []
