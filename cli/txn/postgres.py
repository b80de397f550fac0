"""What is in doubt in one Postgres database, under every sink id of onceflow's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.core.in_doubt import ResourceManager
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.core.spi import Committer, CommitterContext
from onceflow.sinks import PostgresSink
from onceflow.sinks.postgres.connection import PostgresSession, attempt_of_writer
from onceflow.sinks.sql.errors import SqlError, TableMissing

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
        self._endpoint = self._sink.endpoint
        self._session: PostgresSession | None = None

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
        try:
            owner = self._sink.settings.ledger.owner(self._connected(), sink_id)
        except TableMissing:
            return None
        except SqlError as error:
            raise self._refused(error) from error
        return owner.log_id if owner else None

    @override
    def sessions(self, sink_id: str) -> Sequence[str]:
        return [
            f"a writer of attempt {attempt} is connected to {self._endpoint} (server process {pid})"
            for name, pid in self._ask(_SESSIONS)
            if (attempt := attempt_of_writer(str(name), sink_id)) is not None
        ]

    @override
    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ask(self, statement: str) -> Sequence[tuple[Any, ...]]:
        try:
            return self._connected().query(statement)
        except SqlError as error:
            raise self._refused(error) from error

    def _connected(self) -> PostgresSession:
        if self._session is None or not self._session.is_open:
            self._session = self._endpoint.connect("onceflow txn")
        return self._session

    def _refused(self, error: SqlError) -> SinkError:
        return SinkError(f"{self._endpoint}: {error}")
