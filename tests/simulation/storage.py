"""Checkpoint storage: the decision log and state files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Clock, Gone, Server, Violation
from tests.simulation.targets import Row

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.log import LogEntry, LogRecord
from onceflow.core.protocol.snapshots import CompletedCheckpoint, StateHandle

if TYPE_CHECKING:
    from tests.simulation.slots import Slot


def digest_of(record: LogRecord) -> str:
    """Return what names the record's content; the same in every process."""
    return hashlib.sha256(repr(record).encode()).hexdigest()[:16]


@dataclass
class SharedLog:
    """Create-if-absent by sequence number, and nothing else; pruned from below."""

    records: dict[int, LogEntry] = field(default_factory=dict[int, LogEntry])

    def create(self, record: LogRecord) -> str:
        """Create unless the number is taken; return the digest of what stands there now."""
        digest = digest_of(record)
        self.records.setdefault(record.sequence, LogEntry(record, digest))
        return digest

    def standing(self, sequence: int) -> str | None:
        entry = self.records.get(sequence)
        return None if entry is None else entry.digest

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
        for path in paths:
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
