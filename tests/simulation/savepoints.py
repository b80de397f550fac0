"""Savepoints of a simulated job: written beside it, and begun from after a stop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.simulation.clock import Steps, Violation
from tests.simulation.older_copies import committed_in
from tests.simulation.rewinds import import_staged, note_savepoint
from tests.simulation.storage import handles_in

from onceflow.core.errors import SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, WriteSavepoint
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    StateHandle,
)
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.savepoints.savepoint import (
    Savepoint,
    goes_back,
    is_restored,
    list_doubtful_sinks,
)

if TYPE_CHECKING:
    from tests.simulation.log_owner import LogOwner
    from tests.simulation.recovery import SinkRecovery
    from tests.simulation.world import World

JOB, LOG_ID, PLACE = "job", "log", "kept"


@dataclass
class Kept:
    """A savepoint as the user has it: nobody deletes it."""

    savepoint: Savepoint
    content: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    committed: frozenset[TransactionId] = frozenset()
    """The transactions that targets had committed when it was written."""


def write(world: World, decision: WriteSavepoint, view: LogView) -> None:
    """Copy the state, and check that it is what was read before the barrier."""
    completed, request = decision.completed, decision.request
    if completed.attempt < world.claimed:
        return  # a newer attempt has swept its files: it fails, and its user is told
    memory = world.variant.memory_at(view, completed)
    kept = Kept(Savepoint(request.id, JOB, LOG_ID, request.kind, completed, memory))
    kept.content |= world.directories.finish(decision)
    copied = [s for s in completed.snapshots if s.subtask not in decision.in_target]
    for handle in handles_in(replace(completed, snapshots=tuple(copied))):
        kept.content[handle.path] = world.files.read(handle.path)
    world.oracle.check_state(completed, kept.content.__getitem__)
    if request.kind is CheckpointKind.SAVEPOINT_DRAIN:
        world.oracle.drained(completed)
    kept.committed = committed_in(world)
    if world.rewound is None:
        world.kept = kept
    note_savepoint(world, kept)
    world.clock.say(f"savepoint {completed.checkpoint} is written")


def begin_from(world: World, log: LogOwner, sinks: SinkRecovery) -> Steps[None]:
    """Begin from the savepoint that the user names, unless the job has, or it is refused."""
    kept = world.kept
    if not world.begins_from_savepoint or kept is None:
        return
    allow_rewind = world.rewound is not None
    restored = is_restored(log.view, PLACE, kept.savepoint)
    if restored and not allow_rewind:
        return
    asked = list_doubtful_sinks(kept.savepoint, log.view)
    in_doubt = sinks.list_in_doubt(asked)
    records = sinks.ask_targets()
    if restored and not world.variant.is_put_back(kept.savepoint, log.view, records, in_doubt):
        return
    try:
        world.variant.check_savepoint(
            kept.savepoint,
            log.view,
            job=JOB,
            log_id=LOG_ID,
            last_attempt=AttemptId(log.attempt - 1),
            allow_rewind=allow_rewind,
        )
        world.variant.check_targets(
            kept.savepoint,
            log.view,
            records,
            all_tell=len(records) == sinks.target_count,
            allow_rewind=allow_rewind,
        )
    except SavepointRefused as error:
        if not log.view.decided:
            raise Violation(f"I6 a job that has moved is refused: {error}") from None
        world.clock.say(f"refused: {error}")
        return
    now_ms = world.clock.wall_ms()
    lacks_own = world.variant.lacks_own_commits(kept.savepoint, log.view, records, in_doubt)
    decision = world.variant.restored_from(
        kept.savepoint,
        log.view,
        attempt=log.attempt,
        now_ms=now_ms,
        records=records,
        lacks_own=lacks_own,
    )
    for path in sorted({handle.path for handle in handles_in(decision)}):
        world.files.write(_copy(decision, path), kept.content[path])
    import_staged(
        world, world.variant.sinks_to_import(kept.savepoint, log.view, records, lacks_own=lacks_own)
    )
    if lacks_own or goes_back(kept.savepoint, log.view):
        world.oracle.expect_rewind(decision, kept.savepoint.completed)
    log.begins_from(kept.savepoint, PLACE, records, lacks_own=lacks_own)
    yield from log.append(_renamed(decision))


def _copy(decision: CompletedCheckpoint, path: str) -> str:
    return f"a{decision.attempt}/{decision.checkpoint}/of-{path.replace('/', '-')}"


def _renamed(decision: CompletedCheckpoint) -> CompletedCheckpoint:
    def renamed(handles: tuple[StateHandle, ...]) -> tuple[StateHandle, ...]:
        return tuple(replace(handle, path=_copy(decision, handle.path)) for handle in handles)

    def operator(old: OperatorSnapshot) -> OperatorSnapshot:
        return replace(old, keyed=renamed(old.keyed), raw=renamed(old.raw))

    snapshots = tuple(
        replace(snapshot, operators=tuple(map(operator, snapshot.operators)))
        for snapshot in decision.snapshots
    )
    return replace(decision, snapshots=snapshots)
