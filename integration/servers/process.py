"""A real server as a plain process of this machine: start, kill, pause, unpause, restart, stop.

The verbs are those of a container, so that a test of a crash does not care which it has. The data
directory and the port outlive `kill()` and `start()`: a client that retries its old address finds
the same server with what it had made durable.

A server is *ready* when it answers in its own protocol and proves to be the one that was started
here (data directory, cluster id): an open port is neither.
"""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from typing_extensions import Self

from onceflow.core.errors import OnceflowError
from onceflow.integration.faults.processes import (
    Watchdog,
    kill_tree,
    pause_tree,
    signal_process,
    unpause_tree,
)

LOOPBACK = "127.0.0.1"
_LOG_TAIL_CHARS = 3000
_POLL_S = 0.02
# Below every default ephemeral range (Linux 32768, macOS 49152): while the server is down, a client
# that retries an ephemeral port can be given that very port as its own and connect to itself.
_PORTS = range(15000, 30000)


class ServerError(OnceflowError):
    """Raised when an embedded server cannot be installed, started or spoken to."""

    domain = "external"
    retry = "never"


def free_port() -> int:
    """Return a loopback port that nobody listens on, outside the ephemeral ranges."""
    for port in random.sample(_PORTS, 200):
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port in 200 tries between {_PORTS.start} and {_PORTS.stop}")


class ServerProcess(ABC):
    """One server. Used by one thread; `kill` may be called from any."""

    name: ClassVar[str]
    _orderly_stop: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path | None = None) -> None:
        """Choose a port and a directory; nothing runs before `start`.

        Args:
            directory: Where the server keeps its data, kept by `stop`. A temporary directory that
                `stop` deletes when None.
        """
        self._owns_directory = directory is None
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix=f"onceflow-{self.name}-"))
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory.resolve()
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: Watchdog | None = None

    @abstractmethod
    def _initialize(self) -> None:
        """Create the data in `directory`; called once in the directory's life."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """Return the command that runs the server in the foreground."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Return whether the server answers in its protocol, waiting a second at most.

        Raises:
            ServerError: Somebody else's server answers.
        """

    @property
    def pid(self) -> int | None:
        """The server's own process while it runs (or is paused), None otherwise."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """Everything the server has printed, over all its starts."""
        return self.directory / "server.log"

    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Return once the server answers. Does nothing when it runs already.

        Raises:
            ServerError: It exited, or was not ready in `timeout_s`; the end of its log is quoted.
        """
        if self.pid is not None:
            return self
        deadline = time.monotonic() + timeout_s
        initialized = self.directory / "initialized"
        if not initialized.exists():
            self._initialize()
            initialized.touch()
        self._forget_process()
        with self.log_path.open("ab") as log:
            self._process = self._spawn(log.fileno())
        self._watchdog = Watchdog(
            self._process.pid, self.directory if self._owns_directory else None
        )
        try:
            self._await_ready(self._process, deadline, timeout_s)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL the server with all its processes; return when none runs. Idempotent.

        Leaves on disk what a crash of the server leaves: all it has written, fsynced or not.
        """
        if self._process is not None:
            kill_tree(self._process.pid)
        self._forget_process()

    def restart(self, *, timeout_s: float = 60.0) -> Self:
        """Kill the server and start it again on the same directory and port."""
        self.kill()
        return self.start(timeout_s=timeout_s)

    def pause(self) -> None:
        """Freeze every process of the server: connections stay open and nothing answers."""
        pause_tree(self._running_pid())

    def unpause(self) -> None:
        """Let a paused server go on."""
        unpause_tree(self._running_pid())

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End the server and delete its directory if that was made here. Idempotent.

        A directory of the caller's is kept, after an orderly shutdown; after `timeout_s` without
        one, or when the directory goes anyway, the server is killed.
        """
        if self._owns_directory:
            self.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        if self._process is not None and self.pid is not None:
            self.unpause()
            signal_process(self._process.pid, self._orderly_stop)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                kill_tree(self._process.pid)
        self._forget_process()

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        if not self.log_path.exists():
            return "(no log)"
        return self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]

    def __enter__(self) -> Self:
        """Start the server."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the server."""
        self.stop()

    def _spawn(self, log: int) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in a terminal reaches the test run and not its servers.
        return subprocess.Popen(
            self._command(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _run(
        self, command: Sequence[str | Path], *, stdin: str = "", timeout_s: float = 60.0
    ) -> None:
        """Run one step of the initialization; its output goes to the server's log."""
        with self.log_path.open("ab") as log:
            try:
                subprocess.run(
                    command,
                    check=True,
                    input=stdin.encode(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s,
                )
            except (subprocess.SubprocessError, OSError) as error:
                raise ServerError(
                    f"{self.name} could not be initialized in {self.directory}: {error}\n"
                    f"{self.log_tail()}"
                ) from error

    def _await_ready(
        self, process: subprocess.Popen[bytes], deadline: float, timeout_s: float
    ) -> None:
        while not self._is_ready():
            if process.poll() is not None:
                raise ServerError(
                    f"{self.name} on port {self.port} ended with status {process.returncode} "
                    f"instead of starting; its log ends:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} on port {self.port} did not answer in {timeout_s:g} s; "
                    f"its log ends:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def _running_pid(self) -> int:
        pid = self.pid
        if pid is None:
            raise ServerError(f"{self.name} on port {self.port} does not run; call start() first")
        return pid

    def _forget_process(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._watchdog is not None:
            self._watchdog.release()
            self._watchdog = None
