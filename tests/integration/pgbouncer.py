"""A real PgBouncer that gives each transaction whichever server session is free."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import psycopg
from typing_extensions import Self


def find_pgbouncer() -> str | None:
    """Return the program, also where only root's path has it."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")


class PgBouncer:
    """Transaction pooling with few sessions in front of one server, while the context is open."""

    def __init__(self, server_port: int, directory: Path, *, mode: str = "transaction") -> None:
        program = find_pgbouncer()
        assert program is not None
        self._program = program
        self._directory = directory
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        users = directory / "users.txt"
        users.write_text('"postgres" ""\n')
        self._config = directory / "pgbouncer.ini"
        self._config.write_text(
            "[databases]\n"
            f"* = host=127.0.0.1 port={server_port}\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = {mode}\n"
            "default_pool_size = 3\nserver_round_robin = 1\nignore_startup_parameters =\n"
        )

    def url(self, database: str) -> str:
        """Return where the pooled database is."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def __enter__(self) -> Self:
        log = (self._directory / "pgbouncer.log").open("wb")
        command = [self._program, str(self._config)]
        if os.geteuid() == 0:
            # It refuses to run as root.
            for path in (self._directory, *self._directory.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._until_ready(time.monotonic() + 20)
        except BaseException:
            self._stop()
            raise
        return self

    def _until_ready(self, deadline: float) -> None:
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError as error:
                text = (self._directory / "pgbouncer.log").read_text() + str(error)
                assert self._process.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.05)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
