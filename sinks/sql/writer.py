"""The writers of one subtask: they write rows between two barriers and pre-commit at the barrier.

    two-phase       begin, rows … | the last rows, ledger row, prepare    at each barrier
    at least once   begin, rows … | the last rows, COMMIT                 at each barrier, and after
                                                                          `flush_rows` rows
    ledger          rows → checkpoint storage                             at each barrier

Inserts are sent as they arrive. Changes by key are sent all at once at the barrier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sql.session import (
    DuplicateKey,
    LockTimeout,
    RowRefused,
    Session,
    SqlError,
    StatementInvalid,
    TableMissing,
    refusal,
)
from onceflow.clients.sql.tables import TableName, Target
from onceflow.core import errors
from onceflow.core.crash_points import reach
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.staging import RowStager, require_staging
from onceflow.sinks.sql import row_loader, table_resolver
from onceflow.sinks.sql.row_validator import RowValidator
from onceflow.sinks.sql.settings import STAGED, SqlSettings
from onceflow.sinks.sql.transactions import (
    PlainTransactions,
    PreparedTransactions,
    Transactions,
)

TransactionsT = TypeVar("TransactionsT", bound=Transactions)

_HOLDERS_MAX = 4
"""The number of lock holders that an error names."""


class SqlWriter(SinkWriter):
    """The base of all writers: it validates and loads rows, and closes itself on any failure."""

    def __init__(self, settings: SqlSettings, context: WriterContext) -> None:
        """Match the rows to the table, on the writer's session.

        Raises:
            ConfigError: The table does not accept the rows.
            SinkError: The server cannot be reached or asked now.
        """
        self._settings = settings
        self._context = context
        self._closed = False
        self._where = f"sink {context.sink_id} subtask {context.subtask}, table {settings.table}"
        self._bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)
        self._written: dict[TableName, Target] = {}
        """The tables of the rows that were written since the last transaction ended."""
        tables = table_resolver.TableResolver(settings, context.schema, self._open_session)
        self._validator = RowValidator(settings, tables.ensure_target, self._bad_rows)
        try:
            self._loader = self._new_loader(tables.ensure_target(settings.table))
        except SqlError as error:
            self._release()
            raise refusal(error, f"{self._where}: the table cannot be looked at") from error
        except BaseException:
            self._release()
            raise

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Convert `batch`, and send it into the open transaction or keep it until the barrier.

        Blocks while the server is slower than the rows arrive.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone; the transaction is rolled back.
        """
        if batch.num_rows:
            with self._or_close("rows were not written", errors.SinkError):
                try:
                    for part in self._validator.take(batch):
                        self._written[part.target.name] = part.target
                        self._loader.load(part)
                except errors.BadRow:
                    self._require_same_columns()
                    raise

    @override
    def take_rejected(self) -> Sequence[RejectedRows]:
        """Return the rows that the writer or the server refused since the last call."""
        return self._bad_rows.take()

    @override
    def close(self) -> None:
        """Abandon unfinished work. Prepared transactions and staged rows stay."""
        self._closed = True
        self._loader.close()
        self._release()

    def _require_same_columns(self) -> None:
        """Raise TableAltered if columns that refused rows have changed since."""
        refusing = self._validator.take_refusing()
        if refusing:
            table_resolver.require_same_columns(self._settings, refusing)

    @abstractmethod
    def _new_loader(self, target: Target) -> row_loader.RowLoader:
        """Return the loader of rows; `target` is the table of rows that do not name one."""

    @abstractmethod
    def _open_session(self) -> Session:
        """Return the session on which table descriptions are read."""

    @abstractmethod
    def _release(self) -> None:
        """Disconnect, so that the server rolls back an open transaction. May be called twice."""

    @contextmanager
    def _or_close(self, doing: str, kind: type[errors.SinkError]) -> Generator[None, None, None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        text = f"{self._where}: {doing}"
        try:
            yield
        except (RowRefused, StatementInvalid, TableMissing) as error:
            self.close()
            raise refusal(error, text) from error
        except SqlError as error:
            self.close()
            raise kind(f"{text}: {error}{self._advice(error)}") from error
        except errors.StorageError as error:
            self.close()
            raise kind(f"{text}: {error}") from error
        except errors.SinkError as error:
            self.close()
            # A more specific class already says what to do, so it is passed on unchanged.
            if type(error) is errors.SinkError:
                raise kind(f"{text}: {error}") from error
            raise
        except BaseException:
            self.close()
            raise

    def _advice(self, error: SqlError) -> str:
        """Describe the holders of the locks that the writer waited for in vain.

        Empty for other errors.
        """
        settings = self._settings
        if not isinstance(error, LockTimeout):
            return ""
        waited = (
            f". Rows, or the table, were locked by another transaction for"
            f" {settings.lock_timeout_s:g} s"
        )
        prepared: Sequence[TransactionId] = ()
        holders: Sequence[str] = ()
        try:
            # A new session: the writer's own is closed by now.
            with settings.endpoint.connect("onceflow looks for locks") as session:
                two_phase = settings.two_phase
                prepared = (
                    two_phase.list_prepared(session, self._context.sink_id) if two_phase else ()
                )
                holders = settings.dialect.lock_holders(
                    session, settings.table, self._context, _HOLDERS_MAX
                )
        # The advice is an addition: if it fails, the original error must still be raised.
        except (SqlError, errors.SinkError, errors.ConfigError):
            pass
        others = [holder for holder in holders if not any(str(own) in holder for own in prepared)]
        if not prepared and not others:
            return f"{waited}; see {settings.dialect.lists_locks} for whose"
        if others:
            waited += (
                f". Locks are held by {'; '.join(others)}. A later attempt goes on when that"
                " transaction ends"
            )
        if not prepared:
            return waited
        return (
            f"{waited}: prepared and not yet committed by this sink are"
            f" {', '.join(map(str, prepared[:4]))}. Do not commit or roll them back by hand: the"
            " next attempt ends them. If commits are late, a longer lock_timeout_s waits longer"
        )


class TransactionWriter(SqlWriter, Generic[TransactionsT]):
    """A writer whose rows wait in the database, in a transaction on the writer's own session."""

    def __init__(
        self,
        settings: SqlSettings,
        context: WriterContext,
        transactions: TransactionsT,
    ) -> None:
        """Match the rows to the table; the connected `transactions` are closed with the writer.

        Raises:
            ConfigError: The table does not accept the rows.
            SinkError: The server cannot be reached or asked now.
        """
        self._transactions = transactions
        super().__init__(settings, context)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """End the transaction that holds the rows since the last call, if there are any.

        Raises:
            BadRow: A constraint that is checked only now refuses a row.
            PreCommitFailed: The attempt must end. Nothing of this checkpoint is durable. Or, if the
                connection was lost while the server worked, the rows are prepared under a name that
                no decision lists, and will be rolled back.
        """
        doing = f"checkpoint {checkpoint} was not pre-committed"
        with self._or_close(doing, errors.PreCommitFailed):
            self._require_same_columns()
            if not self._loader.rows:
                # A transaction is open even if every row was refused. It may have this checkpoint's
                # name, which the rows of the next checkpoint must not use.
                self._transactions.roll_back()
                return ()
            return self._end_transaction(checkpoint)

    @abstractmethod
    def _end_transaction(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """End the open transaction, which has rows."""

    def _finish_rows(self) -> int:
        """Complete the rows and check that their tables are unaltered.

        Return the number of rows.
        """
        rows = self._loader.finish()
        if rows:
            # Check after the last row: the written rows prevent other sessions from altering the
            # tables.
            targets = self._written.values()
            table_resolver.require_unaltered(self._settings, self._transactions.session, targets)
        self._written.clear()
        return rows

    @override
    def _new_loader(self, target: Target) -> row_loader.RowLoader:
        settings, transactions = self._settings, self._transactions
        rules = settings.rules
        executor = settings.dialect.executor(transactions.session, rules.mode, rules.primary_key)
        destination = row_loader.OpenTransaction(
            transactions, executor, self._bad_rows, self._context.schema
        )
        if rules.uses_key or target.refers or rules.table_column is not None:
            transactions.order_changes()
        if rules.uses_key:
            return row_loader.BufferedChanges(rules, destination, self._validator.unchanged_sets)
        if self._bad_rows.fail and rules.table_column is None and not target.refers:
            return row_loader.StreamedInserts(transactions, executor.inserts(target))
        return row_loader.BatchedInserts(destination)

    @override
    def _open_session(self) -> Session:
        return self._transactions.session

    @override
    def _release(self) -> None:
        self._transactions.close()


class TwoPhaseWriter(TransactionWriter[PreparedTransactions]):
    """A writer that prepares a transaction at each barrier, for a committer to commit."""

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        self._transactions.expect(checkpoint)
        committables = super().pre_commit(checkpoint)
        # Rows from now on belong to the next checkpoint, and a transaction is named when it begins.
        self._transactions.expect(CheckpointId(checkpoint + 1))
        return committables

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """End the transaction in three steps: 1. the last rows, 2. the ledger row, 3. prepare."""
        # 1.
        rows = self._finish_rows()
        if not rows:
            # All rows were rejected.
            self._transactions.roll_back()
            return ()
        transaction = self._transactions.transaction
        # 2. The ledger row is inside the transaction, so it is visible if and only if the rows are.
        self._record(transaction, rows)
        reach("flushed")
        # 3.
        self._transactions.prepare()
        return (Committable(transaction, rows),)

    def _record(self, transaction: TransactionId, rows: int) -> None:
        session, ledger = self._transactions.session, self._settings.ledger
        try:
            recorded = ledger.record(session, transaction, rows)
        except DuplicateKey as error:
            raise errors.PreCommitFailed(
                f"{self._where}: transaction {transaction} was already committed: the ledger"
                " contains it. Attempt or checkpoint numbers were used twice. Check whether the"
                " decision log was deleted"
            ) from error
        if recorded:
            return
        owner = ledger.owner(session, transaction.sink_id)
        if owner is None:
            raise errors.PreCommitFailed(
                f"{self._where}: sink id {transaction.sink_id!r} is not in {ledger.sinks}: it was"
                " not checked before this attempt, or its row was deleted"
            )
        if owner.attempt > transaction.attempt:
            raise errors.Fenced(
                f"{self._where}: attempt {owner.attempt} has claimed the sink; attempt "
                f"{transaction.attempt} stops and prepares nothing more"
            )
        raise errors.PreCommitFailed(
            f"{self._where}: {self._transactions.name_in_use(transaction)}"
        )


class AtLeastOnceWriter(TransactionWriter[PlainTransactions]):
    """A writer that commits rows as they arrive.

    Rows that are sent again after a failure are doubled.
    """

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Send `batch`, and commit if `flush_rows` rows are uncommitted.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The server refused or is gone.
        """
        super().write(batch)
        if self._loader.rows >= self._settings.flush_rows:
            with self._or_close("rows were not committed", errors.SinkError):
                self._commit()

    @override
    def _end_transaction(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        self._commit()
        return ()

    def _commit(self) -> None:
        self._finish_rows()
        self._transactions.commit()


class SqlStagedWriter(SqlWriter):
    """A writer whose rows wait in checkpoint storage, for `ledger` mode.

    It holds no session and no lock between barriers, and nothing in the database is its own. It
    stages rows in the form that the committer applies: converted for the tables as they were,
    reduced to at most one change per key, with their operation.
    """

    def __init__(self, settings: SqlSettings, context: WriterContext) -> None:
        """Match the rows to the table.

        Raises:
            ConfigError: The table does not accept the rows, or there is no checkpoint storage.
            SinkError: The server cannot be reached now.
        """
        self._stager = RowStager(
            require_staging(context.staging, context.sink_id, STAGED),
            sink_id=context.sink_id,
            attempt=context.attempt,
            subtask=context.subtask,
        )
        self._session: Session | None = None
        super().__init__(settings, context)
        if not self._bad_rows.fail:
            settings.dialect.log.warning(
                "%s: commit_mode is ledger: a row with a value that does not fit its column is a"
                " bad row. But only the commit, after the decision, finds a row that is refused by"
                " a unique index, a foreign key or a trigger, or by a CHECK constraint that could"
                " not be checked before. The commit is then repeated until the table accepts the"
                " row",
                self._where,
            )
        self._disconnect()

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Convert `batch`, and keep it until the barrier, in memory or in a local file.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The description of a table that is new to the writer cannot be read now.
        """
        super().write(batch)
        self._disconnect()

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """Stage the rows since the last call, if there are any.

        Connect only if the server must be asked whether it accepts the rows.

        Raises:
            BadRow: The server does not accept a row.
            PreCommitFailed: Nothing of this checkpoint is durable.
        """
        with self._or_close(
            f"checkpoint {checkpoint} was not pre-committed", errors.PreCommitFailed
        ):
            self._require_same_columns()
            self._loader.finish()
            self._disconnect()
            return self._stager.pre_commit(checkpoint)

    @override
    def _new_loader(self, target: Target) -> row_loader.RowLoader:
        rules = self._settings.rules
        destination = row_loader.StagedChanges(
            self._stager, self._settings, self._open_session, self._bad_rows, self._context.schema
        )
        if rules.uses_key:
            return row_loader.BufferedChanges(rules, destination, self._validator.unchanged_sets)
        return row_loader.BatchedInserts(destination)

    @override
    def _open_session(self) -> Session:
        if self._session is None:
            name = self._settings.dialect.writer_name(self._context)
            self._session = self._settings.endpoint.connect(name)
        return self._session

    @override
    def _release(self) -> None:
        self._stager.close()
        self._disconnect()

    def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
