"""Writers of one subtask whose rows wait in the database.

two-phase       begin, rows … | the last rows, ledger row, prepare           at each barrier
at least once   begin, rows … | the last rows, COMMIT     at each barrier and every so many rows

Inserts go in as they come. Changes by key go in at the barrier, all at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from typing_extensions import override

from onceflow.core.bad_rows import BadRows
from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import OnBadRow, RejectedRows, SinkWriter, WriterContext
from onceflow.sinks.sql.buffered import BatchedInserts, BufferedChanges
from onceflow.sinks.sql.errors import DuplicateKey, LockTimeout, RowRefused, SqlError, refusal
from onceflow.sinks.sql.row_loader import RowLoader
from onceflow.sinks.sql.row_validator import RowValidator
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.table_resolver import TableResolver
from onceflow.sinks.sql.transactions import (
    PlainTransactions,
    PreparedTransactions,
    Transactions,
)


class TransactionWriter(SinkWriter):
    """What both writers share: any failure rolls the rows back and is the writer's end."""

    def __init__(
        self,
        settings: SqlSettings,
        context: WriterContext,
        transactions: Transactions,
    ) -> None:
        """Match the rows to the table; `transactions` are connected and end with the writer.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached or asked now.
        """
        self._settings = settings
        self._context = context
        self._all_transactions = transactions
        self._closed = False
        self._where = f"sink {context.sink_id} subtask {context.subtask}, table {settings.table}"
        try:
            self._loader = self._placed()
        except SqlError as error:
            transactions.close()
            raise refusal(error, f"{self._where}: the table cannot be looked at") from error
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
        settings, context = self._settings, self._context
        dialect, transactions = settings.dialect, self._all_transactions
        rules = settings.rules
        tables = TableResolver(settings, context.schema, lambda: transactions.session)
        target = tables.named(settings.table)
        fails = context.on_bad_row is OnBadRow.FAIL and not settings.null_overflow
        if fails and not rules.changes_in_place and rules.table_column is None:
            return dialect.streamed(transactions, target)
        bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)
        validator = RowValidator(settings, tables.named, bad_rows)
        executor = dialect.executor(transactions.session, rules.mode, rules.primary_key)
        if rules.changes_in_place:
            return BufferedChanges(transactions, validator, rules, executor, bad_rows)
        return BatchedInserts(transactions, validator, executor, bad_rows)

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None, None, None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        text = f"{self._where}: {doing}"
        try:
            yield
        except RowRefused as error:
            self.close()
            raise refusal(error, text) from error
        except SqlError as error:
            self.close()
            raise kind(f"{text}: {error}{self._advice(error)}") from error
        except SinkError as error:
            self.close()
            if type(error) is SinkError:
                raise kind(f"{text}: {error}") from error
            raise
        except BaseException:
            self.close()
            raise

    def _advice(self, error: SqlError) -> str:
        """Say who holds the rows that were waited for in vain."""
        settings = self._settings
        if not isinstance(error, LockTimeout):
            return ""
        waited = f". Rows were locked by another transaction for {settings.lock_timeout_s:g} s"
        try:
            with settings.endpoint.connect("onceflow looks for locks") as session:
                two_phase = settings.two_phase
                found = two_phase.listed(session, self._context.sink_id) if two_phase else ()
        except (SqlError, SinkError, ConfigError):
            return waited
        if not found:
            return f"{waited}; see {settings.dialect.lists_locks} for whose"
        return (
            f"{waited}: prepared and not yet committed by this sink are "
            f"{', '.join(map(str, found[:4]))}, whose commit lets the next checkpoint go on; is "
            "the committer behind? A longer lock_timeout_s waits longer"
        )


class TwoPhaseWriter(TransactionWriter):
    """Prepares at each barrier; a committer does the rest."""

    def __init__(
        self,
        settings: SqlSettings,
        context: WriterContext,
        transactions: PreparedTransactions,
    ) -> None:
        """Match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached or asked now.
        """
        self._transactions = transactions
        super().__init__(settings, context, transactions)

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
        session, ledger = self._transactions.session, self._settings.ledger
        try:
            recorded = ledger.record(session, transaction, rows)
        except DuplicateKey as error:
            raise PreCommitFailed(
                f"{self._where}: transaction {transaction} was committed before: the ledger has "
                "it. Attempt or checkpoint numbers were used twice; was the decision log deleted?"
            ) from error
        if recorded:
            return
        owner = ledger.owner(session, transaction.sink_id)
        if owner is None:
            raise PreCommitFailed(
                f"{self._where}: sink id {transaction.sink_id!r} is not in {ledger.sinks}: "
                "it was not checked before this attempt, or somebody deleted its row"
            )
        if owner.attempt > transaction.attempt:
            raise Fenced(
                f"{self._where}: attempt {owner.attempt} has claimed the sink; attempt "
                f"{transaction.attempt} stops and prepares nothing more"
            )
        raise PreCommitFailed(f"{self._where}: {self._transactions.name_in_use(transaction)}")


class AtLeastOnceWriter(TransactionWriter):
    """Commits as it goes: rows are seen at once, and again when a failure has them sent again."""

    def __init__(
        self,
        settings: SqlSettings,
        context: WriterContext,
        transactions: PlainTransactions,
    ) -> None:
        """Match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached or asked now.
        """
        self._transactions = transactions
        super().__init__(settings, context, transactions)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch`, and commit when enough rows have come together.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone.
        """
        super().write(batch)
        if self._loader.rows >= self._settings.flush_rows:
            with self._or_close("rows were not committed", SinkError):
                self._commit()

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> None:
        self._commit()

    def _commit(self) -> None:
        self._loader.finish()
        self._transactions.commit()
