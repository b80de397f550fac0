"""A driver as a process of its own, killed and started again by crash tests and the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from onceflow.integration.faults import processes

REPOSITORY = Path(__file__).parents[2]
_LOG_TAIL_CHARS = 4000


class DriverProcess:
    """At most one driver at a time; each leads a session, so that its orphans can be found."""

    def __init__(self, directory: Path) -> None:
        """Describe it; `directory` takes the log of all drivers."""
        self.log_path = directory / "driver.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: processes.Watchdog | None = None
        self._sessions: list[int] = []

    def launch(
        self, module: str, arguments: Sequence[str | Path], environment: Mapping[str, str]
    ) -> None:
        """Run `module` of this repository with `arguments`, and `environment` over our own."""
        self._reap()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
                    **environment,
                },
            )
        self._sessions.append(self._process.pid)
        self._watchdog = processes.Watchdog(self._process.pid)

    @property
    def pid(self) -> int:
        """The process that runs or ran last."""
        if self._process is None:
            raise RuntimeError("no driver has been started")
        return self._process.pid

    @property
    def starts(self) -> int:
        """How many drivers there have been."""
        return len(self._sessions)

    @property
    def exit_status(self) -> int | None:
        """How the driver that was started last has ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> tuple[int, ...]:
        """SIGKILL the driver and its JVM, and nothing else; return their pids.

        Slots are left to find out by themselves, as they must when a machine dies.
        """
        # Its only child is the JVM; the Python workers and executors are the JVM's children.
        victims = (self.pid, *processes.children_of(self.pid))
        for victim in victims:
            processes.kill_process(victim)
        self._reap()
        return victims

    def end(self) -> None:
        """Kill everything that this and earlier drivers have left. Idempotent."""
        for session in self._sessions:
            processes.kill_session(session)
        self._reap()

    def log_tail(self) -> str:
        """Return the end of what all drivers have printed."""
        if not self.log_path.exists():
            return ""
        return self.log_path.read_text(errors="replace")[-_LOG_TAIL_CHARS:]

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
        if self._watchdog is not None:
            self._watchdog.release()
            self._watchdog = None
