"""The statements on onceflow's own two tables in a Postgres database."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.fence import FenceOwner
from onceflow.sinks.sql.bookkeeping import LEDGER, SINKS

_PRUNED_AT_ONCE = 1_000

# The rows go in only while nobody has fenced this attempt, and no transaction of the name is
# prepared: its ledger row would hold this statement up until the lock timeout, and say nothing.
_RECORD = """
    INSERT INTO {ledger} (transaction_id, sink_id, attempt, checkpoint, subtask, row_count)
    SELECT %(transaction)s::text, %(sink)s::text, %(attempt)s, %(checkpoint)s, %(subtask)s, %(rows)s
    FROM {sinks} AS owner
    WHERE owner.sink_id = %(sink)s::text AND owner.attempt <= %(attempt)s AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_prepared_xacts WHERE gid = %(transaction)s::text
    )
"""
# Waits for a transaction that is writing the same row, and then knows how that one ended.
_APPLY = """
    INSERT INTO {ledger} (transaction_id, sink_id, attempt, checkpoint, subtask, row_count)
    VALUES (%(transaction)s, %(sink)s, %(attempt)s, %(checkpoint)s, %(subtask)s, %(rows)s)
    ON CONFLICT (transaction_id) DO NOTHING
"""
# One statement, so that of two claims at once the older one loses, also when there is no row yet.
_CLAIM = """
    INSERT INTO {sinks} AS owner (sink_id, job, log_id, attempt, commit_mode)
    VALUES (%s, %s, %s, %s, %s)
    ON CONFLICT (sink_id) DO UPDATE
    SET job = excluded.job, attempt = excluded.attempt, claimed_at = now(),
        commit_mode = excluded.commit_mode
    WHERE owner.log_id = excluded.log_id AND owner.attempt < excluded.attempt
"""
# A row that another pruner holds is that pruner's to delete.
_PRUNE = """
    DELETE FROM {ledger} WHERE transaction_id IN (
        SELECT transaction_id FROM {ledger} WHERE sink_id = %s AND checkpoint < %s
        LIMIT %s FOR UPDATE SKIP LOCKED
    )
"""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bookkeeping tables in one schema. Every call runs in the connection's transaction."""

    schema: str

    @property
    def ledger(self) -> sql.Identifier:
        """The ledger's name, quoted."""
        return sql.Identifier(self.schema, LEDGER)

    @property
    def sinks(self) -> sql.Identifier:
        """The fence's name, quoted."""
        return sql.Identifier(self.schema, SINKS)

    @property
    def sinks_shown(self) -> str:
        """The fence's name as text."""
        return self.sinks.as_string(None)

    def take_over(self, sink_id: str) -> str:
        """Return the statement by which an operator hands `sink_id` to another job."""
        statement = sql.SQL("DELETE FROM {} WHERE sink_id = {}")
        return statement.format(self.sinks, sql.Literal(sink_id)).as_string(None)

    def record(
        self, connection: psycopg.Connection[TupleRow], transaction: TransactionId, rows: int
    ) -> bool:
        """Return whether the ledger row is written; not when fenced, or when the name is in use."""
        statement = sql.SQL(_RECORD).format(ledger=self.ledger, sinks=self.sinks)
        return connection.execute(statement, _row(transaction, rows)).rowcount == 1

    def record_applied(
        self, connection: psycopg.Connection[TupleRow], transaction: TransactionId, rows: int
    ) -> bool:
        """Return whether the ledger row is written; not when the transaction is committed.

        Waits for another session that is writing it.
        """
        statement = sql.SQL(_APPLY).format(ledger=self.ledger)
        return connection.execute(statement, _row(transaction, rows)).rowcount == 1

    def has(self, connection: psycopg.Connection[TupleRow], transaction: TransactionId) -> bool:
        """Return whether the ledger proves that `transaction` is committed.

        A ledger that is missing proves nothing, so that is psycopg's error and not False.
        """
        cursor = connection.execute(
            sql.SQL("SELECT FROM {} WHERE transaction_id = %s").format(self.ledger),
            (str(transaction),),
        )
        return cursor.fetchone() is not None

    def owner(self, connection: psycopg.Connection[TupleRow], sink_id: str) -> FenceOwner | None:
        """Return who claimed `sink_id` last."""
        row = connection.execute(
            sql.SQL("SELECT log_id, attempt FROM {} WHERE sink_id = %s").format(self.sinks),
            (sink_id,),
        ).fetchone()
        return None if row is None else FenceOwner(str(row[0]), int(row[1]))

    def commit_mode(self, connection: psycopg.Connection[TupleRow], sink_id: str) -> str | None:
        """Return the commit mode that the last claim chose; None when it recorded none."""
        row = connection.execute(
            sql.SQL("SELECT commit_mode FROM {} WHERE sink_id = %s").format(self.sinks),
            (sink_id,),
        ).fetchone()
        return None if row is None else row[0]

    def claim(
        self,
        connection: psycopg.Connection[TupleRow],
        sink_id: str,
        job: str,
        owner: FenceOwner,
        commit_mode: str,
    ) -> bool:
        """Return whether `owner` is now the only one who may write under `sink_id`.

        Not when another log, the same attempt or a newer one has it: the rule of `sql.fence`.
        """
        cursor = connection.execute(
            sql.SQL(_CLAIM).format(sinks=self.sinks),
            (sink_id, job, owner.log_id, owner.attempt, commit_mode),
        )
        return cursor.rowcount == 1

    def prune(
        self, connection: psycopg.Connection[TupleRow], sink_id: str, before: CheckpointId
    ) -> bool:
        """Delete a bounded number of committed rows before `before`; return whether more are left.

        Rows of prepared transactions are invisible and stay. Losing a deletion to a crash does no
        harm, so the disk is not waited for.
        """
        with connection.transaction():
            connection.execute("SET LOCAL synchronous_commit TO off")
            cursor = connection.execute(
                sql.SQL(_PRUNE).format(ledger=self.ledger), (sink_id, before, _PRUNED_AT_ONCE)
            )
        return cursor.rowcount == _PRUNED_AT_ONCE


def _row(transaction: TransactionId, rows: int) -> dict[str, object]:
    return {
        "transaction": str(transaction),
        "sink": transaction.sink_id,
        "attempt": transaction.attempt,
        "checkpoint": transaction.checkpoint,
        "subtask": transaction.subtask,
        "rows": rows,
    }
