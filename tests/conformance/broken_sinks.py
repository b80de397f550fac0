"""A gallery of sinks that are each wrong in one way, most of them as some real system is.

Each is the reference sink with one step done wrong, and names the one clause on which it must fail.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from tests.conformance.reference_sink import (
    ReferenceCommitter,
    ReferenceSink,
    ReferenceWriter,
    transaction,
)

from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import CommitterContext

_INSERT = "INSERT INTO target VALUES (:id, :account, :amount)"


class BrokenSink(ReferenceSink):
    """Wrong in one way."""

    breaks: ClassVar[str]
    """The clause on which it must fail."""
    rounds: ClassVar[int] = 2
    """How much is tried: one that is wrong at a single line needs every line."""


# --- visible too early --------------------------------------------------------------------------


class _WritesThrough(ReferenceWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        with transaction(self.sink.path) as connection:
            connection.executemany(_INSERT, batch.to_pylist())


class ShowsRowsAsTheyCome(BrokenSink):
    """Inserts with autocommit, as most sinks in the wild."""

    breaks = "hidden-after-write"
    writer_class = _WritesThrough


class _CommitsAtPreCommit(ReferenceWriter):
    def prepare(self, transaction_id: TransactionId) -> None:
        super().prepare(transaction_id)
        with transaction(self.sink.path) as connection:
            connection.executemany(_INSERT, self.rows)


class CommitsAtPreCommit(BrokenSink):
    """Commits with the snapshot, before the checkpoint is complete."""

    breaks = "hidden-after-pre-commit"
    writer_class = _CommitsAtPreCommit


class _CommitsOnClose(ReferenceWriter):
    def close(self) -> None:
        with transaction(self.sink.path) as connection:
            connection.executemany(_INSERT, self.rows)
        super().close()


class FlushesOnClose(BrokenSink):
    """Takes the end of a writer for the end of the input."""

    breaks = "close-rolls-back-what-is-open"
    writer_class = _CommitsOnClose


# --- not durable --------------------------------------------------------------------------------

_IN_MEMORY: dict[str, str] = {}


class _PreparesInMemory(ReferenceWriter):
    def prepare(self, transaction_id: TransactionId) -> None:
        super().prepare(transaction_id)
        name = str(transaction_id)
        _IN_MEMORY[name] = json.dumps(self.rows)
        with transaction(self.sink.path) as connection:
            connection.execute("UPDATE prepared SET rows = '[]' WHERE name = ?", (name,))


class _CommitsFromMemory(ReferenceCommitter):
    def prepared_rows(self, connection: sqlite3.Connection, name: str) -> str | None:
        rows = super().prepared_rows(connection, name)
        return rows if rows is None else _IN_MEMORY.get(name, "[]")


class KeepsPreparedRowsInMemory(BrokenSink):
    """Has a name in the target and the rows in the process."""

    breaks = "pre-committed-survives-death"
    writer_class = _PreparesInMemory
    committer_class = _CommitsFromMemory


class _ClosesByAborting(ReferenceWriter):
    def close(self) -> None:
        with transaction(self.sink.path) as connection:
            connection.execute(
                "DELETE FROM prepared WHERE name LIKE ?",
                (f"{self.context.sink_id}/{self.context.attempt}/%/{self.context.subtask}/%",),
            )
        super().close()


class AbortsPreparedOnClose(BrokenSink):
    """Cleans up more than is its own when a writer ends."""

    breaks = "close-keeps-what-is-pre-committed"
    writer_class = _ClosesByAborting


class _LosesRowsOfLargeBatches(ReferenceWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch.slice(0, 250))


class CutsLargeBatches(BrokenSink):
    """Writes at most so many rows of a batch."""

    breaks = "commit-shows-its-rows"
    writer_class = _LosesRowsOfLargeBatches


class _AltersValues(ReferenceWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        for row in self.rows:
            row["amount"] = min(row["amount"], 5000)


class ClampsValues(BrokenSink):
    """Lets the target cut what does not fit, as a lenient SQL mode does."""

    breaks = "commit-shows-its-rows"
    writer_class = _AltersValues


class _KeepsWrittenRows(ReferenceWriter):
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        rows = list(self.rows)
        committable = super().pre_commit(checkpoint)
        self.rows = rows[:1] if len(rows) > 1 else []
        return committable


class CarriesRowsOver(BrokenSink):
    """Leaves a row of one checkpoint in the buffer of the next."""

    breaks = "commit-shows-its-rows"
    writer_class = _KeepsWrittenRows


class _EmptyIsAnError(ReferenceWriter):
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        if not self.rows:
            raise SinkError("there is no open transaction")
        return super().pre_commit(checkpoint)


class FailsOnEmptyCheckpoint(BrokenSink):
    """Prepares a transaction that was never begun."""

    breaks = "empty-checkpoint"
    writer_class = _EmptyIsAnError


class _SwallowsBadRows(ReferenceWriter):
    def require_good(self) -> None:
        self.rows = list({row["id"]: row for row in self.rows}.values())


class SwallowsBadRows(BrokenSink):
    """Logs what the target refuses and goes on."""

    breaks = "bad-batch-is-refused"
    writer_class = _SwallowsBadRows


# --- deciding -----------------------------------------------------------------------------------


class _UnknownIsCommitted(ReferenceCommitter):
    def unknown(self, name: str) -> CommitOutcome:
        return AlreadyCommitted()


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

    def commit(self, committable: Committable) -> CommitOutcome:
        name = str(committable.transaction)
        with transaction(self.sink.path) as connection:
            rows = self.prepared_rows(connection, name)
            if name in self.known or rows is None:
                return super().unknown(name) if name not in self.known else AlreadyCommitted()
            self.apply(connection, rows)
            self.record(connection, committable.transaction)
        self.known.add(name)
        return Committed()


class RemembersCommitsInMemory(BrokenSink):
    """Knows what it has committed as long as its process lives."""

    breaks = "commit-elsewhere"
    committer_class = _RemembersInProcess


class _ChecksThenActs(ReferenceCommitter):
    def commit(self, committable: Committable) -> CommitOutcome:
        name = str(committable.transaction)
        with closing(sqlite3.connect(self.sink.path, timeout=30)) as connection:
            if self.is_committed(connection, name):
                return AlreadyCommitted()
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
        return Committed()


class ChecksThenActs(BrokenSink):
    """Looks whether it is committed in one transaction and commits in another."""

    breaks = "commit-race"
    committer_class = _ChecksThenActs


class _CommitsAllBefore(ReferenceCommitter):
    def commit(self, committable: Committable) -> CommitOutcome:
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
    def abort(self, committable: Committable) -> AbortOutcome:
        with transaction(self.sink.path) as connection:
            if self.is_committed(connection, str(committable.transaction)):
                return AlreadyCommitted()
        return Aborted()


class AbortsInNameOnly(BrokenSink):
    """Says Aborted and leaves everything prepared."""

    breaks = "abort-leaves-nothing"
    committer_class = _AbortsInName


class _AbortsOnce(ReferenceCommitter):
    def abort(self, committable: Committable) -> AbortOutcome:
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

    def abort(self, committable: Committable) -> AbortOutcome:
        with transaction(self.sink.path) as connection:
            rows = self.prepared_rows(connection, f"undo {committable.transaction}")
            if rows is not None:
                connection.executemany("DELETE FROM target WHERE id = :id", json.loads(rows))
                return Aborted()
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
    def in_doubt(self) -> Sequence[Committable]:
        return [one for one in super().in_doubt() if one.transaction.subtask < 4]


class ForgetsRemovedSubtasks(BrokenSink):
    """Looks for the subtasks that there are now: what a removed one has prepared stays for ever."""

    breaks = "in-doubt-of-every-subtask"
    committer_class = _ListsFirstSubtask


class _ListsOwnAttempt(ReferenceCommitter):
    def in_doubt(self) -> Sequence[Committable]:
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


# --- names and committables ---------------------------------------------------------------------


class _RandomNames(ReferenceWriter):
    def name(self, checkpoint: CheckpointId) -> TransactionId:
        attempt = random.randrange(10**7, 10**8)
        return TransactionId(self.context.sink_id, attempt, checkpoint, self.context.subtask)


class NamesAtRandom(BrokenSink):
    """Draws a part of the name: what a replay finds prepared, nobody can tell whose it is."""

    breaks = "names-follow-the-checkpoint"
    writer_class = _RandomNames


def _without_attempt(transaction_id: TransactionId) -> str:
    own = transaction_id
    return str(TransactionId(own.sink_id, 1, own.checkpoint, own.subtask))


class _NamesWithoutAttempt(ReferenceWriter):
    def stored_name(self, transaction_id: TransactionId) -> str:
        return _without_attempt(transaction_id)

    def prepare(self, transaction_id: TransactionId) -> None:
        try:
            super().prepare(transaction_id)
        except sqlite3.IntegrityError as error:
            raise SinkError(f"transaction {transaction_id} is prepared already") from error


class _WithoutAttempt(ReferenceCommitter):
    def stored_name(self, transaction_id: TransactionId) -> str:
        return _without_attempt(transaction_id)


class NamesWithoutAttempt(BrokenSink):
    """Stores by checkpoint and subtask: a replay meets what the attempt before has left."""

    breaks = "names-follow-the-checkpoint"
    writer_class = _NamesWithoutAttempt
    committer_class = _WithoutAttempt


class _CarriesPassword(ReferenceWriter):
    def payload(self) -> bytes:
        return f"sqlite://kit:{self.sink.password}@{self.sink.path}".encode()


class KeepsPasswordInCommittable(BrokenSink):
    """Puts the connection string into the committable, hence into the decision log."""

    breaks = "no-secret-is-kept"
    writer_class = _CarriesPassword


@dataclass(frozen=True)
class PrintsPassword(BrokenSink):
    """Has a repr with all its settings."""

    breaks = "no-secret-is-kept"

    def __repr__(self) -> str:
        return f"PrintsPassword({self.path!r}, password={self.password!r})"


class _CarriesRows(ReferenceWriter):
    def payload(self) -> bytes:
        return json.dumps(self.rows).encode()[:60_000]


class CarriesRowsInCommittable(BrokenSink):
    """Puts the rows into the committable, which grows with them."""

    breaks = "committable-fits-the-log"
    writer_class = _CarriesRows


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

    def require_admission(self, context: CommitterContext, log_id: str, attempt: int) -> None:
        super().require_admission(context, context.log_id, attempt)


class LetsOlderAttemptsIn(BrokenSink):
    """Is not fenced: an attempt that was thought dead goes on beside the new one."""

    breaks = "older-attempt-is-refused"

    def require_admission(self, context: CommitterContext, log_id: str, attempt: int) -> None:
        super().require_admission(context, log_id, attempt=0)


class _PreparesTheNameFirst(ReferenceWriter):
    """Prepares in two steps, rows last."""

    def prepare(self, transaction_id: TransactionId) -> None:
        rows, self.rows = self.rows, []
        super().prepare(transaction_id)
        self.rows = rows
        with transaction(self.sink.path) as connection:
            connection.execute(
                "UPDATE prepared SET rows = ? WHERE name = ?",
                (json.dumps(rows), str(transaction_id)),
            )


class PreparesTheNameFirst(BrokenSink):
    """Has the name in doubt before the rows are there: a crash in between loses them."""

    breaks = "killed-in-pre-commit"
    rounds = 40
    writer_class = _PreparesTheNameFirst


def _all_below(parent: type[BrokenSink]) -> Generator[type[BrokenSink], None, None]:
    for child in parent.__subclasses__():
        yield child
        yield from _all_below(child)


GALLERY: tuple[type[BrokenSink], ...] = tuple(_all_below(BrokenSink))
