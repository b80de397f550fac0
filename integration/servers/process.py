"""A real server as a plain process of this machine."""

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

from onceflow.core.local_files import cache
from onceflow.integration.faults.processes import (
    Watchdog,
    kill_tree,
    pause_tree,
    signal_process,
    unpause_tree,
)
from onceflow.integration.servers.server import LOOPBACK, Server, ServerError, free_port

__all__ = ["LOOPBACK", "ServerError", "ServerProcess", "exclusive", "free_port"]

_LOG_TAIL_CHARS = 3000
_POLL_S = 0.02


@contextmanager
def exclusive(path: Path, timeout_s: float) -> Generator[None, None, None]:
    """Hold the lock file `path` for the block, as `core.local_files.cache` does.

    Raises:
        ServerError: Another process held it for `timeout_s`.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(cache.exclusive(path, timeout_s))
        except TimeoutError as error:
            raise ServerError(str(error)) from error
        yield


class ServerProcess(Server):
    """A server that runs as a child of this process, and dies with it."""

    _orderly_stop: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, directory: Path | None = None, *, proxied: bool = False) -> None:
        """Choose a port and a directory; nothing runs before `start`.

        Args:
            directory: Where the server keeps its data, kept by `stop`. A temporary directory that
                `stop` deletes when None.
            proxied: As in `Server`.
        """
        super().__init__(proxied=proxied)
        self._owns_directory = directory is None
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix=f"onceflow-{self.name}-"))
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory.resolve()
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
    def running(self) -> bool:
        """Whether the server runs, or is paused."""
        return self.pid is not None

    @property
    def log_path(self) -> Path:
        """Everything the server has printed, over all its starts."""
        return self.directory / "server.log"

    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Return once the server answers. Does nothing when it runs already.

        Raises:
            ServerError: It exited, or was not ready within `timeout_s` of the start of its process;
                the end of its log is quoted.
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
        self._watchdog = Watchdog(
            self._process.pid, self.directory if self._owns_directory else None
        )
        # Not before: the first use on a machine may have built the program, which takes minutes.
        deadline = time.monotonic() + timeout_s
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
        self._close_network()
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
