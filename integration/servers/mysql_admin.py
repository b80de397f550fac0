"""What fixtures ask of a MySQL or MariaDB: databases, and transactions that are in doubt."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

import pymysql

from onceflow.integration.servers.process import ServerError

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

_ANSWER_TIMEOUT_S = 20.0
_POLL_S = 0.02
# Errors of the server by their number.
ACCESS_DENIED = 1045
_NO_SUCH_SESSION = 1094
_UNKNOWN_XID = 1397


class MySQLAdmin:
    """One connection with every privilege; `session` opens and closes it."""

    def __init__(self, cursor: Cursor) -> None:
        """Speak through `cursor`, which commits every statement."""
        self._cursor = cursor

    @classmethod
    @contextmanager
    def session(
        cls, url: str, *, timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> Generator[MySQLAdmin, None, None]:
        """Yield a session with the server of `url`.

        Args:
            url: mysql://user:password@host:port/database
            timeout_s: For the connection, and for the answer to each statement.
        """
        connection = connect(url, timeout_s=timeout_s)
        try:
            with connection.cursor() as cursor:
                yield cls(cursor)
        finally:
            connection.close()

    def rows(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return what the statement answers; `arguments` stand for each `%s` in it."""
        self._cursor.execute(statement, arguments or None)
        return list(cast("Iterable[tuple[Any, ...]]", self._cursor.fetchall()))

    def create_database(self, name: str) -> None:
        """Create an empty database."""
        self.rows(f"CREATE DATABASE `{name}`")

    def drop_database(self, name: str) -> None:
        """Drop a database; what holds its tables for 10 s is an error and no wait without end."""
        self.rows("SET SESSION lock_wait_timeout = 10")
        self.rows(f"DROP DATABASE `{name}`")

    def end_sessions_of(self, database: str) -> None:
        """Return once no other session has `database` as its own.

        Raises:
            ServerError: One stays although it was killed.
        """
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while sessions := self._sessions_of(database):
            if time.monotonic() > deadline:
                raise ServerError(f"sessions {sessions} of {database} outlive KILL")
            for session in sessions:
                try:
                    self.rows(f"KILL {session}")
                except pymysql.err.OperationalError as error:
                    if error.args[0] != _NO_SUCH_SESSION:
                        raise
            time.sleep(_POLL_S)

    def in_doubt(self) -> set[str]:
        """Return the prepared XA transactions of the whole server, each as it stands in XA COMMIT.

        MySQL has no list by database: `XA RECOVER` names no table.
        """
        (version,) = self.rows("SELECT VERSION()")[0]
        if "MariaDB" in str(version):
            return {str(row[-1]) for row in self.rows("XA RECOVER FORMAT='SQL'")}
        return {
            _xid(*cast("tuple[int, int, int, str]", row))
            for row in self.rows("XA RECOVER CONVERT XID")
        }

    def roll_back(self, transactions: set[str]) -> None:
        """Return once none of `transactions` is prepared; decided elsewhere meanwhile is fine.

        Raises:
            ServerError: One stays prepared, because a session still owns it for instance.
        """
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while left := self.in_doubt() & transactions:
            if time.monotonic() > deadline:
                raise ServerError(f"XA transactions {sorted(left)} cannot be rolled back")
            for xid in left:
                try:
                    self.rows(f"XA ROLLBACK {xid}")
                except pymysql.err.MySQLError as error:
                    # Also answered for a moment after the session that prepared it has ended.
                    if error.args[0] != _UNKNOWN_XID:
                        raise
            time.sleep(_POLL_S)

    def _sessions_of(self, database: str) -> list[int]:
        rows = self.rows(
            "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> CONNECTION_ID()",
            database,
        )
        return [int(row[0]) for row in rows]

    def data_directory(self) -> str:
        """Return where the server keeps its data."""
        return str(self.rows("SELECT @@datadir")[0][0])


def connect(url: str, *, timeout_s: float = _ANSWER_TIMEOUT_S) -> Connection[Cursor]:
    """Return an autocommitting connection whose every wait for the server ends."""
    parts = urlsplit(url)
    whole_s = max(1, round(timeout_s))
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=parts.path.lstrip("/") or None,
        charset="utf8mb4",
        autocommit=True,
        connect_timeout=whole_s,
        read_timeout=whole_s,
        write_timeout=whole_s,
    )


def _xid(format_id: int, gtrid_bytes: int, bqual_bytes: int, data: str) -> str:
    """Return the literal of an id that XA RECOVER gave as 0x and the hex of both its parts."""
    digits = data.removeprefix("0x")
    split = 2 * gtrid_bytes
    return f"X'{digits[:split]}',X'{digits[split : split + 2 * bqual_bytes]}',{format_id}"


__all__ = ["ACCESS_DENIED", "MySQLAdmin", "connect"]
