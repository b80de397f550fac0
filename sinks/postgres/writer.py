"""Writers of one subtask whose rows wait in the database.

two-phase       BEGIN, rows … | the last rows, ledger row, PREPARE TRANSACTION   at each barrier
at least once   BEGIN, rows … | the last rows, COMMIT         at each barrier and every so many rows

Inserts go in as they come. Changes by key go in at the barrier, all at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import psycopg
import pyarrow as pa
from psycopg import sql
from typing_extensions import override

from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import OnBadRow, RejectedRows, SinkWriter, WriterContext
from onceflow.sinks.postgres.catalog import prepared_transactions, server_facts
from onceflow.sinks.postgres.copying import StreamedInserts
from onceflow.sinks.postgres.database import PostgresDatabase
from onceflow.sinks.postgres.failures import FAILURES, described
from onceflow.sinks.postgres.settings import SinkSettings, writer_name
from onceflow.sinks.postgres.transactions import Transactions
from onceflow.sinks.sql import BadRows, Intake, Targets
from onceflow.sinks.sql.buffered import BatchedInserts, BufferedChanges
from onceflow.sinks.sql.placement import Placement


class TransactionWriter(SinkWriter):
    """What both writers share: any failure rolls the rows back and is the writer's end."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect and match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows.
            SinkError: The server cannot be reached now.
        """
        self._settings = settings
        self._context = context
        self._closed = False
        self._where = f"sink {context.sink_id} subtask {context.subtask}, table {settings.table}"
        name = writer_name(context.sink_id, context.attempt, context.subtask)
        self._transactions = Transactions(settings, name)
        try:
            self._placement = self._placed()
        except psycopg.Error as error:
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
        database, transactions = PostgresDatabase(settings), self._transactions
        targets = Targets(database.tables, context.schema, lambda: transactions.connection)
        target = targets.named(settings.table)
        fails = context.on_bad_row is OnBadRow.FAIL and not settings.null_overflow
        if fails and not rules.changes_in_place and rules.table_column is None:
            return StreamedInserts(transactions, target)
        bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)
        intake = Intake(settings, targets.named, bad_rows)
        applier = database.applier(transactions.connection, rules.mode, rules.primary_key)
        if rules.changes_in_place:
            return BufferedChanges(transactions, intake, rules, applier, FAILURES, bad_rows)
        return BatchedInserts(transactions, intake, applier, FAILURES, bad_rows)

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None, None, None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        try:
            yield
        except psycopg.Error as error:
            self.close()
            text = f"{self._where}: {doing}"
            if FAILURES.is_row_refused(error):
                raise FAILURES.refusal(error, text) from error
            raise kind(f"{text}: {described(error)}{self._advice(error)}") from error
        except BaseException:
            self.close()
            raise

    def _advice(self, error: psycopg.Error) -> str:
        """Say who holds the rows that were waited for in vain."""
        if not isinstance(error, psycopg.errors.LockNotAvailable):
            return ""
        waited = (
            f". Rows were locked by another transaction for {self._settings.lock_timeout_s:g} s"
        )
        try:
            with self._settings.endpoint.connect("onceflow looks for locks") as connection:
                found = prepared_transactions(connection, self._context.sink_id)
        except (psycopg.Error, SinkError, ConfigError):
            return waited
        if not found:
            return f"{waited}; see pg_locks and pg_stat_activity for whose"
        return (
            f"{waited}: prepared and not yet committed by this sink are "
            f"{', '.join(map(str, found[:4]))}, whose commit lets the next checkpoint go on; is "
            "the committer behind? A longer lock_timeout_s waits longer"
        )


class TwoPhaseWriter(TransactionWriter):
    """Prepares at each barrier; a committer does the rest."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect, and see that the server has room for what all subtasks prepare.

        Raises:
            ConfigError: The table does not take the rows, or the server too few prepared ones.
            SinkError: The server cannot be reached now.
        """
        super().__init__(settings, context)
        with self._or_close("the server was not asked", SinkError):
            maximum = server_facts(self._transactions.connection).max_prepared_transactions
            # One waits for its commit while the next one is prepared.
            needed = 2 * context.parallelism
            if maximum < needed:
                raise ConfigError(
                    f"{self._where}: max_prepared_transactions is {maximum} and parallelism "
                    f"{context.parallelism} needs {needed}. Run: ALTER SYSTEM SET "
                    f"max_prepared_transactions = {max(64, 2 * needed)}; then restart the server; "
                    "or pass commit_mode='ledger'"
                )

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> Committable | None:
        """Steps: 1. the last rows, 2. the ledger row, 3. prepare."""
        context = self._context
        transaction = TransactionId(
            context.sink_id, context.attempt, checkpoint, context.subtask, sequence=0
        )
        # 1.
        rows = self._placement.finish()
        if not rows:
            self._roll_back()
            return None
        # 2. Inside the transaction, so that it is visible if and only if the rows are.
        self._record(transaction, rows)
        reach("flushed")
        # 3.
        self._prepare(transaction)
        self._transactions.ended()
        return Committable(transaction, rows)

    def _roll_back(self) -> None:
        """End a transaction all of whose rows were rejected."""
        self._transactions.connection.execute("ROLLBACK")
        self._transactions.ended()

    def _record(self, transaction: TransactionId, rows: int) -> None:
        connection = self._transactions.connection
        ledger = self._settings.ledger
        try:
            recorded = ledger.record(connection, transaction, rows)
        except psycopg.errors.UniqueViolation as error:
            raise PreCommitFailed(
                f"{self._where}: transaction {transaction} was committed before: the ledger has "
                "it. Attempt or checkpoint numbers were used twice; was the decision log deleted?"
            ) from error
        if recorded:
            return
        owner = ledger.owner(connection, transaction.sink_id)
        if owner is None:
            raise PreCommitFailed(
                f"{self._where}: sink id {transaction.sink_id!r} is not in "
                f"{ledger.sinks.as_string(connection)}: it was not checked before this attempt, or "
                "somebody deleted its row"
            )
        if owner.attempt > transaction.attempt:
            raise Fenced(
                f"{self._where}: attempt {owner.attempt} has claimed the sink; attempt "
                f"{transaction.attempt} stops and prepares nothing more"
            )
        raise PreCommitFailed(_name_in_use(self._where, transaction))

    def _prepare(self, transaction: TransactionId) -> None:
        statement = sql.SQL("PREPARE TRANSACTION {}").format(sql.Literal(str(transaction)))
        try:
            cursor = self._transactions.connection.execute(statement)
        except psycopg.errors.DuplicateObject as error:
            raise PreCommitFailed(_name_in_use(self._where, transaction)) from error
        # In a failed transaction the server answers ROLLBACK, and no error.
        if cursor.statusmessage != "PREPARE TRANSACTION":
            raise PreCommitFailed(
                f"{self._where}: PREPARE TRANSACTION '{transaction}' was answered with "
                f"{cursor.statusmessage}: the transaction had failed and is rolled back"
            )


class AtLeastOnceWriter(TransactionWriter):
    """Commits as it goes: rows are seen at once, and again when a failure has them sent again."""

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
        cursor = self._transactions.connection.execute("COMMIT")
        self._transactions.ended()
        if cursor.statusmessage != "COMMIT":
            raise SinkError(f"{self._where}: COMMIT was answered with {cursor.statusmessage}")


def _name_in_use(where: str, transaction: TransactionId) -> str:
    return (
        f"{where}: a transaction named {transaction} is prepared already, so attempt or "
        "checkpoint numbers were used twice: by a second job under this sink id, or after the "
        "decision log was deleted. See pg_prepared_xacts, and COMMIT or ROLLBACK PREPARED "
        f"'{transaction}' there"
    )
