"""Chooses the processes to kill, and the time, by the job's progress and a seed, not by the clock.

The stream is cut into one part a kill, and a tail. In each part the job is first let commit
something (so that there is a checkpoint to come back to), then more records flow, and the kill
strikes at a seeded record and a seeded fraction of a checkpoint interval later, so that every
moment of a checkpoint is hit sooner or later. What comes after the part is held back until then:
however fast the job is, it cannot finish before it was killed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from demo.driver import DriverStatus, SlotProcess
from demo.settings import KILL_OF_DATABASE, KillKind
from demo.targets import KillableServer
from typing_extensions import assert_never

from onceflow.integration.faults.processes import kill_process, kill_tree, parent_of

_TAIL_FRACTION = 0.1
_COMMIT_FRACTION = 0.25
# Less than the next part's commit, more than nothing.
_RESERVE_FRACTION = 0.2
_STRIKE_FRACTIONS = (0.35, 0.8)
# Of a checkpoint interval: with the time that a part takes to flow, it reaches the next checkpoint.
_DELAY_FRACTION_MAX = 0.6
_NO_ATTEMPT = (0, 0)
_SERVERS = frozenset({*KILL_OF_DATABASE.values(), KillKind.KAFKA})


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One kill to come. All counts are records from the beginning of the stream.

    commit_records <= strike_records <= end_records <= reserve_records
    """

    kind: KillKind
    commit_records: int
    """Until these are committed, no more than these are produced."""
    strike_records: int
    """Once the job has read these, the kill is near ..."""
    delay_s: float
    """... and comes this much later."""
    end_records: int
    """Until then, no more than these are produced."""
    reserve_records: int
    """If all of them are committed by then, these are produced, to have some in flight."""


@dataclass(slots=True)
class DoneKill:
    """One kill that has happened."""

    kind: KillKind
    pids: tuple[int, ...]
    """The processes that it ended."""
    at_records: int
    """Records that the job reported as read at that moment."""
    committed_records: int
    """Of these, the ones committed before."""
    at_rows: int
    """Rows visible in the target at that moment."""
    at_s: float
    """Seconds since the job was started."""
    recovered_s: float | None = None
    """Seconds from the kill until records flowed again; None when the job ended before."""


def plan_kills(
    kinds: Sequence[KillKind], records: int, seed: int, *, interval_s: float
) -> tuple[PlannedKill, ...]:
    """Return the kills in the order in which they happen, at seeded moments."""
    # Not the workload's generator: the same payments can be run under other kills.
    randomness = random.Random(f"kills {seed}")  # noqa: S311 - reproducible, not secret
    shuffled = list(kinds)
    randomness.shuffle(shuffled)
    part = records * (1 - _TAIL_FRACTION) / max(len(shuffled), 1)
    reserve = min(part * _RESERVE_FRACTION, records * _TAIL_FRACTION / 2)
    return tuple(
        PlannedKill(
            kind,
            commit_records=int(part * (i + _COMMIT_FRACTION)),
            strike_records=int(part * (i + randomness.uniform(*_STRIKE_FRACTIONS))),
            delay_s=interval_s * randomness.uniform(0, _DELAY_FRACTION_MAX),
            end_records=int(part * (i + 1)),
            reserve_records=int(part * (i + 1) + reserve),
        )
        for i, kind in enumerate(shuffled)
    )


class KillableDriver(Protocol):
    """The driver process, as far as the killer needs it."""

    def kill(self) -> tuple[int, ...]:
        """SIGKILL it; return the pids."""
        ...

    def start(self) -> None:
        """Run a new one."""
        ...


@dataclass(frozen=True, slots=True)
class Victims:
    """Everything that can be killed."""

    driver: KillableDriver
    servers: Mapping[KillKind, KillableServer]
    """Each by the kill that is meant for it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The job at one look."""

    status: DriverStatus | None
    """What the driver last said, None while it has said nothing."""
    committed_records: int
    visible_rows: int
    now_s: float
    """A monotonic clock."""


class Killer:
    """Kills what is due, and says how much of the stream may flow until then.

    `look` is called by the demo's loop alone; `released_records` may be read by the producer.
    """

    def __init__(
        self,
        plan: Sequence[PlannedKill],
        victims: Victims,
        *,
        records: int,
        records_until_over: int,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        """Take the plan; the clock starts at the first `look`.

        Of the `records` of the stream somebody else holds back what comes after
        `records_until_over`, until all is killed and the job has come back.
        """
        self._coming = list(plan)
        self._victims = victims
        self._records = records
        self._records_until_over = records_until_over
        self._randomness = random.Random(f"victims {seed}")  # noqa: S311 - reproducible
        self._say = say
        self._started_at: float | None = None
        self._driver_starts = 1
        self._attempt = _NO_ATTEMPT
        self._attempt_base = 0
        self._attempt_of_last_kill = _NO_ATTEMPT
        self._strike_at: float | None = None
        self.released_records = plan[0].commit_records if plan else records
        self.done: list[DoneKill] = []

    @property
    def finished(self) -> bool:
        """True if all kills are done and the job has recovered from the last one."""
        return not self._coming and (not self.done or self.done[-1].recovered_s is not None)

    def look(self, progress: Progress) -> None:
        """Kill what is due, release what may flow, and note when records flow after a kill."""
        if self._started_at is None:
            self._started_at = progress.now_s
        status = progress.status
        if status is None:
            return
        elapsed_s = progress.now_s - self._started_at
        records = self._records_read(status, progress.committed_records)
        if not self._has_recovered(status, progress, elapsed_s) or not self._coming:
            return
        kill = self._coming[0]
        if not self._is_due(kill, records, progress):
            return
        pids = self._kill(kill.kind, status)
        if not pids:
            return
        del self._coming[0]
        self._attempt_of_last_kill = self._attempt
        self._strike_at = None
        self.done.append(
            DoneKill(
                kill.kind,
                pids,
                at_records=records,
                committed_records=progress.committed_records,
                at_rows=progress.visible_rows,
                at_s=elapsed_s,
            )
        )
        self._say(
            f"{elapsed_s:5.1f} s  SIGKILL {kill.kind.value} (pid {', '.join(map(str, pids))}): "
            f"{records:,} records read, {progress.committed_records:,} of them committed"
        )
        self.released_records = self._coming[0].commit_records if self._coming else self._records
        self._bring_back(kill.kind)

    def _is_due(self, kill: PlannedKill, records: int, progress: Progress) -> bool:
        if progress.committed_records >= kill.commit_records:
            self.released_records = max(self.released_records, kill.end_records)
        if records < kill.strike_records:
            return False
        if self._strike_at is None:
            self._strike_at = progress.now_s + kill.delay_s
        if progress.now_s < self._strike_at:
            return False
        # A kill that nothing is lost to proves nothing.
        if records > progress.committed_records:
            return True
        self.released_records = kill.reserve_records
        return progress.committed_records >= kill.reserve_records

    def _has_recovered(self, status: DriverStatus, progress: Progress, elapsed_s: float) -> bool:
        """Return whether records flow since the last kill; before that, nothing else is killed.

        Two kills in one outage would be one kill.
        """
        if not self.done:
            return True
        last = self.done[-1]
        if last.recovered_s is None:
            if not self._flows(last, status, progress.committed_records):
                return False
            last.recovered_s = elapsed_s - last.at_s
            self._say(f"{elapsed_s:5.1f} s  records flow again, {last.recovered_s:.1f} s later")
        return True

    def _flows(self, last: DoneKill, status: DriverStatus, committed: int) -> bool:
        # The job may outlast a server's death without a new attempt.
        if last.kind in _SERVERS and committed > last.committed_records:
            return True
        if self._attempt == self._attempt_of_last_kill:
            return False
        # With nothing left to read, running is all that can be asked.
        all_read = committed >= min(self.released_records, self._records_until_over)
        return status.records_in > 0 or (status.state == "running" and all_read)

    def _records_read(self, status: DriverStatus, committed: int) -> int:
        """Return how far the job is: what its attempt restored, and what it has read since."""
        attempt = (self._driver_starts, status.attempt)
        if attempt != self._attempt:
            # The first attempt of all begins with nothing, whenever it is first seen.
            self._attempt_base = committed if self._attempt != _NO_ATTEMPT else 0
            self._attempt = attempt
        return max(committed, self._attempt_base + status.records_in)

    def _kill(self, kind: KillKind, status: DriverStatus) -> tuple[int, ...]:
        """Kill one victim; return the pids, none when there is no such victim at the moment."""
        match kind:
            case KillKind.DRIVER:
                return self._victims.driver.kill()
            case KillKind.POSTGRES | KillKind.MYSQL | KillKind.MARIADB | KillKind.KAFKA:
                return _kill_server(self._victims.servers[kind])
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
        elif kind in _SERVERS:
            self._victims.servers[kind].start()


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
