"""What is in doubt in one MySQL or MariaDB, under every sink id with one ledger."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.core.in_doubt import ResourceManager
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.core.spi import Committer, CommitterContext
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.connection import MySQLSession
from onceflow.sinks.mysql.names import XaNames, literal
from onceflow.sinks.mysql.two_phase import recovered
from onceflow.sinks.sql.errors import SqlError, TableMissing

_T = TypeVar("_T")
PASSWORD_VARIABLE = "MYSQL_PWD"  # noqa: S105 - its name
# A recursion ends at 1000 rows unless a server is told otherwise; so do the subtasks looked at.
_HELD_LOCKS = """
    WITH RECURSIVE every_subtask (number) AS (
        SELECT 0 UNION ALL SELECT number + 1 FROM every_subtask WHERE number < 998
    )
    SELECT number, IS_USED_LOCK(CONCAT({prefix}, number)) AS session FROM every_subtask
    HAVING session IS NOT NULL
"""


def with_password_of_environment(sink: MySQLSink) -> MySQLSink:
    """Return `sink` with the password in MYSQL_PWD, unless it has one."""
    password = os.environ.get(PASSWORD_VARIABLE)
    if password and not sink.endpoint.password:
        return replace(sink, password=password)
    return sink


class MySQLResourceManager(ResourceManager):
    """One ledger's database. Connects when it is first asked."""

    def __init__(
        self, url: str, *, password: str | None, ledger_schema: str | None, timeout_s: float
    ) -> None:
        """Raise `ConfigError` when the URL cannot be read; connect to nothing yet."""
        # Committing by name needs no table; what is staged for one is its own sink's to apply.
        self._sink = with_password_of_environment(
            MySQLSink(
                url,
                table="onceflow",
                password=password,
                ledger_schema=ledger_schema,
                connect_timeout_s=timeout_s,
                statement_timeout_s=timeout_s,
                lock_timeout_s=timeout_s,
            )
        )
        self._settings = self._sink.settings
        self._names = XaNames(self._settings.ledger_schema)
        self._session: MySQLSession | None = None

    @property
    @override
    def name(self) -> str:
        return str(self._settings.endpoint)

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        parsed = (
            self._names.parsed(int(format_id), int(gtrid), data)
            for format_id, gtrid, _, data in self._asked(recovered)
        )
        return sorted({transaction.sink_id for transaction in parsed if transaction})

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self._sink.committer(replace(context, staging=None))

    @override
    def claimed_by(self, sink_id: str) -> str | None:
        def ask() -> str | None:
            owner = self._settings.ledger.owner(self._connected(), sink_id)
            return owner.log_id if owner else None

        return self._of_our_tables(ask)

    @override
    def sessions(self, sink_id: str) -> Sequence[str]:
        prefix = literal(self._names.writers_lock(sink_id))
        return [
            f"the writer of subtask {subtask} is connected to {self.name} (session {session})"
            for subtask, session in self._ask(_HELD_LOCKS.format(prefix=prefix))
        ]

    @override
    def rows(self, transaction: TransactionId) -> int | None:
        # The ledger row is in the transaction itself, and nobody else may see it otherwise.
        statement = (
            f"SELECT row_count FROM {self._settings.ledger.ledger} "
            f"WHERE transaction_id = {literal(str(transaction))}"
        )

        def ask() -> int | None:
            session = self._connected()
            session.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
            found = session.query(statement)
            return int(found[0][0]) if found else None

        return self._of_our_tables(ask)

    @override
    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _of_our_tables(self, ask: Callable[[], _T | None]) -> _T | None:
        """Return what `ask` returns; None where our tables are not."""
        try:
            return ask()
        except TableMissing:
            return None
        except SqlError as error:
            raise self._refused(error) from error

    def _ask(self, statement: str) -> Sequence[tuple[Any, ...]]:
        return self._asked(lambda session: session.query(statement))

    def _asked(
        self, ask: Callable[[MySQLSession], Sequence[tuple[Any, ...]]]
    ) -> Sequence[tuple[Any, ...]]:
        try:
            return ask(self._connected())
        except SqlError as error:
            raise self._refused(error) from error

    def _connected(self) -> MySQLSession:
        if self._session is None or not self._session.is_open:
            self._session = self._sink.endpoint.connect("onceflow txn")
        return self._session

    def _refused(self, error: SqlError) -> SinkError:
        return SinkError(f"{self._settings.endpoint}: {error}")
