"""The snapshot that a subtask sends with its ack, the completed checkpoint, and its transactions.

These are the records of the decision log: plain values, written as JSON, never pickled.

Rules for deleting state files: a *private* file belongs to one checkpoint and is deleted with it. A
pending checkpoint may name a *shared* file again. The reason: a subtask re-uses files of
checkpoints that it believes completed and retained, and it learns late that one is dropped. So a
shared file that no checkpoint names any more is deleted only after two conditions hold:

    1. every subtask has confirmed the newest decision of that time (or a later one);
    2. every checkpoint triggered before condition 1 held is over.

After 1, no subtask names the file in a new snapshot. After 2, no older snapshot can bring it. This
is safe if state backends keep two rules. The path of a shared file is written once (so it is not
derived from content alone). Only files of checkpoints known to be completed and retained are
re-used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId, SubtaskRef, TransactionId


@dataclass(frozen=True, slots=True)
class StateHandle:
    """A durable piece of state: a file in checkpoint storage, or bytes inside the record itself.

    `path` is relative to the job's directory, and empty for inline bytes. A `shared` file belongs
    to more than one checkpoint and is deleted when no retained checkpoint names it.
    """

    name: str
    path: str
    size_bytes: int
    checksum: str
    key_group_first: int = 0
    key_group_last: int = -1
    """The last key group, inclusive. -1 with first 0 means that the state has no key."""
    shared: bool = False
    inline: bytes = b""


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The state of one operator subtask at one barrier.

    `keyed` handles hold keyed state. `raw` handles hold the operator's own bytes. `lists` holds
    operator list state by name, one bytes element per item, redistributed on rescale (Kafka splits
    are stored under the name "splits"). `committables` are all transactions that this subtask has
    pre-committed, up to and including this barrier, and does not know to be committed. `described`
    contains, by name, those settings of the operator that give its state its meaning: the types of
    its keys, the sizes of its windows. One subtask reports them for all.
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

    They belong to neither subtask's state. After a restore, they are the first rows that the new
    owner of their keys receives.
    """

    chain: str
    sent: bool
    """True if the receiving subtask held the rows. False if the sending subtask held them; they are
    replayed after those that the receiver held."""
    handle: StateHandle
    input: int = 0
    """The index of the input of the chain's first operator that the rows are for."""


@dataclass(frozen=True, slots=True)
class SnapshotTimings:
    """The durations of one subtask's part in one checkpoint, in milliseconds, and its sizes."""

    alignment_ms: float = 0.0
    sync_ms: float = 0.0
    async_ms: float = 0.0
    start_delay_ms: float = 0.0
    """The time from the trigger to the first barrier, by the clocks of two machines. 0 if the
    clocks disagree."""
    size_bytes: int = 0
    """The size of the subtask's state and of its rows in flight."""
    uploaded_bytes: int = 0
    """The part of `size_bytes` that was uploaded to storage for this checkpoint. Excludes inline
    bytes and files that storage already had."""
    in_flight_bytes: int = 0
    overtaken: bool = False
    """True if the barrier went ahead of rows here; False if it waited for its turn."""


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """The contribution of one subtask (one chain, one index) to one checkpoint."""

    subtask: SubtaskRef
    operators: tuple[OperatorSnapshot, ...] = ()
    timings: SnapshotTimings = SnapshotTimings()
    in_flight: tuple[InFlight, ...] = ()
    """The rows that the barrier overtook in the subtask's channels; empty if it waited for its
    turn."""


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A decision of the log: everything before barrier `checkpoint` is done for good.

    `max_parallelism` is the number of key groups. A job with another number is refused.
    """

    checkpoint: CheckpointId
    attempt: AttemptId
    parallelism: int
    max_parallelism: int
    snapshots: tuple[SubtaskSnapshot, ...]
    triggered_at_ms: int
    completed_at_ms: int
    final: bool = False
    """True if, before this checkpoint, all sources had reached their end or the job was told to
    stop, and no rows are in flight. Only the commits of this checkpoint are left to do."""
    input_ended: bool = False
    """True if functions made their last rows before this checkpoint and nothing was read since."""
    delivered_through: CheckpointId = GENESIS
    """The decision up to which all global committers were known to have committed."""
    undelivered: tuple[CheckpointId, ...] = ()
    """The decisions between `delivered_through` and this one, in rising order. See
    `global_commits`."""

    def in_flight(self, chain: str) -> tuple[InFlight, ...]:
        """Return the rows to replay into `chain`, in the order of the replay.

        Rows that receiving subtasks held come first, because they were sent first.
        """
        parts = [part for s in self.snapshots for part in s.in_flight if part.chain == chain]
        # False sorts before True, and the sort is stable: each side keeps its own order.
        return tuple(sorted(parts, key=lambda part: not part.sent))

    def operator(self, uid: str) -> tuple[tuple[int, OperatorSnapshot], ...]:
        """Return (subtask index, snapshot) pairs of operator `uid`, sorted by index."""
        parts = [
            (snapshot.subtask.index, operator)
            for snapshot in self.snapshots
            for operator in snapshot.operators
            if operator.uid == uid
        ]
        return tuple(sorted(parts, key=lambda pair: pair[0]))


def handles_of(snapshots: Iterable[SubtaskSnapshot]) -> tuple[StateHandle, ...]:
    """Return every handle of `snapshots` that refers to a file."""
    return tuple(
        handle
        for snapshot in snapshots
        for handle in (
            *(handle for o in snapshot.operators for handle in (*o.keyed, *o.raw)),
            *(part.handle for part in snapshot.in_flight),
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
    """None until condition 1 holds. Then all checkpoints below this number must be over."""


class StateFiles:
    """The number of references to each file, by path. Owned by the coordinator.

    The cost of a call grows with the files passed to it, not with all known files: aborting a
    checkpoint of thousands of subtasks brings a late ack of each.
    """

    def __init__(self, retained: Iterable[CompletedCheckpoint] = ()) -> None:
        self._named: Counter[str] = Counter()
        self._waiting: dict[str, _Waiting] = {}
        for completed in retained:
            self.name(completed.snapshots)

    def name(self, snapshots: Iterable[SubtaskSnapshot]) -> None:
        """Record that a pending or retained checkpoint names the files of `snapshots`."""
        self._named.update(handle.path for handle in handles_of(snapshots))

    def drop(
        self, snapshots: Iterable[SubtaskSnapshot], *, decided_last: CheckpointId
    ) -> tuple[StateHandle, ...]:
        """Undo `name` for `snapshots`; return the private files to delete."""
        handles = handles_of(snapshots)
        for handle in handles:
            self._named[handle.path] -= 1
            if not self._named[handle.path]:
                del self._named[handle.path]
        return self.find_unnamed(handles, decided_last=decided_last)

    def find_unnamed(
        self, handles: Iterable[StateHandle], *, decided_last: CheckpointId
    ) -> tuple[StateHandle, ...]:
        """Return the private files of `handles` that no checkpoint names; shared ones must wait."""
        private: dict[str, StateHandle] = {}
        for handle in handles:
            if not handle.path or self._is_named(handle.path):
                continue
            if handle.shared:
                # A subtask that has not yet learned that the old checkpoint is gone may be taking a
                # snapshot that names this shared file again.
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
        """Return the shared files that may now be deleted, from `among` or from all that wait.

        `confirmed` is the newest decision that every subtask is known to have learned of.
        `oldest_pending` is `next_checkpoint` if no checkpoint is pending.
        """
        released: list[StateHandle] = []
        paths = list(self._waiting) if among is None else dict.fromkeys(h.path for h in among)
        for path in paths:
            waiting = self._waiting.get(path)
            if waiting is None:
                continue
            if self._is_named(path):
                # The file is used again. The checkpoint that now names it will drop it later.
                del self._waiting[path]
                continue
            # Once every subtask knows of the decision, no new snapshot names the file. Snapshots
            # begun before must still be over.
            if waiting.over_before is None and confirmed >= waiting.decided_last:
                waiting.over_before = next_checkpoint
            if waiting.over_before is not None and oldest_pending >= waiting.over_before:
                del self._waiting[path]
                released.append(waiting.handle)
        return tuple(released)

    def _is_named(self, path: str) -> bool:
        return path in self._named


def commit_order(committable: Committable) -> tuple[int, int, int, int]:
    """Return the sort key that puts the transactions of a checkpoint before those of the next.

    The attempt that wrote a transaction comes after the checkpoint in the key.
    """
    transaction: TransactionId = committable.transaction
    return transaction.checkpoint, transaction.attempt, transaction.subtask, transaction.sequence


def begin_anew(
    last: CompletedCheckpoint, number: CheckpointId, attempt: AttemptId, now_ms: int
) -> CompletedCheckpoint:
    """Return the decision `number` of `attempt`, after which a job has no state and no positions.

    All transactions that the previous decision `last` lists must have been committed. A start from
    the new decision begins every source at its configured start. The number of key groups never
    changes.
    """
    return CompletedCheckpoint(
        checkpoint=number,
        attempt=attempt,
        parallelism=last.parallelism,
        max_parallelism=last.max_parallelism,
        snapshots=(),
        triggered_at_ms=now_ms,
        completed_at_ms=now_ms,
        delivered_through=last.checkpoint,
    )


def committables_of(completed: CompletedCheckpoint) -> tuple[Committable, ...]:
    """Return all transactions that `completed` decides to commit, of all sinks, in commit order."""
    committables = [
        committable
        for snapshot in completed.snapshots
        for operator in snapshot.operators
        for committable in operator.committables
    ]
    return tuple(sorted(committables, key=commit_order))


def retain_ledger_from(
    retained: Sequence[CompletedCheckpoint],
    committed: Sequence[Committable] = (),
    savepoint: CompletedCheckpoint | None = None,
) -> CheckpointId:
    """Return the oldest checkpoint whose proofs of commits a restore of `retained` may need.

    A retained checkpoint may list transactions that earlier *aborted* checkpoints prepared, so the
    result can be lower than the oldest retained checkpoint. `committed` are the last commits of a
    sink: a restore asks for their proofs, too. A start in other storage from `savepoint`, the last
    one taken, asks for its proofs as well. But it does not once the sink has committed a
    transaction after it, because then the target shows that all earlier ones are committed.
    """
    if savepoint is not None and all(
        c.transaction.checkpoint <= savepoint.checkpoint for c in committed
    ):
        retained = (*retained, savepoint)
    kept = [c for completed in retained for c in committables_of(completed)]
    named = [c.transaction.checkpoint for c in (*kept, *committed)]
    own = [completed.checkpoint for completed in retained]
    return CheckpointId(min([*named, *own], default=0))
