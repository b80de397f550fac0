"""What a MySQL or MariaDB server does its own way for writers and committers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.mysql.catalog import TargetTable, prepared_transactions, server_facts
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.dml import MySQLDmlExecutor
from onceflow.sinks.mysql.fitting import ColumnFit
from onceflow.sinks.mysql.refusals import FAILURES
from onceflow.sinks.mysql.sending import RowSender
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.mysql.streaming import StreamedInserts
from onceflow.sinks.mysql.tables import MySQLTables, MySQLTarget
from onceflow.sinks.sql import Database, WriteMode, session_name
from onceflow.sinks.sql.transactions import Transactions


class MySQLDatabase(Database[Session, MySQLError, TargetTable, ColumnFit]):
    """Sessions keep their settings, so every transaction on one has them."""

    lists_locks: ClassVar[str] = "information_schema.innodb_trx and XA RECOVER"

    def __init__(self, settings: SinkSettings) -> None:
        """Connect to nothing yet."""
        log = logging.getLogger("onceflow.sinks.mysql")
        super().__init__(settings, FAILURES, MySQLTables(settings, log), log)
        self._names = settings.names
        self._loads: bool | None = None

    @override
    def writer_name(self, sink_id: str, attempt: int, subtask: int) -> str:
        return session_name(sink_id, attempt, f"subtask {subtask} writer")

    @override
    def executor(
        self, connection: Session, mode: WriteMode, key: Sequence[str]
    ) -> MySQLDmlExecutor:
        return MySQLDmlExecutor(mode, key, local_infile=self.loads(connection))

    def loads(self, session: Session) -> bool:
        """Return whether the server allows LOAD DATA LOCAL; it is asked once."""
        if self._loads is None:
            self._loads = server_facts(session).local_infile
        return self._loads

    @override
    def streamed(self, transactions: Transactions[Session], target: MySQLTarget) -> StreamedInserts:
        sender = RowSender(target, local_infile=self.loads(transactions.connection))
        return StreamedInserts(transactions, target, sender)

    @override
    def prepared(self, connection: Session, sink_id: str) -> tuple[TransactionId, ...]:
        return prepared_transactions(connection, self._names, sink_id)

    @override
    def endings(self, transaction: TransactionId) -> str:
        return f"XA COMMIT or XA ROLLBACK {self._names.xid(transaction)}"

    @override
    def is_open(self, connection: Session) -> bool:
        return connection.open

    @override
    def begin(self, connection: Session) -> None:
        connection.execute("START TRANSACTION READ WRITE")

    @override
    def commit(self, connection: Session) -> str:
        connection.execute("COMMIT")
        return "COMMIT"

    @override
    def roll_back(self, connection: Session) -> None:
        if not connection.open:
            return
        try:
            connection.execute("ROLLBACK")
        except MySQLError:
            connection.close()
