"""What a Postgres server does its own way for writers and committers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

import psycopg
from psycopg.pq import TransactionStatus
from typing_extensions import override

from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.postgres.catalog import TargetTable, prepared_transactions
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.copying import StreamedInserts
from onceflow.sinks.postgres.dml import PostgresDmlExecutor
from onceflow.sinks.postgres.failures import FAILURES
from onceflow.sinks.postgres.fitting import ColumnFit
from onceflow.sinks.postgres.settings import SinkSettings, writer_name
from onceflow.sinks.postgres.tables import PostgresTables, PostgresTarget
from onceflow.sinks.postgres.transactions import begin_statement
from onceflow.sinks.sql import Database, WriteMode
from onceflow.sinks.sql.transactions import Transactions

_IDLE = TransactionStatus.IDLE


class PostgresDatabase(Database[BoundedConnection, psycopg.Error, TargetTable, ColumnFit]):
    """Keeps no session state, so that a pooler may stand in between."""

    lists_locks: ClassVar[str] = "pg_locks and pg_stat_activity"

    def __init__(self, settings: SinkSettings) -> None:
        """Connect to nothing yet."""
        log = logging.getLogger("onceflow.sinks.postgres")
        super().__init__(settings, FAILURES, PostgresTables(settings, log), log)
        self._begin = begin_statement(settings)

    @override
    def writer_name(self, sink_id: str, attempt: int, subtask: int) -> str:
        return writer_name(sink_id, attempt, subtask)

    @override
    def executor(
        self, connection: BoundedConnection, mode: WriteMode, key: Sequence[str]
    ) -> PostgresDmlExecutor:
        return PostgresDmlExecutor(mode, key)

    @override
    def streamed(
        self, transactions: Transactions[BoundedConnection], target: PostgresTarget
    ) -> StreamedInserts:
        return StreamedInserts(transactions, target)

    @override
    def prepared(self, connection: BoundedConnection, sink_id: str) -> tuple[TransactionId, ...]:
        return prepared_transactions(connection, sink_id)

    @override
    def endings(self, transaction: TransactionId) -> str:
        return f"COMMIT PREPARED or ROLLBACK PREPARED '{transaction}'"

    @override
    def is_open(self, connection: BoundedConnection) -> bool:
        return not connection.closed

    @override
    def begin(self, connection: BoundedConnection) -> None:
        connection.execute(self._begin)

    @override
    def commit(self, connection: BoundedConnection) -> str:
        return connection.execute("COMMIT").statusmessage or ""

    @override
    def roll_back(self, connection: BoundedConnection) -> None:
        if connection.closed or connection.info.transaction_status == _IDLE:
            return
        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:
            with suppress(psycopg.Error):
                connection.close()
