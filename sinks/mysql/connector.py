"""The part of the command line tools for MySQL and MariaDB, and their connector."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from onceflow.clients.mysql.catalog import XaNames, literal, quote
from onceflow.clients.sql.session import Session
from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.target_records import LogFacts
from onceflow.core.spi.connector import ServerAccess, SinkConnector
from onceflow.sinks.mysql.sink import MySQLSink
from onceflow.sinks.mysql.two_phase import xa_recover
from onceflow.sinks.sql.connector import NO_TABLE, SqlResourceManager
from onceflow.sinks.sql.diagnosis import Remedies, SqlDiagnosis
from onceflow.sinks.sql.sink import SqlSink

# By default a recursion ends at 1000 rows, so at most 999 subtasks are looked at.
_HELD_LOCKS = """
    WITH RECURSIVE every_subtask (number) AS (
        SELECT 0 UNION ALL SELECT number + 1 FROM every_subtask WHERE number < 998
    )
    SELECT number, IS_USED_LOCK(CONCAT({prefix}, number)) AS session FROM every_subtask
    HAVING session IS NOT NULL
"""


PASSWORD_VARIABLE = "MYSQL_PWD"  # noqa: S105 - its name
_CLIENT_FILES = "ssl_cert=, ssl_key= and ssl_key_password= in the url, files on each machine"
_AUTHORITY = "the server's ssl_ca, which must have the authority of ssl_cert="
_OF_TLS = (
    ("SSL is required", "ssl_mode=required in the url"),
    ("offers no encryption", "ssl_mode=preferred in the url; or the server's ssl_cert and ssl_key"),
    *((name, _CLIENT_FILES) for name in ("ssl_cert=", "ssl_key=")),
    ("ssl_ca=", "ssl_ca= in the url, a file of certificates on each machine of the job"),
    ("not valid for", "the server's certificate, which must name the host of the url"),
    ("certificate has expired", "the server's certificate"),
    ("VERIFY_FAILED", "ssl_ca= in the url, with the authority of the server"),
    ("CERTIFICATE_EXPIRED", "ssl_cert= in the url, with a certificate that is valid"),
    *((alert, _AUTHORITY) for alert in ("UNKNOWN_CA", "DECRYPT_ERROR")),
    ("[SSL: ", "ssl_ca=, ssl_cert= and ssl_key= in the url"),
)
"""The remedies for refused encryption. The first match counts."""
_ACCOUNT = re.compile(r"for user ('.*'@'.*') to database")


def _sink_of_tools(access: ServerAccess, timeout_s: float) -> MySQLSink:
    """Return a sink that describes how a tool reaches the server; MYSQL_PWD may hold the password.

    Raises:
        ConfigError: The URL is not valid.
    """
    sink = MySQLSink(
        access.url,
        table=NO_TABLE,
        password=access.password,
        ledger_schema=access.options.get("ledger_schema"),
        connect_timeout_s=timeout_s,
        statement_timeout_s=timeout_s,
        lock_timeout_s=timeout_s,
    )
    known = os.environ.get(PASSWORD_VARIABLE)
    return replace(sink, password=known) if known and not sink.endpoint.password else sink


def _remedies(sink: SqlSink, error: OnceflowError) -> Remedies:
    """Return the remedies as statements for an administrator."""
    assert isinstance(sink, MySQLSink), sink
    where = sink.endpoint
    user, database = where.user.replace("'", "''"), quote(where.database)
    # The error contains the account if the login succeeded; otherwise the account may be for any
    # host.
    account = match[1] if (match := _ACCOUNT.search(str(error))) else f"'{user}'@'%'"
    password = (
        f"ALTER USER {account} IDENTIFIED BY '…', or CREATE USER if there is none; which there"
        f" is: SELECT user, host FROM mysql.user WHERE user = '{user}'"
    )
    privileges = "SELECT, INSERT, UPDATE, DELETE, CREATE, INDEX"
    return (
        ("(error 1044)", f"GRANT {privileges} ON {database}.* TO {account}"),
        ("(error 1049)", f"CREATE DATABASE {database}"),
        *_OF_TLS,
        ("", password),
    )


class MySQLResourceManager(SqlResourceManager):
    """A resource manager of one server, and of all transactions prepared with one ledger."""

    def __init__(self, access: ServerAccess) -> None:
        """Raise `ConfigError` if the URL is not valid; connect to nothing yet."""
        super().__init__(_sink_of_tools(access, access.timeout_s))
        self._names = XaNames(self._settings.ledger_schema)

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        parsed = (
            self._names.parse(int(format_id), int(gtrid), data)
            for format_id, gtrid, _, data in self._ask(xa_recover)
        )
        return sorted({transaction.sink_id for transaction in parsed if transaction})

    @override
    def sessions(self, sink_id: str) -> Sequence[str]:
        statement = _HELD_LOCKS.format(prefix=literal(self._names.writers_lock(sink_id)))
        return [
            f"the writer of subtask {subtask} is connected to {self.name} (session {session})"
            for subtask, session in self._ask(lambda session: session.query(statement))
        ]

    @override
    def rows(self, transaction: TransactionId) -> int | None:
        # The ledger row is inside the prepared transaction, so only READ UNCOMMITTED shows it.
        statement = (
            f"SELECT row_count FROM {self._settings.ledger.ledger} "
            f"WHERE transaction_id = {literal(str(transaction))}"
        )

        def ask(session: Session) -> int | None:
            session.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
            rows = session.query(statement)
            return int(rows[0][0]) if rows else None

        return self._of_our_tables(ask)


_DIAGNOSIS = SqlDiagnosis(_sink_of_tools, _remedies, "bind_address, port")
CONNECTOR = SinkConnector(
    sink=MySQLSink,
    resource_manager=MySQLResourceManager,
    diagnosis=_DIAGNOSIS,
    examine=_DIAGNOSIS.examine,
)
"""The connector that the catalog of connectors loads."""
