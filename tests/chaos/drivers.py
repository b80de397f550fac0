"""The drivers of a schedule: started, killed, frozen, started again, and two at a time."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from demo.driver import DriverStatus
from tests.chaos.job import JOB, JobSpec
from tests.support.driver_process import DriverProcess
from tests.support.program import Program, python

from onceflow.core.decoding import json_decoder
from onceflow.integration.faults import processes

_STOP_TIMEOUT_S = 15


class ChaosDriver(DriverProcess):
    """One driver process with a status file of its own."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Path,
        environment: Mapping[str, str],
        prefix: Sequence[str],
    ) -> None:
        """Start the driver. `directory` takes its spec, its status and its log."""
        directory.mkdir()
        super().__init__(directory)
        self._status_path = directory / "status.json"
        path = directory / "job.json"
        path.write_bytes(msgspec.json.encode(replace(spec, status_path=str(self._status_path))))
        self.launch("tests.chaos.job", [path], environment, prefix)

    @property
    def is_running(self) -> bool:
        """True if the process runs or is frozen."""
        return self.exit_status is None

    def status(self) -> DriverStatus | None:
        """Return the last report, or None before the first one."""
        with suppress(FileNotFoundError):
            return json_decoder(DriverStatus).decode(self._status_path.read_bytes())
        return None


class Drivers:
    """All drivers of one job. The last one started owns the job."""

    def __init__(
        self,
        spec: JobSpec,
        directory: Path,
        environment: Mapping[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        """Take the spec. `start` runs the first driver.

        `prefix` is the command before each command, such as one that enters a host.
        """
        self.spec = spec
        self._directory = directory
        self._environment = environment
        self.prefix = prefix
        self.all: list[ChaosDriver] = []
        self._attempts: dict[int, int] = {}

    @property
    def last(self) -> ChaosDriver:
        """The driver that was started last."""
        return self.all[-1]

    @property
    def recoveries(self) -> int:
        """Attempts after the first one, as far as the drivers have reported them."""
        self.look()
        return max(self._attempts.values(), default=1) - 1

    def start(self) -> None:
        """Run another driver."""
        directory = self._directory / f"driver-{len(self.all)}"
        self.all.append(ChaosDriver(self.spec, directory, self._environment, self.prefix))

    def look(self) -> DriverStatus | None:
        """Return the last report of the last driver, and note its attempt."""
        status = self.last.status() if self.all else None
        if status is not None:
            self._attempts[len(self.all)] = status.attempt
        return status

    def find_slots(self) -> list[int]:
        """Return the processes of the slots that run, in the order of slots."""
        status = self.look()
        slots = status.slots if status is not None else ()
        return [slot.pid for slot in slots if processes.is_alive(slot.pid)]

    def kill(self) -> bool:
        """SIGKILL the last driver. Return False if it had ended already."""
        if not self.last.is_running:
            return False
        self.last.kill()
        return True

    def freeze(self) -> int | None:
        """SIGSTOP the process of the last driver alone. Return its pid, or None if it had ended."""
        if not self.last.is_running:
            return None
        processes.signal_process(self.last.pid, signal.SIGSTOP)
        return self.last.pid

    def end(self) -> None:
        """Kill everything that the drivers have left."""
        for driver in self.all:
            driver.end()


class SavepointStop:
    """`onceflow stop --savepoint` as a process of its own."""

    def __init__(self, spec: JobSpec, directory: Path, prefix: Sequence[str]) -> None:
        """Start the command after `prefix`. `directory` takes its output."""
        number = len(list(directory.glob("stop-*.log")))
        self._program = Program(
            directory / f"stop-{number}.log",
            *prefix,
            *python("-m", "onceflow.cli.main", "stop", JOB, "--savepoint", "--json"),
            *("--storage", spec.storage, "--timeout", _STOP_TIMEOUT_S, "--path", spec.savepoints),
        )

    @property
    def is_running(self) -> bool:
        """True while the command waits for the job."""
        return self._program.poll() is None

    def find_savepoint(self) -> str | None:
        """Return the savepoint with which the job has stopped, or None if the command failed."""
        if self._program.wait() != 0:
            return None
        for line in reversed(self._program.output().splitlines()):
            with suppress(json.JSONDecodeError, KeyError, TypeError):
                return str(json.loads(line)["place"])
        return None

    def end(self) -> None:
        """Kill the command if it still runs."""
        self._program.end()
