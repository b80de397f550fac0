"""A real MySQL or MariaDB as a process of this machine, with every durability setting on."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import pymysql

from onceflow.integration.servers.mysql_admin import ACCESS_DENIED, MySQLAdmin
from onceflow.integration.servers.mysql_programs import Flavor, Progress, database_program
from onceflow.integration.servers.process import LOOPBACK, ServerError, ServerProcess

DEFAULT_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "character-set-server": "utf8mb4",
        # LOAD DATA LOCAL INFILE; off as installed by both.
        "local-infile": "ON",
        "innodb-flush-log-at-trx-commit": "1",
        "innodb-doublewrite": "ON",
        "sync-binlog": "1",
        "skip-name-resolve": "ON",
    }
)
"""What is said to the server; what is not said here stays as installed."""

_PASSWORD = "onceflow"  # noqa: S105 - of a server that listens on loopback and is deleted
# One statement a line, as --init-file and --bootstrap want them.
_SUPERUSER = (
    f"CREATE USER 'root'@'%' IDENTIFIED BY '{_PASSWORD}';\n"
    "GRANT ALL PRIVILEGES ON *.* TO 'root'@'%' WITH GRANT OPTION;\n"
)


class _MySQLProcess(ServerProcess):
    """What the two servers have in common; `root` may do everything, from loopback."""

    _flavor: ClassVar[Flavor]
    _flavor_options: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(
        self,
        options: Mapping[str, str] = MappingProxyType({}),
        directory: Path | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Describe a server; `start` or `with` runs it. May fetch the program, once.

        Args:
            options: Options of the server program without their dashes, over `DEFAULT_OPTIONS`;
                `{"local-infile": "OFF"}` refuses LOAD DATA LOCAL.
            directory: As in `ServerProcess`.
            progress: Told when the program is fetched.
        """
        self._program = database_program(self._flavor, progress=progress)
        super().__init__(directory)
        given = {key.replace("_", "-"): value for key, value in options.items()}
        self._options = {**DEFAULT_OPTIONS, **self._flavor_options, **given}

    @property
    def version(self) -> str:
        """The version of the server program, three numbers."""
        return self._program.version

    @property
    def url(self) -> str:
        """The superuser's URL of the database `mysql`."""
        return self.database_url("mysql")

    def database_url(self, database: str) -> str:
        """Return the superuser's URL of `database`, whether it exists or not."""
        return f"mysql://root:{_PASSWORD}@{LOOPBACK}:{self.port}/{database}"

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @abstractmethod
    def _initialize(self) -> None:
        """Create the system tables and the superuser."""

    def _base_command(self) -> list[str]:
        return [
            *self._program.command,
            *(["--user=root"] if os.geteuid() == 0 else []),
            f"--datadir={self._data}",
            *(f"--{key}={value}" for key, value in self._options.items()),
        ]

    def _command(self) -> Sequence[str | Path]:
        # Of a server that was killed: it names a pid, which by now may be somebody else's.
        (self._data / "server.sock.lock").unlink(missing_ok=True)
        return [
            *self._base_command(),
            f"--port={self.port}",
            f"--bind-address={LOOPBACK}",
            # In the data directory, and relative: a socket's path is limited to 107 bytes.
            "--socket=server.sock",
            "--pid-file=server.pid",
        ]

    def _is_ready(self) -> bool:
        try:
            with MySQLAdmin.session(self.url, timeout_s=2) as admin:
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
    """One MySQL server; its binary log stays on, as installed."""

    name: ClassVar[str] = "mysql"
    _flavor: ClassVar[Flavor] = Flavor.MYSQL
    _flavor_options: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"mysqlx": "OFF", "secure-file-priv": "NULL"}  # a folder that only an installation makes
    )

    def _initialize(self) -> None:
        statements = self.directory / "users.sql"
        statements.write_text(f"DROP USER 'root'@'localhost';\n{_SUPERUSER}")
        self._run([*self._base_command(), "--initialize-insecure", f"--init-file={statements}"])


class EmbeddedMariaDB(_MySQLProcess):
    """One MariaDB server."""

    name: ClassVar[str] = "mariadb"
    _flavor: ClassVar[Flavor] = Flavor.MARIADB

    def _initialize(self) -> None:
        self._data.mkdir(mode=0o700)
        scripts = "\n".join(
            self._script(name)
            for name in ("system_tables", "performance_tables", "system_tables_data", "sys_schema")
        )
        # What mariadb-install-db says, which could run an installed program only.
        self._run(
            [*self._base_command(), "--bootstrap"],
            stdin=(
                "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\n"
                f"{scripts}\n"
                # Without passwords, and by host name; then the accounts are read from the table.
                "DELETE FROM mysql.global_priv WHERE User IN ('root', '');\n"
                f"FLUSH PRIVILEGES;\n{_SUPERUSER}"
            ),
        )

    def _script(self, name: str) -> str:
        share = self._program.share
        # Called mysql_… before MariaDB 11.
        for path in (share / f"{prefix}_{name}.sql" for prefix in ("mariadb", "mysql")):
            if path.is_file():
                return path.read_text(encoding="utf-8")
        raise ServerError(
            f"{share} holds no script {name} of MariaDB {self._program.version}; "
            "name a complete installation in ONCEFLOW_MARIADBD"
        )


__all__ = ["DEFAULT_OPTIONS", "EmbeddedMariaDB", "EmbeddedMySQL"]
