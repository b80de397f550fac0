"""The content of a savepoint, and the rules by which a job starts from it.

A savepoint is never decided, so it may list transactions that the decision log does not know. A
later checkpoint of the same attempt decides them, or the next attempt rolls them back. Restoring
appends a decision of its own, with the savepoint's state and positions. Before that, each
transaction that the savepoint lists must be in one of these states:

    decided      the log says so, and the restored decision need not list it
    prepared     by the last attempt, which no other has followed: the restored decision decides it
    rolled back  by an attempt that has started since: its rows are lost, and restoring is refused

Rows that wait in checkpoint storage for their commit are copied into the savepoint, together with
the proofs of commits that sinks keep there. Other storage has no other copy of them.

Rows that were committed after the savepoint will be written a second time. So a savepoint older
than the last decision is refused, unless the user allows it or both are the same cut. They are the
same cut if the sources are at the same positions and no transaction prepared after the savepoint
was committed. Positions alone are not enough: timers and windows by the clock make rows while no
source reads.

A savepoint is also refused if a target has committed a transaction that the savepoint does not
know, no matter what the log says: it was committed from other storage.

A rewind forgets the decisions after the savepoint. Its effect depends on each target:

    it has later commits        their rows will be written a second time; no earlier commits are
                                asked for any more
    it has no later commits     it was put back: it must have the savepoint's own transactions
    it does not prove each      the last decision's transactions are committed, as at every start

If this log lacks decisions that the savepoint's log contains, it is behind: the job ran in other
storage in between and comes back. Treat the start like a start in new storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from onceflow.core.errors import SavepointRefused
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
    committables_of,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.log.memory import Coverage, Decided, LogMemory
from onceflow.core.protocol.log.rules import NO_ATTEMPT, LogView
from onceflow.core.protocol.log.target_records import (
    TargetRecord,
    is_set_back,
    through_before,
    to_record,
    unknown_commits,
)

_TAKEN_WHILE_RUNNING = {CheckpointKind.SAVEPOINT, CheckpointKind.PERIODIC}
UNSEEN_CHECKPOINTS = 100
"""The gap between a savepoint's number and the next one, in a log that lacks the decisions after
the savepoint. It is larger than the number of tries of the last checkpoint of a stopping job."""


@dataclass(frozen=True, slots=True)
class Savepoint:
    """The content of a savepoint, except its state files."""

    id: str
    """A new random id for each savepoint."""
    job: str
    log_id: str
    """The id of the decision log of the job that took it. A job in new storage adopts the id. Empty
    for a bootstrap."""
    kind: CheckpointKind
    """The kind. If a job starts from a checkpoint: STOP for the last decision of its log, else
    PERIODIC."""
    completed: CompletedCheckpoint
    """The checkpoint. Its state handles name files of the savepoint."""
    memory: LogMemory
    """The memory of the job's decision log at that time."""
    backend: str = ""
    """The native form of the state, as in `StateBackend.native_form`; empty for the canonical
    form."""
    staged: tuple[TransactionId, ...] = ()
    """The transactions that sinks had staged by the barrier, rows and proofs of commits. The
    savepoint contains copies of them."""


def seed_view(view: LogView, savepoint: Savepoint) -> LogView:
    """Return `view`, prepared for a start of the job from `savepoint`.

    If `view` follows the savepoint's own log, it is returned as it is. For a rewind, it gets the
    sink ids of the savepoint added: sinks that were retired since may have transactions in doubt
    that the rewind lists. Otherwise, attempts and transactions get numbers that the savepoint's job
    had not used by then.
    """
    if follows_savepoint(view, savepoint):
        if not goes_back(savepoint, view):
            return view
        listed = {c.transaction.sink_id for c in committables_of(savepoint.completed)}
        return replace(view, memory=view.memory.with_sinks({*savepoint.memory.sinks, *listed}))
    attempt = max(view.attempt, savepoint.completed.attempt)
    if view.decided:
        memory = view.memory.with_sinks(savepoint.memory.sinks)
    else:
        memory = savepoint.memory.with_sinks(view.memory.sinks)
    return replace(view, attempt=AttemptId(attempt), memory=memory)


def is_staged_for(transaction: TransactionId, taken: CompletedCheckpoint) -> bool:
    """Return True if a savepoint needs the data staged as `transaction`.

    It needs all data staged before its barrier: the rows that it lists, and the proofs of earlier
    commits that sinks keep there. Rows after the barrier are sent again.
    """
    return transaction.checkpoint <= taken.checkpoint


def follows_savepoint(view: LogView, savepoint: Savepoint) -> bool:
    """Return True if the log has decided everything that the savepoint's log had decided."""
    return bool(view.decided) and all(map(view.memory.knows, savepoint.memory.decided))


def is_restored(view: LogView, location: str, savepoint: Savepoint | None = None) -> bool:
    """Return True if the job has already started from this savepoint and goes on from its log.

    `location` is the savepoint's location as the user gave it. `savepoint` is None if the location
    is empty now.
    """
    savepoint_id, _, where = view.memory.savepoint.partition(" ")
    if savepoint is None:
        return bool(view.decided) and where == location
    return bool(view.decided) and savepoint_id == savepoint.id


def check_savepoint(
    savepoint: Savepoint,
    view: LogView,
    *,
    job: str,
    log_id: str,
    last_attempt: AttemptId,
    allow_rewind: bool,
) -> None:
    """Check that `job`, whose decision log is `view`, may start from `savepoint`.

    `log_id` is empty for a job that never ran. `last_attempt` is the last attempt before the one
    that restores.

    Raises:
        SavepointRefused: The job may not start from it. The error says what was committed since,
            or what is missing.
    """
    kind = "savepoint" if savepoint.kind.is_savepoint else "checkpoint"
    name = f"{kind} {savepoint.completed.checkpoint} of job {savepoint.job!r}"
    if savepoint.job != job:
        raise SavepointRefused(
            f"{name} belongs to another job than {job!r}, and transactions are named after the"
            f" job. Start the pipeline as Pipeline(name={savepoint.job!r})"
        )
    if savepoint.kind is CheckpointKind.BOOTSTRAP:
        if view.decided:
            raise SavepointRefused(
                f"the savepoint of job {job!r} was written from DataFrames and can only start a"
                " new job, but this job has already decided checkpoint"
                f" {view.completed[-1].checkpoint}. Start the job without the savepoint, or start"
                " a new job in empty storage"
            )
        return
    if log_id and savepoint.log_id != log_id:
        raise SavepointRefused(
            f"{name} was taken by the job with decision log {savepoint.log_id}, but this storage"
            f" holds another job of that name, with decision log {log_id}. Use the storage of the"
            " savepoint's job, or an empty one"
        )
    if not follows_savepoint(view, savepoint):
        if savepoint.kind in _TAKEN_WHILE_RUNNING and not allow_rewind:
            raise SavepointRefused(
                f"{name} was taken while the job went on, and the log in this storage does not"
                " contain the job's decisions. It is not known which rows were committed since,"
                " and those rows would be written a second time. Start it in the storage of its"
                " job, or take another savepoint with `stop --savepoint`. Start it with"
                " allow_rewind=True only if duplicate rows are acceptable"
            )
        return
    if gone := _find_rolled_back(savepoint, view, last_attempt):
        raise SavepointRefused(
            f"{name} relies on {len(gone)} transactions ({sum(c.rows for c in gone)} rows), the"
            f" first {gone[0].transaction}, which no checkpoint decided before attempt"
            f" {savepoint.completed.attempt} ended; attempt {view.attempt} rolls them back, so"
            " their rows would be lost. Start without the savepoint, from checkpoint"
            f" {view.completed[-1].checkpoint}, or from another savepoint"
        )
    if goes_back(savepoint, view) and not allow_rewind:
        raise SavepointRefused(_since(name, savepoint, view))


def sinks_to_import(
    savepoint: Savepoint,
    view: LogView,
    records: Iterable[TargetRecord],
    *,
    lacks_own: bool = False,
) -> frozenset[str]:
    """Return the sink ids whose staged rows the job must copy from the savepoint.

    A sink whose target has committed more is left out: its rows are committed there and must not be
    in doubt.
    """
    records = tuple(records)
    if follows_savepoint(view, savepoint):
        takes_back = lacks_own or goes_back(savepoint, view)
        known = _telling(records) if takes_back else frozenset[str]()
    else:
        known = frozenset(savepoint.memory.sinks)
    return known - _find_passed(savepoint, records)


def list_doubtful_sinks(savepoint: Savepoint, view: LogView) -> frozenset[str]:
    """Return the sink ids whose transactions in doubt a start lists, to detect targets put back.

    These sinks have written before, so their targets exist and can be asked. Empty if the log does
    not follow the savepoint.
    """
    if not follows_savepoint(view, savepoint):
        return frozenset()
    listed = (*committables_of(savepoint.completed), *committables_of(view.completed[-1]))
    return frozenset(committable.transaction.sink_id for committable in listed)


def lacks_own_commits(
    savepoint: Savepoint,
    view: LogView,
    records: Iterable[TargetRecord],
    in_doubt: Collection[TransactionId],
) -> bool:
    """Return True if a target was put back to before the commits that the savepoint itself lists.

    The target has such a transaction neither committed nor in doubt. `in_doubt` are the
    transactions that targets held before they were asked for `records`. The log counts on the
    commit, so the decisions since the savepoint are forgotten, even if there are none.
    """
    listed = [c for c in committables_of(savepoint.completed) if c.transaction not in in_doubt]
    return follows_savepoint(view, savepoint) and any(
        record.proves_each and is_set_back(record, listed) for record in records
    )


def is_put_back(
    savepoint: Savepoint,
    view: LogView,
    records: Sequence[TargetRecord],
    in_doubt: Collection[TransactionId],
) -> bool:
    """Return True if targets were put back, so that a job starts again from its savepoint.

    The job has started from this savepoint before, and decided `view` since. A target that lacks a
    known commit was put back. A target that lacks a transaction listed by the last decision or the
    savepoint was put back, or has it in doubt. `in_doubt` are the transactions that all targets
    held before they were asked for `records`.
    """
    listed = committables_of(view.completed[-1])
    lost = [c for c in listed if c.transaction not in in_doubt]
    return lacks_own_commits(savepoint, view, records, in_doubt) or any(
        is_set_back(record, (*view.memory.committed, *lost)) for record in records
    )


def goes_back(savepoint: Savepoint, view: LogView) -> bool:
    """Return True if the log has decided rows since the savepoint that a start would repeat."""
    if not follows_savepoint(view, savepoint):
        return False
    last = view.completed[-1]
    return _is_after(last, savepoint.completed) and not _is_same_cut(savepoint, view)


def check_targets(
    savepoint: Savepoint,
    view: LogView,
    records: Iterable[TargetRecord],
    *,
    all_tell: bool,
    allow_rewind: bool,
) -> None:
    """Raise SavepointRefused unless no target has committed anything since the savepoint.

    Call it after `check_savepoint` has accepted the savepoint. `all_tell`: every sink's target has
    a record.
    """
    name = f"savepoint {savepoint.completed.checkpoint} of job {savepoint.job!r}"
    follows = follows_savepoint(view, savepoint)
    if view.decided and not follows and not all_tell:
        raise SavepointRefused(
            f"{name} contains later decisions than the log in this storage, which ends at"
            f" checkpoint {view.completed[-1].checkpoint}, and not every sink's target records"
            " what it has committed since. Start the job in empty storage"
        )
    if allow_rewind:
        return
    for record in records:
        unknown = _unknown_commits(savepoint, record)
        seen_last = savepoint.completed.checkpoint + UNSEEN_CHECKPOINTS
        if record.claims and not follows:
            # Other storage decided the commits of later attempts.
            seen_last = min(seen_last, through_before(record, savepoint.completed.attempt))
        if follows:
            unknown = tuple(mark for mark in unknown if not view.memory.knows(mark))
            seen_last = view.completed[-1].checkpoint
        if unknown or record.through > seen_last:
            last = unknown[-1].checkpoint if unknown else record.through
            raise SavepointRefused(
                f"{name}, taken in attempt {savepoint.completed.attempt}: the target of sink id"
                f" {record.sink_id!r} has committed since, last checkpoint {last}, and those rows"
                " would be written a second time. Start the job without the savepoint in the"
                " storage in which it ran last, or from one taken there by `onceflow stop"
                " --savepoint`. Start from it with allow_rewind=True only once every target is"
                " restored to its state at this savepoint, its rows together with onceflow's own"
                " tables"
            )


def check_form(savepoint: Savepoint, native_form: str) -> None:
    """Raise SavepointRefused unless a state backend of the form `native_form` can read it."""
    if savepoint.backend not in {"", native_form}:
        own = f"{native_form!r}" if native_form else "the canonical form alone"
        raise SavepointRefused(
            f"savepoint {savepoint.completed.checkpoint} of job {savepoint.job!r} is in the"
            f" native form of state backend {savepoint.backend!r}, but the pipeline's backend"
            f" reads {own}. Start the job with {savepoint.backend!r}, or take a savepoint that is"
            " not native, which every backend reads"
        )


def build_first_decision(
    savepoint: Savepoint,
    view: LogView,
    *,
    attempt: AttemptId,
    now_ms: int,
    records: Iterable[TargetRecord] = (),
    lacks_own: bool = False,
) -> CompletedCheckpoint:
    """Return the decision with which `attempt` starts from `savepoint`, which was checked.

    Its state handles still name the savepoint's files. It lists the transactions that are decided
    but perhaps not committed yet: those of the last decision, or those of the savepoint that no
    decision contains. `records` are the records of the targets that have them. For `lacks_own`, see
    `lacks_own_commits`.
    """
    taken, records = savepoint.completed, tuple(records)
    follows = follows_savepoint(view, savepoint)
    rewinds = follows and (lacks_own or goes_back(savepoint, view))
    last = view.completed[-1] if follows and not rewinds else None
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
    if last is None:
        decided = _list_at_rewind(savepoint, view if rewinds else None, decided, records)
    seen = [record.checkpoint_last for record in records]
    decisions = [completed.checkpoint for completed in view.completed]
    newest = max(taken.checkpoint, *seen, *decisions, 0)
    number = newest + (1 if follows else UNSEEN_CHECKPOINTS)
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


def view_before(
    savepoint: Savepoint,
    view: LogView,
    records: Iterable[TargetRecord] = (),
    *,
    lacks_own: bool = False,
) -> LogView:
    """Return the log's view to which `build_first_decision`, with equal arguments, is appended."""
    follows = follows_savepoint(view, savepoint)
    rewinds = follows and (lacks_own or goes_back(savepoint, view))
    if follows and not rewinds:
        return view
    records = tuple(records)
    taken = savepoint.memory
    known = taken.remember_decided(committables_of(savepoint.completed))
    tell, passed = _telling(records), _find_passed(savepoint, records)
    # The start asks each target for its last commits, if it may still have their proofs.
    later = {(r.sink_id, mark.attempt): mark.checkpoint for r in records for mark in r.committed}
    asked = [
        c
        for c in taken.committed
        if (own := c.transaction).sink_id not in passed
        and own.checkpoint >= later.get((own.sink_id, own.attempt), 0)
    ]
    if rewinds:
        asked = [c for c in asked if c.transaction.sink_id in tell]
        asked += [c for c in view.memory.committed if c.transaction.sink_id not in tell]
    marks = (*view.memory.rewound, *taken.rewound, *(m for r in records for m in r.committed))
    # Include earlier rewinds: commits that targets had before them may still be there.
    known = replace(known, rewound=())
    rewound = to_record(
        "", NO_ATTEMPT, (candidate for candidate in marks if not known.knows(candidate))
    ).committed
    # A transaction that the savepoint lists, and that a target with later commits still has in
    # doubt, is decided, too.
    memory = replace(known.with_sinks(view.sinks), committed=tuple(asked), rewound=rewound)
    if rewinds:
        memory = memory.keeping(view.memory, view.sinks - tell)
    return replace(view, memory=memory, starts_over=True)


def _unknown_commits(savepoint: Savepoint, record: TargetRecord) -> tuple[Decided, ...]:
    """Return the target's commits that the savepoint does not know."""
    taken = savepoint.completed
    memory = savepoint.memory.remember_decided(committables_of(taken))
    return tuple(
        mark
        for mark in unknown_commits(record, memory)
        # A writer may prepare an empty transaction: the savepoint's own attempt emitted no rows.
        if not (savepoint.kind.ends_emission and mark.attempt == taken.attempt)
    )


def _find_passed(savepoint: Savepoint, records: Iterable[TargetRecord]) -> frozenset[str]:
    """Return the sink ids whose target has committed more than the savepoint knows.

    Such a target may have pruned the proofs of the savepoint's transactions.
    """
    telling = (record for record in records if record.proves_each)
    return frozenset(record.sink_id for record in telling if _unknown_commits(savepoint, record))


def _telling(records: Iterable[TargetRecord]) -> frozenset[str]:
    """Return the sink ids whose target proves each of its commits."""
    return frozenset(record.sink_id for record in records if record.proves_each)


def _list_at_rewind(
    savepoint: Savepoint,
    view: LogView | None,
    decided: Sequence[tuple[SubtaskRef, OperatorSnapshot]],
    records: Sequence[TargetRecord],
) -> list[tuple[SubtaskRef, OperatorSnapshot]]:
    """Return the listed transactions for a start whose log is behind the savepoint, or rewinds.

    `view` is the view of a log that rewinds, otherwise None. `decided` are the transactions that
    the savepoint lists.
    """
    passed = _find_passed(savepoint, records)
    listed = [(ref, _without(operator, passed)) for ref, operator in decided]
    if view is not None:
        # Transactions of targets that do not prove each commit stay as the log says.
        tell = _telling(records)
        last = [(s.subtask, o) for s in view.completed[-1].snapshots for o in s.operators]
        listed = [(ref, _only_undecided(o, view, tell)) for ref, o in listed]
        listed += [(ref, _without(operator, tell)) for ref, operator in last]
    return [(ref, operator) for ref, operator in listed if operator.committables]


def _without(operator: OperatorSnapshot, sinks: frozenset[str]) -> OperatorSnapshot:
    left = (c for c in operator.committables if c.transaction.sink_id not in sinks)
    return replace(operator, committables=tuple(left))


def _only_undecided(
    operator: OperatorSnapshot, view: LogView, besides: frozenset[str]
) -> OperatorSnapshot:
    left = (
        c
        for c in operator.committables
        if c.transaction.sink_id in besides or not _is_decided(c, view)
    )
    return replace(operator, committables=tuple(left))


def _is_decided(committable: Committable, view: LogView) -> bool:
    return view.memory.coverage(committable.transaction) is Coverage.DECIDED


def _find_rolled_back(
    savepoint: Savepoint, view: LogView, last_attempt: AttemptId
) -> list[Committable]:
    """Return the savepoint's undecided transactions that a later attempt has rolled back."""
    if savepoint.completed.attempt == last_attempt:
        return []
    return [c for c in committables_of(savepoint.completed) if not _is_decided(c, view)]


def _is_after(decided: CompletedCheckpoint, taken: CompletedCheckpoint) -> bool:
    """Return True if a checkpoint was decided after a savepoint was taken.

    The next attempt reuses the numbers of checkpoints that were taken but not decided, so attempts
    are compared first.
    """
    return (decided.attempt, decided.checkpoint) > (taken.attempt, taken.checkpoint)


def _is_same_cut(savepoint: Savepoint, view: LogView) -> bool:
    """Return True if the last decision commits what the savepoint holds, and nothing more."""
    last = view.completed[-1]
    return _positions(savepoint.completed) == _positions(last) and not _find_decided_since(
        savepoint, view
    )


def _find_decided_since(savepoint: Savepoint, view: LogView) -> list[Committable]:
    """Return the known decided transactions that were prepared after the savepoint's barrier.

    The last transactions of each sink are known, even if the log has pruned their decision.
    """
    taken = savepoint.completed
    known = {c.transaction: c for c in view.memory.committed}
    for completed in view.completed:
        known |= {c.transaction: c for c in committables_of(completed)}
    emission_ended = savepoint.kind.ends_emission
    return [
        committable
        for transaction, committable in known.items()
        if (transaction.attempt, transaction.checkpoint) > (taken.attempt, taken.checkpoint)
        # A writer may prepare an empty transaction: the savepoint's own attempt emitted no rows.
        and not (emission_ended and transaction.attempt == taken.attempt)
    ]


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
    since = _find_decided_since(savepoint, view)
    sinks = sorted({c.transaction.sink_id for c in since} or view.sinks)
    rows = f", with at least {sum(c.rows for c in since)} rows" if since else ""
    return (
        f"{name}, taken in attempt {savepoint.completed.attempt}, is older than the last decision"
        f" of the log, checkpoint {last.checkpoint} of attempt {last.attempt}: checkpoints"
        f" {later[0].checkpoint}-{last.checkpoint} were committed since{rows} under sink id"
        f" {', '.join(map(repr, sinks)) or 'none'}, and their rows would be written a second"
        f" time. Start without the savepoint to continue from checkpoint {last.checkpoint}. Start"
        " with allow_rewind=True only once the targets are restored to the savepoint, or if"
        " duplicate rows are acceptable"
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
    in_flight = {snapshot.subtask: snapshot.in_flight for snapshot in stated}
    return tuple(
        SubtaskSnapshot(ref, tuple(operators[ref].values()), in_flight=in_flight.get(ref, ()))
        for ref in sorted(operators)
    )
