"""What a server, or its driver, refuses: the closed set into which sessions translate it.

    SqlError                 the statement was refused; what it is about, its kind says
      ConnectionLost         no reply came: what was sent may have been carried out
      RowRefused             a row is refused for what is in it: every new attempt would fail
        DuplicateKey         a row of the same unique key is there
      LockTimeout            a lock was waited for in vain
      AccessDenied           the user lacks a privilege
      TableMissing           there is no such table
      NameUnknown            there is nothing of the name: no prepared transaction, no session
      NameTaken              there is something of the name: a prepared transaction, an index
      StatementRefused       anything else

Each dialect's `connection` raises nothing else once it is connected, with the driver's error as the
cause; so nobody above it knows a driver. They are not `OnceflowError`s: writers, committers and
preflights say what was being done, and raise what their contract has for it.
"""

from __future__ import annotations

from onceflow.core.errors import BadRow, SinkError


class SqlError(Exception):
    """A statement was refused. Its text is what the server said, on one line, with its code."""

    def __init__(self, text: str, code: str = "") -> None:
        """Take the server's text, and its code: SQLSTATE, or the number of the error."""
        super().__init__(text, code)
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


class AccessDenied(SqlError):
    """The user lacks a privilege."""


class TableMissing(SqlError):
    """There is no such table."""


class NameUnknown(SqlError):
    """There is nothing of the name: no such prepared transaction, or no such session to end."""


class NameTaken(SqlError):
    """There is something of the name already: a prepared transaction, or an index."""


class StatementRefused(SqlError):
    """Anything else."""


def refusal(error: SqlError, doing: str) -> SinkError:
    """Return `error` as a `BadRow` when the data is at fault, else as a `SinkError`."""
    kind = BadRow if isinstance(error, RowRefused) else SinkError
    return kind(f"{doing}: {error}")
