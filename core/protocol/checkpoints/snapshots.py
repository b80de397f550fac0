"""What a subtask sends with its ack, and what a completed checkpoint is made of.

These are the records of the decision log: plain values, written as JSON, never pickled.

Which state files may be deleted, and when: a *private* file belongs to one checkpoint and goes with
it. A *shared* one may be named again by a checkpoint under way, because a subtask re-uses files of
checkpoints that it knows to be completed and retained, and it learns late. So a shared file that
nothing names any more waits for two things:

    1. every subtask has confirmed the newest decision of that time (or a later one);
    2. every checkpoint triggered before that is over.

After 1 no subtask names the file in a new snapshot; after 2 no older snapshot can bring it. Two
conditions on state backends make this safe: the path of a shared file is written once (so it is not
derived from content alone), and only files of checkpoints known completed and retained are re-used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
    with this barrier, and does not know to be committed. `described` says by name how the operator
    is set up where its state means something else under another setting: the types of its keys, the
    sizes of its windows. One subtask says it for all.
    """

    uid: str
    keyed: tuple[StateHandle, ...] = ()
    raw: tuple[StateHandle, ...] = ()
    lists: dict[str, tuple[bytes, ...]] = field(default_factory=dict[str, tuple[bytes, ...]])
    committables: tuple[Committable, ...] = ()
    described: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class InFlight:
    """Rows on their way into `chain` that a barrier overtook, on one side of the channels.

    They are part of neither subtask's state: whoever owns their keys then is given them first.
    """

    chain: str
    sent: bool
    """Whether the receiving subtask held them; else the sending one did, and they come later."""
    handle: StateHandle
    input: int = 0
    """Which input of the chain's first operator they were on their way into."""


@dataclass(frozen=True, slots=True)
class SnapshotTimings:
    """How long one subtask took for one checkpoint, in milliseconds, and what it wrote."""

    alignment_ms: float = 0.0
    sync_ms: float = 0.0
    async_ms: float = 0.0
    start_delay_ms: float = 0.0
    """From the trigger to the first barrier, by two machines' clocks: 0 where they disagree."""
    size_bytes: int = 0
    """Of its state and of what was in flight."""
    uploaded_bytes: int = 0
    """Of it, what went to storage for this checkpoint: not inline, nor there already."""
    in_flight_bytes: int = 0
    overtaken: bool = False
    """Whether the barrier went ahead of rows here; else it waited for its turn."""


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """All that one subtask (one chain, one index) contributes to one checkpoint."""

    subtask: SubtaskRef
    operators: tuple[OperatorSnapshot, ...] = ()
    timings: SnapshotTimings = SnapshotTimings()
    in_flight: tuple[InFlight, ...] = ()
    """What the barrier overtook in its channels; empty when it waited for its turn."""


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
    """Whether all sources had reached their end, or the job was told to stop, before it, and no
    rows are in flight: nothing but its commits is left to do."""
    input_ended: bool = False
    """Whether functions have made their last rows before it, and nothing was read since."""
    delivered_through: CheckpointId = GENESIS
    """Up to this decision all global committers were known to have committed."""
    undelivered: tuple[CheckpointId, ...] = ()
    """The decisions between that one and this one, rising. See `global_commits`."""

    def in_flight(self, chain: str) -> tuple[InFlight, ...]:
        """Return what is to be replayed into `chain`, in that order.

        What receiving subtasks held comes before what sending ones did: it was sent before.
        """
        parts = [one for s in self.snapshots for one in s.in_flight if one.chain == chain]
        # False sorts before True, and the sort is stable: each side keeps its own order.
        return tuple(sorted(parts, key=lambda one: not one.sent))

    def operator(self, uid: str) -> tuple[tuple[int, OperatorSnapshot], ...]:
        """Return (subtask index, snapshot) of operator `uid`, by index."""
        parts = [
            (snapshot.subtask.index, operator)
            for snapshot in self.snapshots
            for operator in snapshot.operators
            if operator.uid == uid
        ]
        return tuple(sorted(parts, key=lambda pair: pair[0]))


def handles_of(snapshots: Iterable[SubtaskSnapshot]) -> tuple[StateHandle, ...]:
    """Return every handle of `snapshots` that is a file."""
    return tuple(
        handle
        for snapshot in snapshots
        for handle in (
            *(handle for o in snapshot.operators for handle in (*o.keyed, *o.raw)),
            *(one.handle for one in snapshot.in_flight),
        )
        if handle.path
    )


def paths_of(snapshots: Iterable[SubtaskSnapshot]) -> frozenset[str]:
    """Return the path of every file that `snapshots` name."""
    return frozenset(handle.path for handle in handles_of(snapshots))


@dataclass(slots=True)
class _Waiting:
    """A shared file that no checkpoint names at the moment."""

    handle: StateHandle
    decided_last: CheckpointId
    over_before: CheckpointId | None = None
    """Set with condition 1: checkpoints below this number must be over."""


class StateFiles:
    """Counts references to files by path. Owned by the coordinator.

    What a call costs goes with the files that it is told of, not with those that there are: a
    checkpoint of thousands of subtasks that is given up brings an ack of each.
    """

    def __init__(self, retained: Iterable[CompletedCheckpoint] = ()) -> None:
        self._named: Counter[str] = Counter()
        self._waiting: dict[str, _Waiting] = {}
        for completed in retained:
            self.name(completed.snapshots)

    def name(self, snapshots: Iterable[SubtaskSnapshot]) -> None:
        """Take in that a pending checkpoint, or a retained one, names the files of `snapshots`."""
        self._named.update(handle.path for handle in handles_of(snapshots))

    def drop(
        self, snapshots: Iterable[SubtaskSnapshot], *, decided_last: CheckpointId
    ) -> tuple[StateHandle, ...]:
        """Take back what `name` was told; return the private files to delete."""
        handles = handles_of(snapshots)
        for handle in handles:
            self._named[handle.path] -= 1
            if not self._named[handle.path]:
                del self._named[handle.path]
        return self.find_unnamed(handles, decided_last=decided_last)

    def find_unnamed(
        self, handles: Iterable[StateHandle], *, decided_last: CheckpointId
    ) -> tuple[StateHandle, ...]:
        """Return the private ones of `handles` that no checkpoint names; the shared ones wait."""
        private: dict[str, StateHandle] = {}
        for handle in handles:
            if not handle.path or self._is_named(handle.path):
                continue
            if handle.shared:
                # A shared file may be named again by a snapshot that is being taken just now, on a
                # subtask that has not heard that the old checkpoint is gone.
                self._waiting[handle.path] = _Waiting(handle, decided_last)
            else:
                private[handle.path] = handle
        return tuple(private.values())

    def release(
        self,
        *,
        confirmed: CheckpointId,
        next_checkpoint: CheckpointId,
        oldest_pending: CheckpointId,
        among: Iterable[StateHandle] | None = None,
    ) -> tuple[StateHandle, ...]:
        """Return the shared files whose wait is over, to delete; of `among`, or of all.

        `confirmed` is the decision that every subtask is known to have heard of;
        `oldest_pending` is `next_checkpoint` when none is pending.
        """
        released: list[StateHandle] = []
        paths = list(self._waiting) if among is None else dict.fromkeys(h.path for h in among)
        for path in paths:
            waiting = self._waiting.get(path)
            if waiting is None:
                continue
            if self._is_named(path):
                # Used again: the checkpoint that names it now drops it later.
                del self._waiting[path]
                continue
            # Once everybody has heard, nobody begins a snapshot that names it; those begun before
            # must still be over.
            if waiting.over_before is None and confirmed >= waiting.decided_last:
                waiting.over_before = next_checkpoint
            if waiting.over_before is not None and oldest_pending >= waiting.over_before:
                del self._waiting[path]
                released.append(waiting.handle)
        return tuple(released)

    def _is_named(self, path: str) -> bool:
        return path in self._named
