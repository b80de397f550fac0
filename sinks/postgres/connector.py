"""Postgres for the tools: what its databases hold in doubt, and what the catalogue finds."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from onceflow.core.connector import ServerAccess, SinkConnector
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.sinks.postgres.connection import attempt_of_writer
from onceflow.sinks.postgres.diagnosis import questions_of_postgres
from onceflow.sinks.postgres.sink import PostgresSink
from onceflow.sinks.sql.connector import NO_TABLE, SqlResourceManager

_PREPARED = "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()"
_SESSIONS = (
    "SELECT application_name, pid FROM pg_catalog.pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE 'onceflow %' ORDER BY pid"
)


class PostgresResourceManager(SqlResourceManager):
    """One database, and what every sink id has prepared in it."""

    def __init__(self, access: ServerAccess) -> None:
        """Raise `ConfigError` when the URL cannot be read; connect to nothing yet."""
        super().__init__(
            PostgresSink(
                access.url,
                table=NO_TABLE,
                password=access.password,
                ledger_schema=access.options.get("ledger_schema") or "onceflow",
                connect_timeout_s=access.timeout_s,
                statement_timeout_s=access.timeout_s,
            )
        )

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        rows = self._asked(lambda session: session.query(_PREPARED))
        parsed = (TransactionId.parse(str(gid)) for (gid,) in rows)
        return sorted({transaction.sink_id for transaction in parsed if transaction})

    @override
    def sessions(self, sink_id: str) -> Sequence[str]:
        return [
            f"a writer of attempt {attempt} is connected to {self.name} (server process {pid})"
            for name, pid in self._asked(lambda session: session.query(_SESSIONS))
            if (attempt := attempt_of_writer(str(name), sink_id)) is not None
        ]


CONNECTOR = SinkConnector(
    sink=PostgresSink,
    resource_manager=PostgresResourceManager,
    diagnosis=questions_of_postgres,
)
"""What the catalogue finds."""
