"""Where the database is, and sessions with it on which every wait has a deadline."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pymysql.err import MySQLError
from typing_extensions import Self

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.secret_references import followed
from onceflow.sinks.mysql.failures import code, described, is_connection_lost
from onceflow.sinks.mysql.names import literal
from onceflow.sinks.mysql.tls import Tls, TlsMode
from onceflow.sinks.mysql.wire import Reply, WireConnection, timed_out

# Nothing is cut, rounded to another day or defaulted in silence, and 0 is no "next number".
SQL_MODE = (
    "STRICT_ALL_TABLES",
    "NO_ZERO_DATE",
    "NO_ZERO_IN_DATE",
    "ERROR_FOR_DIVISION_BY_ZERO",
    "NO_ENGINE_SUBSTITUTION",
    "NO_AUTO_VALUE_ON_ZERO",
)
# A source may be idle for long while a transaction is open; what a vanished machine left behind is
# ended by the next attempt.
_IDLE_S_MAX = 86_400
_LOGIN_REFUSED = frozenset({1044, 1045, 1049, 1130, 1251, 1396, 1698, 1862, 3118, 4151})
_CANNOT_RESOLVE = ("Name or service not known", "nodename nor servname", "No address associated")


class Session:
    """A session that is given up when the server is silent for too long. Used by one thread.

    Strict, in UTC, utf8mb4, READ COMMITTED: a prepared transaction then holds no locks between its
    rows. Errors are PyMySQL's own.
    """

    def __init__(self, wire: WireConnection, *, lock_timeout_s: float) -> None:
        """Set the session up, and see that it is.

        Raises:
            ConfigError: Something between here and the server keeps settings from it.
        """
        self._wire = wire
        lock_timeout = max(1, round(lock_timeout_s))
        self.version_text = str(wire.query("SELECT VERSION()")[0][0])
        self.is_mariadb = "mariadb" in self.version_text.lower()
        settings = {
            "sql_mode": literal(",".join(SQL_MODE)),
            "time_zone": "'+00:00'",
            "foreign_key_checks": "1",
            "unique_checks": "1",
            "sql_safe_updates": "0",
            "innodb_lock_wait_timeout": str(lock_timeout),
            "lock_wait_timeout": str(lock_timeout),
            "wait_timeout": str(_IDLE_S_MAX),
            **({"max_statement_time": "0"} if self.is_mariadb else {}),
        }
        given = ", ".join(f"SESSION {name} = {value}" for name, value in settings.items())
        wire.execute(f"SET {given}")
        wire.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        ((modes, zone, charset, self.session_id),) = wire.query(
            "SELECT @@SESSION.sql_mode, @@SESSION.time_zone, @@SESSION.character_set_client, "
            "CONNECTION_ID()"
        )
        if set(str(modes).split(",")) != set(SQL_MODE) or (zone, charset) != ("+00:00", "utf8mb4"):
            wire.close()
            raise ConfigError(
                f"the session does not keep its settings: sql_mode is {modes}, time_zone {zone}, "
                f"character set {charset}. Connect to the server itself, or through a proxy that "
                "keeps a session's settings"
            )

    @property
    def open(self) -> bool:
        """Whether there is a connection; false after it broke."""
        return self._wire.open

    @property
    def reply_timeout_s(self) -> float:
        """How long the server may be silent."""
        return self._wire.reply_timeout_s

    @property
    def is_pooled(self) -> bool:
        """Whether something in between hands out the server's sessions.

        A pooler tells its clients numbers of its own making.
        """
        return self._wire.session_id != int(self.session_id)

    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        """Return the rows that `statement` answers."""
        return self._wire.query(statement)

    def execute(self, statement: str | bytes) -> Reply:
        """Return what `statement`, which answers no rows, did."""
        return self._wire.execute(statement)

    def send(self, statement: str | bytes, file: Sequence[memoryview] | None = None) -> None:
        """Send `statement` with the file it loads, and await the reply in `receive`."""
        self._wire.send(statement, file)

    def receive(self) -> Reply:
        """Return the reply to what was sent."""
        return self._wire.receive()

    def hasten(self, timeout_s: float) -> None:
        """From now on wait for the server at most so long."""
        self._wire.wait_at_most(min(self._wire.reply_timeout_s, timeout_s))

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A database and how to reach it; pickles with what the user gave and never prints it."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    database: str
    unix_socket: str
    tls: Tls
    connect_timeout_s: float
    reply_timeout_s: float
    lock_timeout_s: float

    def __str__(self) -> str:
        place = self.unix_socket or f"{self.host}:{self.port}"
        return f"database {self.database!r} at {place} as user {self.user!r}"

    def connect(self, name: str) -> Session:
        """Return a new session in autocommit mode, shown to the server's operator as `name`.

        Raises:
            ConfigError: It is refused for good: password, database, user, host or encryption.
            SinkError: It is refused now: not running, starting, full, or too slow.
        """
        place = {"unix_socket": self.unix_socket} if self.unix_socket else {}
        try:
            wire = WireConnection(
                {
                    "host": self.host,
                    "port": self.port,
                    "user": self.user,
                    # As bytes: text would be sent in latin1.
                    "password": self._secret().encode(),
                    "database": self.database,
                    "program_name": name,
                    **place,
                    **self.tls.arguments(),
                },
                timeout_s=self.connect_timeout_s,
                reply_timeout_s=self.reply_timeout_s,
            )
            if self.tls.mode is not TlsMode.PREFERRED and self.tls.mode is not TlsMode.DISABLED:
                _require_encryption(wire)
            return Session(wire, lock_timeout_s=self.lock_timeout_s)
        except (MySQLError, ssl.SSLError, OSError) as error:
            raise self._refused(error) from None

    def _refused(self, error: MySQLError | OSError) -> ConfigError | SinkError:
        if not isinstance(error, MySQLError):
            return ConfigError(f"cannot connect to {self}: {self.without_secrets(str(error))}")
        reason = self.without_secrets(described(error))
        wrong = (
            code(error) in _LOGIN_REFUSED
            or any(text in reason for text in _CANNOT_RESOLVE)
            or "SSL is required" in reason
            or "certificate" in reason.lower()
        )
        if timed_out(error):
            reason = f"it did not answer within {self.connect_timeout_s:g} s"
        return (ConfigError if wrong else SinkError)(f"cannot connect to {self}: {reason}")

    def without_secrets(self, text: str) -> str:
        """Return `text` with the passwords blotted out, should they be in it."""
        for secret in (self._secret(), self.tls.key_password):
            if secret:
                text = text.replace(secret, "***")
        return text

    def _secret(self) -> str:
        """Return the password itself, where the user gave a reference to it."""
        return followed(self.password, setting=f"the sink's password ({self})")


def is_lost(session: Session, error: MySQLError) -> bool:
    """Return whether `error` says that the connection is gone, so the reply never came."""
    return not session.open or is_connection_lost(error)


def _require_encryption(wire: WireConnection) -> None:
    if not wire.encrypted:
        wire.close()
        raise ConfigError("the server offers no encryption, and ssl_mode asks for it")
