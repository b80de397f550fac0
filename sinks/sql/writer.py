"""Writers of one subtask whose rows wait in the database.

two-phase       begin, rows … | the last rows, ledger row, prepare           at each barrier
at least once   begin, rows … | the last rows, COMMIT     at each barrier and every so many rows

Inserts go in as they come. Changes by key go in at the barrier, all at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Generic

import pyarrow as pa
from typing_extensions import override

from onceflow.core.bad_rows import BadRows
from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import OnBadRow, RejectedRows, SinkWriter, WriterContext
from onceflow.sinks.sql.buffered import BatchedInserts, BufferedChanges
from onceflow.sinks.sql.connection import ConnectionT
from onceflow.sinks.sql.database import Database
from onceflow.sinks.sql.failures import ErrorT
from onceflow.sinks.sql.row_loader import RowLoader
from onceflow.sinks.sql.row_validator import RowValidator
from onceflow.sinks.sql.tables import FitT, TableT
from onceflow.sinks.sql.targets import Targets
from onceflow.sinks.sql.transactions import (
    PlainTransactions,
    PreparedTransactions,
    Transactions,
)


class TransactionWriter(SinkWriter, Generic[ConnectionT, ErrorT, TableT, FitT]):
    """What both writers share: any failure rolls the rows back and is the writer's end."""

    def __init__(
        self,
        database: Database[ConnectionT, ErrorT, TableT, FitT],
        context: WriterContext,
        transactions: Transactions[ConnectionT],
    ) -> None:
        """Match the rows to the table; `transactions` are connected and end with the writer.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached or asked now.
        """
        settings = database.settings
        self._database = database
        self._context = context
        self._all_transactions = transactions
        self._closed = False
        self._where = f"sink {context.sink_id} subtask {context.subtask}, table {settings.table}"
        try:
            self._loader = self._placed()
        except database.failures.errors as error:
            transactions.close()
            text = f"{self._where}: the table cannot be looked at"
            raise database.failures.refusal(error, text) from error
        except BaseException:
            transactions.close()
            raise

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch` into the open transaction, or keep it until the barrier.

        Blocks while the server is behind.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone; the transaction is rolled back.
        """
        if batch.num_rows:
            with self._or_close("rows were not written", SinkError):
                self._loader.write(batch)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        """End the transaction that holds the rows since the last call; None when there are none.

        Raises:
            BadRow: A constraint, found only now, refuses a row.
            PreCommitFailed: The attempt must end. Nothing of this checkpoint is durable, or, when
                the connection was lost while the server worked, it is prepared under a name that
                no decision lists, and will be rolled back.
        """
        doing = f"checkpoint {checkpoint} was not pre-committed"
        with self._or_close(doing, PreCommitFailed):
            if not self._loader.rows:
                # Open all the same if rows were sent and every one was refused. Its name may be
                # that of this checkpoint, and the next one's rows must not go in under it.
                self._all_transactions.roll_back()
                return None
            return self._end_transaction(checkpoint)

    @override
    def rejected(self) -> Sequence[RejectedRows]:
        """Return the rows left out since the last call, by us or by the server."""
        return self._loader.rejected()

    @override
    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. What is prepared stays."""
        self._closed = True
        self._loader.close()
        self._all_transactions.close()

    @abstractmethod
    def _end_transaction(self, checkpoint: CheckpointId) -> Committable | None:
        """End the open transaction, which has rows."""

    def _placed(self) -> RowLoader:
        """Return how rows go in: streamed when they are inserts into one table and none is bad."""
        database, context = self._database, self._context
        settings, transactions = database.settings, self._all_transactions
        rules = settings.rules
        targets = Targets(database.tables, context.schema, lambda: transactions.connection)
        target = targets.named(settings.table)
        fails = context.on_bad_row is OnBadRow.FAIL and not settings.null_overflow
        if fails and not rules.changes_in_place and rules.table_column is None:
            return database.streamed(transactions, target)
        bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)
        validator = RowValidator(settings, targets.named, bad_rows)
        executor = database.executor(transactions.connection, rules.mode, rules.primary_key)
        failures = database.failures
        if rules.changes_in_place:
            return BufferedChanges(transactions, validator, rules, executor, failures, bad_rows)
        return BatchedInserts(transactions, validator, executor, failures, bad_rows)

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None, None, None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        failures = self._database.failures
        text = f"{self._where}: {doing}"
        try:
            yield
        except failures.errors as error:
            self.close()
            if failures.is_row_refused(error):
                raise failures.refusal(error, text) from error
            raise kind(f"{text}: {failures.described(error)}{self._advice(error)}") from error
        except SinkError as error:
            self.close()
            if type(error) is SinkError:
                raise kind(f"{text}: {error}") from error
            raise
        except BaseException:
            self.close()
            raise

    def _advice(self, error: ErrorT) -> str:
        """Say who holds the rows that were waited for in vain."""
        database = self._database
        if not database.failures.is_lock_timeout(error):
            return ""
        waited = (
            f". Rows were locked by another transaction for {database.settings.lock_timeout_s:g} s"
        )
        try:
            connection = database.settings.endpoint.connect("onceflow looks for locks")
            try:
                found = database.prepared(connection, self._context.sink_id)
            finally:
                connection.close()
        except (database.failures.errors, SinkError, ConfigError):
            return waited
        if not found:
            return f"{waited}; see {database.lists_locks} for whose"
        return (
            f"{waited}: prepared and not yet committed by this sink are "
            f"{', '.join(map(str, found[:4]))}, whose commit lets the next checkpoint go on; is "
            "the committer behind? A longer lock_timeout_s waits longer"
        )


class TwoPhaseWriter(TransactionWriter[ConnectionT, ErrorT, TableT, FitT]):
    """Prepares at each barrier; a committer does the rest."""

    def __init__(
        self,
        database: Database[ConnectionT, ErrorT, TableT, FitT],
        context: WriterContext,
        transactions: PreparedTransactions[ConnectionT],
    ) -> None:
        """Match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached or asked now.
        """
        self._transactions = transactions
        super().__init__(database, context, transactions)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        self._transactions.expect(checkpoint)
        committable = super().pre_commit(checkpoint)
        self._transactions.expect(CheckpointId(checkpoint + 1))
        return committable

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> Committable | None:
        """Steps: 1. the last rows, 2. the ledger row, 3. prepare."""
        # 1.
        rows = self._loader.finish()
        if not rows:
            # All of them were rejected.
            self._transactions.roll_back()
            return None
        transaction = self._transactions.transaction
        # 2. Inside the transaction, so that it is visible if and only if the rows are.
        self._record(transaction, rows)
        reach("flushed")
        # 3.
        self._transactions.prepare()
        return Committable(transaction, rows)

    def _record(self, transaction: TransactionId, rows: int) -> None:
        connection, failures = self._transactions.connection, self._database.failures
        ledger = self._database.settings.ledger
        try:
            recorded = ledger.record(connection, transaction, rows)
        except failures.errors as error:
            if not failures.is_duplicate_key(error):
                raise
            raise PreCommitFailed(
                f"{self._where}: transaction {transaction} was committed before: the ledger has "
                "it. Attempt or checkpoint numbers were used twice; was the decision log deleted?"
            ) from error
        if recorded:
            return
        owner = ledger.owner(connection, transaction.sink_id)
        if owner is None:
            raise PreCommitFailed(
                f"{self._where}: sink id {transaction.sink_id!r} is not in {ledger.sinks_shown}: "
                "it was not checked before this attempt, or somebody deleted its row"
            )
        if owner.attempt > transaction.attempt:
            raise Fenced(
                f"{self._where}: attempt {owner.attempt} has claimed the sink; attempt "
                f"{transaction.attempt} stops and prepares nothing more"
            )
        raise PreCommitFailed(f"{self._where}: {self._transactions.name_in_use(transaction)}")


class AtLeastOnceWriter(TransactionWriter[ConnectionT, ErrorT, TableT, FitT]):
    """Commits as it goes: rows are seen at once, and again when a failure has them sent again."""

    def __init__(
        self,
        database: Database[ConnectionT, ErrorT, TableT, FitT],
        context: WriterContext,
        transactions: PlainTransactions[ConnectionT],
    ) -> None:
        """Match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached or asked now.
        """
        self._transactions = transactions
        super().__init__(database, context, transactions)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch`, and commit when enough rows have come together.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone.
        """
        super().write(batch)
        if self._loader.rows >= self._database.settings.flush_rows:
            with self._or_close("rows were not committed", SinkError):
                self._commit()

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> None:
        self._commit()

    def _commit(self) -> None:
        self._loader.finish()
        answer = self._transactions.commit()
        if answer != "COMMIT":
            raise SinkError(f"COMMIT was answered with {answer}")
