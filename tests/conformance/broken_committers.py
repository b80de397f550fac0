"""Sinks whose committers or fences are wrong in one way."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import ClassVar

from tests.conformance.broken_sink import BrokenSink
from tests.conformance.reference_sink import (
    ReferenceCommitter,
    transaction,
)

from onceflow.core.errors import SinkError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommitterContext

_INSERT = "INSERT INTO target VALUES (:id, :account, :amount)"


# --- deciding -----------------------------------------------------------------------------------


class _UnknownIsCommitted(ReferenceCommitter):
    def unknown(self, name: str) -> committables.CommitOutcome:
        return committables.AlreadyCommitted()


class TakesUnknownForCommitted(BrokenSink):
    """Takes XAER_NOTA at commit for success: rows rolled back by somebody are lost in silence."""

    breaks = "unknown-is-lost"
    committer_class = _UnknownIsCommitted


class _KeepsNoProof(ReferenceCommitter):
    def record(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> None:
        connection.execute("DELETE FROM prepared WHERE name = ?", (str(transaction_id),))


class ForgetsItsCommits(BrokenSink):
    """Leaves no proof of a commit, so a commit whose reply was lost looks lost."""

    breaks = "commit-again"
    committer_class = _KeepsNoProof


class _AppendsAgain(ReferenceCommitter):
    def record(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> None:
        rows = self.prepared_rows(connection, str(transaction_id))
        super().record(connection, transaction_id)
        connection.execute(
            "INSERT INTO prepared VALUES (?, 'done', ?)", (str(transaction_id), rows)
        )

    def is_committed(self, connection: sqlite3.Connection, name: str) -> bool:
        connection.execute("DELETE FROM ledger WHERE name = ?", (name,))
        return False


class AppendsAtEveryCommit(BrokenSink):
    """Appends the rows once more whenever commit is asked again."""

    breaks = "commit-again"
    committer_class = _AppendsAgain


class _RemembersInProcess(ReferenceCommitter):
    known: ClassVar[set[str]] = set()

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        name = str(committable.transaction)
        with transaction(self.sink.path) as connection:
            rows = self.prepared_rows(connection, name)
            if name in self.known or rows is None:
                return (
                    super().unknown(name)
                    if name not in self.known
                    else committables.AlreadyCommitted()
                )
            self.apply(connection, rows)
            self.record(connection, committable.transaction)
        self.known.add(name)
        return committables.Committed()


class RemembersCommitsInMemory(BrokenSink):
    """Knows what it has committed as long as its process lives."""

    breaks = "commit-elsewhere"
    committer_class = _RemembersInProcess


class _ChecksThenActs(ReferenceCommitter):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        name = str(committable.transaction)
        with closing(sqlite3.connect(self.sink.path, timeout=30)) as connection:
            if self.is_committed(connection, name):
                return committables.AlreadyCommitted()
            rows = self.prepared_rows(connection, name)
        if rows is None:
            return self.unknown(name)
        # Long enough for another one to look, too.
        time.sleep(0.02)
        with transaction(self.sink.path) as connection:
            self.apply(connection, rows)
            connection.execute("DELETE FROM prepared WHERE name = ?", (name,))
            connection.execute(
                "INSERT OR IGNORE INTO ledger VALUES (?, ?, ?)",
                (name, self.context.sink_id, committable.transaction.checkpoint),
            )
        return committables.Committed()


class ChecksThenActs(BrokenSink):
    """Looks whether it is committed in one transaction and commits in another."""

    breaks = "commit-race"
    committer_class = _ChecksThenActs


class _CommitsAllBefore(ReferenceCommitter):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        own = committable.transaction
        older = [
            other
            for other in self.in_doubt()
            if (other.transaction.checkpoint, other.transaction.subtask)
            < (own.checkpoint, own.subtask)
            and other.transaction.attempt == own.attempt
        ]
        outcome = super().commit(committable)
        # Two or more before it: what else can they be than forgotten?
        if len(older) > 1:
            for other in older:
                super().commit(other)
        return outcome


class CommitsWhatIsOlder(BrokenSink):
    """Commits everything prepared before the committable, too."""

    breaks = "commit-in-any-order"
    committer_class = _CommitsAllBefore


class _RowsThenProof(ReferenceCommitter):
    def apply(self, connection: sqlite3.Connection, rows: str) -> None:
        super().apply(connection, rows)
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")


class ProvesInAnotherTransaction(BrokenSink):
    """Commits the rows, then their proof, in two transactions."""

    breaks = "killed-in-commit"
    rounds = 40
    committer_class = _RowsThenProof


class _AbortsInName(ReferenceCommitter):
    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        with transaction(self.sink.path) as connection:
            if self.is_committed(connection, str(committable.transaction)):
                return committables.AlreadyCommitted()
        return committables.Aborted()


class AbortsInNameOnly(BrokenSink):
    """Says Aborted and leaves everything prepared."""

    breaks = "abort-leaves-nothing"
    committer_class = _AbortsInName


class _AbortsOnce(ReferenceCommitter):
    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        name = str(committable.transaction)
        with transaction(self.sink.path) as connection:
            known = self.prepared_rows(connection, name) is not None
            known = known or self.is_committed(connection, name)
        if not known:
            raise SinkError(f"{name} is not prepared")
        return super().abort(committable)


class FailsToAbortAgain(BrokenSink):
    """Takes an abort of what is gone for an error."""

    breaks = "abort-again"
    committer_class = _AbortsOnce


class _AbortsCommitted(ReferenceCommitter):
    def record(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> None:
        rows = self.prepared_rows(connection, str(transaction_id)) or "[]"
        super().record(connection, transaction_id)
        connection.execute(
            "INSERT INTO prepared VALUES (?, 'undo', ?)", (f"undo {transaction_id}", rows)
        )

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        with transaction(self.sink.path) as connection:
            rows = self.prepared_rows(connection, f"undo {committable.transaction}")
            if rows is not None:
                connection.executemany("DELETE FROM target WHERE id = :id", json.loads(rows))
                return committables.Aborted()
        return super().abort(committable)


class AbortTakesCommittedRowsAway(BrokenSink):
    """Undoes a commit when it is asked to abort."""

    breaks = "abort-after-commit"
    committer_class = _AbortsCommitted


# --- in doubt -----------------------------------------------------------------------------------


class _ListsByPrefix(ReferenceCommitter):
    def listed(self, connection: sqlite3.Connection) -> list[str]:
        found = connection.execute(
            "SELECT name FROM prepared WHERE name LIKE ? AND sink_id NOT IN ('done', 'undo')",
            (f"{self.context.sink_id}%",),
        )
        return [str(name) for (name,) in found]


class ListsByPrefix(BrokenSink):
    """Finds its own by the beginning of the name: `app` also finds those of `app-x`."""

    breaks = "in-doubt-of-no-other-sink"
    committer_class = _ListsByPrefix


class _ListsByPattern(ReferenceCommitter):
    def listed(self, connection: sqlite3.Connection) -> list[str]:
        found = connection.execute(
            "SELECT name FROM prepared WHERE name LIKE ?", (f"{self.context.sink_id}/%",)
        )
        return [str(name) for (name,) in found]


class ListsByPattern(BrokenSink):
    """Finds its own by LIKE, where `_` stands for any character and case does not matter."""

    breaks = "in-doubt-of-no-other-sink"
    committer_class = _ListsByPattern


class _ListsFirstSubtask(ReferenceCommitter):
    def in_doubt(self) -> Sequence[committables.Committable]:
        return [one for one in super().in_doubt() if one.transaction.subtask < 4]


class ForgetsRemovedSubtasks(BrokenSink):
    """Looks for the subtasks that there are now: what a removed one has prepared stays for ever."""

    breaks = "in-doubt-of-every-subtask"
    committer_class = _ListsFirstSubtask


class _ListsOwnAttempt(ReferenceCommitter):
    def in_doubt(self) -> Sequence[committables.Committable]:
        return [
            one for one in super().in_doubt() if one.transaction.attempt == self.context.attempt
        ]


class ForgetsOlderAttempts(BrokenSink):
    """Looks for its own attempt's transactions only."""

    breaks = "in-doubt-of-every-attempt"
    committer_class = _ListsOwnAttempt


class _ListsCommitted(ReferenceCommitter):
    def listed(self, connection: sqlite3.Connection) -> list[str]:
        committed = connection.execute(
            "SELECT name FROM ledger WHERE sink_id = ? LIMIT 1", (self.context.sink_id,)
        )
        return [*super().listed(connection), *(str(name) for (name,) in committed)]


class ListsWhatIsCommitted(BrokenSink):
    """Reports transactions as in doubt that were committed long ago."""

    breaks = "commit-again"
    committer_class = _ListsCommitted


# --- pruning ------------------------------------------------------------------------------------


class _PrunesTooMuch(ReferenceCommitter):
    def prune(self, before: CheckpointId) -> None:
        super().prune(CheckpointId(before + 1))


class PrunesOneTooMany(BrokenSink):
    """Takes "before" for "up to": the oldest retained checkpoint's proofs are gone."""

    breaks = "prune-keeps-what-is-asked-for"
    committer_class = _PrunesTooMuch


class _PrunesPrepared(ReferenceCommitter):
    def prune(self, before: CheckpointId) -> None:
        super().prune(before)
        for one in self.in_doubt():
            if one.transaction.checkpoint < before - 10:
                self.abort(one)


class PrunesWhatIsPrepared(BrokenSink):
    """Takes old prepared transactions for garbage."""

    breaks = "prune-keeps-what-is-in-doubt"
    committer_class = _PrunesPrepared


# --- who may write ------------------------------------------------------------------------------


class LetsAnotherJobIn(BrokenSink):
    """Has no idea whose decisions it carries out."""

    breaks = "another-job-is-refused"

    def check_fence(self, context: CommitterContext, log_id: str, attempt: int) -> None:
        super().check_fence(context, context.log_id, attempt)


class LetsOlderAttemptsIn(BrokenSink):
    """Is not fenced: an attempt that was thought dead goes on beside the new one."""

    breaks = "older-attempt-is-refused"

    def check_fence(self, context: CommitterContext, log_id: str, attempt: int) -> None:
        super().check_fence(context, log_id, attempt=0)


class TellsTheClaimAlone(BrokenSink):
    """Takes a higher attempt for newer: a second try of a start from an older copy doubles rows."""

    breaks = "commits-are-told-before-a-start"

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        told = super().target_record(context)
        return told and TargetRecord(told.sink_id, told.attempt)


class TellsAnyJob(BrokenSink):
    """Tells a job with another decision log what is there: a wrong storage looks like a new job."""

    breaks = "commits-are-told-before-a-start"

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        with transaction(self.path) as connection:
            query = "SELECT log_id FROM owners WHERE sink_id = ?"
            owner = connection.execute(query, (context.sink_id,)).fetchone()
        return super().target_record(replace(context, log_id=owner[0]) if owner else context)


# --- tried again without a word -----------------------------------------------------------------


class _HopesForTheBest(ReferenceCommitter):
    def refused(self, why: str) -> committables.CommitOutcome:
        return committables.RetryLater(why)


class TakesARefusedCommitForATargetThatIsBusy(BrokenSink):
    """Says that it tries later, of rows that its target never takes."""

    breaks = "refused-commit-waits-for-a-person"
    committer_class = _HopesForTheBest


class _ServiceUnavailable(Exception):
    """An error class of a client's own, with a word for a connection in its name."""


class _BlamesTheService(ReferenceCommitter):
    def refused(self, why: str) -> committables.CommitOutcome:
        raise _ServiceUnavailable(f"400: {why}")


class RaisesAnOutageForARefusedCommit(BrokenSink):
    """Lets its client's only error class through, which is named for outages."""

    breaks = "own-error-of-a-refused-commit-waits-for-a-person"
    committer_class = _BlamesTheService
