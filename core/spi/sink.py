"""The contract of sinks: the description, the writer of one subtask, and committers anywhere."""

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
    """What becomes of a row that a target can never take, or a record that cannot be decoded."""

    FAIL = "fail"
    """The job stops and names it."""
    DROP = "drop"
    """It is left out, counted and logged."""
    DEAD_LETTER = "dead_letter"
    """It goes to another sink with its reason and origin, exactly once with the rest."""


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """Rows that a writer left out, in the sink's schema, and why: one reason a row."""

    rows: pa.RecordBatch
    reasons: Sequence[str]


@dataclass(frozen=True, slots=True)
class WriterContext:
    """Where a writer runs and how it must name what it prepares."""

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
    """Where rows may wait for their commit, when the target cannot prepare them."""
    on_bad_row: OnBadRow = OnBadRow.FAIL
    checkpoints_at_once: int = 2
    """How many checkpoints may have prepared transactions at one time: one may wait for its commit
    while the next one is prepared."""

    def transaction(self, checkpoint: CheckpointId, sequence: int = 0) -> TransactionId:
        """Return the id of what this writer pre-commits for `checkpoint`."""
        return TransactionId(self.sink_id, self.attempt, checkpoint, self.subtask, sequence)


class TransactionNamer:
    """Names what one writer pre-commits before its checkpoint is known: at the first row, say."""

    def __init__(self, context: WriterContext) -> None:
        self._context = context
        self._checkpoint = context.first_checkpoint
        self._sequence = 0

    def next(self) -> TransactionId:
        """Return an id that nothing else has, for what the next `pre_commit` returns."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        return self._context.transaction(self._checkpoint, sequence)

    def advance_past(self, checkpoint: CheckpointId) -> None:
        """Name transactions from now on for the checkpoint after `checkpoint`."""
        # Not the number of the checkpoint that comes next: that is not known yet, and one that is
        # given up in between does no harm. The name only has to be after the last one
        # pre-committed.
        self._checkpoint, self._sequence = CheckpointId(checkpoint + 1), 0


@dataclass(frozen=True, slots=True)
class CommitterContext:
    """For whom a committer commits."""

    job: str
    uid: str
    sink_id: str
    attempt: AttemptId
    log_id: str = ""
    """Identity of the job's decision log.

    Two logs with one sink id are two jobs, and one must go.
    """
    staging: StagingArea | None = None
    """Where rows may wait for their commit; the same area as the writers'."""


class SinkWriter(ABC):
    """Writes rows that nobody sees before they are committed; owned by the chain's thread."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take `batch`; it may stay in memory or in an open transaction until `pre_commit`.

        Raises:
            BadRow: A value does not fit the target; names column and value. Not raised for rows
                that `take_rejected` will return instead.
            SinkError: The target refused or is gone; the attempt ends.
        """

    @abstractmethod
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """Make every row written since the last call survive any crash, still invisible.

        When it returns, the rows and the ledger row that proves their commit can be committed by
        any process from the committable alone. Returns one committable as a rule, none when no row
        was written, and several where a checkpoint needs them (one a table, say): in the order of
        their commits, with a rising `sequence` in their names. Each of several is committed,
        retried and rolled back by itself. All are durable, or it raises `PreCommitFailed`, and
        those that are durable are rolled back by the next attempt.

        A transaction's name holds a checkpoint after the last one pre-committed and not after this
        one: a target that wants the name at the beginning (in a file's name, say) gets
        `WriterContext.first_checkpoint`, and from then on the number after the last one that was
        pre-committed. That is this one unless some between were given up. `TransactionNamer` does
        it.

        Raises:
            PreCommitFailed: Nothing of this checkpoint is durable.
        """

    def take_rejected(self) -> Sequence[RejectedRows]:
        """Return the bad rows left out since the last call; empty where bad rows fail the job.

        Called after each `write` and each `pre_commit`. Rows returned after a `pre_commit` belong
        to its checkpoint. A writer that does not override it raises `BadRow` for each bad row,
        whatever `WriterContext.on_bad_row` says.
        """
        return ()

    @abstractmethod
    def close(self) -> None:
        """Release everything and roll back what was not pre-committed. Safe to call twice.

        Must not touch what was pre-committed: that is the committer's.
        """


class Committer(ABC):
    """Makes pre-committed rows visible, or gone. Idempotent; any process, any number at once."""

    @abstractmethod
    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit `committable`; return how that ended. Raises for no outcome of the union."""

    def begin_commit(self, committable: Committable) -> bool:
        """Do what a commit of `committable` can do before its decision; return whether it did.

        Optional: what is done here is not left to do once the decision has come. Only the slot that
        has pre-committed `committable` calls it, once, after everything before it in that subtask
        is committed. Then comes `commit`, or `withdraw_commit` when the decision is late or the
        checkpoint aborted, or nothing when the process dies or closes. Nothing may be visible
        before `commit`. `commit` and `abort` by any other process must answer as if nothing had
        been begun, and this call must not keep them from it: an older attempt may still make it.

        Raises for nothing that the target does: it returns False, and `commit` tries again.
        """
        del committable
        return False

    def withdraw_commit(self, committable: Committable) -> None:  # noqa: B027 - optional hook
        """Undo what `begin_commit` has begun; `committable` stays pre-committed.

        Raises for nothing that the target does.
        """

    @abstractmethod
    def abort(self, committable: Committable) -> AbortOutcome:
        """Make what was pre-committed gone. `AlreadyCommitted` when it was committed before."""

    @abstractmethod
    def in_doubt(self) -> Sequence[Committable]:
        """Return everything pre-committed under this sink id that is neither committed nor aborted.

        Includes other attempts' and other subtasks'; excludes other sinks'.
        """

    def find_prepare_time(self, committable: Committable) -> datetime | None:
        """Return the time, with its zone, at which the target prepared `committable`; or None.

        Shown to people only. None when it is not in doubt, or when the target records no time.
        Never called for staged rows.
        """
        return None

    def prune(self, before: CheckpointId) -> None:  # noqa: B027 - optional hook
        """Forget proofs of commits of checkpoints before `before`; no retained one asks for them.

        Commits of these may still be under way in processes that were overtaken: what such a one
        does later must change nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe to call twice."""


class GlobalCommitter(Committer):
    """Makes all rows of one checkpoint visible, of all subtasks, as one version of the target.

    For sinks whose `Sink.committed_by` is the driver, which uses it on one thread. An overtaken
    driver may still run, so two may commit the same checkpoint at once. `in_doubt` may name what is
    committed: only what the decision log does not know is aborted.
    """

    @abstractmethod
    def commit_checkpoint(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        """Make the rows of `committables` visible and `checkpoint` the proof, in one atomic step.

        `committables` are all that this commit is made of, never none, the same and in the same
        order whoever calls it. Checkpoints come rising. When the target's highest is `checkpoint`
        or higher already, nothing changes, and the answer is `AlreadyCommitted`: looking for it is
        part of the same step. `Lost` when rows that are to become visible are gone. Never raises
        for an outcome that the union can say.

        With `Sink.gathering` a commit is of several decisions, and another driver may gather others
        for it. Then this step leaves out the committables whose own checkpoint is not above the
        target's highest.
        """

    @abstractmethod
    def read_committed_through(self) -> CheckpointId:
        """Return the highest checkpoint that is committed under this sink id; 0 before the first.

        It outlives everything: the target keeps it as long as it keeps the rows.

        Raises:
            SinkError: The target cannot be asked now.
        """

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit nothing; return what the transaction waits for. Called by `onceflow txn`."""
        # Not an error: `onceflow txn` asks any committer, and shows the reason to a person.
        return RetryLater(f"{committable} becomes visible with its whole checkpoint alone")


class CommittedBy(Enum):
    """Who commits what the writers of a sink pre-commit."""

    SLOTS = "slots"
    """Each slot, one transaction of its own writers after the other."""
    DRIVER = "driver"
    """The driver, all transactions of a checkpoint at once, one checkpoint after the other."""


class Sink(ABC):
    """Describes a two-phase sink: pickled by value, holds no open resource, prints no secret."""

    instead_of_replacing: ClassVar[str] = "Append, or write to another target"
    """What an error advises a user who asks to replace all rows, and the sink cannot."""

    @property
    def committed_by(self) -> CommittedBy:
        """Whether slots commit single transactions, or the driver commits whole checkpoints.

        The driver: for targets that keep versions (tables of a lake, say), or that can order
        commits by number. Then `committer` returns a `GlobalCommitter`. By `target_record` such a
        sink tells of the target before the first start in new storage, too; without it
        `read_committed_through` is called, and only once the sink has been opened.
        """
        return CommittedBy.SLOTS

    @property
    def gathering(self) -> CommitInterval | None:
        """When the driver commits several decided checkpoints at once; None: each by itself.

        For sinks whose `committed_by` is the driver, and whose `commit_checkpoint` leaves out what
        is committed already. What waits is decided: it outlives crashes, is part of savepoints, and
        the end of the job or the next attempt commits it at once.
        """
        return None

    def routing_key(self) -> tuple[str, ...]:
        """Return the columns by which rows must meet in one subtask; empty when any may write any.

        For sinks that change rows in place: one key, one writer, so subtasks never wait for each
        other's locks, and the changes of a key stay in order.
        """
        return ()

    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:  # noqa: B027
        """Raise ConfigError unless rows of `schema` could be written. Changes nothing.

        Runs on the driver before each attempt, for every sink before any is opened, and whenever
        somebody wonders: also twice at once, and beside a job that runs. What is missing and will
        be created by `open` is no reason to refuse.

        Raises:
            ConfigError: They could not; the message has the exact statement that mends it.
            SinkError: The target cannot be asked now.
        """

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:  # noqa: B027
        """Prepare the target for rows of `schema`. Runs on the driver before each attempt.

        Creates what the user asked to be created (tables), while nothing is prepared, and fences
        the sink id: a job with another decision log, or an attempt that is not newer than the last
        one seen, is refused.

        Raises:
            ConfigError: They cannot; the message has the exact statement that mends it.
            Fenced: A newer attempt, or another job, owns the sink id.
        """

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Return what the target records of the sink id; None: it does not tell. Changes nothing.

        Runs on the driver, before anything is decided and again once the sink is open. A start from
        an older copy of checkpoint storage is noticed by it alone, if proofs are pruned or numbers
        of attempts have caught up. An empty record where nothing was ever written.

        Raises:
            ConfigError: Another job owns the sink id.
            SinkError: The target cannot be asked now.
        """
        return None

    def describe_target(self) -> str:
        """Return where the target is, for people, without secrets; empty: the sink does not say."""
        return ""

    def list_blockers(self, context: CommitterContext) -> Sequence[str]:
        """Describe whom the attempt's writers wait for in the target now, one text a blocker.

        For people: a checkpoint that times out names them, and nothing is decided by them. Runs on
        the driver, on a thread of its own, repeatedly while a subtask of the sink owes an ack for
        half of the checkpoint timeout. Bound its waits: a second question follows the answer to the
        first. Empty where nobody waits, or the target does not tell. Never has a value of a row.

        Raises:
            SinkError: The target cannot be asked now.
        """
        del context
        return ()

    def to_staging(self) -> Sink | None:
        """Return this sink with rows that are staged until their commit, and not prepared.

        None where nobody ever waits for what is prepared. Asked for in tasks of Spark, where two
        tries of one partition may prepare the same rows, and where a target has no room to prepare
        more: what the second one writes waits in `WriterContext.staging`. The same committer
        commits and aborts both kinds.
        """
        return None

    @abstractmethod
    def writer(self, context: WriterContext) -> SinkWriter:
        """Return the writer of one subtask. Runs in the slot."""

    @abstractmethod
    def committer(self, context: CommitterContext) -> Committer:
        """Return a committer; a `GlobalCommitter` where `committed_by` is the driver.

        Runs on the driver (recovery) and in every slot; elsewhere on the driver alone.
        """
