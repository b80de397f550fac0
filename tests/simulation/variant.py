"""Where a broken variant of the protocol can differ; the plain one is what production runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onceflow.core.protocol.alignment import AlignmentMode
from onceflow.core.protocol.commits import CommitQueue
from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.recovery import RecoveryPlan, plan_recovery


@dataclass(frozen=True)
class Variant:
    """One set of choices; each field's default is the right one."""

    name: str = "as built"
    coordinator: type[CheckpointCoordinator] = CheckpointCoordinator
    queue: type[CommitQueue] = CommitQueue
    plan: Callable[..., RecoveryPlan] = plan_recovery
    mode: AlignmentMode = AlignmentMode.ALIGNED
    fenced: bool = True
    judged: bool = True
    commit_at_pre_commit: bool = False
    ack_before_prepare: bool = False
    roll_back_on_abort: bool = False
    attempt_in_name: bool = True
    slot_checks_attempt: bool = True
    position_shift: int = 0
    snapshot_late: bool = False
    reuse_undecided_files: bool = False
    sweep: bool = True
    lost_is_committed: bool = False
    unknown_is_committed: bool = False
