"""Where the database is, and connections to it on which every wait has a deadline.

No session state is relied on: settings are `SET LOCAL`, no statement is prepared by name, so that a
connection may go through a pooler that gives each transaction another session.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.secret_references import followed

_T = TypeVar("_T")

# Found out within half a minute when the server's machine is gone without a word.
_DEFAULTS: dict[str, str] = {
    "client_encoding": "utf8",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
}
_APPLICATION_NAME_LENGTH_MAX = 63
_SCHEME = re.compile(r"(jdbc:)?[a-z0-9]+(\+[a-z0-9]+)?")
# Startup failures carry no SQLSTATE, so their text decides; what is not listed may heal by itself.
_WRONG_SETTING = re.compile(
    r"authentication failed|no password supplied|no pg_hba\.conf entry|not permitted to log in"
    r"|(database|role) \".*\" does not exist|permission denied for database|\[Errno -2\]"
    r"|could not translate host name|invalid (integer )?value|does not support SSL|certificate"
)


class ReplyTimeout(psycopg.OperationalError):
    """Raised when the server did not answer in time; the connection is closed by then."""


class BoundedConnection(psycopg.Connection[TupleRow]):
    """A connection that is given up when the server is silent for too long."""

    reply_timeout_s: float = 120.0

    def wait(self, gen: Generator[Any, Any, _T], *args: Any, **kwargs: Any) -> _T:
        """Return what `gen` returns, or close the connection.

        Raises:
            ReplyTimeout: The server neither answered nor took data for `reply_timeout_s`.
        """
        try:
            return super().wait(until_silent(gen, self.reply_timeout_s), *args, **kwargs)
        except ReplyTimeout:
            self.close()
            raise


def until_silent(gen: Generator[Any, Any, _T], timeout_s: float) -> Generator[Any, Any, _T]:
    """Return what `gen` returns, unless it hears nothing for `timeout_s`.

    psycopg resumes it ten times a second, with 0 while nothing happens.
    """
    deadline = time.monotonic() + timeout_s
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() > deadline:
                raise ReplyTimeout(f"the server did not answer within {timeout_s:g} s")
            state = gen.send(ready)
    except StopIteration as stop:
        return cast("_T", stop.value)


@dataclass(frozen=True, slots=True, repr=False)
class Endpoint:
    """A database and how to reach it; pickles with what the user gave and never prints it."""

    parameters: tuple[tuple[str, str], ...]
    connect_timeout_s: float
    reply_timeout_s: float

    def __repr__(self) -> str:
        return f"Endpoint({self})"

    def __str__(self) -> str:
        given = dict(self.parameters)
        host = given.get("host") or given.get("hostaddr") or "the default host"
        return (
            f"database {given.get('dbname') or given.get('user') or 'of the user'!r} at "
            f"{host}:{given.get('port') or 5432} as user {given.get('user') or 'of the system'!r}"
        )

    def connect(self, name: str) -> BoundedConnection:
        """Return a new connection in autocommit mode, shown to the server's operator as `name`.

        Raises:
            ConfigError: It is refused for good: password, database, role, host or encryption.
            SinkError: It is refused now: not running, starting, full, or too slow.
        """
        parameters = {**_DEFAULTS, **self._followed()}
        parameters["application_name"] = name[:_APPLICATION_NAME_LENGTH_MAX]
        # libpq takes whole seconds, and 1 as 2.
        parameters["connect_timeout"] = str(max(2, round(self.connect_timeout_s)))
        try:
            connection = BoundedConnection.connect(
                **cast("dict[str, Any]", parameters), autocommit=True, prepare_threshold=None
            )
        except psycopg.Error as error:
            raise self._refused(error) from None
        connection.reply_timeout_s = self.reply_timeout_s
        return connection

    def _refused(self, error: psycopg.Error) -> ConfigError | SinkError:
        reason = self.without_secrets(str(error).strip())
        kind = ConfigError if _WRONG_SETTING.search(reason) else SinkError
        return kind(f"cannot connect to {self}: {reason}")

    def without_secrets(self, text: str) -> str:
        """Return `text` with the password blotted out, should it be in it."""
        for key, value in self._followed().items():
            if key in ("password", "sslpassword") and value:
                text = text.replace(value, "***")
        return text

    def _followed(self) -> dict[str, str]:
        """Return the parameters with references to secrets followed, for here and now."""
        return {
            key: followed(value, setting=f"the sink's {key} ({self})")
            for key, value in self.parameters
        }


def endpoint(
    url: str,
    *,
    user: str | None,
    password: str | None,
    connect_timeout_s: float,
    reply_timeout_s: float,
) -> Endpoint:
    """Return what `url` says, in libpq's terms, with `user` and `password` over it.

    Takes libpq's URLs (`postgresql://h1,h2/db?sslmode=require`), SQLAlchemy's
    (`postgresql+psycopg://…`) and JDBC's (`jdbc:postgresql://…?user=…`).

    Raises:
        ConfigError: It is none of these. The text never repeats the URL, which may hold a password.
    """
    scheme, separator, _ = url.partition("://")
    driverless = scheme.removeprefix("jdbc:").partition("+")[0]
    if not separator or driverless not in ("postgresql", "postgres"):
        raise ConfigError(
            "url must begin with postgresql://, postgresql+psycopg:// or jdbc:postgresql://"
            # Only what is surely a scheme: the rest of an unreadable url may be a password.
            + (f", not {scheme}://" if separator and _SCHEME.fullmatch(scheme) else "")
        )
    parameters = _from_sqlalchemy(url) if "+" in scheme else _from_libpq(url)
    if user is not None:
        parameters["user"] = user
    if password is not None:
        parameters["password"] = password
    return Endpoint(tuple(sorted(parameters.items())), connect_timeout_s, reply_timeout_s)


def _from_libpq(url: str) -> dict[str, str]:
    try:
        parsed = conninfo_to_dict(url.removeprefix("jdbc:"))
    except psycopg.ProgrammingError as error:
        # What follows the first quote or colon is a piece of the URL.
        reason = re.split(r"[:\"]", str(error), maxsplit=1)[0].strip()
        raise ConfigError(
            f"url cannot be read as postgresql://user@host:port/database: {reason}; "
            "percent-encode special characters of the password, or pass password=…"
        ) from None
    return {key: str(value) for key, value in parsed.items() if value is not None}


def _from_sqlalchemy(url: str) -> dict[str, str]:
    try:
        dialect = cast("Any", PGDialect_psycopg)()
        _, parsed = dialect.create_connect_args(make_url(url))
    except (ArgumentError, ValueError):
        raise ConfigError(
            "url cannot be read as postgresql+psycopg://user@host:port/database; "
            "percent-encode special characters of the password, or pass password=…"
        ) from None
    return {str(key): str(value) for key, value in cast("dict[str, Any]", parsed).items()}


def is_lost(connection: psycopg.Connection[TupleRow], error: psycopg.Error) -> bool:
    """Return whether `error` says that the connection is gone, so the reply never came.

    Class 08 is the connection's own; by 57P the server ends the session, as it stops or crashed.
    """
    state = error.sqlstate or ""
    return connection.closed or state.startswith(("08", "57P"))
