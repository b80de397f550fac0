"""The world outside the protocol: virtual time, the shared log, a database, files, a network.

Everything is deterministic by seed. Each model keeps the truth that the oracle compares with.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    Unknown,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log import CheckpointDecided, LogEntry, LogRecord

Row = tuple[int, int, int, int]
"""(partition, offset, key, count of the key up to this record)"""


class Violation(AssertionError):
    """An invariant of the design is broken; the message begins with its number."""


class DatabaseGone(Exception):
    """The connection broke: before the statement, or after it and before its reply."""


class Clock:
    """Runs events in virtual time; events of one moment in an order drawn by the seed."""

    def __init__(self, rng: random.Random) -> None:
        self.now_s = 1000.0
        self.rng = rng
        self.trace: list[str] = []
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        at = self.now_s + delay_s
        heapq.heappush(self._events, (at, self.rng.random(), self._count, event))

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now_s - 1000:8.3f}  {text}")

    def run(self, done: Callable[[], bool], limit_s: float) -> bool:
        end = self.now_s + limit_s
        while self._events and not done():
            at, _, _, event = heapq.heappop(self._events)
            if at > end:
                return False
            self.now_s = at
            event()
        return done()


def digest_of(record: LogRecord) -> str:
    """Return what names the record's content; the same in every process."""
    return hashlib.sha256(repr(record).encode()).hexdigest()[:16]


@dataclass
class SharedLog:
    """Create-if-absent by sequence number, and nothing else; pruned from below."""

    records: dict[int, LogEntry] = field(default_factory=dict[int, LogEntry])
    decided: list[CheckpointDecided] = field(default_factory=list[CheckpointDecided])
    """Every decision that its appender took for standing, in the order they stood."""

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


@dataclass
class Database:
    """Prepared and committed transactions with ledger rows, atomic as Postgres is."""

    rng: random.Random
    prepared: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    ledger: set[str] = field(default_factory=set[str])
    rows: list[Row] = field(default_factory=list[Row])
    commits: list[TransactionId] = field(default_factory=list[TransactionId])
    fault_rate: float = 0.0
    on_commit: Callable[[TransactionId, list[Row]], None] = lambda _t, _r: None

    def prepare(self, transaction: TransactionId, rows: list[Row]) -> None:
        self._fault()
        name = str(transaction)
        if name in self.prepared or name in self.ledger:
            raise Violation(f"I7 transaction {name} exists already: its name was used twice")
        self.prepared[name] = rows
        self._fault()

    def commit(self, committable: Committable) -> CommitOutcome:
        name = str(committable.transaction)
        try:
            self._fault()
            rows = self.prepared.pop(name, None)
            if rows is None:
                if name in self.ledger:
                    return AlreadyCommitted()
                return Lost("neither prepared nor in the ledger")
            self.on_commit(committable.transaction, rows)
            self.ledger.add(name)
            self.rows.extend(rows)
            self.commits.append(committable.transaction)
            self._fault()
        except DatabaseGone:
            return Unknown("the connection broke")
        return Committed()

    def abort(self, committable: Committable) -> AbortOutcome:
        name = str(committable.transaction)
        if name in self.ledger:
            return AlreadyCommitted()
        self.prepared.pop(name, None)
        return Aborted()

    def in_doubt(self) -> Sequence[Committable]:
        found = (TransactionId.parse(name) for name in self.prepared)
        return [Committable(t) for t in found if t is not None]

    def _fault(self) -> None:
        if self.rng.random() < self.fault_rate:
            raise DatabaseGone


@dataclass
class Files:
    """State files by path; a read of a missing one is the end of a job."""

    content: dict[str, str] = field(default_factory=dict[str, str])

    def write(self, path: str, value: object) -> None:
        self.content[path] = json.dumps(value)

    def read(self, path: str) -> dict[str, int]:
        if path not in self.content:
            raise Violation(f"I9 file {path} is needed and was deleted")
        found: dict[str, int] = json.loads(self.content[path])
        return found


class Network:
    """Messages between nodes: delayed, lost, doubled, reordered. Channels keep their own order."""

    def __init__(self, clock: Clock, loss: float, doubling: float) -> None:
        self._clock = clock
        self.loss = loss
        self.doubling = doubling

    def send(self, deliver: Callable[[], None]) -> None:
        rng = self._clock.rng
        copies = 0 if rng.random() < self.loss else 2 if rng.random() < self.doubling else 1
        for _ in range(copies):
            late_s = rng.uniform(0.0, 1.0) if self.loss and rng.random() < 0.05 else 0.0
            self._clock.after(late_s + rng.expovariate(1 / 0.02), deliver)
