"""What a savepoint is, and how a job begins from one.

A savepoint is never decided, so it lists transactions of which the decision log may know nothing: a
later checkpoint of the same attempt decides them, or the next attempt rolls them back. Restoring
appends a decision of its own, with the savepoint's state and positions. Before it may, each
transaction that the savepoint lists must be

    decided      the log says so, and the restored decision need not list it
    prepared     by the attempt that nobody has followed: the restored decision decides it
    rolled back  by an attempt that has begun since: its rows are nowhere, and restoring is refused

What was read after the savepoint and is committed comes twice. So a savepoint before the last
decision is refused, unless the user allows it, or nothing was read in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onceflow.core.errors import SavepointRefused
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.log import LogView
from onceflow.core.protocol.log_memory import Coverage, LogMemory
from onceflow.core.protocol.recovery import committables_of
from onceflow.core.protocol.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)

UNSEEN_CHECKPOINTS = 100
"""How far above a savepoint the numbers go on in a log that does not hold what followed it: more
than the tries of the last checkpoint that a stopping job takes."""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """All that is written of a savepoint besides its state files."""

    id: str
    """Drawn anew for each."""
    job: str
    log_id: str
    """Of the job that took it, which a job in new storage takes over; empty for a bootstrap."""
    kind: CheckpointKind
    completed: CompletedCheckpoint
    """Its state handles name files of the savepoint."""
    memory: LogMemory
    """What the job's decision log remembered by then."""
    backend: str = ""
    """Whose form the state is in, as `StateBackend.native_form` says; empty: the canonical one."""


def seeded(view: LogView, savepoint: Savepoint) -> LogView:
    """Return `view`, of a log without any decision, as what follows the savepoint's own log.

    Attempts and transactions get numbers that its job has not used by then.
    """
    if view.decided:
        return view
    attempt = max(view.attempt, savepoint.completed.attempt)
    memory = savepoint.memory.claimed(view.memory.sinks)
    return replace(view, attempt=AttemptId(attempt), memory=memory)


def is_restored(view: LogView, place: str, savepoint: Savepoint | None = None) -> bool:
    """Return whether the job has begun from this savepoint already: then it goes on from its log.

    `place` is where the user says that it is; None: nothing is there any more.
    """
    found, _, where = view.memory.savepoint.partition(" ")
    if savepoint is None:
        return bool(view.decided) and where == place
    return bool(view.decided) and found == savepoint.id


def check_savepoint(
    savepoint: Savepoint,
    view: LogView,
    *,
    job: str,
    log_id: str,
    last_attempt: AttemptId,
    allow_rewind: bool,
) -> None:
    """Return when `job`, whose decision log says `view`, may begin from `savepoint`.

    `log_id` is empty for a job that never ran. `last_attempt` is the last one before the attempt
    that restores.

    Raises:
        SavepointRefused: It may not; says what was committed since, or what is missing.
    """
    name = f"savepoint {savepoint.completed.checkpoint} of job {savepoint.job!r}"
    if savepoint.job != job:
        raise SavepointRefused(
            f"{name} is of another job than {job!r}: transactions go by the job's name; start the"
            f" pipeline as Pipeline(name={savepoint.job!r})"
        )
    if savepoint.kind is CheckpointKind.BOOTSTRAP:
        if view.decided:
            raise SavepointRefused(
                f"the savepoint of job {job!r} was made of DataFrames, for a job that begins; this"
                f" one has decided checkpoint {view.completed[-1].checkpoint}: start it without"
                " the savepoint, or begin anew in empty storage"
            )
        return
    if log_id and savepoint.log_id != log_id:
        raise SavepointRefused(
            f"{name} was taken by the job with decision log {savepoint.log_id}, and this storage"
            f" holds another job of that name, with decision log {log_id}: use the storage that the"
            " savepoint's job has, or an empty one"
        )
    if not view.decided:
        if savepoint.kind is CheckpointKind.SAVEPOINT and not allow_rewind:
            raise SavepointRefused(
                f"{name} was taken while the job went on, and this storage does not hold its log:"
                " nobody can tell what was committed since, and comes twice. Start it in the"
                " storage of its job, or take one with `stop --savepoint`; or start it with"
                " allow_rewind=True, knowing that"
            )
        return
    if gone := _rolled_back(savepoint, view, last_attempt):
        raise SavepointRefused(
            f"{name} counts on {len(gone)} transactions ({sum(c.rows for c in gone)} rows), the"
            f" first {gone[0].transaction}, which no checkpoint decided before attempt"
            f" {savepoint.completed.attempt} ended; attempt {view.attempt} rolls them back, so"
            " their rows would be missing. Start without the savepoint, from checkpoint"
            f" {view.completed[-1].checkpoint}, or from another one"
        )
    last = view.completed[-1]
    is_older = _is_after(last, savepoint.completed)
    if is_older and not (allow_rewind or _is_same_cut(savepoint.completed, last)):
        raise SavepointRefused(_since(name, savepoint, view))


def check_form(savepoint: Savepoint, native_form: str) -> None:
    """Return when a state backend whose own form is `native_form` can read the savepoint.

    Raises:
        SavepointRefused: It cannot; names both.
    """
    if savepoint.backend not in {"", native_form}:
        own = f"{native_form!r}" if native_form else "the canonical form alone"
        raise SavepointRefused(
            f"savepoint {savepoint.completed.checkpoint} of job {savepoint.job!r} is in the native"
            f" form of state backend {savepoint.backend!r}, and the pipeline's backend reads {own}:"
            f" start it with {savepoint.backend!r}, or take a savepoint that is not native, which"
            " every backend reads"
        )


def restored_from(
    savepoint: Savepoint, view: LogView, *, attempt: AttemptId, now_ms: int
) -> CompletedCheckpoint:
    """Return the decision with which `attempt` begins from `savepoint`, once that was checked.

    Its state handles are still those of the savepoint. It lists what is decided and may not be
    committed: what the last decision lists, or what the savepoint does and no decision knows of.
    """
    taken = savepoint.completed
    last = view.completed[-1] if view.decided else None
    listed = [(s.subtask, o) for s in last.snapshots for o in s.operators] if last else []
    decided = [(ref, o) for ref, o in listed if o.committables]
    known = {c.transaction for _, o in decided for c in o.committables}
    for snapshot in taken.snapshots:
        for operator in snapshot.operators:
            more = tuple(
                c
                for c in operator.committables
                if c.transaction not in known and (last is None or not _is_decided(c, view))
            )
            if more:
                decided.append((snapshot.subtask, replace(operator, committables=more)))
    stated = tuple(
        replace(s, operators=tuple(replace(o, committables=()) for o in s.operators))
        for s in taken.snapshots
    )
    newest = max(taken.checkpoint, last.checkpoint if last else 0)
    number = newest + (1 if last else UNSEEN_CHECKPOINTS)
    undelivered = (*last.undelivered, last.checkpoint) if last else taken.undelivered
    return replace(
        taken,
        checkpoint=CheckpointId(number),
        attempt=attempt,
        snapshots=_with_committables(stated, decided),
        triggered_at_ms=now_ms,
        completed_at_ms=now_ms,
        final=False,
        delivered_through=(last or taken).delivered_through,
        undelivered=undelivered if decided else (),
    )


def _is_decided(committable: Committable, view: LogView) -> bool:
    return view.memory.coverage(committable.transaction) is Coverage.DECIDED


def _rolled_back(savepoint: Savepoint, view: LogView, last_attempt: AttemptId) -> list[Committable]:
    """Return what the savepoint lists, no decision covers, and a later attempt has rolled back."""
    if savepoint.completed.attempt == last_attempt:
        return []
    return [c for c in committables_of(savepoint.completed) if not _is_decided(c, view)]


def _is_after(decided: CompletedCheckpoint, taken: CompletedCheckpoint) -> bool:
    """Return whether a checkpoint was decided after a savepoint was taken.

    What an attempt has taken and nobody decided, the next one numbers anew: attempts come first.
    """
    return (decided.attempt, decided.checkpoint) > (taken.attempt, taken.checkpoint)


def _is_same_cut(one: CompletedCheckpoint, other: CompletedCheckpoint) -> bool:
    """Return whether every source stands at the same place in both."""
    return _positions(one) == _positions(other)


def _positions(completed: CompletedCheckpoint) -> Counter[tuple[str, str, bytes]]:
    return Counter(
        (operator.uid, name, element)
        for snapshot in completed.snapshots
        for operator in snapshot.operators
        for name, elements in operator.lists.items()
        for element in elements
    )


def _since(name: str, savepoint: Savepoint, view: LogView) -> str:
    later = [done for done in view.completed if _is_after(done, savepoint.completed)]
    last = later[-1]
    own = {c.transaction for c in committables_of(savepoint.completed)}
    seen = {c.transaction: c for done in later for c in committables_of(done)}
    since = [c for transaction, c in seen.items() if transaction not in own]
    sinks = sorted({c.transaction.sink_id for c in since} or view.sinks)
    rows = f", with at least {sum(c.rows for c in since)} rows" if since else ""
    return (
        f"{name}, taken in attempt {savepoint.completed.attempt}, is older than the last decision"
        f" of the log, checkpoint {last.checkpoint} of attempt {last.attempt}: checkpoints"
        f" {later[0].checkpoint}-{last.checkpoint} were committed since{rows} under sink id"
        f" {', '.join(map(repr, sinks)) or 'none'}, and would be written again. Start without"
        " the savepoint to go on from there; or, once the targets are put back or the doubling is"
        " wanted, start with allow_rewind=True"
    )


def _with_committables(
    stated: Sequence[SubtaskSnapshot], decided: Sequence[tuple[SubtaskRef, OperatorSnapshot]]
) -> tuple[SubtaskSnapshot, ...]:
    operators: dict[SubtaskRef, dict[str, OperatorSnapshot]] = {
        snapshot.subtask: {operator.uid: operator for operator in snapshot.operators}
        for snapshot in stated
    }
    for ref, operator in decided:
        of_subtask = operators.setdefault(ref, {})
        known = of_subtask.get(operator.uid, OperatorSnapshot(operator.uid))
        both = (*known.committables, *operator.committables)
        of_subtask[operator.uid] = replace(known, committables=both)
    return tuple(SubtaskSnapshot(ref, tuple(operators[ref].values())) for ref in sorted(operators))
