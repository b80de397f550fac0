"""Sinks that are wrong in what they begin before the decision of a commit."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

from tests.conformance.beginning_sink import BeginningCommitter
from tests.conformance.broken_sink import BrokenSink
from tests.conformance.reference_sink import ReferenceSink, transaction

from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext

_SHOW = "INSERT INTO target VALUES (:id, :account, :amount)"


class _ShowsAtBegin(BeginningCommitter):
    def begin(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> bool:
        is_begun = super().begin(connection, transaction_id)
        connection.execute(
            "INSERT INTO target SELECT id, account, amount FROM begun WHERE name = ?",
            (self.stored_name(transaction_id),),
        )
        return is_begun

    def end(self, connection: sqlite3.Connection, name: str) -> bool:
        ended = connection.execute("DELETE FROM begun WHERE name = ?", (name,))
        return ended.rowcount > 0


class ShowsWhatIsBegun(BrokenSink):
    """Writes to where readers read, as a producer without transactions does."""

    breaks = "begun-is-hidden"
    committer_class = _ShowsAtBegin


class _OmitsBegun(BeginningCommitter):
    def listed(self, connection: sqlite3.Connection) -> list[str]:
        begun = {name for (name,) in connection.execute("SELECT name FROM begun")}
        return [name for name in super().listed(connection) if name not in begun]


class TakesBegunForDecided(BrokenSink):
    """Has nothing in doubt that is begun: nobody aborts it when its process has died."""

    breaks = "begun-is-hidden"
    committer_class = _OmitsBegun


class _AppliesBegun(BeginningCommitter):
    def end(self, connection: sqlite3.Connection, name: str) -> bool:
        super().end(connection, name)
        return False


class WritesBegunRowsAgain(BrokenSink):
    """Ends what is begun, and then writes the rows as for any commit."""

    breaks = "begun-is-committed-once"
    committer_class = _AppliesBegun


class _RollsBackAtWithdraw(BeginningCommitter):
    def withdraw(self, connection: sqlite3.Connection, name: str) -> None:
        super().withdraw(connection, name)
        connection.execute("DELETE FROM prepared WHERE name = ?", (name,))


class RollsBackWhatIsWithdrawn(BrokenSink):
    """Takes the end of what is begun for the end of the transaction."""

    breaks = "withdrawn-is-in-doubt"
    committer_class = _RollsBackAtWithdraw


class _Remembering(BeginningCommitter):
    """Knows what it has begun, and its rows."""

    def __init__(self, sink: ReferenceSink, context: CommitterContext) -> None:
        super().__init__(sink, context)
        self.begun: dict[str, str] = {}

    def begin(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> bool:
        name = self.stored_name(transaction_id)
        rows = self.prepared_rows(connection, name)
        if rows is not None:
            self.begun[name] = rows
        return super().begin(connection, transaction_id)

    def withdraw(self, connection: sqlite3.Connection, name: str) -> None:
        self.begun.pop(name, None)
        super().withdraw(connection, name)


class _NeverForgets(_Remembering):
    def withdraw(self, connection: sqlite3.Connection, name: str) -> None:
        self.forget_begun(connection, name)

    def end(self, connection: sqlite3.Connection, name: str) -> bool:
        return super().end(connection, name) or name in self.begun


class ForgetsToForgetWhatIsWithdrawn(BrokenSink):
    """Believes that something is begun which it has undone, so its rows are written by nobody."""

    breaks = "withdrawn-is-in-doubt"
    committer_class = _NeverForgets


class _EndsUnasked(_Remembering):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        name = self.stored_name(committable.transaction)
        rows = self.begun.pop(name, None)
        if rows is None:
            return super().commit(committable)
        with transaction(self.sink.path) as connection:
            connection.executemany(_SHOW, json.loads(rows))
            self.forget_begun(connection, name)
            if not self.is_committed(connection, name):
                self.record(connection, committable.transaction)
        return committables.Committed()


class EndsWhatAnotherHasCommitted(BrokenSink):
    """Takes for granted that what it has begun is its own until it ends it."""

    breaks = "begun-is-committed-elsewhere"
    committer_class = _EndsUnasked


class _UndoesCommits(_Remembering):
    def withdraw(self, connection: sqlite3.Connection, name: str) -> None:
        rows = self.begun.pop(name, None)
        self.forget_begun(connection, name)
        if rows is not None:
            connection.executemany("DELETE FROM target WHERE id = :id", json.loads(rows))


class WithdrawsWhatAnotherHasCommitted(BrokenSink):
    """Deletes the rows of what it withdraws, wherever they are by now."""

    breaks = "begun-is-committed-elsewhere"
    committer_class = _UndoesCommits


class _EndsAborted(_Remembering):
    def prepared_rows(self, connection: sqlite3.Connection, name: str) -> str | None:
        return super().prepared_rows(connection, name) or self.begun.get(name)


class EndsWhatAnotherHasAborted(BrokenSink):
    """Looks whether another one has committed what it began, and not whether it was aborted."""

    breaks = "begun-is-aborted-elsewhere"
    committer_class = _EndsAborted


class _PreparesAgain(_Remembering):
    def withdraw(self, connection: sqlite3.Connection, name: str) -> None:
        rows = self.begun.get(name)
        super().withdraw(connection, name)
        if rows is not None and not self.is_committed(connection, name):
            connection.execute(
                "INSERT OR IGNORE INTO prepared VALUES (?, ?, ?)",
                (name, self.context.sink_id, rows),
            )


class PreparesAgainWhatIsWithdrawn(BrokenSink):
    """Puts back what it withdraws, though it was aborted meanwhile, and so it is in doubt again."""

    breaks = "begun-is-aborted-elsewhere"
    committer_class = _PreparesAgain


class _RollsBackAtClose(_Remembering):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        self.begun.pop(self.stored_name(committable.transaction), None)
        return super().commit(committable)

    def close(self) -> None:
        with transaction(self.sink.path) as connection:
            for name in self.begun:
                self.forget_begun(connection, name)
                connection.execute("DELETE FROM prepared WHERE name = ?", (name,))
        self.begun.clear()


class RollsBackWhatIsBegunAtClose(BrokenSink):
    """Rolls back everything that it has under way when it is closed."""

    breaks = "begun-outlives-its-committer"
    committer_class = _RollsBackAtClose


class _AsksTheProcess(_Remembering):
    def begin(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> bool:
        is_begun = super().begin(connection, transaction_id)
        connection.execute(
            "UPDATE begun SET account = account || ' of ' || ? WHERE name = ?",
            (os.getpid(), self.stored_name(transaction_id)),
        )
        return is_begun

    def end(self, connection: sqlite3.Connection, name: str) -> bool:
        self.forget_begun(connection, name)
        return False

    def prepared_rows(self, connection: sqlite3.Connection, name: str) -> str | None:
        owner = connection.execute("SELECT account FROM begun WHERE name = ?", (name,)).fetchone()
        is_alive = owner is None or is_running(int(owner[0].rpartition(" ")[2]))
        return super().prepared_rows(connection, name) if is_alive else None


def is_running(pid: int) -> bool:
    try:
        # Empty of a process that is dead and not reaped yet.
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except FileNotFoundError:
        return False


class LosesWhatADeadProcessHasBegun(BrokenSink):
    """Asks the process that has begun a commit, and takes its death for that of the rows."""

    breaks = "begun-outlives-its-process"
    committer_class = _AsksTheProcess


class _WaitsForTheSubtask(_Remembering):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        own = committable.transaction
        with transaction(self.sink.path) as connection:
            names = [name for (name,) in connection.execute("SELECT DISTINCT name FROM begun")]
        others = [
            one
            for one in map(TransactionId.parse, set(names) - self.begun.keys() - {str(own)})
            if one and (one.sink_id, one.subtask) == (own.sink_id, own.subtask)
        ]
        if others:
            return committables.RetryLater(
                f"{others[0]} is begun, and holds the lock of its subtask"
            )
        return super().commit(committable)


class LocksTheSubtaskAtBegin(BrokenSink):
    """Takes a lock before any decision, which a newer attempt needs for its commits."""

    breaks = "begun-by-an-older-attempt"
    committer_class = _WaitsForTheSubtask


class _RecordsLater(BeginningCommitter):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        name = self.stored_name(committable.transaction)
        with transaction(self.sink.path) as connection:
            is_open = self.prepared_rows(connection, name) is not None
            is_ended = is_open and self.end(connection, name)
        if not is_ended:
            return super().commit(committable)
        with transaction(self.sink.path) as connection:
            self.record(connection, committable.transaction)
        return committables.Committed()


class ProvesBegunCommitsLater(BrokenSink):
    """Ends what is begun in one transaction, and proves it in another one."""

    breaks = "killed-in-begun-commit"
    rounds = 20
    committer_class = _RecordsLater
