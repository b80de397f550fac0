"""SQLite files and the sessions on them. The only module here that uses the driver.

A transaction locks the whole file against other writers from its beginning. Readers see the last
commit meanwhile (write-ahead log). A commit is on the disk when it returns (synchronous=FULL).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from onceflow.clients.sql.session import (
    AccessDenied,
    ConnectionLost,
    DatabaseAccess,
    DuplicateKey,
    LockTimeout,
    RowRefused,
    Session,
    SqlError,
    StatementInvalid,
    StatementRefused,
    TableMissing,
)
from onceflow.core.errors import ConfigError, SettingsRefused, SinkError

LIBRARY_VERSION = sqlite3.sqlite_version_info
"""The version of SQLite itself, which is part of Python."""

_CLOSE_TIMEOUT_S = 2.0
_SCHEME = "sqlite:///"
# Matched by the beginning of the error's symbolic name; the first match counts.
_KINDS: Sequence[tuple[str, type[SqlError]]] = (
    ("SQLITE_CONSTRAINT_PRIMARYKEY", DuplicateKey),
    ("SQLITE_CONSTRAINT_UNIQUE", DuplicateKey),
    ("SQLITE_CONSTRAINT_ROWID", DuplicateKey),
    ("SQLITE_CONSTRAINT", RowRefused),
    ("SQLITE_MISMATCH", RowRefused),
    ("SQLITE_TOOBIG", RowRefused),
    ("SQLITE_BUSY", LockTimeout),
    ("SQLITE_LOCKED", LockTimeout),
    ("SQLITE_READONLY", AccessDenied),
    ("SQLITE_PERM", AccessDenied),
    ("SQLITE_AUTH", AccessDenied),
    # A column does not exist, a generated column is assigned, or a trigger cannot run. Other errors
    # have their own symbolic names.
    ("SQLITE_ERROR", StatementInvalid),
    # A commit with this error may or may not be on the disk; only the file can tell.
    ("SQLITE_IOERR", ConnectionLost),
)


class SQLiteSession(Session):
    """A connection in autocommit mode between transactions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Create a session on an open connection, which `close` closes."""
        self._connection: sqlite3.Connection | None = connection

    @property
    @override
    def is_open(self) -> bool:
        return self._connection is not None

    @property
    def in_transaction(self) -> bool:
        """True if a transaction is open."""
        return self._connection is not None and self._connection.in_transaction

    @override
    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        with self._translate_errors() as connection:
            return connection.execute(statement).fetchall()

    @override
    def execute(self, statement: str) -> int:
        with self._translate_errors() as connection:
            return max(0, connection.execute(statement).rowcount)

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> int:
        """Carry out `statement` once for each of `rows`; return the number of changed rows."""
        with self._translate_errors() as connection:
            return max(0, connection.executemany(statement, rows).rowcount)

    def count_many(self, statement: str, rows: Iterable[Sequence[object]]) -> int:
        """Query `statement`, which returns a number, for each of `rows`; return the sum."""
        with self._translate_errors() as connection:
            return sum(int(connection.execute(statement, row).fetchone()[0]) for row in rows)

    @override
    def begin(self) -> None:
        # A transaction that becomes a writer only later may be refused at that moment, without a
        # wait.
        self.execute("BEGIN IMMEDIATE")

    @override
    def commit(self) -> None:
        self.execute("COMMIT")

    @override
    def roll_back(self) -> None:
        connection = self._connection
        if connection is None or not self.in_transaction:
            return
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            self.close()

    @override
    def hasten(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.execute(f"PRAGMA busy_timeout = {_milliseconds(_CLOSE_TIMEOUT_S)}")

    @override
    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _translate_errors(self) -> Generator[sqlite3.Connection, None, None]:
        if self._connection is None:
            raise ConnectionLost("the session is closed")
        try:
            yield self._connection
        except sqlite3.Error as error:
            kind, code = _classify(error)
            if kind is ConnectionLost:
                self.close()
            raise kind(f"{error} ({code or type(error).__name__})", code) from error


@dataclass(frozen=True, slots=True)
class SQLiteEndpoint:
    """A file, and the time to wait for other writers of it."""

    path: str
    connect_timeout_s: float
    lock_timeout_s: float

    def __str__(self) -> str:
        return f"SQLite file {self.path}"

    def connect(self, name: str) -> SQLiteSession:
        """Return a new session; create the file if it does not exist. `name` is not used.

        Raises:
            ConfigError: The file cannot be opened, is no database, or cannot have a write-ahead
                log.
            SinkError: Another session has locked the file.
        """
        del name
        try:
            connection = sqlite3.connect(
                self.path,
                timeout=self.lock_timeout_s,
                isolation_level=None,
                # One thread at a time uses a session, but not always the same thread.
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise SettingsRefused(f"{self} cannot be opened: {error}") from error
        try:
            ((journal,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error as error:
            connection.close()
            locked = _classify(error)[0] is LockTimeout
            kind = SinkError if locked else SettingsRefused
            raise kind(f"{self} cannot be opened: {error}") from error
        if journal != "wal":
            connection.close()
            raise ConfigError(
                f"{self} has the journal mode {journal}, because its file system or its settings"
                " do not allow a write-ahead log; put the file on a local disk"
            )
        return SQLiteSession(connection)


def open_memory() -> SQLiteSession:
    """Return a session of a new, empty database in memory, which ends with the session.

    It enforces no foreign keys.
    """
    return SQLiteSession(sqlite3.connect(":memory:", isolation_level=None))


def endpoint_of(access: DatabaseAccess, *, lock_timeout_s: float) -> SQLiteEndpoint:
    """Return the endpoint of `url`: `sqlite:////absolute/path`, or the path alone.

    Raises:
        ConfigError: The url names no file, or a relative path, which each process would resolve
            differently.
    """
    url = access.url
    path = url.removeprefix(_SCHEME)
    if not path or "://" in path or path.startswith(("sqlite:", ":memory:")):
        raise ConfigError(f"url={url!r}: give sqlite:////absolute/path/of/the/file.db")
    if not Path(path).is_absolute():
        raise ConfigError(
            f"url={url!r}: the path {path} is relative, but each process of a job has its own"
            f" working directory; give sqlite:///{Path(path).absolute()}"
        )
    # Resolve links: one file under two names would count as two databases with separate
    # transactions.
    return SQLiteEndpoint(os.path.realpath(path), access.connect_timeout_s, lock_timeout_s)


def own(session: Session) -> SQLiteSession:
    """Return `session` as a `SQLiteSession`, which this dialect's endpoints create."""
    assert isinstance(session, SQLiteSession), session
    return session


def _classify(error: sqlite3.Error) -> tuple[type[SqlError], str]:
    """Return the `SqlError` type and the symbolic name; empty for values that cannot be bound."""
    name: str = getattr(error, "sqlite_errorname", None) or ""
    if str(error).startswith("no such table"):
        return TableMissing, name
    if not name and isinstance(error, (sqlite3.InterfaceError, sqlite3.DataError)):
        return RowRefused, name
    return next((kind for start, kind in _KINDS if name.startswith(start)), StatementRefused), name


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
