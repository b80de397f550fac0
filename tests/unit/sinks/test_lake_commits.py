"""A checkpoint is in a lake table once, whichever commit came first and whatever was not answered.

The table is a list of versions in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import pyarrow as pa
import pytest
from typing_extensions import override

from onceflow.core.errors import SinkError, StorageError, TargetRefused
from onceflow.core.protocol.committables import (
    Aborted,
    AlreadyCommitted,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.core.storage import FileStagingArea
from onceflow.core.storage.memory_storage import MemoryFiles
from onceflow.sinks.lake.committer import (
    CONFLICTS_MAX,
    LakeChangeCommitter,
    LakeCommitter,
    claim_table,
)
from onceflow.sinks.lake.table import (
    DELETES,
    ChangesLabel,
    CommitConflict,
    CommitUnknown,
    LakeTable,
    RowChanges,
    SinkRecord,
    TableVersion,
)

SINK_ID = "job.rows"
TABLE_ID = "the table"


@dataclass
class Facts:
    """The newest version of the table, and what happens to the next commits."""

    record: SinkRecord | None = None
    files: list[str] = field(default_factory=list[str])
    rows: dict[int, str] = field(default_factory=dict[int, str])
    committed: list[TransactionId] = field(default_factory=list[TransactionId])
    deleted: list[str] = field(default_factory=list[str])
    loss: str = ""
    damage: str = ""
    refusal: str = ""
    before: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    """Functions of which each commit first calls the next one."""
    after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class Version(TableVersion):
    """A version, which is the newest one until a commit raises CommitConflict."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._record, self._files = facts.record, tuple(facts.files)

    @property
    @override
    def record(self) -> SinkRecord | None:
        return self._record

    @property
    @override
    def damage(self) -> str:
        return self._facts.damage

    @property
    @override
    def refusal(self) -> str:
        return self._facts.refusal

    @override
    def find_loss(self, staged: Sequence[pa.RecordBatch]) -> str:
        return self._facts.loss

    @override
    def append(
        self,
        staged: Sequence[pa.RecordBatch],
        record: SinkRecord,
        transactions: Sequence[TransactionId],
    ) -> int:
        files = [name for batch in staged for name in batch.column("file").to_pylist()]
        self._commit(record, transactions, lambda: self._facts.files.extend(files))
        return len(files)

    @property
    @override
    def table_id(self) -> str:
        return TABLE_ID

    @override
    def describe_replaced(self, table_id: str) -> str:
        return f"{table_id} was replaced"

    @override
    def replace_rows(
        self, changes: RowChanges, record: SinkRecord, transactions: Sequence[TransactionId]
    ) -> int:
        def apply() -> None:
            for row in changes.rows.to_pylist():
                if row[DELETES]:
                    self._facts.rows.pop(row["id"], None)
                else:
                    self._facts.rows[row["id"]] = row["v"]

        self._commit(record, transactions, apply)
        return 1

    @override
    def is_committed(self, transaction: TransactionId) -> bool:
        return transaction in self._facts.committed

    @override
    def refers_to(self, staged: pa.RecordBatch) -> bool:
        return bool(set(staged.column("file").to_pylist()) & set(self._files))

    @override
    def find_unnamed(self, names: Collection[str]) -> Collection[str]:
        raise NotImplementedError

    def _commit(
        self, record: SinkRecord, transactions: Sequence[TransactionId], apply: Callable[[], None]
    ) -> None:
        facts = self._facts
        if facts.before:
            facts.before.pop(0)()
        if facts.record != self._record:
            raise CommitConflict("another commit came first")
        apply()
        facts.record = record
        facts.committed += transactions
        if facts.after:
            facts.after.pop(0)()


class Table(LakeTable):
    """A connection to the table."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts
        self.is_closed = False
        self.fails: list[Exception] = []
        """Errors, of which each call of `load` raises the next one."""

    @override
    def load(self) -> TableVersion:
        if self.fails:
            raise self.fails.pop(0)
        return Version(self.facts)

    @override
    def list_paths(self, staged: pa.RecordBatch) -> Sequence[str]:
        names: list[str] = staged.column("file").to_pylist()
        return names

    @override
    def list_files(self) -> Iterator[tuple[str, datetime]]:
        raise NotImplementedError

    @override
    def delete_files(self, paths: Sequence[str]) -> None:
        self.facts.deleted += paths

    @override
    def close(self) -> None:
        self.is_closed = True
        super().close()


class Job:
    """A claimed table, and the committers of its sink id."""

    def __init__(self) -> None:
        self.facts = Facts()
        self.area = FileStagingArea(MemoryFiles(), "staged", SINK_ID)
        self.table = Table(self.facts)
        claim_table(self.table, self.context(1))

    def context(self, attempt: int, log_id: str = "log") -> CommitterContext:
        return CommitterContext("job", "rows", SINK_ID, AttemptId(attempt), log_id, self.area)

    def committer(self, attempt: int = 1, log_id: str = "log") -> LakeCommitter:
        return LakeCommitter(self.table, self.context(attempt, log_id))

    def change_committer(self) -> LakeChangeCommitter:
        return LakeChangeCommitter(self.table, self.context(1))

    def stage(self, checkpoint: int, subtask: int = 0) -> Committable:
        staged = self.area.open()
        staged.write(pa.record_batch({"file": [f"{checkpoint}-{subtask}.parquet"]}))
        return staged.seal(TransactionId(SINK_ID, 1, checkpoint, subtask))

    def change(
        self,
        checkpoint: int,
        rows: dict[int, str | None],
        *,
        attempt: int = 1,
        key: str = "id",
        table_id: str = TABLE_ID,
    ) -> Committable:
        """Stage changes; None deletes the row of the key."""
        staged = self.area.open()
        batch = {
            "id": list(rows),
            "v": pa.array(list(rows.values()), pa.string()),
            DELETES: [value is None for value in rows.values()],
        }
        staged.write(pa.record_batch(batch), part=ChangesLabel(table_id, (key,)).to_part())
        return staged.seal(TransactionId(SINK_ID, attempt, checkpoint, 0))

    @property
    def left(self) -> list[int]:
        """The checkpoints of the transactions that are staged."""
        return [transaction.checkpoint for transaction in self.area.transactions()]


def lose_reply() -> None:
    raise CommitUnknown("the reply was lost")


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_checkpoint_is_committed_once_and_leaves_nothing_staged(job: Job) -> None:
    first, second = job.stage(1), job.stage(1, subtask=1)
    committer = job.committer()
    assert committer.commit_checkpoint(CheckpointId(1), [first, second]) == Committed(2)
    assert job.left == []
    assert committer.read_committed_through() == 1
    again = job.stage(1)
    assert committer.commit_checkpoint(CheckpointId(1), [again]) == AlreadyCommitted()
    assert job.left == []
    assert job.facts.files == ["1-0.parquet", "1-1.parquet"]


def test_of_a_list_with_older_checkpoints_only_new_ones_are_committed(job: Job) -> None:
    """A checkpoint repeats what was pending before, and some of it may be committed since."""
    committer = job.committer()
    first = job.stage(1)
    committer.commit_checkpoint(CheckpointId(1), [first])
    first, second, third = job.stage(1), job.stage(2), job.stage(3)
    assert committer.commit_checkpoint(CheckpointId(3), [first, second, third]) == Committed(2)
    assert job.facts.files == ["1-0.parquet", "2-0.parquet", "3-0.parquet"]
    assert job.left == []


def test_a_commit_that_another_driver_has_made_first_is_not_made_again(job: Job) -> None:
    committable = job.stage(1)
    job.facts.before = [
        lambda: (
            None
            if job.committer().commit_checkpoint(CheckpointId(1), [committable]) == Committed(1)
            else pytest.fail("the other driver did not commit")
        )
    ]
    outcome = job.committer().commit_checkpoint(CheckpointId(1), [committable])
    assert outcome == AlreadyCommitted()
    assert job.facts.files == ["1-0.parquet"]


def test_a_commit_follows_other_commits_and_gives_way_to_endless_ones(job: Job) -> None:
    committable = job.stage(1)
    job.facts.before = [lambda: claim_again(job, 2), lambda: claim_again(job, 3)]
    committer = job.committer()
    assert committer.commit_checkpoint(CheckpointId(1), [committable]) == Committed(1)
    committable = job.stage(2)
    job.facts.before = [
        partial(claim_again, job, attempt) for attempt in range(4, 4 + CONFLICTS_MAX)
    ]
    outcome = committer.commit_checkpoint(CheckpointId(2), [committable])
    assert isinstance(outcome, RetryLater)
    assert not outcome.until_fixed
    assert job.left == [2]
    assert job.facts.files == ["1-0.parquet"]


def claim_again(job: Job, attempt: int) -> None:
    """Make a version between, without any row."""
    before, job.facts.before = job.facts.before, []
    claim_table(job.table, job.context(attempt))
    job.facts.before = before


@pytest.mark.parametrize("is_made", [True, False])
def test_a_lost_reply_is_looked_for_in_the_table_and_never_guessed(job: Job, is_made: bool) -> None:
    committable = job.stage(1)
    if is_made:
        job.facts.after = [lose_reply]
    else:
        job.facts.before = [lose_reply]
    committer = job.committer()
    outcome = committer.commit_checkpoint(CheckpointId(1), [committable])
    if is_made:
        assert outcome == AlreadyCommitted()
        assert job.left == []
    else:
        assert isinstance(outcome, Unknown)
        assert job.left == [1]
        assert committer.commit_checkpoint(CheckpointId(1), [committable]) == Committed(1)
    assert job.facts.files == ["1-0.parquet"]


def test_a_lost_reply_of_a_table_that_stays_silent_is_unknown(job: Job) -> None:
    committable = job.stage(1)

    def fall_silent() -> None:
        job.table.fails = [SinkError("no answer")]
        lose_reply()

    job.facts.after = [fall_silent]
    outcome = job.committer().commit_checkpoint(CheckpointId(1), [committable])
    assert isinstance(outcome, Unknown)
    assert "no answer" in outcome.reason
    assert job.left == [1]


@pytest.mark.parametrize(
    ("error", "waits"), [(SinkError("away"), False), (TargetRefused("too long"), True)]
)
def test_a_table_that_refuses_a_commit_says_whether_a_person_has_to_help(
    job: Job, error: Exception, waits: bool
) -> None:
    job.table.fails = [error]
    outcome = job.committer().commit_checkpoint(CheckpointId(1), [job.stage(1)])
    assert isinstance(outcome, RetryLater)
    assert outcome.until_fixed is waits


def test_rows_that_were_deleted_before_their_commit_are_lost_unless_another_committed_them(
    job: Job,
) -> None:
    first, second = job.stage(1), job.stage(1, subtask=1)
    job.area.discard(second.transaction)
    committer = job.committer()
    assert isinstance(committer.commit_checkpoint(CheckpointId(1), [first, second]), Lost)
    assert job.facts.files == []
    assert job.left == [1]

    class Overtaken(LakeCommitter):
        @override
        def _read_staged(self, transaction: TransactionId) -> pa.RecordBatch | None:
            job.committer().commit_checkpoint(CheckpointId(1), [first])
            return super()._read_staged(transaction)

    overtaken = Overtaken(job.table, job.context(1))
    assert overtaken.commit_checkpoint(CheckpointId(1), [first]) == AlreadyCommitted()
    assert job.facts.files == ["1-0.parquet"]


def test_data_files_that_are_gone_are_lost_and_stay_staged(job: Job) -> None:
    job.facts.loss = "1-0.parquet is gone"
    outcome = job.committer().commit_checkpoint(CheckpointId(1), [job.stage(1)])
    assert outcome == Lost("1-0.parquet is gone")
    assert job.left == [1]


@pytest.mark.parametrize("reason", ["no record", "another log", "damage", "refusal"])
def test_a_table_that_is_not_the_jobs_any_more_gets_no_row(job: Job, reason: str) -> None:
    match reason:
        case "no record":
            job.facts.record = None
        case "damage":
            job.facts.damage = "damage"
        case "refusal":
            job.facts.refusal = "refusal"
        case _:
            pass
    log_id = "another" if reason == "another log" else "log"
    outcome = job.committer(log_id=log_id).commit_checkpoint(CheckpointId(1), [job.stage(1)])
    assert isinstance(outcome, RetryLater)
    assert outcome.until_fixed
    assert job.facts.files == []
    assert job.left == [1]


def test_what_a_dead_driver_has_committed_is_not_in_doubt(job: Job) -> None:
    """It died before it discarded the descriptions. One of a later checkpoint is in doubt."""
    first = job.stage(1)
    committer = job.committer()
    committer.commit_checkpoint(CheckpointId(1), [first])
    job.stage(1)
    # A try of the same checkpoint number that no decision lists.
    strange, later = job.stage(1, subtask=1), job.stage(2)
    in_doubt = committer.in_doubt()
    assert [one.transaction for one in in_doubt] == [strange.transaction, later.transaction]
    assert job.left == [1, 2]
    assert job.committer().in_doubt() == in_doubt


def test_a_table_without_a_record_has_committed_nothing(job: Job) -> None:
    committer = job.committer()
    first = job.stage(1)
    committer.commit_checkpoint(CheckpointId(1), [first])
    first = job.stage(1)
    job.facts.record = None
    assert committer.read_committed_through() == 0
    assert [one.transaction for one in committer.in_doubt()] == [first.transaction]
    committer.close()
    assert job.table.is_closed


def test_an_abort_deletes_files_that_no_version_has_and_no_others(job: Job) -> None:
    committer = job.committer()
    undecided = job.stage(2)
    assert committer.abort(undecided) == Aborted()
    assert job.facts.deleted == ["2-0.parquet"]
    assert job.left == []
    assert committer.abort(undecided) == Aborted()
    first = job.stage(1)
    committer.commit_checkpoint(CheckpointId(1), [first])
    assert committer.abort(first) == AlreadyCommitted()
    first = job.stage(1)
    assert committer.abort(first) == AlreadyCommitted()
    assert job.left == []
    assert job.facts.deleted == ["2-0.parquet"]


def test_an_abort_that_the_table_does_not_answer_keeps_everything(job: Job) -> None:
    undecided = job.stage(2)
    job.table.fails = [StorageError("away")]
    assert isinstance(job.committer().abort(undecided), RetryLater)
    assert job.left == [2]
    assert job.facts.deleted == []


def test_a_claim_follows_other_commits_and_ends_at_endless_ones(job: Job) -> None:
    before = job.facts.record
    assert before is not None
    job.facts.before = [lambda: claim_again(job, 2)]
    claim_table(job.table, job.context(3))
    record = job.facts.record
    assert record is not None
    assert record.attempt == 3
    assert record.claims == ((1, 0), (2, 0), (3, 0))

    def change() -> None:
        now = job.facts.record
        assert now is not None
        job.facts.record = now.advance(CheckpointId(now.through + 1))

    job.facts.before = [change] * CONFLICTS_MAX
    with pytest.raises(SinkError, match=f"{CONFLICTS_MAX} commits of other writers"):
        claim_table(job.table, job.context(4))


def test_the_last_change_of_each_key_counts_in_the_order_of_attempts_and_checkpoints(
    job: Job,
) -> None:
    last = job.change(3, {1: "c", 2: None}, attempt=2)
    first = job.change(1, {1: "a", 2: "a", 3: "a"})
    second = job.change(2, {1: "b", 3: None, 4: "b"})
    committer = job.change_committer()
    committables = [last, second, first]
    assert committer.commit_checkpoint(CheckpointId(3), committables) == Committed(1)
    assert job.facts.rows == {1: "c", 4: "b"}
    assert job.left == []


def test_changes_for_a_table_that_was_replaced_are_lost_and_not_mixed(job: Job) -> None:
    committables = [job.change(1, {1: "a"}), job.change(2, {2: "b"}, table_id="the old table")]
    outcome = job.change_committer().commit_checkpoint(CheckpointId(2), committables)
    assert outcome == Lost("the old table was replaced")
    assert job.facts.rows == {}
    assert job.left == [1, 2]


def test_changes_by_two_keys_are_refused_until_a_person_decides(job: Job) -> None:
    committables = [job.change(1, {1: "a"}), job.change(2, {2: "b"}, key="v")]
    outcome = job.change_committer().commit_checkpoint(CheckpointId(2), committables)
    assert isinstance(outcome, RetryLater)
    assert outcome.until_fixed
    assert "several keys" in outcome.reason


def test_changes_that_were_deleted_before_their_commit_are_lost(job: Job) -> None:
    first, second = job.change(1, {1: "a"}), job.change(2, {2: "b"})
    job.area.discard(first.transaction)
    outcome = job.change_committer().commit_checkpoint(CheckpointId(2), [first, second])
    assert isinstance(outcome, Lost)
    assert job.facts.rows == {}


def test_aborted_changes_are_gone_and_committed_ones_are_known(job: Job) -> None:
    committer = job.change_committer()
    first = job.change(1, {1: "a"})
    committer.commit_checkpoint(CheckpointId(1), [first])
    first, undecided = job.change(1, {1: "a"}), job.change(2, {1: "b"})
    assert [one.transaction for one in committer.in_doubt()] == [undecided.transaction]
    assert job.left == [2]
    assert committer.abort(undecided) == Aborted()
    assert committer.abort(first) == AlreadyCommitted()
    assert job.left == []
    assert job.facts.rows == {1: "a"}
    assert job.facts.deleted == []


def test_rows_staged_by_another_write_mode_are_refused_and_stay(job: Job) -> None:
    appended, changed = job.stage(1), job.change(2, {1: "a"})
    for committer, committable in (
        (job.change_committer(), appended),
        (job.committer(), changed),
    ):
        outcome = committer.commit_checkpoint(CheckpointId(2), [committable])
        assert isinstance(outcome, RetryLater)
        assert outcome.until_fixed
        assert "start the job once with that setting" in outcome.reason
    assert job.left == [1, 2]
