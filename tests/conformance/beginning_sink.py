"""The reference sink with a committer that begins commits before their decision.

begun       rows of transactions that are begun, seen by nobody who reads `target`
"""

from __future__ import annotations

import json
import sqlite3

from tests.conformance.reference_sink import ReferenceCommitter, ReferenceSink, transaction

from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext


class BeginningCommitter(ReferenceCommitter):
    """Parses the rows before the decision; begins only in a subtask in which it has committed."""

    def __init__(self, sink: ReferenceSink, context: CommitterContext) -> None:
        super().__init__(sink, context)
        self.subtasks: set[int] = set()

    def begin_commit(self, committable: committables.Committable) -> bool:
        if committable.transaction.subtask not in self.subtasks:
            return False
        try:
            with transaction(self.sink.path) as connection:
                return self.begin(connection, committable.transaction)
        except sqlite3.Error:
            return False

    def begin(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> bool:
        name = self.stored_name(transaction_id)
        rows = self.prepared_rows(connection, name)
        if rows is None:
            return False
        self.forget_begun(connection, name)
        connection.executemany(
            "INSERT INTO begun VALUES (:name, :id, :account, :amount)",
            [{"name": name, **row} for row in json.loads(rows)],
        )
        return True

    def withdraw_commit(self, committable: committables.Committable) -> None:
        with transaction(self.sink.path) as connection:
            self.withdraw(connection, self.stored_name(committable.transaction))

    def withdraw(self, connection: sqlite3.Connection, name: str) -> None:
        self.forget_begun(connection, name)

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        name = self.stored_name(committable.transaction)
        with transaction(self.sink.path) as connection:
            if self.is_committed(connection, name):
                return committables.AlreadyCommitted()
            rows = self.prepared_rows(connection, name)
            if rows is None:
                return self.unknown(name)
            if not self.end(connection, name):
                self.apply(connection, rows)
            self.record(connection, committable.transaction)
        self.subtasks.add(committable.transaction.subtask)
        return committables.Committed()

    def end(self, connection: sqlite3.Connection, name: str) -> bool:
        """Show what is begun, whoever has begun it; return whether there was something."""
        shown = connection.execute(
            "INSERT INTO target SELECT id, account, amount FROM begun WHERE name = ?", (name,)
        )
        self.forget_begun(connection, name)
        return shown.rowcount > 0

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        name = self.stored_name(committable.transaction)
        with transaction(self.sink.path) as connection:
            if self.is_committed(connection, name):
                return committables.AlreadyCommitted()
            connection.execute("DELETE FROM prepared WHERE name = ?", (name,))
            self.forget_begun(connection, name)
        return committables.Aborted()

    def forget_begun(self, connection: sqlite3.Connection, name: str) -> None:
        connection.execute("DELETE FROM begun WHERE name = ?", (name,))


class BeginningSink(ReferenceSink):
    """The reference sink, whose commits may be begun."""

    committer_class = BeginningCommitter
