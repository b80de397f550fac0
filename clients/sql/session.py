"""The sessions and endpoints of databases: options, limits on silence, and the common errors.

Sessions translate the errors of a server or its driver into a closed set:

    SqlError                 the statement was refused; the subclass says why
      ConnectionLost         no reply came: the statement may have been carried out
      RowRefused             a row is refused for its values: every new attempt would fail
        DuplicateKey         a row with the same unique key exists
      LockTimeout            the wait for a lock timed out
      BinaryLogRefuses       a setting of the server's binary log forbids what the sink writes
      ReadOnly               the server, the database or the user was made read-only
      AccessDenied           the user lacks a privilege
      TableMissing           there is no such table
      TableAltered           a table has other types than its rows were converted for
      NameUnknown            no prepared transaction or session has the name
      NameTaken              a prepared transaction or an index has the name already
      StatementRefused       any other error

A connected session of each dialect's `connection` raises only these errors, with the driver's error
as the cause, so no caller depends on a driver. None is an `OnceflowError`: writers, committers
and preflights add what they were doing, and raise the error of their own contract.

Limits on silence:

Without a limit the system repeats a lost packet at ever longer intervals. So a connection through a
network that lost packets for a minute stays silent for almost another minute, and fails after a
quarter of an hour at the earliest.

The system's limit also applies while the other side acknowledges all packets and reads no data. A
server does so in the middle of a COPY or a LOAD DATA that waits for a lock. A transfer of rows
therefore has a longer limit in the system. A writer that waits for the reply asks
`RepeatedPackets`, which tells lost packets from a server that reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import Self

from onceflow.core.errors import BadRow, SinkError, TargetRefused
from onceflow.core.printable import escape_controls
from onceflow.core.spi.options import DURATION, option


@dataclass(frozen=True, kw_only=True, repr=False)
class DatabaseAccess:
    """The address of a database, the user who connects, and the timeouts."""

    url: str = field(
        kw_only=False,
        metadata=option(
            "Where the database is; its JDBC URL (`jdbc:…`) will do", spark="url", secret=True
        ),
    )
    user: str | None = field(
        default=None, metadata=option("Overrides the user in the url", spark="user")
    )
    password: str | None = field(
        default=None,
        metadata=option(
            "Overrides the password in the url, and needs no percent-encoding. `${env:NAME}` or"
            " `${file:/path}` refers to a secret: each process that connects looks it up, and no"
            " pickle contains it",
            spark="password",
            secret=True,
        ),
    )
    connect_timeout_s: float = field(
        default=10.0,
        metadata=option(
            "Timeout of one connection attempt. After a lost reply to a commit, the committer also"
            " asks for this long whether the commit happened",
            DURATION,
            spark="connectTimeout",
        ),
    )
    statement_timeout_s: float = field(
        default=120.0,
        metadata=option(
            "How long to wait for the server's reply before the connection is closed",
            DURATION,
            spark="statementTimeout",
            aliases=("queryTimeout",),
        ),
    )


UNACKNOWLEDGED_S = 30
"""The time that the keepalive probes of an idle connection take: 10 s of silence and 4 probes."""
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_COUNT = 4
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
"""The socket option that limits unacknowledged data, or None if the system is not Linux."""
_KEEPALIVE_IDLE: int = getattr(socket, "TCP_KEEPIDLE", 0) or getattr(socket, "TCP_KEEPALIVE", 0)

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_REPEATS = 2
"""The position of tcpi_retransmits in struct tcp_info: how often the packet has been repeated.

Source: include/uapi/linux/tcp.h of Linux."""


def limit_silence(descriptor: int, unacknowledged_s: float) -> None:
    """Make the system close the connection if a packet is unacknowledged for this time.

    Does nothing for a connection that is not TCP, or if the system has no such limit.
    """
    if _USER_TIMEOUT is None:
        return
    # The duplicate is closed again; the option stays with the connection.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, round(unacknowledged_s * 1000))


class RepeatedPackets:
    """A measurement of the time for which TCP has been repeating a lost packet.

    Used for one wait for a reply. Probes of a full receive window do not count: a server that
    reads nothing is slow, and its network is not lost.
    """

    def __init__(self) -> None:
        """Start the measurement with a time of 0."""
        self._repeats = 0
        self._since_s = 0.0

    def measure(self, descriptor: int, now_s: float) -> float:
        """Return the seconds since the first of the calls that all found the same packet repeated.

        Returns 0 for a connection that is not TCP, or if the system does not count repeats.
        """
        repeats = _count_repeats(descriptor)
        # The count only falls when the other side has acknowledged something new.
        if repeats == 0 or repeats < self._repeats or self._repeats == 0:
            self._since_s = now_s
        self._repeats = repeats
        return now_s - self._since_s


def _count_repeats(descriptor: int) -> int:
    if _TCP_INFO is None:
        return 0
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            return duplicate.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _REPEATS + 1)[_REPEATS]
    except OSError:
        return 0


def probe_while_idle(descriptor: int) -> None:
    """Make the system probe an idle connection, and close it if no probe is answered."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S),
            (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
            (socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
        ):
            duplicate.setsockopt(socket.IPPROTO_TCP, option, value)


class SqlError(Exception):
    """A refused statement. Its text is the server's message, on one line, with its code."""

    def __init__(self, text: str, code: str = "") -> None:
        """Create the error from the server's text and code: SQLSTATE, or the error's number."""
        # Servers quote keys and values, which may hold line breaks and escape sequences.
        super().__init__(escape_controls(text), code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ConnectionLost(SqlError):
    """Raised if no reply came. The session is closed; the statement may have been carried out."""


class RowRefused(SqlError):
    """Raised if a row is refused for its values: every new attempt would fail."""


class DuplicateKey(RowRefused):
    """Raised if a row with the same unique key exists."""


class LockTimeout(SqlError):
    """Raised if the wait for a lock timed out."""


class ReadOnly(SqlError):
    """Raised if the session's transactions are read-only.

    A session opened later may write again.
    """


class BinaryLogRefuses(SqlError):
    """A setting of the server's binary log forbids every statement that writes.

    A session keeps the setting that the server had when the session began.
    """


class AccessDenied(SqlError):
    """Raised if the user lacks a privilege."""


class TableMissing(SqlError):
    """Raised if there is no such table."""


class TableAltered(SqlError):
    """Raised if a table was altered after rows were converted for it or refused.

    Reading the table's description again resolves the error.
    """


class NameUnknown(SqlError):
    """Raised if no prepared transaction has the name, or there is no such session to end."""


class NameTaken(SqlError):
    """Raised if a prepared transaction or an index has the name already."""


class StatementInvalid(SqlError):
    """Raised if a statement is refused for its text: every new attempt fails until a person acts.

    For example a column is gone or may not be assigned, or a trigger does what a transaction must
    not do.
    """


class StatementRefused(SqlError):
    """Raised for any other error."""


def refusal(error: SqlError, doing: str) -> SinkError:
    """Return `error` as a `BadRow` if the data is at fault, else as a `SinkError`.

    A statement that will be refused again becomes a `TargetRefused`.
    """
    if isinstance(error, RowRefused):
        return BadRow(f"{doing}: {error}")
    if isinstance(error, (StatementInvalid, TableMissing)):
        return TargetRefused(
            f"{doing}: {error}. Every attempt would fail in the same way. No row is lost: change"
            " the table, or the rows before the sink, and start the job again"
        )
    return SinkError(f"{doing}: {error}")


_SAVEPOINT = "onceflow_rows"


class Session(ABC):
    """A connection in autocommit mode on which every wait has a timeout. Used by one thread.

    All methods raise only `SqlError` and no errors of the driver. After `ConnectionLost` the
    session is closed. Values are part of a statement's text, as literals of the dialect.
    """

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """True if there is a connection; False after it broke."""

    @abstractmethod
    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Return the rows that `statement` returns."""

    @abstractmethod
    def execute(self, statement: str) -> int:
        """Carry out `statement`, which returns no rows.

        Return the number of rows that it changed.
        """

    @abstractmethod
    def begin(self) -> None:
        """Open an ordinary transaction with durable commit and limited waits for locks."""

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction; return only after the server has confirmed the commit."""

    @abstractmethod
    def roll_back(self) -> None:
        """Roll back an open transaction.

        Raises nothing: if the rollback fails, close the session.
        """

    @abstractmethod
    def hasten(self) -> None:
        """Shorten all further waits for the server to the time that closing may take."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect, so that the server rolls back an open transaction. May be called twice."""

    @contextmanager
    def transaction(self) -> Generator[None, None, None]:
        """Run the block in a transaction: commit it, or roll it back if the block raises."""
        self.begin()
        try:
            yield
            self.commit()
        except BaseException:
            self.roll_back()
            raise

    @contextmanager
    def savepoint(self) -> Generator[None, None, None]:
        """Run the block in a savepoint; if it raises RowRefused, undo only the block."""
        self.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            yield
        except RowRefused:
            # Only RowRefused: a deadlock removes the savepoint, and after other errors the
            # transaction ends.
            self.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            self.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
            raise
        self.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SqlEndpoint(Protocol):
    """The address of a database and the settings of its connections. Its text has no secret."""

    @property
    def connect_timeout_s(self) -> float:
        """The timeout of one connection attempt."""
        ...

    def connect(self, name: str) -> Session:
        """Return a new session, which the server shows to its operator as `name`.

        Raises:
            ConfigError: The server refuses the connection for good.
            SinkError: The server refuses the connection now.
        """
        ...


def session_name(sink_id: str, attempt: int, role: str) -> str:
    """Return the name under which the server's operator sees a session."""
    return f"onceflow {sink_id}/{attempt} {role}"
