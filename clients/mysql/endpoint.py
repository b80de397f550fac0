"""The address of the database and the encryption of its login, read from the user's URL."""

from __future__ import annotations

import re
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from typing_extensions import override

from onceflow.clients.mysql.connection import MySQLSession, WireConnection, make_unverified_tls
from onceflow.clients.sql.session import DatabaseAccess, SqlError
from onceflow.core.errors import ConfigError, SettingsRefused, SinkError
from onceflow.core.secret_references import follow_references

_FLAVORS = ("mysql", "mariadb")
_DRIVERS = ("", "pymysql", "mysqldb", "mysqlconnector", "mariadbconnector")
_PORT = 3306
_SCHEME = re.compile(r"(jdbc:)?[a-z0-9]+(\+[a-z0-9]+)?")
_KNOWN = frozenset(
    {"user", "password", "charset", "unix_socket", "ssl_mode", "sslmode", "usessl", "ssl_ca"}
    | {"ssl_cert", "ssl_key", "ssl_key_password"}
)
_LOGIN_REFUSED = frozenset(
    {"1044", "1045", "1049", "1059", "1102", "1130", "1251", "1396", "1698", "1862", "3118", "4151"}
)
_TLS_REFUSED = re.compile(r"\[SSL: (?!UNEXPECTED_EOF)|certificate", re.IGNORECASE)
"""The words of a refused handshake. A connection that is only lost ends without them."""
_CANNOT_RESOLVE = ("Name or service not known", "nodename nor servname", "No address associated")


class TlsMode(Enum):
    """MySQL's --ssl-mode."""

    DISABLED = "disabled"
    PREFERRED = "preferred"
    """Encrypted if the server supports it; the server's identity is not verified."""
    REQUIRED = "required"
    VERIFY_CA = "verify_ca"
    VERIFY_IDENTITY = "verify_identity"


# The words of MySQL's programs and its JDBC driver, and of MariaDB's.
_WORDS = {
    **{mode.value: mode for mode in TlsMode},
    "disable": TlsMode.DISABLED,
    "trust": TlsMode.REQUIRED,
    "verify_full": TlsMode.VERIFY_IDENTITY,
}


@dataclass(frozen=True, slots=True)
class Tls:
    """The encryption settings of a connection."""

    mode: TlsMode = TlsMode.PREFERRED
    ca: str = ""
    certificate: str = ""
    key: str = ""
    key_password: str = field(default="", repr=False)

    @classmethod
    def of(cls, word: str, *, ca: str, certificate: str, key: str, key_password: str) -> Tls:
        """Return the settings that a URL contains; `word` may be empty.

        Raises:
            ConfigError: There is no such mode.
        """
        mode = TlsMode.VERIFY_CA if ca else TlsMode.PREFERRED
        if word:
            tls_mode = _WORDS.get(word.lower().replace("-", "_"))
            if tls_mode is None:
                raise ConfigError(
                    f"ssl_mode={word!r}: choose one of {', '.join(each.value for each in TlsMode)}"
                )
            mode = tls_mode
        return cls(mode, ca, certificate, key, key_password)

    def arguments(self) -> dict[str, Any]:
        """Return the TLS arguments for PyMySQL.

        Raises:
            OSError: A file cannot be read or used. The message names its setting and its path.
        """
        if self.mode is TlsMode.DISABLED:
            return {"ssl_disabled": True}
        if self.mode is TlsMode.PREFERRED and not self.certificate:
            # PyMySQL's own default.
            return {}
        verifies = self.mode in (TlsMode.VERIFY_CA, TlsMode.VERIFY_IDENTITY)
        if verifies or self.ca:
            with _naming_files(("ssl_ca", self.ca)):
                context = ssl.create_default_context(cafile=self.ca or None)
        else:
            context = make_unverified_tls()
        context.check_hostname = self.mode is TlsMode.VERIFY_IDENTITY
        context.verify_mode = ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE
        if self.certificate:
            with _naming_files(("ssl_cert", self.certificate), ("ssl_key", self.key)):
                # OpenSSL asks a terminal for the password of a key if the argument is None.
                context.load_cert_chain(
                    self.certificate, self.key or None, lambda: self.key_password
                )
            context.sslsocket_class = _ClientCertificateSocket
        return {"ssl": context}


@contextmanager
def _naming_files(*settings: tuple[str, str]) -> Generator[None, None, None]:
    """Name the files of `settings`, pairs of setting and path, in an error of the block.

    Raises:
        OSError: A file cannot be read, or the block raised an OSError without a path.
    """
    given = [(setting, path) for setting, path in settings if path]
    for setting, path in given:
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise OSError(f"{setting}={path}: {error.strerror}") from error
    try:
        yield
    except OSError as error:
        names = " and ".join(f"{setting}={path}" for setting, path in given)
        raise OSError(f"{names}: {error}") from error


class _ClientCertificateSocket(ssl.SSLSocket):
    """A socket that raises the server's reason if the server refuses the client's certificate.

    With TLS 1.3 the server refuses it after the client's handshake. Then the client's first write
    fails, and the reason is still unread.
    """

    @override
    def send(self, data: Any, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLEOFError, ConnectionError):
            self.recv(1)
            raise


@dataclass(frozen=True, slots=True)
class MySQLEndpoint:
    """The address of a database and the settings of its connections.

    Pickles contain the user's settings; texts never show secrets.
    """

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
        server = self.unix_socket or f"{self.host}:{self.port}"
        return f"database {self.database!r} at {server} as user {self.user!r}"

    def connect(self, name: str) -> MySQLSession:
        """Return a new session in autocommit mode, shown to the server's operator as `name`.

        Raises:
            SettingsRefused: Password, database, user, host or encryption is refused.
            SinkError: The connection is refused now: the server is not running, starting, full or
                too slow.
        """
        socket = {"unix_socket": self.unix_socket} if self.unix_socket else {}
        try:
            wire = WireConnection(
                {
                    "host": self.host,
                    "port": self.port,
                    "user": self.user,
                    # As bytes, because a str would be sent in latin1.
                    "password": self._secret().encode(),
                    "database": self.database,
                    "program_name": name,
                    **socket,
                    **self.tls.arguments(),
                },
                timeout_s=self.connect_timeout_s,
                reply_timeout_s=self.reply_timeout_s,
            )
            if self.tls.mode is not TlsMode.PREFERRED and self.tls.mode is not TlsMode.DISABLED:
                _require_encryption(wire)
            return MySQLSession(wire, lock_timeout_s=self.lock_timeout_s)
        except (SqlError, ssl.SSLError, OSError) as error:
            raise self._to_refusal(error) from None

    def _to_refusal(self, error: SqlError | OSError) -> SettingsRefused | SinkError:
        reason = self.without_secrets(str(error))
        wrong = (
            not isinstance(error, SqlError)
            or error.code in _LOGIN_REFUSED
            or any(text in reason for text in _CANNOT_RESOLVE)
            or "SSL is required" in reason
            or _TLS_REFUSED.search(reason) is not None
        )
        return (SettingsRefused if wrong else SinkError)(f"cannot connect to {self}: {reason}")

    def without_secrets(self, text: str) -> str:
        """Return `text` with the passwords replaced by asterisks."""
        for secret in (self._secret(), self.tls.key_password):
            if secret:
                text = text.replace(secret, "***")
        return text

    def _secret(self) -> str:
        """Return the password, resolved if the user gave a reference to it."""
        return follow_references(self.password, setting=f"password of {self}")


def endpoint_of(access: DatabaseAccess, *, lock_timeout_s: float) -> MySQLEndpoint:
    """Return the endpoint that `url` describes; `user` and `password` override the url's.

    Takes `mysql://user:password@host:3306/database?ssl_mode=required`, the same with `mariadb` or
    with SQLAlchemy's `+pymysql`, and JDBC's `jdbc:mysql://host/database?user=…&sslMode=…`.
    Properties that only concern the JDBC driver are ignored.

    Raises:
        ConfigError: The URL has another form. The error text does not repeat it, because it may
            contain a password.
    """
    parsed, settings, from_jdbc = _parse(access.url)
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
    name = access.user
    if name is None:
        name = parsed.username or settings.get("user") or ""
    if not name:
        raise ConfigError("url names no user; write mysql://user@host/database, or pass user=…")
    secret = access.password
    if secret is None:
        secret = parsed.password or settings.get("password")
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
        connect_timeout_s=access.connect_timeout_s,
        reply_timeout_s=access.statement_timeout_s,
        lock_timeout_s=lock_timeout_s,
    )


@dataclass(frozen=True, slots=True)
class _Address:
    username: str
    password: str = field(repr=False)
    host: str
    port: int | None
    database: str


def _parse(url: str) -> tuple[_Address, dict[str, str], bool]:
    scheme, separator, url_path = url.partition("://")
    from_jdbc = scheme.startswith("jdbc:")
    flavor, _, driver = scheme.removeprefix("jdbc:").partition("+")
    if not separator or flavor not in _FLAVORS or driver not in _DRIVERS:
        raise ConfigError(
            "url must begin with mysql://, mariadb://, mysql+pymysql://, jdbc:mysql:// or "
            "jdbc:mariadb://"
            # Show only a text that is certainly a scheme: other parts of an unreadable url may be a
            # password.
            + (f", not {scheme}://" if separator and _SCHEME.fullmatch(scheme) else "")
        )
    try:
        address, query = _split(url_path)
    except ValueError:
        raise ConfigError(
            f"url cannot be read as {flavor}://user@host:3306/database; percent-encode special "
            "characters of the password, or pass password=…"
        ) from None
    settings = {key.lower(): value for key, value in parse_qsl(query)}
    return address, settings, from_jdbc


def _split(url_path: str) -> tuple[_Address, str]:
    """Split the text after the scheme, as SQLAlchemy does: a password may contain / and ?.

    Raises:
        ConfigError: There are several hosts.
        ValueError: The port is not a number, or there is an @ in the password.
    """
    login, at, address_and_query = url_path.partition("@")
    if not at or "/" in login.partition(":")[0]:
        login, address_and_query = "", url_path
    username, _, password = login.partition(":")
    address, _, query = address_and_query.partition("?")
    server, _, database = address.partition("/")
    # With another @, this part contains an end of the password.
    if "@" in server:
        raise ValueError("a part of the password would be taken for the host")
    if "," in server:
        raise ConfigError("url names several hosts; name one, by which the primary is reached")
    if server.startswith("["):
        host, _, port = server[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = server.partition(":")
    number = int(port) if port else None
    return (
        _Address(unquote(username), unquote(password), host, number, unquote(database)),
        query,
    )


def _require_encryption(wire: WireConnection) -> None:
    if not wire.encrypted:
        wire.close()
        raise ConfigError("the server offers no encryption, and ssl_mode asks for it")
