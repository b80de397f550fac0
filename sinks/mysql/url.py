"""Reads a database's URL in the forms that users have at hand."""

from __future__ import annotations

import re

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from onceflow.core.errors import ConfigError
from onceflow.sinks.mysql.connection import MySQLEndpoint
from onceflow.sinks.mysql.tls import Tls

_FLAVORS = ("mysql", "mariadb")
_DRIVERS = ("", "pymysql", "mysqldb", "mysqlconnector", "mariadbconnector")
_PORT = 3306
_SCHEME = re.compile(r"(jdbc:)?[a-z0-9]+(\+[a-z0-9]+)?")
_KNOWN = frozenset(
    {"user", "password", "charset", "unix_socket", "ssl_mode", "sslmode", "usessl", "ssl_ca"}
    | {"ssl_cert", "ssl_key", "ssl_key_password"}
)


def endpoint_of(
    url: str,
    *,
    user: str | None,
    password: str | None,
    connect_timeout_s: float,
    reply_timeout_s: float,
    lock_timeout_s: float,
) -> MySQLEndpoint:
    """Return what `url` says, with `user` and `password` over it.

    Takes `mysql://user:password@host:3306/database?ssl_mode=required`, the same with `mariadb` or
    with SQLAlchemy's `+pymysql`, and JDBC's `jdbc:mysql://host/database?user=…&sslMode=…`, of which
    properties that only concern the JDBC driver are left alone.

    Raises:
        ConfigError: It is none of these. The text never repeats the URL, which may hold a password.
    """
    parsed, settings, from_jdbc = _parsed(url)
    unknown = sorted(set(settings) - _KNOWN)
    if unknown and not from_jdbc:
        raise ConfigError(
            f"url has the unknown settings {', '.join(unknown)}; known are "
            f"{', '.join(sorted(_KNOWN - {'sslmode', 'usessl'}))}"
        )
    if settings.get("charset", "utf8mb4").lower() != "utf8mb4":
        raise ConfigError(
            f"url has charset={settings['charset']}: rows are written in utf8mb4 only"
        )
    if not parsed.database:
        raise ConfigError("url names no database: mysql://user@host:3306/database")
    word = settings.get("ssl_mode") or settings.get("sslmode") or ""
    if not word and settings.get("usessl"):
        word = "required" if settings["usessl"].lower() == "true" else "disabled"
    name = user if user is not None else (parsed.username or settings.get("user") or "")
    if not name:
        raise ConfigError("url names no user; write mysql://user@host/database, or pass user=…")
    secret = password if password is not None else (parsed.password or settings.get("password"))
    return MySQLEndpoint(
        host=parsed.host or "localhost",
        port=parsed.port or _PORT,
        user=name,
        password=str(secret or ""),
        database=parsed.database,
        unix_socket=settings.get("unix_socket", ""),
        tls=Tls.of(
            word,
            ca=settings.get("ssl_ca", ""),
            certificate=settings.get("ssl_cert", ""),
            key=settings.get("ssl_key", ""),
            key_password=settings.get("ssl_key_password", ""),
        ),
        connect_timeout_s=connect_timeout_s,
        reply_timeout_s=reply_timeout_s,
        lock_timeout_s=lock_timeout_s,
    )


def _parsed(url: str) -> tuple[URL, dict[str, str], bool]:
    scheme, separator, rest = url.partition("://")
    from_jdbc = scheme.startswith("jdbc:")
    flavor, _, driver = scheme.removeprefix("jdbc:").partition("+")
    if not separator or flavor not in _FLAVORS or driver not in _DRIVERS:
        raise ConfigError(
            "url must begin with mysql://, mariadb://, mysql+pymysql://, jdbc:mysql:// or "
            "jdbc:mariadb://"
            # Only what is surely a scheme: the rest of an unreadable url may be a password.
            + (f", not {scheme}://" if separator and _SCHEME.fullmatch(scheme) else "")
        )
    try:
        parsed = make_url(f"mysql://{rest}")
    except (ArgumentError, ValueError):
        raise ConfigError(
            f"url cannot be read as {flavor}://user@host:3306/database; percent-encode special "
            "characters of the password, or pass password=…"
        ) from None
    settings = {
        key.lower(): value if isinstance(value, str) else value[-1]
        for key, value in parsed.query.items()
    }
    return parsed, settings, from_jdbc
