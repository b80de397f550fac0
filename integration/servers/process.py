"""The base class of servers that run as local processes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

from typing_extensions import Self

from onceflow.core import local_files
from onceflow.integration.faults import processes
from onceflow.integration.servers.server import LOOPBACK, Server, ServerError, free_port

__all__ = ["LOOPBACK", "ServerError", "ServerProcess", "exclusive", "free_port"]

_LOG_TAIL_CHARS = 3000
_POLL_S = 0.02


@contextmanager
def exclusive(path: Path, timeout_s: float) -> Generator[None, None, None]:
    """Hold the lock file `path` for the block, like `core.local_files.exclusive`.

    Raises:
        ServerError: Another process held it for `timeout_s`.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(local_files.exclusive(path, timeout_s))
        except TimeoutError as error:
            raise ServerError(str(error)) from error
        yield


class ServerProcess(Server):
    """A server that runs as a child of this process and is killed when this process dies."""

    _orderly_stop: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path | None = None, *, proxied: bool = False) -> None:
        """Choose a port and a directory. `start` runs the server.

        Args:
            directory: The data directory, which `stop` keeps. None: a temporary directory, which
                `stop` deletes.
            proxied: As in `Server`.
        """
        super().__init__(proxied=proxied)
        self._owns_directory = directory is None
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix=f"onceflow-{self.name}-"))
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory.resolve()
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: processes.Watchdog | None = None

    @abstractmethod
    def _initialize(self) -> None:
        """Create the data in `directory`. Called once for each directory."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """Return the command that runs the server in the foreground."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Return True if the server answers in its protocol. Waits a second at most.

        Raises:
            ServerError: Another server answers.
        """

    @property
    def pid(self) -> int | None:
        """The pid of the server if it runs or is paused, or None."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def running(self) -> bool:
        """True if the server runs or is paused."""
        return self.pid is not None

    @property
    def log_path(self) -> Path:
        """The log file with the server's output, over all its starts."""
        return self.directory / "server.log"

    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Start the server and wait until it answers. Does nothing if it already runs.

        Raises:
            ServerError: The server exited, or was not ready within `timeout_s` after the start of
                its process. The message quotes the end of its log.
        """
        if self.pid is not None:
            return self
        initialized = self.directory / "initialized"
        if not initialized.exists():
            self._initialize()
            initialized.touch()
        self._forget_process()
        with self.log_path.open("ab") as log:
            self._process = self._spawn(log.fileno())
        self._watchdog = processes.Watchdog(
            self._process.pid, self.directory if self._owns_directory else None
        )
        # Start the timeout only now: the first use on a machine may have built the program, which
        # takes minutes.
        deadline = time.monotonic() + timeout_s
        try:
            self._await_ready(self._process, deadline, timeout_s)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL the server with all its processes. Return when none runs. Idempotent.

        The disk has the same content as after a crash of the server: all written data, fsynced or
        not.
        """
        if self._process is not None:
            processes.kill_tree(self._process.pid)
        self._forget_process()

    def pause(self) -> None:
        """Pause all processes. Connections stay open, and the server does not answer."""
        processes.pause_tree(self._running_pid())

    def unpause(self) -> None:
        """Resume a paused server."""
        processes.unpause_tree(self._running_pid())

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End the server, and delete its directory if it is temporary. Idempotent.

        If the directory was given by the caller, the server is shut down in order and the directory
        is kept. After `timeout_s`, or if the directory is temporary, the server is killed.
        """
        self._close_network()
        if self._owns_directory:
            self.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        if self._process is not None and self.pid is not None:
            self.unpause()
            processes.signal_process(self._process.pid, self._orderly_stop)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                processes.kill_tree(self._process.pid)
        self._forget_process()

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        if not self.log_path.exists():
            return "(no log)"
        return self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]

    def _spawn(self, log: int) -> subprocess.Popen[bytes]:
        # Use a new session, so that Ctrl-C in a terminal reaches the test run, but not its servers.
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
        """Run a command of the initialization. Its output goes to the server's log."""
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
