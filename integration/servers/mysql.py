"""A real MySQL or MariaDB as a local process, with every durability setting on.

The module also has admin functions for fixtures: databases, and transactions in doubt.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import unquote, urlsplit

import pymysql

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.mysql_programs import Flavor, Progress, database_program
from onceflow.integration.servers.process import LOOPBACK, ServerError, ServerProcess

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

_ANSWER_TIMEOUT_S = 20.0
_POLL_S = 0.02
# The error numbers of the server.
ACCESS_DENIED = 1045
_NO_SUCH_SESSION = 1094
_UNKNOWN_XID = 1397
_ROLLED_BACK = 1402


class MySQLAdmin:
    """A connection with all privileges. `session` opens and closes it."""

    def __init__(self, cursor: Cursor) -> None:
        """`cursor` must autocommit."""
        self._cursor = cursor

    @classmethod
    @contextmanager
    def session(
        cls, url: str, *, timeout_s: float = _ANSWER_TIMEOUT_S
    ) -> Generator[MySQLAdmin, None, None]:
        """Yield a session with the server of `url`.

        Args:
            url: mysql://user:password@host:port/database
            timeout_s: The timeout of the connection and of each statement.
        """
        connection = connect(url, timeout_s=timeout_s)
        try:
            with connection.cursor() as cursor:
                yield cls(cursor)
        finally:
            connection.close()

    def rows(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of the statement. `arguments` replace each `%s` in it."""
        self._cursor.execute(statement, arguments or None)
        return list(cast("Iterable[tuple[Any, ...]]", self._cursor.fetchall()))

    def create_database(self, name: str) -> None:
        """Create an empty database."""
        self.rows(f"CREATE DATABASE `{name}`")

    def drop_database(self, name: str) -> None:
        """Drop a database. Fails after 10 s if another session locks its tables."""
        self.rows("SET SESSION lock_wait_timeout = 10")
        self.rows(f"DROP DATABASE `{name}`")

    def end_sessions_of(self, database: str) -> None:
        """Kill all other sessions of `database`, and wait until they have ended.

        Raises:
            ServerError: A session continues although it was killed.
        """
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while sessions := self._list_sessions(database):
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
        """Return the prepared XA transactions of the whole server, in the syntax of XA COMMIT.

        MySQL has no list for one database: `XA RECOVER` does not report databases.
        """
        (version,) = self.rows("SELECT VERSION()")[0]
        if "MariaDB" in str(version):
            return {str(row[-1]) for row in self.rows("XA RECOVER FORMAT='SQL'")}
        return {
            _xid(*cast("tuple[int, int, int, str]", row))
            for row in self.rows("XA RECOVER CONVERT XID")
        }

    def roll_back(self, transactions: set[str]) -> None:
        """Roll back `transactions` until none is prepared. Others may commit them concurrently.

        Raises:
            ServerError: A transaction stays prepared, for example because a session still owns it.
        """
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while left := self.in_doubt() & transactions:
            if time.monotonic() > deadline:
                raise ServerError(f"XA transactions {sorted(left)} cannot be rolled back")
            for xid in left:
                try:
                    self.rows(f"XA ROLLBACK {xid}")
                except pymysql.err.MySQLError as error:
                    # The server also returns the first error for a moment after the preparing
                    # session has ended. MariaDB returns the second for a transaction without
                    # changes, and ends it.
                    if error.args[0] not in (_UNKNOWN_XID, _ROLLED_BACK):
                        raise
            time.sleep(_POLL_S)

    def _list_sessions(self, database: str) -> list[int]:
        rows = self.rows(
            "SELECT id FROM information_schema.processlist WHERE db = %s AND id <> CONNECTION_ID()",
            database,
        )
        return [int(row[0]) for row in rows]

    def data_directory(self) -> str:
        """Return the server's data directory."""
        return str(self.rows("SELECT @@datadir")[0][0])


def connect(url: str, *, timeout_s: float = _ANSWER_TIMEOUT_S) -> Connection[Cursor]:
    """Return an autocommit connection with timeouts for connecting, reading and writing."""
    from onceflow.clients.mysql.connection import PyMySQLConnection

    parts = urlsplit(url)
    whole_s = max(1, round(timeout_s))
    return PyMySQLConnection(
        host=parts.hostname,
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.lstrip("/")) or None,
        charset="utf8mb4",
        autocommit=True,
        connect_timeout=whole_s,
        read_timeout=whole_s,
        write_timeout=whole_s,
    )


def _xid(format_id: int, gtrid_bytes: int, bqual_bytes: int, data: str) -> str:
    """Return the XA literal of an id from XA RECOVER, given as 0x and the hex of both parts."""
    digits = data.removeprefix("0x")
    split = 2 * gtrid_bytes
    return f"X'{digits[:split]}',X'{digits[split : split + 2 * bqual_bytes]}',{format_id}"


DEFAULT_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "character-set-server": "utf8mb4",
        # LOAD DATA LOCAL INFILE; off by default in both servers.
        "local-infile": "ON",
        "innodb-flush-log-at-trx-commit": "1",
        "innodb-doublewrite": "ON",
        "sync-binlog": "1",
        "skip-name-resolve": "ON",
    }
)
"""The options of the server. All other options keep the installed defaults."""

_PASSWORD = "onceflow"  # noqa: S105 - of a server that listens on loopback and is deleted
_SHAPES_FILES = ("innodb-", "lower-case-table-names", "character-", "collation-", "default-")
"""The options that must already be set when the data directory is created."""

# One statement on each line, as --init-file and --bootstrap require.
_SUPERUSER = (
    f"CREATE USER 'root'@'%' IDENTIFIED BY '{_PASSWORD}';\n"
    "GRANT ALL PRIVILEGES ON *.* TO 'root'@'%' WITH GRANT OPTION;\n"
)


class _MySQLProcess(ServerProcess):
    """The base of both servers. `root` has all privileges from loopback."""

    _flavor: ClassVar[Flavor]
    _flavor_options: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(
        self,
        options: Mapping[str, str] = MappingProxyType({}),
        directory: Path | None = None,
        *,
        progress: Progress | None = None,
        proxied: bool = False,
    ) -> None:
        """Describe a server. `start` or `with` runs it. May fetch the program once.

        Args:
            options: Options of the server program without their dashes, over `DEFAULT_OPTIONS`;
                `{"local-infile": "OFF"}` refuses LOAD DATA LOCAL.
            directory: As in `ServerProcess`.
            progress: Called with a message when the program is fetched.
            proxied: As in `Server`.
        """
        self._program = database_program(self._flavor, progress=progress)
        super().__init__(directory, proxied=proxied)
        given = {key.replace("_", "-"): value for key, value in options.items()}
        self._options = {**DEFAULT_OPTIONS, **self._flavor_options, **given}
        self._shapes_files = any(key.startswith(_SHAPES_FILES) for key in given)

    @property
    def version(self) -> str:
        """The version of the server program, as three numbers."""
        return self._program.version

    @property
    def url(self) -> str:
        """The superuser's URL of the database `mysql`."""
        return self.database_url("mysql")

    def database_url(self, database: str) -> str:
        """Return the superuser's URL of `database`, whether it exists or not."""
        return _url(*self.client_address, database)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _initialize(self) -> None:
        if self._shapes_files:
            self._data.mkdir(mode=0o700)
            self._create_system(self._data)
            return
        # Creating the data takes three times as long as a start, so one template for each version
        # is cached.
        template = cache_directory() / f"{self.name}-data-{self.version}"
        if not template.is_dir():
            with publish(template) as fresh:
                self._create_system(fresh)
                # The file has the server's unique id, by which replicas, for example, tell servers
                # apart.
                (fresh / "auto.cnf").unlink(missing_ok=True)
        shutil.copytree(template, self._data)

    @abstractmethod
    def _create_system(self, data: Path) -> None:
        """Create system tables and superuser in the empty directory `data`."""

    def _base_command(self, data: Path) -> list[str]:
        # At its start, MariaDB deletes temporary files in this directory, including those of other
        # running servers.
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        return [
            *self._program.command,
            *(["--user=root"] if os.geteuid() == 0 else []),
            f"--datadir={data}",
            f"--tmpdir={temporary}",
            *(f"--{key}={value}" for key, value in self._options.items()),
        ]

    def _command(self) -> Sequence[str | Path]:
        # The file of a killed server has a pid that may now belong to another process.
        (self._data / "server.sock.lock").unlink(missing_ok=True)
        return [
            *self._base_command(self._data),
            f"--port={self.port}",
            f"--bind-address={LOOPBACK}",
            # Relative to the data directory, because a socket's path is limited to 107 bytes.
            "--socket=server.sock",
            "--pid-file=server.pid",
        ]

    def _is_ready(self) -> bool:
        try:
            with MySQLAdmin.session(_url(self.host, self.port, "mysql"), timeout_s=2) as admin:
                answered_by = admin.data_directory()
        except pymysql.err.OperationalError as error:
            if error.args[0] == ACCESS_DENIED:
                raise ServerError(
                    f"port {self.port} is answered by a server that is not the one of "
                    f"{self._data}: another process took the port ({error})"
                ) from error
            return False
        if Path(answered_by) != self._data:
            raise ServerError(
                f"port {self.port} is answered by the server of {answered_by}, not by the one of "
                f"{self._data}: another process took the port"
            )
        return True


class EmbeddedMySQL(_MySQLProcess):
    """A MySQL server. Its binary log stays on, the default."""

    name: ClassVar[str] = "mysql"
    _flavor: ClassVar[Flavor] = Flavor.MYSQL
    _flavor_options: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"mysqlx": "OFF", "secure-file-priv": "NULL"}  # default: a folder of installations
    )

    def _create_system(self, data: Path) -> None:
        statements = self.directory / "users.sql"
        statements.write_text(f"DROP USER 'root'@'localhost';\n{_SUPERUSER}")
        self._run([*self._base_command(data), "--initialize-insecure", f"--init-file={statements}"])


class EmbeddedMariaDB(_MySQLProcess):
    """A MariaDB server."""

    name: ClassVar[str] = "mariadb"
    _flavor: ClassVar[Flavor] = Flavor.MARIADB

    def _create_system(self, data: Path) -> None:
        scripts = "\n".join(
            self._script(name)
            for name in ("system_tables", "performance_tables", "system_tables_data", "sys_schema")
        )
        # The statements of mariadb-install-db, which itself can only run an installed program.
        self._run(
            [*self._base_command(data), "--bootstrap"],
            stdin=(
                "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\n"
                f"{scripts}\n"
                # Delete accounts without passwords and by host name. FLUSH reloads the accounts.
                "DELETE FROM mysql.global_priv WHERE User IN ('root', '');\n"
                f"FLUSH PRIVILEGES;\n{_SUPERUSER}"
            ),
        )

    def _script(self, name: str) -> str:
        share = self._program.share
        # The files are named mysql_… before MariaDB 11.
        for path in (share / f"{prefix}_{name}.sql" for prefix in ("mariadb", "mysql")):
            if path.is_file():
                return path.read_text(encoding="utf-8")
        raise ServerError(
            f"{share} holds no script {name} of MariaDB {self._program.version}; "
            "name a complete installation in ONCEFLOW_MARIADBD"
        )


def _url(host: str, port: int, database: str) -> str:
    return f"mysql://root:{_PASSWORD}@{host}:{port}/{database}"


__all__ = [
    "ACCESS_DENIED",
    "DEFAULT_OPTIONS",
    "EmbeddedMariaDB",
    "EmbeddedMySQL",
    "MySQLAdmin",
    "connect",
]
