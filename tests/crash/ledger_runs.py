"""Drivers and their jobs as the crash tests see them: started, watched, killed, started again."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from tests.crash.ledger_driver import READY, LedgerSpec, LedgerStatus
from tests.support.driver_process import DriverProcess
from typing_extensions import override

from onceflow.core.crash_points import VARIABLE, CrashPoint

_LOOK_S = 0.02
_PATIENCE_S = 150.0
"""Long enough for Spark to start on a machine with much else to do; nothing waits for its end."""


class LedgerDriver(DriverProcess):
    """At most one driver process at a time; the next one goes on with what the last one left."""

    def __init__(self, directory: Path, master: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory)
        self._directory = directory
        self._master = master
        self._points = directory / "points"
        for name in ("jobs", "status", "points"):
            (directory / name).mkdir()

    def start(self) -> None:
        """Run a driver unless one runs."""
        if self.starts > 0 and self.exit_status is None:
            return
        (self._directory / READY).unlink(missing_ok=True)
        points = {VARIABLE: str(self._points)}
        self.launch("tests.crash.ledger_driver", [self._directory, self._master], points)

    def await_ready(self) -> None:
        """Run a driver, and return once it could begin a job at once."""
        self.start()
        deadline = time.monotonic() + _PATIENCE_S
        while not (self._directory / READY).exists():
            late = self.died or time.monotonic() > deadline
            assert not late, f"no session in {_PATIENCE_S} s\n{self.log_tail()}"
            time.sleep(_LOOK_S)

    @property
    def died(self) -> bool:
        """True if the driver that was started last is gone."""
        return self.exit_status is not None

    @override
    def end(self) -> None:
        """Kill everything that this and earlier drivers have left, and forget their jobs."""
        super().end()
        for path in (*(self._directory / "jobs").iterdir(), *self._points.iterdir()):
            path.unlink(missing_ok=True)

    def arm(self, point: CrashPoint) -> None:
        """Have the next process that reaches `point` kill itself there."""
        (self._points / point).touch()

    def reached(self, point: CrashPoint) -> bool:
        """True if a process has died at the crash point that was armed last."""
        return not (self._points / point).exists()

    def run(self, spec: LedgerSpec) -> LedgerRun:
        """Have the driver run `spec`, starting a driver if need be."""
        path = self._directory / "jobs" / f"{spec.job}.json"
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(spec))
        fresh.replace(path)
        self.start()
        return LedgerRun(self, spec, self._directory / "status" / f"{spec.job}.json")


class LedgerRun:
    """One job in a driver."""

    def __init__(self, driver: LedgerDriver, spec: LedgerSpec, status: Path) -> None:
        self.driver = driver
        self.spec = spec
        self._status = status
        self.watch: Callable[[], None] = lambda: None
        """Called while anything is waited for."""

    def status(self) -> LedgerStatus | None:
        """Return what the driver last said of the job, None before its first word."""
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(self._status.read_bytes(), type=LedgerStatus)
        return None

    def running(self) -> LedgerStatus:
        """Return the status of the attempt that runs now, with all its slots."""
        count = self.spec.parallelism
        return self.until(
            f"all {count} slots run", lambda s: s.state == "running" and len(s.slots) == count
        )

    def release(self) -> None:
        """Let the rest of the stream come at full speed."""
        Path(self.spec.released).touch()

    def finish(self, timeout_s: float = _PATIENCE_S) -> LedgerStatus:
        """Release the stream and return how the job has ended."""
        self.release()
        return self.until("the job ends", lambda status: status.ended, timeout_s)

    def until(
        self, what: str, holds: Callable[[LedgerStatus], bool], timeout_s: float = _PATIENCE_S
    ) -> LedgerStatus:
        """Return the first status for which `holds`."""
        found: list[LedgerStatus] = []

        def look() -> bool:
            status = self.status()
            if status is None:
                return False
            if holds(status):
                found.append(status)
                return True
            assert not status.ended, f"{what}: {status}\n{self.driver.log_tail()}"
            return False

        self.wait(what, look, timeout_s)
        return found[0]

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = _PATIENCE_S) -> None:
        """Return once `holds`; fail after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            # Nothing comes of a dead driver, except what it said last.
            late = self.driver.died or time.monotonic() > deadline
            assert not late or holds(), (
                f"not in {timeout_s} s: {what}; driver's exit status {self.driver.exit_status}; "
                f"{self.status()}\n{self.driver.log_tail()}"
            )
            self.watch()
            time.sleep(_LOOK_S)

    def await_checkpoint(self, checkpoints: int = 1) -> None:
        """Return once the driver that runs has completed so many checkpoints."""
        self.until(f"{checkpoints} checkpoints", lambda status: status.checkpoints >= checkpoints)

    def restart_driver(self) -> None:
        """Start a driver, and return once it has taken the job over."""
        before = self.status()
        self.driver.start()
        self.until(
            "a new driver takes over", lambda now: before is None or now.driver != before.driver
        )


def killed_by_itself(driver: LedgerDriver) -> bool:
    """True if the driver ended by SIGKILL, as at a crash point, and not by an error."""
    return driver.exit_status == -signal.SIGKILL
