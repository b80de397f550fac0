"""The two tables that onceflow keeps in a target database, and the statements on them.

onceflow_ledger   one row per transaction, written inside the transaction. It is visible if and
                  only if the transaction is committed. If the prepared transaction is gone, the
                  row tells "committed" from "rolled back"
onceflow_sinks    one row per sink id: the decision log that owns it, its newest attempt, and that
                  attempt's commit mode
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from onceflow.clients.sql.session import DuplicateKey, Session
from onceflow.clients.sql.tables import TableName
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.sinks.base.checks import FenceOwner
from onceflow.sinks.sql.dialect import Dialect

LEDGER = "onceflow_ledger"
SINKS = "onceflow_sinks"
BATCHES = "onceflow_batches"
"""The table of Spark's batch formats in the same schema: see `batch_decisions`."""
COMMIT_MODE_LENGTH_MAX = 16
_COLUMNS = "(transaction_id, sink_id, attempt, checkpoint, subtask, row_count)"
_PRUNED_AT_ONCE = 1_000
"""The approximate number of rows that one transaction deletes, so that it holds locks only
briefly."""
_PROOFS_MAX = 10_000
"""The largest number of ledger rows that are read for one sink id. The subtasks of the retained
checkpoints have fewer."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The bookkeeping tables in one schema. Each call runs in the session's transaction.

    Errors are raised as `SqlError`. A missing ledger proves nothing: it raises, too, and never
    returns False.
    """

    dialect: Dialect
    schema: str

    @property
    def ledger(self) -> str:
        """The quoted name of the ledger."""
        return self.dialect.identifier(TableName(self.schema, LEDGER))

    @property
    def sinks(self) -> str:
        """The quoted name of the table that records the owner of each sink id."""
        return self.dialect.identifier(TableName(self.schema, SINKS))

    def take_over(self, sink_id: str) -> str:
        """Return the statements that delete the ownership of `sink_id` from the database, in order.

        The ledger rows are deleted first. Another decision log counts from 1 again, and would take
        the old rows as proofs of its own transactions.
        """
        own = f"WHERE sink_id = {self._literal(sink_id)}"
        return f"DELETE FROM {self.ledger} {own}; DELETE FROM {self.sinks} {own}"

    def record(self, session: Session, transaction: TransactionId, rows: int) -> bool:
        """Write the ledger row; return False if a newer attempt has claimed the sink.

        Also return False if a prepared transaction has the same name and the server would wait for
        it.

        Raises:
            DuplicateKey: The transaction is committed.
        """
        # The fence's row is read without a lock, which a prepared transaction would keep.
        guard = self.dialect.guard_of_record(transaction)
        return (
            session.execute(
                f"INSERT INTO {self.ledger} {_COLUMNS} SELECT {self._values(transaction, rows)} "
                f"FROM {self.sinks} WHERE sink_id = {self._literal(transaction.sink_id)} "
                f"AND attempt <= {transaction.attempt}{guard}"
            )
            == 1
        )

    def record_applied(self, session: Session, transaction: TransactionId, rows: int) -> bool:
        """Write the ledger row; return False if the transaction is already committed.

        If another session is writing the same row, wait until that session's transaction ends.
        """
        return self._is_inserted(
            session,
            f"INSERT INTO {self.ledger} {_COLUMNS} VALUES ({self._values(transaction, rows)})",
        )

    def has(self, session: Session, transaction: TransactionId) -> bool:
        """Return True if the ledger proves that `transaction` is committed."""
        name = self._literal(str(transaction))
        return bool(session.query(f"SELECT 1 FROM {self.ledger} WHERE transaction_id = {name}"))

    def owner(self, session: Session, sink_id: str) -> FenceOwner | None:
        """Return the owner of the newest claim of `sink_id`, or None if it was never claimed."""
        rows = self._of_sink(session, "log_id, attempt, job", sink_id)
        if not rows:
            return None
        log_id, attempt, job = rows[0]
        return FenceOwner(str(log_id), int(attempt), str(job))

    def newest_claim(self, session: Session, sink_id: str) -> tuple[int, str, str] | None:
        """Return attempt, job and time of the newest claim of `sink_id`, to show to people."""
        rows = self._of_sink(session, "attempt, job, claimed_at", sink_id)
        return (int(rows[0][0]), str(rows[0][1]), str(rows[0][2])) if rows else None

    def owners(self, session: Session) -> dict[str, str]:
        """Return the owner of each sink id: a decision log, or Spark batches that claimed it."""
        rows = session.query(f"SELECT sink_id, log_id FROM {self.sinks} ORDER BY sink_id")
        return {str(sink_id): str(log_id) for sink_id, log_id in rows}

    def read_record(self, session: Session, sink_id: str, attempt: int) -> TargetRecord:
        """Return the transactions of `sink_id` that the ledger proves to be committed.

        `attempt` is the newest claim of `sink_id`. If the user may not prune, the ledger may hold
        more proofs than are useful. Then only the newest are read.
        """
        own = f"FROM {self.ledger} WHERE sink_id = {self._literal(sink_id)}"
        rows = session.query(f"SELECT attempt, MAX(checkpoint) {own} GROUP BY attempt")
        marks = [Decided(int(attempt), int(checkpoint)) for attempt, checkpoint in rows]
        names = session.query(
            f"SELECT transaction_id {own} ORDER BY checkpoint DESC LIMIT {_PROOFS_MAX}"
        )
        parsed = [TransactionId.parse(str(name)) for (name,) in names]
        proofs = [transaction for transaction in parsed if transaction is not None]
        if len(names) == _PROOFS_MAX:
            proofs = [
                transaction
                for transaction in proofs
                if transaction.checkpoint > proofs[-1].checkpoint
            ]
        return to_record(sink_id, attempt, marks, proofs=proofs)

    def commit_mode(self, session: Session, sink_id: str) -> str | None:
        """Return the commit mode that the newest claim recorded, or None if it recorded none."""
        rows = self._of_sink(session, "commit_mode", sink_id)
        return rows[0][0] if rows else None

    def claim(
        self, session: Session, sink_id: str, job: str, owner: FenceOwner, commit_mode: str
    ) -> bool:
        """Claim `sink_id`; return True if `owner` is now the only one that may write under it.

        Return False if another log, the same attempt or a newer attempt holds the claim: the rule
        of `sinks.fence`. Also return False if another claim of a new sink id was faster; the next
        call finds that claim's row.
        """
        sink, name, log, mode = map(self._literal, (sink_id, job, owner.log_id, commit_mode))
        updated = session.execute(
            f"UPDATE {self.sinks} SET job = {name}, attempt = {owner.attempt}, "
            f"claimed_at = CURRENT_TIMESTAMP, commit_mode = {mode} "
            f"WHERE sink_id = {sink} AND log_id = {log} AND attempt < {owner.attempt}"
        )
        # UPDATE before INSERT, because the row nearly always exists.
        return updated > 0 or self._is_inserted(
            session,
            f"INSERT INTO {self.sinks} (sink_id, job, log_id, attempt, commit_mode) "
            f"VALUES ({sink}, {name}, {log}, {owner.attempt}, {mode})",
        )

    def prune(self, session: Session, sink_id: str, before: CheckpointId) -> bool:
        """Delete proofs of checkpoints before `before`; return True if there may be more.

        All proofs of a checkpoint are deleted in one transaction. So a reader that finds some
        proofs of a checkpoint knows that no others were deleted. Proofs inside prepared
        transactions are not visible and stay. A crash that loses a deletion does no harm.
        """
        own = f"FROM {self.ledger} WHERE sink_id = {self._literal(sink_id)}"
        with session.transaction():
            for statement in self.dialect.before_pruning:
                session.execute(statement)
            counted = session.query(
                f"SELECT checkpoint, COUNT(*) {own} AND checkpoint < {int(before)}"
                f" GROUP BY checkpoint ORDER BY checkpoint LIMIT {_PRUNED_AT_ONCE}"
            )
            sizes = _take_whole({int(checkpoint): int(rows) for checkpoint, rows in counted})
            if not sizes:
                return False
            locked = session.query(
                f"SELECT transaction_id, checkpoint {own} AND checkpoint <= {max(sizes)}"
                f"{self.dialect.locks_what_is_pruned}"
            )
            # If fewer rows than counted are locked, another subtask is deleting this checkpoint's
            # rows.
            left = Counter(sizes) - Counter(int(checkpoint) for _, checkpoint in locked)
            names = [str(name) for name, checkpoint in locked if int(checkpoint) not in left]
            if names:
                # By primary key: a range over checkpoints would lock gaps into which others insert
                # (InnoDB).
                listed = ", ".join(map(self._literal, names))
                session.execute(f"DELETE FROM {self.ledger} WHERE transaction_id IN ({listed})")
        # Both the counted checkpoints and the rows of the taken checkpoints are limited.
        return bool(names) and (len(sizes) < len(counted) or len(counted) == _PRUNED_AT_ONCE)

    def _of_sink(self, session: Session, columns: str, sink_id: str) -> Sequence[tuple[Any, ...]]:
        return session.query(
            f"SELECT {columns} FROM {self.sinks} WHERE sink_id = {self._literal(sink_id)}"
        )

    def _is_inserted(self, session: Session, statement: str) -> bool:
        """Insert a row; return False if a row of the same key exists."""
        try:
            return session.execute(f"{statement}{self.dialect.unless_there}") == 1
        except DuplicateKey:
            return False

    def _values(self, transaction: TransactionId, rows: int) -> str:
        return (
            f"{self._literal(str(transaction))}, {self._literal(transaction.sink_id)}, "
            f"{transaction.attempt}, {transaction.checkpoint}, {transaction.subtask}, {rows}"
        )

    def _literal(self, value: str) -> str:
        return self.dialect.literal(value)


def _take_whole(sizes: Mapping[int, int]) -> dict[int, int]:
    """Return the first checkpoints of `sizes`, with about as many rows as one call deletes.

    The result contains at least one checkpoint, however many rows it has.
    """
    totals = accumulate(sizes.values())
    fitting = sum(total <= _PRUNED_AT_ONCE for total in totals)
    return dict(islice(sizes.items(), max(1, fitting)))
