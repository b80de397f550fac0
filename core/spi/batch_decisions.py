"""The contracts of the keepers of batch decisions, and of notes about batches in a target.

`protocol.batches` has the rules.

There are two keepers: a table next to the ledger, for databases (`sinks.sql.batch_table`), and a
decision log in storage, for targets without tables (`core.storage.log.batch_log`).

If decisions are kept in files outside the target, the target may note its numbered batches.

The files may be deleted, or another directory given. Then only the note shows which batches are
written.

    begun     before the decision, under the newest claim of the sink id
    written   after the last of its transactions is committed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from onceflow.core.errors import Fenced
from onceflow.core.protocol.batches import BatchClaim, BatchDecision
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.spi import Sink


@dataclass(frozen=True, slots=True)
class Claimant:
    """The owner of the newest claim of a sink id."""

    attempt: AttemptId
    name: str = ""
    """The application, its process and host; empty if the target does not record it."""
    since: str = ""

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.name or 'another run'}, since {self.since}"


class BatchDecisions(ABC):
    """The decisions of one sink id, for one owner.

    Used by one thread; any number of processes may have one. Claims and decisions of one sink id
    are in one order, the same for all processes: a decision that a claim does not see is refused
    later.
    """

    @abstractmethod
    def claim(
        self, open_sink: Callable[[AttemptId], None], *, after: AttemptId | None = None
    ) -> BatchClaim:
        """Return a new attempt, which fences all older ones, with all decisions made before.

        `open_sink` opens the sink for the attempt that it gets, and is called at least once. With
        `after`, nothing is claimed unless that attempt is the newest. A crash leaves at most an
        unused attempt.

        Raises:
            ConfigError: The sink id belongs to another owner, or the sink cannot be opened.
            Fenced: Other processes keep claiming it, or one has claimed it since `after`.
            SinkError: The target cannot be asked now.
            StorageError: The log cannot be read or written.
        """

    @abstractmethod
    def read_claim(self) -> BatchClaim:
        """Return the newest attempt, 0 before the first, and the decisions; changes nothing.

        Raises:
            ConfigError: The sink id belongs to another owner.
            SinkError, StorageError: The target or the log cannot be read now.
        """

    @abstractmethod
    def claimant(self) -> Claimant:
        """Return the owner of the newest claim; attempt 0 before the first. Changes nothing.

        Raises:
            SinkError, StorageError: The target or the log cannot be read now.
        """

    def check_newest(self, attempt: AttemptId) -> None:
        """Raise Fenced, which names the newest claimant, unless that is still `attempt`."""
        newest = self.claimant()
        if newest.attempt != attempt:
            fenced = f"attempt {attempt}" if attempt else "this run"
            raise Fenced(
                f"{fenced} is fenced: another run of the same job has claimed the sink id,"
                f" {newest}. That one goes on. Wait for it to end; then repeat this one: it finds"
                " what is written, if the batch is numbered, and does not write it again"
            )

    @abstractmethod
    def fence(self) -> None:
        """Claim an attempt that writes nothing, so that no earlier attempt decides any more.

        Raises:
            Fenced: Another run claims it at this moment, or no run ever did.
            ConfigError, SinkError, StorageError: As `claim`.
        """

    def claim_next(self, after: AttemptId) -> BatchClaim | None:
        """Return the result of `claim` without opening the sink again, if `after` is the newest.

        None if it is not, or if the sink must be opened for each attempt.
        """
        del after
        return None

    def with_committables(self, claim: BatchClaim) -> BatchClaim:
        """Return `claim` with all committables, which may be left out of settled decisions."""
        return claim

    @abstractmethod
    def decide(self, decision: BatchDecision) -> BatchDecision:
        """Return the decision for the batch: durable, and the same for all processes from then on.

        Usually this is `decision` itself. Repeating the call returns the same, so a lost answer
        does no harm.

        Raises:
            Fenced: A newer attempt has claimed the sink id.
            CommitOutcomeUnknown: It is not known now whether the batch is decided.
            SinkError: The batch is not decided.
            StorageError: The batch is not decided.
        """

    def decide_with_rows(self, decision: BatchDecision) -> BatchDecision:
        """Return the result of `decide`, and make staged rows visible at once if the keeper can.

        Call it only while no try of a task with staged rows is prepared: waiting for its locks
        would be in vain. All transactions in the decision must still be committed as usual, even if
        their rows are visible already.

        Raises:
            BadRow: The target refuses a row; the batch is not decided.
            Fenced, CommitOutcomeUnknown, SinkError, StorageError: As `decide`.
        """
        return self.decide(decision)

    @abstractmethod
    def mark_committed(self, decision: BatchDecision) -> None:
        """Record that all of `decision` is committed, and delete records that are no longer needed.

        This only saves time later: a failure is logged, and a lost record does no harm.
        """

    @property
    def can_give_up(self) -> bool:
        """True if `give_up` removes a transaction from a decision."""
        return False

    def give_up(self, transaction: TransactionId) -> None:
        """Remove `transaction`, which was rolled back by hand, from the decision that lists it.

        A decision without transactions is deleted, so its batch may be written again. A log of
        decisions cannot be changed: then nothing happens, and the next batch reports the rows as
        lost.

        Raises:
            SinkError: The target cannot be asked now.
        """
        del transaction

    def task_sink(self, sink: Sink) -> Sink:
        """Return `sink` as the tasks need it, now that it is open."""
        return sink

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


NOTED_MAX = 16
"""The number of noted batches: as many as a log of decisions retains."""


@dataclass(frozen=True, slots=True)
class NotedBatches:
    """The content of a target's note for one sink id."""

    attempt: AttemptId
    """The newest attempt that has claimed the sink id; 0 if none has."""
    begun: int | None
    """The batch whose decision was begun last, unless it is known to be written."""
    written: tuple[int, ...]
    """The last batches that are written, oldest first."""


class BatchNotes(ABC):
    """The note of one sink id in its target. Used by any process, any number of times."""

    @abstractmethod
    def read(self) -> NotedBatches:
        """Return the content of the note.

        Raises:
            SinkError: The target cannot be asked now.
        """

    @abstractmethod
    def write(self, attempt: AttemptId, *, begun: int | None, written: tuple[int, ...]) -> None:
        """Replace the note, if `attempt` is the newest that has claimed the sink id.

        Raises:
            Fenced: `attempt` is not the newest. Nothing is changed.
            SinkError: The target cannot be written to now.
        """
