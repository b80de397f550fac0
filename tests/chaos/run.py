"""Runs one schedule: the job, its faults, the end of its input, and the verdict on its sinks."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from demo.run import transactions_with_staged_rows
from tests.chaos.changes import drop_slots
from tests.chaos.disks import mount_disks
from tests.chaos.drivers import ChaosDriver, Drivers
from tests.chaos.hosts import start_hosts
from tests.chaos.input_writer import Pace
from tests.chaos.inputs import write_input
from tests.chaos.job import JOB, JobSpec
from tests.chaos.machine import NO_ABILITIES, Machine
from tests.chaos.model import Difference, Expected, compare, expect, expect_copy
from tests.chaos.readers import count_in_doubt, read_changes, read_records, read_rows
from tests.chaos.schedule import Schedule, SinkKind
from tests.chaos.servers import Servers
from tests.chaos.strikes import Faults, Strike
from tests.support.leftovers import find_leftovers, find_slot_directories

from onceflow.core.crash_points import DEATHS_VARIABLE, VARIABLE
from onceflow.core.traces import VARIABLE as TRACES_VARIABLE
from onceflow.integration.faults import processes
from onceflow.integration.traces.events import read_trace
from onceflow.integration.traces.rules import check_trace

_LOOK_S = 0.05
_START_DEADLINE_S = 300.0
"""From the start of a driver to its first checkpoint: Spark starts slowly on a busy machine."""
_FAULTS_DEADLINE_S = 240.0
"""From the first record to the end of the last fault, without the starts of drivers."""
_CATCH_UP_DEADLINE_S = 120.0
"""From the end of the last fault until every record is committed."""
_DRAIN_DEADLINE_S = 120.0
_ORPHANS_DEADLINE_S = 30.0
"""The time in which slots and superseded drivers must have noticed that they are."""
_KILLED = -9
_GIVE_UPS_MAX = 8
"""Drivers that end by themselves in one schedule. More mean that no driver can run."""


class RunFailed(Exception):
    """Raised when the job does not reach its end: there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class SinkVerdict:
    """The verdict on one sink."""

    kind: SinkKind
    difference: Difference
    in_doubt: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one schedule."""

    schedule: Schedule
    strikes: tuple[Strike, ...]
    deaths: Counter[str]
    """The deaths at each crash point."""
    recoveries: int
    """Attempts that began anew after a fault."""
    drivers: int
    """Driver processes that were started."""
    gave_up: tuple[str, ...]
    """The last lines of drivers that ended by themselves while they owned the job."""
    seconds: float
    records: int = 0
    sinks: tuple[SinkVerdict, ...] = ()
    leftovers: tuple[str, ...] = ()
    broken_rules: tuple[str, ...] = ()
    """The steps of the job that the protocol forbids, each with the steps before it."""
    failure: str = ""
    """The reason why there is no verdict, or empty."""

    @property
    def is_exact(self) -> bool:
        """True if every sink holds exactly its rows and nothing is left over."""
        return (
            not self.failure
            and not self.leftovers
            and not self.broken_rules
            and all(v.difference.is_exact and not v.in_doubt for v in self.sinks)
        )

    @property
    def rows(self) -> int:
        """The rows that the sinks hold."""
        return sum(verdict.difference.found for verdict in self.sinks)


class ScheduleRun:
    """One schedule on running servers."""

    def __init__(
        self,
        schedule: Schedule,
        servers: Servers,
        directory: Path,
        say: Callable[[str], None],
        *,
        name: str,
        machine: Machine = NO_ABILITIES,
    ) -> None:
        """Take the schedule. `directory` is empty; `name` is unique on these servers."""
        self._schedule = schedule
        self._servers = servers
        self._directory = directory
        self._say = say
        self._name = name
        self._machine = machine
        self._rng = random.Random(f"restarts {schedule.seed}")
        self._restart_at = 0.0
        self._gave_up: list[str] = []
        self._ended: set[int] = set()

    def execute(self) -> Outcome:
        """Run the schedule to its verdict. All processes of the job are gone afterwards."""
        began = time.monotonic()
        with ExitStack() as stack:
            try:
                spec, drivers, faults = self._prepare(stack)
            except Exception as error:
                return self._fail_preparation(error, began)
            records, failure = 0, ""
            verdicts: tuple[SinkVerdict, ...] = ()
            leftovers: tuple[str, ...] = ()
            (self._directory / "traces").mkdir()
            try:
                self._run_job(spec, drivers, faults)
                leftovers = (*self._find_orphans(drivers), *self._find_leftovers())
                records, verdicts = self._judge(spec)
            except Exception as error:
                # Red, whatever the reason. A run of hours goes on with the next schedule.
                failure = f"{type(error).__name__}: {error}"
            outcome = Outcome(
                schedule=self._schedule,
                strikes=tuple(faults.strikes),
                deaths=faults.count_deaths(),
                recoveries=drivers.recoveries,
                drivers=len(drivers.all),
                gave_up=tuple(self._gave_up),
                seconds=time.monotonic() - began,
                records=records,
                sinks=verdicts,
                leftovers=leftovers,
                broken_rules=tuple(map(str, check_trace(read_trace(self._directory / "traces")))),
                failure=failure,
            )
            if not outcome.is_exact:
                # What is mounted is gone with the mount.
                disk = self._directory / "disk"
                shutil.copytree(disk, self._directory / "kept-disk", dirs_exist_ok=True)
            return outcome

    def _prepare(self, stack: ExitStack) -> tuple[JobSpec, Drivers, Faults]:
        """Make disks, hosts, topics and tables of the schedule. `stack` removes what can end."""
        if self._schedule.needs_disks:
            stack.enter_context(mount_disks(self._directory))
        spec = self._servers.prepare(self._schedule, self._name, self._directory)
        if spec.source_url:
            stack.callback(drop_slots, spec.source_url)
        hosts = None
        prefix: tuple[str, ...] = ()
        environment = self._environment()
        if self._schedule.needs_hosts:
            hosts = stack.enter_context(start_hosts(self._directory, self._servers.ports))
            prefix = hosts.driver.prefix
            address = hosts.driver.address
            spec = replace(spec, master=hosts.cluster.url, driver_host=address)
            environment["SPARK_LOCAL_IP"] = address
        drivers = Drivers(spec, self._directory, environment, prefix)
        stack.callback(drivers.end)
        faults = Faults(
            self._schedule.faults,
            self._servers.by_name,
            drivers,
            self._directory,
            self._say,
            hosts,
        )
        stack.callback(faults.end)
        return spec, drivers, faults

    def _fail_preparation(self, error: Exception, began: float) -> Outcome:
        return Outcome(
            schedule=self._schedule,
            strikes=(),
            deaths=Counter(),
            recoveries=0,
            drivers=0,
            gave_up=(),
            seconds=time.monotonic() - began,
            failure=f"{type(error).__name__}: {error}",
        )

    def _environment(self) -> dict[str, str]:
        return {
            **self._machine.prepare(self._schedule, self._directory),
            VARIABLE: str(self._directory / "points"),
            DEATHS_VARIABLE: str(self._directory / "deaths"),
            TRACES_VARIABLE: str(self._directory / "traces"),
            # A red schedule keeps the log.
            "ONCEFLOW_LOGGING_FORMAT": "text",
            "ONCEFLOW_LOGGING_LEVEL": "info",
        }

    def _run_job(self, spec: JobSpec, drivers: Drivers, faults: Faults) -> None:
        """Run the job until it has drained.

        Raises:
            RunFailed: A deadline passed.
            ProduceError: The broker did not take every record.
        """
        drivers.start()
        self._wait(
            drivers,
            faults,
            "the first checkpoint",
            _START_DEADLINE_S,
            partial(_has_checkpoint, drivers),
        )
        pace = Pace(self._schedule.producing_s)
        with write_input(self._schedule, spec, pace) as is_committed:
            began = time.monotonic()

            def faults_are_over() -> bool:
                faults.look(time.monotonic() - began)
                return faults.are_over

            self._wait(
                drivers, faults, "the end of the faults", _FAULTS_DEADLINE_S, faults_are_over
            )
            faults.end()
            pace.release()
            self._say(f"{time.monotonic() - began:6.1f} s  faults are over")
            event = "the commit of all that was written"
            self._wait(drivers, faults, event, _CATCH_UP_DEADLINE_S, is_committed)
        Path(spec.stop_path).touch()
        self._wait(
            drivers,
            faults,
            "the end of the job",
            _DRAIN_DEADLINE_S,
            lambda: Path(spec.drained_path).exists() and drivers.last.exit_status == 0,
        )

    def _wait(
        self,
        drivers: Drivers,
        faults: Faults,
        event: str,
        deadline_s: float,
        holds: Callable[[], bool],
    ) -> None:
        """Wait for `event`, and start a driver whenever the last one has ended.

        A further driver has at least the time of a start.
        """
        began, known = time.monotonic(), len(drivers.all)
        deadline = began + deadline_s
        while not holds():
            self._supervise(drivers, faults)
            if len(drivers.all) > known:
                known = len(drivers.all)
                deadline = max(deadline, time.monotonic() + _START_DEADLINE_S)
            if time.monotonic() > deadline:
                status = drivers.look()
                raise RunFailed(
                    f"{event}: not in {deadline - began:.0f} s; the driver says {status};"
                    f" its log ends:\n{drivers.last.log_tail()[-2_000:]}"
                )
            time.sleep(_LOOK_S)

    def _supervise(self, drivers: Drivers, faults: Faults) -> None:
        drivers.look()
        last = len(drivers.all) - 1
        status = drivers.last.exit_status
        if status is None or (status == 0 and faults.is_moving):
            return
        if last not in self._ended:
            self._ended.add(last)
            self._restart_at = time.monotonic() + self._rng.uniform(0.0, 1.0)
            if status not in {0, _KILLED}:
                self._gave_up.append(_last_line(drivers.last))
                self._say(f"          driver {last} gave up: {self._gave_up[-1]}")
                if len(self._gave_up) > _GIVE_UPS_MAX:
                    raise RunFailed(
                        f"{len(self._gave_up)} drivers gave up; the last: {self._gave_up[-1]}"
                    )
        elif time.monotonic() >= self._restart_at:
            drivers.start()

    def _find_orphans(self, drivers: Drivers) -> tuple[str, ...]:
        """Return the processes of the job that still run after its end."""
        deadline = time.monotonic() + _ORPHANS_DEADLINE_S
        while orphans := [
            f"process {pid} of driver {number}"
            for number, driver in enumerate(drivers.all)
            for pid in processes.session_members(driver.pid)
        ]:
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        return tuple(orphans)

    def _find_leftovers(self) -> tuple[str, ...]:
        disk = self._directory / "disk"
        # Staged files without rows are marks of sinks: proofs of commits to Kafka.
        files = [name for name in find_leftovers(disk) if "/staged/" not in name]
        files += [
            f"{count} transactions with staged rows in {storage.name}"
            for storage in sorted(disk.glob("checkpoints*"))
            if (count := transactions_with_staged_rows(str(storage), JOB))
        ]
        slots = find_slot_directories(self._directory / "scratch")
        return (*files, *(f"scratch of a slot: {name}" for name in slots))

    def _judge(self, spec: JobSpec) -> tuple[int, tuple[SinkVerdict, ...]]:
        count, expected = self._read_input(spec)
        verdicts = tuple(
            SinkVerdict(
                sink.kind,
                compare(content, read_rows(sink, content.columns)),
                count_in_doubt(sink),
            )
            for sink, content in zip(spec.sinks, expected, strict=False)
        )
        return count, verdicts

    def _read_input(self, spec: JobSpec) -> tuple[int, tuple[Expected, Expected]]:
        """Return the number of records, and what each sink must hold."""
        if self._schedule.graph == "changes":
            changes = read_changes(spec.source_url)
            return len(changes), expect_copy(changes)
        topics = [read_records(spec.bootstrap_servers, topic) for topic in spec.topics]
        return sum(map(len, topics)), expect(self._schedule.graph, topics)


def _has_checkpoint(drivers: Drivers) -> bool:
    status = drivers.look()
    return status is not None and status.state == "running" and status.checkpoints > 0


def _last_line(driver: ChaosDriver) -> str:
    lines = driver.log_tail().strip().splitlines()
    return f"exit status {driver.exit_status}: {lines[-1][:300] if lines else 'no output'}"
