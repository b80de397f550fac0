"""The statements on onceflow's own two tables in a MySQL or MariaDB."""

from __future__ import annotations

from dataclasses import dataclass

from pymysql.err import MySQLError

from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.fence import FenceOwner
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.failures import DUPLICATE_KEY, code
from onceflow.sinks.mysql.names import literal, quoted
from onceflow.sinks.sql.bookkeeping import LEDGER, SINKS

_PRUNED_AT_ONCE = 1_000
_COLUMNS = "(transaction_id, sink_id, attempt, checkpoint, subtask, row_count)"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bookkeeping tables in one database. Every call runs in the session's transaction."""

    database: str

    @property
    def ledger(self) -> str:
        """The ledger's name, quoted."""
        return f"{quoted(self.database)}.{quoted(LEDGER)}"

    @property
    def sinks(self) -> str:
        """The fence's name, quoted."""
        return f"{quoted(self.database)}.{quoted(SINKS)}"

    @property
    def sinks_shown(self) -> str:
        """The fence's name as text."""
        return self.sinks

    def take_over(self, sink_id: str) -> str:
        """Return the statement by which an operator hands `sink_id` to another job."""
        return f"DELETE FROM {self.sinks} WHERE sink_id = {literal(sink_id)}"

    def record(self, session: Session, transaction: TransactionId, rows: int) -> bool:
        """Return whether the ledger row is written; not when a newer attempt has the sink.

        Raises:
            MySQLError: The transaction is committed (duplicate key), or the server refused.
        """
        # READ COMMITTED: the fence's row is read without a lock that a prepared one would keep.
        reply = session.execute(
            f"INSERT INTO {self.ledger} {_COLUMNS} SELECT {_values(transaction, rows)} "
            f"FROM {self.sinks} WHERE sink_id = {literal(transaction.sink_id)} "
            f"AND attempt <= {transaction.attempt}"
        )
        return reply.rows == 1

    def record_applied(self, session: Session, transaction: TransactionId, rows: int) -> bool:
        """Return whether the ledger row is written; not when the transaction is committed.

        Waits for another session that is writing it, and then knows how that one ended.
        """
        try:
            session.execute(
                f"INSERT INTO {self.ledger} {_COLUMNS} VALUES ({_values(transaction, rows)})"
            )
        except MySQLError as error:
            if code(error) == DUPLICATE_KEY:
                return False
            raise
        return True

    def has(self, session: Session, transaction: TransactionId) -> bool:
        """Return whether the ledger proves that `transaction` is committed.

        A ledger that is missing proves nothing, so that is PyMySQL's error and not False.
        """
        return bool(
            session.query(
                f"SELECT 1 FROM {self.ledger} WHERE transaction_id = {literal(str(transaction))}"
            )
        )

    def prepared_at_s(self, session: Session, transaction: TransactionId) -> float | None:
        """Return when the row was written, also while it is not committed, in seconds from 1970."""
        session.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
        found = session.query(
            f"SELECT UNIX_TIMESTAMP(prepared_at) FROM {self.ledger} "
            f"WHERE transaction_id = {literal(str(transaction))}"
        )
        return float(found[0][0]) if found else None

    def owner(self, session: Session, sink_id: str) -> FenceOwner | None:
        """Return who claimed `sink_id` last."""
        found = session.query(
            f"SELECT log_id, attempt FROM {self.sinks} WHERE sink_id = {literal(sink_id)}"
        )
        return FenceOwner(str(found[0][0]), int(found[0][1])) if found else None

    def commit_mode(self, session: Session, sink_id: str) -> str | None:
        """Return the commit mode that the last claim chose; None when it recorded none."""
        found = session.query(
            f"SELECT commit_mode FROM {self.sinks} WHERE sink_id = {literal(sink_id)}"
        )
        return found[0][0] if found else None

    def claim(
        self, session: Session, sink_id: str, job: str, owner: FenceOwner, commit_mode: str
    ) -> bool:
        """Return whether `owner` is now the only one who may write under `sink_id`.

        Not when another log, the same attempt or a newer one has it: the rule of `sql.fence`. Nor
        when another claim of a new sink id was quicker; the next call knows by that one's row.
        """
        updated = session.execute(
            f"UPDATE {self.sinks} SET job = {literal(job)}, attempt = {owner.attempt}, "
            f"claimed_at = now(), commit_mode = {literal(commit_mode)} "
            f"WHERE sink_id = {literal(sink_id)} AND log_id = {literal(owner.log_id)} "
            f"AND attempt < {owner.attempt}"
        )
        if updated.rows:
            return True
        try:
            session.execute(
                f"INSERT INTO {self.sinks} (sink_id, job, log_id, attempt, commit_mode) VALUES "
                f"({literal(sink_id)}, {literal(job)}, {literal(owner.log_id)}, {owner.attempt}, "
                f"{literal(commit_mode)})"
            )
        except MySQLError as error:
            if code(error) == DUPLICATE_KEY:
                return False
            raise
        return True

    def prune(self, session: Session, sink_id: str, before: CheckpointId) -> bool:
        """Delete committed rows of checkpoints before `before`, a bounded number.

        Rows of prepared transactions are not seen, and stay: waiting for them would be in vain.
        Returns whether more may be left.
        """
        found = session.query(
            f"SELECT transaction_id FROM {self.ledger} WHERE sink_id = {literal(sink_id)} "
            f"AND checkpoint < {int(before)} LIMIT {_PRUNED_AT_ONCE}"
        )
        if found:
            names = ", ".join(literal(str(name)) for (name,) in found)
            session.execute(f"DELETE FROM {self.ledger} WHERE transaction_id IN ({names})")
        return len(found) == _PRUNED_AT_ONCE


def _values(transaction: TransactionId, rows: int) -> str:
    return (
        f"{literal(str(transaction))}, {literal(transaction.sink_id)}, {transaction.attempt}, "
        f"{transaction.checkpoint}, {transaction.subtask}, {rows}"
    )
