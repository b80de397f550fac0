"""Writers of one subtask whose rows wait in the database.

two-phase       XA START, rows … | the last rows, ledger row, XA END, XA PREPARE    at each barrier
at least once   START, rows …    | the last rows, COMMIT      at each barrier and every so many rows

Inserts go in as they come. Changes by key go in at the barrier, all at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import OnBadRow, RejectedRows, SinkWriter, WriterContext
from onceflow.sinks.mysql.catalog import prepared_transactions
from onceflow.sinks.mysql.connection import reply_missing
from onceflow.sinks.mysql.database import MySQLDatabase
from onceflow.sinks.mysql.failures import (
    DUPLICATE_KEY,
    LOCK_WAIT_TIMEOUT,
    code,
)
from onceflow.sinks.mysql.refusals import FAILURES
from onceflow.sinks.mysql.sending import RowSender
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.mysql.streaming import StreamedInserts
from onceflow.sinks.mysql.transactions import PlainTransactions, Transactions, XaTransactions
from onceflow.sinks.sql import BadRows, Intake, Targets
from onceflow.sinks.sql.buffered import BatchedInserts, BufferedChanges
from onceflow.sinks.sql.placement import Placement


class TransactionWriter(SinkWriter):
    """What both writers share: any failure rolls the rows back and is the writer's end."""

    def __init__(
        self, settings: SinkSettings, context: WriterContext, transactions: Transactions
    ) -> None:
        """Match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached now.
        """
        self._settings = settings
        self._context = context
        self._closed = False
        self._where = f"sink {context.sink_id} subtask {context.subtask}, table {settings.table}"
        self._transactions: Transactions = transactions
        try:
            self._placement = self._placed()
        except MySQLError as error:
            self._transactions.close()
            raise FAILURES.refusal(
                error, f"{self._where}: the table cannot be looked at"
            ) from error
        except BaseException:
            self._transactions.close()
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
                self._placement.write(batch)

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
            if not self._placement.rows:
                return None
            return self._end_transaction(checkpoint)

    @override
    def rejected(self) -> Sequence[RejectedRows]:
        """Return the rows left out since the last call, by us or by the server."""
        return self._placement.rejected()

    @override
    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. What is prepared stays."""
        self._closed = True
        self._placement.close()
        self._transactions.close()

    @abstractmethod
    def _end_transaction(self, checkpoint: CheckpointId) -> Committable | None:
        """End the open transaction, which has rows."""

    def _placed(self) -> Placement:
        """Return how rows go in: streamed when they are inserts into one table and none is bad."""
        settings, context, rules = self._settings, self._context, self._settings.rules
        transactions = self._transactions
        database = MySQLDatabase(settings)
        targets = Targets(database.tables, context.schema, lambda: transactions.session)
        target = targets.named(settings.table)
        fails = context.on_bad_row is OnBadRow.FAIL and not settings.null_overflow
        if fails and not rules.changes_in_place and rules.table_column is None:
            sender = RowSender(target, local_infile=database.loads(transactions.session))
            return StreamedInserts(transactions, target, sender)
        bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)
        intake = Intake(settings, targets.named, bad_rows)
        applier = database.applier(transactions.session, rules.mode, rules.primary_key)
        if rules.changes_in_place:
            return BufferedChanges(transactions, intake, rules, applier, FAILURES, bad_rows)
        return BatchedInserts(transactions, intake, applier, FAILURES, bad_rows)

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None, None, None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        session = self._transactions.session
        try:
            yield
        except MySQLError as error:
            self.close()
            text = f"{self._where}: {doing}"
            if FAILURES.is_row_refused(error):
                raise FAILURES.refusal(error, text) from error
            raise kind(f"{text}: {reply_missing(session, error)}{self._advice(error)}") from error
        except SinkError as error:
            self.close()
            if type(error) is SinkError:
                raise kind(f"{self._where}: {doing}: {error}") from error
            raise
        except BaseException:
            self.close()
            raise

    def _advice(self, error: MySQLError) -> str:
        """Say who holds the rows that were waited for in vain."""
        if code(error) != LOCK_WAIT_TIMEOUT:
            return ""
        waited = (
            ". Rows were locked by another transaction for "
            f"{self._settings.endpoint.lock_timeout_s:g} s"
        )
        try:
            with self._settings.endpoint.connect("onceflow looks for locks") as session:
                found = prepared_transactions(session, self._settings.names, self._context.sink_id)
        except (MySQLError, SinkError, ConfigError):
            return waited
        if not found:
            return f"{waited}; see information_schema.innodb_trx and XA RECOVER for whose"
        return (
            f"{waited}: prepared and not yet committed by this sink are "
            f"{', '.join(map(str, found[:4]))}, whose commit lets the next checkpoint go on; is "
            "the committer behind? A longer lock_timeout_s waits longer"
        )


class TwoPhaseWriter(TransactionWriter):
    """Prepares at each barrier; a committer does the rest."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect and match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached now.
        """
        self._xa = XaTransactions(settings, context)
        super().__init__(settings, context, self._xa)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        self._xa.expect(checkpoint)
        committable = super().pre_commit(checkpoint)
        self._xa.expect(CheckpointId(checkpoint + 1))
        return committable

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> Committable | None:
        """Steps: 1. the last rows, 2. the ledger row, 3. prepare."""
        # 1.
        rows = self._placement.finish()
        if not rows:
            self._xa.roll_back()
            return None
        transaction = self._xa.transaction
        # 2. Inside the transaction, so that it is visible if and only if the rows are.
        self._record(transaction, rows)
        reach("flushed")
        # 3.
        self._xa.prepare()
        return Committable(transaction, rows)

    def _record(self, transaction: TransactionId, rows: int) -> None:
        session, ledger = self._xa.session, self._settings.ledger
        try:
            recorded = ledger.record(session, transaction, rows)
        except MySQLError as error:
            if code(error) != DUPLICATE_KEY:
                raise
            raise PreCommitFailed(
                f"{self._where}: transaction {transaction} was committed before: the ledger has "
                "it. Attempt or checkpoint numbers were used twice; was the decision log deleted?"
            ) from error
        if recorded:
            return
        owner = ledger.owner(session, transaction.sink_id)
        if owner is None or owner.attempt <= transaction.attempt:
            raise PreCommitFailed(
                f"{self._where}: sink id {transaction.sink_id!r} is not in {ledger.sinks}: it was "
                "not checked before this attempt, or somebody deleted its row"
            )
        raise Fenced(
            f"{self._where}: attempt {owner.attempt} has claimed the sink; attempt "
            f"{transaction.attempt} stops and prepares nothing more"
        )


class AtLeastOnceWriter(TransactionWriter):
    """Commits as it goes: rows are seen at once, and again when a failure has them sent again."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect and match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached now.
        """
        self._plain = PlainTransactions(settings, context)
        super().__init__(settings, context, self._plain)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch`, and commit when enough rows have come together.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone.
        """
        super().write(batch)
        if self._placement.rows >= self._settings.flush_rows:
            with self._or_close("rows were not committed", SinkError):
                self._commit()

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> None:
        self._commit()

    def _commit(self) -> None:
        self._placement.finish()
        self._plain.commit()
