"""Drivers of one job, one after another, killed and started again by crash tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.program import Program, python

from onceflow.integration.faults import processes


class DriverProcess:
    """At most one driver at a time; each leads a session, so that its orphans can be found."""

    def __init__(self, directory: Path) -> None:
        """Describe it; `directory` takes the log of all drivers."""
        self.log_path = directory / "driver.log"
        self._drivers: list[Program] = []

    def launch(
        self,
        module: str,
        arguments: Sequence[str | Path],
        environment: Mapping[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        """Run `module` of this repository with `arguments`, and `environment` over our own.

        `prefix` is the command before the command, such as one that enters a namespace.
        """
        if self._drivers:
            self._drivers[-1].wait()
        command = (*prefix, *python("-m", module, *arguments))
        self._drivers.append(Program(self.log_path, *command, environment=environment))

    @property
    def pid(self) -> int:
        """The process that runs or ran last."""
        return self._drivers[-1].pid

    @property
    def starts(self) -> int:
        """The number of drivers that have been started."""
        return len(self._drivers)

    @property
    def exit_status(self) -> int | None:
        """The exit status of the driver that was started last, or None while it runs."""
        return self._drivers[-1].poll() if self._drivers else None

    def kill(self) -> tuple[int, ...]:
        """SIGKILL the driver and its JVM, and nothing else; return their pids.

        Slots are left to find out by themselves, as they must when a machine dies.
        """
        # Its only child is the JVM; the Python workers and executors are the JVM's children.
        victims = (self.pid, *processes.children_of(self.pid))
        for victim in victims:
            processes.kill_process(victim)
        self._drivers[-1].wait()
        return victims

    def end(self) -> None:
        """Kill everything that this and earlier drivers have left. Idempotent."""
        for driver in self._drivers:
            driver.end()

    def log_tail(self) -> str:
        """Return the end of what the last driver has printed."""
        return self._drivers[-1].tail() if self._drivers else ""
