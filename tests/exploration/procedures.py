"""The job of a world, and the procedures of its drivers that ask servers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.exploration import savepoints
from tests.exploration.calls import Calls
from tests.exploration.ports import SinkOfWorld, VersionCommitter, graph_of, open_log
from tests.exploration.savepoints import Known
from tests.exploration.slot import NEVER_S, SINK, SOURCE, SPLITS, encode_position
from tests.simulation.variant import Variant

from onceflow.core import errors
from onceflow.core.commit.whole_checkpoints import GlobalCommit
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import CheckpointKind
from onceflow.core.protocol.checkpoints.schedule import CheckpointSettings
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SubtaskSnapshot,
)
from onceflow.core.protocol.committables import CommitOutcome
from onceflow.core.protocol.ids import GENESIS, AttemptId, SubtaskRef, committer_ref
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.log.target_records import newest_attempt, require_not_behind
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.storage.log.decision_log import ClaimedLog

TIMEOUT_S = 1000.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The job that a driver runs."""

    slots: int
    rows: int
    sinks: tuple[SinkOfWorld, ...]
    checkpoints: int
    """The number of checkpoints on request, over all attempts, before the one that ends the job."""
    sink_slots: int = 0
    """The number of slots with a sink subtask of their own. 0: sources write to the sinks."""
    overtakes: bool = False
    """True if barriers overtake rows at once."""
    savepoint: CheckpointKind | None = None
    """The kind of the savepoint that is requested once."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The result of one procedure of a driver that starts the job from a savepoint."""

    view: LogView | None
    known: Known
    error: errors.OnceflowError | None = None
    targets_agree: bool = False


def _no_staging(sink_id: str) -> None:
    del sink_id


def open_recovery(asked: Calls, plan: Plan, view: LogView) -> SinkRecovery:
    storage: Any = SimpleNamespace(log="log", log_id="log", staging=_no_staging)
    log = ClaimedLog(open_log(asked), view)
    return SinkRecovery(graph_of(asked, plan.sinks), {}, "job", log, storage, NEVER_S)


def claim(asked: Calls, plan: Plan, owner: str, mine: LogView | None) -> LogView:
    """Claim the log. `mine` is the log as this driver has claimed it before."""
    log = open_log(asked)
    if mine is not None:
        return ClaimedLog(log, mine).claim_again().view
    sinks = [sink.sink_id for sink in plan.sinks]
    return log.claim("host:1", sinks, drawn=owner).view


def find_restore_point(asked: Calls, plan: Plan, view: LogView, compares: bool) -> LogView:
    """Compare the log with the targets once, and decide checkpoint 0. Mirrors `LogOwner`."""
    log = open_log(asked)
    claimed = ClaimedLog(log, view)
    if compares:
        records = open_recovery(asked, plan, view).ask_targets()
        require_not_behind(view, records, "log")
        if (newest := newest_attempt(records)) >= view.attempt:
            claimed = claimed.claim_above(newest)
    if not claimed.view.completed:
        claimed.append(genesis_of(plan, claimed.attempt))
    return claimed.view


def claim_from_savepoint(
    asked: Calls, plan: Plan, owner: str, mine: LogView | None, known: Known
) -> Begun:
    """Claim the log as `claim` does, for a job that starts from the savepoint."""
    log = open_log(asked)
    restore = savepoints.open_restore(asked, log, known)
    sinks = [sink.sink_id for sink in plan.sinks]
    try:
        if mine is not None:
            claimed = ClaimedLog(log, mine).claim_again()
        else:
            savepoint = restore.read_checked(log.read(), owner)

            def check(view: LogView) -> None:
                restore.check_before_claim(view, owner)

            claimed = log.claim("host:1", sinks, savepoint, check, drawn=owner)
    except errors.OnceflowError as error:
        return Begun(mine, savepoints.known_of(restore), error)
    return Begun(claimed.view, savepoints.known_of(restore))


def find_restore_point_from_savepoint(
    asked: Calls, plan: Plan, view: LogView, compares: bool, known: Known
) -> Begun:
    """Compare the log with the targets, and decide that the job begins from the savepoint."""
    log = open_log(asked)
    claimed = ClaimedLog(log, view)
    restore = savepoints.open_restore(asked, log, known)
    agrees = not compares
    try:
        if compares:
            recovery = open_recovery(asked, plan, view)
            in_doubt = recovery.list_in_doubt(restore.list_doubtful_sinks(view))
            records = recovery.ask_targets()
            all_tell = len(records) == recovery.target_count
            restore.check_targets(view, records, in_doubt, all_tell=all_tell)
            if (newest := newest_attempt(records)) >= view.attempt:
                claimed = claimed.claim_above(newest)
            agrees = True
        restore.begin(claimed, None, 0)
        if not claimed.view.completed:
            claimed.append(genesis_of(plan, claimed.attempt))
    except errors.OnceflowError as error:
        return Begun(claimed.view, savepoints.known_of(restore), error, agrees)
    return Begun(claimed.view, savepoints.known_of(restore), None, agrees)


def check_owned(asked: Calls, view: LogView) -> None:
    """Raise Fenced if another driver owns the job: then that is why the attempt failed."""
    ClaimedLog(open_log(asked), view).check_owned()


def recover(asked: Calls, plan: Plan, view: LogView) -> None:
    """Open and recover the sinks."""
    recovery = open_recovery(asked, plan, view)
    recovery.open()
    recovery.recover(view.completed[-1])


def sweep(asked: Calls, plan: Plan, view: LogView) -> None:
    """Roll back what slots of older attempts have prepared since the recovery."""
    open_recovery(asked, plan, view).sweep(view.completed[-1])


def append(asked: Calls, view: LogView, completed: CompletedCheckpoint) -> LogView:
    """Decide a checkpoint."""
    log = ClaimedLog(open_log(asked), view)
    log.append(completed)
    return log.view


def commit_whole(asked: Calls, sink_id: str, commit: GlobalCommit) -> CommitOutcome:
    committer = VersionCommitter(asked, sink_id)
    return committer.commit_checkpoint(commit.checkpoint, commit.committables)


def genesis_of(plan: Plan, attempt: AttemptId) -> CompletedCheckpoint:
    elements = tuple(encode_position(split, 0) for split in range(plan.slots))
    operators = (OperatorSnapshot(SOURCE, lists={SPLITS: elements}),)
    snapshots = (SubtaskSnapshot(SubtaskRef(SOURCE, 0), operators),)
    return CompletedCheckpoint(GENESIS, attempt, plan.slots, plan.slots, snapshots, 0, 0)


def positions_of(completed: CompletedCheckpoint) -> tuple[bytes, ...]:
    """Return the encoded position of each split."""
    return tuple(e for _, o in completed.operator(SOURCE) for e in o.lists[SPLITS])


def _wall_ms() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Coordinators:
    """Builds the coordinator of an attempt, as `AttemptContext` does."""

    plan: Plan
    view: LogView
    variant: Variant

    def __call__(self, now_s: float) -> CheckpointCoordinator:
        plan, view = self.plan, self.view
        sources = frozenset(SubtaskRef(SOURCE, index) for index in range(plan.slots))
        subtasks = sources | {SubtaskRef(SINK, index) for index in range(plan.sink_slots)}
        overtakes_after_s = 0.0 if plan.overtakes else None
        whole = [sink.sink_id for sink in plan.sinks if sink.kind == "versions"]
        return self.variant.coordinator(
            CheckpointSettings(
                None,
                timeout_s=TIMEOUT_S,
                tolerable_failures=9,
                overtakes_after_s=overtakes_after_s,
            ),
            attempt=view.attempt,
            subtasks=subtasks,
            sources=sources,
            parallelism=plan.slots,
            max_parallelism=plan.slots,
            retained=view.completed[-1:],
            next_checkpoint=view.next_checkpoint,
            now_s=now_s,
            wall_ms=_wall_ms,
            committers=frozenset(map(committer_ref, whole))
            if self.variant.waits_for_whole
            else frozenset(),
        )
