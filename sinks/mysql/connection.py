"""Where the database is, and sessions with it on which every wait has a deadline."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from typing_extensions import override

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.secret_references import followed
from onceflow.sinks.mysql.names import literal
from onceflow.sinks.mysql.tls import Tls, TlsMode
from onceflow.sinks.mysql.wire import Reply, WireConnection
from onceflow.sinks.sql.errors import SqlError
from onceflow.sinks.sql.session import Session

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
_LOGIN_REFUSED = frozenset(
    {"1044", "1045", "1049", "1130", "1251", "1396", "1698", "1862", "3118", "4151"}
)
# A server that hangs is left alone after it; the end of the connection rolls back too.
_CLOSE_TIMEOUT_S = 2.0
_CANNOT_RESOLVE = ("Name or service not known", "nodename nor servname", "No address associated")


class MySQLSession(Session):
    """A session that is given up when the server is silent for too long. Used by one thread.

    Strict, in UTC, utf8mb4, READ COMMITTED: a prepared transaction then holds no locks between its
    rows.
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
    @override
    def is_open(self) -> bool:
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

    @cached_property
    def loads(self) -> bool:
        """Whether the server allows LOAD DATA LOCAL; it is asked once."""
        found = self.query("SHOW GLOBAL VARIABLES LIKE 'local_infile'")
        return [value for _, value in found] == ["ON"]

    @override
    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        return self._wire.query(statement)

    @override
    def execute(self, statement: str) -> int:
        return self._wire.execute(statement).rows

    def send(self, statement: str | bytes, file: Sequence[memoryview] | None = None) -> None:
        """Send `statement` with the file it loads, and await the reply in `receive`."""
        self._wire.send(statement, file)

    def receive(self) -> Reply:
        """Return the reply to what was sent."""
        return self._wire.receive()

    @override
    def begin(self) -> None:
        self.execute("START TRANSACTION READ WRITE")

    @override
    def commit(self) -> None:
        self.execute("COMMIT")

    @override
    def roll_back(self) -> None:
        if not self.is_open:
            return
        try:
            self.execute("ROLLBACK")
        except SqlError:
            self.close()

    @override
    def hasten(self) -> None:
        self._wire.wait_at_most(min(self._wire.reply_timeout_s, _CLOSE_TIMEOUT_S))

    @override
    def close(self) -> None:
        self._wire.close()


def own(session: Session) -> MySQLSession:
    """Return `session` as what it is: a `MySQLEndpoint` made it."""
    assert isinstance(session, MySQLSession), session
    return session


@dataclass(frozen=True, slots=True)
class MySQLEndpoint:
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

    def connect(self, name: str) -> MySQLSession:
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
            return MySQLSession(wire, lock_timeout_s=self.lock_timeout_s)
        except (SqlError, ssl.SSLError, OSError) as error:
            raise self._refused(error) from None

    def _refused(self, error: SqlError | OSError) -> ConfigError | SinkError:
        reason = self.without_secrets(str(error))
        wrong = (
            not isinstance(error, SqlError)
            or error.code in _LOGIN_REFUSED
            or any(text in reason for text in _CANNOT_RESOLVE)
            or "SSL is required" in reason
            or "certificate" in reason.lower()
        )
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


def _require_encryption(wire: WireConnection) -> None:
    if not wire.encrypted:
        wire.close()
        raise ConfigError("the server offers no encryption, and ssl_mode asks for it")
