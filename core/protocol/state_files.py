"""Which state files may be deleted, and when.

A *private* file belongs to one checkpoint and goes with it. A *shared* one may be named again by a
checkpoint under way, because a subtask re-uses files of checkpoints that it knows to be completed
and retained, and it learns late. So a shared file that nothing names any more waits for two things:

    1. every subtask has confirmed the newest decision of that time (or a later one);
    2. every checkpoint triggered before that is over.

After 1 no subtask names the file in a new snapshot; after 2 no older snapshot can bring it. Two
conditions on state backends make this safe: the path of a shared file is written once (so it is not
derived from content alone), and only files of checkpoints known completed and retained are re-used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.snapshots import StateHandle, SubtaskSnapshot


def handles_of(snapshots: Iterable[SubtaskSnapshot]) -> tuple[StateHandle, ...]:
    """Return every handle of `snapshots` that is a file."""
    return tuple(
        handle
        for snapshot in snapshots
        for operator in snapshot.operators
        for handle in (*operator.keyed, *operator.raw)
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
    """Counts references to files by path. Owned by the coordinator."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    def drop(
        self, handles: Iterable[StateHandle], *, named: frozenset[str], decided_last: CheckpointId
    ) -> tuple[StateHandle, ...]:
        """Take in that a checkpoint no longer names `handles`; return the private ones to delete.

        `named` are the paths that retained and pending checkpoints still name.
        """
        private: dict[str, StateHandle] = {}
        for handle in handles:
            if not handle.path or handle.path in named:
                continue
            if handle.shared:
                self._waiting[handle.path] = _Waiting(handle, decided_last)
            else:
                private[handle.path] = handle
        return tuple(private.values())

    def release(
        self,
        *,
        named: frozenset[str],
        confirmed: CheckpointId,
        next_checkpoint: CheckpointId,
        oldest_pending: CheckpointId,
    ) -> tuple[StateHandle, ...]:
        """Return the shared files whose wait is over, to delete.

        `confirmed` is the decision that every subtask is known to have heard of;
        `oldest_pending` is `next_checkpoint` when none is pending.
        """
        released: list[StateHandle] = []
        for path, waiting in list(self._waiting.items()):
            if path in named:
                # Used again: the checkpoint that names it now drops it later.
                del self._waiting[path]
                continue
            if waiting.over_before is None and confirmed >= waiting.decided_last:
                waiting.over_before = next_checkpoint
            if waiting.over_before is not None and oldest_pending >= waiting.over_before:
                del self._waiting[path]
                released.append(waiting.handle)
        return tuple(released)
