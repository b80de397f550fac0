"""What is in doubt in one MySQL or MariaDB, under every sink id with one ledger."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pymysql.err import MySQLError
from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.core.in_doubt import ResourceManager
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.core.spi import Committer, CommitterContext
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.failures import NO_SUCH_TABLE, XA_FATAL, code, described
from onceflow.sinks.mysql.names import literal

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
    if password and not sink.settings.endpoint.password:
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
        self._session: Session | None = None

    @property
    @override
    def name(self) -> str:
        return str(self._settings.endpoint)

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        parsed = (
            self._settings.names.parsed(
                int(format_id), int(gtrid), data if isinstance(data, bytes) else data.encode()
            )
            for format_id, gtrid, _, data in self._ask("XA RECOVER")
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
        prefix = literal(self._settings.names.writers_lock(sink_id))
        return [
            f"the writer of subtask {subtask} is connected to {self.name} (session {session})"
            for subtask, session in self._ask(_HELD_LOCKS.format(prefix=prefix))
        ]

    @override
    def rows(self, transaction: TransactionId) -> int | None:
        # The ledger row is in the transaction itself, and nobody else may see it otherwise.
        statement = (
            f"SELECT row_count FROM {self._settings.ledger.ledger} "  # noqa: S608 - quoted
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
        except MySQLError as error:
            if code(error) == NO_SUCH_TABLE:
                return None
            raise self._refused(error) from error

    def _ask(self, statement: str) -> Sequence[tuple[Any, ...]]:
        try:
            return self._connected().query(statement)
        except MySQLError as error:
            raise self._refused(error) from error

    def _connected(self) -> Session:
        if self._session is None or not self._session.open:
            self._session = self._settings.endpoint.connect("onceflow txn")
        return self._session

    def _refused(self, error: MySQLError) -> SinkError:
        remedy = (
            "; the user may not list prepared transactions: GRANT XA_RECOVER_ADMIN ON *.* TO it"
            if code(error) == XA_FATAL
            else ""
        )
        return SinkError(f"{self._settings.endpoint}: {described(error)}{remedy}")
