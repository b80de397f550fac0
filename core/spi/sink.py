"""The contract of sinks: the description, the writer of one subtask, and the committer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from onceflow.core.protocol.committables import (
    AbortOutcome,
    CommitInterval,
    CommitOutcome,
    Committable,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.splits import Split as Split  # noqa: PLC0414 - part of the contract
from onceflow.core.spi.staging import StagingArea

if TYPE_CHECKING:  # a slot does not pay for it
    from onceflow.core.protocol.log.target_records import TargetRecord


class OnBadRow(Enum):
    """The treatment of a row that a target can never take, or a record that cannot be decoded."""

    FAIL = "fail"
    """The job stops with an error that names the row."""
    DROP = "drop"
    """The row is left out, counted and logged."""
    DEAD_LETTER = "dead_letter"
    """The row goes to another sink with its reason and origin, exactly once, like all other
    rows."""


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """Rows that a writer left out, in the sink's schema, with one reason per row."""

    rows: pa.RecordBatch
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class WriterContext:
    """The environment of a writer, and the names for its transactions."""

    job: str
    uid: str
    sink_id: str
    subtask: int
    parallelism: int
    attempt: AttemptId
    first_checkpoint: CheckpointId
    """The first checkpoint that this writer will be asked to pre-commit."""
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    staging: StagingArea | None = None
    """The area where rows may wait for their commit if the target cannot prepare them."""
    on_bad_row: OnBadRow = OnBadRow.FAIL
    checkpoints_at_once: int = 2
    """The number of checkpoints that may have prepared transactions at one time: one may wait for
    its commit while the next one is prepared."""

    def transaction(self, checkpoint: CheckpointId, sequence: int = 0) -> TransactionId:
        """Return the id of the transaction that this writer pre-commits for `checkpoint`."""
        return TransactionId(self.sink_id, self.attempt, checkpoint, self.subtask, sequence)


class TransactionNamer:
    """A source of transaction names before the checkpoint is known, such as at the first row."""

    def __init__(self, context: WriterContext) -> None:
        self._context = context
        self._checkpoint = context.first_checkpoint
        self._sequence = 0

    def next(self) -> TransactionId:
        """Return a unique id for a transaction that the next `pre_commit` returns."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        return self._context.transaction(self._checkpoint, sequence)

    def advance_past(self, checkpoint: CheckpointId) -> None:
        """Name transactions from now on for the checkpoint after `checkpoint`."""
        # The number of the next checkpoint is not known yet, and checkpoints aborted in between do
        # no harm. The name only has to be after the last one pre-committed.
        self._checkpoint, self._sequence = CheckpointId(checkpoint + 1), 0


@dataclass(frozen=True, slots=True)
class CommitterContext:
    """The job, sink and attempt for which a committer commits."""

    job: str
    uid: str
    sink_id: str
    attempt: AttemptId
    log_id: str = ""
    """The identity of the job's decision log.

    If two decision logs use the same sink id, two jobs write to one target. The second one is
    refused.
    """
    staging: StagingArea | None = None
    """The area where rows may wait for their commit; the same as the writers'."""


class SinkWriter(ABC):
    """A writer of rows that are not visible before their commit; owned by the chain's thread."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take `batch`. It may stay in memory or in an open transaction until `pre_commit`.

        Raises:
            BadRow: A value does not fit the target; names column and value. Not raised for rows
                that `take_rejected` will return instead.
            SinkError: The target refused or is gone; the attempt ends.
        """

    @abstractmethod
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """Make every row written since the last call survive any crash, still invisible.

        When it returns, any process can commit the rows, and the ledger row that proves their
        commit, from the committable alone. It returns one committable as a rule, and none if no row
        was written. It returns several if a checkpoint needs them (for example one per table): in
        the order of their commits, with a rising `sequence` in their names. Each of several is
        committed, retried and rolled back separately. Either all are durable, or it raises
        `PreCommitFailed`, and the next attempt rolls back those that are durable.

        A transaction's name holds a checkpoint after the last one pre-committed and not after this
        one. If a target needs the name at the beginning (for example in a file's name), use
        `WriterContext.first_checkpoint` first, and then the number after the last one that was
        pre-committed. That is this checkpoint unless checkpoints in between were aborted.
        `TransactionNamer` does this.

        Raises:
            PreCommitFailed: Nothing of this checkpoint is durable.
        """

    def take_rejected(self) -> Sequence[RejectedRows]:
        """Return the bad rows left out since the last call; empty if bad rows fail the job.

        Called after each `write` and each `pre_commit`. Rows returned after a `pre_commit` belong
        to its checkpoint. A writer that does not override this method raises `BadRow` for each bad
        row, regardless of `WriterContext.on_bad_row`.
        """
        return ()

    @abstractmethod
    def close(self) -> None:
        """Release all resources and roll back rows that were not pre-committed.

        May be called twice.

        Must not touch pre-committed transactions: they belong to the committer.
        """


class Committer(ABC):
    """A committer that makes pre-committed rows visible, or removes them.

    Idempotent. Any number of processes may use one at the same time.
    """

    @abstractmethod
    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit `committable` and return the outcome. Raises for no outcome of the union."""

    def begin_commit(self, committable: Committable) -> bool:
        """Do the part of a commit that is possible before its decision; return True if it was done.

        Optional: this part is then not left to do once the decision has arrived. Only the slot that
        has pre-committed `committable` calls it, once, after everything before it in that subtask
        is committed. Then follows `commit`, or `withdraw_commit` if the decision is late or the
        checkpoint aborted, or no call if the process dies or closes. Nothing may be visible before
        `commit`. `commit` and `abort` by any other process must answer as if nothing had begun, and
        this call must not block them: an older attempt may still make it.

        Raises for nothing that the target does: it returns False, and `commit` tries again.
        """
        del committable
        return False

    def withdraw_commit(self, committable: Committable) -> None:  # noqa: B027 - optional hook
        """Undo the part that `begin_commit` has done; `committable` stays pre-committed.

        Raises for nothing that the target does.
        """

    @abstractmethod
    def abort(self, committable: Committable) -> AbortOutcome:
        """Roll back the pre-committed rows.

        Return `AlreadyCommitted` if they were committed before.
        """

    @abstractmethod
    def in_doubt(self) -> Sequence[Committable]:
        """Return all transactions pre-committed under this sink id, neither committed nor aborted.

        Includes those of other attempts and other subtasks; excludes those of other sinks.
        """

    def find_prepare_time(self, committable: Committable) -> datetime | None:
        """Return the time, with its zone, at which the target prepared `committable`; or None.

        Shown to people only. None if it is not in doubt, or if the target records no time. Never
        called for staged rows.
        """
        return None

    def prune(self, before: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Delete proofs of commits of checkpoints before `before`; no retained one needs them.

        Commits of these may still be running in processes that were overtaken. Later actions of
        such a process must change nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


class GlobalCommitter(Committer):
    """A committer that makes all rows of a checkpoint, of all subtasks, visible as one version.

    For sinks whose `Sink.committed_by` is the driver, which uses it on one thread. An overtaken
    driver may still run, so two may commit the same checkpoint at once. `in_doubt` may name
    committed transactions: only those that the decision log does not know are aborted.
    """

    @abstractmethod
    def commit_checkpoint(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        """Make the rows of `committables` visible and `checkpoint` the proof, in one atomic step.

        `committables` are all committables of this commit, at least one, the same and in the same
        order for every caller. Checkpoints arrive in rising order. If the target's highest is
        already `checkpoint` or higher, nothing changes, and the answer is `AlreadyCommitted`: this
        check is part of the same step. The answer is `Lost` if rows that are to become visible are
        gone. Never raises for an outcome in the union.

        With `Sink.gathering`, a commit contains several decisions, and another driver may gather
        others for it. Then this step leaves out the committables whose own checkpoint is not above
        the target's highest.
        """

    @abstractmethod
    def read_committed_through(self) -> CheckpointId:
        """Return the highest checkpoint that is committed under this sink id; 0 before the first.

        The target keeps this number as long as it keeps the rows.

        Raises:
            SinkError: The target cannot be asked now.
        """

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit nothing; return the reason why the transaction waits. Called by `onceflow txn`."""
        # This is not an error: `onceflow txn` asks any committer and shows the reason to a person.
        return RetryLater(f"{committable} becomes visible with its whole checkpoint alone")


class CommittedBy(Enum):
    """The process that commits the transactions that a sink's writers pre-commit."""

    SLOTS = "slots"
    """Each slot commits the transactions of its own writers, one after the other."""
    DRIVER = "driver"
    """The driver commits all transactions of a checkpoint at once, one checkpoint after the
    other."""


class Sink(ABC):
    """A description of a two-phase sink.

    It is pickled by value, holds no open resource and prints no secret.
    """

    instead_of_replacing: ClassVar[str] = "Append, or write to another target"
    """The advice in the error for a user who asks to replace all rows if the sink cannot."""

    @property
    def committed_by(self) -> CommittedBy:
        """The committing process: slots for single transactions, the driver for whole checkpoints.

        Choose the driver for targets that keep versions (for example tables of a lake), or that can
        order commits by number. Then `committer` returns a `GlobalCommitter`. If such a sink
        implements `target_record`, its target is read even before the first start in new storage.
        Without it, `read_committed_through` is called, and only once the sink has been opened.
        """
        return CommittedBy.SLOTS

    @property
    def gathering(self) -> CommitInterval | None:
        """The interval at which the driver commits several decided checkpoints at once, or None.

        None means that each checkpoint is committed separately. For sinks whose `committed_by` is
        the driver, and whose `commit_checkpoint` leaves out rows that are already committed. The
        waiting checkpoints are decided: they survive crashes, are part of savepoints, and the end
        of the job or the next attempt commits them at once.
        """
        return None

    def routing_key(self) -> tuple[str, ...]:
        """Return the columns by which rows must meet in one subtask.

        Empty if any subtask may write any row. For sinks that change rows in place: each key has
        one writer, so subtasks never wait for each other's locks, and the changes of a key stay in
        order.
        """
        return ()

    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:  # noqa: B027
        """Raise ConfigError unless rows of `schema` could be written. Changes nothing.

        Runs on the driver before each attempt, for every sink before any is opened, and whenever a
        tool asks: possibly twice at once, and while a job runs. Do not refuse a missing object that
        `open` will create.

        Raises:
            ConfigError: The rows could not be written; the message has the exact statement that
                fixes it.
            SinkError: The target cannot be asked now.
        """

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:  # noqa: B027
        """Prepare the target for rows of `schema`. Runs on the driver before each attempt.

        Creates the objects that the user asked for (tables), while nothing is prepared. Fences the
        sink id: refuses a job with another decision log, and an attempt that is not newer than the
        last one seen.

        Raises:
            ConfigError: The rows cannot be written; the message has the exact statement that fixes
                it.
            Fenced: A newer attempt, or another job, owns the sink id.
        """

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Return the target's record of the sink id, or None if it keeps none. Changes nothing.

        Runs on the driver, before anything is decided and again once the sink is open. Only this
        record reveals a start from an older copy of checkpoint storage, if proofs are pruned or
        attempt numbers have caught up. Return an empty record if nothing was ever written.

        Raises:
            ConfigError: Another job owns the sink id.
            SinkError: The target cannot be asked now.
        """
        return None

    def describe_target(self) -> str:
        """Return the target's location for people, without secrets; empty if it is not known."""
        return ""

    def list_blockers(self, context: CommitterContext) -> Sequence[str]:
        """Describe the blockers for which the attempt's writers wait in the target now.

        Return one text per blocker. For people: the error of a checkpoint that times out names
        them, and no decision depends on them. Runs on the driver, on a thread of its own,
        repeatedly while a subtask of the sink owes an ack for half of the checkpoint timeout. Limit
        its waiting time: the next call follows only after it returns. Return no texts if no writer
        waits, or the target does not show it. Never include a value of a row.

        Raises:
            SinkError: The target cannot be asked now.
        """
        del context
        return ()

    def to_staging(self) -> Sink | None:
        """Return this sink in a form that stages rows until their commit instead of preparing them.

        None if no process ever waits for prepared rows. Used in tasks of Spark, where two tries of
        one partition may prepare the same rows, and where a target has no room to prepare more:
        rows of the second try wait in `WriterContext.staging`. The same committer commits and
        aborts both kinds.
        """
        return None

    @abstractmethod
    def writer(self, context: WriterContext) -> SinkWriter:
        """Return the writer of one subtask. Runs in the slot."""

    @abstractmethod
    def committer(self, context: CommitterContext) -> Committer:
        """Return a committer; a `GlobalCommitter` if `committed_by` is the driver.

        Runs on the driver (for recovery) and in every slot. If `committed_by` is the driver, it
        runs only on the driver.
        """
