"""What is in doubt in one Postgres database, under every sink id of onceflow's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql
from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.core.in_doubt import ResourceManager
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.core.spi import Committer, CommitterContext
from onceflow.sinks import PostgresSink
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.failures import described
from onceflow.sinks.postgres.settings import attempt_of_writer
from onceflow.sinks.sql.bookkeeping import SINKS

_PREPARED = "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database()"
_SESSIONS = (
    "SELECT application_name, pid FROM pg_catalog.pg_stat_activity "
    "WHERE datname = current_database() AND application_name LIKE 'onceflow %' ORDER BY pid"
)


class PostgresResourceManager(ResourceManager):
    """One database. Connects when it is first asked."""

    def __init__(
        self, url: str, *, password: str | None, ledger_schema: str, timeout_s: float
    ) -> None:
        """Raise `ConfigError` when the URL cannot be read; connect to nothing yet."""
        # Committing by name needs no table; what is staged for one is its own sink's to apply.
        self._sink = PostgresSink(
            url,
            table="onceflow",
            password=password,
            ledger_schema=ledger_schema,
            connect_timeout_s=timeout_s,
            statement_timeout_s=timeout_s,
        )
        self._endpoint = self._sink.settings.endpoint
        self._schema = ledger_schema
        self._connection: BoundedConnection | None = None

    @property
    @override
    def name(self) -> str:
        return str(self._endpoint)

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        parsed = (TransactionId.parse(str(gid)) for (gid,) in self._ask(_PREPARED))
        return sorted({transaction.sink_id for transaction in parsed if transaction})

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self._sink.committer(replace(context, staging=None))

    @override
    def claimed_by(self, sink_id: str) -> str | None:
        table = sql.Identifier(self._schema, SINKS)
        there = self._ask("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", table.as_string(None))
        if not there[0][0]:
            return None
        statement = sql.SQL("SELECT log_id FROM {} WHERE sink_id = %s").format(table)
        found = self._ask(statement, sink_id)
        return str(found[0][0]) if found else None

    @override
    def sessions(self, sink_id: str) -> Sequence[str]:
        return [
            f"a writer of attempt {attempt} is connected to {self._endpoint} (server process {pid})"
            for name, pid in self._ask(_SESSIONS)
            if (attempt := attempt_of_writer(str(name), sink_id)) is not None
        ]

    @override
    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, statement: str | sql.Composed, *parameters: str) -> list[tuple[Any, ...]]:
        if self._connection is None or self._connection.closed:
            self._connection = self._endpoint.connect("onceflow txn")
        query = statement.encode() if isinstance(statement, str) else statement
        try:
            return self._connection.execute(query, parameters or None).fetchall()
        except psycopg.Error as error:
            raise SinkError(f"{self._endpoint}: {described(error)}") from error
