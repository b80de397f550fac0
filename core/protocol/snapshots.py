"""What a subtask hands over with its ack, and what a completed checkpoint is made of.

These are the records of the decision log: plain values, written as JSON, never pickled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef


@dataclass(frozen=True, slots=True)
class StateHandle:
    """One durable piece of state: a file in checkpoint storage, or bytes held in the record itself.

    `path` is relative to the job's directory; empty for inline bytes. `shared` files belong to more
    than one checkpoint and are deleted when no retained checkpoint names them.
    """

    name: str
    path: str
    size_bytes: int
    checksum: str
    key_group_first: int = 0
    key_group_last: int = -1
    """Inclusive; -1 with first 0 means: not keyed."""
    shared: bool = False
    inline: bytes = b""


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """State of one operator subtask as of one barrier.

    `keyed` and `raw` handles hold keyed state and an operator's own bytes; `lists` holds operator
    list state by name, one bytes element an item, redistributed on rescale (Kafka splits live here
    under the name "splits"). `committables` are all that this subtask has pre-committed, up to and
    with this barrier, and does not know to be committed.
    """

    uid: str
    keyed: tuple[StateHandle, ...] = ()
    raw: tuple[StateHandle, ...] = ()
    lists: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    committables: tuple[Committable, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotTimings:
    """How long one subtask took for one checkpoint, in milliseconds, and what it wrote."""

    alignment_ms: float = 0.0
    sync_ms: float = 0.0
    async_ms: float = 0.0
    start_delay_ms: float = 0.0
    """From the trigger to the first barrier, by two machines' clocks: 0 where they disagree."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """All that one subtask (one chain, one index) contributes to one checkpoint."""

    subtask: SubtaskRef
    operators: tuple[OperatorSnapshot, ...] = ()
    timings: SnapshotTimings = SnapshotTimings()


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """One decision of the log: everything before barrier `checkpoint` is done, for ever.

    `max_parallelism` is the number of key groups; a job that asks for another is refused.
    """

    checkpoint: CheckpointId
    attempt: AttemptId
    parallelism: int
    max_parallelism: int
    snapshots: tuple[SubtaskSnapshot, ...]
    triggered_at_ms: int
    completed_at_ms: int
    final: bool = False
    """Whether all sources had reached their end, or the job was told to stop, before it."""
    delivered_through: CheckpointId = GENESIS
    """Up to this decision all global committers were known to have committed."""
    undelivered: tuple[CheckpointId, ...] = ()
    """The decisions between that one and this one, rising. See `global_commits`."""

    def operator(self, uid: str) -> tuple[tuple[int, OperatorSnapshot], ...]:
        """Return (subtask index, snapshot) of operator `uid`, by index."""
        found = [
            (snapshot.subtask.index, operator)
            for snapshot in self.snapshots
            for operator in snapshot.operators
            if operator.uid == uid
        ]
        return tuple(sorted(found, key=lambda pair: pair[0]))
