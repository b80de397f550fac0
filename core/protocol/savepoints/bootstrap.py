"""A savepoint that is built operator by operator, before any job has run.

It holds no positions, and a source without positions in the savepoint starts at its beginning. Each
addition of keyed state is a subtask of its own, so it may add another state to an operator that is
already there. State without a key is all in one subtask, because each copy of broadcast state must
hold all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onceflow.core.errors import SavepointRefused, StateIncompatible
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.log.memory import NOTHING_REMEMBERED
from onceflow.core.protocol.savepoints.savepoint import Savepoint

_FIRST = CheckpointId(1)


@dataclass(frozen=True, slots=True)
class NewState:
    """The state to add."""

    job: str
    uid: str
    max_parallelism: int
    handles: tuple[StateHandle, ...] = ()
    raw: tuple[StateHandle, ...] = ()
    """State without a key. It replaces the state of the same name."""


def check_addition(known: Savepoint | None, job: str, max_parallelism: int) -> None:
    """Check that state may be added to `known`, which is None if there is no savepoint yet.

    Raises:
        SavepointRefused: A job took the savepoint, or it is for another job.
        StateIncompatible: The savepoint has another number of key groups.
    """
    if known is None:
        return
    if known.kind is not CheckpointKind.BOOTSTRAP:
        raise SavepointRefused(
            f"the directory holds a savepoint that job {known.job!r} took, and such a savepoint"
            " is never changed. Write to another directory"
        )
    if known.job != job:
        raise SavepointRefused(
            f"the savepoint in this directory is for job {known.job!r}, but this state is for job"
            f" {job!r}. Write to another directory"
        )
    if known.completed.max_parallelism != max_parallelism:
        raise StateIncompatible(
            "the savepoint in this directory has max parallelism"
            f" {known.completed.max_parallelism}, but this state is written with"
            f" {max_parallelism}: all state of a job needs the same max parallelism"
        )


def with_state(known: Savepoint | None, new: NewState, *, drawn_id: str, now_ms: int) -> Savepoint:
    """Return the savepoint with `new` added. Raises the errors of `check_addition`."""
    check_addition(known, new.job, new.max_parallelism)
    snapshots = _grown(known.completed.snapshots if known else (), new)
    if known is not None:
        completed = replace(
            known.completed,
            snapshots=snapshots,
            parallelism=len(snapshots),
            completed_at_ms=now_ms,
        )
        return replace(known, completed=completed)
    completed = CompletedCheckpoint(
        checkpoint=_FIRST,
        attempt=AttemptId(1),
        parallelism=1,
        max_parallelism=new.max_parallelism,
        snapshots=snapshots,
        triggered_at_ms=now_ms,
        completed_at_ms=now_ms,
    )
    return Savepoint(drawn_id, new.job, "", CheckpointKind.BOOTSTRAP, completed, NOTHING_REMEMBERED)


def _grown(before: tuple[SubtaskSnapshot, ...], new: NewState) -> tuple[SubtaskSnapshot, ...]:
    if new.raw:
        for index, snapshot in enumerate(before):
            (operator,) = snapshot.operators
            if operator.uid == new.uid and operator.raw:
                raw = {handle.name: handle for handle in (*operator.raw, *new.raw)}
                merged = replace(snapshot, operators=(replace(operator, raw=tuple(raw.values())),))
                return (*before[:index], merged, *before[index + 1 :])
    added = OperatorSnapshot(new.uid, keyed=new.handles, raw=new.raw)
    return (*before, SubtaskSnapshot(SubtaskRef(new.uid, len(before)), (added,)))
