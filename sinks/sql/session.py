"""How a database is reached and spoken to, as far as every dialect does it alike.

What a server or its driver refuses is translated by sessions into a closed set:

    SqlError                 the statement was refused; what it is about, its kind says
      ConnectionLost         no reply came: what was sent may have been carried out
      RowRefused             a row is refused for what is in it: every new attempt would fail
        DuplicateKey         a row of the same unique key is there
      LockTimeout            a lock was waited for in vain
      BinaryLogRefuses       a setting of the server's binary log forbids what the sink writes
      ReadOnly               somebody has made the server, the database or the user read-only
      AccessDenied           the user lacks a privilege
      TableMissing           there is no such table
      TableAltered           a table has other types than its rows were converted for
      NameUnknown            there is nothing of the name: no prepared transaction, no session
      NameTaken              there is something of the name: a prepared transaction, an index
      StatementRefused       anything else

Each dialect's `connection` raises nothing else once it is connected, with the driver's error as the
cause; so nobody above it knows a driver. They are not `OnceflowError`s: writers, committers and
preflights say what was being done, and raise what their contract has for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from typing_extensions import Self

from onceflow.core.errors import BadRow, SinkError, TargetRefused
from onceflow.core.printable import escape_controls


class SqlError(Exception):
    """A statement was refused. Its text is what the server said, on one line, with its code."""

    def __init__(self, text: str, code: str = "") -> None:
        """Take the server's text, and its code: SQLSTATE, or the number of the error."""
        # Servers quote keys and values, which may hold line breaks and escape sequences.
        super().__init__(escape_controls(text), code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ConnectionLost(SqlError):
    """No reply came, and the session is closed: what was sent may have been carried out."""


class RowRefused(SqlError):
    """A row is refused for what is in it: every new attempt would fail."""


class DuplicateKey(RowRefused):
    """A row of the same unique key is there."""


class LockTimeout(SqlError):
    """A lock was waited for in vain."""


class ReadOnly(SqlError):
    """The session's transactions only read; a session that is opened later may write again."""


class BinaryLogRefuses(SqlError):
    """A setting of the server's binary log forbids every statement that writes.

    A session keeps the setting that the server had when the session began.
    """


class AccessDenied(SqlError):
    """The user lacks a privilege."""


class TableMissing(SqlError):
    """There is no such table."""


class TableAltered(SqlError):
    """A table is not any more what rows were converted or refused for. A look at it mends that."""


class NameUnknown(SqlError):
    """There is nothing of the name: no such prepared transaction, or no such session to end."""


class NameTaken(SqlError):
    """There is something of the name already: a prepared transaction, or an index."""


class StatementInvalid(SqlError):
    """A statement is refused for what it says: every new attempt fails until a person helps.

    A column is gone, or may not be assigned; a trigger does what a transaction must not do.
    """


class StatementRefused(SqlError):
    """Anything else."""


def refusal(error: SqlError, doing: str) -> SinkError:
    """Return `error` as a `BadRow` when the data is at fault, else as a `SinkError`.

    A statement that will be refused again is a `TargetRefused`.
    """
    if isinstance(error, RowRefused):
        return BadRow(f"{doing}: {error}")
    if isinstance(error, (StatementInvalid, TableMissing)):
        return TargetRefused(
            f"{doing}: {error}. Every attempt would be refused alike. No row is lost: change the"
            " table, or the rows before the sink, and start the job again"
        )
    return SinkError(f"{doing}: {error}")


_SAVEPOINT = "onceflow_rows"


class Session(ABC):
    """One connection in autocommit mode on which every wait ends. Used by one thread.

    All methods raise `errors.SqlError` and nothing of the driver's. After `ConnectionLost` the
    session is closed. Statements carry their values as the dialect's literals.
    """

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether there is a connection; false after it broke."""

    @abstractmethod
    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Return the rows that `statement` answers."""

    @abstractmethod
    def execute(self, statement: str) -> int:
        """Carry out `statement`, which answers no rows; return how many it changed."""

    @abstractmethod
    def begin(self) -> None:
        """Open an ordinary transaction whose commit is durable and whose waits for locks end."""

    @abstractmethod
    def commit(self) -> None:
        """Commit it; returns only when the server says that it is committed."""

    @abstractmethod
    def roll_back(self) -> None:
        """End what is open, if anything is. Raises nothing: it closes the session if it fails."""

    @abstractmethod
    def hasten(self) -> None:
        """Wait for the server, from now on, only as long as leaving it may take."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""

    @contextmanager
    def transaction(self) -> Generator[None, None, None]:
        """Commit what is done in the block, or nothing of it when the block raises."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.roll_back()
            raise

    @contextmanager
    def savepoint(self) -> Generator[None, None, None]:
        """Take back what was done in the block, and only that, when a refused row is its end."""
        self.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            yield
        except RowRefused:
            # A deadlock takes the savepoint with it, and nobody goes on after other errors.
            self.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            self.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
            raise
        self.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SqlEndpoint(Protocol):
    """A database and how to reach it; prints without a secret."""

    @property
    def connect_timeout_s(self) -> float:
        """How long one connection may take."""
        ...

    def connect(self, name: str) -> Session:
        """Return a new session, shown to the server's operator as `name`.

        Raises:
            ConfigError: It is refused for good.
            SinkError: It is refused now.
        """
        ...


def session_name(sink_id: str, attempt: int, role: str) -> str:
    """Return the name under which the server's operator sees a session."""
    return f"onceflow {sink_id}/{attempt} {role}"
