"""The points where a broken variant of the protocol differs. The plain one runs in production."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.channels import Inputs
from tests.simulation.stages import group_of
from tests.simulation.targets import Row

from onceflow.core.commit import whole_checkpoints
from onceflow.core.commit.planner import CommitPlan, plan_commits
from onceflow.core.commit.queue import CommitQueue
from onceflow.core.errors import StorageError
from onceflow.core.protocol.checkpoints.alignment import (
    AlignmentMode,
    BarrierAlignment,
    SourceBarriers,
)
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.in_flight import OutputQueue
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, retain_ledger_from
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.protocol.log.rules import CheckpointDecided, LogView, next_decision
from onceflow.core.protocol.log.target_records import require_not_behind
from onceflow.core.protocol.loops.attempt import AttemptLoop
from onceflow.core.protocol.loops.slot import SlotLoop
from onceflow.core.protocol.savepoints.savepoint import (
    build_first_decision,
    check_savepoint,
    check_targets,
    is_put_back,
    lacks_own_commits,
    sinks_to_import,
    view_before,
)
from onceflow.core.protocol.splits import broadcast_copy, with_lists

if TYPE_CHECKING:
    from tests.simulation.world import World


def _nothing(world: World) -> None:
    """The world is as it is."""


def _own_rows(chain: str, rows: list[Row], groups: range) -> list[Row]:
    """Return those that belong to a subtask with `groups`."""
    return [row for row in rows if group_of(chain, row) in groups]


@dataclass(frozen=True)
class Variant:
    """One set of choices; each field's default is the right one."""

    name: str = "as built"
    coordinator: type[CheckpointCoordinator] = CheckpointCoordinator
    attempt_loop: type[AttemptLoop] = AttemptLoop
    slot_loop: type[SlotLoop] = SlotLoop
    queue: type[CommitQueue] = CommitQueue
    pre_commits: type[whole_checkpoints.PreCommits] = whole_checkpoints.PreCommits
    global_queue: type[whole_checkpoints.GlobalCommitQueue] = whole_checkpoints.GlobalCommitQueue
    global_plan: Callable[..., whole_checkpoints.GlobalRecoveryPlan] = (
        whole_checkpoints.plan_global_recovery
    )
    plan: Callable[..., CommitPlan] = plan_commits
    check_savepoint: Callable[..., None] = check_savepoint
    check_targets: Callable[..., None] = check_targets
    require_not_behind: Callable[..., None] = require_not_behind
    restored_from: Callable[..., CompletedCheckpoint] = build_first_decision
    is_put_back: Callable[..., bool] = is_put_back
    lacks_own_commits: Callable[..., bool] = lacks_own_commits
    sinks_to_import: Callable[..., frozenset[str]] = sinks_to_import
    view_before: Callable[..., LogView] = view_before
    memory_at: Callable[[LogView, CompletedCheckpoint], LogMemory] = LogView.memory_at
    with_lists: Callable[..., CompletedCheckpoint] = with_lists
    next_decision: Callable[[LogView, CompletedCheckpoint], CheckpointDecided] = next_decision
    alignment: type[BarrierAlignment] = BarrierAlignment
    retain_ledger_from: Callable[..., CheckpointId] = retain_ledger_from
    prepare: Callable[[World], None] = _nothing
    """Breaks what is not the protocol's own."""
    mode: AlignmentMode | None = None
    overwrites: bool = False
    takes_what_exists: bool = False
    lost_reply_is_refusal: bool = False
    exists_is_anothers: bool = False
    judged: bool = True
    commit_at_pre_commit: bool = False
    ack_before_prepare: bool = False
    roll_back_on_abort: bool = False
    attempt_in_name: bool = True
    slot_checks_attempt: bool = True
    position_shift: int = 0
    snapshot_late: bool = False
    reuse_undecided_files: bool = False
    trusts_locations: bool = False
    """True if a slot takes a directory for that of a savepoint because it has the same name."""
    looks_for_mark_once: bool = False
    """True if a slot does not look for the mark again when its files are written."""
    sweep: bool = True
    lost_is_committed: bool = False
    unknown_is_committed: bool = False
    taken_for_refused: type[Exception] = StorageError
    """What else a driver takes for a decision that is certainly not in the log."""
    failed_abort_is_done: bool = False
    failed_listing_is_empty: bool = False
    confirms_unheard: bool = False
    requests_survive: bool = True
    reads_undecided_splits: bool = False
    waits_for_whole: bool = True
    """True if the coordinator knows of the driver's own committers."""
    whole_before_decision: bool = False
    drops_decided: bool = False
    inputs: type[Inputs] = Inputs
    output_queue: type[OutputQueue[Row]] = OutputQueue
    source_barriers: type[SourceBarriers] = SourceBarriers
    replayed: Callable[[str, list[Row], range], list[Row]] = _own_rows
    broadcast_copy: Callable[[int, int], int] = broadcast_copy
    acks_before_in_flight: bool = False
    barrier_waits_its_turn: bool = False
    lists_first_only: bool = False
    names_tables_alike: bool = False
    checks_sinks: bool = True
    """True if a start without a sink that it has not handed over is refused."""
    asks_retired: bool = True
    settles_early: bool = False
    """True if a retired sink is forgotten before the sweep has asked it once more."""
    retired_plan: Callable[..., CommitPlan] | None = None
