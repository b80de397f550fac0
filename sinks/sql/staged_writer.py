"""The writer of one subtask whose rows wait in checkpoint storage, for `ledger` mode.

It holds no connection and no lock between barriers, and nothing in the database is its own. What it
stages is what the committer applies: rows fitted to the tables as they were, already reduced to at
most one change a key, with their operation.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from typing_extensions import override

from onceflow.core.bad_rows import BadRows
from onceflow.core.crash_points import reach
from onceflow.core.errors import PreCommitFailed, SinkError, StorageError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.staging import required_staging
from onceflow.sinks.sql.changes import ChangeBuffer
from onceflow.sinks.sql.commit_mode import STAGED
from onceflow.sinks.sql.errors import SqlError, refusal
from onceflow.sinks.sql.row_validator import RowValidator
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.staged_operation import StagedOperation
from onceflow.sinks.sql.table_resolver import TableResolver
from onceflow.sinks.sql.tables import Target


class StagedWriter(SinkWriter):
    """Stages at each barrier; a committer applies what it staged. Any failure is its end."""

    def __init__(self, settings: SqlSettings, context: WriterContext) -> None:
        """Match the rows to the table.

        Raises:
            ConfigError: The table does not take the rows, or there is no checkpoint storage.
            SinkError: The server cannot be reached now.
        """
        staging = required_staging(context.staging, context.sink_id, STAGED)
        self._settings = settings
        self._context = context
        self._where = f"sink {context.sink_id} subtask {context.subtask}, table {settings.table}"
        self._closed = False
        self._session: Session | None = None
        self._rules = settings.rules
        self._bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)
        tables = TableResolver(settings, context.schema, self._connected)
        self._validator = RowValidator(settings, tables.named, self._bad_rows)
        self._staged = staging.open()
        self._buffer = ChangeBuffer(self._rules)
        self._targets: dict[str, Target] = {}
        if not self._bad_rows.fail:
            settings.dialect.log.warning(
                "%s: commit_mode is ledger: rows that do not fit are left out, but a row that the "
                "server refuses, by a constraint for instance, is met only when it is decided, and "
                "stops the commit",
                self._where,
            )
        with self._or_close("the table cannot be looked at", SinkError):
            tables.named(settings.table)
            self._disconnect()

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        """Keep `batch` until the barrier, in memory or in a local file.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: A table that is new to the writer cannot be looked at now.
        """
        with self._or_close("rows were not written", SinkError):
            for part in self._validator.take(batch):
                target, changes = part.target, part.changes
                if self._rules.changes_in_place:
                    self._targets[str(target.name)] = target
                    self._buffer.add(changes, str(target.name))
                else:
                    self._stage(target, changes.rows, deletes=False)
            self._disconnect()

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        """Stage the rows since the last call; None when there are none.

        Raises:
            PreCommitFailed: Nothing of this checkpoint is durable.
        """
        context = self._context
        with self._or_close(f"checkpoint {checkpoint} was not pre-committed", PreCommitFailed):
            for changes in self._buffer.changes():
                target = self._targets[changes.table]
                for rows in changes.deletes():
                    self._stage(target, rows, deletes=True)
                for rows in changes.puts():
                    self._stage(target, rows, deletes=False)
            self._buffer.clear()
            if not self._staged.rows:
                return None
            transaction = TransactionId(
                context.sink_id, context.attempt, checkpoint, context.subtask, sequence=0
            )
            reach("flushed")
            return self._staged.seal(transaction)

    @override
    def rejected(self) -> Sequence[RejectedRows]:
        """Return the rows left out since the last call because they do not fit."""
        return self._bad_rows.taken()

    @override
    def close(self) -> None:
        """Forget what is not staged; what is staged stays."""
        self._closed = True
        self._buffer.clear()
        self._staged.close()
        self._disconnect()

    def _stage(self, target: Target, rows: pa.RecordBatch, *, deletes: bool) -> None:
        key = self._rules.primary_key
        names = list(key) if deletes else [fit.name for fit in target.fits]
        operation = StagedOperation(target.name, self._rules.mode, key, deletes)
        self._staged.write(rows.select(names), part=operation.encoded())

    def _connected(self) -> Session:
        if self._session is None:
            name = self._settings.dialect.writer_name(self._context)
            self._session = self._settings.endpoint.connect(name)
        return self._session

    def _disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None, None, None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        try:
            yield
        except SqlError as error:
            self.close()
            raise refusal(error, f"{self._where}: {doing}") from error
        except StorageError as error:
            self.close()
            raise kind(f"{self._where}: {doing}: {error}") from error
        except BaseException:
            self.close()
            raise
