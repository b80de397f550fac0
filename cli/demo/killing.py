"""Carries out the planned kills while the job runs, and measures how it comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import assert_never

from onceflow.cli.demo.driver_files import DriverStatus, SlotProcess
from onceflow.cli.demo.kills import DoneKill, PlannedKill
from onceflow.cli.demo.settings import KillKind
from onceflow.integration.faults.processes import kill_process, kill_tree, parent_of


class KillableDriver(Protocol):
    """The driver process, as far as the killer needs it."""

    def kill(self) -> tuple[int, ...]:
        """SIGKILL it; return the pids."""
        ...

    def start(self) -> None:
        """Run a new one."""
        ...


class KillableServer(Protocol):
    """A server, as far as the killer needs it."""

    @property
    def pid(self) -> int | None:
        """Its main process."""
        ...

    def kill(self) -> None:
        """SIGKILL it with all its processes."""
        ...

    def start(self) -> object:
        """Start it again on the same data and port."""
        ...


@dataclass(frozen=True, slots=True)
class Victims:
    """Everything that can be killed."""

    driver: KillableDriver
    postgres: KillableServer
    kafka: KillableServer


class Killer:
    """Kills what is due. Called by the demo's loop, at every look at the job."""

    def __init__(
        self,
        plan: Sequence[PlannedKill],
        victims: Victims,
        *,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        """Take the plan; the clock starts at the first `look`."""
        self._coming = list(plan)
        self._victims = victims
        self._randomness = random.Random(f"victims {seed}")  # noqa: S311 - reproducible
        self._say = say
        self._started_at: float | None = None
        self._attempt: tuple[int, int] | None = None
        self._attempt_base_rows = 0
        self._driver_starts = 1
        self.done: list[DoneKill] = []

    @property
    def missed(self) -> tuple[KillKind, ...]:
        """What has not been killed (yet)."""
        return tuple(kill.kind for kill in self._coming)

    def look(self, status: DriverStatus | None, visible_rows: int, now_s: float) -> None:
        """Kill what the progress says is due; note when rows flow again after the last kill.

        Args:
            status: What the driver last said, None while it has said nothing.
            visible_rows: Rows in the table.
            now_s: A monotonic clock.
        """
        if self._started_at is None:
            self._started_at = now_s
        elapsed_s = now_s - self._started_at
        if not self._recovered(visible_rows, elapsed_s) or status is None or not self._coming:
            return
        if self._records_read(status, visible_rows) < self._coming[0].at_records:
            return
        pids = self._kill(self._coming[0].kind, status)
        if not pids:
            return
        kill = DoneKill(self._coming.pop(0).kind, pids, visible_rows, elapsed_s)
        self.done.append(kill)
        self._say(
            f"SIGKILL {kill.kind.value} (pid {', '.join(map(str, pids))}) "
            f"at {visible_rows:,} visible rows, {elapsed_s:.1f} s"
        )
        self._bring_back(kill.kind)

    def _recovered(self, visible_rows: int, elapsed_s: float) -> bool:
        """Return whether rows have come since the last kill; before that, nothing else is killed.

        Two kills in one outage would be one kill.
        """
        if not self.done:
            return True
        last = self.done[-1]
        if last.recovered_s is None and visible_rows > last.at_rows:
            last.recovered_s = elapsed_s - last.at_s
            self._say(f"rows flow again {last.recovered_s:.1f} s after the {last.kind.value} died")
        return last.recovered_s is not None

    def _records_read(self, status: DriverStatus, visible_rows: int) -> int:
        """Return how far the job is: what its attempt restored, and what it has read since."""
        attempt = (self._driver_starts, status.attempt)
        if attempt != self._attempt:
            self._attempt = attempt
            # Restoring commits first, so what is visible now is what the attempt began with.
            self._attempt_base_rows = visible_rows
        return max(visible_rows, self._attempt_base_rows + status.records_in)

    def _kill(self, kind: KillKind, status: DriverStatus) -> tuple[int, ...]:
        """Kill one victim; return the pids, none when there is no such victim at the moment."""
        match kind:
            case KillKind.DRIVER:
                return self._victims.driver.kill()
            case KillKind.POSTGRES:
                return _kill_server(self._victims.postgres)
            case KillKind.KAFKA:
                return _kill_server(self._victims.kafka)
            case KillKind.SLOT | KillKind.WORKER | KillKind.EXECUTOR:
                if not status.slots:
                    return ()
                return _kill_at(kind, self._randomness.choice(status.slots))
            case _:
                assert_never(kind)

    def _bring_back(self, kind: KillKind) -> None:
        """Start again what does not come back by itself."""
        if kind is KillKind.DRIVER:
            self._victims.driver.start()
            self._driver_starts += 1
        elif kind is KillKind.POSTGRES:
            self._victims.postgres.start()
        elif kind is KillKind.KAFKA:
            self._victims.kafka.start()


def _kill_at(kind: KillKind, slot: SlotProcess) -> tuple[int, ...]:
    if kind is KillKind.SLOT:
        return (slot.pid,) if kill_process(slot.pid) else ()
    if kind is KillKind.WORKER:
        return kill_tree(slot.parent_pid)
    executor = parent_of(slot.parent_pid)
    return (executor,) if executor is not None and kill_process(executor) else ()


def _kill_server(server: KillableServer) -> tuple[int, ...]:
    pid = server.pid
    server.kill()
    return () if pid is None else (pid,)
