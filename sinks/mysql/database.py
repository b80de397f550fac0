"""What a MySQL or MariaDB server does its own way for writers and committers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.sinks.mysql.applying import MySQLApplier
from onceflow.sinks.mysql.catalog import TargetTable, server_facts
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.fitting import ColumnFit
from onceflow.sinks.mysql.refusals import FAILURES
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.mysql.tables import MySQLTables
from onceflow.sinks.sql import Database, WriteMode, session_name


class MySQLDatabase(Database[Session, MySQLError, TargetTable, ColumnFit]):
    """Sessions keep their settings, so every transaction on one has them."""

    def __init__(self, settings: SinkSettings) -> None:
        """Connect to nothing yet."""
        log = logging.getLogger("onceflow.sinks.mysql")
        super().__init__(settings, FAILURES, MySQLTables(settings, log), log)
        self._loads: bool | None = None

    @override
    def writer_name(self, sink_id: str, attempt: int, subtask: int) -> str:
        return session_name(sink_id, attempt, f"subtask {subtask} writer")

    @override
    def applier(self, connection: Session, mode: WriteMode, key: Sequence[str]) -> MySQLApplier:
        return MySQLApplier(mode, key, local_infile=self.loads(connection))

    def loads(self, session: Session) -> bool:
        """Return whether the server allows LOAD DATA LOCAL; it is asked once."""
        if self._loads is None:
            self._loads = server_facts(session).local_infile
        return self._loads

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
