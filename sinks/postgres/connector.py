"""The part of the command line tools for Postgres: transactions in doubt, and the connector."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from onceflow.clients.postgres.connection import attempt_of_writer
from onceflow.clients.postgres.login_remedies import list_login_remedies
from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.target_records import LogFacts
from onceflow.core.spi.connector import ServerAccess, SinkConnector
from onceflow.sinks.postgres.sink import PostgresSink
from onceflow.sinks.sql.connector import NO_TABLE, SqlResourceManager
from onceflow.sinks.sql.diagnosis import Remedies, SqlDiagnosis
from onceflow.sinks.sql.sink import SqlSink

_PREPARED = "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()"
_SESSIONS = (
    "SELECT application_name, pid FROM pg_catalog.pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE 'onceflow %' ORDER BY pid"
)


def _sink_of_tools(access: ServerAccess, timeout_s: float) -> PostgresSink:
    """Return a sink that describes how a tool reaches the server.

    Raises:
        ConfigError: The URL is not valid.
    """
    return PostgresSink(
        access.url,
        table=NO_TABLE,
        password=access.password,
        ledger_schema=access.options.get("ledger_schema") or "onceflow",
        connect_timeout_s=timeout_s,
        statement_timeout_s=timeout_s,
        lock_timeout_s=timeout_s,
    )


def _remedies(sink: SqlSink, error: OnceflowError) -> Remedies:
    """Return the remedies as statements for a superuser who is connected to another database."""
    del error
    assert isinstance(sink, PostgresSink), sink
    return list_login_remedies(sink.endpoint)


class PostgresResourceManager(SqlResourceManager):
    """A resource manager of one database and all transactions that are prepared in it."""

    def __init__(self, access: ServerAccess) -> None:
        """Raise `ConfigError` if the URL is not valid; connect to nothing yet."""
        super().__init__(_sink_of_tools(access, access.timeout_s))

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        rows = self._ask(lambda session: session.query(_PREPARED))
        parsed = (TransactionId.parse(str(gid)) for (gid,) in rows)
        return sorted({transaction.sink_id for transaction in parsed if transaction})

    @override
    def sessions(self, sink_id: str) -> Sequence[str]:
        return [
            f"a writer of attempt {attempt} is connected to {self.name} (server process {pid})"
            for name, pid in self._ask(lambda session: session.query(_SESSIONS))
            if (attempt := attempt_of_writer(str(name), sink_id)) is not None
        ]


_DIAGNOSIS = SqlDiagnosis(_sink_of_tools, _remedies, "listen_addresses, port")
CONNECTOR = SinkConnector(
    sink=PostgresSink,
    resource_manager=PostgresResourceManager,
    diagnosis=_DIAGNOSIS,
    examine=_DIAGNOSIS.examine,
)
"""The connector that the catalog of connectors loads."""
