"""Writers of one subtask: rows stream into an open transaction as they come.

two-phase       BEGIN, COPY … | end of COPY, ledger row, PREPARE TRANSACTION     at each barrier
at least once   BEGIN, COPY … | end of COPY, COMMIT           at each barrier and every so many rows
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
import pyarrow as pa
from psycopg import sql

from onceflow.core.crash_points import reach
from onceflow.core.errors import ConfigError, Fenced, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import SinkWriter, WriterContext
from onceflow.sinks.postgres.copying import CopyTransactions
from onceflow.sinks.postgres.failures import described, is_row_refused, refusal
from onceflow.sinks.postgres.settings import SinkSettings, writer_name


class CopyWriter(SinkWriter):
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
        try:
            self._transactions = CopyTransactions(settings, name, context.schema)
        except psycopg.Error as error:
            raise refusal(error, f"{self._where}: the table cannot be looked at") from error

    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch` into the open transaction. Blocks while the server is behind.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone; the transaction is rolled back.
        """
        if batch.num_rows:
            with self._or_close("rows were not written", SinkError):
                self._transactions.write(batch)

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
            if not self._transactions.rows:
                return None
            return self._end_transaction(checkpoint)

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. What is prepared stays."""
        self._closed = True
        self._transactions.close()

    @abstractmethod
    def _end_transaction(self, checkpoint: CheckpointId) -> Committable | None:
        """End the open transaction, which has rows."""

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None, None, None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        try:
            yield
        except psycopg.Error as error:
            self.close()
            text = f"{self._where}: {doing}"
            if is_row_refused(error):
                raise refusal(error, text) from error
            raise kind(f"{text}: {described(error)}") from error
        except BaseException:
            self.close()
            raise


class TwoPhaseWriter(CopyWriter):
    """Prepares at each barrier; a committer does the rest."""

    def __init__(self, settings: SinkSettings, context: WriterContext) -> None:
        """Connect, and see that the server has room for what all subtasks prepare.

        Raises:
            ConfigError: The table does not take the rows, or the server too few prepared ones.
            SinkError: The server cannot be reached now.
        """
        super().__init__(settings, context)
        maximum = self._transactions.facts.max_prepared_transactions
        # One waits for its commit while the next one is prepared.
        needed = 2 * context.parallelism
        if maximum < needed:
            self.close()
            raise ConfigError(
                f"{self._where}: max_prepared_transactions is {maximum} and parallelism "
                f"{context.parallelism} needs {needed}. Run: ALTER SYSTEM SET "
                f"max_prepared_transactions = {max(64, 2 * needed)}; then restart the server"
            )

    def _end_transaction(self, checkpoint: CheckpointId) -> Committable:
        """Steps: 1. end the COPY, 2. the ledger row, 3. prepare."""
        context = self._context
        transaction = TransactionId(
            context.sink_id, context.attempt, checkpoint, context.subtask, sequence=0
        )
        # 1.
        rows = self._transactions.finish_copy()
        # 2. Inside the transaction, so that it is visible if and only if the rows are.
        self._record(transaction, rows)
        reach("flushed")
        # 3.
        self._prepare(transaction)
        return Committable(transaction, rows)

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


class AtLeastOnceWriter(CopyWriter):
    """Commits as it goes: rows are seen at once, and again when a failure has them sent again."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch`, and commit when enough rows have come together.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone.
        """
        super().write(batch)
        if self._transactions.rows >= self._settings.flush_rows:
            with self._or_close("rows were not committed", SinkError):
                self._commit()

    def _end_transaction(self, checkpoint: CheckpointId) -> None:
        self._commit()

    def _commit(self) -> None:
        self._transactions.finish_copy()
        cursor = self._transactions.connection.execute("COMMIT")
        if cursor.statusmessage != "COMMIT":
            raise SinkError(f"{self._where}: COMMIT was answered with {cursor.statusmessage}")


def _name_in_use(where: str, transaction: TransactionId) -> str:
    return (
        f"{where}: a transaction named {transaction} is prepared already, so attempt or "
        "checkpoint numbers were used twice: by a second job under this sink id, or after the "
        "decision log was deleted. See pg_prepared_xacts, and COMMIT or ROLLBACK PREPARED "
        f"'{transaction}' there"
    )
