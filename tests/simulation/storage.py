"""Checkpoint storage: the decision log and state files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Clock, Gone, Server, Violation
from tests.simulation.targets import Row

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, StateHandle
from onceflow.core.protocol.log.rules import LogEntry, LogRecord

if TYPE_CHECKING:
    from tests.simulation.slots import Slot


def digest_of(record: LogRecord) -> str:
    """Return what names the record's content; the same in every process."""
    return hashlib.sha256(repr(record).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Look:
    """The view of an appender on the log after its record was created, or existed."""

    highest: int
    follows: bool
    """True if the record that it names as the one before it stands."""


class SharedLog(Server):
    """The records of the decision log in an object store: a number can be created once.

    A request that breaks has created its record, will, or never does; nobody is told which.
    """

    def __init__(self, clock: Clock, created: Callable[[LogRecord], None]) -> None:
        super().__init__(clock)
        self.records: dict[int, LogEntry] = {}
        self.pruned = False
        """True if there were records below those that there are."""
        self.overwrites = False
        """Broken: creates what is there already."""
        self._created = created

    def serve(self, effect: Callable[[], Any], reply: Callable[[Any], None]) -> None:
        rng = self.clock.rng
        if rng.random() >= self.fault_rate / 2:
            super().serve(effect, reply)
            return
        # Whoever asks gives up, and what was asked is under way for a while.
        self.faults += 1
        self.clock.after(rng.uniform(0.01, 0.3), effect)
        self.clock.after(rng.uniform(0.01, 0.05), lambda: reply(Gone()))

    def create(self, record: LogRecord, digest: str) -> str:
        """Create unless the number is taken; return the digest of what stands there now."""
        standing = self.records.get(record.sequence)
        if standing is None or self.overwrites:
            before = self.records.get(record.sequence - 1)
            highest = record.sequence >= max(self.records, default=0)
            linked = record.previous == (before.digest if before else "")
            standing = self.records[record.sequence] = LogEntry(record, digest)
            if highest and linked:
                self._created(record)
        return standing.digest

    def look(self, record: LogRecord) -> Look:
        before = self.records.get(record.sequence - 1)
        if record.sequence == 1:
            follows = not self.pruned
        else:
            follows = before is not None and before.digest == record.previous
        return Look(max(self.records, default=0), follows)

    def prune(self, sequence: int) -> None:
        self.pruned = True
        self.records.pop(sequence, None)

    def entries(self) -> list[LogEntry]:
        return list(self.records.values())


class Files(Server):
    """State files by path; a read of a missing one is the end of a job."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.content: dict[str, Any] = {}

    def write(self, path: str, value: dict[int, int] | tuple[Row, ...]) -> None:
        if path in self.content:
            raise Violation(f"I9 file {path} is written twice")
        self.content[path] = copy(value)

    def read(self, path: str) -> Any:
        if path not in self.content:
            raise Violation(f"I9 file {path} is needed and was deleted")
        return self.content[path]

    def read_restored(self, path: str, slot: Slot) -> Any:
        if path not in self.content and slot.deploy.attempt < slot.world.claimed:
            raise SlotLost("a newer attempt has deleted what this one restores")
        return self.read(path)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete some or all of `paths`: storage may fail in between."""
        for path in sorted(paths):
            if self.clock.rng.random() < self.fault_rate:
                self.faults += 1
                raise Gone
            self.content.pop(path, None)


def handles_in(completed: CompletedCheckpoint) -> list[StateHandle]:
    """Return every file that `completed` names."""
    return [
        handle
        for snapshot in completed.snapshots
        for handle in (
            *(handle for o in snapshot.operators for handle in (*o.keyed, *o.raw)),
            *(one.handle for one in snapshot.in_flight),
        )
    ]
